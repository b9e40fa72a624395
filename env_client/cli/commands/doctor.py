"""`sandbox doctor`: what this machine, the service and each backend can and cannot do, and how to get what is missing."""

from __future__ import annotations

import os

import typer

from env_client.cli.connection import check_service_responds
from env_client.cli.diagnosis import Finding, FindingState, backend_findings, machine_findings, pool_findings
from env_client.cli.exit_codes import SOMETHING_MISSING
from env_client.cli.failures import failure_from_error
from env_client.cli.printer import JsonFlag, Printer
from env_client.client import SandboxClient
from env_client.discovery import find_service, local_service
from env_client.embedded_service import embedded
from env_client.errors import ConnectFailed, SandboxError, ServiceNotFound
from env_client.values import PoolInfo

_STYLES = {FindingState.OK: "green", FindingState.LIMITED: "yellow", FindingState.MISSING: "bold red", FindingState.OFF: "dim"}
_WORDS = {FindingState.OK: "ok", FindingState.LIMITED: "limited", FindingState.MISSING: "missing", FindingState.OFF: "off"}
#: How long the first sandbox of a pool may take to report its capabilities, in seconds.
PROBE_TIMEOUT_S = 30.0


def doctor(as_json: JsonFlag = False) -> None:
    """Check what this machine, the service and each backend can do, and how to get what is missing.

    If no service runs, one is started for the check and stopped again. The exit code is 1 if something is missing that slots need.
    """
    printer = Printer(as_json)
    sections: list[tuple[str, list[Finding]]] = [("this machine", machine_findings())]
    sections += _service_sections()
    sections.append(("backends", backend_findings()))
    if as_json:
        printer.print_json(dict(sections))
    else:
        for title, findings in sections:
            _print_section(title, findings, printer)
    if any(finding.state is FindingState.MISSING for _, findings in sections for finding in findings):
        raise typer.Exit(SOMETHING_MISSING)


def _print_section(title: str, findings: list[Finding], printer: Printer) -> None:
    printer.print_styled((title, "bold"))
    indent = 13 + max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        head = "  " + _WORDS[finding.state].ljust(9)
        first, *more = printer.wrap_text(finding.detail, indent)
        printer.print_styled((head, _STYLES[finding.state]), (finding.name.ljust(indent - len(head)), ""), (first, ""))
        for line in more:
            printer.print_styled((" " * indent + line, ""))
        for number, line in enumerate(printer.wrap_text(finding.fix, indent + 2) if finding.fix else ()):
            printer.print_styled((" " * indent + ("  " if number else "→ ") + line, "cyan"))
    printer.print_line("")


def _service_sections() -> list[tuple[str, list[Finding]]]:
    try:
        endpoint = find_service()
    except ServiceNotFound as error:
        if _no_service_is_named():
            return _embedded_service_sections("none runs on this machine")
        return [("service", [Finding("address", FindingState.MISSING, error.detail, "correct SANDBOX_URL and SANDBOX_TOKEN, or unset them")])]
    where = f"{endpoint.url} (from {endpoint.source})"
    try:
        check_service_responds(endpoint)
        with SandboxClient(endpoint.url, endpoint.token) as client:
            readiness, pools = client.readyz(), client.pools()
    except ConnectFailed:
        return [("service", [Finding("address", FindingState.MISSING, f"no service responds at {where}", "start it, or correct SANDBOX_URL")])]
    except SandboxError as error:
        return [("service", [Finding("address", FindingState.MISSING, f"{where}: {error.detail}", failure_from_error(error).next_step)])]
    if readiness.ready:
        ready = Finding("ready", FindingState.OK, "every pool of the settings has its minimum")
    else:
        ready = Finding("ready", FindingState.LIMITED, "not every pool of the settings has its minimum yet", "wait, or see the findings of each pool below")
    return [("service", [Finding("address", FindingState.OK, where), ready]), *((f"pool {pool.name}", pool_findings(pool)) for pool in pools)]


def _no_service_is_named() -> bool:
    if os.environ.get("SANDBOX_URL"):
        return False
    try:
        return local_service() is None
    except ServiceNotFound:  # a state folder names a service, but its file cannot be read
        return False


def _embedded_service_sections(why: str) -> list[tuple[str, list[Finding]]]:
    """Check what the local backend can do here, by starting a service."""
    try:
        with embedded({"default": {"slots_per_sandbox": 1, "max_sandboxes": 1}}) as service, service.client() as client:
            pool = _probe_pool(client)
    except SandboxError as error:
        detail = f"{why}, and none can be started: {error.detail}"
        return [("service", [Finding("none", FindingState.MISSING, detail, "correct the cause, or set SANDBOX_URL to another service")])]
    state = Finding("none", FindingState.OFF, f"{why}; `sandbox run` starts one for itself", "to start one: python -m sandbox_server serve")
    return [("service", [state]), ("local slots, tried just now", pool_findings(pool))]


def _probe_pool(client: SandboxClient) -> PoolInfo:
    """Return the pool once its first sandbox has reported its capabilities, or once the pool has an error."""
    try:
        with client.lease(wait_s=PROBE_TIMEOUT_S):
            return client.pool("default")
    except SandboxError:
        pool = client.pool("default")
        if pool.last_error is None:
            raise
        return pool
