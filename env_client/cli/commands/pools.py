"""`sandbox pools`, `pool apply`, `pool delete`, `pool verify`, `sandboxes` and `drain`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from env_client.cli.arguments import PoolArgument, TenantOption, TenantsOption, read_pool, read_sandbox
from env_client.cli.connection import connect_to_service
from env_client.cli.diagnosis import draining_reason
from env_client.cli.exit_codes import NOT_CLEAN
from env_client.cli.failures import Failure
from env_client.cli.printer import JsonFlag, Printer, format_time
from env_client.cli.specs import apply_changes, describe_changes, read_spec, unknown_field_failure
from env_client.client import SandboxClient
from env_client.errors import InvalidRequest, NoCapacity, PoolNotFound
from env_client.values import PoolChange, PoolInfo, SandboxInfo, SlotCheck, VerifyReport

FileArgument = Annotated[str | None, typer.Argument(metavar="[FILE]", hidden=True)]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Change one field; nomad.driver=docker sets a nested one. May be repeated."),
]
SPEC_HELP = "`sandbox pools NAME` shows every field of a spec; docs/settings.md describes them"


def pools(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", hidden=True, parser=read_pool)] = None,
    tenant: TenantsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """List the pools and their present state."""
    printer = Printer(as_json)
    with connect_to_service() as client:
        found = client.pools(tenant=tenant) if name is None else (_get_pool_or_list_names(client, name, tenant),)
    if as_json:
        printer.print_json({"pools": found} if name is None else found[0])
    elif name is None:
        heads = ("POOL", "TENANT", "BACKEND", "ISOLATION", "READY>", "LEASED>", "SANDBOXES>", "RESETTING>", "QUEUE>", "STATE")
        printer.print_table(
            heads, (_pool_row(pool, with_tenant=tenant is not None) for pool in found), empty="there are no pools; `sandbox pool apply` creates one"
        )
    else:
        _print_pool(found[0], printer)


def pool_apply(
    name: PoolArgument,
    file: FileArgument = None,
    change: SetOption = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Start from the defaults of all fields, even if the pool exists.")] = False,
    tenant: TenantOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Create a pool or change it, and print what has changed.

    FILE is the complete spec; a field that is missing in it has its default. In a settings file with `pools:`, the pool of that name is used; `-` is
    standard input. Without FILE, --set changes fields of the existing pool; in a new pool, all other fields have their defaults.
    """
    printer = Printer(as_json)
    if file is not None and defaults:
        raise Failure("FILE and --defaults exclude each other", "give one of them")
    start: dict[str, Any] | None = read_spec(file, name) if file is not None else {} if defaults else None
    apply_changes(start or {}, change or [])  # reports mistakes in --set before the service is contacted
    with connect_to_service() as client:
        before = _pool_or_none(client, name, tenant)
        if start is None and before is not None and not change:
            raise Failure(f"pool {name!r} exists, and no change is given", "give a FILE, --set FIELD=VALUE, or --defaults")
        if start is None:
            start = dict(before.spec) if before is not None else {}
        done = _put_pool(client, name, tenant, apply_changes(start, change or []))
    changed = describe_changes(before.spec, done.pool.spec) if before is not None and not done.created else {}
    if as_json:
        printer.print_json({"pool": done.pool, "created": done.created, "changed": list(changed)})
    elif done.created:
        printer.print_line(f"created pool {name}")
    elif changed:
        printer.print_line(f"changed pool {name}: " + ", ".join(f"{field} {difference}".rstrip() for field, difference in changed.items()))
    else:
        printer.print_line(f"unchanged pool {name}")


def _pool_or_none(client: SandboxClient, name: str, tenant: str | None) -> PoolInfo | None:
    try:
        return client.pool(name, tenant=tenant)
    except PoolNotFound:
        return None


def _put_pool(client: SandboxClient, name: str, tenant: str | None, spec: Mapping[str, Any]) -> PoolChange:
    try:
        return client.pool_put(name, spec, tenant=tenant)
    except InvalidRequest as error:
        field = str(error.extra.get("field", ""))
        if field in ("name", "backend", "tenant"):
            raise
        known = next((pool.spec for pool in client.pools()), {})
        raise unknown_field_failure(field, known) or Failure(error.detail, SPEC_HELP, error.code) from error


