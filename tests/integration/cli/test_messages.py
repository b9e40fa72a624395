"""Tests of the messages for failures: one sentence on what is wrong and one on what to do next, never a traceback."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.integration.cli.sandbox_command import SandboxCommand

ACQUIRE_HELP = "`sandbox acquire --help` lists the arguments and options"
OTHER_LEASE = "  `sandbox leases` lists those you hold, `sandbox acquire` acquires a new one\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["exec", "l-nope", "--", "ls"], "sandbox: there is no lease 'l-nope', or it is not yours\n" + OTHER_LEASE),
        (["ls", "l-nope"], "sandbox: there is no lease 'l-nope', or it is not yours\n" + OTHER_LEASE),
        (["release", "l-nope"], "sandbox: these leases do not exist, or are not yours: l-nope\n  `sandbox leases` lists those you hold\n"),
        (["release"], "sandbox: it is not clear which leases to release\n  name the leases, or give --run-id RUN or --all\n"),
        (["narrow", "l-nope"], "sandbox: there is nothing to take away\n  give --no-network, --no-cache, --read-only NAME, or several of them\n"),
        (["acquire", "--pool", "nope"], "sandbox: there is no pool 'nope'\n  `sandbox pools` lists them, `sandbox pool apply` creates one\n"),
        (["acquire", "--label", "x"], "sandbox: --label takes NAME=VALUE, not 'x'\n  for example: --label user=me\n"),
        (["pools", "nope"], "sandbox: there is no pool 'nope'; there is default\n  `sandbox pool apply NAME` creates one\n"),
        (["drain", "s-nope"], "sandbox: there is no sandbox 's-nope'\n  `sandbox sandboxes` lists them\n"),
        (["cp", "a", "b"], "sandbox: one of SOURCE and TARGET must be LEASE:PATH; neither is in a slot\n  for example: sandbox cp notes.txt LEASE:notes.txt\n"),
        (["cp", "nope", "l-nope:x"], "sandbox: there is no local file or folder nope\n  check the path; a path in a slot is written LEASE:PATH\n"),
        (["pool", "apply", "p", "."], "sandbox: . is a folder, not a file\n  give the path of a spec in YAML or JSON\n"),
        (["pool", "apply", "p", "nope"], "sandbox: there is no file nope\n  give the path of a spec in YAML or JSON, or - for standard input\n"),
        (["pool", "apply", "p", "--set", "x"], "sandbox: --set takes FIELD=VALUE, not 'x'\n  for example: --set max_sandboxes=2\n"),
        (["exec", "l-nope", "--timeout", "3", "--", "ls"], None),
        (["exec", "l-nope"], "sandbox: Missing argument '-- CMD'\n  `sandbox exec --help` lists the arguments and options\n"),
        (["run", "-e", "=x", "--", "ls"], "sandbox: --env takes NAME=VALUE, not '=x'\n  or NAME alone, for a variable that is set here\n"),
        (["bogus"], "sandbox: No such command 'bogus'\n  `sandbox --help` lists the arguments and options\n"),
        (["pools", "--bogus"], "sandbox: No such option: --bogus\n  `sandbox pools --help` lists the arguments and options\n"),
        (["acquire", "--count", "many"], None),
        (["acquire", "--count", "9999999"], None),
        (["acquire", "--ttl", "0"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_failure_names_the_problem_and_the_next_step(sandbox: SandboxCommand, words: list[str], told: str | None) -> None:
    done = sandbox(*words)

    assert done.returncode == 125
    assert done.stdout == b""
    if told is not None:  # tests of environments make pools of their own at the service that all tests share
        assert re.sub(r"(?<=there is default)(, rollouts-[-\w]+)+", "", done.stderr.decode()) == told
    first, second = done.stderr.decode().splitlines()
    assert first.startswith("sandbox: ")
    assert second.startswith("  ")
    assert "\x1b" not in first


class TestFilesThatDoNotFit:
    def test_a_folder_where_a_file_is_meant(self, sandbox: SandboxCommand, lease: str, tmp_path: Path) -> None:
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("x")
        sandbox.out("cp", "file", f"{lease}:file")
        sandbox.out("exec", lease, "--", "mkdir", "folder")

        onto_file = sandbox("cp", "folder", f"{lease}:file")
        onto_local = sandbox("cp", f"{lease}:folder", "file")
        listed = sandbox("ls", f"{lease}:file")

        assert onto_file.stderr.decode() == "sandbox: file is a file in the slot, and folder a folder here\n  copy to another name\n"
        assert onto_local.stderr.decode().endswith("file is a file here, and a folder in the slot\n  remove it, or copy to another name\n")
        assert listed.stderr.decode() == "sandbox: file, or a part of it, is not a folder\n  `sandbox ls LEASE:FOLDER` shows what is there\n"
        assert {onto_file.returncode, onto_local.returncode, listed.returncode} == {125}
        assert (tmp_path / "file").read_text() == "x"

    def test_what_is_not_there(self, sandbox: SandboxCommand, lease: str, tmp_path: Path) -> None:
        done = sandbox("cp", f"{lease}:nope", "x")

        assert done.stderr.decode() == "sandbox: no such file or folder: nope\n  `sandbox ls LEASE:FOLDER` lists a folder\n"
        assert not (tmp_path / "x").exists()

    def test_a_path_that_leads_out(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("cp", f"{lease}:/etc/passwd", "x")

        assert done.returncode == 125
        assert done.stderr.decode().startswith("sandbox: /etc/passwd leads out of /workspace and /tmp")


def test_a_lease_that_has_ended(sandbox: SandboxCommand, lease: str) -> None:
    sandbox.out("release", lease)

    done = sandbox("exec", lease, "--", "ls")

    assert done.returncode == 125
    assert done.stderr.decode().startswith(f"sandbox: lease {lease} ended at ")
    assert done.stderr.decode().endswith(": released\n" + OTHER_LEASE)


def test_a_wrong_token(sandbox: SandboxCommand) -> None:
    done = sandbox("pools", environ={"SANDBOX_TOKEN": "wrong"})

    assert done.returncode == 125
    assert done.stderr.decode() == (
        "sandbox: this token is not known here\n"
        "  set SANDBOX_TOKEN to a token of this service; one that made its own keeps it in the file `token` of its state folder\n"
    )


def test_no_service(alone: SandboxCommand) -> None:
    done = alone("pools")

    assert done.returncode == 125
    assert done.stderr.decode() == (
        "sandbox: no sandbox service is known: set SANDBOX_URL (and SANDBOX_TOKEN), or start one on this machine with "
        f"`python -m sandbox_server serve` (looked for server.json in {alone.environ['SANDBOX_STATE_DIR']})\n"
        "  `sandbox run -- CMD...` needs no service: it starts one for itself\n"
    )


@pytest.mark.parametrize("words", [["pools"], ["run", "--", "true"]])
def test_a_service_that_does_not_answer(alone: SandboxCommand, words: list[str]) -> None:
    done = alone(*words, environ={"SANDBOX_URL": "http://127.0.0.1:9"})

    assert done.returncode == 125
    assert done.stderr.decode() == (
        "sandbox: no service responds at http://127.0.0.1:9 (from SANDBOX_URL)\n"
        "  start the service there, or correct SANDBOX_URL; without it, the service of this machine is used\n"
    )


def test_an_address_that_is_none(alone: SandboxCommand) -> None:
    done = alone("pools", environ={"SANDBOX_URL": "127.0.0.1:8700"})

    assert done.stderr.decode() == (
        "sandbox: the service's address must start with http:// or https://, not be '127.0.0.1:8700'\n"
        "  set SANDBOX_URL to an address such as http://127.0.0.1:8700, or unset it for the service of this machine\n"
    )


def test_a_pool_of_a_service_that_is_not_there(alone: SandboxCommand) -> None:
    done = alone("run", "--pool", "gpu", "--", "true")

    assert (done.returncode, done.stderr.decode()) == (
        125,
        "sandbox: no service runs, so there is no pool 'gpu'\n  leave out --pool to run in a slot of this machine, or set SANDBOX_URL\n",
    )


def test_a_spec_that_is_not_yaml(sandbox: SandboxCommand, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("a: 1\nb: [\n")

    done = sandbox("pool", "apply", "p", "p.yaml")

    assert done.returncode == 125
    assert done.stderr.decode().startswith("sandbox: p.yaml: line 3: ")


def test_with_json_the_error_is_the_one_document(sandbox: SandboxCommand) -> None:
    done = sandbox("ls", "--json", "l-nope")

    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"], error["status"], error["detail"]) == (125, "lease_not_found", 404, "there is no lease 'l-nope', or it is not yours")
    assert error["next_step"]
    assert done.stderr.decode().startswith("sandbox: there is no lease")


class TestNextSteps:
    """The next step corrects the mistake, instead of naming a help text that does not mention it."""

    def test_paths_that_files_reach(self, sandbox: SandboxCommand, lease: str) -> None:
        for words in (["ls", f"{lease}:/etc"], ["cp", f"{lease}:../x", "x"]):
            step = sandbox(*words).stderr.decode().splitlines()[-1]
            assert step == "  `ls` and `cp` reach /workspace, where relative paths begin, and /tmp; a command sees the rest: sandbox exec LEASE -- ls -la /etc"

    @pytest.mark.parametrize(
        ("words", "first", "step"),
        [
            (
                ["acquire", "--count", "1000"],
                "count is 1000, and pool 'default' can never hold more than 16 slots",
                "ask for fewer with `--count`; a pool holds max_sandboxes times slots_per_sandbox: `sandbox pools NAME` shows them",
            ),
            (
                ["acquire", "--count", "0"],
                "Invalid value for '--count' / '-c': '0' is not a number of slots",
                ACQUIRE_HELP,
            ),
            (["acquire", "--ttl", "0"], "ttl_s: should be greater than or equal to 1", "correct `--ttl`"),
            (
                ["acquire", "--wait", "inf"],
                "Invalid value for '--wait': 'inf' is not a number of seconds",
                ACQUIRE_HELP,
            ),
            (["acquire", "--run-id", ""], "run_id: should have at least 1 character", "correct `--run-id`"),
            (
                ["pool", "apply", "Bad Name"],
                "name: must be 1 to 64 of a-z, 0-9, `.`, `_` and `-`, with a letter or digit at both ends",
                "give it such a name, for example gpu-2",
            ),
            (
                ["pool", "apply", "a/b"],
                "'a/b' cannot name a pool",
                "`sandbox pools` lists them; a name consists of a-z, 0-9, `.`, `_` and `-`, with a letter or digit at both ends",
            ),
            (["exec", "", "--", "ls"], "the lease is empty", "check that the variable it comes from is set; " + OTHER_LEASE.strip()),
            (["cp", "", "l-1:x"], "SOURCE is empty", "check that the variable it comes from is set; `.` is the current folder"),
            (["cp", "l-1:x", ""], "TARGET is empty", "check that the variable it comes from is set; `.` is the current folder"),
            (["drain", ""], "the sandbox is empty", "check that the variable it comes from is set; `sandbox sandboxes` lists them"),
            (["--json"], "No such option: --json (Possible options: --version)", "`sandbox --help` lists the arguments and options"),
            (["exec", "-t"], "Option '-t' requires an argument", "`sandbox exec --help` lists the arguments and options"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_of_words_that_are_wrong(self, sandbox: SandboxCommand, words: list[str], first: str, step: str) -> None:
        done = sandbox(*words)

        assert done.returncode == 125
        assert done.stderr.decode() == f"sandbox: {first}\n  {step}\n"

    def test_no_leases_of_a_run(self, sandbox: SandboxCommand, lease: str) -> None:
        assert sandbox("leases", "--run-id", "nope").stderr == b"you hold no leases of run 'nope'\n"


class TestCommandsThatDoNotStart:
    def test_a_folder_that_cannot_be_entered_is_126(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", "--cwd", "/nope", lease, "--", "true")

        assert done.returncode == 126
        assert done.stderr.decode() == (
            "sandbox: the folder '/nope' cannot be entered: No such file or directory [tool_error]\n"
            "  correct `--cwd`: a relative path begins in the workspace\n"
        )

    def test_a_shell_line_as_one_word_is_127_with_a_hint(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("exec", lease, "--", "echo hi")

        assert (done.returncode, done.stdout) == (127, b"/bin/bash: line 1: echo hi: command not found\n")
        assert done.stderr.decode() == "the words after `--` are a program and its arguments; for a shell line write: -- bash -c 'echo hi'\n"

    def test_a_program_that_is_not_there_is_127_without_one(self, sandbox: SandboxCommand, lease: str) -> None:
        assert (sandbox("exec", lease, "--", "nope", "x y").returncode, sandbox("exec", lease, "--", "nope").stderr) == (127, b"")

    def test_one_that_is_killed_is_128_and_its_signal(self, sandbox: SandboxCommand, lease: str) -> None:
        assert [sandbox("exec", lease, "--", "bash", "-c", f"kill -{number} $$").returncode for number in (9, 15)] == [137, 143]


class TestWhatIsNoText:
    def test_a_word_of_a_command_arrives_byte_by_byte(self, sandbox: SandboxCommand, lease: str) -> None:
        assert sandbox("exec", lease, "--", "printf", "%s", os.fsdecode(b"\xff\xfe")).stdout == b"\xff\xfe"

    @pytest.mark.parametrize("words", [["pools", "\udcff"], ["leases", "--run-id", "\udcff"], ["acquire", "--label", "a=\udcff"], ["ls", "\udcff"]])
    def test_arguments_that_are_not_utf8_give_no_traceback(self, sandbox: SandboxCommand, words: list[str]) -> None:
        done = sandbox(*words)

        assert done.returncode == 125
        assert "is not text in UTF-8" in done.stderr.decode()
        assert "Traceback" not in done.stderr.decode()

    def test_a_file_with_such_a_name_travels_with_its_folder(self, sandbox: SandboxCommand, lease: str, tmp_path: Path) -> None:
        name = os.fsdecode(b"\xff")
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / name).write_text("content")

        alone = sandbox("cp", f"folder/{name}", f"{lease}:")
        sandbox.out("cp", "folder", f"{lease}:")
        back = sandbox("cp", f"{lease}:folder/{name}", "x")
        sandbox.out("cp", f"{lease}:folder", "back")

        assert (alone.returncode, back.returncode) == (125, 125)
        assert alone.stderr.decode().splitlines()[1] == "  copy the folder that contains it: names inside a folder may be any bytes"
        assert (tmp_path / "back" / name).read_text() == "content"


class TestWhereTheServiceIs:
    def test_a_token_with_a_line_break_is_not_shown(self, sandbox: SandboxCommand) -> None:
        done = sandbox("pools", environ={"SANDBOX_TOKEN": "sec\nret"})

        assert done.returncode == 125
        assert done.stderr.decode().startswith("sandbox: the service's token must not hold line breaks or other control characters")
        assert "ret" not in done.stderr.decode().replace("secret", "")

    def test_white_space_around_address_and_token_is_no_part_of_them(self, sandbox: SandboxCommand) -> None:
        environ = {name: f" {sandbox.environ[name]}\n" for name in ("SANDBOX_URL", "SANDBOX_TOKEN")}

        assert sandbox("pools", environ=environ).returncode == 0

    def test_doctor_says_which_of_them_is_wrong(self, sandbox: SandboxCommand, alone: SandboxCommand) -> None:
        token = sandbox("doctor", environ={"SANDBOX_TOKEN": "wrong"})
        address = alone("doctor", environ={"SANDBOX_URL": "http://127.0.0.1:9"})

        assert "set SANDBOX_TOKEN to a token of this service" in token.stdout.decode()
        assert "no service responds at http://127.0.0.1:9 (from SANDBOX_URL)" in address.stdout.decode()
        assert (token.returncode, address.returncode) == (1, 1)
