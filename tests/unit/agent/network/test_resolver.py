"""What the resolver takes of one slot, so that it has time and room for the others."""

from __future__ import annotations

from sandbox_server.agent.network.names.name_servers import NameServers
from sandbox_server.agent.network.names.resolver import QuestionRate, Resolver
from sandbox_server.agent.network.rules import MAX_QUESTIONS_S


def test_the_questions_of_a_slot_in_one_second_are_limited_and_those_of_others_are_not_affected() -> None:
    rate = QuestionRate()
    assert sum(rate.take("198.18.1.0", 10.0 + at / 1000) for at in range(900)) == MAX_QUESTIONS_S
    assert rate.take("198.18.1.1", 10.9)
    assert rate.take("198.18.1.0", 11.0)


def test_the_shares_of_all_slots_fit_together() -> None:
    for slots in (1, 16, 64, 200):
        resolver = Resolver(NameServers(), lambda slot, name: True, lambda slot, addresses, time_s, most: addresses, lambda slots=slots: slots)
        assert 2 <= resolver.share(1024, 64) <= 1024 // slots
        assert resolver.share(1024, 64) <= 64
