"""The same operations in a bare interpreter, the way init runs them, down to the oldest Python that a sandbox may have."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_server.agent.inslot import child
from tests.unit.agent.inslot.asking import Slot

TOOLS = Path(child.__file__).parent
REPOSITORY = TOOLS.parents[2]
SLOT_SIDE = ("arguments", "atomic", "child", "confine", "files", "pack", "reply", "search", "tarstream", "transfer", "unpack", "walk")

SCRIPT = """
import sys
root, op, args, ctx, out, source = eval(sys.stdin.readline())
sys.path.insert(0, root)
from sandbox_server.agent.inslot import child
child.import_operation(op)
# From here on the child may no longer be able to read any module.
sys.meta_path.clear()
sys.path.clear()
child.run_operation(op, args, ctx, out, source)
"""


def old_python() -> str | None:
    beside = sorted(Path(sys.base_prefix).parent.glob("3.8.*/bin/python3.8"))  # where pyenv keeps several
    for candidate in [shutil.which("python3.8"), *map(str, beside)]:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


@pytest.fixture(params=["this", "oldest"])
def interpreter(request: pytest.FixtureRequest) -> str:
    if request.param == "this":
        return sys.executable
    found = old_python()
    if found is None:
        pytest.skip("no Python 3.8 on this machine")
    return found


def ask(interpreter: str, slot: Slot, op: str, data: bytes = b"", **args: object) -> tuple[dict[str, object], bytes]:
    source_r, source_w = os.pipe()
    out_r, out_w = os.pipe()
    process = subprocess.Popen([interpreter, "-I", "-S", "-c", SCRIPT], stdin=subprocess.PIPE, pass_fds=(out_w, source_r))
    os.close(out_w)
    os.close(source_r)
    assert process.stdin is not None
    process.stdin.write(repr((str(REPOSITORY), op, args, slot.ctx, out_w, source_r)).encode() + b"\n")
    process.stdin.close()
    with open(source_w, "wb") as feed:
        feed.write(data)
    with open(out_r, "rb") as file:
        answer = file.read()
    assert process.wait() == 0
    length = int.from_bytes(answer[:4], "big")
    header = json.loads(answer[4 : 4 + length])
    assert header["ok"], header
    return header, answer[4 + length :]


def test_every_operation_runs_in_a_bare_interpreter_and_imports_nothing_late(slot: Slot, interpreter: str) -> None:
    ask(interpreter, slot, "write_file", path="d/a.txt", content="one\ntwo\n", mode="0640")
    ask(interpreter, slot, "edit_file", path="d/a.txt", old="two", new="2")
    assert ask(interpreter, slot, "read_file", path="d/a.txt", offset=1, limit=5)[1] == b"2\n"
    Path(os.fsdecode(os.fsencode(slot.workspace) + b"/d/\xe9")).symlink_to("a.txt")
    assert ask(interpreter, slot, "list_files", recursive=True)[1] == b"d/\nd/a.txt\n$'d/\\xe9' -> a.txt\n"
    assert ask(interpreter, slot, "search_files", pattern=r"^\d", glob="*.{txt,md}")[1] == b"d/a.txt:2:2\n"
    assert ask(interpreter, slot, "route_put", b"x" * 100_000, path="d/b")[0]["size_bytes"] == 100_000
    assert ask(interpreter, slot, "route_get", path="d/b")[1] == b"x" * 100_000
    assert len(str(ask(interpreter, slot, "route_list", path="d")[0]["entries"])) > 100
    packed = ask(interpreter, slot, "route_archive_get", path="d")[1]
    assert ask(interpreter, slot, "route_archive_put", packed, path="e")[0]["entries"] == 3
    assert (slot.workspace / "e/a.txt").read_text() == "one\n2\n"


@pytest.mark.parametrize("name", SLOT_SIDE)
def test_the_syntax_is_that_of_python_3_8(name: str) -> None:
    ast.parse((TOOLS / f"{name}.py").read_text(), feature_version=(3, 8))


def test_reading_a_file_imports_little() -> None:
    imports = "import sys; before = set(sys.modules); from sandbox_server.agent.inslot import child; child.import_operation('read_file')"
    code = f"{imports}; print(*set(sys.modules) - before)"
    shown = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {code}"], capture_output=True, text=True, check=True
    )
    assert not {"re", "json", "typing", "tarfile", "enum", "contextlib", "signal"} & set(shown.stdout.split())
