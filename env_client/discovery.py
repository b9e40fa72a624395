"""Where the service is: said outright, by the environment, or by the service of this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from env_client.errors import ServiceNotFound

ROOT_STATE_DIR = Path("/var/lib/sandbox-pool")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service's address, and what opens it; no token where the service asks for none. `source` is who said so."""

    url: str
    token: str | None
    source: str = field(default="the caller", compare=False)


def find_service(
    url: str | None = None, token: str | None = None, *, environ: Mapping[str, str] = os.environ, uid: int | None = None, root_dir: Path = ROOT_STATE_DIR
) -> Endpoint:
    """Find the service: `url`, else `SANDBOX_URL`, else `server.json` and `token` in the state folder of this machine's service.

    Args:
        url: its address, if it is known.
        token: its token; default `SANDBOX_TOKEN`, and for this machine's service the one in its state folder.
        environ: the environment to look in.
        uid: whose state folder to look for; default this process's.
        root_dir: where a service that runs as root keeps its state.

    Raises:
        ServiceNotFound: nobody says where it is, or what says it cannot be read.
    """
    source = "the caller" if url else "SANDBOX_URL"
    url, token = (url or environ.get("SANDBOX_URL") or "").strip(), (token or environ.get("SANDBOX_TOKEN") or "").strip()
    if not token.isprintable():
        raise ServiceNotFound("the service's token must not hold line breaks or other control characters: set SANDBOX_TOKEN to the token alone")
    if url:
        if not url.startswith(("http://", "https://")) or not url.partition("://")[2].strip("/"):
            raise ServiceNotFound(f"the service's address must start with http:// or https://, not be {url!r}")
        if not token and source == "SANDBOX_URL":
            token = _token_of_this_machine(url.rstrip("/"), environ, uid, root_dir)
        return Endpoint(url.rstrip("/"), token or None, source)
    uid = os.getuid() if uid is None else uid
    found = local_service(environ, uid=uid, root_dir=root_dir)
    if found is not None:
        return found
    looked = state_dirs(environ, uid, root_dir)
    raise ServiceNotFound(
        "no sandbox service is known: set SANDBOX_URL (and SANDBOX_TOKEN), or start one on this machine with "
        f"`python -m sandbox_server serve` (looked for server.json in {' and '.join(map(str, looked))})"
    )


def _token_of_this_machine(url: str, environ: Mapping[str, str], uid: int | None, root_dir: Path) -> str | None:
    """The token of the service of this machine, if the address is its own. A token never goes to an address that its service did not name."""
    found = local_service(environ, uid=uid, root_dir=root_dir)
    return found.token if found is not None and found.url == url else None


def local_service(environ: Mapping[str, str] = os.environ, *, uid: int | None = None, root_dir: Path = ROOT_STATE_DIR) -> Endpoint | None:
    """The service of this machine; None where none runs.

    Args and errors: as `find_service`.
    """
    for state_dir in state_dirs(environ, os.getuid() if uid is None else uid, root_dir):
        url = _server_json(state_dir)
        if url is not None:
            return Endpoint(url, (environ.get("SANDBOX_TOKEN") or "").strip() or _token(state_dir), str(state_dir / "server.json"))
    return None


def state_dirs(environ: Mapping[str, str], uid: int, root_dir: Path = ROOT_STATE_DIR) -> list[Path]:
    """The state folders in which this machine's service may be, the likeliest first."""
    named = environ.get("SANDBOX_STATE_DIR")
    if named:
        return [Path(named)]
    home_state = Path(environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/") / ".local" / "state") / "sandbox-pool"
    return [root_dir, home_state] if uid == 0 else [home_state, root_dir]


def _server_json(state_dir: Path) -> str | None:
    """The address in `server.json`; None where there is no such file, it is not for us to see, or its service was killed and left it."""
    path = state_dir / "server.json"
    try:
        told = json.loads(path.read_bytes())
        url = told["url"]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceNotFound(f"{path} does not say where the service is ({error!r}): set SANDBOX_URL") from error
    return None if _is_gone(told.get("pid")) else str(url).rstrip("/")


def _is_gone(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _token(state_dir: Path) -> str | None:
    path = state_dir / "token"
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None  # tokens from the settings, or none at all: the service will say
    except OSError as error:
        raise ServiceNotFound(f"the service's token in {path} cannot be read ({error.strerror}): set SANDBOX_TOKEN") from error
