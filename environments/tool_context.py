"""What a reward function may do in the slot of the rollout that it scores.

The methods block. They use connections of their own and no event loop, so they work in every thread, and inside a running event loop, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from env_client import ClientClosed, FileError, FileNotFound, InvalidRequest, Lease, LeaseInfo, PayloadTooLarge, Result, SandboxClient, SandboxError
from env_client.backend import execution_result
from env_client.tools import render_tool_reply
from environments.folder_archives import DownloadedFolder, pack_folder, unpack_folder
from environments.toolsets import TOOL_SERVER_TOOLS

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 180.0
#: How much output of a command comes back, in bytes; more is cut out of its middle.
COMMAND_OUTPUT_BYTES = 1 << 20
#: How much of a file `read_file` returns, in bytes: the most that the service returns of one call.
FILE_OUTPUT_BYTES = 10 << 20
#: How large a folder may be that is downloaded, in bytes, unless the caller allows more.
MAX_DOWNLOAD_BYTES = 1 << 30
MAX_LOOP_BLOCK_S = 10.0


class ToolFault(SandboxError):
    """A tool call of a reward function failed through no fault of the model, so the rollout must not be scored.

    Args:
        result: the result of the call.
    """

    code = "tool_fault"

    def __init__(self, result: Result) -> None:
        super().__init__(f"the call ended with {result.reason}, which is not the model's fault: {result.error}", extra={"call_id": result.call_id})
        self.result = result


class ToolServerMissing(SandboxError):
    """The tool needs a tool server, which is not built yet."""

    code = "tool_server_missing"


#: Errors that the reward function, or what the model left behind, has caused; and the end of the scoring.
_NOT_INFRA = (ClientClosed, InvalidRequest, FileNotFound, FileError, PayloadTooLarge, ToolServerMissing)


class ToolContext:
    """The slot of a finished rollout, for a reward function.

    What a command or a file tool could not do is in its return value, because the model may have caused it. An exception that is a `SandboxError`
    means that nothing is known about the rollout: do not catch it, and the environment drops the rollout instead of scoring it. `fault` keeps the first
    of them, in case that a reward function catches it all the same.

    A reward function that is a coroutine blocks its event loop during each call. To avoid that, use `await asyncio.to_thread(context.terminal, "…")`.

    Args:
        client: a client for threads. It can serve any number of contexts, and is not closed by them.
        info: the lease of the slot. Whoever holds it keeps renewing it.
        max_loop_block_s: a call that blocks an event loop for longer, in seconds, is logged.
    """

    def __init__(self, client: SandboxClient, info: LeaseInfo, *, max_loop_block_s: float = MAX_LOOP_BLOCK_S) -> None:
        self._lease = Lease(client, info)
        self._lock = threading.Lock()
        self._running_call_ids: set[str] = set()
        self._closed = False
        self._max_loop_block_s = max_loop_block_s
        self._loop_block_logged = False
        #: The first failure that was not the model's; None as long as there is none.
        self.fault: SandboxError | None = None

    @property
    def trajectory_id(self) -> str | None:
        """The trajectory that is scored."""
        return self._lease.info.trajectory_id

    @property
    def workspace(self) -> str:
        """The working folder of the slot, as its commands see it."""
        return self._lease.info.workspace

    def terminal(self, command: str, timeout: float = DEFAULT_TIMEOUT_S, *, cwd: str | None = None) -> dict[str, Any]:
        """Run a shell command.

        Args:
            command: the command, as `bash -c` takes it.
            timeout: the timeout, in seconds; at most the `max_timeout_s` of the pool.
            cwd: the working folder; default the workspace.

        Returns:
            `exit_code` and `output`. If the command did not end by itself, `exit_code` is None and `error` says why. `truncated` is true if the middle of
            the output is missing.

        Raises:
            ToolFault: the command failed through no fault of the model.
            SandboxError: the slot cannot be reached or is lost.
        """
        args = {"command": command} if cwd is None else {"command": command, "cwd": cwd}
        result = self._run("terminal", args, timeout, COMMAND_OUTPUT_BYTES)
        return {"exit_code": result.exit_code, "output": result.output, **_problems(result)}

    def terminal_stateful(self, command: str, timeout: float = DEFAULT_TIMEOUT_S, *, session: str | None = None) -> dict[str, Any]:
        """Run a shell command in a shell that stays, with the working folder, the variables and the functions that earlier commands have left in it.

        The shells of the model are among them, so the command also finds what the model has left.

        Args:
            command: the command.
            timeout: the timeout, in seconds; at most the `max_timeout_s` of the pool.
            session: the name of the shell; default the one that the model's calls without a name use.

        Returns:
            As `terminal`. `session` is `kept`, or `restarted` if the shell has ended: the next command then has a new one.

        Raises:
            ToolFault: the pool does not have the tool, or the command failed through no fault of the model.
            SandboxError: the slot cannot be reached or is lost.
        """
        args = {"command": command} if session is None else {"command": command, "session": session}
        result = self._run("terminal_stateful", args, timeout, COMMAND_OUTPUT_BYTES)
        kept = {"session": result.metadata["session"]} if "session" in result.metadata else {}
        return {"exit_code": result.exit_code, "output": result.output, **kept, **_problems(result)}

    def tmux(self, action: str, timeout: float = DEFAULT_TIMEOUT_S, **args: Any) -> dict[str, Any]:
        """Use the terminal of the slot, which is the model's: look at its screen, or type.

        Args:
            action: `send_keys`, `capture`, `resize` or `reset`.
            timeout: the timeout, in seconds; at most the `max_timeout_s` of the pool.
            args: the other arguments of the tool, such as `keys`.

        Returns:
            `output`, which is the screen, and `metadata`, which is that of the result; `error` if the terminal could not do it.

        Raises:
            ToolFault: the pool does not have the tool, or the call failed through no fault of the model.
            SandboxError: the slot cannot be reached or is lost.
        """
        result = self._run("tmux", {"action": action, **args}, timeout, COMMAND_OUTPUT_BYTES)
        return {"output": result.output, "metadata": dict(result.metadata), **_problems(result)}

    def read_file(self, path: str) -> dict[str, Any]:
        """Read a text file. Returns `content`, and `truncated` if its middle is missing; or `error`, for example if there is no such file."""
        result = self._run("read_file", {"path": path}, DEFAULT_TIMEOUT_S, FILE_OUTPUT_BYTES)
        return {**({"content": result.output} if result.success else {}), **_problems(result)}

    def write_file(self, path: str, content: str) -> dict[str, Any]:
        """Write a text file, and create its parent folders. Returns `size_bytes`, or `error`."""
        result = self._run("write_file", {"path": path, "content": content}, DEFAULT_TIMEOUT_S)
        return {**({"size_bytes": result.metadata["size_bytes"]} if result.success else {}), **_problems(result)}

    def search(self, pattern: str, path: str | None = None, *, glob: str | None = None) -> dict[str, Any]:
        """Search the lines of files with a regular expression. Returns `output`, with a line `path:line:text` for each match, and `matches`; or `error`."""
        args = {name: value for name, value in {"pattern": pattern, "path": path, "glob": glob}.items() if value is not None}
        result = self._run("search_files", args, DEFAULT_TIMEOUT_S, COMMAND_OUTPUT_BYTES)
        return {**({"output": result.output, "matches": result.metadata["matches"]} if result.success else {}), **_problems(result)}

    def upload_file(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Copy a local file into the slot, with its permissions.

        Args:
            local_path: the local file.
            remote_path: relative to the workspace, or absolute inside the workspace or `/tmp`. Missing parent folders are created.
        """
        source = Path(local_path)
        with self._guarded():
            self._lease.put_file(remote_path, source, mode=source.stat().st_mode & 0o777)

    def upload_dir(self, local_path: str | os.PathLike[str], remote_path: str) -> None:
        """Copy the content of a local folder into a folder of the slot."""
        with self._guarded(), tempfile.TemporaryFile() as packed:
            pack_folder(Path(local_path), packed)
            packed.seek(0)
            self._lease.put_archive(remote_path, packed)

    def download_file(self, remote_path: str, local_path: str | os.PathLike[str]) -> int:
        """Copy a file of the slot to a local file, and create its parent folders. Returns the size in bytes.

        Raises:
            FileNotFound: there is no such file.
            FileError: it is not a regular file.
        """
        target = Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._guarded():
            return self._lease.get_file_to(remote_path, target)

    def download_dir(self, remote_path: str, local_path: str | os.PathLike[str], *, max_bytes: int = MAX_DOWNLOAD_BYTES) -> DownloadedFolder:
        """Copy the files and folders of a folder of the slot into a local folder. Symbolic links and devices are left out.

        Args:
            remote_path: the folder of the slot.
            local_path: the local folder, which is created.
            max_bytes: how much may be written, in bytes: the model decides about the content of its slot.

        Raises:
            FolderTooLarge: the folder has more than `max_bytes`; what was written by then stays.
        """
        with self._guarded(), tempfile.TemporaryFile() as unpacked:
            return unpack_folder(self._lease.stream_archive(remote_path), unpacked, Path(local_path), max_bytes)

    def call_tool(self, name: str, args: Mapping[str, Any] | None = None) -> str:
        """Run any tool and return the JSON text that the agent loop would give to a model.

        Raises:
            InvalidRequest: there is no such tool.
            ToolServerMissing: the tool needs a tool server.
        """
        if name in TOOL_SERVER_TOOLS:
            _raise_tool_server_missing(name)
        return render_tool_reply(name, execution_result(self._run(name, args or {}, DEFAULT_TIMEOUT_S)))

    def web_search(self, query: str) -> NoReturn:
        """Refuse the call: it needs a tool server."""
        _raise_tool_server_missing("web_search")

    def web_extract(self, urls: list[str]) -> NoReturn:
        """Refuse the call: it needs a tool server."""
        _raise_tool_server_missing("web_extract")

    def browser_navigate(self, url: str) -> NoReturn:
        """Refuse the call: it needs a tool server."""
        _raise_tool_server_missing("browser_navigate")

    def browser_snapshot(self) -> NoReturn:
        """Refuse the call: it needs a tool server."""
        _raise_tool_server_missing("browser_snapshot")

    def cleanup(self) -> None:
        """End the calls that still run in other threads, and refuse later ones with `ClientClosed`. The environment calls it before it releases the slot."""
        with self._lock:
            self._closed = True
            running = list(self._running_call_ids)
        for call_id in running:
            try:
                self._lease.cancel(call_id)
            except SandboxError as error:
                log.warning("call %s of a reward function could not be cancelled; it ends with its lease: %s", call_id, error)

    def _run(self, tool: str, args: Mapping[str, Any], timeout_s: float, output_limit_bytes: int | None = None) -> Result:
        """Run one call.

        Raises:
            ToolFault: the call failed through no fault of the model.
        """
        call_id = "c-" + secrets.token_hex(12)
        with self._guarded(call_id):
            result = self._lease.exec(tool, args, timeout_s=timeout_s, output_limit_bytes=output_limit_bytes, call_id=call_id)
            if self._closed:
                raise _closed_error()
            if result.fault in ("infra", "ambiguous") or result.reason == "cancelled":
                raise ToolFault(result)
            return result

    @contextmanager
    def _guarded(self, call_id: str | None = None) -> Iterator[None]:
        """Run a block that uses the slot: refuse it after `cleanup`, keep its failure in `fault`, and log it if it blocks an event loop for long."""
        with self._lock:
            if self._closed:
                raise _closed_error()
            if call_id is not None:
                self._running_call_ids.add(call_id)
        began_s = time.monotonic()
        try:
            yield
        except SandboxError as error:
            with self._lock:
                if self.fault is None and not isinstance(error, _NOT_INFRA):
                    self.fault = error
            raise
        finally:
            with self._lock:
                self._running_call_ids.discard(call_id or "")
            self._log_loop_block(time.monotonic() - began_s)

    def _log_loop_block(self, took_s: float) -> None:
        if took_s < self._max_loop_block_s or self._loop_block_logged or not _inside_event_loop():
            return
        self._loop_block_logged = True
        log.warning(
            "a call of the reward function of trajectory %s blocked its event loop for %.0f s; use a plain function, or await asyncio.to_thread(…)",
            self.trajectory_id,
            took_s,
        )


def _problems(result: Result) -> dict[str, Any]:
    return {**({"error": result.error} if result.error else {}), **({"truncated": True} if result.truncated else {})}


def _raise_tool_server_missing(tool: str) -> NoReturn:
    raise ToolServerMissing(f"{tool} needs a tool server, which is not built yet: use the tools of the slot, such as terminal")


def _closed_error() -> ClientClosed:
    return ClientClosed("the tool context was cleaned up, because the scoring of its rollout has ended")


def _inside_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
