"""The table of a benchmark run: what was measured, beside what, and whether the bar is met."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.bench.floor import Floor
from tests.bench.peer import Peer
from tests.support import tables

MB = 1_000_000


@dataclass(frozen=True)
class Line:
    """One line of the table: a value, what it is held against, and the bar."""

    what: str
    value: str
    beside: str
    ratio: str
    bar: str
    met: bool

    @property
    def cells(self) -> list[str]:
        """As a row of the table."""
        return [self.what, self.value, self.beside, self.ratio, self.bar, "yes" if self.met else "**no**"]


def ms(value_s: float) -> str:
    """Seconds as milliseconds, for people."""
    return f"{value_s * 1000:.1f} ms"


def lines(found: Mapping[str, Any], floor: Floor, peer: Peer | None) -> list[Line]:
    """Every line that could be measured."""
    one_s, rate = found["one_call_s"], found["batch_rate"]
    ratio, rate_ratio = one_s / floor.p50_s, rate / floor.rate
    it = [
        Line("one call at a time, p50", ms(one_s), f"bare: {ms(floor.p50_s)}", f"{ratio:.2f} ×", "≤ 2.6 ×", ratio <= 2.6),
        Line(
            "256 calls over 64 slots in one exec-batch",
            f"{rate:,.0f}/s",
            f"bare, 4 at a time: {floor.rate:,.0f}/s",
            f"{rate_ratio:.2f} ×",
            "≥ 0.6 ×",
            rate_ratio >= 0.6,
        ),
    ]
    if peer is not None:
        against, through = one_s / peer.p50_s, found["one_client_call_s"]
        it[1:1] = [
            Line("the same", ms(one_s), f"SWE-ReX `execute`, not isolated: {ms(peer.p50_s)}", f"{against:.2f} ×", "≤ 1 ×", against <= 1),
            Line(
                "the same through `env_client`",
                ms(through),
                f"SWE-ReX `execute` by its own client: {ms(peer.p50_s)}",
                f"{through / peer.p50_s:.2f} ×",
                "–",
                True,
            ),
        ]
        it.append(Line("the same", f"{rate:,.0f}/s", f"SWE-ReX, 8 clients, not isolated: {peer.rate:,.0f}/s", f"{rate / peer.rate:.2f} ×", "–", True))
    it += [
        Line("acquire of a ready slot, p50", ms(found["acquire_s"]), "", "", "≤ 3 ms", found["acquire_s"] <= 0.003),
        Line("release until leasable again, p50", ms(found["again_s"]), "", "", "≤ 50 ms", found["again_s"] <= 0.050),
        Line("100 slots from a cold start", f"{found['cold_start_s']:.1f} s", "", "", "≤ 5 s", found["cold_start_s"] <= 5),
    ]
    if "idle_slot_bytes" in found:
        idle, agent = found["idle_slot_bytes"], f"its agent, for ten: {found['agent_bytes'] / MB:.1f} MB"
        it.append(Line("memory of an idle slot (PSS of all its processes)", f"{idle / MB:.1f} MB", agent, "", "≤ 12 MB", idle <= 12 * MB))
    return it


def rendered(found: Mapping[str, Any], floor: Floor, peer: Peer | None) -> tuple[str, bool]:
    """The table as Markdown, and whether every bar is met."""
    rows = lines(found, floor, peer)
    table = tables.render(["`bash -c true`", "this service", "beside", "ratio", "bar", "met"], [line.cells for line in rows])
    return f"{table}\nIsolation mode `{found['isolation']}`, {os.cpu_count()} cores.\n", all(line.met for line in rows)
