"""Checks of arguments that several tools share."""

from __future__ import annotations

from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs

MAX_ENV_BYTES = 128 << 10
MAX_ENV_NAMES = 1000


def check_text(name: str, value: Any, max_bytes: int) -> bytes:
    """Return the bytes of a text argument.

    Raises:
        InvalidArgs: the argument is not a string, has half a surrogate pair, or is too long.
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


def check_text_without_nul(name: str, value: Any, max_bytes: int) -> bytes:
    """Return the bytes of a text argument that is passed on as a C string.

    Raises:
        InvalidArgs: as for `check_text`, and if the text holds a NUL.
    """
    data = check_text(name, value, max_bytes)
    if b"\0" in data:
        raise InvalidArgs("%s holds a NUL" % name)
    return data


def check_names(tool: str, args: Mapping[str, Any], required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Check that every required argument is there, and no unknown one.

    Raises:
        InvalidArgs: an argument is missing or unknown; the text names it.
    """
    for name in args:
        if name not in required and name not in optional:
            raise InvalidArgs("%s has no argument %s" % (tool, ascii(name)))
    for name in required:
        if args.get(name) is None:
            raise InvalidArgs("%s needs the argument %s" % (tool, name))


def parse_environment(value: Any) -> dict[str, str]:
    """Check environment variables.

    Raises:
        InvalidArgs: a name or value is not valid, or there are too many; the text names it.
    """
    if not isinstance(value, dict):
        raise InvalidArgs("env must be an object of strings")
    if len(value) > MAX_ENV_NAMES:
        raise InvalidArgs("env has %d names; at most %d are taken" % (len(value), MAX_ENV_NAMES))
    size_bytes = 0
    for name, text in value.items():
        size_bytes += len(check_text_without_nul("env", name, MAX_ENV_BYTES))
        size_bytes += len(check_text_without_nul("env.%s" % ascii(name)[1:-1], text, MAX_ENV_BYTES))
        if not name or "=" in name:
            raise InvalidArgs("env has the name %s, which no environment variable can have" % ascii(name))
    if size_bytes > MAX_ENV_BYTES:
        raise InvalidArgs("env has %d bytes; at most %d are taken" % (size_bytes, MAX_ENV_BYTES))
    return value
