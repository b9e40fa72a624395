"""Tests of the documents: their code runs, their links have targets, their make targets exist."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from env_client._version import __version__
from tests.docs.blocks import DOCUMENTS, IDS, KINDS, Blocks
from tests.hostile.attacks import ATTACKS
from tests.support import tables
from tests.support.service import Service
from tests.support.users import ROOT

README = ROOT / "README.md"
FENCE = re.compile(r"^( *)```(.*)$", re.MULTILINE)


def heading_anchors(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_code_block_runs(path: Path, service: Service, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in service.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)

    # The README runs the installed program, as its reader does. What a start of that program does is the same in all documents.
    Blocks(tmp_path, None if path == README else tmp_path_factory.mktemp("programs")).run(path)


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_code_block_has_a_language_that_is_tested(path: Path) -> None:
    fences = [language for _, language in FENCE.findall(path.read_text(encoding="utf-8"))]

    assert set(fences[::2]) <= KINDS
    assert set(fences[1::2]) <= {""}


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_link_has_a_target(path: Path) -> None:
    missing = []
    for link in re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        there = path.parent / target if target else path
        if "://" not in link and not (there.exists() and (not anchor or anchor in heading_anchors(there))):
            missing.append(link)

    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=IDS)
def test_every_make_target_named_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))

    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", path.read_text(encoding="utf-8")))

    assert named - targets == set()


def test_the_first_screen_of_the_readme_shows_the_two_commands() -> None:
    first_screen = README.read_text(encoding="utf-8").splitlines()[:24]

    assert [command for command in ("make demo", "make test", "make serve") if not any(command in line for line in first_screen)] == []


def test_every_page_is_in_the_list_of_pages() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")

    assert [path.name for path in sorted(ROOT.glob("docs/*.md")) if path.name != "README.md" and f"({path.name})" not in index] == []


def test_the_isolation_table_of_the_readme_has_every_attack() -> None:
    rows = tables.parse(tables.read("isolation"))

    assert [attack.title for attack in ATTACKS if attack.title not in {row[0] for row in rows}] == []


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

    assert f"## [{__version__}]" in changelog or "## [Unreleased]" in changelog
