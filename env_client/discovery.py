"""Finding the address and the token of the service: from arguments, from the environment, or from the state folder of this machine's service."""

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
    """The address and the token of a service.

    Args:
        url: the address.
        token: the token; None if the service requires none.
        source: where the address comes from, for messages.
    """

    url: str
    token: str | None
    source: str = field(default="the caller", compare=False)


def find_service(
    url: str | None = None, token: str | None = None, *, environ: Mapping[str, str] = os.environ, uid: int | None = None, root_dir: Path = ROOT_STATE_DIR
) -> Endpoint:
    """Find the service: `url`, else `SANDBOX_URL`, else `server.json` and `token` in the state folder of this machine's service.

    Args:
        url: the address, if it is known.
        token: the token; default `SANDBOX_TOKEN`, and for this machine's service the token in its state folder.
        environ: the environment variables.
        uid: the user whose state folder is searched; default the user of this process.
        root_dir: the state folder of a service that runs as root.

    Raises:
        ServiceNotFound: no address is known, or the file that contains it cannot be read.
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
    searched = state_dirs(environ, uid, root_dir)
    raise ServiceNotFound(
        "no sandbox service is known: set SANDBOX_URL (and SANDBOX_TOKEN), or start one on this machine with "
        f"`python -m sandbox_server serve` (looked for server.json in {' and '.join(map(str, searched))})"
    )


def _token_of_this_machine(url: str, environ: Mapping[str, str], uid: int | None, root_dir: Path) -> str | None:
    """Return the token of this machine's service if it announced this address, else None. The token is never sent to another address."""
    found = local_service(environ, uid=uid, root_dir=root_dir)
    return found.token if found is not None and found.url == url else None


def local_service(environ: Mapping[str, str] = os.environ, *, uid: int | None = None, root_dir: Path = ROOT_STATE_DIR) -> Endpoint | None:
    """Return the endpoint of this machine's service; None if no service runs.

    Arguments and errors are those of `find_service`.
    """
    for state_dir in state_dirs(environ, os.getuid() if uid is None else uid, root_dir):
        url = _read_server_json(state_dir)
        if url is not None:
            return Endpoint(url, (environ.get("SANDBOX_TOKEN") or "").strip() or _read_token(state_dir), str(state_dir / "server.json"))
    return None


def state_dirs(environ: Mapping[str, str], uid: int, root_dir: Path = ROOT_STATE_DIR) -> list[Path]:
    """Return the state folders that this machine's service may use, the most likely one first."""
    named = environ.get("SANDBOX_STATE_DIR")
    if named:
        return [Path(named)]
    home_state = Path(environ.get("XDG_STATE_HOME") or Path(environ.get("HOME") or "/") / ".local" / "state") / "sandbox-pool"
    return [root_dir, home_state] if uid == 0 else [home_state, root_dir]


def _read_server_json(state_dir: Path) -> str | None:
    """Return the address in `server.json`.

    Returns:
        None if the file is missing, if this user may not read it, or if the service that wrote it was killed.

    Raises:
        ServiceNotFound: the file contains no address.
    """
    path = state_dir / "server.json"
    try:
        document = json.loads(path.read_bytes())
        url = document["url"]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServiceNotFound(f"{path} does not say where the service is ({error!r}): set SANDBOX_URL") from error
    return None if _process_has_ended(document.get("pid")) else str(url).rstrip("/")


def _process_has_ended(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # the process exists and belongs to another user
        return False
    return False


def _read_token(state_dir: Path) -> str | None:
    path = state_dir / "token"
    try:
        return path.read_text().strip() or None
    except FileNotFoundError:
        return None  # the tokens are in the service's settings, or it requires none
    except OSError as error:
        raise ServiceNotFound(f"the service's token in {path} cannot be read ({error.strerror}): set SANDBOX_TOKEN") from error
