"""One attempt of an attack: two slots of one sandbox, a victim with secrets, and an attacker that runs the attack's program."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

from tests.hostile.attacks import PRELUDE, Attack
from tests.hostile.hostile_harness import HostileHarness

NEIGHBOUR_PORT = 38471
SERVE = f"""import socket
server = socket.create_server(("0.0.0.0", {NEIGHBOUR_PORT}))
open("serving", "w").close()
while True:
    server.accept()[0].close()
"""


def _start_victim(harness: HostileHarness, victim: dict, attack: Attack, marker: str) -> None:
    """Start what the attack is aimed at."""
    if attack.victim_runs == "shell":
        assert harness.call(victim, "bash_stateful", {"command": f"kept={marker}"}, timeout_s=60)["success"]
    elif attack.victim_runs == "terminal":
        assert harness.call(victim, "tmux", {"action": "send_keys", "keys": [f"echo {marker}", "Enter"], "block": True}, timeout_s=60)["success"]
    elif attack.victim_runs == "server":
        harness.call(victim, "write_file", {"path": "serve.py", "content": SERVE})
        assert harness.bash(victim, "/usr/bin/python3 serve.py >/dev/null 2>&1 & until [ -e serving ]; do sleep 0.05; done")["success"]


def _check_victim(harness: HostileHarness, victim: dict, attack: Attack, marker: str) -> None:
    """Check that what the attack was aimed at goes on as if nothing had happened."""
    if attack.victim_runs == "shell":
        kept = harness.call(victim, "bash_stateful", {"command": "echo $kept"}, timeout_s=60)
        assert (kept["output"], kept["metadata"]["session"]) == (f"{marker}\n", "kept")
    elif attack.victim_runs == "terminal":
        screen = harness.call(victim, "tmux", {"action": "capture"}, timeout_s=60)
        assert screen["metadata"]["terminal"] == "running"
        assert marker in screen["output"]
    elif attack.victim_runs == "server":
        assert harness.bash(victim, f"exec 3<>/dev/tcp/127.0.0.1/{NEIGHBOUR_PORT}")["success"]


def known(harness: HostileHarness, victim: dict, marker: str, neighbour_marker: str) -> dict:
    """Return what an attacker would know who has read our source and watched the operator."""
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
        "token_made_at": (state / "token").stat().st_mtime,
        "port": harness.port,
        "neighbour_port": NEIGHBOUR_PORT,
        "host_pids": [harness.pid, *harness.agent_pids()],
        "as_root": harness.as_root,
        "writable": ["/workspace/", "/tmp/", "/var/tmp/", "/dev/shm/", "/dev/mqueue/", "/run/lock/" if harness.mode == "uid" else "/tmp/"],
    }


def attempt(harness: HostileHarness, attack: Attack) -> str:
    """Run an attack in one slot against another slot of the same sandbox, and check what became of both.

    Args:
        harness: the service.
        attack: what is tried.

    Returns:
        `held`, `weak` where the attack is documented to succeed in this isolation mode and did, or `refused` where the service does not lease
        what the attack needs in this isolation mode.

    Raises:
        AssertionError: the attack succeeded where it must not, failed where it is documented to succeed, or harmed the victim or the service.
    """
    marker, neighbour_marker = f"secret-{uuid.uuid4().hex}", f"98765.{uuid.uuid4().int % 10**9}"
    if harness.mode in attack.refused:
        answer = harness.post("/v1/acquire", {"allow_network": False})
        assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented"), answer.text
        return "refused"
    victim = harness.acquire(allow_network=False) if attack.victim_runs == "server" else harness.acquire()
    attacker = harness.acquire(allow_network=False) if attack.key == "reach-network" else harness.acquire()
    assert victim["sandbox_id"] == attacker["sandbox_id"], "the attack needs two slots of one sandbox"
    assert harness.bash(victim, f"echo {marker} > secret.txt; echo {marker} > /tmp/secret.txt; chmod 600 secret.txt /tmp/secret.txt")["success"]
    assert harness.bash(victim, f"(TOKEN={marker} exec sleep {neighbour_marker}) >/dev/null 2>&1 &")["success"]
    facts = known(harness, victim, marker, neighbour_marker)
    _start_victim(harness, victim, attack, marker)

    result = harness.python(attacker, f"KNOWN_JSON = {json.dumps(facts)!r}\n{PRELUDE}{attack.script}")

    reports = [line for line in result["output"].splitlines() if line.startswith(("HELD", "BROKE"))]
    assert reports, f"the attack itself is broken: {result}"
    broken = [line for line in reports if line.startswith("BROKE")]
    if attack.key == "forge-verdict":
        assert result["exit_code"] == 41, "the result is not the one that the process earned"
    if harness.mode in attack.weak:
        assert broken, f"documented as weak in {harness.mode}, but it held: correct the table"
    else:
        assert not broken, broken
    alive = harness.bash(victim, f"pgrep -f 'sleep {neighbour_marker}' >/dev/null || grep -laz '^{neighbour_marker}' /proc/[0-9]*/cmdline; cat secret.txt")
    assert marker in alive["output"], "the neighbour lost its file"
    _check_victim(harness, victim, attack, marker)
    harness.still_sound()
    return "weak" if harness.mode in attack.weak else "held"
