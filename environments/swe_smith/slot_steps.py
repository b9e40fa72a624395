"""Runs the scripts of `in_slot` in a slot. A script and its request travel on standard input, so no file in the slot can replace them."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib import resources
from typing import Any

from env_client import ExecutionResult, SandboxError
from environments.dataset_rows import UnusableRow
from environments.rollouts.exec_tool import ExecTool, RolloutFault

PACKAGE = "environments.swe_smith.in_slot"
#: Creates the modules that the first line of standard input has, and runs the last one. `-I` and `-S` keep out everything that a model can have written:
#: the working folder, the user's site-packages, `.pth` files and `sitecustomize`.
BOOT = (
    "import json, sys, types\n"
    "order = json.loads(sys.stdin.readline())\n"
    "for name, source in order['modules']:\n"
    "    module = sys.modules[name] = types.ModuleType(name)\n"
    "    module.__path__ = []\n"
    "    exec(compile(source, name, 'exec'), module.__dict__)\n"
    "module.main(order['request'], order['nonce'])\n"
)


class StepFailed(Exception):
    """A step of set-up or scoring failed, through no fault of the row or the model. The rollout must not be scored."""


class StepEnded(Exception):
    """A step of scoring was ended because of what the model's code did, such as running too long, or killing the process of the step.

    Args:
        result: the result of the call.
    """

    def __init__(self, result: ExecutionResult) -> None:
        super().__init__(result.error or f"the step ended with the exit code {result.metadata.get('exit_code')}")
        self.result = result

    @property
    def is_by_model(self) -> bool:
        """Whether nobody but the model can have ended it: not for want of processor time or memory that other slots used."""
        return self.result.fault == "policy" or self.result.reason == "exit"


@cache
def source(name: str) -> str:
    """Return the source of a script of `in_slot`."""
    return resources.files(PACKAGE).joinpath(name + ".py").read_text(encoding="utf-8")


async def run_step(
    exec_tool: ExecTool, name: str, request: Mapping[str, Any], *, timeout_s: float, python: str = "python3", runs_model_code: bool = False
) -> dict[str, Any]:
    """Run a script in a slot and return what it replied.

    Args:
        exec_tool: runs the call.
        name: the script.
        request: what it gets.
        timeout_s: the timeout, in seconds.
        python: the interpreter; an absolute path when a model has been in the slot.
        runs_model_code: whether code of the model runs meanwhile. It has the user of the step, so it can kill the process of the step: then the missing reply
            is the model's doing, and no reason to repeat the rollout.

    Raises:
        UnusableRow: the script found that the row cannot be used.
        StepFailed: the script failed.
        StepEnded: the script was ended, and code of the model may be the reason.
        RolloutFault: the slot was lost, or the call failed through no fault of the model.
    """
    nonce = secrets.token_hex(16) + " "
    empty = [["environments", ""], ["environments.swe_smith", ""], [PACKAGE, ""]]
    modules = [*empty, *([f"{PACKAGE}.{module}", source(module)] for module in ("base", name))]
    order = json.dumps({"modules": modules, "request": request, "nonce": nonce})
    # `exec`: no shell stays whose open files the step's children could use.
    command = f"exec {python} -I -S -c {_quoted(BOOT)}"
    result = await exec_tool("terminal", {"command": command, "stdin": order + "\n"}, timeout=timeout_s)
    for line in reversed(result.output.splitlines()):
        if line.startswith(nonce):
            return _reply(name, json.loads(line[len(nonce) :]))
    if runs_model_code or result.fault == "policy" or result.reason != "exit":
        raise StepEnded(result)
    raise StepFailed(f"the step {name} did not reply (exit code {result.metadata.get('exit_code')}): {result.output[-1000:].strip() or result.error}")


@asynccontextmanager
async def slot_files() -> AsyncIterator[None]:
    """Raise the failure of a copy into or out of a slot as a fault that is not the model's.

    Raises:
        RolloutFault: the copy failed.
    """
    try:
        yield
    except SandboxError as error:
        raise RolloutFault.from_error(error) from error


def _reply(name: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    if "row_error" in reply:
        raise UnusableRow(str(reply["row_error"]["message"]))
    if "step_error" in reply:
        raise StepFailed(f"the step {name} failed: {reply['step_error']['message']}")
    done: dict[str, Any] = reply["done"]
    return done


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"
