"""Builds the agent's zipapp from this package, byte for byte the same each time: `python -m sandbox_server.agent.build TARGET`.

`python TARGET` is the agent, `python TARGET connect SOCKET` a relay to one, `python TARGET spawn FD` a process that forks agents.

It contains the sources, and beside them the modules as this interpreter compiles them. With these, the same interpreter starts the agent in half the time;
any other interpreter ignores them and compiles the sources.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import sys
import zipfile
from pathlib import Path

from sandbox_server.agent.bytecode import compiled

_ROOT = Path(__file__).resolve().parent
_PREFIX = "sandbox_server/agent"
_STUB = b"""import sys

if sys.argv[1:2] == ["connect"]:
    from sandbox_server.agent import relay

    relay.main(sys.argv[2:])
if sys.argv[1:2] == ["spawn"]:
    from sandbox_server.agent import spawner

    spawner.main(sys.argv[2:])

from sandbox_server.agent.__main__ import main

sys.exit(main())
"""
#: The name of the member that says which sources the agent was built from.
BUILD_DIGEST = "%s/build_digest.txt" % _PREFIX
_DATE = (1980, 1, 1, 0, 0, 0)


def _digest(sources: dict[str, bytes]) -> bytes:
    """Return a text that is different for each content of the sources."""
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(b"%s %d\n" % (name.encode(), len(source)))
        digest.update(source)
    return digest.hexdigest().encode()


def _members() -> dict[str, bytes]:
    sources = {"sandbox_server/__init__.py": b""}
    for path in sorted(_ROOT.rglob("*.py")):
        sources["%s/%s" % (_PREFIX, path.relative_to(_ROOT).as_posix())] = path.read_bytes()
    members = {"__main__.py": _STUB, BUILD_DIGEST: _digest(sources)}
    for name, source in sources.items():
        members[name] = source
        members[name + "c"] = compiled(name, source)
    return members


@functools.lru_cache(maxsize=None)  # the content does not change while this process runs
def content() -> bytes:
    """Return the bytes of the zipapp."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(_members().items()):
            info = zipfile.ZipInfo(name, _DATE)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return buffer.getvalue()


def build(target: Path) -> None:
    """Write the zipapp. A process that reads `target` sees either the old content or all of the new one.

    Args:
        target: the file to write or replace.
    """
    data = content()
    temporary = target.with_name(".%s.%d" % (target.name, os.getpid()))
    temporary.write_bytes(data)
    temporary.chmod(0o644)
    temporary.replace(target)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else "agent.pyz"))
