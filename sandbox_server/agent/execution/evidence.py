"""Why a process ended as it did, as far as it can be proven."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, Mapping

from sandbox_server.agent.config import Limits
from sandbox_server.agent.execution.limit_end import find_limit_end
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel import procfs

_SHELL_SIGNALLED = 128
_NEAR = 0.75  # of a limit that is looked at after the fact
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


def limits_of(body: SlotRuntime, busy: bool) -> tuple[dict[str, int], bool]:
    """The counters of a body's limits as they stand, nothing where nothing counts; and whether it is `busy`, or anything but init is alive in it."""
    limits = body.groups.limits
    if limits is None:
        return {}, busy
    return limits.read_counters(alone=not busy), busy or limits.count_processes() > 1


def of_lost_init(body: SlotRuntime | None, before: dict[str, int], detail: str) -> tuple[str, str, dict[str, Any]]:
    """The reason of a call whose slot lost its init. Whoever of the slot took the memory, it was the slot's own work.

    Returns:
        Reason, sentence, metadata.
    """
    ended = find_limit_end(body)
    if ended is not None:
        return ended.reason, ended.error, ended.metadata()
    rose = _rises(body, before)
    if "oom" in rose:
        proof = {"oom_kills": rose["oom"], "init": detail, "own_work": True}
        return "oom", "the slot's memory limit was reached, and the kernel killed its init for it", {"evidence": proof}
    known: dict[str, Any] = {"own_work": True} if body is not None and body.link.self_inflicted else {}
    if "oom_elsewhere" in rose:
        known["oom_kills_below_own_limit"] = rose["oom_elsewhere"]
    return "sandbox_lost", "the slot has lost its init: %s" % detail, {"evidence": {"init": detail, **known}}


def _rises(body: SlotRuntime | None, before: dict[str, int]) -> dict[str, int]:
    return body.groups.limits.count_limit_hits(before) if body is not None and body.groups.limits is not None else {}


def how_ended(status: int) -> dict[str, Any]:
    """What `wait4` said of a process. A shell ends with 128+n by itself where what it ran was signalled, so that the exit code alone does not tell."""
    return {"signal": signal_name(os.WTERMSIG(status))} if os.WIFSIGNALED(status) else {"exited": os.WEXITSTATUS(status)}


def signal_name(number: int) -> str:
    """A signal as people know it."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def of_exit(
    body: SlotRuntime | None, before: dict[str, int], concurrent_calls: bool, status: int, code: int, max_rss_bytes: int, limits: Limits
) -> tuple[str, str, dict[str, Any]]:
    """The reason of a process that has ended.

    A counter that rose while it ran, or a signal only the kernel's limit sends, is proof; anything less is named as `limits_near`. The counters
    are the slot's: with `company`, another call, a job or something left running may have raised them, so they prove nothing, and that is said.
    Nor is a limit what ended a process that ended well.

    Returns:
        Reason, sentence, metadata.
    """
    ended = find_limit_end(body) if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else None
    if ended is not None:
        return ended.reason, ended.error, ended.metadata()
    rose = _rises(body, before)
    hits = {_COUNTED[name]: count for name, count in rose.items()}
    if code == 0:
        return "exit", "", {"evidence": hits} if hits else {}
    proof = {**how_ended(status), **hits}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ:
        return "resource_limit", "a file grew past the slot's limit of %d MiB" % limits.max_file_mb, {"evidence": proof}
    near = [_LIMITED[name] for name in _LIMITED if name in rose]
    if near and concurrent_calls:
        return "exit", "", {"evidence": {**proof, "ambiguous": True, "limits_near": near}}
    if "oom" in rose:
        return "oom", "a process of the call was killed: the slot's memory limit was reached", {"evidence": proof}
    if "processes" in rose:
        return "resource_limit", "the slot's limit of %d processes was reached" % limits.processes, {"evidence": proof}
    near += _unproven(body, code, max_rss_bytes, limits)
    return "exit", "", {"evidence": {**proof, "limits_near": near} if near else proof}


_LIMITED = {"oom": "memory", "processes": "processes"}
_COUNTED = {"oom": "oom_kills", "processes": "processes_refused", "oom_elsewhere": "oom_kills_below_own_limit"}


def _unproven(body: SlotRuntime | None, code: int, max_rss_bytes: int, limits: Limits) -> list[str]:
    """The limits of which nothing tells whether they were hit, and to which it looks as if."""
    near = []
    if code == _SHELL_SIGNALLED + signal.SIGXFSZ:
        near.append("file_size")
    counted = body is not None and body.groups.limits_memory
    if limits.memory_mb is not None and not counted and max_rss_bytes >= _NEAR * (limits.memory_mb << 20):
        near.append("memory")
    return near


def of_refusal(
    number: int, where: str, args: Mapping[str, Any], body: SlotRuntime | None, before: dict[str, int], limits: Limits
) -> tuple[str, str, dict[str, Any]]:
    """The reason of a process that could not be started.

    Whether the slot is at its limit is looked up: a machine that is full of other slots' processes refuses just the same.

    Returns:
        Reason, sentence, metadata.
    """
    proof: dict[str, Any] = {"errno": errno.errorcode.get(number, str(number)), "at": where}
    text = os.strerror(number)
    if number == errno.EAGAIN:
        proof["processes"] = _processes_of(body)
        if "processes" in _rises(body, before) or proof["processes"] >= _NEAR * limits.processes:
            return "resource_limit", "the slot's limit of %d processes was reached, nothing could be started" % limits.processes, {"evidence": proof}
        text += ", though the slot has only %d of its %d processes" % (proof["processes"], limits.processes)
    if number == errno.ENOMEM and body is not None and body.groups.limits is not None and body.groups.limits.is_short_of_memory(before):
        return "resource_limit", "the slot has no memory left to start anything", {"evidence": proof}
    if where in ("cwd", "fork") and number in _NO_FOLDER:
        return "tool_error", "the folder %s cannot be entered: %s" % (ascii(args.get("cwd")), text), {"errno": proof["errno"], "evidence": proof}
    if number == errno.E2BIG:
        return "invalid_args", "command and env together are longer than the system takes", {"evidence": proof}
    return "backend_error", "init could not start the call (%s): %s" % (where, text), {"may_have_run": False, "evidence": proof}


def _processes_of(body: SlotRuntime | None) -> int:
    """How many processes and threads a slot has, init among them."""
    if body is None:
        return 0
    limits = body.groups.limits
    if limits is not None and limits.limits_processes:
        return limits.count_processes()
    # Whatever the mode, what loses its parent becomes a child of init.
    return sum(procfs.threads_of(pid) for pid in process_table.find_trees(process_table.read_process_table(), [body.init_pid]))
