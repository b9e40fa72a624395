"""`sandbox pools`, `pool apply|delete|verify`, `sandboxes`, `drain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from env_client.cli.arguments import PoolArgument, TenantOption, TenantsOption, read_pool, read_sandbox
from env_client.cli.connection import connected
from env_client.cli.diagnosis import draining_for
from env_client.cli.failures import Failure
from env_client.cli.printer import JsonFlag, Printer, clock_time
from env_client.cli.specs import changed_by, differences, spec_in, unknown_field
from env_client.client import SandboxClient
from env_client.errors import InvalidRequest, NoCapacity, PoolNotFound
from env_client.values import PoolChange, PoolInfo, SandboxInfo, SlotCheck, VerifyReport

FileArgument = Annotated[str | None, typer.Argument(metavar="[FILE]", hidden=True)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Set a field, the rest stays; nomad.driver=docker goes deeper. May be given often."),
]
NOT_CLEAN = 1
SPEC_HELP = "`sandbox pools NAME` shows every field of a spec; docs/settings.md says what each takes"


def pools(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", hidden=True, parser=read_pool)] = None,
    tenant: TenantsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List the pools and what they hold now."""
    printer = Printer(as_json)
    with connected() as client:
        found = client.pools(tenant=tenant) if name is None else (_known(client, name, tenant),)
    if as_json:
        printer.document({"pools": found} if name is None else found[0])
    elif name is None:
        heads = ("POOL", "TENANT", "BACKEND", "ISOLATION", "READY>", "LEASED>", "SANDBOXES>", "RESETTING>", "QUEUE>", "STATE")
        printer.table(heads, (_pool_row(pool, of_others=tenant is not None) for pool in found), empty="there are no pools; `sandbox pool apply` makes one")
    else:
        _describe(found[0], printer)


