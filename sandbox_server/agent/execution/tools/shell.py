"""The tool `bash`: a fresh shell for every call."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs

MAX_COMMAND_BYTES = 1 << 20
MAX_STDIN_BYTES = 10 << 20
MAX_ENV_BYTES = 128 << 10
MAX_ENV_NAMES = 1000
MAX_CWD_BYTES = 4095
# One argument of a program may have 128 KiB; a longer command is read from a file in memory instead.
_ARGUMENT_BYTES = 100_000
_FROM_FD = b'eval "exec 3<&-\n$(</dev/fd/3)"'


@dataclasses.dataclass(frozen=True)
class Command:
    """What to spawn: the shell's arguments, and what it reads."""

    args: tuple[bytes, bytes]
    env: Mapping[str, str] | None
    cwd: str | None
    stdin: bytes | None
    script: bytes | None


def encode(name: str, value: Any, max_bytes: int) -> bytes:
    """The bytes of a text argument.

    Raises:
        InvalidArgs: it is no text, holds a NUL or half a character, or is too long.
    """
    if not isinstance(value, str):
        raise InvalidArgs("%s must be a string" % name)
    try:
        data = value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidArgs("%s holds half a surrogate pair, which stands for no character" % name) from None
    if len(data) > max_bytes:
        raise InvalidArgs("%s has %d bytes; at most %d are taken" % (name, len(data), max_bytes))
    return data


def plain(name: str, value: Any, max_bytes: int) -> bytes:
    """The bytes of an argument that ends up in a C string."""
    data = encode(name, value, max_bytes)
    if b"\0" in data:
        raise InvalidArgs("%s holds a NUL" % name)
    return data


def check_names(tool: str, args: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Every required argument is there and no unknown one.

    Raises:
        InvalidArgs: naming the argument.
    """
    for name in args:
        if name not in required and name not in optional:
            raise InvalidArgs("%s has no argument %s" % (tool, ascii(name)))
    for name in required:
        if args.get(name) is None:
            raise InvalidArgs("%s needs the argument %s" % (tool, name))


def _environment(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InvalidArgs("env must be an object of strings")
    if len(value) > MAX_ENV_NAMES:
        raise InvalidArgs("env has %d names; at most %d are taken" % (len(value), MAX_ENV_NAMES))
    size = 0
    for name, text in value.items():
        size += len(plain("env", name, MAX_ENV_BYTES)) + len(plain("env.%s" % ascii(name)[1:-1], text, MAX_ENV_BYTES))
        if not name or "=" in name:
            raise InvalidArgs("env has the name %s, which cannot be one" % ascii(name))
    if size > MAX_ENV_BYTES:
        raise InvalidArgs("env has %d bytes; at most %d are taken" % (size, MAX_ENV_BYTES))
    return value


def command(text: Any, args: Mapping[str, Any], name: str = "command") -> Command:
    """A shell command as what to spawn, checked.

    Raises:
        InvalidArgs: naming the argument that does not fit.
    """
    data = plain(name, text, MAX_COMMAND_BYTES)
    env = args.get("env")
    cwd = args.get("cwd")
    stdin = args.get("stdin")
    long = len(data) > _ARGUMENT_BYTES
    if cwd is not None:
        plain("cwd", cwd, MAX_CWD_BYTES)
    return Command(
        args=(b"-c", _FROM_FD if long else data),
        env=_environment(env) if env is not None else None,
        cwd=cwd or None,
        stdin=encode("stdin", stdin, MAX_STDIN_BYTES) if stdin is not None else None,
        script=data if long else None,
    )


def bash(args: Mapping[str, Any]) -> Command:
    """The arguments of `bash`, checked."""
    check_names("bash", args, ("command",), ("cwd", "env", "stdin"))
    return command(args["command"], args)
