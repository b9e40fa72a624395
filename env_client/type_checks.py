"""Type checks of arguments that a program passes in its own code.

Arguments that a model may have written are not checked here: the service checks them and reports mistakes in the result of the call.
"""

from __future__ import annotations

from collections.abc import Mapping

from env_client.errors import InvalidRequest

_TYPE_DESCRIPTIONS: Mapping[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    Mapping: "a mapping",
    type(None): "None",
}


def check_type(name: str, value: object, *types: type) -> None:
    """Check that an argument has one of the given types. A `bool` does not count as a number.

    Args:
        name: the name of the argument.
        value: the argument.
        types: the types that are allowed.

    Raises:
        InvalidRequest: the argument has another type.
    """
    if isinstance(value, types) and not (isinstance(value, bool) and bool not in types):
        return
    expected = [_TYPE_DESCRIPTIONS[one] for one in types if not (one is int and float in types)]
    raise InvalidRequest(f"{name}: must be {' or '.join(expected)}, not {value!r:.100}", extra={"field": name})
