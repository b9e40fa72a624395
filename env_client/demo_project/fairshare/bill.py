"""A bill: who was there, what was paid, what each one owes."""

from fairshare.money import parse_cents


class Bill:
    """What a group of friends spent together."""

    def __init__(self, *friends):
        if not friends:
            raise ValueError("a bill needs at least one friend")
        self.friends = friends
        self.total_cents = 0

    def add(self, amount):
        """Add what was paid, as text."""
        self.total_cents += parse_cents(amount)

    def shares(self):
        """Say how many cents each friend owes; the first ones take what does not divide."""
        share = self.total_cents // len(self.friends)
        return {friend: share for friend in self.friends}
