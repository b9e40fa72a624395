"""Fails when a file of the agent does not parse as Python 3.8, or imports anything but the standard library and itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AGENT = ROOT / "sandbox_server" / "agent"


def imported(tree: ast.AST) -> Iterator[str]:
    """The absolute names a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def complaints(path: Path) -> Iterator[str]:
    """What is wrong with one file of the agent."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path), feature_version=(3, 8))
    except SyntaxError as error:
        yield f"{path.relative_to(ROOT)}:{error.lineno}: not Python 3.8: {error.msg}"
        return
    for name in imported(tree):
        own = name == "sandbox_server.agent" or name.startswith("sandbox_server.agent.")
        if not own and name.split(".")[0] not in sys.stdlib_module_names:
            yield f"{path.relative_to(ROOT)}: imports {name}; the agent has the standard library and itself only"


def main() -> int:
    """Check every file of the agent; the exit code says whether all were well."""
    found = [line for path in sorted(AGENT.rglob("*.py")) for line in complaints(path)]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
