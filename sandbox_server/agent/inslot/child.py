"""One file operation in a child that init forked: inside the slot, with the slot's own rights.

Paths are strings with surrogateescape: a byte that is not UTF-8 is U+DC80 to U+DCFF on the way in, as Python has it.
Sentences show such names quoted, headers never hold lone surrogates (see `reply`), content is raw bytes.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` itself costs an import of enum

from sandbox_server.agent.inslot.arguments import check_args
from sandbox_server.agent.inslot.confine import Refusal, refusal_of
from sandbox_server.agent.inslot.reply import BrokenOff, Reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Mapping

__all__ = ["BROKEN_OFF", "check_args", "import_operation", "run_operation"]

BROKEN_OFF = 2


def import_operation(op: str) -> Callable[..., None] | None:
    """Import what the operation needs. A child that is to lose its rights calls this before: afterwards it may not be able to read our files.

    Args:
        op: the name of the operation.

    Returns:
        What does the operation, or None if there is no such operation.
    """
    if op in ("read_file", "write_file", "edit_file", "list_files"):
        from sandbox_server.agent.inslot import files as module
    elif op == "search_files":
        from sandbox_server.agent.inslot import search as module  # type: ignore[no-redef]
    elif op in ("route_get", "route_put", "route_list"):
        from sandbox_server.agent.inslot import transfer as module  # type: ignore[no-redef]
    elif op == "route_archive_get":
        from sandbox_server.agent.inslot import pack as module  # type: ignore[no-redef]
    elif op == "route_archive_put":
        from sandbox_server.agent.inslot import unpack as module  # type: ignore[no-redef]
    elif op in ("leftovers_plant", "leftovers_find"):
        from sandbox_server.agent.inslot import leftover_probe as module  # type: ignore[no-redef]
    else:
        return None
    work: Callable[..., None] = getattr(module, op)
    return work


def run_operation(op: str, args: Mapping[str, Any], ctx: Mapping[str, Any], out_fd: int, in_fd: int = -1) -> None:
    """Do one operation and write its answer: a header, then, if that says ok, raw content up to the end of the pipe.

    Args:
        op: one of `arguments.OPERATIONS`.
        args: its arguments.
        ctx: `workspace` (where relative paths start), `home`, and `roots`: what a file route may touch.
        out_fd: where the answer goes.
        in_fd: where the content of a put comes from, up to its end.

    Raises:
        SystemExit: the answer broke off after its header. The child then ends with a status that is not 0, which is how its reader learns of it.
    """
    # A file over the slot's limit is to be an error with a name, not the child's death.
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_IGN)
    reply = Reply(out_fd)
    try:
        refusal = _attempt(op, args, ctx, reply, in_fd)
        if refusal is None:
            return
        if not reply.started:
            reply.fail(refusal)
            return
    except BrokenOff:
        pass
    raise SystemExit(BROKEN_OFF)


def _attempt(op: str, args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply, in_fd: int) -> Refusal | None:
    is_route = op.startswith("route_")
    fault = check_args(op, args)
    work = import_operation(op)
    if fault is not None or work is None:
        return Refusal("invalid" if is_route else "invalid_args", fault or f"there is no operation {op!a}")
    try:
        if op in ("route_put", "route_archive_put"):
            work(args, ctx, reply, in_fd)
        else:
            work(args, ctx, reply)
        return None
    except Refusal as error:
        refusal = error
    except OSError as error:
        refusal = refusal_of(error, args.get("path") or ctx["workspace"])
    except MemoryError:
        refusal = Refusal("file_error", f"{op} needs more memory than this slot has", "ENOMEM")
    except BrokenOff:
        raise
    except Exception as error:  # the edge of the process: a defect of ours must not look like a slot that died
        refusal = Refusal("internal", f"{op} failed: {type(error).__name__}: {error}")
    if not is_route and refusal.code not in ("invalid_args", "internal"):
        refusal.code = "tool_error"
    return refusal
