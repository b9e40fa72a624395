"""`sandbox acquire`, `leases`, `renew`, `narrow`, `release`, `exec` and `run`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from env_client.cli.arguments import (
    COMMAND_TTL_S,
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
from env_client.cli.connection import connect_or_start_service, connect_to_service
from env_client.cli.execution import execute_command, failure_for_lost_result, report_result
from env_client.cli.failures import Failure, Interrupted, failure_from_errors
from env_client.cli.printer import JsonFlag, Printer, escape_control_characters, format_duration, format_time
from env_client.cli.signals import announce_on_forced_exit
from env_client.client import SandboxClient
from env_client.errors import SandboxError, ServiceError, TransportError
from env_client.values import AcquireOptions, CallOptions, LeaseInfo, Result

#: The note on a failed release; the placeholder is for the error.
RELEASE_FAILED = "the slot could not be released; it becomes free within five minutes: {}"
#: The announcement of a forced exit while a slot is held.
SLOT_NOT_RELEASED = "a slot of this command was not released; it becomes free within five minutes"


def acquire(
    pool: PoolOption = None,
    count: Annotated[int, typer.Option("--count", "-c", metavar="N", parser=read_count, help="How many slots: all of them or none.")] = 1,
    ttl: TtlOption = COMMAND_TTL_S,
    wait: WaitOption = None,
    run_id: RunOption = None,
    trajectory_id: Annotated[list[str] | None, typer.Option("--trajectory-id", metavar="ID", help="The trajectory of a lease; once for each slot.")] = None,
    no_network: NoNetworkFlag = False,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="HOST", help="A host that the slots may reach, and no others; in pools with network: internet.")
    ] = None,
    cache: Annotated[bool, typer.Option("--cache", help="With the shared cache of the run, at /cache.")] = False,
    priority: Annotated[int | None, typer.Option("--priority", metavar="N", help="Acquires with a higher priority are served first, among your own.")] = None,
    label: Annotated[list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label, for finding the lease.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Acquire slots, and print their lease ids, which the other commands take."""
    printer = Printer(as_json)
    options: AcquireOptions = {"ttl_s": ttl, "wait_s": wait, "run_id": run_id, "priority": priority, "labels": _labels(label)}
    if no_network:
        options["allow_network"] = False
    if allow_host:
        options["allow_hosts"] = allow_host
    if cache:
        options["cache"] = "rw"
    if trajectory_id:
        options["trajectory_ids"] = trajectory_id
    with connect_to_service() as client:
        acquired = client.acquire(pool, count, **options)
    if as_json:
        printer.print_json(acquired)
        return
    for info in acquired.leases:
        printer.print_line(info.lease_id)
    first = acquired.leases[0]
    printer.print_note(f"held until {format_time(first.expires_at)} in pool {first.pool}; next: sandbox exec {first.lease_id} -- ls -la")


