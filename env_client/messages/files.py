"""Messages about the files of a slot. The content of an upload is not part of the message; it is sent separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from env_client.messages.message import (
    ASCIICAST,
    BYTES,
    GZIP,
    JSON,
    TRANSFER_TIMEOUT_S,
    Message,
    Response,
    ignore_body,
    path_with_query,
    quote_path_segment,
    read_list,
    read_object,
)
from env_client.values import FileEntry, read_value

T = TypeVar("T")


def get_file_message(lease_id: str, path: str) -> Message[bytes]:
    """Build `GET /v1/leases/{id}/files`."""
    return _transfer_message("GET", path_with_query(_lease_path(lease_id, "files"), path=path), lambda response: response.body, accept=BYTES)


def put_file_message(lease_id: str, path: str, mode: int | None) -> Message[None]:
    """Build `PUT /v1/leases/{id}/files`.

    Raises:
        TypeError: the mode is not a number.
    """
    if not isinstance(mode, int | None):
        raise TypeError(f"mode is a number, such as 0o644, not {mode!r}")
    octal_mode = None if mode is None else f"{mode:04o}"
    return _transfer_message("PUT", path_with_query(_lease_path(lease_id, "files"), path=path, mode=octal_mode), ignore_body, content_type=BYTES)


def list_files_message(lease_id: str, path: str, recursive: bool) -> Message[tuple[FileEntry, ...]]:
    """Build `GET /v1/leases/{id}/files/list`."""
    return _transfer_message("GET", path_with_query(_lease_path(lease_id, "files/list"), path=path, recursive=1 if recursive else None), _parse_entries)


def get_recording_message(lease_id: str, name: str) -> Message[bytes]:
    """Build `GET /v1/leases/{id}/recordings/{name}`."""
    path = f"{_lease_path(lease_id, 'recordings')}/{quote_path_segment(name)}"
    return _transfer_message("GET", path, lambda response: response.body, accept=ASCIICAST)


def get_archive_message(lease_id: str, path: str) -> Message[bytes]:
    """Build `GET /v1/leases/{id}/archive`."""
    return _transfer_message("GET", path_with_query(_lease_path(lease_id, "archive"), path=path), lambda response: response.body, accept=GZIP)


def put_archive_message(lease_id: str, path: str) -> Message[None]:
    """Build `PUT /v1/leases/{id}/archive`."""
    return _transfer_message("PUT", path_with_query(_lease_path(lease_id, "archive"), path=path), ignore_body, content_type=GZIP)


def _lease_path(lease_id: str, resource: str) -> str:
    return f"/v1/leases/{quote_path_segment(lease_id)}/{resource}"


def _transfer_message(method: str, path: str, parse: Callable[[Response], T], *, accept: str = JSON, content_type: str = JSON) -> Message[T]:
    return Message(
        method=method,
        path=path,
        parse=parse,
        accept=accept,
        content_type=content_type,
        response_timeout_s=TRANSFER_TIMEOUT_S,
        read_timeout_s=TRANSFER_TIMEOUT_S,
    )


def _parse_entries(response: Response) -> tuple[FileEntry, ...]:
    return tuple(read_value(FileEntry, item) for item in read_list(read_object(response), "entries"))
