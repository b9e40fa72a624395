"""Amounts of money as whole cents: what people write, and what they read."""

import re

_AMOUNT = re.compile(r"\s*(\d+)(?:\.(\d{1,2}))?\s*")


def parse_cents(text):
    """Turn `12`, `12.5` or `12.50` into cents; raises ValueError for anything else."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"not an amount of money: {text!r}")
    whole, fraction = match.groups()
    return int(whole) * 100 + int((fraction or "0").ljust(2, "0"))


def show_cents(cents):
    """Turn cents into text: 1250 becomes `12.50`."""
    return f"{cents // 100}.{cents % 100:02d}"
