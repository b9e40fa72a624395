"""The languages of the code blocks in the documents, and how a block of each language is tested.

bash      is run; its variables and functions are available in the next block of the same document, as in a reader's shell
text      must equal the output of the previous block, line by line; `…` matches any text within a line
json      must match the output of the previous block: the same names and types, and the same values for members with a closed set of values
python    is run; all blocks of a document form one program. A block whose first line is a comment with the name of a file, such as `# my_env.py`, is
          written to that file instead, for the blocks after it
yaml      must be a settings file that the service accepts
ini       must be a systemd unit that starts the service with known settings
console   is not run; it may contain only `make` with existing targets, `pip install` with existing extras, `source .venv/bin/activate`, and the programs of a
          training, which run until they are ended: `run-api`, an environment with `serve`, and the small trainer,
          with the lines that it prints
mermaid   is a diagram, which is not tested
"""

from __future__ import annotations

import configparser
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from environments.demo.small_trainer import make_parser
from sandbox_server.__main__ import main as check_settings
from sandbox_server.settings.environment import EnvironmentModel
from tests.support.prepared.cli import prepared_cli
from tests.support.prepared.environments import environments_python
from tests.support.prepared.service import prepared_python
from tests.support.service import end_sandboxes_left
from tests.support.users import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
KINDS = frozenset({"bash", "text", "json", "python", "yaml", "ini", "console", "mermaid"})
TIMEOUT_S = 100
#: The members of a JSON document whose values must be equal: they are from closed sets, or an example must not show a wrong one.
EXACT = frozenset({"code", "status", "reason", "fault", "success", "exit_code", "state", "truncated", "encoding", "allow_network", "cache", "clean", "origin"})
#: Members with varying content, whose names are not compared.
OPEN = frozenset({"modes", "limits", "evidence", "metadata", "labels", "spec", "capabilities", "data"})
#: What the small trainer prints.
TRAINING_OUTPUT = re.compile(r"step \d+: mean reward \d\.\d\d, loss [+-]\d\.\d{3}")
FILE_NAME = re.compile(r"# (\w+\.py)\n")
#: Programs of a training that run until they are ended.
TRAINING_PROGRAM = re.compile(
    r"run-api --host 127\.0\.0\.1 --port \d+|python (?P<file>\S+_env\.py) serve( +--\S+ \S+)*|python -m environments\.demo\.small_trainer.*"
)
RESTORE = 'shopt -s expand_aliases; if [ -f "$DOC_STATE" ]; then . "$DOC_STATE"; fi; set -a'
SAVE = '{ export -p | grep -vE "^declare -x (DOC_STATE|PATH)="; declare -f; } > "$DOC_STATE"'


