"""The programs of `run_many`, their results, and the message that runs them."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from env_client.errors import BadAnswer, InvalidRequest
from env_client.messages.message import NDJSON, STREAM_READ_TIMEOUT_S, Message, decode_json, encode_json, ignore_body, without_none
from env_client.type_checks import check_type
from env_client.values import Result, read_value

#: How long all programs of one request may take together, in seconds.
MAX_RUN_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program that runs in a fresh slot of its own: its files are written, a tool runs it, and its artifacts are read.

    Args:
        command: the command for bash, in place of `tool` and `args`.
        tool: the tool that runs the program.
        args: the arguments of the tool. They may be anything that a model has written: a mistake in them is reported in the result.
        files: the files that are written into the workspace first, by paths relative to it; text, or bytes.
        timeout_s: how long the program may run, in seconds; default the pool's `default_timeout_s`.
        output_limit_bytes: how much of its output the result contains; default 50,000.
        artifacts: the paths of the files that are read at its end.
        allow_network: False: the program has no network.

    Raises:
        InvalidRequest: a field has the wrong type, or `command` is given beside `tool` or `args`.
    """

    command: str | None = None
    tool: str | None = None
    args: Any = None
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    timeout_s: float | None = None
    output_limit_bytes: int | None = None
    artifacts: Sequence[str] = ()
    allow_network: bool | None = None

    def __post_init__(self) -> None:
        for name in ("command", "tool"):
            check_type(name, getattr(self, name), str, type(None))
        check_type("files", self.files, Mapping)
        check_type("timeout_s", self.timeout_s, int, float, type(None))
        check_type("output_limit_bytes", self.output_limit_bytes, int, type(None))
        check_type("allow_network", self.allow_network, bool, type(None))
        if isinstance(self.artifacts, str) or not isinstance(self.artifacts, Sequence):
            raise InvalidRequest(f"artifacts: must be a list of paths, not {self.artifacts!r:.100}", extra={"field": "artifacts"})
        if (self.command is None) == (self.tool is None) or (self.command is not None and self.args is not None):
            raise InvalidRequest("command: give command, or tool and args", extra={"field": "command"})

    def to_json(self) -> dict[str, Any]:
        """Return the program as an item of the HTTP contract."""
        files = {path: {"base64": base64.b64encode(content).decode("ascii")} if isinstance(content, bytes) else content for path, content in self.files.items()}
        fields = {
            "args": {"command": self.command} if self.command is not None else self.args,
            "files": files or None,
            "timeout_s": self.timeout_s,
            "output_limit_bytes": self.output_limit_bytes,
            "artifacts": list(self.artifacts) or None,
            "allow_network": self.allow_network,
        }
        return {"tool": self.tool or "bash", **without_none(fields)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A file that was read at the end of a program: its content, or the code and the sentence of the error."""

    content: bytes | None = None
    code: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult(Result):
    """The result of a program: that of its call, its place among the programs, and its artifacts by path."""

    index: int
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)


def new_request_key() -> str:
    """Return a random request key."""
    return f"k-{secrets.token_hex(12)}"


def encode_programs(programs: Iterable[Program | Mapping[str, Any]]) -> list[bytes]:
    """Encode programs as lines of a request.

    Args:
        programs: programs, or items of the HTTP contract.

    Raises:
        InvalidRequest: a program contains something that JSON cannot express.
        TypeError: an item is neither a `Program` nor a mapping.
    """
    lines = []
    for index, program in enumerate(programs):
        if not isinstance(program, Program | Mapping):
            raise TypeError(f"run_many takes programs, such as Program(command='python3 main.py'), but item {index} is {program!r:.100}")
        lines.append(encode_json(program.to_json() if isinstance(program, Program) else dict(program)))
    return lines


def run_batch_message(lines: Sequence[bytes], header: Mapping[str, Any]) -> Message[None]:
    """Build `POST /v1/run-batch` as NDJSON in both directions. `parse_program_line` reads the lines of the response.

    Args:
        lines: the programs, as `encode_programs` returns them.
        header: the other fields of the request.
    """
    return Message(
        method="POST",
        path="/v1/run-batch",
        body=b"\n".join((encode_json(header), *lines)),
        content_type=NDJSON,
        accept=NDJSON,
        parse=ignore_body,
        response_timeout_s=MAX_RUN_S,
        read_timeout_s=STREAM_READ_TIMEOUT_S,
    )


def parse_program_line(line: bytes) -> ProgramResult:
    """Parse one line of a response.

    Raises:
        BadAnswer: the line is not the result of a program.
    """
    document = decode_json(line)
    artifacts = document.get("artifacts", {}) if isinstance(document, dict) else None
    if not isinstance(artifacts, dict):
        raise BadAnswer("the service sent the result of a program without an object of artifacts")
    return read_value(ProgramResult, {**document, "artifacts": {path: _artifact(path, found) for path, found in artifacts.items()}})


def _artifact(path: str, found: Any) -> Artifact:
    encoded = found.get("base64") if isinstance(found, dict) else None
    if not isinstance(encoded, str):
        return Artifact(code=str(found.get("code") or ""), error=str(found.get("error") or "")) if isinstance(found, dict) else Artifact(error=str(found))
    try:
        return Artifact(content=base64.b64decode(encoded, validate=True))
    except ValueError as error:
        raise BadAnswer(f"the artifact {path} is not valid base64") from error
