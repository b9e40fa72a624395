"""The table of a benchmark run: what was measured, what it is compared with, and whether the bar is met."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.bench.file_laps import COMMAND, LARGE_MIB, FileRound
from tests.bench.rounds import ISOLATION, Measurements
from tests.bench.run_batch_laps import RunBatchRound
from tests.support import tables

MB = 1_000_000
MAX_FLOOR_RATIO = 2.2
MAX_PEER_RATIO = 1.0
MIN_RATE_RATIO = 0.85
MAX_ACQUIRE_S = 0.003
MAX_RELEASE_TO_ACQUIRE_S = 0.006
MAX_COLD_START_S = 1.5
MAX_SLOT_BYTES = 1.5 * MB
#: Where a bar is a time, the same multiple of this floor of a quiet machine holds as well.
QUIET_FLOOR_S = 0.0012
MAX_CYCLE_CPU_S = 0.008
MIN_CYCLE_RATE_RATIO = 0.15
MIN_PYTHON_RATIO = 0.7
MAX_NEIGHBOUR_CALL_S = 0.012
MAX_CROWD_CALL_S = 0.2
MIN_PROGRAM_RATIO = 0.6
MAX_FILE_RATIO = 1.2
MAX_SEARCH_RATIO = 1.5
MIN_LARGE_MIB_PER_S = 400.0
MAX_SESSION_CALL_RATIO = 2.0
MAX_SESSION_START_S, MAX_SESSION_START_RATIO = 0.020, 17.0
MAX_INTERNET_RATIO = 2.0


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Args:
        what: what was measured.
        value: the service's figure.
        beside: what it is compared with, and the figure of that.
        ratio: of the two; empty where there is no comparison.
        bar: what the service promises; `–` where it promises nothing.
        met: whether the bar is met.
    """

    what: str
    value: str
    beside: str
    ratio: str
    bar: str
    met: bool

    @property
    def cells(self) -> list[str]:
        """The line as a row of the table."""
        return [self.what, self.value, self.beside, self.ratio, self.bar, "yes" if self.met else "**no**"]


def ms(value_s: float) -> str:
    """Return a time in seconds as a text in milliseconds."""
    return f"{value_s * 1000:.1f} ms"


def median(value: float | None) -> float:
    """Return a median of the run that is always measured."""
    assert value is not None
    return value


def one_call_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about one call at a time."""
    call_s = median(measured.median(lambda it: it.service_call_s))
    floor_s = median(measured.median(lambda it: it.floor_call_s))
    ratio = median(measured.median(lambda it: it.service_call_s / it.floor_call_s))
    yield Line("one call at a time, p50", ms(call_s), f"bare: {ms(floor_s)}", f"{ratio:.2f} ×", f"≤ {MAX_FLOOR_RATIO:g} ×", ratio <= MAX_FLOOR_RATIO)
    peer_s = measured.median(lambda it: it.peer_call_s)
    if peer_s is None:
        return
    ratio = median(measured.median(lambda it: it.peer_call_s and it.service_call_s / it.peer_call_s))
    peer = f"SWE-ReX `execute`, not isolated: {ms(peer_s)}"
    yield Line("the same", ms(call_s), peer, f"{ratio:.2f} ×", f"≤ {MAX_PEER_RATIO:g} ×", ratio <= MAX_PEER_RATIO)
    client_s = median(measured.median(lambda it: it.client_call_s))
    ratio = median(measured.median(lambda it: it.peer_call_s and it.client_call_s / it.peer_call_s))
    yield Line("the same through `env_client`", ms(client_s), f"SWE-ReX `execute` by its own client: {ms(peer_s)}", f"{ratio:.2f} ×", "–", True)


def rate_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about many calls at once."""
    rate = median(measured.median(lambda it: it.service_rate))
    floor_rate = median(measured.median(lambda it: it.floor_rate))
    ratio = median(measured.median(lambda it: it.service_rate / it.floor_rate))
    what, beside = "256 calls over 64 slots in one exec-batch", f"bare, 4 at a time: {floor_rate:,.0f}/s"
    yield Line(what, f"{rate:,.0f}/s", beside, f"{ratio:.2f} ×", f"≥ {MIN_RATE_RATIO:g} ×", ratio >= MIN_RATE_RATIO)
    peer_rate = measured.median(lambda it: it.peer_rate)
    if peer_rate is None:
        return
    ratio = median(measured.median(lambda it: it.peer_rate and it.service_rate / it.peer_rate))
    yield Line("the same", f"{rate:,.0f}/s", f"SWE-ReX, 8 clients, not isolated: {peer_rate:,.0f}/s", f"{ratio:.2f} ×", "–", True)


