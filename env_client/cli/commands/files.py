"""`sandbox cp`, `sandbox ls` and `sandbox recording`."""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from env_client.cli.archives.packing import PackedFolder
from env_client.cli.archives.unpacking import unpack_archive
from env_client.cli.arguments import check_text, escape_invalid_bytes, read_lease
from env_client.cli.connection import connect_to_service
from env_client.cli.failures import Failure
from env_client.cli.printer import JsonFlag, Printer, format_size, format_time
from env_client.client import SandboxClient
from env_client.errors import FileError, FileNotFound
from env_client.leases import RECORDING
from env_client.values import FileEntry

_TYPE_BITS = {"directory": stat.S_IFDIR, "file": stat.S_IFREG, "symlink": stat.S_IFLNK}


def cp(
    source: Annotated[str, typer.Argument(metavar="SOURCE", hidden=True)],
    target: Annotated[str, typer.Argument(metavar="TARGET", hidden=True)],
    as_json: JsonFlag = False,
) -> None:
    """Copy a file or a folder into a slot, or out of one.

    A path in the slot is relative to the workspace, or absolute inside the workspace or /tmp. If the target is an existing folder, the source is copied
    into it, as cp does; `FOLDER/.` means the content of a folder. Write a local path with a colon as ./a:b. `-` is standard input or standard output;
    a folder of a slot is written there as a tar.gz.
    """
    printer = Printer(as_json)
    if not source or not target:
        raise Failure(f"{'TARGET' if source else 'SOURCE'} is empty", "check that the variable it comes from is set; `.` is the current folder")
    if as_json and target == "-":
        raise Failure("the file and the JSON document cannot both go to standard output", "leave out --json, or copy to a file")
    slot_target, slot_source = _parse_slot_path(target), _parse_slot_path(source)
    if (slot_target is None) == (slot_source is None):
        both = "both are in slots" if slot_target else "neither is in a slot"
        raise Failure(f"one of SOURCE and TARGET must be LEASE:PATH; {both}", "for example: sandbox cp notes.txt LEASE:notes.txt")
    with connect_to_service() as client:
        if slot_target is not None:
            path, left_out = _upload(client, source, *slot_target)
        else:
            assert slot_source is not None
            path, left_out = _download(client, *slot_source, target)
    if left_out:
        reason = "they are not files" if slot_target else "they lead out of the folder or are not files"
        printer.print_note(f"left out, because {reason}: {', '.join(left_out[:10])}")
    if as_json:
        printer.print_json({"source": source, "target": path, "left_out": left_out})


def recording(
    lease: Annotated[str, typer.Argument(metavar="LEASE", hidden=True)],
    target: Annotated[str, typer.Argument(metavar="[FILE]", hidden=True)] = RECORDING,
    as_json: JsonFlag = False,
) -> None:
    """Copy the recording of a lease's terminal into a local file, terminal.cast if none is named. `asciinema play FILE` plays it."""
    printer = Printer(as_json)
    lease_id = read_lease(lease)
    with connect_to_service() as client:
        try:
            size_bytes = client.get_recording_to(lease_id, RECORDING, target)
        except FileNotFound as error:
            raise Failure("the lease has no recording", "the first use of the tool tmux begins one", error.code) from error
        except IsADirectoryError as error:
            raise Failure(f"{target} is a folder", "name a file") from error
    if as_json:
        printer.print_json({"lease_id": lease_id, "target": target, "size_bytes": size_bytes})