def pool_apply(
    name: PoolArgument,
    file: FileArgument = None,
    change: SetOption = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Begin with the default of every field, also where there is such a pool.")] = False,
    tenant: TenantOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a pool, or change it. Says what has changed.

    FILE is the whole spec: what it does not say has its default. Of a settings file with `pools:`, the one of that name is taken; `-` is standard input.
    Without FILE, --set changes fields of the pool as it is; of a new pool, every other field has its default.
    """
    printer = Printer(as_json)
    if file is not None and defaults:
        raise Failure("FILE and --defaults both say what to begin with", "give one of them")
    given: dict[str, Any] | None = spec_in(file, name) if file is not None else {} if defaults else None
    changed_by(given or {}, change or [])  # what is wrong with the words is said before anything else
    with connected() as client:
        before = _pool_or_none(client, name, tenant)
        if given is None and before is not None and not change:
            raise Failure(f"pool {name!r} is there, and nothing says what to change", "give a FILE, --set FIELD=VALUE, or --defaults")
        base = given if given is not None else before.spec if before is not None else {}
        done = _put(client, name, tenant, changed_by(base, change or []))
    changed = differences(before.spec, done.pool.spec) if before is not None and not done.created else {}
    if as_json:
        printer.document({"pool": done.pool, "created": done.created, "changed": list(changed)})
    elif done.created:
        printer.line(f"made pool {name}")
    elif changed:
        printer.line(f"changed pool {name}: " + ", ".join(f"{field} {how}".rstrip() for field, how in changed.items()))
    else:
        printer.line(f"unchanged pool {name}")


def _pool_or_none(client: SandboxClient, name: str, tenant: str | None) -> PoolInfo | None:
    try:
        return client.pool(name, tenant=tenant)
    except PoolNotFound:
        return None


def _put(client: SandboxClient, name: str, tenant: str | None, spec: Mapping[str, Any]) -> PoolChange:
    try:
        return client.pool_put(name, spec, tenant=tenant)
    except InvalidRequest as error:
        field = str(error.extra.get("field", ""))
        if field in ("name", "backend", "tenant"):
            raise
        known = next((pool.spec for pool in client.pools()), {})
        raise unknown_field(field, known) or Failure(error.detail, SPEC_HELP, error.code) from error


def pool_delete(
    name: PoolArgument,
    force: Annotated[bool, typer.Option("--force", "-f", help="At once: its leases are lost.")] = False,
    tenant: TenantOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Remove a pool, once its last lease has ended."""
    printer = Printer(as_json)
    with connected() as client:
        client.pool_delete(name, tenant=tenant, force=force)
    if as_json:
        printer.document({"name": name, "force": force})
    else:
        printer.line(f"pool {name} " + ("is going now" if force else "gives no new leases, and goes with its last one"))


def pool_verify(name: PoolArgument, tenant: TenantOption = None, as_json: JsonFlag = False) -> None:
    """Plant leftovers in the pool's free slots (files, processes, sockets …), reset the slots, and look for traces of them.

    PLANTED counts the leftovers, TRACES GONE the kinds of trace that were there before the reset and not after it: from inside the slot and from
    outside of it, so one leftover may leave several. TRACES LEFT names what survived. Ends with 1 if anything did.
    """
    printer = Printer(as_json)
    with connected() as client:
        report = _verified(client, name, tenant)
    if as_json:
        printer.document(report)
    else:
        heads = ("SLOT", "PLANTED>", "TRACES GONE>", "TRACES LEFT", "TOOK>", "VERDICT", "WHY")
        printer.table(heads, map(_check_row, sorted(report.slots, key=_slot_order)), empty="there was no free slot")
        count = "1 slot" if len(report.slots) == 1 else f"{len(report.slots)} slots"
        printer.styled((f"{count} of pool {report.pool}: ", ""), ("clean", "green") if report.clean else ("NOT CLEAN", "bold red"))
    if not report.clean:
        raise typer.Exit(NOT_CLEAN)


def _verified(client: SandboxClient, name: str, tenant: str | None) -> VerifyReport:
    try:
        return client.pool_verify(name, tenant=tenant)
    except NoCapacity as error:
        alive = client.pool(name, tenant=tenant).sandboxes
        if alive.get("ready") or alive.get("starting"):
            raise
        next_step = f"one is made once a slot is asked for: `sandbox run --pool {name} -- true`, and verify then"
        raise Failure(f"pool {name!r} has no sandbox now, so no slot to verify", next_step, error.code) from error


def sandboxes(as_json: JsonFlag = False) -> None:
    """List the sandboxes."""
    printer = Printer(as_json)
    with connected() as client:
        found = list(client.iter_sandboxes())
    if as_json:
        printer.document({"sandboxes": found})
    else:
        heads = ("SANDBOX", "POOL", "STATE", "ISOLATION", "SLOTS", "SINCE", "LAST ERROR")
        printer.table(heads, map(_sandbox_row, found), empty="there are no sandboxes")


def drain(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", hidden=True, parser=read_sandbox)],
    as_json: JsonFlag = False,
) -> None:
    """Give no new leases in a sandbox; it goes with its last one."""
    printer = Printer(as_json)
    with connected() as client:
        info = client.sandbox_drain(sandbox)
    if as_json:
        printer.document(info)
    else:
        printer.line(f"{info.sandbox_id} is {info.state or 'draining'}")


def _known(client: SandboxClient, name: str, tenant: str | None) -> PoolInfo:
    try:
        return client.pool(name, tenant=tenant)
    except PoolNotFound as error:
        names = ", ".join(sorted(pool.name for pool in client.pools(tenant=tenant)))
        raise Failure(f"{error.detail}; there is {names or 'none'}", "`sandbox pool apply NAME` makes one", error.code) from error


def _pool_row(pool: PoolInfo, *, of_others: bool) -> tuple[str, ...]:
    slots, alive = pool.slots, pool.sandboxes
    always = str(slots.get("ready", 0)), str(slots.get("leased", 0)), str(alive.get("ready", 0))
    at_times = _if_any(slots.get("resetting", 0)), _if_any(pool.queue)
    return pool.name, pool.tenant or "" if of_others else "", str(pool.spec.get("backend", "")), pool.isolation or "-", *always, *at_times, _standing(pool)


def _if_any(count: int) -> str:
    return str(count) if count else ""


def _standing(pool: PoolInfo) -> str:
    """How a pool stands, in a few words."""
    if draining := draining_for(pool):
        return draining
    is_starting = pool.sandboxes.get("starting") and not pool.sandboxes.get("ready")
    quarantined = f"{pool.slots['quarantined']} quarantined" if pool.slots.get("quarantined") else ""
    said = [quarantined, _held_for(pool), pool.last_error or ""]
    return "; ".join(filter(None, said)) or ("starting" if is_starting else pool.state or "ready")


def _held_for(pool: PoolInfo) -> str:
    """That free slots are not to be had, and why."""
    if not pool.claimant:
        return ""
    of = f" of {pool.claimant['tenant']}" if pool.claimant.get("tenant") else ""
    return f"{pool.claimant['held_slots']} free held for an acquire of {pool.claimant['count']}{of}, waiting {pool.claimant['waited_s']:.0f} s"


def _describe(pool: PoolInfo, printer: Printer) -> None:
    origins = {"file": "of the settings file", "default": "built in", "api": "made while the service ran"}
    facts: list[tuple[str, str]] = [
        ("pool", f"{pool.name} ({origins.get(pool.origin, pool.origin or 'of unknown origin')})"),
        ("state", _standing(pool)),
        ("isolation", pool.isolation or "none found yet"),
        ("slots", _counts(pool.slots)),
        ("sandboxes", _counts(pool.sandboxes)),
        ("queue", str(pool.queue)),
        ("owner", (pool.tenant or "no tenant, so the admins'") + ("; every tenant may use it" if pool.shared else "")),
    ]
    fields = [(name, json.dumps(value, ensure_ascii=False)) for name, value in pool.spec.items()]
    width = 2 + max(len(name) for name, _ in (*facts, *fields))
    for name, text in facts:
        printer.entry(name, text, width, "bold")
    printer.line("")
    for name, text in fields:
        printer.entry(name, text, width)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


def _slot_order(check: SlotCheck) -> tuple[str, int, str]:
    number = check.slot_id.rpartition("/")[2]
    return check.sandbox_id, int(number) if number.isdecimal() else 0, number


def _check_row(check: SlotCheck) -> tuple[str, ...]:
    verdict = "clean" if check.clean else "NOT CLEAN"
    slot = check.slot_id if "/" in check.slot_id else f"{check.sandbox_id}/{check.slot_id}"
    counts = str(len(check.planted)), str(len(check.found))
    return slot, *counts, ", ".join(check.left) or "-", f"{check.duration_s * 1000:.0f} ms", verdict, check.detail


def _sandbox_row(info: SandboxInfo) -> tuple[str, ...]:
    slots = _counts(info.slots)
    return info.sandbox_id, info.pool, info.state, info.isolation or "-", slots, clock_time(info.created_at), info.last_error or ""