def time_line(what: str, value_s: float, floor_s: float, most_s: float) -> Line:
    """Return a line about a time, which may be as long as the bar, or the same multiple of this run's floor."""
    ratio, most_ratio = value_s / floor_s, most_s / QUIET_FLOOR_S
    return Line(what, ms(value_s), f"bare: {ms(floor_s)}", f"{ratio:.1f} ×", f"≤ {ms(most_s)} or {most_ratio:.1f} ×", value_s <= most_s or ratio <= most_ratio)


def slot_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about acquire and release."""
    acquire_s = median(measured.median(lambda it: it.acquire_s))
    yield Line("acquire of a ready slot, p50", ms(acquire_s), "", "", f"≤ {ms(MAX_ACQUIRE_S)}", acquire_s <= MAX_ACQUIRE_S)
    again_s, floor_s = median(measured.median(lambda it: it.release_to_acquire_s)), median(measured.median(lambda it: it.floor_call_s))
    yield time_line("release until leasable again, p50", again_s, floor_s, MAX_RELEASE_TO_ACQUIRE_S)


def start_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about sandboxes that start."""
    cold_s = statistics.median(start.took_s for start in measured.cold_starts)
    floor_s = statistics.median(start.floor_call_s for start in measured.cold_starts)
    ratio, most_ratio = cold_s / floor_s, MAX_COLD_START_S / QUIET_FLOOR_S
    is_met = cold_s <= MAX_COLD_START_S or ratio <= most_ratio
    bar = f"≤ {MAX_COLD_START_S:g} s or {most_ratio:,.0f} ×"
    yield Line("100 slots from a cold start", f"{cold_s:.1f} s", f"bare: {ms(floor_s)}", f"{ratio:,.0f} ×", bar, is_met)
    slot_bytes = [start.slot_bytes for start in measured.cold_starts if start.slot_bytes is not None]
    agent_bytes = [start.agent_bytes for start in measured.cold_starts if start.agent_bytes is not None]
    if slot_bytes:
        idle, agent = statistics.median(slot_bytes), f"its agent, for ten: {statistics.median(agent_bytes) / MB:.1f} MB"
        what, bar = "memory of an idle slot (PSS of all its processes)", f"≤ {MAX_SLOT_BYTES / MB:g} MB"
        yield Line(what, f"{idle / MB:.1f} MB", agent, "", bar, idle <= MAX_SLOT_BYTES)


def churn_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about many clients that use fresh slots."""
    floor_s = measured.churn_median(lambda it: it.floor_call_s)
    bars = (
        ("a command in a held slot while 100 clients use fresh slots, p50", measured.churn_median(lambda it: it.neighbour_call_s), MAX_NEIGHBOUR_CALL_S),
        ("the own commands of 200 clients that use fresh slots, p50", measured.churn_median(lambda it: it.crowd_call_s), MAX_CROWD_CALL_S),
        ("acquire, release and reset, processor time of the machine", measured.churn_median(lambda it: it.cycle_cpu_s), MAX_CYCLE_CPU_S),
    )
    for what, value_s, most_s in bars:
        yield time_line(what, value_s, floor_s, most_s)
    rate, floor_rate = measured.churn_median(lambda it: it.cycle_rate), measured.churn_median(lambda it: it.floor_rate)
    ratio = measured.churn_median(lambda it: it.cycle_rate / it.floor_rate)
    what, beside = "acquire, command, release: cycles of 16 clients", f"bare, 4 at a time: {floor_rate:,.0f}/s"
    yield Line(what, f"{rate:,.0f}/s", beside, f"{ratio:.2f} ×", f"≥ {MIN_CYCLE_RATE_RATIO:g} ×", ratio >= MIN_CYCLE_RATE_RATIO)
    fresh, held = measured.churn_median(lambda it: it.python_fresh_rate), measured.churn_median(lambda it: it.python_held_rate)
    ratio = measured.churn_median(lambda it: it.python_fresh_rate / it.python_held_rate)
    what, beside = "`python3 -c 'print(6*7)'` in fresh slots, 16 clients", f"in four held slots: {held:,.0f}/s"
    yield Line(what, f"{fresh:,.0f}/s", beside, f"{ratio:.2f} ×", f"≥ {MIN_PYTHON_RATIO:g} ×", ratio >= MIN_PYTHON_RATIO)


def program_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about run-batches."""
    bare_rate = measured.run_batch_median(lambda it: it.bare_rate)
    beside = f"`subprocess`, 4 at a time: {bare_rate:,.0f}/s"
    rates: tuple[tuple[str, Callable[[RunBatchRound], float]], ...] = (
        ("1,000 short Python programs by run-batch, each in a fresh slot", lambda it: it.command_rate),
        ("the same, each in a file", lambda it: it.file_rate),
    )
    for what, rate in rates:
        ratio = measured.run_batch_median(lambda it, rate=rate: rate(it) / it.bare_rate)
        yield Line(what, f"{measured.run_batch_median(rate):,.0f}/s", beside, f"{ratio:.2f} ×", f"≥ {MIN_PROGRAM_RATIO:g} ×", ratio >= MIN_PROGRAM_RATIO)


