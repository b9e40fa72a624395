"""Tests that the same operations give the same results through curl, the command line and both Python clients."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.walkers import WALKERS, Outcome, Refused, Walker
from tests.support.service import Service


@pytest.fixture(params=WALKERS)
def walker(request: pytest.FixtureRequest, service: Service, tmp_path: Path) -> Iterator[Walker]:
    one = WALKERS[request.param](service, tmp_path)
    yield one
    one.close()


@pytest.fixture
def lease(walker: Walker) -> Iterator[str]:
    lease_id = walker.acquire("walk")
    yield lease_id
    walker.release(lease_id)


@pytest.mark.timeout(180)
def test_all_operations_in_sequence(walker: Walker) -> None:
    lease = walker.acquire("the-walk")
    assert lease in walker.held("the-walk")

    assert walker.exec(lease, "echo hello; echo world >&2; exit 3") == Outcome("hello\nworld\n", 3, "exit")
    assert walker.batch(lease, ["echo 1 > n; cat n", "cat n; exit 1", "rm n"]) == [Outcome("1\n", 0, "exit"), Outcome("1\n", 1, "exit"), Outcome("", 0, "exit")]

    content = bytes(range(256)) * 300
    walker.write(lease, "data/a.bin", content)
    assert walker.read(lease, "data/a.bin") == content
    assert walker.list(lease, "data") == [("a.bin", len(content))]
    walker.copy(lease, "data", "copy")
    assert walker.read(lease, "copy/a.bin") == content

    assert walker.renew(lease, 7200) == pytest.approx(time.time() + 7200, abs=30)

    assert walker.interrupt(lease, "echo begun; sleep 60", "begun\n") == Outcome("begun\n", None, "cancelled")

    assert walker.release(lease) == [lease]
    assert walker.held("the-walk") == []
    with pytest.raises(Refused, match=r"^lease_lost$"):
        walker.exec(lease, "true")


def test_narrowing_takes_the_network_away_and_keeps_the_files(walker: Walker, lease: str, service: Service) -> None:
    with service.http() as http:
        if "none" not in http.get("/v1/pools/default").json()["capabilities"]["network"]:
            pytest.skip("no isolation mode of this machine can take the network away from a slot")
    walker.exec(lease, "echo kept > file")

    assert walker.narrow(lease) is False
    assert walker.exec(lease, "cat file; grep -c : /proc/net/dev") == Outcome("kept\n1\n", 0, "exit")


def test_an_unknown_lease_is_refused(walker: Walker) -> None:
    with pytest.raises(Refused, match=r"^lease_not_found$"):
        walker.exec("no-such-lease", "true")
