"""Pool specs as a person gives them: a file, fields by `--set`, or the spec that a pool has; and what of them has changed."""

from __future__ import annotations

import copy
import difflib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from env_client.cli.failures import Failure

_GIVE_A_FILE = "give the path of a spec in YAML or JSON"
_MISSING = object()
#: The one field whose names are the caller's own, and whose values are text.
_VARIABLES = "env_vars"


def spec_in(file: str, name: str) -> dict[str, Any]:
    """The spec that a file holds: the whole of it, that of a pool in a settings file, or that in what `sandbox pools NAME --json` printed.

    Args:
        file: its path; `-` is standard input.
        name: the pool's.

    Raises:
        Failure: it cannot be read, or holds none.
    """
    document = _parsed(_text(file), file)
    if isinstance(document, dict) and isinstance(document.get("pools"), dict):
        specs = document["pools"]
        if name not in specs:
            raise Failure(f"{file} has no pool {name!r}; it has {', '.join(map(str, specs)) or 'none'}", "give one of these names")
        document = specs[name]
    elif isinstance(document, dict) and isinstance(document.get("spec"), dict):
        document = document["spec"]
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise Failure(f"{file} holds {type(document).__name__} where a spec should be", "a spec is fields and values, such as `max_sandboxes: 2`")
    return document


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise Failure(f"there is no file {file}", f"{_GIVE_A_FILE}, or - for standard input", "file_not_found") from error
    except IsADirectoryError as error:
        raise Failure(f"{file} is a folder, not a file", _GIVE_A_FILE, "file_error") from error
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}", _GIVE_A_FILE, "file_error") from error
    except UnicodeDecodeError as error:
        raise Failure(f"{file} is not text", _GIVE_A_FILE, "file_error") from error


def _parsed(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise Failure(f"{file} is not JSON, and YAML needs a package that is missing", "pip install pyyaml, or write the spec in JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}:" if where is not None else ""
        raise Failure(f"{file}:{line} {getattr(error, 'problem', None) or 'not YAML'}", "correct that line") from error


def changed_by(spec: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """A spec with fields set.

    Args:
        spec: what it is; stays as it is.
        changes: `FIELD=VALUE` each, the value in JSON or a plain word; `nomad.driver=docker` goes deeper. A variable's value is always text.

    Raises:
        Failure: one of them is no such thing.
    """
    changed = copy.deepcopy(dict(spec))
    for change in changes:
        path, equals, value = change.partition("=")
        is_variable = path.startswith(f"{_VARIABLES}.")
        *outer, last = path.split(".", 1 if is_variable else -1)
        if not equals or not all((*outer, last)):
            raise Failure(f"--set takes FIELD=VALUE, not {change!r}", "say for example --set max_sandboxes=2")
        into = changed
        for name in outer:
            into = into.setdefault(name, {})
            if not isinstance(into, dict):
                raise Failure(f"--set {change}: {name} has no fields of its own", f"say --set {name}=VALUE")
        into[last] = _variable(value) if is_variable else _variables(_value(value, change)) if path == _VARIABLES else _value(value, change)
    return changed


def _value(text: str, change: str) -> Any:
    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise Failure(f"--set {change}: {number} is not a finite number", "give a finite one; null is what some fields take for none")
        return value

    try:
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except ValueError:
        return text


def _variable(text: str) -> str:
    """The value of a variable: 5 and true are text here, and JSON's quotes around it are none of it."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _variables(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for name, one in value.items()}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Which fields have changed, and how as far as that is short: `{"max_sandboxes": "2 → 3"}`."""
    old, new = dict(_fields(before)), dict(_fields(after))
    names = [name for name in {**old, **new} if old.get(name, _MISSING) != new.get(name, _MISSING)]
    return {name: _shown(old.get(name, _MISSING), new.get(name, _MISSING)) for name in names}


def _fields(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in spec.items():
        # The variables of a pool may be secrets: that they have changed is all that is said.
        if isinstance(value, Mapping) and name != _VARIABLES:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _shown(old: Any, new: Any) -> str:
    if any(isinstance(value, list | dict) or value is _MISSING for value in (old, new)):
        return ""
    return f"{_number(old)} → {_number(new)}"


def _number(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def unknown_field(field: str, known: Mapping[str, Any]) -> Failure | None:
    """What to say of a field that no pool spec has.

    Args:
        field: what the service does not take, by its path.
        known: the spec of any pool.

    Returns:
        None where there is such a field, and something else is wrong with it.
    """
    *outer, last = field.split(".")
    if not last or outer[:1] == [_VARIABLES]:
        return None
    within: Any = known
    for name in outer:
        within = within.get(name) if isinstance(within, Mapping) else None
    if not isinstance(within, Mapping) or not within or last in within:
        return None
    near = [".".join((*outer, name)) for name in difflib.get_close_matches(last, within, n=3)]
    next_step = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join('.'.join((*outer, name)) for name in within)}"
    return Failure(f"a pool spec has no field {field!r}", next_step, "invalid_request")
