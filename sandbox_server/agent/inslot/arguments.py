"""The arguments that each operation inside a slot accepts.

The checks only look at values, so the agent can refuse a call with wrong arguments before it starts a process for it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Tuple

    Check = Callable[[Any], Optional[str]]
    Spec = Dict[str, Tuple[bool, Check]]

MAX_PATH_BYTES = 4095  # PATH_MAX of the kernel without the terminating NUL.
MAX_CONTENT_BYTES = 16 << 20
MAX_PATTERN_CHARS = 10_000
MAX_LINES = 1_000_000_000
MAX_ENTRIES = 10_000  # In a text response of a tool.
MAX_LISTED = 100_000  # In a response of a file route.
MAX_MATCHES = 10_000
MAX_SIZE_BYTES = 1 << 50
MAX_PORT = 65_535


def _check_text(value: Any, max_bytes: int) -> str | None:
    if not isinstance(value, str):
        return f"must be a string, not {_json_type(value)}"
    try:
        size_bytes = len(value.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        return "contains an unpaired surrogate, which is not a character"
    return f"is {int(size_bytes)} bytes long; the limit is {int(max_bytes)} bytes" if size_bytes > max_bytes else None


def _check_content(value: Any) -> str | None:
    return _check_text(value, MAX_CONTENT_BYTES)


def _check_path(value: Any) -> str | None:
    problem = _check_text(value, MAX_PATH_BYTES)
    if problem is None and not value:
        problem = "must not be empty"
    if problem is None and "\0" in value:
        problem = "must not contain a NUL character"
    return problem


def _check_old_text(value: Any) -> str | None:
    return _check_content(value) if value != "" else "must not be empty; to make a new file use write_file"


def _check_pattern(value: Any) -> str | None:
    problem = _check_text(value, 4 * MAX_PATTERN_CHARS)
    if problem is None and not 0 < len(value) <= MAX_PATTERN_CHARS:
        problem = f"must have 1 to {int(MAX_PATTERN_CHARS)} characters, not {len(value)}"
    return problem


def _check_flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else f"must be true or false, not {_json_type(value)}"


def _integer_check(low: int, high: int) -> Check:
    def check(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int):
            return f"must be a whole number, not {_json_type(value)}"
        return None if low <= value <= high else f"must be from {int(low)} to {int(high)}"

    return check


def _check_mode(value: Any) -> str | None:
    # A number would be ambiguous: the decimal number 644 is not the mode that `chmod 644` sets.
    if isinstance(value, str) and 0 < len(value) <= 5 and not value.strip("01234567") and int(value, 8) <= 0o777:
        return None
    return 'must be a string of octal digits up to "0777", such as "0644"'


def _check_route_mode(value: Any) -> str | None:
    # The service parses the octal digits of a file route and sends a number.
    return _check_mode(value) if isinstance(value, str) else _integer_check(0, 0o777)(value)


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    return {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}.get(type(value), type(value).__name__)


OPERATIONS: Dict[str, Spec] = {
    "read_file": {"path": (True, _check_path), "offset": (False, _integer_check(0, MAX_LINES)), "limit": (False, _integer_check(1, MAX_LINES))},
    "write_file": {"path": (True, _check_path), "content": (True, _check_content), "mode": (False, _check_mode)},
    "edit_file": {"path": (True, _check_path), "old": (True, _check_old_text), "new": (True, _check_content), "replace_all": (False, _check_flag)},
    "list_files": {"path": (False, _check_path), "recursive": (False, _check_flag), "max_entries": (False, _integer_check(1, MAX_ENTRIES))},
    "search_files": {
        "pattern": (True, _check_pattern),
        "path": (False, _check_path),
        "glob": (False, _check_pattern),
        "max_matches": (False, _integer_check(1, MAX_MATCHES)),
    },
    "route_get": {"path": (True, _check_path)},
    "route_put": {"path": (True, _check_path), "mode": (False, _check_route_mode), "size_bytes": (False, _integer_check(0, MAX_SIZE_BYTES))},
    "route_list": {"path": (True, _check_path), "recursive": (False, _check_flag), "max_entries": (False, _integer_check(1, MAX_LISTED))},
    "route_archive_get": {"path": (True, _check_path)},
    "route_archive_put": {"path": (True, _check_path)},
    "route_connect": {"port": (True, _integer_check(1, MAX_PORT))},
    "terminal_mode": {"path": (True, _check_path)},
    "leftovers_plant": {"name": (True, _check_path), "shell": (True, _check_path)},
    "leftovers_find": {
        "name": (True, _check_path),
        "inode": (True, _integer_check(0, MAX_SIZE_BYTES)),
        "nice": (True, _integer_check(-20, 19)),
        "processors": (True, _integer_check(0, MAX_ENTRIES)),
    },
}


def check_args(op: str, args: object) -> str | None:
    """Check the arguments of an operation. An optional argument may also be null.

    Args:
        op: the name of the operation.
        args: the received arguments, of any type.

    Returns:
        None if the arguments are valid, else one sentence that names the argument and says what is wrong with it.
    """
    spec = OPERATIONS.get(op)
    if spec is None:
        return f"there is no operation {ascii(op)[:100]}"
    if not isinstance(args, dict):
        return f"the arguments of {op} must be an object, not {_json_type(args)}"
    for name in args:
        if name not in spec:
            return f"{op} has no argument {ascii(name)[:100]}; it takes {', '.join(spec)}"
    for name, (required, check) in spec.items():
        value = args.get(name)
        if value is None and not required:
            continue
        if name not in args:
            return f"{op} needs the argument {name}"
        problem = check(value)
        if problem is not None:
            return f"{name} {problem}"
    if op == "edit_file" and args["old"] == args["new"]:
        return "old and new are the same: there is nothing to replace"
    return None
