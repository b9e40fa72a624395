"""Tests of an environment as a program: its output file, its exit codes, and the one sentence with which it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from env_client import AsyncSandboxClient, SandboxClient
from environments.demo.model_server import ScriptedModelServer
from environments.demo.tokenizer import make_tokenizer
from environments.terminal_test_env import TerminalTestEnv
from tests.integration.environments.batch.runs import model_server
from tests.support.prepared.environments import environments_python, prepared_environments
from tests.support.prepared.service import REAL_SERVICE_VARIABLE
from tests.support.service import Service, clean_environ, short_folder
from tests.support.users import ROOT

WRITE = {"tool": "write_file", "arguments": {"path": "greeting.txt", "content": "Hello from the sandbox"}}
SCRIPT: Mapping[str, Any] = {"prompts": [{"trajectories": [{"turns": [{"calls": [WRITE]}]}]}]}
#: A model that does not answer. Its server stops as soon as the clients have gone, which it would not while it delays an answer.
SILENT: Mapping[str, Any] = {"prompts": [{"trajectories": [{"turns": [{"text": "x", "fault": {"kind": "silence", "times": None}}]}]}]}
#: The flags of the documented command for Modal.
MODAL = [
    "--env.use_wandb", "false", "--env.total_steps", "2", "--env.group_size", "1", "--env.tool_pool_mode", "modal", "--env.modal_image", "python:3.11",
    "--env.modal_slots_per_sandbox", "10", "--env.modal_min_sandboxes", "1",
]  # fmt: skip
PROGRAM = str(ROOT / "environments" / "terminal_test_env.py")
RunHere = Callable[..., tuple[object, str]]


def make_environ(service: Service, folder: Path, base_url: str, **variables: str) -> dict[str, str]:
    tokenizer = make_tokenizer(folder / "tokenizer")
    return clean_environ(service.environ | variables | {"TOKENIZER_NAME": str(tokenizer), "OPENAI_BASE_URL": base_url, "HF_HUB_OFFLINE": "1"})


async def start(service: Service, folder: Path, base_url: str, *arguments: str) -> Process:
    command = [str(environments_python()), PROGRAM, *arguments]
    return await asyncio.create_subprocess_exec(*command, cwd=folder, env=make_environ(service, folder, base_url), stdout=PIPE, stderr=PIPE)


async def finish(process: Process) -> tuple[int | None, str, str]:
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_process_writes_its_groups_to_the_current_folder(service: Service, tmp_path: Path) -> None:
    async with ScriptedModelServer(SCRIPT) as model:
        arguments = ["process", "--env.sandbox_pool", "default", "--env.total_steps", "1", "--env.group_size", "2", "--env.enabled_toolsets", "file"]
        exit_code, output, errors = await finish(await start(service, tmp_path, model.base_url, *arguments))

    assert exit_code == 0
    lines = errors.splitlines()
    assert [line for line in lines if not re.fullmatch(r"terminal_test: [01]/1 groups done, \d rollouts scored.*, 0 not scored.* after \d+ s", line)] == []
    assert lines[-1].startswith("terminal_test: 1/1 groups done, 2 rollouts scored, 0 not scored, mean reward 1.000, after ")
    (group,) = [json.loads(line) for line in (tmp_path / "data" / "terminal_test.jsonl").read_text().splitlines()]
    assert (group["scores"], len(group["messages"])) == ([1.0, 1.0], 2)
    assert "1 complete, 0 lost" in output
    assert service.token not in output


@pytest.fixture
def run_here(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunHere:
    """Runs the command line in the test process, which has its imports already; returns the exit code and standard error."""

    def run(base_url: str, *arguments: str) -> tuple[object, str]:
        tokenizer = make_tokenizer(tmp_path / "tokenizer")
        for name, value in (service.environ | {"TOKENIZER_NAME": str(tokenizer), "OPENAI_BASE_URL": base_url}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["terminal_test_env.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            TerminalTestEnv.cli()
        return ended.value.code, capsys.readouterr().err

    return run


def test_a_backend_that_the_service_lacks_ends_in_one_sentence(service: Service, run_here: RunHere) -> None:
    with model_server(SCRIPT["prompts"][0]) as model, SandboxClient(service.url, service.token) as client:
        pools = client.pools()
        exit_code, errors = run_here(model.base_url, "process", *MODAL)
        assert [pool.name for pool in client.pools()] == [pool.name for pool in pools]

    assert exit_code == 1
    assert errors.startswith("terminal_test: the service at ")
    assert errors.endswith("on the backend modal: backend 'modal' is not built yet; there is local\n")
    assert errors.count("\n") == 1


def test_a_wrong_setting_ends_in_one_sentence(run_here: RunHere) -> None:
    exit_code, errors = run_here("http://127.0.0.1:9/v1", "evaluate", "--env.tool_server_url", "http://tools", "--env.sandbox_pool", "default")

    sentence = "tool_server_url: the tool server is not built yet; leave tool_server_url out, and use the tools of the slot"
    assert (exit_code, errors) == (1, f"terminal_test: {sentence}\n")


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143)])
async def test_a_signal_releases_every_slot(service: Service, tmp_path: Path, number: signal.Signals, exit_code: int) -> None:
    async with ScriptedModelServer(SILENT) as model, AsyncSandboxClient(service.url, service.token) as client:
        process = await start(service, tmp_path, model.base_url, "process", "--env.sandbox_pool", "default", "--env.group_size", "2")
        await model.wait_for_request(lambda request: True)
        assert len((await client.leases()).leases) == 2
        process.send_signal(number)
        ended, _, errors = await finish(process)
        assert (ended, errors) == (exit_code, "terminal_test: terminated; all slots are released\n")
        assert (await client.leases()).leases == ()
    assert not (tmp_path / "data" / "terminal_test.jsonl").exists()


async def test_leases_of_a_killed_process_end_by_themselves(service: Service, tmp_path: Path) -> None:
    async with ScriptedModelServer(SILENT) as model, AsyncSandboxClient(service.url, service.token) as client:
        process = await start(service, tmp_path, model.base_url, "process", "--env.sandbox_pool", "default", "--env.group_size", "2", "--env.lease_ttl_s", "2")
        await model.wait_for_request(lambda request: True)
        held = [lease.lease_id for lease in (await client.leases()).leases]
        process.kill()
        await finish(process)
        async with asyncio.timeout(20):
            while (await client.leases()).leases:
                await asyncio.sleep(0.1)  # no event reports the end of a lease
    assert (len(held), process.returncode) == (2, -signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_nothing_stays_of_an_embedded_service(service: Service, tmp_path: Path, number: signal.Signals) -> None:
    with short_folder() as temporary:
        # The service is a child of the environment, and not of a prepared process: it ends with its parent.
        environ = make_environ(replace(service, url=""), tmp_path, "", TMPDIR=str(temporary), **{REAL_SERVICE_VARIABLE: "1"})
        async with ScriptedModelServer(SILENT) as model:
            environ["OPENAI_BASE_URL"] = model.base_url
            words = [PROGRAM, "process", "--env.group_size", "2", "--env.max_containers", "1"]
            with open(os.devnull, "rb") as nothing, prepared_environments().start(words, environ, tmp_path, (nothing.fileno(), None, None)) as process:
                await model.wait_for_request(lambda request: True)
                descendants = psutil.Process(process.pid).children(recursive=True)
                assert list(temporary.glob("sandbox-pool-*"))
                process.send_signal(number)
                _, errors = await asyncio.to_thread(process.communicate, 20)
        _, alive = await asyncio.to_thread(psutil.wait_procs, descendants, 20)
        assert (len(descendants) > 2, alive, list(temporary.glob("sandbox-pool-*"))) == (True, [], [])
    if number is signal.SIGINT:
        assert (process.returncode, errors) == (130, b"terminal_test: interrupted; all slots are released\n")
