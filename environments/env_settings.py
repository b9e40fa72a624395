"""The settings that every environment has, beside those of atroposlib."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from env_client import ServiceNotFound, find_service
from environments.model_access.tokenizer_source import TokenizerUnavailable
from environments.rollouts.pool_spec import PoolRequest, PoolSettings, SettingsError, describe_missing_service, plan_pool
from environments.rollouts.service import ConnectionSettings
from environments.tool_call_parsers import get_parser
from environments.toolsets import ToolsetSettings

#: The types of model servers that return tokens and log probabilities (phase 2).
_MANAGED_SERVER_TYPES = frozenset({"vllm", "sglang"})
#: The values of `row_image`.
_ROW_IMAGES = ("auto", "never")


class AgentEnvSettings(BaseModel):
    """The settings of tools, agent, data and pool. They are checked when they are made, without network.

    Raises:
        pydantic.ValidationError: a setting is wrong, or asks for something that is not built.
    """

    # A token or a name of a pool may consist of digits, and command lines have texts only.
    # A name that does not exist is a mistake, above all in a YAML file: the run would go on with other settings than those that were meant.
    model_config = ConfigDict(coerce_numbers_to_str=True, extra="forbid")

    # Tools.
    # They are lists. Their type allows a text, too, because atroposlib checks the command line before it is divided at the commas.
    enabled_toolsets: list[str] | str | None = Field(default=None, description="Tool sets that the model gets, separated by commas; default: all of the pool")
    disabled_toolsets: list[str] | str | None = Field(default=None, description="Tool sets that are taken away from the others")
    distribution: str | None = Field(default=None, description="Distribution from which the tool sets of each group are sampled; excludes enabled_toolsets")
    # Agent.
    max_agent_turns: int = Field(default=30, ge=1, description="Most answers of the model in a rollout")
    system_prompt: str | None = Field(default=None, description="System prompt of every conversation")
    agent_temperature: float = Field(default=1.0, ge=0, description="Sampling temperature")
    tool_call_parser: str = Field(default="hermes", description="Family of the model, which decides how it writes tool calls (phase 2)")
    agent_tool_delay_s: float = Field(default=0.0, ge=0, description="Wait before each tool call, in seconds")
    agent_max_tokens: int | None = Field(default=None, ge=1, description="Most tokens of one answer; default: what is left of max_token_length")
    # Data.
    dataset_name: str | None = Field(default=None, description="Data set: a JSONL or Parquet file, a folder of these, or a name of the Hugging Face Hub")
    dataset_split: str = Field(default="train", description="Part of the data set")
    prompt_field: str = Field(default="prompt", description="Column of the prompt")
    eval_item_count: int = Field(default=32, ge=1, description="How many items `evaluate` uses at most")
    # Rollouts.
    tool_timeout_s: float | None = Field(default=None, gt=0, description="Timeout of a tool call of the model, in seconds; default: the pool's")
    hook_timeout_s: float = Field(default=3600, gt=0, description="How long the set-up or the scoring of a rollout may take, in seconds")
    max_rollout_attempts: int = Field(default=3, ge=1, description="How often a rollout is begun at most when faults of the infrastructure end it")
    max_put_backs: int = Field(default=2, ge=0, description="How often the item of a group that came to nothing is used again")
    recordings_folder: str | None = Field(default=None, description="Folder for the recordings of tmux; default: beside data_path_to_save_groups")
    max_lost_groups: int = Field(default=10, ge=1, description="After so many groups in a row that came to nothing, the run ends")
    # Pool, shared.
    terminal_backend: str = Field(default="local", description="Older spelling of tool_pool_mode: local, docker, modal or singularity")
    tool_pool_mode: str = Field(default="default", description="Backend of the pool: default (local), nomad or modal")
    sandbox_url: str | None = Field(default=None, description="Address of the sandbox service (SANDBOX_URL); default: an embedded service")
    sandbox_token: str | None = Field(default=None, repr=False, exclude=True, description="Token of the sandbox service (SANDBOX_TOKEN)")
    sandbox_pool: str | None = Field(default=None, description="Name of an existing pool; default: a pool made from these settings")
    allow_network: bool = Field(default=True, description="Whether the model has the network of the pool")
    require_sandbox: bool = Field(default=False, description="Refuse isolation modes weaker than uid")
    require_stateful_sandbox: bool = Field(default=False, description="Require a stateful shell and tmux")
    purge_job_on_start: bool = Field(default=False, description="Nomad: purge an old job of that id at the start")
    purge_job_on_shutdown: bool = Field(default=True, description="Release all slots of the run at its end")
    acquire_timeout_s: float = Field(default=30.0, ge=0, description="How long a group waits for its slots, in seconds")
    lease_ttl_s: int = Field(
        default=300,
        ge=1,
        le=86_400,
        description="How long slots stay leased after this process has died, in seconds; the service adds 60 s to a tool call that still ran",
    )
    tool_batch_window_ms: float = Field(default=20, ge=0, description="How long a tool call waits for others before it is sent, in milliseconds")
    tool_max_batch_size: int = Field(default=200, ge=1, le=1000, description="Most tool calls of one request")
    row_image: str = Field(default="auto", description="Whether rows choose the image of their sandbox: auto (not built yet: such rows are refused) or never")
    # Nomad, and the sizes of local pools.
    nomad_address: str = Field(default="http://localhost:4646", description="Nomad: address")
    sandbox_job_id: str = Field(default="atropos-sandbox", description="Nomad: job of the sandboxes")
    sandbox_image: str = Field(default="atropos-sandbox:local", description="Nomad, docker: image of the sandboxes")
    slots_per_container: int = Field(default=10, description="Local, docker, Nomad: slots of each sandbox")
    min_containers: int = Field(default=1, description="Local, docker, Nomad: sandboxes that are always kept")
    max_containers: int = Field(default=10, description="Local, docker, Nomad: most sandboxes")
    privileged: bool = Field(default=False, description="Nomad: privileged containers")
    driver: str = Field(default="docker", description="Nomad: docker or singularity")
    singularity_image: str | None = Field(default=None, description="Nomad: path of a .sif image")
    # Modal.
    modal_app_name: str = Field(default="atropos-sandbox", description="Modal: app of the sandboxes")
    modal_image: str = Field(default="python:3.11", description="Modal: image of the sandboxes")
    modal_gpu: str | None = Field(default=None, description="Modal: GPU, such as T4 or A100")
    modal_cpu: float = Field(default=1.0, description="Modal: cores of a sandbox")
    modal_memory: int = Field(default=2048, description="Modal: memory of a sandbox, in MB")
    modal_slots_per_sandbox: int = Field(default=10, description="Modal: slots of each sandbox")
    modal_min_sandboxes: int = Field(default=1, description="Modal: sandboxes that are always kept")
    modal_max_sandboxes: int = Field(default=5, description="Modal: most sandboxes")
    modal_idle_timeout: float = Field(default=120, description="Modal: after so long without a lease a sandbox ends, in seconds")
    modal_max_lifetime: float = Field(default=3600, description="Modal: after so long a sandbox gives no new leases, in seconds")
    modal_acquire_timeout: float = Field(default=60.0, description="Modal: how long a group waits for its slots, in seconds")
    modal_execution_timeout: float = Field(default=30.0, description="Modal: timeout of a tool call, in seconds")
    modal_secrets: str = Field(default="", description="Modal: names of secrets, separated by commas")
    modal_env_vars: str = Field(default="", description="Modal: variables of every slot, NAME=value;NAME=value")
    modal_workspace_base: str = Field(default="/data", description="Modal: folder of the workspaces")
    # External tools.
    tool_server_url: str | None = Field(default=None, description="Tool server for web and browser tools; not built yet")
    tool_server_token: str | None = Field(default=None, repr=False, exclude=True, description="Token of the tool server; not built yet")

    @field_validator("enabled_toolsets", "disabled_toolsets", mode="before")
    @classmethod
    def _split_names(cls, value: Any) -> Any:
        """Accept names that are separated by commas, as a command line has them."""
        return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        for name in ("tool_server_url", "tool_server_token"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: the tool server is not built yet; leave {name} out, and use the tools of the slot")
        if self.row_image not in _ROW_IMAGES:
            raise ValueError(f"row_image: there is no {self.row_image!r}; there are {', '.join(_ROW_IMAGES)}")
        self.toolset_settings()
        try:
            get_parser(self.tool_call_parser)
        except ValueError as error:
            raise ValueError(f"tool_call_parser: {error}") from error
        self.plan_pool()
        return self

    def toolset_settings(self) -> ToolsetSettings:
        """Return which tools the groups have.

        Raises:
            ToolsetError: a name is not known, or two settings contradict each other.
        """
        return ToolsetSettings(enabled_toolsets=self.enabled_toolsets, disabled_toolsets=self.disabled_toolsets, distribution=self.distribution)

    def plan_pool(self) -> PoolRequest:
        """Return the pool that the settings ask for.

        Raises:
            SettingsError: a setting is wrong, or has no effect on this kind of pool.
        """
        names = [field.name for field in dataclasses.fields(PoolSettings)]
        return plan_pool(PoolSettings(**{name: getattr(self, name) for name in names}))

    def check_service_address(self) -> None:
        """Check, without network, that a service is named where one is needed, and that its address is one.

        Raises:
            SettingsError: it is not.
        """
        if self.sandbox_url:
            try:
                find_service(self.sandbox_url, self.sandbox_token)
            except ServiceNotFound as error:
                raise SettingsError(f"sandbox_url: {error.detail}") from error
        elif self.sandbox_pool:
            raise SettingsError(describe_missing_service(self.sandbox_pool))

    def connection_settings(self) -> ConnectionSettings:
        """Return how the service is used."""
        return ConnectionSettings(
            sandbox_url=self.sandbox_url,
            sandbox_token=self.sandbox_token,
            lease_ttl_s=self.lease_ttl_s,
            tool_batch_window_ms=self.tool_batch_window_ms,
            tool_max_batch_size=self.tool_max_batch_size,
            releases_run=self.purge_job_on_shutdown,
        )


def load_env_file(environment_file: Path) -> None:
    """Load the `.env` file beside the file of an environment, if there is one. Variables that are set already stay."""
    from dotenv import load_dotenv  # an optional package, which only scripts need

    path = environment_file.parent / ".env"
    if path.is_file():
        load_dotenv(path, override=False)


def settings_of_environ(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings that environment variables give. The service's token is not among them: the client reads it by itself."""
    variables = {"sandbox_url": "SANDBOX_URL", "tokenizer_name": "TOKENIZER_NAME"}
    return {setting: environ[variable].strip() for setting, variable in variables.items() if environ.get(variable, "").strip()}


