"""The reward of a rollout: whether the tests pass on the model's version of the repository.

Only what set-up kept decides how the tests run. See `in_slot/run_tests.py` for how they are run, and for what remains possible: the code under test runs in
the process of pytest.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from env_client import InvalidRequest, NotImplementedYet
from environments.rollouts.exec_tool import ExecTool, RolloutFault
from environments.swe_smith.model_changes import ChangesUnusable, bring_changes
from environments.swe_smith.rows import SweRow
from environments.swe_smith.set_up import STEP_TIMEOUT_S, Environment, Workspace
from environments.swe_smith.slot_steps import StepEnded, run_step, source

log = logging.getLogger(__name__)

#: How many tests one process of pytest runs.
CHUNK_SIZE = 50
REWARD_OF_CALL = 0.05
MAX_REWARD_OF_CALLS = 0.3
REWARD_OF_INSTALL = 0.4
#: How long pip may take to install the model's version, in seconds.
INSTALL_TIMEOUT_S = 300.0
#: How often it is tried to end the processes of a slot.
END_ATTEMPTS = 3
#: How many of the tests that did not pass are named in the result.
MAX_NAMED_TESTS = 20


@dataclass(frozen=True, slots=True)
class TestRun:
    """What the tests showed.

    Args:
        passed_count: how many tests passed.
        test_count: how many were run.
        regressed: whether a test of `PASS_TO_PASS` did not pass.
        not_passed: some of the tests that did not pass.
        installs: whether the model's version still installs; None if that was not tried.
        end: how the test run ended, if it was ended: `timeout`, `oom` and the like; `exit` if the model's code ended the process that counts the results;
            `changes_unusable` if the model's changes could not be brought into another slot.
        log: the end of what pytest wrote, where a test did not pass.
    """

    __test__ = False  # not a class of tests

    passed_count: int
    test_count: int
    regressed: bool
    not_passed: tuple[str, ...] = ()
    installs: bool | None = None
    end: str = ""
    log: str = ""

    @property
    def all_passed(self) -> bool:
        """Whether every test passed."""
        return 0 < self.test_count == self.passed_count


def reward(tool_calls: int, valid_calls: int, run: TestRun | None) -> float:
    """Return the reward of a rollout.

    Args:
        tool_calls: how many tool calls the model made.
        valid_calls: how many of them were valid.
        run: what the tests showed; None if nothing was run, because the model made no call.

    Returns:
        1.0 if all tests pass. 0.0 if the model made no call, or broke a test that passed before. Otherwise 0.4 if its version still installs, else 0.05 for
        each valid call, up to 0.3.
    """
    if not tool_calls or run is None:
        return 0.0
    if run.all_passed:
        return 1.0
    if run.regressed:
        return 0.0
    return REWARD_OF_INSTALL if run.installs else min(MAX_REWARD_OF_CALLS, REWARD_OF_CALL * valid_calls)


class Scorer:
    """Scores rollouts.

    Args:
        set_up: sets up another slot for a row, where the model's slot could not be sealed.
        include_fail_to_pass: whether the tests of `FAIL_TO_PASS` are run, too.
        test_timeout_s: how long all tests of a row may take, in seconds.
    """

    def __init__(self, set_up: Callable[[SweRow, ExecTool], Awaitable[Workspace]], *, include_fail_to_pass: bool, test_timeout_s: float) -> None:
        self._set_up = set_up
        self._include_fail_to_pass = include_fail_to_pass
        self._test_timeout_s = test_timeout_s

    async def score(self, row: SweRow, exec_tool: ExecTool, workspace: Workspace, *, tool_calls: int, valid_calls: int) -> tuple[float, dict[str, Any]]:
        """Score a rollout.

        Args:
            row: the row.
            exec_tool: runs calls in the slot of the rollout.
            workspace: what set-up made there.
            tool_calls: how many tool calls the model made.
            valid_calls: how many of them were valid.

        Returns:
            The reward, and what it follows from.

        Raises:
            StepFailed: scoring failed through no fault of the model.
            RolloutFault: a slot was lost.
        """
        if not tool_calls:
            return 0.0, {"tests": None}
        if workspace.sealed and await end_processes(exec_tool):
            run = await self._run(row, exec_tool, workspace.environment, workspace.test_folders)
        else:
            run = await self._run_in_fresh_slot(row, exec_tool, workspace)
        return reward(tool_calls, valid_calls, run), {"tests": asdict(run)}

    async def _run_in_fresh_slot(self, row: SweRow, exec_tool: ExecTool, workspace: Workspace) -> TestRun:
        """Run the tests in another slot, on the commit with the model's changes: in its own slot, the model could have changed what it is scored by."""
        async with exec_tool.fresh_slot() as fresh:
            prepared = await self._set_up(row, fresh)
            try:
                await bring_changes(exec_tool, fresh, workspace.environment.python, prepared.environment.python)
            except ChangesUnusable as unusable:
                log.warning("row %s: %s", row.instance_id, unusable)
                return self._nothing_passed(row, "changes_unusable")
            await take_network(fresh)
            return await self._run(row, fresh, prepared.environment, prepared.test_folders)

    async def _run(self, row: SweRow, exec_tool: ExecTool, environment: Environment, folders: Sequence[str]) -> TestRun:
        name = f"model-{secrets.token_hex(8)}"
        request = {"name": name, "folders": list(folders)}
        try:
            rebuilt = await run_step(exec_tool, "rebuild", request, timeout_s=STEP_TIMEOUT_S, python=environment.python)
        except StepEnded as ended:  # no code of the model runs in it, but its files can make it take too long
            _check_not_ambiguous(ended)
            return self._nothing_passed(row, ended.result.reason)
        run = await self._run_tests(row, exec_tool, environment)
        if run.all_passed or run.regressed:
            return run
        install = {"source": rebuilt["model_version"], "timeout_s": INSTALL_TIMEOUT_S}
        try:
            tried = await run_step(exec_tool, "try_install", install, timeout_s=INSTALL_TIMEOUT_S + 30, python=environment.python, runs_model_code=True)
        except StepEnded as ended:
            _check_not_ambiguous(ended)
            tried = {"installed": False}
        return replace(run, installs=tried["installed"])

    def _nothing_passed(self, row: SweRow, end: str) -> TestRun:
        tests = row.scored_tests(include_fail_to_pass=self._include_fail_to_pass)
        return TestRun(0, len(tests), regressed=True, not_passed=tests[:MAX_NAMED_TESTS], end=end)

    async def _run_tests(self, row: SweRow, exec_tool: ExecTool, environment: Environment) -> TestRun:
        tests = row.scored_tests(include_fail_to_pass=self._include_fail_to_pass)
        chunks = [list(tests[start : start + CHUNK_SIZE]) for start in range(0, len(tests), CHUNK_SIZE)]
        description = {
            "options": environment.options,
            "plugins": environment.plugins,
            "late_import": environment.late_import,
            "search_path": environment.search_path,
        }
        request = {"chunks": chunks, "runner": source("pytest_runner"), "description": description}
        try:
            reply = await run_step(exec_tool, "run_tests", request, timeout_s=self._test_timeout_s, python=environment.python, runs_model_code=True)
        except StepEnded as ended:
            _check_not_ambiguous(ended)
            run = self._nothing_passed(row, ended.result.reason)
            return replace(run, regressed=bool(row.pass_to_pass), log=ended.result.output[-1500:])
        passed = {tests[number] for number in parse_bits(reply["passed"], len(tests))}
        not_passed = [test for test in tests if test not in passed]
        regressed = any(test not in passed for test in row.pass_to_pass)
        return TestRun(len(passed), len(tests), regressed, tuple(not_passed[:MAX_NAMED_TESTS]), log=reply["log"])


