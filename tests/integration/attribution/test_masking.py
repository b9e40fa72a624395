"""What a slot may try: to have its own failures taken for ours, which a trainer would mask, and its neighbours blamed for what it did."""

from __future__ import annotations

import os
import re
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.agent.kernel.priority import RAISED_NICE, RAISED_SLICE_NS, SLOT_SLICE_NS
from tests.integration.attribution.conftest import POOL, Open, new_pool, open_pool_harness
from tests.integration.attribution.pool_harness import HOG, TAKE_ALL_PROCESSES, PoolHarness, blame, proof
from tests.support.prepared.service import prepared_service
from tests.support.service import Service, running_service
from tests.support.users import ordinary_user

POLICY_LOST = ("sandbox_lost", "policy", None)


@pytest.mark.privileged
def test_who_ends_its_init_by_taking_all_memory_has_done_it_itself_and_alone(harness: PoolHarness) -> None:
    lease, neighbour = harness.acquire(2)
    beside = harness.begin_bash(neighbour, "until [ -e go ]; do sleep 0.02; done; echo fine")
    fill = "echo 0 > /proc/self/oom_score_adj; for i in $(seq 60); do dd if=/dev/zero of=/dev/shm/$i bs=64k count=100 2> /dev/null; done"
    calls = [{"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": command}, "timeout_s": 20} for command in (fill, "echo next")]
    first, second = harness.begin(*calls).result()

    assert blame(first) == ("oom", "policy", None)
    assert proof(first)["oom_kills"] >= 1
    assert blame(second) == blame(harness.bash(lease, "true")) == POLICY_LOST
    assert "memory" in second["error"]
    harness.bash(neighbour, "touch go")
    (other,) = beside.result()
    assert (blame(other), other["output"]) == (("exit", "none", 0), "fine\n")


@contextmanager
def small_disk(options: str) -> Iterator[Path]:
    folder = Path("/tmp", f"sp-{uuid.uuid4().hex[:8]}")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def fill_with_files(disk: Path) -> None:
    for number in range(100_000):
        (disk / f"filler-{number}").touch()


