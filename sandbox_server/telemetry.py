"""Log lines, counters, histograms. Decides nothing."""

from __future__ import annotations

import bisect
import json
import logging
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

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
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False


BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Measured values, by the bounds they fell below."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one."""
        self.counts[bisect.bisect_left(BUCKETS_S, value)] += 1
        self.total += value


class Telemetry:
    """What the service counts: numbers that only grow, and how often a measured time fell below each bound, by name and labels."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}

    def count(self, name: str, **labels: str) -> None:
        """One more of these."""
        values = self.counters.setdefault(name, {})
        key = tuple(labels.items())
        values[key] = values.get(key, 0.0) + 1.0

    def observe(self, name: str, value: float, **labels: str) -> None:
        """One measured value."""
        histograms = self.histograms.setdefault(name, {})
        key = tuple(labels.items())
        histogram = histograms.get(key)
        if histogram is None:
            histogram = histograms[key] = Histogram()
        histogram.observe(value)

    def call_ended(self, *, pool: str, tool: str, reason: str, fault: str, duration_s: float) -> None:
        """A tool call came to a result."""
        # An unknown tool is the caller's text: as a label it would let anyone grow this table.
        tool = "" if reason == "invalid_args" else tool
        self.count("sandbox_exec_total", pool=pool, tool=tool, reason=reason, fault=fault)
        self.observe("sandbox_exec_seconds", duration_s, pool=pool, tool=tool)
