"""What the documents say is true: their code runs, their links lead somewhere, their make targets exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser

from env_client._version import __version__
from tests.hostile.attacks import ATTACKS
from tests.support import tables
from tests.support.service import Service
from tests.support.users import ROOT

DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
BASH_TIMEOUT_S = 60


class BashBlocks:
    """Runs ```bash blocks in one folder, one after the other; a ```text block after one is what it printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed = ""

    def run(self, example: Example) -> None:
        script = f"set -euo pipefail\n{example.parsed}"
        done = subprocess.run(["bash", "-c", script], cwd=self.folder, capture_output=True, text=True, timeout=BASH_TIMEOUT_S, check=False)
        assert done.returncode == 0, f"line {example.line}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        self.printed = done.stdout

    def compare(self, example: Example) -> None:
        assert self.printed.strip() == str(example.parsed).strip(), f"line {example.line}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_code_block_runs(path: Path, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in service.environ.items():
        monkeypatch.setenv(name, value)
    blocks = BashBlocks(tmp_path)
    parsers = [PythonCodeBlockParser(), CodeBlockParser(language="bash", evaluator=blocks.run), CodeBlockParser(language="text", evaluator=blocks.compare)]

    for example in Document.parse(str(path), *parsers).examples():
        example.evaluate()


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_link_to_a_file_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))

    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]

    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    named = set(re.findall(r"(?:`|\$ )make ([a-z]+)", path.read_text(encoding="utf-8")))

    assert named - targets == set()


def test_the_first_screen_of_the_readme_shows_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:24]

    assert [command for command in ("make demo", "make test", "make serve") if not any(command in line for line in first_screen)] == []


def test_the_settings_file_of_the_readme_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block
    config = tmp_path / "pools.yaml"
    config.write_text(block.group(1), encoding="utf-8")
    monkeypatch.setenv("SANDBOX_CONFIG", str(config))

    done = subprocess.run([sys.executable, "-m", "sandbox_server", "check-config"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


def test_the_isolation_table_of_the_readme_has_every_attack() -> None:
    rows = tables.parse(tables.read("isolation"))

    assert [attack.title for attack in ATTACKS if attack.title not in {row[0] for row in rows}] == []


def test_the_changelog_knows_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert f"## [{__version__}]" in changelog or "## [Unreleased]" in changelog
