"""Tests of each command with a real service."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from env_client import SandboxClient
from tests.integration.cli.sandbox_command import PROGRAM, WAIT_S, SandboxCommand
from tests.support.service import Service


class TestLeases:
    def test_a_lease_is_taken_used_and_given_back(self, sandbox: SandboxCommand) -> None:
        lease_id = sandbox.out("acquire", "--run-id", "r-walk", "--label", "who=me", "--ttl", "120")[:-1]

        assert sandbox.out("leases", "--run-id", "r-walk", "--quiet").split() == [lease_id]
        (row,) = sandbox.json("leases", "--run-id", "r-walk")["leases"]
        assert (row["lease_id"], row["labels"], row["run_id"]) == (lease_id, {"who": "me"}, "r-walk")
        assert sandbox.out("release", lease_id) == lease_id + "\n"
        assert sandbox.json("leases", "--run-id", "r-walk") == {"leases": []}

    def test_a_gang_is_released_with_its_run(self, sandbox: SandboxCommand) -> None:
        ids = sandbox.out("acquire", "--count", "2", "--run-id", "r-gang", "--trajectory-id", "a", "--trajectory-id", "b").split()

        assert {row["trajectory_id"] for row in sandbox.json("leases", "--run-id", "r-gang")["leases"]} == {"a", "b"}
        assert sorted(sandbox.json("release", "--run-id", "r-gang")["released"]) == sorted(ids)

    def test_the_table_names_lease_pool_and_rights(self, sandbox: SandboxCommand, lease: str) -> None:
        heads, *rows = sandbox.out("leases").splitlines()

        assert heads.split()[:5] == ["LEASE", "POOL", "SLOT", "ENDS", "IN"]
        (row,) = [row for row in rows if row.startswith(lease)]
        assert row.split()[1] == "default"
        assert row.endswith("network")

    def test_a_lease_is_kept_for_longer(self, sandbox: SandboxCommand, lease: str) -> None:
        (kept,) = sandbox.json("renew", "--ttl", "7200", lease)["leases"]

        assert kept["expires_at"] > time.time() + 7000
        assert sandbox.out("renew", lease).startswith(f"{lease} held until ")

    def test_the_network_is_taken_away_from_several(self, sandbox: SandboxCommand, lease: str) -> None:
        other = sandbox.out("acquire", "--wait", "30").strip()

        assert sandbox.out("narrow", "--no-network", lease, other) == f"{lease} now has no network\n{other} now has no network\n"
        sandbox.out("release", other)

    def test_the_network_is_taken_away(self, sandbox: SandboxCommand, lease: str) -> None:
        assert sandbox.out("exec", lease, "--", "touch", "kept") == ""
        assert sandbox.out("narrow", "--no-network", lease) == f"{lease} now has no network\n"
        assert sandbox.out("narrow", "--no-cache", lease) == f"{lease} now has no network, no cache\n"
        assert sandbox.out("exec", lease, "--", "bash", "-c", "ls; tail -n +3 /proc/net/dev | cut -d: -f1") == "kept\n    lo\n"

    def test_entries_become_read_only(self, sandbox: SandboxCommand, lease: str) -> None:
        assert sandbox.out("exec", lease, "--", "touch", "kept", "other") == ""

        assert sandbox.out("narrow", "--read-only", "kept", "--read-only", "other", lease) == f"{lease} now has network, read-only kept, other\n"
        assert sandbox("exec", lease, "--", "rm", "kept").returncode == 1
        refused = sandbox("narrow", "--read-only", "nope", lease)
        assert refused.returncode == 125
        assert "there is no entry 'nope' at the top of the workspace" in refused.stderr.decode()


class TestPort:
    def test_the_address_of_a_program_and_how_to_ask_it(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("port", lease, "8000")
        url = f"{sandbox.environ['SANDBOX_URL']}/v1/leases/{lease}/ports/8000/"

        assert done.stdout.decode() == url + "\n"
        assert f'next: curl -H "Authorization: Bearer $SANDBOX_TOKEN" {url}' in done.stderr.decode()
        assert sandbox.environ["SANDBOX_TOKEN"] not in done.stderr.decode()
        assert sandbox.json("port", lease, "8000") == {"port": 8000, "url": url, "ws_url": url.replace("http", "ws", 1)}


class TestRecording:
    def test_a_recording_is_copied_into_a_file(self, sandbox: SandboxCommand, service: Service, lease: str) -> None:
        missing = sandbox("recording", lease)
        assert missing.returncode == 125
        assert b"the lease has no recording" in missing.stderr
        with SandboxClient(service.url, service.token) as client:
            client.exec(lease, "tmux", {"action": "capture"})

        sandbox.out("recording", lease)
        told = json.loads(sandbox.out("recording", lease, "other.cast", "--json"))

        assert (sandbox.cwd / "terminal.cast").read_bytes().startswith(b'{"version": 2')
        assert told == {"lease_id": lease, "target": "other.cast", "size_bytes": (sandbox.cwd / "other.cast").stat().st_size}


class TestExec:
    def test_its_exit_code_is_ours(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", lease, "--", "bash", "-c", "echo out; echo err >&2; exit 7")

        assert (done.returncode, done.stdout, done.stderr) == (7, b"out\nerr\n", b"")

    def test_words_mean_nothing_to_a_shell(self, sandbox: SandboxCommand, lease: str) -> None:
        assert sandbox.out("exec", lease, "--", "printf", "%s|", "a b", "$HOME", "*", "'", "--json") == "a b|$HOME|*|'|--json|"

    def test_output_comes_as_it_is_written(self, sandbox: SandboxCommand, lease: str) -> None:
        with sandbox.started("exec", lease, "--", "bash", "-c", "echo first; until [ -e go ]; do sleep 0.05; done; echo second") as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"first\n"
            sandbox.out("exec", lease, "--", "touch", "go")
            assert process.stdout.readline() == b"second\n"
            assert process.wait(30) == 0

    def test_bytes_come_as_they_are_and_all_of_them(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", lease, "--", "python3", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4000)")

        assert done.stdout == bytes(range(256)) * 4000

    @pytest.mark.parametrize("content", [b"", b"a line\n", b"\xff\x00\xfe", os.urandom(3 << 20)], ids=["nothing", "text", "bytes", "much"])
    def test_what_is_piped_in_is_its_input(self, sandbox: SandboxCommand, lease: str, content: bytes) -> None:
        assert sandbox("exec", lease, "--", "cat", stdin=content).stdout == content
        assert sandbox.out("exec", lease, "--", "bash", "-c", "find /tmp -type f") == ""

    def test_input_can_be_left_alone(self, sandbox: SandboxCommand, lease: str) -> None:
        assert sandbox.out("exec", "--no-stdin", lease, "--", "cat", stdin=b"for somebody else") == ""

    def test_a_timeout_is_124_and_says_what_to_do(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", "--timeout", "1", lease, "--", "bash", "-c", "echo before; sleep 30")

        assert (done.returncode, done.stdout) == (124, b"before\n")
        assert done.stderr.decode() == (
            "sandbox: the call passed its timeout of 1 s and was killed with its whole tree [timeout]\n"
            "  `--timeout SECONDS` allows more time, up to the pool's max_timeout_s\n"
        )

    def test_folder_and_variables(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", "--cwd", "/tmp", "-e", "A=b c", "-e", "HERE", lease, "--", "bash", "-c", 'echo "$PWD $A $HERE"', environ={"HERE": "x"})

        assert done.stdout == b"/tmp b c x\n"

    def test_the_result_as_a_document(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", "--json", lease, "--", "bash", "-c", "echo out; exit 3")

        result = json.loads(done.stdout)
        assert (done.returncode, result["exit_code"], result["output"], result["reason"], result["fault"]) == (3, 3, "out\n", "exit", "none")


class TestFiles:
    def test_a_folder_goes_in_and_out(self, sandbox: SandboxCommand, lease: str, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        (tree / "sub" / "empty").mkdir(parents=True)
        (tree / "a b.txt").write_bytes(os.urandom(700_001))
        (tree / "sub" / "run").write_text("#!/bin/sh\necho ran\n")
        (tree / "sub" / "run").chmod(0o755)
        (tree / "link").symlink_to("a b.txt")

        sandbox.out("cp", "tree", f"{lease}:")
        assert sandbox.out("exec", lease, "--", "./tree/sub/run") == "ran\n"
        sandbox.out("cp", f"{lease}:tree", "back")

        assert (tmp_path / "back" / "a b.txt").read_bytes() == (tree / "a b.txt").read_bytes()
        assert os.readlink(tmp_path / "back" / "link") == "a b.txt"
        assert (tmp_path / "back" / "sub" / "run").stat().st_mode & 0o777 == 0o755
        assert (tmp_path / "back" / "sub" / "empty").is_dir()

    def test_a_file_goes_in_and_out(self, sandbox: SandboxCommand, lease: str, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"content")
        (tmp_path / "there").mkdir()

        sandbox.out("cp", "f", f"{lease}:deep/in/f")
        sandbox.out("cp", "f", f"{lease}:deep")
        sandbox.out("cp", f"{lease}:deep/f", "there")
        sandbox.out("exec", lease, "--", "chmod", "+x", "deep/f")
        sandbox.out("cp", f"{lease}:deep/f", "runs")

        assert ((tmp_path / "there" / "f").stat().st_mode & 0o111, (tmp_path / "runs").stat().st_mode & 0o100) == (0, 0o100)
        assert (tmp_path / "there" / "f").read_bytes() == b"content"
        assert sandbox.json("ls", f"{lease}:deep/in")["entries"][0]["size_bytes"] == 7

    def test_streams_go_in_and_out(self, sandbox: SandboxCommand, lease: str) -> None:
        sandbox.out("cp", "-", f"{lease}:f", stdin=b"\xffpiped")

        assert sandbox("cp", f"{lease}:f", "-").stdout == b"\xffpiped"
        assert sandbox("cp", f"{lease}:.", "-").stdout[:2] == b"\x1f\x8b"

    def test_what_is_in_a_folder_goes_into_one_that_is_there(self, sandbox: SandboxCommand, lease: str, tmp_path: Path) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "new").write_text("new")
        sandbox.out("exec", lease, "--", "bash", "-c", "mkdir d; echo old > d/old; echo old > d/new")
        sandbox.out("cp", "here/.", f"{lease}:d")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("mine")
        sandbox.out("cp", f"{lease}:d/.", "out")

        assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"mine": "mine", "new": "new", "old": "old\n"}

    def test_a_listing(self, sandbox: SandboxCommand, lease: str) -> None:
        sandbox.out("exec", lease, "--", "bash", "-c", r"mkdir d; echo x > d/f; ln -s f d/l; touch $'d/\e[31mred'")

        rows = sandbox.out("ls", "-R", f"{lease}:d").splitlines()

        assert [row.split()[0] for row in rows] == ["MODE", "-rw-r--r--", "-rw-r--r--", "lrwxrwxrwx"]
        assert rows[1].endswith(r"\x1b[31mred")
        assert rows[2].endswith("f")


def wait_until_ready(sandbox: SandboxCommand, pool: str, count: int) -> None:
    """Wait until so many slots of a pool are ready."""
    deadline = time.monotonic() + WAIT_S
    while sandbox.json("pools", pool)["slots"]["ready"] != count:
        assert time.monotonic() < deadline, "the slots did not become ready"


class TestPools:
    def test_a_pool_is_made_changed_verified_and_removed(self, sandbox: SandboxCommand, tmp_path: Path) -> None:
        """The page about the command line runs `pool verify` without `--json`."""
        (tmp_path / "p.yaml").write_text("slots_per_sandbox: 1\nmin_sandboxes: 1\nmax_sandboxes: 1\non_shutdown: destroy\n")

        assert sandbox.out("pool", "apply", "walk", "p.yaml") == "created pool walk\n"
        assert sandbox.out("pool", "apply", "walk", "p.yaml", "--set", "acquire_timeout_s=55") == "changed pool walk: acquire_timeout_s 60 → 55\n"
        shown = sandbox.json("pools", "walk")
        assert (shown["spec"]["acquire_timeout_s"], shown["spec"]["slots_per_sandbox"]) == (55, 1)
        assert "walk" in sandbox.out("pools")
        lease_id = sandbox.out("acquire", "--pool", "walk", "--wait", "30").strip()
        sandbox.out("release", lease_id)
        wait_until_ready(sandbox, "walk", 1)  # the slot is reset after `release` has returned
        report = json.loads(sandbox.out("pool", "verify", "--json", "walk"))
        assert report["clean"]
        assert report["slots"][0]["planted"]
        assert sandbox.out("pool", "delete", "walk", "--force") == "pool walk is being deleted\n"

    def test_sandboxes_are_listed_and_drained(self, sandbox: SandboxCommand) -> None:
        sandbox.out("pool", "apply", "drained", "-s", "slots_per_sandbox=1", "-s", "min_sandboxes=1", "-s", "max_sandboxes=1", "-s", 'on_shutdown="destroy"')
        lease_id = sandbox.out("acquire", "-p", "drained", "--wait", "30").strip()
        (held,) = [info for info in sandbox.json("sandboxes")["sandboxes"] if info["pool"] == "drained"]

        assert sandbox.json("drain", held["sandbox_id"])["state"] == "draining"
        assert held["sandbox_id"] in sandbox.out("sandboxes")
        sandbox.out("release", lease_id)
        sandbox.out("pool", "delete", "drained", "-f")


class TestDoctor:
    def test_says_what_there_is(self, sandbox: SandboxCommand) -> None:
        done = sandbox("doctor")

        assert done.returncode == 0, done.stdout.decode()
        for part in ("this machine", "bubblewrap", "service", "pool default", "isolation", "tools", "backends", "local", "modal"):
            assert part in done.stdout.decode()

    def test_tries_where_no_service_runs(self, alone: SandboxCommand) -> None:
        found = json.loads(alone("doctor", "--json").stdout)

        assert found["service"][0]["detail"] == "none runs on this machine; `sandbox run` starts one for itself"
        assert found["local slots, tried just now"][0]["name"] == "isolation"


class TestRun:
    def test_runs_in_a_slot_of_the_service_and_gives_it_back(self, sandbox: SandboxCommand) -> None:
        done = sandbox("run", "--", "bash", "-c", "echo hello; exit 7")

        assert (done.returncode, done.stdout, done.stderr) == (7, b"hello\n", b"")
        assert not [row for row in sandbox.json("leases")["leases"] if "command" in row["labels"]]

    def test_runs_where_no_service_is(self, alone: SandboxCommand, tmp_path: Path) -> None:
        done = alone("run", "--", "bash", "-c", "cat; exit 7", stdin=b"piped")

        assert (done.returncode, done.stdout, done.stderr) == (7, b"piped", b"")
        assert list((tmp_path / "tmp").iterdir()) == []

    def test_a_service_that_was_killed_is_none(self, alone: SandboxCommand, tmp_path: Path) -> None:
        left = tmp_path / "state" / "server.json"
        left.write_text(json.dumps({"url": "http://127.0.0.1:9", "pid": os.getpid()}))
        done = alone("run", "--", "true")

        assert (done.returncode, done.stderr.decode()) == (0, f"the service that {left} names does not run any more; this command starts one of its own\n")


def test_a_standard_output_that_is_closed_is_no_traceback(sandbox: SandboxCommand) -> None:
    done = subprocess.run(["bash", "-c", f"{' '.join(PROGRAM)} pools >&-"], env=sandbox.environ, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)

    assert (done.returncode, done.stderr) == (0, b"")


def test_the_version(sandbox: SandboxCommand) -> None:
    assert sandbox.out("--version").startswith("sandbox ")
