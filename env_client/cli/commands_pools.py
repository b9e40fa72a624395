"""`sandbox pools`, `pool apply|delete|verify`, `sandboxes`, `drain`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from env_client.cli.connecting import connected
from env_client.cli.failures import Failure
from env_client.cli.screen import JsonFlag, Screen, clock_time
from env_client.errors import PoolNotFound
from env_client.values import PoolInfo, SandboxInfo, SlotCheck

PoolArgument = Annotated[str, typer.Argument(metavar="NAME", hidden=True)]
FileArgument = Annotated[str | None, typer.Argument(metavar="[FILE]", hidden=True)]
SetOption = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="A field on top of that; nomad.driver=docker goes deeper.")]
NOT_CLEAN = 1


def pools(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", hidden=True)] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the pools and what they hold now."""
    screen = Screen(as_json)
    with connected() as client:
        found = client.pools() if name is None else (_known(client.pool, name, client.pools),)
    if as_json:
        screen.document({"pools": found} if name is None else found[0])
    elif name is None:
        heads = ("POOL", "BACKEND", "ISOLATION", "READY>", "LEASED>", "RESETTING>", "QUEUE>", "SANDBOXES>", "STATE")
        screen.table(heads, map(_pool_row, found), empty="there are no pools; `sandbox pool apply` makes one")
    else:
        _describe(found[0], screen)


