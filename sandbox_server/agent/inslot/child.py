"""Runs one operation in a child process that init has forked, inside the slot and with the rights of the slot.

Paths are strings with the `surrogateescape` error handler: a byte that is not UTF-8 is a code point from U+DC80 to U+DCFF. Error sentences show such names
quoted. Headers never contain unpaired surrogates (see `reply`). Content is raw bytes.
"""

from __future__ import annotations

from sandbox_server.agent.inslot.arguments import check_args
from sandbox_server.agent.inslot.confine import Refusal, refusal_for_os_error
from sandbox_server.agent.inslot.reply import IncompleteReply, Reply

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import ModuleType
    from typing import Any, Callable, Mapping
else:
    import _signal as signal  # `signal` would import `enum`, which takes long

__all__ = ["EXIT_INCOMPLETE_REPLY", "check_args", "import_operation", "run_operation"]

EXIT_INCOMPLETE_REPLY = 2


def import_operation(op: str) -> Callable[..., None] | None:
    """Import the module of an operation.

    A child that drops its rights calls this first, because afterwards it may not be able to read the files of the agent.

    Args:
        op: the name of the operation.

    Returns:
        The function that executes the operation, or None if there is no such operation.
    """
    module = _import_module_of(op)
    if module is None:
        return None
    execute: Callable[..., None] = getattr(module, op)
    return execute


def _import_module_of(op: str) -> ModuleType | None:
    """Import the one module that an operation needs: to import all of them would take several times as long as a small read."""
    if op in ("read_file", "write_file", "edit_file", "list_files"):
        from sandbox_server.agent.inslot import files

        return files
    if op == "search_files":
        from sandbox_server.agent.inslot import search

        return search
    if op in ("route_get", "route_put", "route_list"):
        from sandbox_server.agent.inslot import transfer

        return transfer
    if op == "route_archive_get":
        from sandbox_server.agent.inslot import pack

        return pack
    if op == "route_archive_put":
        from sandbox_server.agent.inslot import unpack

        return unpack
    if op == "route_connect":
        from sandbox_server.agent.inslot import port

        return port
    if op == "terminal_mode":
        from sandbox_server.agent.inslot import terminal_mode

        return terminal_mode
    if op in ("leftovers_plant", "leftovers_find"):
        from sandbox_server.agent.inslot import leftover_probe

        return leftover_probe
    return None


def run_operation(op: str, args: Mapping[str, Any], ctx: Mapping[str, Any], out_fd: int, in_fd: int = -1) -> None:
    """Execute one operation and write its reply: a header and, if the header says ok, raw content until the end of the pipe.

    Args:
        op: the name of the operation, one of `arguments.OPERATIONS`.
        args: the arguments of the operation.
        ctx: `workspace` (the folder that relative paths start from), `home`, and `roots` (the folders that file routes may access).
        out_fd: descriptor that the reply is written to.
        in_fd: descriptor that the content of a put operation is read from, until its end.

    Raises:
        SystemExit: the reply could not be completed after its header was written. The exit status of the child, which is not 0, tells this to the reader.
    """
    # Without this, a file that exceeds the size limit of the slot would kill the child instead of causing an OSError (EFBIG).
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    reply = Reply(out_fd)
    try:
        refusal = _execute(op, args, ctx, reply, in_fd)
        if refusal is None:
            return
        if not reply.started:
            reply.send_refusal(refusal)
            return
    except IncompleteReply:
        pass
    raise SystemExit(EXIT_INCOMPLETE_REPLY)


def _execute(op: str, args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply, in_fd: int) -> Refusal | None:
    is_route = op.startswith("route_")
    problem = check_args(op, args)
    operation = import_operation(op)
    if problem is not None or operation is None:
        return Refusal("invalid" if is_route else "invalid_args", problem or f"there is no operation {op!a}")
    try:
        if op in ("route_put", "route_archive_put"):
            operation(args, ctx, reply, in_fd)
        else:
            operation(args, ctx, reply)
        return None
    except Refusal as error:
        refusal = error
    except OSError as error:
        refusal = refusal_for_os_error(error, args.get("path") or ctx["workspace"])
    except MemoryError:
        refusal = Refusal("file_error", f"{op} needs more memory than this slot has", "ENOMEM")
    except IncompleteReply:
        raise
    except Exception as error:  # The outermost frame of the process: a defect in this code must be reported and not look like a lost slot.
        refusal = Refusal("internal", f"{op} failed: {type(error).__name__}: {error}")
    if not is_route and refusal.code not in ("invalid_args", "internal"):
        refusal.code = "tool_error"
    return refusal
