"""What each slot-side operation takes. Pure, so that the agent refuses a bad call before it forks anything for it."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Tuple

    Check = Callable[[Any], Optional[str]]
    Spec = Dict[str, Tuple[bool, Check]]

MAX_PATH_BYTES = 4095  # the kernel's PATH_MAX without its NUL
MAX_CONTENT_BYTES = 16 << 20
MAX_PATTERN_CHARS = 10_000
MAX_LINES = 1_000_000_000
MAX_ENTRIES = 10_000  # of one answer of text
MAX_LISTED = 100_000  # of one answer of a file route
MAX_MATCHES = 10_000
MAX_SIZE_BYTES = 1 << 50


def _text(value: Any, max_bytes: int) -> str | None:
    if not isinstance(value, str):
        return f"must be a string, not {_kind(value)}"
    try:
        size_bytes = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which stands for no character"
    return f"is {int(size_bytes)} bytes long; at most {int(max_bytes)} are taken" if size_bytes > max_bytes else None


def _content(value: Any) -> str | None:
    return _text(value, MAX_CONTENT_BYTES)


def _path(value: Any) -> str | None:
    fault = _text(value, MAX_PATH_BYTES)
    if fault is None and not value:
        fault = "must not be empty"
    if fault is None and "\0" in value:
        fault = "must not hold a NUL"
    return fault


def _old(value: Any) -> str | None:
    return _content(value) if value != "" else "must not be empty; to make a new file use write_file"


def _pattern(value: Any) -> str | None:
    fault = _text(value, 4 * MAX_PATTERN_CHARS)
    if fault is None and not 0 < len(value) <= MAX_PATTERN_CHARS:
        fault = f"must have 1 to {int(MAX_PATTERN_CHARS)} characters, not {len(value)}"
    return fault


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, not {_kind(value)}"


def _count(low: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return f"must be a whole number, not {_kind(value)}"
        return None if low <= value <= high else f"must be from {int(low)} to {int(high)}"

    return check


def _mode(value: Any) -> str | None:
    # A number would be ambiguous: 644 written in decimal is not what `chmod 644` means.
    if isinstance(value, str) and 0 < len(value) <= 5 and not value.strip("01234567") and int(value, 8) <= 0o777:
        return None
    return 'must be a string of octal digits up to "0777", such as "0644"'


def _route_mode(value: Any) -> str | None:
    # The service has read the octal digits already.
    return _mode(value) if isinstance(value, str) else _count(0, 0o777)(value)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}.get(type(value), type(value).__name__)


OPERATIONS: Dict[str, Spec] = {
    "read_file": {"path": (True, _path), "offset": (False, _count(0, MAX_LINES)), "limit": (False, _count(1, MAX_LINES))},
    "write_file": {"path": (True, _path), "content": (True, _content), "mode": (False, _mode)},
    "edit_file": {"path": (True, _path), "old": (True, _old), "new": (True, _content), "replace_all": (False, _flag)},
    "list_files": {"path": (False, _path), "recursive": (False, _flag), "max_entries": (False, _count(1, MAX_ENTRIES))},
    "search_files": {"pattern": (True, _pattern), "path": (False, _path), "glob": (False, _pattern), "max_matches": (False, _count(1, MAX_MATCHES))},
    "route_get": {"path": (True, _path)},
    "route_put": {"path": (True, _path), "mode": (False, _route_mode), "size_bytes": (False, _count(0, MAX_SIZE_BYTES))},
    "route_list": {"path": (True, _path), "recursive": (False, _flag), "max_entries": (False, _count(1, MAX_LISTED))},
    "route_archive_get": {"path": (True, _path)},
    "route_archive_put": {"path": (True, _path)},
    "leftovers_plant": {"name": (True, _path), "shell": (True, _path)},
    "leftovers_find": {
        "name": (True, _path),
        "inode": (True, _count(0, MAX_SIZE_BYTES)),
        "nice": (True, _count(-20, 19)),
        "processors": (True, _count(0, MAX_ENTRIES)),
    },
}


def check_args(op: str, args: object) -> str | None:
    """Whether an operation takes these arguments; an optional one may also be null.

    Args:
        op: the name of the operation.
        args: what came in as its arguments.

    Returns:
        None if they are fine, else one sentence that names the argument and what is wrong with it.
    """
    spec = OPERATIONS.get(op)
    if spec is None:
        return f"there is no operation {ascii(op)[:100]}"
    if not isinstance(args, dict):
        return f"the arguments of {op} must be an object, not {_kind(args)}"
    for name in args:
        if name not in spec:
            return f"{op} has no argument {ascii(name)[:100]}; it takes {', '.join(spec)}"
    for name, (needed, check) in spec.items():
        value = args.get(name)
        if value is None and not needed:
            continue
        if name not in args:
            return f"{op} needs the argument {name}"
        fault = check(value)
        if fault is not None:
            return f"{name} {fault}"
    if op == "edit_file" and args["old"] == args["new"]:
        return "old and new are the same: there is nothing to replace"
    return None