def fill_with_bytes(disk: Path) -> None:
    with (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


@pytest.fixture(scope="module")
def harness_on_disk() -> Iterator[PoolHarness]:
    """A service with its state folder on a small disk. The disk is memory, too, so the slots have no limit of memory."""
    with (
        small_disk("size=200m,nr_inodes=8000,mode=711") as disk,
        open_pool_harness({"max_sandboxes": 1, "max_file_mb": 200, "slot_memory_mb": None}, {"env": {"SANDBOX_STATE_DIR": str(disk)}}) as harness,
    ):
        harness.service.state_dir = disk
        yield harness


@pytest.fixture
def on_disk(harness_on_disk: PoolHarness) -> Iterator[PoolHarness]:
    """The service on the small disk, which is nearly empty before and after, and all of its slots free."""
    yield harness_on_disk
    disk = harness_on_disk.service.state_dir
    for filler in disk.glob("filler*"):
        filler.unlink()
    harness_on_disk.until(lambda: free_bytes(disk) > 100 << 20)
    harness_on_disk.until(lambda: harness_on_disk.ask("GET", "/readyz")["storage"]["ready"])
    harness_on_disk.release_all()
    assert harness_on_disk.slots()["quarantined"] == 0


def free_bytes(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


@pytest.mark.privileged
@pytest.mark.parametrize("fill_disk", [fill_with_files, fill_with_bytes], ids=["no-inodes", "no-bytes"])
def test_a_disk_that_others_have_filled_hides_no_verdict_and_no_end_of_an_output(on_disk: PoolHarness, fill_disk: Callable[[Path], None]) -> None:
    harness, disk = on_disk, on_disk.service.state_dir
    lease, neighbour = harness.acquire(2)
    with pytest.raises(OSError, match="No space left"):
        fill_disk(disk)
    before = time.monotonic()
    for each in (lease, neighbour):
        result = harness.bash(each, "seq 40000; exit 3", timeout_s=5)
        assert blame(result) == ("exit", "none", 3)
        assert result["output"].startswith("1\n2\n")
        assert result["output"].endswith("\n40000\n")
        refused = harness.call(each, "write_file", {"path": "new", "content": "x" * 100_000})
        if refused["success"]:  # into the room of the service's own reserve, which it has given up meanwhile
            with pytest.raises(OSError, match="No space left"):
                fill_disk(disk)
            refused = harness.call(each, "write_file", {"path": "newer", "content": "x" * 100_000})
        assert blame(refused) == ("tool_error", "policy", None)
        assert proof(refused)["errno"] == "ENOSPC"
    assert time.monotonic() - before < 10


# After an agent has found a disk full, it measures the slots on it again only 5 s later. Other tests are between those that fill the disk, and use this time.
SLOT_FILLS = {
    "files": "i=0; while :; do : > f$i; i=$((i+1)); done 2> /dev/null",
    "bytes": "i=0; while :; do head -c 7M /dev/zero > f$i; i=$((i+1)); done 2> /dev/null",
    "deleted": 'for i in {10..90}; do eval "exec $i> f; rm f; head -c 7M /dev/zero >&$i"; done 2> /dev/null; sleep 60',
}


def fill_from_a_slot(on_disk: PoolHarness, fill: str) -> None:
    """Check that a slot which fills the disk is ended, and nobody else."""
    harness, disk = on_disk, on_disk.service.state_dir
    filler, neighbour = harness.acquire(2)
    beside = harness.begin_bash(neighbour, "until [ -e go ]; do sleep 0.02; done; echo fine", timeout_s=150)
    result = harness.bash(filler, SLOT_FILLS[fill], timeout_s=60)

    assert blame(result) == ("resource_limit", "policy", None)
    assert "the disk was nearly full" in result["error"]
    assert blame(harness.bash(filler, "true")) == POLICY_LOST
    harness.until(lambda: free_bytes(disk) > 100 << 20 and os.statvfs(disk).f_favail > 1000)
    assert harness.bash(neighbour, "touch go")["success"]
    (other,) = beside.result()
    assert (blame(other), other["output"]) == (("exit", "none", 0), "fine\n")
    harness.until(lambda: not harness.slots()["resetting"])
    assert harness.slots()["quarantined"] == 0


@contextmanager
def within_group(controller: str, **limits: int) -> Iterator[Path]:
    """Put what is started meanwhile into a control group around everything, as a container's would be. Returns the group's folder."""
    mount = Path("/sys/fs/cgroup", controller)
    if not (mount / "cgroup.procs").exists():
        pytest.skip(f"no hierarchy of its own for {controller}, which is where a test can put one group around others")
    lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    home = mount / next(line.split(":", 2)[2].lstrip("/") for line in lines if controller in line.split(":", 2)[1].split(","))
    group = home / f"sp-test-{uuid.uuid4().hex[:8]}"
    prepared_service()  # It lives as long as the tests. If its first use were within the group, the group would never be empty.
    group.mkdir()
    for name, value in limits.items():
        (group / name.replace("__", ".")).write_text(str(value), encoding="ascii")
    (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    try:
        yield group
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        PoolHarness.until(lambda: not (group / "cgroup.procs").read_text(encoding="ascii") and _removed(group))


def _removed(group: Path) -> bool:
    for below in sorted(group.glob("**/"), reverse=True):
        try:
            below.rmdir()
        except OSError:
            return False  # a process of it is still being reaped
    return True


@pytest.fixture(scope="module")
def unprivileged_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of an ordinary user who has no bubblewrap."""
    environ = {"PATH": str(tmp_path_factory.mktemp("empty"))}
    with running_service({"pools": {"default": {**POOL, "min_sandboxes": 0}}}, env=environ, runner=ordinary_user()) as service:
        yield service


@pytest.fixture
def unisolated(unprivileged_service: Service) -> Iterator[PoolHarness]:
    """Slots in the mode `none`: one user for all, and no counters."""
    # Whatever else this user runs on the machine counts too, so the limit is wide.
    pool = {"allow_none": True, "slots_per_sandbox": 3, "max_sandboxes": 1, "slot_processes": 400}
    with new_pool(unprivileged_service, pool, ordinary_user()) as harness:
        yield harness
        harness.release_all()


def acquired(harness: PoolHarness) -> list[dict[str, Any]]:
    leases = harness.acquire(3, run_id="r")
    assert {lease["isolation"] for lease in leases} == {"none"}
    return leases


@pytest.mark.privileged
def test_of_slots_that_fill_what_all_of_them_have_one_is_ended_and_not_by_the_kernel(open_service: Open) -> None:
    with within_group("memory", memory__limit_in_bytes=600 << 20):
        harness = open_service(slot_memory_mb=400, max_sandboxes=1)
        effective = harness.view()["effective"]
        assert (effective["slots_memory_mb"], effective["slot_memory_mb"]) == (450, 400)
        hold = "exec python3 -c 'import time; x = bytearray(300 << 20); time.sleep(60)'"
        running = [harness.begin({"lease_id": lease["lease_id"], "tool": "bash", "args": {"command": hold}}) for lease in harness.acquire(2)]
        killed, survives = wait(running, 20, FIRST_COMPLETED)

        (result,) = killed.pop().result()
        assert blame(result) == ("oom", "ambiguous", None)
        assert proof(result)["used_mb"] > proof(result)["share_mb"] == effective["share_memory_mb"]
        assert len(survives) == 1
        harness.release_all()
        harness.service.stop()


@pytest.mark.privileged
@pytest.mark.timeout(180)
def test_a_slot_that_fills_the_disk_of_the_state_folder_with_files_is_ended_and_nobody_else(on_disk: PoolHarness) -> None:
    fill_from_a_slot(on_disk, "files")


@pytest.mark.privileged
def test_who_takes_everybodys_processes_does_not_have_its_neighbour_blamed(open_service: Open) -> None:
    with within_group("pids") as group:
        harness = open_service(slot_processes=150, max_sandboxes=1)
        taker, neighbour = harness.acquire(2)
        # The rest of the group leaves the taker a little less than its own limit.
        others = int((group / "pids.current").read_text(encoding="ascii"))
        (group / "pids.max").write_text(str(others + 145), encoding="ascii")
        assert harness.python(taker, TAKE_ALL_PROCESSES)["success"]
        harness.until(lambda: harness.bash(taker, "true")["reason"] == "resource_limit")
        refused = harness.bash(neighbour, "true")

        assert blame(refused) == ("backend_error", "infra", None)
        assert refused["metadata"]["may_have_run"] is False
        assert proof(refused)["processes"] < 10
        assert "only" in refused["error"]
        harness.release_all()
        harness.service.stop()


def test_without_counters_a_slots_own_processes_are_counted_before_it_is_blamed(unisolated: PoolHarness) -> None:
    taker, neighbour, _ = acquired(unisolated)
    assert unisolated.python(taker, TAKE_ALL_PROCESSES)["success"]
    unisolated.until(lambda: unisolated.bash(taker, "true")["reason"] == "resource_limit")

    own, others = unisolated.bash(taker, "true"), unisolated.bash(neighbour, "true")
    assert blame(own) == ("resource_limit", "policy", None)
    assert proof(own)["processes"] >= 300
    assert blame(others) == ("backend_error", "infra", None)
    assert proof(others)["processes"] < 10


@pytest.mark.privileged
@pytest.mark.timeout(180)
def test_a_slot_that_fills_the_disk_of_the_state_folder_with_bytes_is_ended_and_nobody_else(on_disk: PoolHarness) -> None:
    fill_from_a_slot(on_disk, "bytes")


def test_without_isolation_a_killed_init_proves_nothing_and_its_slot_is_not_used_again(unisolated: PoolHarness) -> None:
    lease, neighbour, _ = acquired(unisolated)
    # What an earlier test has started as the same user counts for the limit of processes until it has been reaped.
    unisolated.until(lambda: unisolated.bash(lease, "true")["success"])
    result = unisolated.bash(lease, "kill -9 $PPID; sleep 60")

    assert blame(result) == blame(unisolated.bash(lease, "true")) == ("sandbox_lost", "infra", None)
    assert "own_work" not in proof(result)
    assert unisolated.bash(neighbour, "echo fine")["output"] == "fine\n"
    unisolated.until(lambda: unisolated.slots()["quarantined"] == 1)


@pytest.mark.privileged
def test_without_a_limit_of_its_own_what_a_slot_runs_is_still_taken_first_when_memory_runs_out(open_pool: Open) -> None:
    harness = open_pool(slot_memory_mb=None, slots_per_sandbox=2)
    (lease,) = harness.acquire()
    result = harness.bash(lease, "cat /proc/self/oom_score_adj")
    init = harness.init(lease)

    of_init, of_agent, of_service = (
        int(Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii")) for pid in (init.pid, harness.agent(lease).pid, harness.service.process.pid)
    )
    assert (int(result["output"]), of_init) == (600, 300)
    told = harness.view()["capabilities"]["not_enforced"]
    assert of_agent == of_service == (0 if any("oom_score_adj" in sentence for sentence in told) else -900)
    assert harness.bash(lease, HOG)["success"]


@pytest.mark.privileged
def test_service_and_agent_claim_the_processor_before_what_slots_run(harness: PoolHarness) -> None:
    if os.getpriority(os.PRIO_PROCESS, 0) > 0:
        pytest.skip("these tests were started with a lower priority than an ordinary one, and the service leaves it so")
    (lease,) = harness.acquire()
    of_slot = harness.bash(lease, "nice; cat /proc/self/autogroup 2> /dev/null | cut -d' ' -f3")["output"].split()
    init, agent, service = harness.init(lease).pid, harness.agent(lease).pid, harness.service.process.pid

    assert set(of_slot) == {"0"}
    assert os.getpriority(os.PRIO_PROCESS, init) == 0
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in (agent, service)] == [RAISED_NICE, RAISED_NICE]
    threads = [int(thread.name) for thread in Path(f"/proc/{service}/task").iterdir()]
    assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {RAISED_NICE}
    for pid in (agent, service):
        session = Path(f"/proc/{pid}/autogroup")
        claim_of_session = session.read_text(encoding="ascii").split()[-1:] if session.exists() else []
        assert claim_of_session in ([], [str(RAISED_NICE)])  # []: the kernel does not group that session, and its threads' own claims count
    sched = Path("/proc/self/sched")
    if sched.exists() and slice_ms(sched.read_text(encoding="ascii")) is not None:
        slices_ms = [slice_ms(Path(f"/proc/{pid}/sched").read_text(encoding="ascii")) for pid in (init, agent, service)]
        assert slices_ms == [SLOT_SLICE_NS / 1e6, RAISED_SLICE_NS / 1e6, RAISED_SLICE_NS / 1e6]
        assert slice_ms(harness.bash(lease, "cat /proc/self/sched")["output"]) == SLOT_SLICE_NS / 1e6


def slice_ms(sched: str) -> float | None:
    """Return the time slice in milliseconds, from /proc/PID/sched; None if the kernel has no slices or does not show them."""
    found = re.search(r"^se\.slice\s*:\s*(\d+)$", sched, re.MULTILINE)
    return int(found[1]) / 1e6 if found else None


@pytest.mark.privileged
@pytest.mark.timeout(180)
def test_a_slot_that_fills_the_disk_of_the_state_folder_with_deleted_files_is_ended_and_nobody_else(on_disk: PoolHarness) -> None:
    fill_from_a_slot(on_disk, "deleted")


@pytest.mark.privileged
def test_a_slot_over_its_own_limit_of_disk_is_ended_and_that_is_the_policys(open_pool: Open) -> None:
    harness = open_pool(slot_disk_mb=40, max_sandboxes=1, slots_per_sandbox=2)
    assert harness.view()["effective"]["slot_disk_mb"] == 40
    lease, neighbour = harness.acquire(2)
    result = harness.bash(lease, "mkdir -p a/b; for i in $(seq 10); do head -c 7M /dev/zero > a/b/f$i; done; sleep 60", timeout_s=60)

    assert blame(result) == ("resource_limit", "policy", None)
    assert proof(result)["limit_mb"] == 40
    assert blame(harness.bash(neighbour, "true")) == ("exit", "none", 0)
    assert blame(harness.bash(lease, "true")) == POLICY_LOST


@pytest.mark.privileged
def test_of_slots_that_fill_the_disk_together_the_largest_is_ended_and_that_is_ambiguous_in_later_calls_too(on_disk: PoolHarness) -> None:
    filler, neighbour = on_disk.acquire(2)
    assert on_disk.bash(neighbour, "head -c 60M /dev/zero > f")["success"]
    result = on_disk.bash(filler, SLOT_FILLS["bytes"], timeout_s=60)

    assert blame(result) == ("resource_limit", "ambiguous", None)
    late = on_disk.bash(filler, "true")
    assert blame(late) == ("sandbox_lost", "ambiguous", None)
    assert proof(late)["used_mb"] == proof(result)["used_mb"] > 60
    assert blame(on_disk.bash(neighbour, "true")) == ("exit", "none", 0)
