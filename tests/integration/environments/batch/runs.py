"""What the tests of whole runs share: a scripted model server in a thread, and runs in this process and in others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.batch.command_line import main
from environments.demo.model_server import ScriptedModelServer
from tests.support.prepared.environments import prepared_environments
from tests.support.prepared.process import PreparedCommand

#: A trajectory with two calls in its first turn.
TURNS: Sequence[Mapping[str, Any]] = (
    {
        "text": "I try.",
        "calls": [{"tool": "terminal", "arguments": {"command": "echo 6 > a; cat a"}}, {"tool": "read_file", "arguments": {"path": "a"}}],
    },
    {"text": "It is 6."},
)


@contextlib.contextmanager
def model_server(*prompts: Mapping[str, Any]) -> Iterator[ScriptedModelServer]:
    """Run a model server in a thread of its own. The last prompt of the script matches everything."""
    loop, server = asyncio.new_event_loop(), ScriptedModelServer({"prompts": [*prompts, {"trajectories": [{"turns": list(TURNS)}]}]})
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(handle_signals=False), loop).result(30)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def write_prompts(folder: Path, *rows: Any) -> Path:
    """Write a dataset; a row that is a text is a prompt, and bytes are a line."""
    lines = [row if isinstance(row, bytes) else json.dumps({"prompt": row} if isinstance(row, str) else row).encode() for row in rows]
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


class Runs:
    """Runs of one dataset in a folder.

    Args:
        folder: the current folder of the runs.
        server: the model server.
        environ: the variables that name the service.
        name: the name of the run.
        pool: the pool of the slots; None for one that the runner makes.
    """

    def __init__(self, folder: Path, server: ScriptedModelServer, environ: Mapping[str, str], name: str = "run", pool: str | None = "default") -> None:
        self.folder = folder
        self.server = server
        self._environ = environ
        self._name = name
        self._pool = pool

    def named(self, name: str) -> Runs:
        """The runs of the same dataset under another name."""
        return Runs(self.folder, self.server, self._environ, name)

    @property
    def path(self) -> Path:
        """The folder of the run."""
        return self.folder / "data" / self._name

    def arguments(self, *options: str) -> list[str]:
        """The command line."""
        usual = ["--dataset_file", "prompts.jsonl", "--batch_size", "10", "--run_name", self._name, "--num_workers", "4", "--model", "m", "--max_turns", "5"]
        pool = ["--pool", self._pool] if self._pool else []
        return [*usual, *pool, "--base_url", self.server.base_url, "--model_retries", "2", "--lease_ttl_s", "5", *options]

    def run(self, *options: str) -> int:
        """Run in this process, to the end; return the exit code."""
        with contextlib.chdir(self.folder):
            return main(self.arguments(*options))

    @contextlib.contextmanager
    def started(self, *options: str) -> Iterator[PreparedCommand]:
        """Start a run in a process of its own; kill it at the end of the block."""
        words = ["-m", "environments.batch", *self.arguments(*options)]
        environ = {**os.environ, **self._environ}
        with open(os.devnull, "rb") as nothing, prepared_environments().start(words, environ, self.folder, (nothing.fileno(), None, None)) as process:
            yield process

    def rows(self) -> list[dict[str, Any]]:
        """The trajectories, each of which must be a whole row."""
        path = self.path / "trajectories.jsonl"
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def errors(self) -> list[dict[str, Any]]:
        """The failures."""
        return [json.loads(line) for line in (self.path / "errors.jsonl").read_bytes().splitlines()]

    def document(self, name: str) -> dict[str, Any]:
        """The content of `checkpoint` or `statistics`."""
        document: dict[str, Any] = json.loads((self.path / f"{name}.json").read_bytes())
        return document

    def whole_row_count(self) -> int:
        """How many whole rows a running process has written."""
        path = self.path / "trajectories.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def prompts_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The prompts of trajectories, sorted."""
    return sorted(row["conversations"][1]["value"] for row in rows)


def content_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be the same in a resumed run and in an undisturbed one: everything but times and attempts."""
    return sorted(json.dumps([row["prompt_id"], row["occurrence"], row["conversations"], row["end"], row["tool_stats"]]) for row in rows)
