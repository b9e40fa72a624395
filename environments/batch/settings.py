"""The settings of a run, and their comparison with those of the run that is resumed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from environments.batch.failures import RunRefused
from environments.toolsets import ToolsetError, find_distribution


class Duplicates(enum.StrEnum):
    """What happens to lines that have the same content."""

    #: Each line gets a trajectory of its own.
    KEEP = "keep"
    #: Lines with the same prompt, pool and image get one trajectory.
    MERGE = "merge"


class BrokenLines(enum.StrEnum):
    """What happens if a line of the dataset cannot be used."""

    #: The line is named and left out.
    SKIP = "skip"
    #: The line is named, and nothing is run.
    STOP = "stop"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSettings:
    """The settings of a run. `docs/batch.md` describes them.

    Args:
        dataset_file: the JSON Lines file with the prompts.
        run_name: the name of the run, and of its folder.
        batch_size: how many rows are written before the file is flushed to the disk and the checkpoint is replaced.
        num_workers: how many prompts run at the same time, each in a slot of its own.
        model: the name of the model, as its server knows it.
        base_url: the address of the model server, such as `http://127.0.0.1:8000/v1`.
        api_key: the key of the model server; it is never written to a file.
        distribution: the distribution from which the tool sets of each prompt are sampled; None for all tools of the pool.
        max_samples: how many usable lines of the dataset are read; None for all.
        max_turns: the most answers of the model in one trajectory.
        temperature: the sampling temperature.
        max_tokens: the most tokens of one answer; None for the default of the server.
        max_context_tokens: the most tokens of a conversation; a longer one is shortened for the model, and never in the trajectory. None for no limit.
        ephemeral_system_prompt: a system prompt for the model that is not written to the trajectories.
        pool: the pool of the slots; None for the default pool of the service.
        image_backend: the backend of the pools that are created for rows with an image.
        duplicates: what happens to lines with the same content.
        broken_lines: what happens to lines that cannot be used.
        tool_timeout_s: the timeout of each tool call, in seconds.
        max_attempts: how often a prompt is begun in a new slot after a fault of the infrastructure, the first attempt included.
        max_failures: how many prompts in a row may fail because of the infrastructure before the run is stopped.
        acquire_timeout_s: how long a prompt waits for a slot, in seconds.
        lease_ttl_s: how long a slot stays leased after the runner was killed, in seconds.
        model_timeout_s: how long one answer of the model may take, in seconds.
        model_retries: how often a request to the model server is repeated.
    """

    dataset_file: Path
    run_name: str
    batch_size: int
    model: str
    base_url: str
    num_workers: int = 4
    api_key: str = ""
    distribution: str | None = None
    max_samples: int | None = None
    max_turns: int = 30
    temperature: float = 1.0
    max_tokens: int | None = None
    max_context_tokens: int | None = None
    ephemeral_system_prompt: str | None = None
    pool: str | None = None
    image_backend: str = "docker"
    duplicates: Duplicates = Duplicates.KEEP
    broken_lines: BrokenLines = BrokenLines.SKIP
    tool_timeout_s: float = 120.0
    max_attempts: int = 3
    max_failures: int = 10
    acquire_timeout_s: float = 600.0
    lease_ttl_s: float = 60.0
    model_timeout_s: float = 600.0
    model_retries: int = 5


#: The settings that decide what the rows of a run contain. A resumed run must have the same ones.
COMPARED_SETTINGS = (
    "dataset_file", "model", "distribution", "max_samples", "max_turns", "temperature", "max_tokens", "max_context_tokens", "ephemeral_system_prompt",
    "pool", "image_backend", "duplicates", "broken_lines", "tool_timeout_s",
)  # fmt: skip


def check_settings(settings: BatchSettings) -> None:
    """Check what the types of the settings do not show.

    Raises:
        RunRefused: a setting has a value that cannot be used.
    """
    if not _is_http_url(settings.base_url):
        raise RunRefused(
            f"--base_url: {settings.base_url!r} is no address of a model server", "name it as in http://127.0.0.1:8000/v1, here or in OPENAI_BASE_URL"
        )
    if not settings.model:
        raise RunRefused("--model: no model is named", "name the model as its server knows it, here or in ATROPOS_SERVER_MODEL")
    if settings.image_backend == "local":
        raise RunRefused("--image_backend: sandboxes of the backend local have no image", "name a backend with images, such as docker")
    if settings.distribution is not None:
        try:
            find_distribution(settings.distribution)
        except ToolsetError as error:
            raise RunRefused(f"--{error}", "--list_distributions describes them") from error


def _is_http_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def stored_settings(settings: BatchSettings) -> dict[str, Any]:
    """Return the compared settings as JSON values, for the checkpoint."""
    values = dataclasses.asdict(settings)
    return {name: _json_value(values[name]) for name in COMPARED_SETTINGS}


def _json_value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value.resolve())
    return value.value if isinstance(value, enum.Enum) else value


def changed_settings(stored: Mapping[str, Any], settings: BatchSettings) -> list[str]:
    """Return one phrase for each compared setting that differs, with both values.

    Args:
        stored: the settings in the checkpoint of the run.
        settings: those with which the run is to be resumed.
    """
    now = stored_settings(settings)
    return [f"--{name} was {stored.get(name)!r} and is now {now[name]!r}" for name in COMPARED_SETTINGS if stored.get(name) != now[name]]
