"""The tool `tmux`: a terminal for full-screen and interactive programs, which is used by keys and captures."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs
from sandbox_server.agent.execution.call_spec import CallSpec
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.tmux.screen import ENTIRE, INCREMENTAL, SCREEN
from sandbox_server.agent.execution.tmux.tmux_process import TerminalEnded
from sandbox_server.agent.execution.tmux.tmux_terminal import TerminalAction
from sandbox_server.agent.execution.tools.argument_checks import check_names, check_text_without_nul
from sandbox_server.agent.execution.tools.tool import HandledCall, Tool

log = logging.getLogger(__name__)

MAX_KEYS = 1000
MAX_KEYS_BYTES = 64 << 10
MAX_WAIT_S = 86_400.0
DEFAULT_MIN_WAIT_S = 0.5
DEFAULT_MAX_WAIT_S = 180.0
MIN_WIDTH, MAX_WIDTH = 10, 500
MIN_HEIGHT, MAX_HEIGHT = 2, 300
_MARGIN_S = 1.0  # waiting ends so long before the timeout of the call, so that the call can still return the screen
_CAPTURES = ("capture_entire", "capture_incremental")
_OPTIONAL = ("block", "min_wait_s", "max_wait_s", "pane_width", "pane_height", *_CAPTURES)
_REQUIRED: Mapping[str, tuple[str, ...]] = {"send_keys": ("action", "keys"), "capture": ("action",), "resize": ("action",), "reset": ("action",)}
"""Action -> its required arguments."""


def parse_action(args: Mapping[str, Any]) -> TerminalAction:
    """Check the arguments of `tmux`.

    Raises:
        InvalidArgs: an argument is not valid; the text names it.
    """
    action = args.get("action")
    if not isinstance(action, str) or action not in _REQUIRED:
        raise InvalidArgs("action must be one of %s" % ", ".join(_REQUIRED))
    check_names("tmux %s" % action, args, _REQUIRED[action], _OPTIONAL)
    block = _parse_flag(args, "block")
    min_wait_s, max_wait_s = _parse_seconds(args, "min_wait_s"), _parse_seconds(args, "max_wait_s")
    if min_wait_s is not None and max_wait_s is not None and max_wait_s < min_wait_s:
        raise InvalidArgs("max_wait_s (%g) is below min_wait_s (%g)" % (max_wait_s, min_wait_s))
    if max_wait_s is None:
        max_wait_s = max(DEFAULT_MAX_WAIT_S, min_wait_s or 0.0)
    if min_wait_s is None:
        min_wait_s = min(DEFAULT_MIN_WAIT_S, max_wait_s) if action == "send_keys" and not block else 0.0
    width = _parse_size(args, "pane_width", MIN_WIDTH, MAX_WIDTH)
    height = _parse_size(args, "pane_height", MIN_HEIGHT, MAX_HEIGHT)
    if action == "resize" and width is None and height is None:
        raise InvalidArgs("tmux resize needs pane_width, pane_height, or both")
    keys = _parse_keys(args["keys"]) if action == "send_keys" else ()
    return TerminalAction(action, keys, block, min_wait_s, max_wait_s, _parse_captured(args), width, height)


def _parse_keys(value: Any) -> tuple[bytes, ...]:
    keys = [value] if isinstance(value, str) else value
    if not isinstance(keys, list) or len(keys) > MAX_KEYS:
        raise InvalidArgs("keys must be a string, or a list of at most %d strings" % MAX_KEYS)
    parsed = tuple(check_text_without_nul("keys", key, MAX_KEYS_BYTES) for key in keys)
    if sum(map(len, parsed)) > MAX_KEYS_BYTES:
        raise InvalidArgs("keys has %d bytes; at most %d are taken" % (sum(map(len, parsed)), MAX_KEYS_BYTES))
    return parsed


def _parse_captured(args: Mapping[str, Any]) -> str:
    entire, incremental = (_parse_flag(args, name) for name in _CAPTURES)
    if entire and incremental:
        raise InvalidArgs("capture_entire and capture_incremental exclude each other")
    return ENTIRE if entire else INCREMENTAL if incremental else SCREEN


def _parse_flag(args: Mapping[str, Any], name: str) -> bool:
    value = args.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidArgs("%s must be true or false" % name)
    return value is True


def _parse_seconds(args: Mapping[str, Any], name: str) -> float | None:
    value = args.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_WAIT_S:
        raise InvalidArgs("%s must be a number of seconds from 0 to %d" % (name, MAX_WAIT_S))
    return float(value)


def _parse_size(args: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = args.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
        raise InvalidArgs("%s must be an integer from %d to %d" % (name, least, most))
    return value


def waiting_limit_s(spec: CallSpec) -> float:
    """How long a call may wait for a program before it captures the screen, in seconds: a little less than the call may take, or may write nothing."""
    limit_s = min(spec.timeout_s, spec.no_output_timeout_s or spec.timeout_s)
    return limit_s - min(_MARGIN_S, limit_s / 4)


class TmuxCall:
    """One call of `tmux`. The terminal outlives it, however the call ends."""

    def __init__(self, action: TerminalAction) -> None:
        self._action = action

    def start_call(self, call: HandledCall) -> None:
        """See `ToolHandler`."""
        loop = asyncio.get_event_loop()
        call.lease.mark_live_calls_concurrent()
        task = loop.create_task(self._perform(call, loop.time() + waiting_limit_s(call.spec)))

        def stop_waiting(_: CallOutcome) -> None:
            if asyncio.current_task() is not task:
                task.cancel()

        call.add_done_callback(stop_waiting)

    def on_process_ended(self, call: HandledCall, status: int) -> None:
        """See `ToolHandler`. A call of this tool has no process of its own."""

    async def _perform(self, call: HandledCall, wait_until: float) -> None:
        evidence = {"tool": "tmux %s" % self._action.action}
        try:
            text, metadata = await call.lease.tmux.perform(call.runtime, self._action, wait_until)
        except InvalidArgs as error:
            call.finish_call("invalid_args", error=str(error), metadata={"evidence": {"ran": False, "field": "tool"}})
        except TerminalEnded as error:
            detail = "the terminal has ended: %s; the next call starts a new one" % error
            call.finish_call("tool_error", error=detail, metadata={"terminal": "ended", "evidence": evidence})
        except OSError as error:
            detail = "the agent could not start the terminal: %s" % error
            call.finish_call("backend_error", error=detail, metadata={"may_have_run": False, "evidence": evidence})
        except Exception as error:  # a defect must end the call, which would otherwise run until its timeout
            log.exception("a call of tmux failed")
            call.finish_call("backend_error", error="%s: %s" % (type(error).__name__, error), metadata={"may_have_run": True, "evidence": evidence})
        else:
            call.sinks[0].write(text)
            call.finish_call("exit", exit_code=0, tool_ok=True, metadata=metadata)


def _parse(args: Mapping[str, Any]) -> TmuxCall:
    return TmuxCall(parse_action(args))


TMUX = Tool("tmux", _parse)
