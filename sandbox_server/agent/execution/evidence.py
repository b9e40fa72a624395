"""Finds out why a process ended, and what proves it.

The `judge_...` functions return the reason, the error sentence and the metadata of the call's outcome.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, Mapping

from sandbox_server.agent.config import SlotLimits
from sandbox_server.agent.execution.limit_end import find_limit_end
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel import procfs
from sandbox_server.agent.kernel.memory_plan import MIB

_SHELL_SIGNALLED = 128
_NEAR_LIMIT_FRACTION = 0.75  # the part of a limit from which on use counts as near the limit, where nothing counts how often the limit was hit
_CANNOT_ENTER_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG)


def read_limit_counters(runtime: SlotRuntime, has_concurrent_work: bool, own_processes: int = 0) -> tuple[dict[str, int], bool]:
    """Read how often the limits of a slot have been hit so far.

    Args:
        runtime: the slot runtime.
        has_concurrent_work: whether a call or job of the slot is known to run.
        own_processes: how many processes belong to the call already: the shell of its session.

    Returns:
        The counters by name, empty where nothing counts; and whether anything else than init runs in the slot.
    """
    limits = runtime.groups.limits
    if limits is None:
        return {}, has_concurrent_work
    return limits.read_counters(alone=not has_concurrent_work), has_concurrent_work or limits.count_processes() > 1 + own_processes


def judge_lost_init(runtime: SlotRuntime, before: dict[str, int], detail: str) -> tuple[str, str, dict[str, Any]]:
    """Judge the end of a call whose slot has lost its init. Memory counts as used by the slot, whichever of its processes used it.

    If all memory for slots is in use at that moment, the kernel may have refused memory to init. For a slot above its share the fault is then ambiguous, as if
    the agent had ended it for that; a slot within its share has not caused it.

    Args:
        runtime: the slot runtime.
        before: the counters of the limits before the call.
        detail: how init was lost.
    """
    ended = find_limit_end(runtime)
    if ended is not None:
        return ended.reason, ended.error, ended.metadata()
    rose = _count_limit_hits(runtime, before)
    if "oom" in rose:
        proof = {"oom_kills": rose["oom"], "init": detail, "own_work": True}
        return "oom", "the slot's memory limit was reached, and the kernel killed its init for it", {"evidence": proof}
    known: dict[str, Any] = {"own_work": True} if runtime.link.own_work else {}
    if "oom_elsewhere" in rose:
        known["oom_kills_below_own_limit"] = rose["oom_elsewhere"]
    usage = runtime.groups.find_usage_while_full()
    if usage is not None:
        known.update(used_mb=usage.used_bytes // MIB, share_mb=usage.share_bytes // MIB)
        if usage.above_share_bytes > 0:
            known["ambiguous"] = True
    return "sandbox_lost", "the slot has lost its init: %s" % detail, {"evidence": {"init": detail, **known}}


def _count_limit_hits(runtime: SlotRuntime, before: dict[str, int]) -> dict[str, int]:
    return runtime.groups.limits.count_limit_hits(before) if runtime.groups.limits is not None else {}


def _describe_status(status: int) -> dict[str, Any]:
    """Say whether a process exited or was ended by a signal. The exit code does not show that: a shell exits with 128+n if its command got signal n."""
    return {"signal": _signal_name(os.WTERMSIG(status))} if os.WIFSIGNALED(status) else {"exited": os.WEXITSTATUS(status)}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def judge_exit(
    runtime: SlotRuntime, before: dict[str, int], has_concurrent_work: bool, status: int, exit_code: int, max_rss_bytes: int, limits: SlotLimits
) -> tuple[str, str, dict[str, Any]]:
    """Judge the end of a process.

    A limit is proven to have ended the process if the limit's counter rose while the process ran, or if the process got a signal that only the kernel sends
    when the limit is hit. Everything less is listed as `limits_near`. The counters are those of the slot: if something else of the slot ran at the same
    time, it may have raised them, so they prove nothing, and the evidence says so. A process that exited with 0 was not ended by a limit.

    Args:
        runtime: the slot runtime.
        before: the counters of the limits before the call.
        has_concurrent_work: whether something else of the slot ran at the same time.
        status: as `os.wait4` returns it.
        exit_code: the exit code, or 128+n for signal n.
        max_rss_bytes: the largest resident set of the process or of one of its children.
        limits: what the slot may use.
    """
    ended = find_limit_end(runtime) if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else None
    if ended is not None:
        return ended.reason, ended.error, ended.metadata()
    rose = _count_limit_hits(runtime, before)
    hits = {_COUNTED[name]: count for name, count in rose.items()}
    if exit_code == 0:
        return "exit", "", {"evidence": hits} if hits else {}
    proof = {**_describe_status(status), **hits}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ:
        return "resource_limit", "a file grew past the slot's limit of %d MiB" % limits.max_file_mb, {"evidence": proof}
    near = [_LIMITED[name] for name in _LIMITED if name in rose]
    if near and has_concurrent_work:
        return "exit", "", {"evidence": {**proof, "ambiguous": True, "limits_near": near}}
    if "oom" in rose:
        return "oom", "a process of the call was killed: the slot's memory limit was reached", {"evidence": proof}
    if "processes" in rose:
        return "resource_limit", "the slot's limit of %d processes was reached" % limits.processes, {"evidence": proof}
    near += _find_unproven_limits(runtime, exit_code, max_rss_bytes, limits)
    return "exit", "", {"evidence": {**proof, "limits_near": near} if near else proof}


_LIMITED = {"oom": "memory", "processes": "processes"}
_COUNTED = {"oom": "oom_kills", "processes": "processes_refused", "oom_elsewhere": "oom_kills_below_own_limit"}


def _find_unproven_limits(runtime: SlotRuntime, exit_code: int, max_rss_bytes: int, limits: SlotLimits) -> list[str]:
    """The limits that the process seems to have hit although nothing counts that."""
    near = []
    if exit_code == _SHELL_SIGNALLED + signal.SIGXFSZ:
        near.append("file_size")
    counted = runtime.groups.limits_memory
    if limits.memory_mb is not None and not counted and max_rss_bytes >= _NEAR_LIMIT_FRACTION * (limits.memory_mb << 20):
        near.append("memory")
    return near


def judge_refusal(
    number: int, where: str, args: Mapping[str, Any], runtime: SlotRuntime, before: dict[str, int], limits: SlotLimits
) -> tuple[str, str, dict[str, Any]]:
    """Judge why a process could not be started.

    An errno alone does not show that the slot is at its limit: the kernel returns the same one if the processes of other slots fill the machine. So the use
    of the slot is compared with its limits.

    Args:
        number: the errno.
        where: the step at which it occurred, see `SpawnListener`.
        args: the arguments of the call.
        runtime: the slot runtime.
        before: the counters of the limits before the call.
        limits: what the slot may use.
    """
    proof: dict[str, Any] = {"errno": errno.errorcode.get(number, str(number)), "at": where}
    text = os.strerror(number)
    if number == errno.EAGAIN:
        proof["processes"] = _count_processes(runtime)
        if "processes" in _count_limit_hits(runtime, before) or proof["processes"] >= _NEAR_LIMIT_FRACTION * limits.processes:
            return "resource_limit", "the slot's limit of %d processes was reached, nothing could be started" % limits.processes, {"evidence": proof}
        text += ", though the slot has only %d of its %d processes" % (proof["processes"], limits.processes)
    if number == errno.ENOMEM and runtime.groups.limits is not None and runtime.groups.limits.is_short_of_memory(before):
        return "resource_limit", "the slot has no memory left to start anything", {"evidence": proof}
    if where in ("cwd", "fork") and number in _CANNOT_ENTER_FOLDER:
        return "tool_error", "the folder %s cannot be entered: %s" % (ascii(args.get("cwd")), text), {"errno": proof["errno"], "evidence": proof}
    if number == errno.E2BIG:
        return "invalid_args", "command and env together are longer than the system takes", {"evidence": proof}
    return "backend_error", "init could not start the call (%s): %s" % (where, text), {"may_have_run": False, "evidence": proof}


def _count_processes(runtime: SlotRuntime) -> int:
    """How many processes and threads a slot has, including init."""
    limits = runtime.groups.limits
    if limits is not None and limits.limits_processes:
        return limits.count_processes()
    # In every isolation mode, a process that loses its parent becomes a child of init.
    return sum(procfs.threads_of(pid) for pid in process_table.find_trees(process_table.read_process_table(), [runtime.init_pid]))
