"""Every attack in every mode that this machine has: it must be held off, or be one that the README calls weak in that mode."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest

from tests.hostile.attacks import ATTACKS, PRELUDE, Attack
from tests.hostile.harness import Harness
from tests.hostile.matrix import Matrix


def known(harness: Harness, victim: dict, marker: str, neighbour_marker: str) -> dict:
    """What an attacker who had read our source, and looked over our shoulder, would know."""
    state = Path(harness.state_dir)
    sockets = [str(path) for path in state.rglob("*.sock")]
    return {
        "neighbour_workspace": victim["workspace"],
        "neighbour_tmp": "/tmp",
        "marker": marker,
        "neighbour_marker": neighbour_marker,
        "state_dir": str(state),
        "token_path": str(state / "token"),
        "state_files": [str(path) for path in state.rglob("*") if path.is_file() and "/slots/" not in str(path)][:200],
        "sockets": sockets,
        "token": harness.token,
        "port": harness.port,
        "host_pids": [harness.pid, *harness.agent_pids()],
        "as_root": harness.as_root,
        "writable": ["/workspace/", "/tmp/", "/var/tmp/", "/dev/shm/", "/dev/mqueue/", "/run/lock/" if harness.mode == "uid" else "/tmp/"],
    }


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.key)
def test_an_attack_is_held_off(harness: Harness, matrix: Matrix, attack: Attack) -> None:
    marker, neighbour_marker = f"secret-{uuid.uuid4().hex}", f"98765.{uuid.uuid4().int % 10**9}"
    if attack.key == "reach-network":
        if harness.mode in attack.refused:
            answer = harness.post("/v1/acquire", {"allow_network": False})
            assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented"), answer.text
            matrix.record(attack.key, attack.title, harness, "refused")
            return
        victim, attacker = harness.acquire(), harness.acquire(allow_network=False)
    else:
        victim, attacker = harness.acquire(), harness.acquire()
    assert victim["sandbox_id"] == attacker["sandbox_id"], "the attack needs two slots of one sandbox"
    assert harness.bash(victim, f"echo {marker} > secret.txt; echo {marker} > /tmp/secret.txt; chmod 600 secret.txt /tmp/secret.txt")["success"]
    assert harness.bash(victim, f"(TOKEN={marker} exec sleep {neighbour_marker}) >/dev/null 2>&1 &")["success"]
    facts = known(harness, victim, marker, neighbour_marker)

    result = harness.python(attacker, f"KNOWN_JSON = {json.dumps(facts)!r}\n{PRELUDE}{attack.script}")

    result_store = [line for line in result["output"].splitlines() if line.startswith(("HELD", "BROKE"))]
    assert result_store, f"the attack itself is broken: {result}"
    broken = [line for line in result_store if line.startswith("BROKE")]
    if attack.key == "forge-verdict":
        assert result["exit_code"] == 41, "the verdict is not the one that the process earned"
    if harness.mode in attack.weak:
        assert broken, f"documented as weak in {harness.mode}, but it held: correct the table"
        matrix.record(attack.key, attack.title, harness, "weak")
    else:
        assert not broken, broken
        matrix.record(attack.key, attack.title, harness, "held")
    alive = harness.bash(victim, f"pgrep -f 'sleep {neighbour_marker}' >/dev/null || grep -laz '^{neighbour_marker}' /proc/[0-9]*/cmdline; cat secret.txt")
    assert marker in alive["output"], "the neighbour lost its file"
    harness.still_sound()


def test_no_two_slots_share_a_uid_and_none_is_root(harness: Harness) -> None:
    leases = [harness.acquire() for _ in range(3)]

    uids = [harness.host_uid_of(lease) for lease in leases]

    assert 0 not in uids
    if harness.as_root:
        assert len(set(uids)) == 3
