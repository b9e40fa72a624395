"""Lets bubblewrap make namespaces, and opens them, so that the template can join them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.isolation import init_start
from sandbox_server.agent.isolation.base import END_TIMEOUT_S
from sandbox_server.agent.isolation.bwrap_processes import kill_bwrap_processes

_HOLD = "echo; read -r line"  # Says that the mounts are complete, and keeps them until the standard input ends.
_INFO_BYTES = 4096


async def open_namespaces(bwrap: str, mount_args: Sequence[str], shell: str, marker: str, kinds: Sequence[str], pass_fds: Sequence[int] = ()) -> list[int]:
    """Return descriptors of the new namespaces that bubblewrap has set up. The caller closes them.

    Args:
        bwrap: the path of bubblewrap.
        mount_args: its arguments.
        shell: the path of bash, outside and inside of the namespace.
        marker: a path; one of the arguments is below it, and no other process of bubblewrap has such an argument.
        kinds: which namespaces: `mnt`, `user`.
        pass_fds: descriptors that the arguments name.

    Raises:
        StartFailed: bubblewrap failed, or its namespaces could not be opened; the text contains the error.
    """
    try:
        return await _open_namespaces(bwrap, mount_args, shell, marker, kinds, pass_fds)
    except OSError as error:
        raise StartFailed("the mounts of the template could not be opened: %s" % error, temporary=error.errno in TEMPORARY_ERRORS) from None


async def _open_namespaces(bwrap: str, mount_args: Sequence[str], shell: str, marker: str, kinds: Sequence[str], pass_fds: Sequence[int]) -> list[int]:
    info_r, info_w = os.pipe2(os.O_CLOEXEC)
    try:
        holder = _start_holder([bwrap, *mount_args, "--info-fd", str(info_w), "--", shell, "-c", _HOLD], info_w, pass_fds)
        try:
            return await _open_namespaces_of(holder, info_r, kinds)
        except BaseException:  # also when this task is cancelled: no process may be left of the start
            holder.kill()
            await asyncio.get_running_loop().run_in_executor(None, kill_bwrap_processes, marker)
            raise
        finally:
            _close_pipes(holder)
            await init_start.wait_for_exit(holder, END_TIMEOUT_S)
    finally:
        os.close(info_r)


def _start_holder(argv: Sequence[str], info_fd: int, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=(info_fd, *pass_fds), env={}, cwd="/")
    except OSError as error:
        raise StartFailed("%s: %s" % (argv[0], error.strerror), temporary=error.errno in TEMPORARY_ERRORS) from None
    finally:
        os.close(info_fd)


async def _open_namespaces_of(holder: subprocess.Popen[bytes], info_fd: int, kinds: Sequence[str]) -> list[int]:
    if holder.stdout is None or holder.stderr is None:
        raise ValueError("the process must have pipes")
    if not await wait_readable(holder.stdout.fileno(), init_start.START_TIMEOUT_S):
        raise StartFailed("bubblewrap did not set up the mounts of the template within %g s" % init_start.START_TIMEOUT_S)
    if not os.read(holder.stdout.fileno(), 1):
        text = holder.stderr.read().decode("utf-8", "replace").strip()
        raise StartFailed(text.splitlines()[-1] if text else "bubblewrap has ended before it had set up the mounts of the template")
    pid = int(json.loads(os.read(info_fd, _INFO_BYTES))["child-pid"])
    fds: list[int] = []
    try:
        for kind in kinds:
            fds.append(os.open("/proc/%d/ns/%s" % (pid, kind), os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def _close_pipes(holder: subprocess.Popen[bytes]) -> None:
    for stream in (holder.stdin, holder.stdout, holder.stderr):
        if stream is not None:
            stream.close()