def model_server_of_environ(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return the settings of the model server that environment variables give."""
    return {
        "base_url": environ.get("ATROPOS_SERVER_BASE_URL") or environ.get("OPENAI_BASE_URL") or "http://localhost:9004/v1",
        "api_key": None,  # atroposlib prints these settings; `complete_servers` adds the key
        "model_name": environ.get("ATROPOS_SERVER_MODEL") or "default",
        "server_type": environ.get("ATROPOS_SERVER_TYPE") or "openai",
        "health_check": False,  # atroposlib's health check asks the model for an answer every second, and waits for ever for a server that is down
    }


def describe_validation_error(error: ValidationError) -> str:
    """Return one sentence about wrong settings."""
    parts = []
    for detail in error.errors(include_url=False):
        place = ".".join(map(str, detail["loc"]))
        message = "there is no such setting" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
        parts.append(f"{place}: {message}" if place else message)
    return "; ".join(parts)


def phase_of_servers(server_configs: Any) -> int:
    """Return 1 for servers of chat completions, and 2 for servers that return tokens and log probabilities.

    Raises:
        SettingsError: the type of the servers is not supported.
    """
    types = {config.server_type for config in server_configs} if isinstance(server_configs, list) else {server_configs.server_type}
    if types == {"openai"}:
        return 1
    if types and types <= _MANAGED_SERVER_TYPES:
        return 2
    raise SettingsError(f"openai.server_type: {', '.join(sorted(types)) or 'none'} is not supported; use openai, vllm or sglang, and one kind for all servers")


@contextmanager
def explained_errors(tokenizer_name: str) -> Iterator[None]:
    """Explain what goes wrong while atroposlib creates an environment, such as a tokenizer that is not there.

    Raises:
        SettingsError: a setting is wrong.
    """
    try:
        yield
    except TokenizerUnavailable as error:
        raise SettingsError(f"tokenizer_name (--env.tokenizer_name): {tokenizer_name!r} cannot be loaded: {error}") from error
    except OSError as error:
        if error.errno is not None:  # of the operating system: the file of the groups cannot be written
            raise SettingsError(f"data_path_to_save_groups: {error.strerror}: {error.filename}") from error
        raise SettingsError(f"tokenizer_name: {tokenizer_name!r} cannot be loaded: {_first_line(error)}") from error
    except (ValueError, KeyError, ImportError) as error:  # transformers raises these for folders and names that are not those of a tokenizer
        raise SettingsError(f"tokenizer_name: {tokenizer_name!r} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def complete_servers(server_configs: Any, tokenizer_name: str, api_key: str | None = None, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the settings of the servers with the tokenizer of the environment and the key of the model server, where they name none.

    Args:
        server_configs: the settings as atroposlib gives them.
        tokenizer_name: the tokenizer of the environment.
        api_key: the key on the command line; None for that of `OPENAI_API_KEY`.
        environ: the environment variables.
    """
    if not isinstance(server_configs, list):
        return server_configs
    key = api_key or environ.get("OPENAI_API_KEY") or "x"  # the client of openai refuses an empty one
    return [
        config.model_copy(
            update={"api_key": config.api_key or key, "tokenizer_name": tokenizer_name if config.tokenizer_name == "none" else config.tokenizer_name}
        )
        for config in server_configs
    ]


def take_api_key(arguments: list[str]) -> str | None:
    """Remove the key of the model server from a command line, because atroposlib prints what it finds there. Returns the key, or None."""
    option, key = "--openai.api_key", None
    for index in reversed(range(len(arguments))):
        if arguments[index].startswith(option + "="):
            value = arguments.pop(index).partition("=")[2]
            key = key or value
        elif arguments[index] == option and index + 1 < len(arguments):
            key = key or arguments[index + 1]
            del arguments[index : index + 2]
    return key