def file_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about file tools and file routes."""
    rounds = measured.file_rounds
    command_s = statistics.median(it.operation_s[COMMAND] for it in rounds)
    for name in rounds[0].operation_s:
        if name == COMMAND:
            continue
        value_s = statistics.median(it.operation_s[name] for it in rounds)
        ratio = statistics.median(it.operation_s[name] / it.operation_s[COMMAND] for it in rounds)
        most = MAX_SEARCH_RATIO if name == "search_files" else MAX_FILE_RATIO
        yield Line(f"`{name}`, p50", ms(value_s), f"`{COMMAND}` in the same slot: {ms(command_s)}", f"{ratio:.2f} ×", f"≤ {most:g} ×", ratio <= most)
    rates: tuple[tuple[str, Callable[[FileRound], float]], ...] = (("in", lambda it: it.in_mib_per_s), ("out", lambda it: it.out_mib_per_s))
    for what, rate in rates:
        value = statistics.median(map(rate, rounds))
        yield Line(f"{LARGE_MIB} MiB of a file {what}", f"{value:.0f} MiB/s", "", "", f"≥ {MIN_LARGE_MIB_PER_S:g} MiB/s", value >= MIN_LARGE_MIB_PER_S)


def interactive_lines(measured: Measurements) -> Iterator[Line]:
    """Yield the lines about stateful shells, and about slots with networks of their own."""
    floor_s = measured.interactive_median(lambda it: it.floor_call_s)
    call_s = measured.interactive_median(lambda it: it.session_call_s)
    ratio = measured.interactive_median(lambda it: it.session_call_s / it.floor_call_s)
    bar = f"≤ {MAX_SESSION_CALL_RATIO:g} ×"
    yield Line("`true` in a stateful shell, p50", ms(call_s), f"bare: {ms(floor_s)}", f"{ratio:.2f} ×", bar, ratio <= MAX_SESSION_CALL_RATIO)
    start_s = measured.interactive_median(lambda it: it.session_start_s)
    ratio = measured.interactive_median(lambda it: it.session_start_s / it.floor_call_s)
    is_met = start_s <= MAX_SESSION_START_S or ratio <= MAX_SESSION_START_RATIO
    bar = f"≤ {ms(MAX_SESSION_START_S)} or {MAX_SESSION_START_RATIO:g} ×"
    yield Line("the first `true` of a stateful shell, p50", ms(start_s), f"bare: {ms(floor_s)}", f"{ratio:.1f} ×", bar, is_met)
    internet_s = [it.internet_cycle_cpu_s for it in measured.interactive_rounds if it.internet_cycle_cpu_s is not None]
    if internet_s:
        shared_s = measured.interactive_median(lambda it: it.cycle_cpu_s)
        ratio = statistics.median(it.internet_cycle_cpu_s / it.cycle_cpu_s for it in measured.interactive_rounds if it.internet_cycle_cpu_s is not None)
        what, beside = "acquire, release and reset with `network: internet`, processor time", f"with a shared network: {ms(shared_s)}"
        yield Line(what, ms(statistics.median(internet_s)), beside, f"{ratio:.2f} ×", f"≤ {MAX_INTERNET_RATIO:g} ×", ratio <= MAX_INTERNET_RATIO)


def render_table(measured: Measurements) -> tuple[str, bool]:
    """Return the table as Markdown, and whether every bar is met. What was not measured has no lines."""
    parts = (
        (measured.rounds, (one_call_lines, rate_lines, slot_lines)),
        (measured.file_rounds, (file_lines,)),
        (measured.cold_starts, (start_lines,)),
        (measured.churn_rounds, (churn_lines,)),
        (measured.run_batch_rounds, (program_lines,)),
        (measured.interactive_rounds, (interactive_lines,)),
    )
    lines = [line for rounds, parts_lines in parts if rounds for make_lines in parts_lines for line in make_lines(measured)]
    table = tables.render(["`bash -c true`", "this service", "beside", "ratio", "bar", "met"], [line.cells for line in lines])
    return f"{table}\nIsolation mode `{ISOLATION}`, {os.cpu_count()} cores.\n", all(line.met for line in lines)
