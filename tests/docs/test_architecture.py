"""The architecture page names modules, folders and functions that exist."""

from __future__ import annotations

import re

from tests.support.users import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE = "\n".join([*re.findall(r"```mermaid\n(.*?)```", PAGE, re.DOTALL), *re.findall(r"`([^`\n]+)`", PAGE)])
PACKAGES = ("sandbox_server", "env_client", "environments")
PATHS = sorted(set(re.findall(r"(?<![\w/.])(?:[a-z_]+/)*(?:[a-z_]+\.(?:py|md|toml)|(?<=/))(?![\w/])", CODE)) - {""})
WORDS = sorted(set(re.findall(r"(?<![\w/.])[a-z]+(?:_[a-z]+)+(?![\w/.])", CODE)))


def find(path: str) -> bool:
    """Return whether there is such a file or folder, seen from the repository or from any folder of a package."""
    return (ROOT / path).exists() or any(any(ROOT.glob(f"{package}/**/{path}")) for package in PACKAGES)


def test_every_path_exists() -> None:
    assert len(PATHS) > 50
    assert [path for path in PATHS if not find(path)] == []


def test_every_identifier_exists() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for folder in (*PACKAGES, "tests") for path in ROOT.glob(f"{folder}/**/*.py"))
    folders = {path.name for path in ROOT.iterdir()}

    assert len(WORDS) > 5
    assert [word for word in WORDS if word not in folders and not re.search(rf"\b{word}\b", sources)] == []
