"""`sandbox doctor`: what this machine, the service and each backend can and cannot do, with the fix for each."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import typer

from env_client.cli.connection import check
from env_client.cli.diagnosis import BACKENDS, Finding, State, backend_finding, machine_findings, pool_findings
from env_client.cli.failures import failure_of
from env_client.cli.printer import JsonFlag, Printer
from env_client.client import SandboxClient
from env_client.discovery import find_service, local_service
from env_client.embedded_service import embedded
from env_client.errors import ConnectFailed, SandboxError, ServiceNotFound
from env_client.values import PoolInfo

_STYLES = {State.OK: "green", State.LIMITED: "yellow", State.MISSING: "bold red", State.OFF: "dim"}
_WORDS = {State.OK: "ok", State.LIMITED: "limited", State.MISSING: "missing", State.OFF: "off"}
#: How long a pool's first sandbox may take to say what it can do, in seconds.
PROBE_S = 30.0
SOMETHING_MISSING = 1


def doctor(as_json: JsonFlag = False) -> None:
    """Say what this machine, the service and each backend can do, and how to get the rest.

    Where no service runs, one is started to see, and stopped. Ends with 1 if something is missing that slots need.
    """
    printer = Printer(as_json)
    sections: list[tuple[str, list[Finding]]] = [("this machine", machine_findings())]
    sections += _service_sections()
    with ThreadPoolExecutor() as each:
        sections.append(("backends", list(each.map(backend_finding, BACKENDS))))
    if as_json:
        printer.document(dict(sections))
    else:
        for title, findings in sections:
            _show(title, findings, printer)
    if any(finding.state is State.MISSING for _, findings in sections for finding in findings):
        raise typer.Exit(SOMETHING_MISSING)


def _show(title: str, findings: list[Finding], printer: Printer) -> None:
    printer.styled((title, "bold"))
    indent = 13 + max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        head = "  " + _WORDS[finding.state].ljust(9)
        first, *more = printer.wrapped(finding.detail, indent)
        printer.styled((head, _STYLES[finding.state]), (finding.name.ljust(indent - len(head)), ""), (first, ""))
        for line in more:
            printer.styled((" " * indent + line, ""))
        for number, line in enumerate(printer.wrapped(finding.fix, indent + 2) if finding.fix else ()):
            printer.styled((" " * indent + ("  " if number else "→ ") + line, "cyan"))
    printer.line("")


def _service_sections() -> list[tuple[str, list[Finding]]]:
    try:
        endpoint = find_service()
    except ServiceNotFound as error:
        if _nobody_names_one():
            return _own_sections("none runs on this machine")
        return [("service", [Finding("address", State.MISSING, error.detail, "correct SANDBOX_URL and SANDBOX_TOKEN, or unset them")])]
    where = f"{endpoint.url} (from {endpoint.source})"
    try:
        check(endpoint)
        with SandboxClient(endpoint.url, endpoint.token) as client:
            readiness, pools = client.readyz(), client.pools()
    except ConnectFailed:
        return [("service", [Finding("address", State.MISSING, f"no service answers at {where}", "start it, or correct SANDBOX_URL")])]
    except SandboxError as error:
        return [("service", [Finding("address", State.MISSING, f"{where}: {error.detail}", failure_of(error).next_step)])]
    if readiness.ready:
        ready = Finding("ready", State.OK, "every pool of the settings has its minimum")
    else:
        ready = Finding("ready", State.LIMITED, "not every pool of the settings has its minimum yet", "wait, or see what each pool says below")
    return [("service", [Finding("address", State.OK, where), ready]), *((f"pool {pool.name}", pool_findings(pool)) for pool in pools)]


def _nobody_names_one() -> bool:
    if os.environ.get("SANDBOX_URL"):
        return False
    try:
        return local_service() is None
    except ServiceNotFound:  # a state folder names one, illegibly
        return False


def _own_sections(why: str) -> list[tuple[str, list[Finding]]]:
    """What the local backend can do here, seen by starting it."""
    try:
        with embedded({"default": {"slots_per_sandbox": 1, "max_sandboxes": 1}}) as service, service.client() as client:
            pool = _probed(client)
    except SandboxError as error:
        what = f"{why}, and none can be started: {error.detail}"
        return [("service", [Finding("none", State.MISSING, what, "mend that, or set SANDBOX_URL to a service elsewhere")])]
    state = Finding("none", State.OFF, f"{why}; `sandbox run` starts one for itself", "to have one: python -m sandbox_server serve")
    return [("service", [state]), ("local slots, tried just now", pool_findings(pool))]


def _probed(client: SandboxClient) -> PoolInfo:
    """The pool once its first sandbox has said what it can do, or why there is none."""
    try:
        with client.lease(wait_s=PROBE_S):
            return client.pool("default")
    except SandboxError:
        pool = client.pool("default")
        if pool.last_error is None:
            raise
        return pool
