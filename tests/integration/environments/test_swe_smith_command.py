"""The documented command of swe_smith_oracle, as a program: a data set with rows that cannot be used, and the rewards of the rows that can."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE, STDOUT
from pathlib import Path

import pytest

from env_client import SandboxClient
from environments.demo.model_server import ScriptedModelServer
from environments.demo.repository import make_repository
from environments.demo.tokenizer import make_tokenizer
from environments.demo.trajectories import make_script
from tests.support.prepared.environments import environments_python
from tests.support.service import Service, clean_environ
from tests.support.users import ROOT

pytestmark = [pytest.mark.timeout(240), pytest.mark.privileged]
COMMAND = [
    "environments/swe_smith_oracle_env.py", "process", "--env.use_wandb", "false", "--env.total_steps", "2", "--env.group_size", "1", "--env.max_items", "2",
    "--env.tool_pool_mode", "default",
]  # fmt: skip


async def test_the_command(service: Service, tmp_path: Path) -> None:
    repository = make_repository(tmp_path / "repositories")
    broken = repository.write_broken_rows(tmp_path / "rows.jsonl")
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    async with ScriptedModelServer(make_script()) as model:
        settings = {
            "SWE_SMITH_DATASET": str(tmp_path / "rows.jsonl"), "SWE_SMITH_REPO_BASE_URL": str(repository.base_url), "TOKENIZER_NAME": str(tokenizer),
            "OPENAI_BASE_URL": model.base_url, "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        # The rows are used in their order, so that the broken ones come first.
        more = ["--env.shuffle", "false", "--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        process = await asyncio.create_subprocess_exec(
            environments_python(), *COMMAND, *more, cwd=ROOT, env=clean_environ({**service.environ, **settings}), stdout=PIPE, stderr=STDOUT
        )
        written = (await process.communicate())[0].decode()

    assert process.returncode == 0, written
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0], [0.4]], written
    assert all(len(group["tokens"][0]) == len(group["masks"][0]) > 0 for group in groups)
    for name in broken:
        assert f"row {name}" in written, written
    assert "rows.jsonl, line 8 cannot be read" in written
    assert written.count("allow_network is true") == 1
    with SandboxClient(service.url, service.token) as client:
        assert client.leases().leases == ()


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("SWE_SMITH_DATASET", "/nowhere/rows.jsonl", "there is no file or folder /nowhere/rows.jsonl"),
        ("SWE_SMITH_REPO_BASE_URL", "/nowhere", "repo_base_url: /nowhere is neither an https address nor a folder of this machine"),
    ],
)
async def test_a_wrong_setting_ends_the_command_with_one_sentence(service: Service, tmp_path: Path, setting: str, value: str, sentence: str) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    environ = clean_environ({**service.environ, "TOKENIZER_NAME": str(tokenizer), "OPENAI_BASE_URL": "http://127.0.0.1:9/v1", setting: value})
    more = ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
    process = await asyncio.create_subprocess_exec(environments_python(), *COMMAND, *more, cwd=ROOT, env=environ, stdout=PIPE, stderr=PIPE)
    _, errors = await process.communicate()
    assert (process.returncode, errors.decode().count("Traceback")) == (1, 0), errors.decode()
    assert sentence in errors.decode().splitlines()[-1]