def pool_delete(
    name: PoolArgument,
    force: Annotated[bool, typer.Option("--force", "-f", help="Delete it at once; its leases are lost.")] = False,
    tenant: TenantOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete a pool once its last lease has ended."""
    printer = Printer(as_json)
    with connect_to_service() as client:
        client.pool_delete(name, tenant=tenant, force=force)
    if as_json:
        printer.print_json({"name": name, "force": force})
    else:
        printer.print_line(f"pool {name} " + ("is being deleted" if force else "gives no new leases, and is deleted when its last lease ends"))


def pool_verify(name: PoolArgument, tenant: TenantOption = None, as_json: JsonFlag = False) -> None:
    """Plant leftovers in the pool's free slots (files, processes, sockets …), reset the slots, and look for traces of the leftovers.

    PLANTED counts the leftovers. TRACES GONE counts the kinds of trace that existed before the reset and not after it; a leftover may have several, seen
    from inside the slot and from outside. TRACES LEFT names the traces that survived. The exit code is 1 if there are any.
    """
    printer = Printer(as_json)
    with connect_to_service() as client:
        report = _verify_pool(client, name, tenant)
    if as_json:
        printer.print_json(report)
    else:
        heads = ("SLOT", "PLANTED>", "TRACES GONE>", "TRACES LEFT", "TOOK>", "VERDICT", "WHY")
        printer.print_table(heads, map(_check_row, sorted(report.slots, key=_slot_order)), empty="there was no free slot")
        count = "1 slot" if len(report.slots) == 1 else f"{len(report.slots)} slots"
        printer.print_styled((f"{count} of pool {report.pool}: ", ""), ("clean", "green") if report.clean else ("NOT CLEAN", "bold red"))
    if not report.clean:
        raise typer.Exit(NOT_CLEAN)


def _verify_pool(client: SandboxClient, name: str, tenant: str | None) -> VerifyReport:
    try:
        return client.pool_verify(name, tenant=tenant)
    except NoCapacity as error:
        alive = client.pool(name, tenant=tenant).sandboxes
        if alive.get("ready") or alive.get("starting"):
            raise
        next_step = f"an acquire starts one: `sandbox run --pool {name} -- true`, then verify again"
        raise Failure(f"pool {name!r} has no sandbox now, so there is no slot to verify", next_step, error.code) from error


def sandboxes(as_json: JsonFlag = False) -> None:
    """List the sandboxes."""
    printer = Printer(as_json)
    with connect_to_service() as client:
        found = list(client.iter_sandboxes())
    if as_json:
        printer.print_json({"sandboxes": found})
    else:
        heads = ("SANDBOX", "POOL", "STATE", "ISOLATION", "SLOTS", "SINCE", "LAST ERROR")
        printer.print_table(heads, map(_sandbox_row, found), empty="there are no sandboxes")


def drain(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX", hidden=True, parser=read_sandbox)],
    as_json: JsonFlag = False,
) -> None:
    """Drain a sandbox: it gives no new leases, and is deleted when its last lease ends."""
    printer = Printer(as_json)
    with connect_to_service() as client:
        info = client.sandbox_drain(sandbox)
    if as_json:
        printer.print_json(info)
    else:
        printer.print_line(f"{info.sandbox_id} is {info.state or 'draining'}")


def _get_pool_or_list_names(client: SandboxClient, name: str, tenant: str | None) -> PoolInfo:
    try:
        return client.pool(name, tenant=tenant)
    except PoolNotFound as error:
        names = ", ".join(sorted(pool.name for pool in client.pools(tenant=tenant)))
        raise Failure(f"{error.detail}; there is {names or 'none'}", "`sandbox pool apply NAME` creates one", error.code) from error


def _pool_row(pool: PoolInfo, *, with_tenant: bool) -> tuple[str, ...]:
    slots, alive = pool.slots, pool.sandboxes
    shown_always = str(slots.get("ready", 0)), str(slots.get("leased", 0)), str(alive.get("ready", 0))
    shown_if_any = _blank_if_zero(slots.get("resetting", 0)), _blank_if_zero(pool.queue)
    tenant, backend = pool.tenant or "" if with_tenant else "", str(pool.spec.get("backend", ""))
    return pool.name, tenant, backend, pool.isolation or "-", *shown_always, *shown_if_any, summarize_state(pool)


def _blank_if_zero(count: int) -> str:
    return str(count) if count else ""


def summarize_state(pool: PoolInfo) -> str:
    """Describe the state of a pool in a few words."""
    if draining := draining_reason(pool):
        return draining
    is_starting = pool.sandboxes.get("starting") and not pool.sandboxes.get("ready")
    quarantined = f"{pool.slots['quarantined']} quarantined" if pool.slots.get("quarantined") else ""
    remarks = [quarantined, _describe_claimant(pool), pool.last_error or ""]
    return "; ".join(filter(None, remarks)) or ("starting" if is_starting else pool.state or "ready")


def _describe_claimant(pool: PoolInfo) -> str:
    """Describe the acquire for which the pool holds its free slots; an empty string if there is none."""
    if not pool.claimant:
        return ""
    of = f" of {pool.claimant['tenant']}" if pool.claimant.get("tenant") else ""
    return f"{pool.claimant['held_slots']} free held for an acquire of {pool.claimant['count']}{of}, waiting {pool.claimant['waited_s']:.0f} s"


def _print_pool(pool: PoolInfo, printer: Printer) -> None:
    origins = {"file": "of the settings file", "default": "built in", "api": "created while the service ran"}
    facts: list[tuple[str, str]] = [
        ("pool", f"{pool.name} ({origins.get(pool.origin, pool.origin or 'of unknown origin')})"),
        ("state", summarize_state(pool)),
        ("isolation", pool.isolation or "not known yet"),
        ("slots", _format_counts(pool.slots)),
        ("sandboxes", _format_counts(pool.sandboxes)),
        ("queue", str(pool.queue)),
        ("owner", (pool.tenant or "none; admins manage it") + ("; every tenant may use it" if pool.shared else "")),
    ]
    fields = [(name, json.dumps(value, ensure_ascii=False)) for name, value in pool.spec.items()]
    width = 2 + max(len(name) for name, _ in (*facts, *fields))
    for name, text in facts:
        printer.print_entry(name, text, width, "bold")
    printer.print_line("")
    for name, text in fields:
        printer.print_entry(name, text, width)


def _format_counts(counts: Mapping[str, int]) -> str:
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
    slots = _format_counts(info.slots)
    return info.sandbox_id, info.pool, info.state, info.isolation or "-", slots, format_time(info.created_at), info.last_error or ""
