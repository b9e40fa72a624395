"""`sandbox acquire`, `leases`, `renew`, `narrow`, `release`, `exec`, `run`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from env_client.cli.arguments import (
    DEFAULT_TTL_S,
    CommandArgument,
    CwdOption,
    EnvOption,
    LeaseArgument,
    LeasesArgument,
    NoNetworkFlag,
    NoStdinFlag,
    PoolOption,
    RunOption,
    SilenceOption,
    TimeoutOption,
    TtlOption,
    WaitOption,
    read_count,
    read_lease,
)
from env_client.cli.command_line import CommandLine
from env_client.cli.connection import connected, connected_or_own
from env_client.cli.execution import conclude, execute, unanswered
from env_client.cli.exit_handling import leaving
from env_client.cli.failures import Failure, Interrupted, failure_of_several
from env_client.cli.printer import JsonFlag, Printer, clock_time, span
from env_client.client import SandboxClient
from env_client.errors import SandboxError, ServiceError, TransportError
from env_client.values import AcquireOptions, CallOptions, LeaseInfo, Result

NOT_GIVEN_BACK = "the slot could not be given back, and frees itself within five minutes: {}"
LEFT = "a slot that it had is not given back, and frees itself within five minutes"


def acquire(
    pool: PoolOption = None,
    count: Annotated[int, typer.Option("--count", "-c", metavar="N", parser=read_count, help="So many at once: all of them or none.")] = 1,
    ttl: TtlOption = DEFAULT_TTL_S,
    wait: WaitOption = None,
    run_id: RunOption = None,
    trajectory_id: Annotated[list[str] | None, typer.Option("--trajectory-id", metavar="ID", help="Who holds it; once for each of --count.")] = None,
    no_network: NoNetworkFlag = False,
    cache: Annotated[bool, typer.Option("--cache", help="With the shared cache of its run, at /cache.")] = False,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="Higher is served first, among your own.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="To find it again.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Take a slot: prints its lease id, which the other commands want."""
    printer = Printer(as_json)
    options: AcquireOptions = {"ttl_s": ttl, "wait_s": wait, "run_id": run_id, "priority": priority, "labels": _labels(label)}
    if no_network:
        options["allow_network"] = False
    if cache:
        options["cache"] = "rw"
    if trajectory_id:
        options["trajectory_ids"] = trajectory_id
    with connected() as client:
        acquired = client.acquire(pool, count, **options)
    if as_json:
        printer.document(acquired)
        return
    for info in acquired.leases:
        printer.line(info.lease_id)
    first = acquired.leases[0]
    printer.note(f"held until {clock_time(first.expires_at)} in pool {first.pool}; next: sandbox exec {first.lease_id} -- ls -la")


