"""What a program says in its own code is looked at before it is sent; what a model has said is for the service to look at."""

from __future__ import annotations

from collections.abc import Mapping

from env_client.errors import InvalidRequest

_WORD_OF: Mapping[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "True or False", Mapping: "a mapping", type(None): "None"}


def check_type(name: str, value: object, *kinds: type) -> None:
    """See that a value is of one of these types; True and False are no numbers.

    Args:
        name: of the argument.
        value: what the program gives.
        kinds: what it may be.

    Raises:
        InvalidRequest: it is something else.
    """
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    wanted = [_WORD_OF[kind] for kind in kinds if not (kind is int and float in kinds)]
    raise InvalidRequest(f"{name}: must be {' or '.join(wanted)}, not {value!r:.100}", extra={"field": name})
