"""Which processes belong together, from a table of them."""

from __future__ import annotations

from sandbox_server.agent.init.process_table import find_trees, select_living

# pid -> parent, session, start, state
TABLE = {
    1: (0, 1, 0, b"S"),
    10: (1, 10, 5, b"S"),  # a run
    11: (10, 10, 6, b"S"),
    12: (11, 12, 7, b"S"),  # in a session of its own
    13: (1, 12, 8, b"S"),  # an orphan of that session
    14: (13, 14, 9, b"Z"),
    20: (1, 20, 5, b"S"),  # another run
    21: (20, 20, 6, b"S"),
}


def test_descendants_their_sessions_and_what_comes_of_those() -> None:
    assert find_trees(TABLE, [10]) == {10, 11, 12, 13, 14}
    assert find_trees(TABLE, [20]) == {20, 21}
    assert find_trees(TABLE, []) == set()


def test_the_dead_are_not_counted() -> None:
    assert select_living(TABLE, [13, 14, 99]) == {13: 8}
