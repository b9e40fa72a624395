"""Tests of the base environment with atroposlib, a scripted model server and a real service: both phases, evaluation, and settings that are wrong."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tenacity import wait_none

from env_client import AsyncSandboxClient
from environments.demo.model_server import ScriptedModelServer
from environments.demo.tokenizer import TextTokenizer, make_tokenizer
from environments.env_settings import complete_servers, describe_validation_error, take_api_key
from environments.model_access.response_limits import bound_answers
from environments.rollouts.collector import RunFailed
from environments.rollouts.pool_spec import SettingsError
from environments.toolsets import ToolsetError
from tests.support.service import SMALL_POOL, Service

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["test"])
    from atroposlib.envs.base import APIServerConfig
    from atroposlib.envs.server_handling.server_baseline import APIServer

    from environments.hermes_base_env import HermesAgentEnvConfig
    from environments.terminal_test_env import TASKS, TerminalTask, TerminalTestEnv

pytestmark = [
    pytest.mark.filterwarnings("ignore:Trainer requested to ignore max length"),
]

DO = {"tool": "terminal", "arguments": {"command": "printf 'Hello from the sandbox\\n' > greeting.txt; echo it\\'s done"}}
TYPE = {"tool": "tmux", "arguments": {"action": "send_keys", "keys": ["echo $((6 * 7))", "Enter"], "block": True}}
LOOK = {"tool": "terminal", "arguments": {"command": "ls /sys"}}
#: A model that does not answer. Its server stops as soon as the clients have gone, which it would not while it delays an answer.
SILENT: Mapping[str, Any] = {"prompts": [{"trajectories": [{"turns": [{"text": "x", "fault": {"kind": "silence", "times": None}}]}]}]}
SCRIPT: Mapping[str, Any] = {
    "prompts": [
        {
            "match": "greeting.txt",
            "after_last": "cycle",
            "trajectories": [
                {"turns": [{"text": "  I write \n", "calls": [DO]}, {"calls": [LOOK, DO]}, {"text": "Done."}]},
                {"turns": [{"calls": [LOOK]}, {"text": "Nothing to do."}]},
            ],
        },
        {"match": "", "trajectories": [{"turns": [{"text": "No."}]}]},
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def model(tokenizer: Path) -> AsyncIterator[ScriptedModelServer]:
    async with ScriptedModelServer(SCRIPT, tokenizer=tokenizer) as server:
        yield server


def make_env(
    service: Service, tokenizer: Path, base_url: str, server_type: str = "openai", *, env_class: type[TerminalTestEnv] = TerminalTestEnv, **settings: Any
) -> TerminalTestEnv:
    timeout_s = settings.pop("timeout", 1200)
    config = HermesAgentEnvConfig(
        **{
            **TerminalTestEnv.default_settings(), "tokenizer_name": str(tokenizer), "sandbox_url": service.url, "sandbox_token": service.token,
            "sandbox_pool": "default", "group_size": 2, "total_steps": 1, "include_messages": True, "ensure_scores_are_not_same": False, **settings,
        }
    )  # fmt: skip
    server = APIServerConfig(base_url=base_url, api_key="x", model_name="scripted", server_type=server_type, health_check=False, timeout=timeout_s)
    env = env_class(config, [server])
    env.n_groups_to_process, env.group_size_to_process, env.process_mode = config.total_steps, config.group_size, True
    return env


@asynccontextmanager
async def no_slot_left(service: Service) -> AsyncIterator[None]:
    yield
    async with AsyncSandboxClient(service.url, service.token) as client:
        assert (await client.leases()).leases == ()


def read_groups(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("server_type", ["openai", "vllm", "sglang"])
async def test_process(
    service: Service, tokenizer: Path, model: ScriptedModelServer, tmp_path: Path, server_type: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "groups.jsonl"
    env = make_env(service, tokenizer, model.base_url, server_type, total_steps=2, data_path_to_save_groups=str(path))
    async with no_slot_left(service):
        await env.process_manager()

    first, second = read_groups(path)
    assert (sorted(first["scores"]), second["scores"]) == ([0.0, 1.0], [0.0, 0.0])
    texts = TextTokenizer.load(tokenizer)
    best = first["scores"].index(1.0)
    for tokens, masks in zip(first["tokens"], first["masks"], strict=True):
        assert len(tokens) == len(masks) <= env.config.max_token_length
        assert all(mask in (-100, token) for token, mask in zip(tokens, masks, strict=True))
    trained = texts.decode([token for token in first["masks"][best] if token != -100])
    assert trained.count("<tool_call>") == 3
    assert trained.rstrip().endswith("Done.<|im_end|>")
    assert "<tools>" in texts.decode(first["tokens"][best])
    assert [message["role"] for message in first["messages"][best]] == ["system", "user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    if server_type == "openai":
        assert "inference_logprobs" not in first
    else:
        for masks, logprobs in zip(first["masks"], first["inference_logprobs"], strict=True):
            assert len(masks) == len(logprobs)
            assert all((logprob <= 0) == (mask != -100) for mask, logprob in zip(masks, logprobs, strict=True))
        assert trained.startswith("  I write \n")  # what the model wrote, and not what the chat template makes of it
        written = re.findall(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", texts.decode(first["tokens"][best]), re.DOTALL)
        assert (len(written), "".join(written)) == (3, trained)
    printed = capsys.readouterr().out
    assert "2 complete, 0 lost" in printed
    assert "4 scored, 0 repeated" in printed


async def test_a_pool_without_a_sandbox_yet_gives_its_first_group_a_terminal_whose_recording_is_kept(service: Service, tokenizer: Path, tmp_path: Path) -> None:
    script = {"prompts": [{"after_last": "cycle", "trajectories": [{"turns": [{"calls": [TYPE]}, {"text": "42."}]}, {"turns": [{"text": "No."}]}]}]}
    settings = {"sandbox_pool": "cold", "enabled_toolsets": ["tmux"], "data_path_to_save_groups": str(tmp_path / "groups.jsonl")}
    async with AsyncSandboxClient(service.url, service.token) as client, ScriptedModelServer(script, tokenizer=tokenizer) as server, no_slot_left(service):
        await client.pool_put("cold", {**SMALL_POOL, "min_sandboxes": 0, "max_sandboxes": 1})
        await make_env(service, tokenizer, server.base_url, **settings).process_manager()
        await client.pool_delete("cold")

    (group,) = read_groups(tmp_path / "groups.jsonl")
    (kept,) = [recording["path"] for recording in group["recordings"] if recording["path"]]
    typed = next(number for number, messages in enumerate(group["messages"]) if len(messages) > 3)
    assert group["recordings"][typed] == {"path": kept, "error": ""}
    assert Path(kept).parent == tmp_path / "groups.recordings"
    assert "42" in Path(kept).read_text(encoding="utf-8")


async def test_a_model_works_in_a_shell_that_stays_where_its_environment_requires_one(service: Service, tokenizer: Path, tmp_path: Path) -> None:
    commands = ("cd /tmp; kept=7", "pwd; echo $kept", "exit 3", "pwd")
    turns = [{"calls": [{"tool": "terminal_stateful", "arguments": {"command": command}}]} for command in commands]
    async with ScriptedModelServer({"prompts": [{"trajectories": [{"turns": [*turns, {"text": "Done."}]}]}]}, tokenizer=tokenizer) as server:
        env = make_env(
            service, tokenizer, server.base_url, sandbox_pool=None, max_containers=1, slots_per_container=1, require_stateful_sandbox=True, group_size=1,
            enabled_toolsets=["terminal_stateful"], data_path_to_save_groups=str(tmp_path / "groups.jsonl"),
        )  # fmt: skip
        async with no_slot_left(service):
            await env.process_manager()

    (messages,) = read_groups(tmp_path / "groups.jsonl")[0]["messages"]
    replies = [json.loads(message["content"]) for message in messages if message["role"] == "tool"]
    assert [(reply["output"], reply["exit_code"]) for reply in replies] == [("", 0), ("/tmp\n7\n", 0), ("", 3), ("/workspace\n", 0)]
    assert ["session_reason" in reply for reply in replies] == [False, False, True, True]


async def test_a_group_without_tools_ends_the_run_and_leaves_no_slot(service: Service, tokenizer: Path, model: ScriptedModelServer, tmp_path: Path) -> None:
    settings = {"enabled_toolsets": ["file"], "disabled_toolsets": ["file"], "data_path_to_save_groups": str(tmp_path / "groups.jsonl")}
    env = make_env(service, tokenizer, model.base_url, **settings)
    async with no_slot_left(service):
        with pytest.raises(ToolsetError, match="no tool set is left for group '1': disabled_toolsets takes file away"):
            await env.process_manager()


async def test_evaluate(service: Service, tokenizer: Path, model: ScriptedModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    env = make_env(service, tokenizer, model.base_url, data_dir_to_save_evals=str(tmp_path))
    async with no_slot_left(service):
        await env._run_evaluate()

    metrics = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    assert metrics == {"eval/items": 4, "eval/scored": 4, "eval/reward_mean": 0.25, "eval/pass_rate": 0.25}
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == len(TASKS)
    assert "eval/pass_rate: 0.25" in capsys.readouterr().out


class BrokenEnv(TerminalTestEnv):
    """An environment without a row that can be used."""

    async def next_item(self) -> TerminalTask | None:  # type: ignore[override]  # this one has an end
        self._next_row += 1
        return TASKS[0] if self._next_row == 1 else None

    def build_messages(self, item: TerminalTask) -> list[dict[str, Any]]:
        return super(TerminalTestEnv, self).build_messages({"prompt": None})


async def test_no_usable_row_ends_the_run_with_a_sentence(service: Service, tokenizer: Path, model: ScriptedModelServer, tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    env = make_env(service, tokenizer, model.base_url, env_class=BrokenEnv, data_path_to_save_groups=str(path))
    async with no_slot_left(service):
        with pytest.raises(RunFailed, match=r"no row could be used: unusable rows: 1, such as write-file: the row has no text in the column 'prompt'"):
            await env.process_manager()
    assert not path.exists()  # an empty file would only be in the way


@pytest.mark.parametrize("server_type", ["openai", "vllm"])
async def test_prompts_that_are_too_long_end_the_run_with_a_sentence(service: Service, tokenizer: Path, model: ScriptedModelServer, server_type: str) -> None:
    async with no_slot_left(service):
        with pytest.raises(RunFailed, match=r"4, such as write-file: its prompt does not fit into the 60 tokens of a rollout \(max_token_length\)"):
            await make_env(service, tokenizer, model.base_url, server_type, max_token_length=60).process_manager()


class RepeatingEnv(BrokenEnv):
    """An environment that gives the same row again and again, although it cannot be used."""

    async def next_item(self) -> TerminalTask:
        return TASKS[0]


async def test_an_environment_that_repeats_an_unusable_row_ends(service: Service, tokenizer: Path, model: ScriptedModelServer) -> None:
    async with no_slot_left(service):
        with pytest.raises(RunFailed, match="no row could be used: the environment gives only rows that are unusable, such as write-file: the row has no text"):
            await make_env(service, tokenizer, model.base_url, env_class=RepeatingEnv, max_lost_groups=2).process_manager()


async def test_a_worker_that_is_cancelled_leaves_no_slot(service: Service, tokenizer: Path) -> None:
    async with ScriptedModelServer(SILENT, tokenizer=tokenizer) as model, no_slot_left(service):
        env = make_env(service, tokenizer, model.base_url, "vllm")
        async with env._running("serve"):
            await env.setup()
            env.running_items["id"] = {"item": TASKS[0]}
            worker = asyncio.create_task(env.handle_env("id"))
            await model.wait_for_request(lambda request: True)
            async with AsyncSandboxClient(service.url, service.token) as client:
                assert len((await client.leases(run_id=env.pool.run_id)).leases) == 2
                worker.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await worker
                assert (await client.leases(run_id=env.pool.run_id)).leases == ()


async def test_a_run_that_is_cancelled_releases_its_run(service: Service, tokenizer: Path) -> None:
    async with ScriptedModelServer(SILENT, tokenizer=tokenizer) as model, no_slot_left(service):
        run = asyncio.create_task(make_env(service, tokenizer, model.base_url).process_manager())
        await model.wait_for_request(lambda request: True)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_model_server_that_is_down_is_named(service: Service, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.hermes_base_env._MODEL_WAIT_S", {"process": 0.0})
    async with no_slot_left(service):
        with pytest.raises(RunFailed, match=r"openai\.base_url: no model server answers at http://127\.0\.0\.1:9/v1"):
            await make_env(service, tokenizer, "http://127.0.0.1:9/v1").process_manager()


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let atroposlib repeat failed requests at once."""
    for name in ("chat_completion", "_chat_comp", "_tokens_and_logprobs_comp"):
        monkeypatch.setattr(getattr(APIServer, name).retry, "wait", wait_none())


