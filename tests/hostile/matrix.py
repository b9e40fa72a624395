"""The table of what holds in which mode: filled by the attacks, held against the README."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hostile.hostile_harness import HostileHarness

WORDS = {"held": "held", "weak": "**not held**", "refused": "refused"}


@dataclass
class Matrix:
    """What each attack came to, by `mode as user`."""

    rows: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    def record(self, key: str, title: str, harness: HostileHarness, outcome: str) -> None:
        """One attack in one harness came to this."""
        self.rows.setdefault(key, (title, {}))[1][harness.name] = outcome

    def table(self) -> str:
        """The rows as Markdown."""
        columns = sorted({column for _, outcomes in self.rows.values() for column in outcomes})
        lines = ["| a slot tries to | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for title, outcomes in self.rows.values():
            lines.append(f"| {title} | " + " | ".join(WORDS[outcomes[c]] if c in outcomes else "–" for c in columns) + " |")
        return "\n".join(lines) + "\n"

    def save(self, folder: Path) -> None:
        """Leave the table where `make matrix` finds it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "isolation.md").write_text(self.table())
        (folder / "isolation.json").write_text(json.dumps({key: outcomes for key, (_, outcomes) in self.rows.items()}, indent=1))
