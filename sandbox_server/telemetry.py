"""Log lines, counters, histograms. Decides nothing."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric

request_fields: ContextVar[Mapping[str, Any]] = ContextVar("request_fields")
"""The fields that every log line of this request carries: `request_id`, `tenant`."""

_PLAIN_RECORD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(request_fields.get({}))
    fields.update((name, value) for name, value in vars(record).items() if name not in _PLAIN_RECORD)
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields of the request, and whatever `extra=` adds."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """The same for a person: time, level, message, then the fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = f"{clock} {record.levelname.lower():<7} {record.getMessage()}{fields}"
        return text + "\n" + self.formatException(record.exc_info) if record.exc_info else text


def configure_logging(log_format: str, level: str) -> None:
    """Send every log line of the process to stderr, in one form; uvicorn's own too, its access log aside (the service logs requests itself).

    Args:
        log_format: `json` or `text`.
        level: `debug`, `info`, `warning` or `error`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
    # At its debug level the WebSocket library writes every header of a handshake to this logger, the token included.
    logging.getLogger("uvicorn.error").setLevel(max(logging.INFO, root.level))
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False


BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
OVERHEAD_BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 10.0)
TOOLS: Final = frozenset(
    {
        "bash", "bash_stateful", "tmux", "process", "read_file", "write_file", "edit_file", "list_files", "search_files", "terminal", "terminal_stateful",
    }
)  # fmt: skip
"""The tools of the contract. Any other name is a caller's own text: as a label it would let anyone grow the figures without bound."""
OTHER_TOOL: Final = "other"
METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


class MetricDefinition(NamedTuple):
    """What is known of a figure before anything was counted."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS_S


TENANT: Final = "pool_tenant"
"""The label that tells same-named pools of two tenants apart."""

METRICS: Final[Mapping[str, MetricDefinition]] = {
    "sandbox_slots": MetricDefinition(Gauge, "slots by what they are doing", ("pool", TENANT, "state")),
    "sandbox_sandboxes": MetricDefinition(Gauge, "sandboxes by where they are in their life", ("pool", TENANT, "state")),
    "sandbox_acquire_queue": MetricDefinition(Gauge, "acquires that wait", ("pool", TENANT)),
    "sandbox_held_slots": MetricDefinition(Gauge, "free slots that are held for the claimant", ("pool", TENANT)),
    "sandbox_acquire_seconds": MetricDefinition(Histogram, "how long an acquire that was granted had waited", ("pool", TENANT)),
    "sandbox_exec_seconds": MetricDefinition(Histogram, "how long tool calls ran, as their agents measured it", ("pool", TENANT, "tool")),
    "sandbox_exec_total": MetricDefinition(Counter, "tool calls that came to a result", ("pool", TENANT, "tool", "reason", "fault")),
    "sandbox_exec_overhead_seconds": MetricDefinition(Histogram, "what the service added to tool calls", (), OVERHEAD_BUCKETS_S),
    "sandbox_reset_seconds": MetricDefinition(Histogram, "how long resets of slots took", ("pool", TENANT)),
    "sandbox_slot_dirty_total": MetricDefinition(Counter, "slots whose reset could not be proven", ("pool", TENANT)),
    "sandbox_backend_calls_total": MetricDefinition(Counter, "calls to backends", ("backend", "op", "outcome")),
    "sandbox_leases_expired_total": MetricDefinition(Counter, "leases that ended because nobody renewed them", ("pool", TENANT)),
}
"""Every figure at `/metrics`."""


class Telemetry:
    """What the service counts and measures, by the names of `METRICS`, in a registry of its own."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._figures = {name: self._make(name, figure) for name, figure in METRICS.items()}
        self._children: dict[tuple[str, ...], Any] = {}

    def _make(self, name: str, figure: MetricDefinition) -> Counter | Gauge | Histogram:
        if figure.kind is Histogram:
            return Histogram(name, figure.help, figure.labels, registry=self.registry, buckets=figure.buckets)
        return figure.kind(name, figure.help, figure.labels, registry=self.registry)

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        """A figure under its labels. Finding it anew each time costs more than counting."""
        key = (name, *labels.values())
        child = self._children.get(key)
        if child is None:
            figure = self._figures[name]
            child = self._children[key] = figure.labels(**labels) if labels else figure
        return child

    def count(self, name: str, **labels: str) -> None:
        """One more of these."""
        self._child(name, labels).inc()

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One measured value."""
        self._child(name, labels).observe(value)

    def call_ended(self, *, pool: str, tool: str, reason: str, fault: str, duration_s: float, overhead_s: float | None, pool_tenant: str = "") -> None:
        """A tool call came to a result. `overhead_s`: what the service added; None if the call never reached its agent. `pool_tenant`: who owns the pool."""
        tool = tool if tool in TOOLS else OTHER_TOOL
        self.count("sandbox_exec_total", pool=pool, pool_tenant=pool_tenant, tool=tool, reason=reason, fault=fault)
        self.observe("sandbox_exec_seconds", duration_s, pool=pool, pool_tenant=pool_tenant, tool=tool)
        if overhead_s is not None:
            self.observe("sandbox_exec_overhead_seconds", max(0.0, overhead_s))

    def text(self, gauges: Iterable[tuple[str, Mapping[str, str], float]]) -> bytes:
        """Everything, as Prometheus reads it.

        Args:
            gauges: what stands now: name, labels, value. What is not among them has gone.
        """
        for name, figure in METRICS.items():
            if figure.kind is Gauge:
                self._figures[name].clear()
        for name, labels, value in gauges:
            self._figures[name].labels(**labels).set(value)  # type: ignore[union-attr]
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Every figure with its samples. A label without a value is left out, which Prometheus takes for the same: a pool that no tenant owns has none."""
        for metric in self.registry.collect():
            metric.samples = [
                sample._replace(labels={name: value for name, value in sample.labels.items() if value or name != TENANT}) for sample in metric.samples
            ]
            yield metric

    def value(self, name: str, **labels: str) -> float:
        """What one sample stands at, for tests; 0 if there is none."""
        return next((sample.value for metric in self.collect() for sample in metric.samples if (sample.name, sample.labels) == (name, labels)), 0.0)