@pytest.mark.usefixtures("no_waits")
async def test_errors_of_the_model_server_are_not_scored(service: Service, tokenizer: Path) -> None:
    turns = [{"calls": [LOOK]}, {"text": "x", "fault": {"kind": "http_error", "status": 503, "times": None}}]
    script = {"prompts": [{"trajectories": [{"turns": turns}]}]}
    async with ScriptedModelServer(script, tokenizer=tokenizer) as model, no_slot_left(service):
        env = make_env(service, tokenizer, model.base_url, "vllm", max_lost_groups=1, max_rollout_attempts=2)
        with pytest.raises(RunFailed, match=r"1 groups in a row came to nothing .*The request to the model server failed in turn 2: .*503"):
            await env.process_manager()
    total, metrics = env.statistics.total, env.statistics.take_metrics()
    assert (total.rewards.count, total.group_count, set(total.faults)) == (0, 0, {("infra", "model_server")})
    assert metrics["train/faults/infra/model_server"] == sum(total.faults.values()) >= 2


async def test_a_model_server_that_goes_away_ends_the_run_with_its_summary(
    service: Service, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("environments.hermes_base_env._MODEL_WAIT_S", {"process": 0.2})
    script = {
        "prompts": [{"match": "greeting.txt", "trajectories": [{"turns": [{"calls": [DO]}]}]}, {"trajectories": [{"turns": [{"text": "x", "delay_s": 99}]}]}]
    }
    model = ScriptedModelServer(script, tokenizer=tokenizer)
    await model.start(handle_signals=False)
    env = make_env(service, tokenizer, model.base_url, total_steps=3)
    async with no_slot_left(service):
        run = asyncio.create_task(env.process_manager())
        await model.wait_for_request(lambda request: request.number > 4)
        await model.stop()
        with pytest.raises(RunFailed, match=f"the model server at {model.base_url} has accepted no connection for "):
            await run
    captured = capsys.readouterr()
    assert "1 complete, 1 lost" in captured.out
    assert re.search(r"faults \(not scored\).*infra/model_server [12]", captured.out)
    assert re.search(r"^terminal_test: 1/3 groups done, 2 rollouts scored, [12] not scored, mean reward 1\.000, after \d+ s$", captured.err, re.MULTILINE)


@asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[str]:
    """Run a model server whose every answer has this body; yield its address."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            length = 0
            while (line := await reader.readline()) not in (b"\r\n", b""):
                length = int(line.partition(b":")[2]) if line.lower().startswith(b"content-length") else length
            await reader.readexactly(length)
            content = b"{}" if request.startswith(b"GET") else body
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(content), content))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


def message(**members: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **members}, "finish_reason": "stop"}]}


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize(
    ("body", "server_type"),
    [
        ({"choices": None}, "openai"),
        ({"choices": [None]}, "openai"),
        ([1], "openai"),
        ({"choices": [{"message": "hello"}]}, "openai"),
        (message(content={"a": 1}), "openai"),
        (message(content="", tool_calls="calls"), "openai"),
        (message(content="", tool_calls=[None]), "openai"),
        (message(content="x" * 300_000), "openai"),
        ({"logprobs": [[[{"5": None}]]], "finish_reasons": ["stop"]}, "vllm"),
        ({"logprobs": 7, "finish_reasons": ["stop"]}, "vllm"),
    ],
)
async def test_an_answer_of_a_wrong_form_is_a_fault_of_the_rollout(service: Service, tokenizer: Path, body: Any, server_type: str) -> None:
    async with answering(json.dumps(body).encode()) as base_url, no_slot_left(service):
        env = make_env(service, tokenizer, base_url, server_type, group_size=1, max_lost_groups=1, max_rollout_attempts=1)
        bound_answers(env.server.servers, max_bytes=200_000)
        with pytest.raises(RunFailed, match="1 groups in a row came to nothing"):
            await env.process_manager()
    assert set(env.statistics.total.faults) <= {("infra", "model_server"), ("infra", "wrong_logprobs")}
    assert (env.statistics.total.rewards.count, sum(env.statistics.total.faults.values())) == (0, 1)


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("server_type", ["openai", "sglang"])
async def test_a_silent_model_server_is_asked_again(service: Service, tokenizer: Path, tmp_path: Path, server_type: str) -> None:
    script = {"prompts": [{"trajectories": [{"turns": [{"text": "Done.", "fault": {"kind": "silence", "times": 1}}]}]}]}
    async with ScriptedModelServer(script, tokenizer=tokenizer) as model, no_slot_left(service):
        path = tmp_path / "groups.jsonl"
        env = make_env(service, tokenizer, model.base_url, server_type, group_size=1, timeout=1, data_path_to_save_groups=str(path))
        await env.process_manager()
        assert model.request_count == 2
    assert (env.statistics.total.rewards.count, env.statistics.total.faults) == (1, {})


async def test_a_tokenizer_that_is_not_there_is_named(service: Service, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"tokenizer_name: '{tmp_path}' cannot be loaded: "):
        make_env(service, tmp_path, "http://127.0.0.1:9/v1", "vllm")
    with pytest.raises(SettingsError, match=r"openai\.server_type: trl is not supported"):
        make_env(service, tmp_path, "http://127.0.0.1:9/v1", "trl")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tool_server_url": "http://x"}, "tool_server_url: the tool server is not built yet"),
        ({"tool_server_token": "x"}, "tool_server_token: the tool server is not built yet"),
        ({"row_image": "always"}, "row_image: there is no 'always'; there are auto, never"),
        ({"enabled_toolsets": "terminal, web"}, "enabled_toolsets: the tool set 'web' needs a tool server"),
        ({"enabled_toolsets": ["terminal"], "distribution": "default"}, "enabled_toolsets and distribution exclude each other"),
        ({"tool_call_parser": "none"}, "tool_call_parser: There is no tool call parser 'none'"),
        ({"terminal_backend": "ssh"}, "terminal_backend: 'ssh' is not supported"),
        ({"max_agent_turns": 0}, "max_agent_turns: Input should be greater than or equal to 1"),
        ({"modal_gpu": "T4"}, "modal_gpu has no effect"),
        ({"grup_size": 3}, "grup_size: there is no such setting"),
        ({"group_size": 0}, "group_size: Input should be greater than or equal to 1"),
        ({"total_steps": -1}, "total_steps: Input should be greater than or equal to 1"),
        ({"max_token_length": 0}, "max_token_length: Input should be greater than or equal to 1"),
        ({"hook_timeout_s": 0}, "hook_timeout_s: Input should be greater than 0"),
        ({"acquire_timeout_s": -1}, "acquire_timeout_s: Input should be greater than or equal to 0"),
        ({"enabled_toolsets": "none"}, "enabled_toolsets: there is no tool set 'none'"),
        ({"tool_pool_mode": "kubernetes"}, "tool_pool_mode: there is no mode 'kubernetes'"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        HermesAgentEnvConfig(**settings)
    assert describe_validation_error(refused.value).startswith(sentence)


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SANDBOX_URL": "http://s:1", "TOKENIZER_NAME": "/tok", "OPENAI_BASE_URL": "http://m/v1", "OPENAI_API_KEY": "key", "ATROPOS_SERVER_MODEL": "m",
        "ATROPOS_SERVER_TYPE": "vllm",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    config, (server,) = TerminalTestEnv.config_init()
    assert (config.sandbox_url, config.tokenizer_name, config.max_token_length, config.use_wandb) == ("http://s:1", "/tok", 8192, False)
    assert (server.base_url, server.model_name, server.server_type, server.health_check) == ("http://m/v1", "m", "vllm", False)
    assert "key" not in repr(server).replace("api_key", ""), "atroposlib prints these settings"
    (complete,) = complete_servers([server], "/tok")
    assert (complete.api_key, complete.tokenizer_name) == ("key", "/tok")
    arguments = ["process", "--openai.api_key", "secret", "--env.group_size", "2", "--openai.api_key=later"]
    assert (take_api_key(arguments), arguments) == ("later", ["process", "--env.group_size", "2"])
    assert complete_servers([server], "/tok", "later")[0].api_key == "later"
    named = HermesAgentEnvConfig(sandbox_token=123, enabled_toolsets="terminal,file")
    assert (named.sandbox_token, named.enabled_toolsets) == ("123", ["terminal", "file"])
    assert "123" not in repr(named)
    shown = {name for name, value, default in named.__rich_repr__() if value != default}
    assert shown == {"enabled_toolsets"}, "atroposlib prints the settings that differ from their defaults, and no token"
    assert "sandbox_token" not in named.model_dump()  # which is written to files and sent to Weights & Biases
