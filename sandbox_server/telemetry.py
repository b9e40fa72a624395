"""Log formats and Prometheus metrics."""

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
"""The fields that every log line of the current request has: `request_id` and `tenant`."""

_STANDARD_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(request_fields.get({}))
    fields.update((name, value) for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES)
    return fields


_encode = json.JSONEncoder(default=str).encode


class JsonFormatter(logging.Formatter):
    """Formats a log record as one line of JSON: time, level, logger, message, the fields of the request, and the fields of `extra=`."""

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
        return _encode(line)


class TextFormatter(logging.Formatter):
    """Formats a log record for a person: time, level, message, and the same fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        text = f"{clock} {record.levelname.lower():<7} {record.getMessage()}{fields}"
        return text + "\n" + self.formatException(record.exc_info) if record.exc_info else text


def configure_logging(log_format: str, level: str) -> None:
    """Send every log line of the process to stderr in one format.

    This includes the log of uvicorn, but not its access log, because the service logs requests itself.

    Args:
        log_format: `json` or `text`.
        level: `debug`, `info`, `warning` or `error`.
    """
    # No line has any of these, and finding them out takes longer than writing the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # the way that the documentation of the library gives to leave out where a line comes from
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
"""The tools of the contract. Metrics count every other name as `other`: a client can send any text as a name, and each would add time series."""
OTHER_TOOL: Final = "other"
METRICS_CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4


class MetricDefinition(NamedTuple):
    """The definition of a metric: its type, its help text, the names of its labels, and the buckets of a histogram."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS_S


POOL_TENANT: Final = "pool_tenant"
"""The label for the owner of a pool, which distinguishes pools of the same name."""

METRICS: Final[Mapping[str, MetricDefinition]] = {
    "sandbox_slots": MetricDefinition(Gauge, "slots by state", ("pool", POOL_TENANT, "state")),
    "sandbox_sandboxes": MetricDefinition(Gauge, "sandboxes by state", ("pool", POOL_TENANT, "state")),
    "sandbox_acquire_queue": MetricDefinition(Gauge, "acquires that wait in the queue", ("pool", POOL_TENANT)),
    "sandbox_held_slots": MetricDefinition(Gauge, "free slots that are held for the claimant", ("pool", POOL_TENANT)),
    "sandbox_acquire_seconds": MetricDefinition(Histogram, "how long granted acquires waited", ("pool", POOL_TENANT)),
    "sandbox_exec_seconds": MetricDefinition(Histogram, "how long tool calls ran, as their agents measured it", ("pool", POOL_TENANT, "tool")),
    "sandbox_exec_total": MetricDefinition(Counter, "tool calls that came to a result", ("pool", POOL_TENANT, "tool", "reason", "fault")),
    "sandbox_exec_overhead_seconds": MetricDefinition(Histogram, "what the service added to tool calls", (), OVERHEAD_BUCKETS_S),
    "sandbox_reset_seconds": MetricDefinition(Histogram, "how long resets of slots took", ("pool", POOL_TENANT)),
    "sandbox_slot_dirty_total": MetricDefinition(Counter, "slots whose reset could not be proven clean", ("pool", POOL_TENANT)),
    "sandbox_backend_calls_total": MetricDefinition(Counter, "calls to backends", ("backend", "op", "outcome")),
    "sandbox_leases_expired_total": MetricDefinition(Counter, "leases that ended because nobody renewed them", ("pool", POOL_TENANT)),
}
"""Every metric at `/metrics`."""


class Telemetry:
    """The metrics of one service, in a registry of its own. Methods take the names of `METRICS`."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has types for everything but this function
        self.registry = CollectorRegistry()
        self._metrics = {name: self._create(name, definition) for name, definition in METRICS.items()}
        self._children: dict[tuple[str, ...], Any] = {}

    def _create(self, name: str, definition: MetricDefinition) -> Counter | Gauge | Histogram:
        if definition.kind is Histogram:
            return Histogram(name, definition.help, definition.labels, registry=self.registry, buckets=definition.buckets)
        return definition.kind(name, definition.help, definition.labels, registry=self.registry)

    def _child(self, name: str, labels: Mapping[str, str]) -> Any:
        """Return a metric with its labels. It is cached, because looking it up in the registry costs more than counting."""
        key = (name, *labels.values())
        child = self._children.get(key)
        if child is None:
            metric = self._metrics[name]
            child = self._children[key] = metric.labels(**labels) if labels else metric
        return child

    def count(self, name: str, **labels: str) -> None:
        """Increase a counter by 1."""
        self._child(name, labels).inc()

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a measured value to a histogram."""
        self._child(name, labels).observe(value)

    def count_call(self, *, pool: str, tool: str, reason: str, fault: str, duration_s: float, overhead_s: float | None, pool_tenant: str = "") -> None:
        """Count the result of a tool call.

        Args:
            pool: the name of the pool.
            tool: the name of the tool.
            reason: the reason of the result.
            fault: the fault of the result.
            duration_s: how long the call ran, in seconds.
            overhead_s: how many seconds the service added; None if the call never reached its agent.
            pool_tenant: the owner of the pool; empty if it belongs to no tenant.
        """
        tool = tool if tool in TOOLS else OTHER_TOOL
        self.count("sandbox_exec_total", pool=pool, pool_tenant=pool_tenant, tool=tool, reason=reason, fault=fault)
        self.observe("sandbox_exec_seconds", duration_s, pool=pool, pool_tenant=pool_tenant, tool=tool)
        if overhead_s is not None:
            self.observe("sandbox_exec_overhead_seconds", max(0.0, overhead_s))

    def text(self, gauges: Iterable[tuple[str, Mapping[str, str], float]]) -> bytes:
        """Return all metrics in the text format of Prometheus.

        Args:
            gauges: the current value of every gauge: name, labels, value. A gauge that is not among them is removed.
        """
        for name, definition in METRICS.items():
            if definition.kind is Gauge:
                self._metrics[name].clear()
        for name, labels, value in gauges:
            gauge = self._metrics[name]
            assert isinstance(gauge, Gauge), f"{name} is no gauge"
            gauge.labels(**labels).set(value)
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its samples.

        An empty `pool_tenant` label is left out, because Prometheus treats an empty label like a missing one.
        """
        for metric in self.registry.collect():
            metric.samples = [
                sample._replace(labels={name: value for name, value in sample.labels.items() if value or name != POOL_TENANT}) for sample in metric.samples
            ]
            yield metric

    def value(self, name: str, **labels: str) -> float:
        """Return the value of one sample; 0 if there is none. For tests."""
        return next((sample.value for metric in self.collect() for sample in metric.samples if (sample.name, sample.labels) == (name, labels)), 0.0)