def ls(
    folder: Annotated[str, typer.Argument(metavar="LEASE[:FOLDER]", hidden=True)],
    recursive: Annotated[bool, typer.Option("--recursive", "-R", help="Include all subfolders.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List a folder of a slot."""
    printer = Printer(as_json)
    lease_id, path = _parse_slot_path(folder) or (read_lease(folder), "")
    with connect_to_service() as client:
        entries = client.list_files(lease_id, path or ".", recursive=recursive)
    if as_json:
        printer.print_json({"entries": entries})
        return
    top = posixpath.commonpath([posixpath.dirname(entry.path) for entry in entries]) if entries else ""
    rows = [_entry_row(entry, top) for entry in entries]
    printer.print_table(("MODE", "SIZE>", "CHANGED", "NAME"), rows, empty="the folder is empty", wraps=False)


def _parse_slot_path(text: str) -> tuple[str, str] | None:
    """Return the lease id and the path of `LEASE:PATH`; None for a local path."""
    lease_id, colon, path = text.partition(":")
    if not colon or not lease_id or "/" in lease_id or lease_id == ".":
        return None
    check_text(f"the path {escape_invalid_bytes(path)}", path, "copy the folder that contains it: names inside a folder may be any bytes")
    return lease_id, path


def _remote_type(client: SandboxClient, lease_id: str, path: str) -> str | None:
    """Return whether a path of a slot is a `directory` or a `file`; None if it does not exist."""
    try:
        client.list_files(lease_id, path)
    except FileNotFound:
        return None
    except FileError as error:
        if error.extra.get("errno") == "ENOTDIR":
            return "file"
        raise
    return "directory"


def _is_executable(client: SandboxClient, lease_id: str, path: str) -> bool:
    """Return whether the owner of a file in a slot may execute it."""
    folder, name = posixpath.split(path)
    return any(posixpath.basename(entry.path) == name and _permission_bits(entry) & stat.S_IXUSR for entry in client.list_files(lease_id, folder or "."))


def _upload(client: SandboxClient, source: str, lease_id: str, path: str) -> tuple[str, list[str]]:
    if source == "-":
        if not path or path.endswith("/"):
            raise Failure("a copy of standard input needs a file name in the slot", "write LEASE:NAME")
        client.put_file(lease_id, path, sys.stdin.buffer)
        return f"{lease_id}:{path}", []
    local = Path(source)
    if not local.exists():
        raise Failure(f"there is no local file or folder {source}", "check the path; a path in a slot is written LEASE:PATH", "file_not_found")
    if not local.is_dir() and not local.is_file():
        raise Failure(f"{source} is neither a file nor a folder", "copy its content with: cat … | sandbox cp - LEASE:NAME", "file_error")
    kind = _remote_type(client, lease_id, path or ".")
    into = kind == "directory" or path.endswith("/")
    target = posixpath.join(path, local.resolve().name) if into and not source.endswith(("/.", "/./")) and source != "." else path or "."
    _parse_slot_path(f"{lease_id}:{target}")
    try:
        if local.is_file():
            client.put_file(lease_id, target, local, mode=local.stat().st_mode & 0o777)
            return f"{lease_id}:{target}", []
        if kind == "file":
            raise Failure(f"{path} is a file in the slot, and {source} a folder here", "copy to another name", "file_error")
        packed = PackedFolder(local)
        client.put_archive(lease_id, target, packed)
    except OSError as error:
        raise _failure_from_os_error(error, source) from error
    return f"{lease_id}:{target}", packed.skipped


def _download(client: SandboxClient, lease_id: str, path: str, target: str) -> tuple[str, list[str]]:
    kind = _remote_type(client, lease_id, path or ".")
    if target == "-":
        _to_stdout(client, lease_id, path, kind)
        return target, []
    name = posixpath.basename(posixpath.normpath(path or "."))
    local = Path(target)
    if local.is_dir() and name not in (".", "..") and not path.endswith("/."):
        local = local / name
    if not local.parent.is_dir():
        raise Failure(f"there is no local folder {local.parent}", "create it first", "file_not_found")
    try:
        if kind == "directory":
            return str(local), unpack_archive(client.stream_archive(lease_id, path or "."), local)
        if local.is_dir():
            raise Failure(f"{local} is a folder here, and {path} a file in the slot", "remove it, or copy to another name", "file_error")
        client.get_file_to(lease_id, path, local)
        if _is_executable(client, lease_id, path):
            mode = local.stat().st_mode
            local.chmod(mode | (mode & 0o444) >> 2)
    except OSError as error:
        raise _failure_from_os_error(error, str(local)) from error
    return str(local), []


def _to_stdout(client: SandboxClient, lease_id: str, path: str, kind: str | None) -> None:
    if kind == "directory" and os.isatty(1):
        raise Failure(f"{path or '.'} is a folder, and its archive is not for a terminal", "redirect it: sandbox cp LEASE:FOLDER - > folder.tar.gz")
    chunks = client.stream_archive(lease_id, path or ".") if kind == "directory" else client.stream_file(lease_id, path)
    for chunk in chunks:
        sys.stdout.buffer.write(chunk)
    sys.stdout.buffer.flush()


def _failure_from_os_error(error: OSError, path: str) -> Failure | OSError:
    if isinstance(error, BrokenPipeError):
        return error
    free = "" if error.errno != 28 else f" ({format_size(shutil.disk_usage('.').free)} free)"
    return Failure(f"{error.filename or path}: {error.strerror}{free}", "correct the cause, or copy to another place", "file_error")


def _permission_bits(entry: FileEntry) -> int:
    return int(entry.mode, 8) if isinstance(entry.mode, str) else entry.mode


def _format_mode(entry: FileEntry) -> str:
    bits = _permission_bits(entry)
    return stat.filemode(bits | _TYPE_BITS.get(entry.type, 0)) if entry.type in _TYPE_BITS else "?" + stat.filemode(bits)[1:]


def _entry_row(entry: FileEntry, top: str) -> tuple[str, ...]:
    size = format_size(entry.size_bytes) if entry.type == "file" else "-"
    return _format_mode(entry), size, format_time(entry.mtime), _display_name(entry, top)


def _display_name(entry: FileEntry, top: str) -> str:
    name = posixpath.relpath(entry.path, top) if top else entry.path
    return name + "/" if entry.type == "directory" else name
