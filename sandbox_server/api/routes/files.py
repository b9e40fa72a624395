"""The routes for the files of a leased slot: single files, lists of folders, and whole trees as archives."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.body import read_chunks
from sandbox_server.api.contract.describe import BINARY, LEASE_ID, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.contract.parse import flag, query
from sandbox_server.api.contract.render import BYTES_TYPE, json_response
from sandbox_server.api.contract.responses import FilesAnswer
from sandbox_server.api.limits import limit_sentence
from sandbox_server.api.paging import PAGE_NAMES, PAGE_PARAMETERS, PageRequest, page_document
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.streams import StreamResponse
from sandbox_server.core.errors import InvalidRequest

router = APIRouter(route_class=RawRoute, tags=["files"])

FILE_CODES = (*WITH_TOKEN, *WITH_LEASE, "file_not_found", "file_error", "invalid_request", "quota_exceeded", "not_implemented", "backend_unavailable")
GZIP_TYPE = "application/gzip"
MAX_PATH_CHARS = 4096
PATH_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_PATH_CHARS}
PATH = parameter("path", PATH_SCHEMA, "a path in the workspace or /tmp; a relative path is one in the workspace", required=True)
MODE = parameter("mode", {"type": "string", "pattern": "^0?[0-7]{3}$"}, "permissions of the written file, octal")
RECURSIVE = parameter("recursive", {"type": "string", "enum": ["0", "1"]}, "1: list everything below the folder")


def _path(asked: dict[str, str]) -> str:
    path = asked.get("path", "")
    if not path:
        raise InvalidRequest("path: missing", field="path")
    if len(path) > MAX_PATH_CHARS:
        raise InvalidRequest(f"path: longer than {MAX_PATH_CHARS} characters", field="path")
    return path


def _mode(asked: dict[str, str]) -> int | None:
    text = asked.get("mode")
    if text is None:
        return None
    digits = text.removeprefix("0o").lstrip("0") or "0"
    if len(digits) > 3 or not all(digit in "01234567" for digit in digits):
        raise InvalidRequest("mode: must be octal, 000 to 777", field="mode")
    return int(digits, 8)


async def _stream_content(request: Request, content: AsyncGenerator[bytes, None], media_type: str) -> StreamResponse:
    """Respond with content that is read while it is sent."""
    service = service_of(request)
    reservation = await service.dispatcher.response_budget.reserve_stream(tenant_of(request).name)
    return StreamResponse(content, media_type, stall_s=service.limits.answer_stall_s, on_end=reservation.release)


@router.get(
    "/v1/leases/{lease_id}/files", **describe_route("Read a file", codes=FILE_CODES, parameters=(LEASE_ID, PATH), content={BYTES_TYPE: {"schema": BINARY}})
)
async def get_file(request: Request) -> Response:
    """Read one file."""

    def announce_size(size_bytes: int) -> None:
        response.announce_size(size_bytes)  # the response exists by then, because it reads the content

    path = _path(query(request, ("path",)))
    content = service_of(request).files.read_file(tenant_of(request).name, request.path_params["lease_id"], path, announce_size)
    response = await _stream_content(request, content, BYTES_TYPE)
    return response


@router.put(
    "/v1/leases/{lease_id}/files",
    **describe_route(
        "Write a file",
        codes=(*FILE_CODES, "payload_too_large", "draining"),
        status=204,
        parameters=(LEASE_ID, PATH, MODE),
        body_content={BYTES_TYPE: {"schema": BINARY}},
    ),
)
async def put_file(request: Request) -> Response:
    """Write one file. A file of that path is replaced atomically."""
    service = service_of(request)
    asked = query(request, ("path", "mode"))
    chunks = read_chunks(request, service.limits, "upload_bytes")
    await service.files.write_file(tenant_of(request).name, request.path_params["lease_id"], _path(asked), _mode(asked), chunks)
    return Response(status_code=204)


@router.get(
    "/v1/leases/{lease_id}/files/list",
    **describe_route("List a folder", codes=FILE_CODES, parameters=(LEASE_ID, PATH, RECURSIVE, *PAGE_PARAMETERS), response=FilesAnswer),
)
async def list_files(request: Request) -> Response:
    """List a folder: one page of it, or all of it if there is no `limit`."""
    service = service_of(request)
    asked = query(request, ("path", "recursive", *PAGE_NAMES))
    most = service.limits.list_entries
    page = PageRequest.of(asked, service.limits, default=most)
    entries, is_cut = await service.files.list_folder(
        tenant_of(request).name,
        request.path_params["lease_id"],
        _path(asked),
        recursive=flag(asked.get("recursive"), "recursive"),
        max_entries=most,
    )
    if is_cut:
        why = f"path: {limit_sentence(service.limits, 'list_entries')}, or their names are too long together: list the folders below it one by one"
        raise InvalidRequest(why, field="path", limit="list_entries")
    shown, cursor = page.cut(entries, lambda entry: str(entry.get("path")))
    return json_response(page_document("entries", shown, cursor))


@router.get(
    "/v1/leases/{lease_id}/archive",
    **describe_route("Read a folder as an archive", codes=FILE_CODES, parameters=(LEASE_ID, PATH), content={GZIP_TYPE: {"schema": BINARY}}),
)
async def get_archive(request: Request) -> Response:
    """Read a folder and everything in it as a gzipped tar archive."""
    path = _path(query(request, ("path",)))
    return await _stream_content(request, service_of(request).files.read_archive(tenant_of(request).name, request.path_params["lease_id"], path), GZIP_TYPE)


@router.put(
    "/v1/leases/{lease_id}/archive",
    **describe_route(
        "Unpack an archive into a folder",
        codes=(*FILE_CODES, "payload_too_large", "draining"),
        status=204,
        parameters=(LEASE_ID, PATH),
        body_content={GZIP_TYPE: {"schema": BINARY}},
    ),
)
async def put_archive(request: Request) -> Response:
    """Unpack a gzipped tar archive into a folder."""
    service = service_of(request)
    path = _path(query(request, ("path",)))
    chunks = read_chunks(request, service.limits, "upload_bytes")
    await service.files.write_archive(tenant_of(request).name, request.path_params["lease_id"], path, chunks)
    return Response(status_code=204)