def pool_apply(
    name: PoolArgument,
    file: FileArgument = None,
    change: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a pool, or change it to be of a spec. What the spec does not say has its default.

    FILE is a spec; of a settings file with `pools:`, the one of that name is taken.
    """
    screen = Screen(as_json)
    spec = {} if file is None else _spec_in(file, name)
    for one in change or []:
        _set(spec, one)
    with connected() as client:
        done = client.pool_put(name, spec)
    if as_json:
        screen.document(done)
    else:
        screen.line(f"{'made' if done.created else 'changed'} pool {done.pool.name}")


def pool_delete(
    name: PoolArgument,
    force: Annotated[bool, typer.Option("--force", "-f", help="At once: its leases are lost.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Remove a pool, once its last lease has ended."""
    screen = Screen(as_json)
    with connected() as client:
        client.pool_delete(name, force=force)
    if as_json:
        screen.document({"name": name, "force": force})
    else:
        screen.line(f"pool {name} " + ("is going now" if force else "gives no new leases, and goes with its last one"))


def pool_verify(name: PoolArgument, as_json: JsonFlag = False) -> None:
    """Plant leftovers of every kind in the pool's free slots, reset them, and say what was found.

    Ends with 1 if anything was left.
    """
    screen = Screen(as_json)
    with connected() as client:
        report = client.pool_verify(name)
    if as_json:
        screen.document(report)
    else:
        screen.table(("SLOT", "PLANTED>", "FOUND>", "LEFT", "TOOK>", "VERDICT"), map(_check_row, report.slots), empty="there was no free slot")
        screen.styled((f"{len(report.slots)} slots of pool {report.pool}: ", ""), ("clean", "green") if report.clean else ("NOT CLEAN", "bold red"))
    if not report.clean:
        raise typer.Exit(NOT_CLEAN)


def sandboxes(as_json: JsonFlag = False) -> None:
    """List the sandboxes."""
    screen = Screen(as_json)
    with connected() as client:
        found = list(client.iter_sandboxes())
    if as_json:
        screen.document({"sandboxes": found})
    else:
        heads = ("SANDBOX", "POOL", "BACKEND", "STATE", "ISOLATION", "SLOTS", "SINCE", "LAST ERROR")
        screen.table(heads, map(_sandbox_row, found), empty="there are no sandboxes")


def drain(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", hidden=True)],
    as_json: JsonFlag = False,
) -> None:
    """Give no new leases in a sandbox; it goes with its last one."""
    screen = Screen(as_json)
    with connected() as client:
        info = client.sandbox_drain(sandbox)
    if as_json:
        screen.document(info)
    else:
        screen.line(f"{info.sandbox_id} is {info.state or 'draining'}")


def _known(ask: Any, name: str, every: Any) -> PoolInfo:
    try:
        return ask(name)  # type: ignore[no-any-return]
    except PoolNotFound as error:
        names = ", ".join(sorted(pool.name for pool in every()))
        raise Failure(f"{error.detail}; there is {names or 'none'}", "`sandbox pool apply NAME` makes one", error.code) from error


def _spec_in(file: str, name: str) -> dict[str, Any]:
    document = _parsed(_text(file), file)
    if isinstance(document, dict) and isinstance(document.get("pools"), dict):
        specs = document["pools"]
        if name not in specs:
            raise Failure(f"{file} has no pool {name!r}; it has {', '.join(map(str, specs)) or 'none'}", "give one of these names")
        document = specs[name]
    elif isinstance(document, dict) and isinstance(document.get("spec"), dict):  # as `sandbox pools NAME --json` prints it
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
        raise Failure(f"there is no file {file}", "give the path of a spec in YAML or JSON, or - for standard input", "file_not_found") from error
    except IsADirectoryError as error:
        raise Failure(f"{file} is a folder, not a file", "give the path of a spec in YAML or JSON", "file_error") from error
    except OSError as error:
        raise Failure(f"{file} cannot be read: {error.strerror}", "give the path of a spec in YAML or JSON", "file_error") from error
    except UnicodeDecodeError as error:
        raise Failure(f"{file} is not text", "give the path of a spec in YAML or JSON", "file_error") from error


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


def _set(spec: dict[str, Any], change: str) -> None:
    path, equals, value = change.partition("=")
    *outer, last = path.split(".")
    if not equals or not all((*outer, last)):
        raise Failure(f"--set takes FIELD=VALUE, not {change!r}", "say for example --set max_sandboxes=2")
    into = spec
    for name in outer:
        into = into.setdefault(name, {})
        if not isinstance(into, dict):
            raise Failure(f"--set {change}: {name} is not an object", "look at the spec")
    try:
        into[last] = json.loads(value)
    except ValueError:
        into[last] = value


def _pool_row(pool: PoolInfo) -> tuple[str, ...]:
    slots, alive = pool.slots, pool.sandboxes
    state = pool.last_error or ("starting" if alive.get("starting") and not alive.get("ready") else "ok")
    counts = [str(slots.get(name, 0)) for name in ("ready", "leased", "resetting")]
    if slots.get("quarantined"):
        state = f"{slots['quarantined']} quarantined; {state}"
    return pool.name, str(pool.spec.get("backend", "")), pool.isolation or "-", *counts, str(pool.queue), str(alive.get("ready", 0)), state


def _describe(pool: PoolInfo, screen: Screen) -> None:
    facts: list[tuple[str, str]] = [
        ("pool", f"{pool.name} (of {'the settings file' if pool.origin == 'file' else 'the ' + (pool.origin or '?')})"),
        ("isolation", pool.isolation or "none found yet"),
        ("slots", _counts(pool.slots)),
        ("sandboxes", _counts(pool.sandboxes)),
        ("queue", str(pool.queue)),
        ("last error", pool.last_error or "none"),
    ]
    width = max(map(len, [*(name for name, _ in facts), *pool.spec]))
    for name, text in facts:
        screen.styled((name.ljust(width + 2), "bold"), (text, ""))
    screen.line("")
    for name, value in pool.spec.items():
        screen.styled((name.ljust(width + 2), ""), (json.dumps(value, ensure_ascii=False), ""))


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


def _check_row(check: SlotCheck) -> tuple[str, ...]:
    verdict = "clean" if check.clean else "NOT CLEAN"
    slot = check.slot_id if "/" in check.slot_id else f"{check.sandbox_id}/{check.slot_id}"
    return slot, str(len(check.planted)), str(len(check.found)), ", ".join(check.left) or "-", f"{check.duration_s * 1000:.0f} ms", verdict


def _sandbox_row(info: SandboxInfo) -> tuple[str, ...]:
    slots = _counts(info.slots)
    return info.sandbox_id, info.pool, info.backend, info.state, info.isolation or "-", slots, clock_time(info.created_at), info.last_error or ""
