"""Keeps the recording of a rollout's terminal: the asciicast that the tool `tmux` makes, which ends with the lease of its slot."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_client import AsyncLease, SandboxError

log = logging.getLogger(__name__)

#: How long fetching a recording may take, in seconds. The slot is held meanwhile.
FETCH_TIMEOUT_S = 60.0
#: The end of the names of files with recordings, which asciinema's player knows.
SUFFIX = ".cast"
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NOT_IN_FILE_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class KeptRecording:
    """What became of the recording of one rollout.

    Args:
        path: the file with the recording; None if it could not be kept.
        error: one sentence about why it could not be kept; empty if it was.
    """

    path: Path | None
    error: str = ""


def find_recording(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of the recording that the metadata of a result name; None if they name none."""
    name = metadata.get("recording")
    return name if isinstance(name, str) and _NAME.fullmatch(name) else None


def recording_file_name(trajectory_id: str) -> str:
    """Return the name of the file for the recording of a trajectory."""
    return _NOT_IN_FILE_NAMES.sub("-", trajectory_id) + SUFFIX


def find_recordings_folder(folder: str | None, groups_file: str | None) -> Path | None:
    """Return the folder for the recordings of an environment: the one that is set, else one beside the file with its groups; None if there is neither."""
    if folder is not None:
        return Path(folder)
    return None if groups_file is None else Path(groups_file).with_suffix(".recordings")


async def keep_recording(lease: AsyncLease, name: str, target: Path, *, timeout_s: float = FETCH_TIMEOUT_S) -> KeptRecording:
    """Copy a recording to a file. A recording that cannot be kept costs no rollout: the value and the log say why.

    Args:
        lease: the lease of the slot, which must still be held.
        name: the name of the recording.
        target: the file; its folder is created.
        timeout_s: how long this may take, in seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.to_thread(target.parent.mkdir, parents=True, exist_ok=True)
            await lease.get_recording_to(target, name)
    except TimeoutError:
        return _not_kept(target, f"the service has not sent it within {timeout_s:g} s")
    except SandboxError as error:
        return _not_kept(target, error.detail)
    except OSError as error:
        return _not_kept(target, f"{error.filename or target}: {error.strerror or error}")
    return KeptRecording(target)


def _not_kept(target: Path, reason: str) -> KeptRecording:
    error = f"the recording of the terminal could not be kept: {reason}"
    log.warning("%s: %s", target.stem, error)
    return KeptRecording(None, error)
