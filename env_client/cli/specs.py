"""Pool specs for `sandbox pool apply`: reading them from a file, changing fields with `--set`, and describing what changed."""

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
#: The field with the environment variables of the slots. Users choose the names in it, and its values are always text.
_VARIABLES = "env_vars"


def read_spec(file: str, name: str) -> dict[str, Any]:
    """Read the spec of a pool from a file: a plain spec, a settings file with `pools:`, or the output of `sandbox pools NAME --json`.

    Args:
        file: the path of the file; `-` is standard input.
        name: the name of the pool, which selects the spec in a settings file.

    Raises:
        Failure: the file cannot be read, or contains no spec.
    """
    document = _parse_document(_read_text(file), file)
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


def _read_text(file: str) -> str:
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


def _parse_document(text: str, file: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        pass  # not JSON, so it must be YAML
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise Failure(f"{file} is not JSON, and YAML needs a package that is missing", "pip install pyyaml, or write the spec in JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}:" if mark is not None else ""
        raise Failure(f"{file}:{line} {getattr(error, 'problem', None) or 'not YAML'}", "correct that line") from error


def apply_changes(spec: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Return a spec with the changes of `--set`.

    Args:
        spec: the spec, which is not modified.
        changes: `FIELD=VALUE` each. The value is JSON or a plain word; `nomad.driver=docker` sets a field of a nested object. The value of an environment
            variable is always text.

    Raises:
        Failure: a change has the wrong form.
    """
    changed = copy.deepcopy(dict(spec))
    for change in changes:
        path, equals, value = change.partition("=")
        is_variable = path.startswith(f"{_VARIABLES}.")
        *outer, last = path.split(".", 1 if is_variable else -1)
        if not equals or not all((*outer, last)):
            raise Failure(f"--set takes FIELD=VALUE, not {change!r}", "for example: --set max_sandboxes=2")
        target = changed
        for name in outer:
            target = target.setdefault(name, {})
            if not isinstance(target, dict):
                raise Failure(f"--set {change}: {name} has no fields of its own", f"write --set {name}=VALUE")
        if is_variable:
            target[last] = _variable_value(value)
        elif path == _VARIABLES:
            target[last] = _variable_values(_parse_value(value, change))
        else:
            target[last] = _parse_value(value, change)
    return changed


def _parse_value(text: str, change: str) -> Any:
    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise Failure(f"--set {change}: {number} is not a finite number", "give a finite number; some fields accept null for no limit")
        return value

    try:
        return json.loads(text, parse_float=finite, parse_constant=finite)
    except ValueError:
        return text


def _variable_value(text: str) -> str:
    """Return the value of an environment variable as text: 5 and true are text, and the quotes of a JSON string are removed."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def _variable_values(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: item if isinstance(item, str) else json.dumps(item, ensure_ascii=False) for name, item in value.items()}


def describe_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that differ, each with a short description of the change: `{"max_sandboxes": "2 → 3"}`.

    The description is empty for lists, objects and fields that exist only in one of the specs.
    """
    old, new = dict(_fields(before)), dict(_fields(after))
    names = [name for name in {**old, **new} if old.get(name, _MISSING) != new.get(name, _MISSING)]
    return {name: _describe_change(old.get(name, _MISSING), new.get(name, _MISSING)) for name in names}


def _fields(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a spec by their dotted paths."""
    for name, value in spec.items():
        # Environment variables may be secrets, so they count as one field, whose values are never shown.
        if isinstance(value, Mapping) and name != _VARIABLES:
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _describe_change(old: Any, new: Any) -> str:
    if any(isinstance(value, list | dict) or value is _MISSING for value in (old, new)):
        return ""
    return f"{_format_value(old)} → {_format_value(new)}"


def _format_value(value: Any) -> str:
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def unknown_field_failure(field: str, known: Mapping[str, Any]) -> Failure | None:
    """Describe a field that does not exist in pool specs, with the most similar names.

    Args:
        field: the dotted path of the field that the service refused.
        known: the spec of any pool, which has all fields.

    Returns:
        None if the field exists; then its value is wrong.
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