def leases(
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="RUN", help="Those of a run.")] = None,
    trajectory_id: Annotated[str | None, typer.Option("--trajectory-id", metavar="ID", help="Those of a trajectory.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Just the ids.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the leases you hold."""
    printer = Printer(as_json)
    with connected() as client:
        found = list(client.iter_leases(run_id=run_id, trajectory_id=trajectory_id))
    if as_json:
        printer.document({"leases": found})
    elif quiet:
        for info in found:
            printer.line(info.lease_id)
    else:
        heads = ("LEASE", "POOL", "SLOT", "ENDS IN>", "RUN", "TRAJECTORY", "RIGHTS")
        printer.table(heads, map(_lease_row, found), empty="you hold no leases" + _of(run_id, trajectory_id))


def renew(lease: LeasesArgument, ttl: TtlOption = DEFAULT_TTL_S, as_json: JsonFlag = False) -> None:
    """Keep leases for longer: each holds so many seconds from now on. Never shortens."""
    printer = Printer(as_json)
    with connected() as client:
        renewed = client.renew(lease, ttl)
    document = {"leases": renewed.leases, "lost": _refusals(renewed.lost)}
    if not as_json:
        for info in renewed.leases:
            printer.line(f"{info.lease_id} held until {clock_time(info.expires_at)}")
    if renewed.lost:
        raise failure_of_several(renewed.lost, document)
    if as_json:
        printer.document(document)


def narrow(
    lease: LeasesArgument,
    no_network: Annotated[bool, typer.Option("--no-network", help="Take the network away.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Take the shared cache away.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Take rights away from held slots, for good. Their processes end, their files stay."""
    printer = Printer(as_json)
    if not no_network and not no_cache:
        raise Failure("there is nothing to take away", "say --no-network, --no-cache, or both")
    narrowed: list[LeaseInfo] = []
    refused: dict[str, SandboxError] = {}
    with connected() as client:
        for lease_id in lease:
            try:
                narrowed.append(client.narrow(lease_id, allow_network=False if no_network else None, cache="none" if no_cache else None))
            except SandboxError as error:
                refused[lease_id] = error
                if not isinstance(error, ServiceError):  # the next would wait as long for nothing
                    break
    document = {"leases": narrowed, "refused": _refusals(refused)}
    if not as_json:
        for info in narrowed:
            printer.line(f"{info.lease_id} now has {_rights(info)}" + (", no cache" if no_cache and info.cache == "none" else ""))
    if refused:
        raise failure_of_several(refused, document)
    if as_json:
        printer.document(document)


def release(
    lease: Annotated[list[str] | None, typer.Argument(metavar="[LEASE]...", hidden=True, parser=read_lease)] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="RUN", help="All leases of a run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All leases you hold.")] = False,
    keep_workspace: Annotated[bool, typer.Option("--keep-workspace", help="Keep the files for a minute, for the next acquire of the same run.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Give slots back: running commands end, and the files go."""
    printer = Printer(as_json)
    if sum((bool(lease), run_id is not None, everything)) != 1:
        raise Failure("it is not clear which leases to release", "name them, or say --run-id RUN, or --all")
    with connected() as client:
        named = [info.lease_id for info in client.iter_leases()] if everything else lease
        done = client.release(named, run_id=run_id, reset_workspace=not keep_workspace)
    document = {"released": done.released, "unknown": done.unknown}
    if not as_json:
        for lease_id in done.released:
            printer.line(lease_id)
    if done.unknown:
        raise Failure(f"not yours, or never known: {', '.join(done.unknown)}", "`sandbox leases` lists those you hold", "lease_not_found", document)
    if as_json:
        printer.document(document)
    elif not done.released:
        printer.note("there was nothing to release")


def exec_(
    lease: LeaseArgument,
    command: CommandArgument,
    timeout: TimeoutOption = None,
    no_output_timeout: SilenceOption = None,
    cwd: CwdOption = None,
    env: EnvOption = None,
    no_stdin: NoStdinFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a command in a slot; its output comes as it is written, its exit code is ours.

    Nothing in the words means anything to a shell; for a shell line say: sandbox exec LEASE -- bash -c 'ls | wc -l'.
    Both its outputs come in true order on standard output. What is piped in is its standard input.
    """
    printer = Printer(as_json)
    line = CommandLine(command, cwd, env or [])
    options: CallOptions = {"timeout_s": timeout, "no_output_timeout_s": no_output_timeout}
    with connected() as client:
        try:
            result = execute(client, lease, line, options, printer, forward_input=not no_stdin, cancel=True)
        except TransportError as error:
            raise unanswered(error, lease, options.get("call_id")) from error
    raise typer.Exit(conclude(result, line, printer))


def run(
    command: CommandArgument,
    pool: PoolOption = None,
    wait: WaitOption = None,
    timeout: TimeoutOption = None,
    no_output_timeout: SilenceOption = None,
    cwd: CwdOption = None,
    env: EnvOption = None,
    no_network: NoNetworkFlag = False,
    no_stdin: NoStdinFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a command in a fresh slot, and give the slot back: acquire, exec and release in one.

    Where no service runs, one is started for this command, and ends with it; a command may then take an hour before it is killed.
    """
    printer = Printer(as_json)
    line = CommandLine(command, cwd, env or [])
    options: CallOptions = {"timeout_s": timeout, "no_output_timeout_s": no_output_timeout}
    asked: AcquireOptions = {"wait_s": wait, "run_id": "sandbox-run-" + secrets.token_hex(6), "labels": {"command": line.text[:200]}}
    if no_network:
        asked["allow_network"] = False
    with connected_or_own(pool, printer) as client:

        def work(lease_id: str) -> Result:
            # Releasing the slot ends the command as well, and sooner; only its result comes by cancelling.
            return execute(client, lease_id, line, options, printer, forward_input=not no_stdin, cancel=as_json)

        result = _in_own_slot(client, pool, asked, work, printer)
    raise typer.Exit(conclude(result, line, printer))


def _in_own_slot(client: SandboxClient, pool: str | None, asked: AcquireOptions, work: Callable[[str], Result], printer: Printer) -> Result:
    """Do something in a slot of one's own, which is given back whatever happens; a result that is there is not lost where that fails."""
    result: Result | None = None
    inside = False
    try:
        with leaving(LEFT), client.lease(pool, **asked) as lease:
            inside = True
            result = work(lease.lease_id)
            inside = False
    except Interrupted:
        if not inside:  # while it was granted, or given back
            _give_back(client, asked["run_id"] or "", printer)
        raise
    except SandboxError as error:
        if result is None:
            raise
        printer.note(NOT_GIVEN_BACK.format(error.detail))
    assert result is not None
    return result


def _give_back(client: SandboxClient, run_id: str, printer: Printer) -> None:
    try:
        client.release(run_id=run_id)
    except SandboxError as error:
        printer.note(NOT_GIVEN_BACK.format(error.detail))


def _refusals(errors: Mapping[str, SandboxError]) -> list[dict[str, str]]:
    return [{"lease_id": lease_id, "code": error.code, "detail": error.detail} for lease_id, error in errors.items()]


def _of(run_id: str | None, trajectory_id: str | None) -> str:
    return "".join(f" of {kind} {name!r}" for kind, name in (("run", run_id), ("trajectory", trajectory_id)) if name is not None)


def _labels(pairs: list[str] | None) -> dict[str, str] | None:
    labels = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise Failure(f"--label takes NAME=VALUE, not {pair!r}", "say for example --label user=me")
        labels[name] = value
    return labels or None


def _lease_row(info: LeaseInfo) -> tuple[str, ...]:
    ends_in = span(info.expires_at - time.time())
    return info.lease_id, info.pool, info.slot_id, ends_in, info.run_id or "", info.trajectory_id or "", _rights(info)


def _rights(info: LeaseInfo) -> str:
    network = "network" if info.allow_network else "no network"
    return f"{network}, cache" if info.cache != "none" else network
