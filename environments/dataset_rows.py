"""The rows of a data set."""

from __future__ import annotations


class UnusableRow(Exception):
    """A row of a data set cannot be used, whatever the model does; the message says why."""
