"""Why a process ended as it did, as far as it can be proven."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, Mapping

from sandbox_server.agent.isolation.base import Body

_SHELL_SIGNALLED = 128


def limits_of(body: Body) -> tuple[dict[str, int], bool]:
    """The counters of a body's limits as they stand, nothing where nothing counts; and whether anything but init is alive in it."""
    limits = body.groups.limits
    return (limits.read(), limits.alive() > 1) if limits is not None else ({}, False)


def of_lost_init(body: Body | None, before: dict[str, int], detail: str) -> tuple[str, str, dict[str, Any]]:
    """The reason of a call whose slot lost its init. Whoever of the slot took the memory, it was the slot's own work.

    Returns:
        Reason, sentence, metadata.
    """
    rose = _rises(body, before)
    if "oom" in rose:
        proof = {"oom_kills": rose["oom"], "init": detail, "own_work": True}
        return "oom", "the slot's memory limit was reached, and the kernel killed its init for it", {"evidence": proof}
    known = {"own_work": True} if body is not None and body.link.own_work else {}
    return "sandbox_lost", "the slot's init has ended: %s" % detail, {"evidence": {"init": detail, **known}}


def ran_out_of_memory(body: Body) -> bool:
    """Whether the memory limit of a body was ever reached so that something was killed."""
    return "oom" in _rises(body, {})


def _rises(body: Body | None, before: dict[str, int]) -> dict[str, int]:
    return body.groups.limits.rises(before) if body is not None and body.groups.limits is not None else {}


def of_exit(body: Body | None, before: dict[str, int], company: bool, status: int, code: int) -> tuple[str, str, dict[str, Any]]:
    """The reason of a process that did not end with 0.

    A counter that rose while it ran, or a signal only the kernel's limit sends, is proof; anything less is named as `limits_near`. The counters
    are the slot's: with `company`, another call, a job or something left running may have raised them, so they prove nothing, and that is said.

    Returns:
        Reason, sentence, metadata.
    """
    rose = _rises(body, before)
    if rose and company and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ):
        return "exit", "", {"evidence": _ambiguous(rose)}
    if "oom" in rose:
        return "oom", "a process of the call was killed: the slot's memory limit was reached", {"evidence": {"oom_kills": rose["oom"]}}
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ:
        return "resource_limit", "a file grew past the slot's limit", {"evidence": {"signal": "SIGXFSZ"}}
    if "processes" in rose:
        return "resource_limit", "the slot's limit of processes was reached", {"evidence": {"processes_refused": rose["processes"]}}
    near = []
    if code == _SHELL_SIGNALLED + signal.SIGXFSZ:
        near.append("file_size")
    if code == _SHELL_SIGNALLED + signal.SIGKILL:
        near.append("memory")
    return "exit", "", {"evidence": {"limits_near": near}} if near else {}


def _ambiguous(rose: dict[str, int]) -> dict[str, Any]:
    names = {"oom": ("memory", "oom_kills"), "processes": ("processes", "processes_refused")}
    return {"ambiguous": True, "limits_near": [names[name][0] for name in rose], **{names[name][1]: count for name, count in rose.items()}}


def of_refusal(number: int, where: str, args: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """The reason of a process that could not be started.

    Returns:
        Reason, sentence, metadata.
    """
    name = errno.errorcode.get(number, str(number))
    text = os.strerror(number)
    if number == errno.EAGAIN:
        return "resource_limit", "the slot's limit of processes was reached, nothing could be started", {"evidence": {"errno": name, "at": where}}
    if number == errno.ENOMEM:
        return "resource_limit", "the slot has no memory left to start anything", {"evidence": {"errno": name, "at": where}}
    if where in ("cwd", "fork") and number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ELOOP, errno.ENAMETOOLONG):
        return "tool_error", "the folder %s cannot be entered: %s" % (ascii(args.get("cwd")), text), {"errno": name}
    if number == errno.E2BIG:
        return "invalid_args", "command and env together are longer than the system takes", {"errno": name}
    return "backend_error", "init could not start the call (%s): %s" % (where, text), {"may_have_run": False, "evidence": {"errno": name}}
