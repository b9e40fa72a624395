"""Parses the items of run-batches. A wrong item refuses the whole request before anything runs, and the error says which item it is."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from sandbox_server.api.contract.parse import problem_of_args
from sandbox_server.api.contract.requests import Base64File, ProgramBody, RunBatchHeader, first_problem
from sandbox_server.api.limits import Limits, limit_sentence
from sandbox_server.core.errors import InvalidRequest
from sandbox_server.dispatch.run_batch.values import Program, RunBatchRequest
from sandbox_server.telemetry import TOOLS

MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255


class ItemProblem(Exception):
    """What is wrong with an item. `field`: the field of the item, empty for the item as a whole."""

    def __init__(self, field: str, problem: str, **extra: Any) -> None:
        super().__init__(problem)
        self.field = field
        self.problem = problem
        self.extra = extra


def run_batch_request(header: RunBatchHeader, tenant: str, default_pool: str) -> RunBatchRequest:
    """Make the request of a header."""
    return RunBatchRequest(
        tenant=tenant,
        pool=header.pool if header.pool is not None else default_pool,
        run_id=header.run_id,
        request_key=header.request_key,
        max_parallel=header.max_parallel,
    )


def item_error(index: int, field: str, problem: str, **extra: Any) -> InvalidRequest:
    """The error for a wrong item.

    Args:
        index: its place in the request.
        field: the field of the item that is wrong; empty for the item as a whole.
        problem: what is wrong with it.
        extra: further members of the problem document.
    """
    name = (f"items.{index}.{field}" if field else f"items.{index}").encode(errors="backslashreplace").decode()
    return InvalidRequest(f"{name}: {problem}", field=name, index=index, **extra)


def parse_program(item: Any, index: int, limits: Limits, max_timeout_s: float) -> Program:
    """Parse one item.

    Args:
        item: its JSON value.
        index: its place in the request.
        limits: the limits of the service.
        max_timeout_s: the longest `timeout_s` that the pool takes, in seconds.

    Raises:
        InvalidRequest: a field other than `args` is wrong. Wrong arguments are the result of the item, because a model writes them.
    """
    try:
        return _program(item, limits, max_timeout_s)
    except ItemProblem as found:
        raise item_error(index, found.field, found.problem, **found.extra) from None


def _program(item: Any, limits: Limits, max_timeout_s: float) -> Program:
    if not isinstance(item, dict):
        raise ItemProblem("", "must be an object")
    args = item.get("args")
    try:
        body = ProgramBody.model_validate({**item, "args": None})
    except ValidationError as error:
        field, sentence = first_problem(error, ProgramBody.model_fields)
        raise ItemProblem(_own_field(field), sentence.removeprefix(f"{field}: ")) from None
    if body.tool not in TOOLS:
        raise ItemProblem("tool", f"there is no tool {body.tool[:64]!a}")
    if body.timeout_s is not None and body.timeout_s > max_timeout_s:
        raise ItemProblem("timeout_s", f"at most the pool's max_timeout_s, {max_timeout_s:.10g}")
    args, problem = _checked_args(args, limits)
    return Program(
        tool=body.tool,
        args=args,
        args_problem=problem,
        files=_files(body.files, limits),
        timeout_s=body.timeout_s,
        output_limit_bytes=body.output_limit_bytes,
        artifacts=_artifacts(body.artifacts),
        allow_network=body.allow_network,
    )


def _own_field(field: str) -> str:
    """The field that an error of pydantic is about, without the alternatives of a union."""
    return field.removesuffix(".str").removesuffix(".Base64File")


def _checked_args(args: Any, limits: Limits) -> tuple[Mapping[str, Any], str | None]:
    if args is None:
        return {}, None
    if not isinstance(args, dict):
        return {}, "args: should be an object"
    problem = problem_of_args(args, limits)
    return ({}, problem) if problem is not None else (args, None)


def _files(given: Mapping[str, str | Base64File], limits: Limits) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    size_bytes = 0
    for path, content in given.items():
        field = f"files.{path[:100]}"
        _check_file_path(field, path)
        files[path] = _content(field, content)
        size_bytes += len(files[path])
        if size_bytes > limits.run_batch_item_bytes:
            raise ItemProblem("files", limit_sentence(limits, "run_batch_item_bytes"), limit="run_batch_item_bytes")
    folders = {"/".join(parts[:count]) for parts in (path.split("/") for path in files) for count in range(1, len(parts))}
    for path in files:
        if path in folders:
            raise ItemProblem(f"files.{path[:100]}", "is a file and also the folder of another one")
    return files


def _content(field: str, content: str | Base64File) -> bytes:
    try:
        return content.encode() if isinstance(content, str) else base64.b64decode(content.base64, validate=True)
    except UnicodeEncodeError:
        raise ItemProblem(field, "contains half of a surrogate pair, which UTF-8 cannot encode") from None
    except (binascii.Error, ValueError):
        raise ItemProblem(field, "is not valid base64") from None


def _check_file_path(field: str, path: str) -> None:
    _check_path_text(field, path)
    if path.startswith("/"):
        raise ItemProblem(field, "must be a path relative to the workspace")
    if any(part in ("", ".", "..") for part in path.split("/")):
        raise ItemProblem(field, "must not have an empty part, `.` or `..`")


def _artifacts(paths: list[str]) -> tuple[str, ...]:
    for number, path in enumerate(paths):
        _check_path_text(f"artifacts.{number}", path)
        if ".." in path.split("/"):
            raise ItemProblem(f"artifacts.{number}", "must not have `..`")
    if len(set(paths)) != len(paths):
        raise ItemProblem("artifacts", "names a path twice")
    return tuple(paths)


def _check_path_text(field: str, path: str) -> None:
    if not path or "\0" in path:
        raise ItemProblem(field, "must be a path, not empty and without NUL")
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        raise ItemProblem(field, "contains half of a surrogate pair, which UTF-8 cannot encode") from None
    if len(encoded) > MAX_PATH_BYTES or any(len(part) > MAX_NAME_BYTES for part in encoded.split(b"/")):
        raise ItemProblem(field, f"must have at most {MAX_PATH_BYTES} bytes, and {MAX_NAME_BYTES} in each name")