class Blocks:
    """Tests the blocks of one document.

    Args:
        folder: the folder in which the blocks run.
        programs: a folder for a program `sandbox` that the prepared process carries out, as it does the service and that of `embedded`; None: the installed
            programs are run.
    """

    def __init__(self, folder: Path, programs: Path | None = None) -> None:
        self._folder = folder
        self._programs = programs
        self._printed = ""
        self._groups: list[int] = []
        self._evaluate_python = PythonEvaluator()

    def run(self, path: Path) -> None:
        """Test every block of a document in order."""
        tried = {
            "python": self._python,
            "bash": self._bash,
            "text": self._text,
            "json": self._json,
            "yaml": self._yaml,
            "ini": self._ini,
            "console": self._console,
        }
        parsers = [CodeBlockParser(language=language, evaluator=one) for language, one in tried.items()]
        try:
            for example in Document.parse(str(path), *parsers).examples():
                example.evaluate()
        finally:
            for group in self._groups:  # processes that a block has left running
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)
            end_sandboxes_left(self._folder / "state")

    def _python(self, example: Example) -> str | None:
        named = FILE_NAME.match(str(example.parsed))
        if named is None:
            with pytest.MonkeyPatch.context() as patch:
                if self._programs is not None:
                    patch.setattr(sys, "executable", str(prepared_python()))
                return self._evaluate_python(example)
        (self._folder / named[1]).write_text(str(example.parsed), encoding="utf-8")
        return None

    def _bash(self, example: Example) -> None:
        script = f"{RESTORE}\nset -euo pipefail\n{str(example.parsed).rstrip()}\n{SAVE}"
        environ = os.environ | {"DOC_STATE": str(self._folder / ".doc-state"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        if self._programs is not None:
            prepared_cli().install(self._programs / "sandbox")
            # A service that a block kills is a real process, which has ended when the shell has waited for it.
            folders = [self._programs] if "kill -KILL" in script else [self._programs, environments_python().parent]
            environ["PATH"] = ":".join([*map(str, folders), environ["PATH"]])
        with subprocess.Popen(["bash", "-c", script], cwd=self._folder, env=environ, text=True, **options) as shell:
            self._groups.append(shell.pid)
            try:
                self._printed, complaint = shell.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(shell.pid, signal.SIGKILL)
                self._printed, complaint = shell.communicate()
                complaint += f"not finished after {TIMEOUT_S} s"
        assert shell.returncode == 0, f"line {example.line}: exit code {shell.returncode}\n{self._printed}{complaint}"

    def _text(self, example: Example) -> None:
        said = [re.escape(line.rstrip()).replace("…", ".*") for line in str(example.parsed).strip().splitlines()]
        printed = [line.rstrip() for line in self._printed.strip().splitlines()]
        assert len(said) == len(printed), f"line {example.line}: printed was\n{self._printed}"
        for pattern, line in zip(said, printed, strict=True):
            assert re.fullmatch(pattern, line), f"line {example.line}: printed was {line!r}"

    def _json(self, example: Example) -> None:
        found = differences(json.loads(str(example.parsed)), json.loads(self._printed), "")
        assert found == [], f"line {example.line}: {found}\nprinted was\n{self._printed}"

    def _yaml(self, example: Example) -> None:
        config = self._folder / "settings.yaml"
        config.write_text(str(example.parsed), encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ:
                if name.startswith("SANDBOX_"):
                    patch.delenv(name)
            patch.setenv("SANDBOX_CONFIG", str(config))
            patch.chdir(self._folder)
            complaint = io.StringIO()
            with contextlib.redirect_stderr(complaint), contextlib.redirect_stdout(io.StringIO()):
                status = check_settings(["check-config"])
        assert status == 0, f"line {example.line}: {complaint.getvalue()}"

    def _ini(self, example: Example) -> None:
        unit = configparser.ConfigParser(interpolation=None, strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(str(example.parsed))
        assert " -m sandbox_server serve" in unit["Service"]["ExecStart"]
        named = set(re.findall(r"^Environment=SANDBOX_([A-Z_]+)=", str(example.parsed), re.MULTILINE))
        assert named <= set(EnvironmentModel.model_fields), f"line {example.line}"

    def _console(self, example: Example) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        for line in str(example.parsed).replace("\\\n", " ").splitlines():
            if TRAINING_OUTPUT.fullmatch(line):
                continue
            command = line.removeprefix("$ ").partition("#")[0].strip()
            installed = re.fullmatch(r"pip install '?\.(?:\[([a-z,]+)\])?'?", command)
            possible = command.startswith("make ") or (installed and set((installed[1] or "cli").split(",")) <= set(extras))
            assert possible or command == "source .venv/bin/activate" or is_training_program(command), f"line {example.line}: {command}"


def is_training_program(command: str) -> bool:
    """Return whether a command is a program of a training. An environment must exist, and the small trainer must know the arguments."""
    found = TRAINING_PROGRAM.fullmatch(command)
    if found is None:
        return False
    if command.startswith("python -m"):
        make_parser().parse_args(shlex.split(command)[3:])
    return found["file"] is None or (ROOT / found["file"]).is_file()


def differences(said: Any, printed: Any, where: str) -> list[str]:
    """Return the paths at which the printed JSON does not match the JSON in the document."""
    name = where.rpartition(".")[2]
    if isinstance(said, dict) and isinstance(printed, dict):
        if name in OPEN or not said:
            return []
        odd = [f"{where}: {sorted(said.keys() ^ printed.keys())} on one side only"] if said.keys() != printed.keys() else []
        return odd + [one for key in said.keys() & printed.keys() for one in differences(said[key], printed[key], f"{where}.{key}")]
    if isinstance(said, list) and isinstance(printed, list):
        if said and not printed:
            return [f"{where}: nothing"]
        return [one for item in printed if said for one in differences(said[0] if len(said) != len(printed) else said[printed.index(item)], item, where)]
    numbers = isinstance(said, int | float) and isinstance(printed, int | float) and not isinstance(said, bool) and not isinstance(printed, bool)
    if not numbers and type(said) is not type(printed):
        return [f"{where}: {type(printed).__name__}, not {type(said).__name__}"]
    return [f"{where}: {printed!r}, not {said!r}"] if name in EXACT and said != printed else []