def leases(
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="RUN", help="Only those of a run.")] = None,
    trajectory_id: Annotated[str | None, typer.Option("--trajectory-id", metavar="ID", help="Only those of a trajectory.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List the leases you hold."""
    printer = Printer(as_json)
    with connect_to_service() as client:
        found = list(client.iter_leases(run_id=run_id, trajectory_id=trajectory_id))
    if as_json:
        printer.print_json({"leases": found})
    elif quiet:
        for info in found:
            printer.print_line(info.lease_id)
    else:
        heads = ("LEASE", "POOL", "SLOT", "ENDS IN>", "RUN", "TRAJECTORY", "RIGHTS")
        printer.print_table(heads, map(_lease_row, found), empty="you hold no leases" + _filter_description(run_id, trajectory_id))


def renew(lease: LeasesArgument, ttl: TtlOption = COMMAND_TTL_S, as_json: JsonFlag = False) -> None:
    """Renew leases: each lasts for the given time from now on. A renewal never shortens a lease."""
    printer = Printer(as_json)
    with connect_to_service() as client:
        renewed = client.renew(lease, ttl)
    document = {"leases": renewed.leases, "lost": _error_rows(renewed.lost)}
    if not as_json:
        for info in renewed.leases:
            printer.print_line(f"{info.lease_id} held until {format_time(info.expires_at)}")
    if renewed.lost:
        raise failure_from_errors(renewed.lost, document)
    if as_json:
        printer.print_json(document)


def narrow(
    lease: LeasesArgument,
    no_network: Annotated[bool, typer.Option("--no-network", help="Take the network away.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Take the shared cache away.")] = False,
    read_only: Annotated[list[str] | None, typer.Option("--read-only", metavar="NAME", help="Make an entry of the workspace read-only; repeatable.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Take rights away from held slots for good. The processes of the slots end; their files stay."""
    printer = Printer(as_json)
    if not no_network and not no_cache and not read_only:
        raise Failure("there is nothing to take away", "give --no-network, --no-cache, --read-only NAME, or several of them")
    network, cache = False if no_network else None, "none" if no_cache else None
    narrowed: list[LeaseInfo] = []
    refused: dict[str, SandboxError] = {}
    with connect_to_service() as client:
        for lease_id in lease:
            try:
                narrowed.append(client.narrow(lease_id, allow_network=network, cache=cache, read_only=read_only or None))
            except SandboxError as error:
                refused[lease_id] = error
                if not isinstance(error, ServiceError):  # the service does not respond, so the other leases would fail after the same wait
                    break
    document = {"leases": narrowed, "refused": _error_rows(refused)}
    if not as_json:
        for info in narrowed:
            printer.print_line(f"{info.lease_id} now has {_rights(info)}" + (", no cache" if no_cache and info.cache == "none" else "") + _read_only(info))
    if refused:
        raise failure_from_errors(refused, document)
    if as_json:
        printer.print_json(document)


def release(
    lease: Annotated[list[str] | None, typer.Argument(metavar="[LEASE]...", hidden=True, parser=read_lease)] = None,
    run_id: Annotated[str | None, typer.Option("--run-id", metavar="RUN", help="All leases of a run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All leases you hold.")] = False,
    keep_workspace: Annotated[bool, typer.Option("--keep-workspace", help="Keep the files for one minute, for the next acquire of the run.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Release leases: running commands end, and the files are deleted."""
    printer = Printer(as_json)
    if sum((bool(lease), run_id is not None, everything)) != 1:
        raise Failure("it is not clear which leases to release", "name the leases, or give --run-id RUN or --all")
    with connect_to_service() as client:
        lease_ids = [info.lease_id for info in client.iter_leases()] if everything else lease
        done = client.release(lease_ids, run_id=run_id, reset_workspace=not keep_workspace)
    document = {"released": done.released, "unknown": done.unknown}
    if not as_json:
        for lease_id in done.released:
            printer.print_line(lease_id)
    if done.unknown:
        raise Failure(
            f"these leases do not exist, or are not yours: {', '.join(done.unknown)}", "`sandbox leases` lists those you hold", "lease_not_found", document
        )
    if as_json:
        printer.print_json(document)
    elif not done.released:
        printer.print_note("there was nothing to release")


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
    """Run a command in a slot. Its output is printed as it is written, and its exit code becomes the exit code of `sandbox`.

    The arguments are passed to the program unchanged; for a shell line write: sandbox exec LEASE -- bash -c 'ls | wc -l'.
    Both output streams of the command are written to standard output in their true order. Standard input is passed on unless it is a terminal.
    """
    printer = Printer(as_json)
    line = CommandLine(command, cwd, env or [])
    options: CallOptions = {"timeout_s": timeout, "no_output_timeout_s": no_output_timeout}
    with connect_to_service() as client:
        try:
            result = execute_command(client, lease, line, options, printer, forward_input=not no_stdin, cancel=True)
        except TransportError as error:
            raise failure_for_lost_result(error, lease, options.get("call_id")) from error
    raise typer.Exit(report_result(result, line, printer))


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
    """Run a command in a fresh slot: acquire, exec and release in one.

    If no service runs, one is started for this command and ends with it; the command may then take an hour before it is killed.
    """
    printer = Printer(as_json)
    line = CommandLine(command, cwd, env or [])
    options: CallOptions = {"timeout_s": timeout, "no_output_timeout_s": no_output_timeout}
    acquire_options: AcquireOptions = {"wait_s": wait, "run_id": "sandbox-run-" + secrets.token_hex(6), "labels": {"command": line.text[:200]}}
    if no_network:
        acquire_options["allow_network"] = False
    with connect_or_start_service(pool, printer) as client:

        def run_in_slot(lease_id: str) -> Result:
            # Releasing the slot ends the command sooner than cancelling it. Cancelling returns its result, which only `--json` prints.
            return execute_command(client, lease_id, line, options, printer, forward_input=not no_stdin, cancel=as_json)

        result = _run_in_leased_slot(client, pool, acquire_options, run_in_slot, printer)
    raise typer.Exit(report_result(result, line, printer))


def _run_in_leased_slot(client: SandboxClient, pool: str | None, options: AcquireOptions, function: Callable[[str], Result], printer: Printer) -> Result:
    """Acquire a slot, run a function in it, and release the slot in every case. If only the release fails, the result is still returned.

    Args:
        client: a client of the service.
        pool: the pool, or None for the default pool.
        options: the options of the acquire, with a `run_id`.
        function: the function; its argument is the lease id.
        printer: prints a note if the release fails.
    """
    result: Result | None = None
    function_runs = False
    try:
        with announce_on_forced_exit(SLOT_NOT_RELEASED), client.lease(pool, **options) as lease:
            function_runs = True
            result = function(lease.lease_id)
            function_runs = False
    except Interrupted:
        if not function_runs:  # the signal came during the acquire or the release, so the lease may still exist
            _release_run(client, options["run_id"] or "", printer)
        raise
    except SandboxError as error:
        if result is None:
            raise
        printer.print_note(RELEASE_FAILED.format(error.detail))
    assert result is not None
    return result


def _release_run(client: SandboxClient, run_id: str, printer: Printer) -> None:
    try:
        client.release(run_id=run_id)
    except SandboxError as error:
        printer.print_note(RELEASE_FAILED.format(error.detail))


def _error_rows(errors: Mapping[str, SandboxError]) -> list[dict[str, str]]:
    return [{"lease_id": lease_id, "code": error.code, "detail": error.detail} for lease_id, error in errors.items()]


def _filter_description(run_id: str | None, trajectory_id: str | None) -> str:
    return "".join(f" of {kind} {name!r}" for kind, name in (("run", run_id), ("trajectory", trajectory_id)) if name is not None)


def _labels(pairs: list[str] | None) -> dict[str, str] | None:
    labels = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise Failure(f"--label takes NAME=VALUE, not {pair!r}", "for example: --label user=me")
        labels[name] = value
    return labels or None


def _lease_row(info: LeaseInfo) -> tuple[str, ...]:
    ends_in = format_duration(info.expires_at - time.time())
    return info.lease_id, info.pool, info.slot_id, ends_in, info.run_id or "", info.trajectory_id or "", _rights(info)


def _read_only(info: LeaseInfo) -> str:
    return ", read-only " + ", ".join(map(escape_control_characters, info.read_only)) if info.read_only else ""


def _rights(info: LeaseInfo) -> str:
    network = "network" if info.allow_network else "no network"
    return f"{network}, cache" if info.cache != "none" else network
