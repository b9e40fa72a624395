"""Split a bill among friends, to the cent."""

from fairshare.bill import Bill
from fairshare.money import parse_cents, show_cents

__all__ = ["Bill", "parse_cents", "show_cents"]