async def end_processes(exec_tool: ExecTool) -> bool:
    """End every process in a sealed slot, and take the network away where its mode can.

    The service ends the processes of a slot when it takes something away from it, so an entry of the workspace is made for that.

    Returns:
        Whether they have ended. They have not if something in the slot, such as a process of the model, keeps that entry from being there.
    """
    for _ in range(END_ATTEMPTS):
        entry = f".scoring-{secrets.token_hex(8)}"
        await exec_tool("write_file", {"path": f"{entry}/empty", "content": ""})
        try:
            await take_network(exec_tool, read_only=(entry,))
        except InvalidRequest as error:
            log.warning("the processes of slot %s could not be ended, and this is tried again: %s", exec_tool.lease.info.slot_id, error.detail)
        else:
            return True
    return False


async def take_network(exec_tool: ExecTool, *, read_only: Sequence[str] = ()) -> None:
    """Take the cache away, and the network where the mode of the slot can."""
    try:
        await exec_tool.narrow(allow_network=False, cache="none", read_only=read_only)
    except NotImplementedYet:  # the mode cannot take the network away from one slot
        await exec_tool.narrow(cache="none", read_only=read_only)


def parse_bits(text: str, count: int) -> set[int]:
    """Return the numbers below `count` that the bits of a hexadecimal number stand for."""
    bits = int(text, 16)
    return {number for number in range(count) if bits >> number & 1}


def _check_not_ambiguous(ended: StepEnded) -> None:
    """Refuse to score a step that others than the model may have ended.

    Raises:
        RolloutFault: it was ended for want of processor time or memory that other slots used.
    """
    if not ended.is_by_model:
        raise RolloutFault(f"scoring was ended: {ended}", reason=ended.result.reason, fault="ambiguous")
