"""What an agent proves at its start for a pool that requires a stateful shell and tmux."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.conftest import MODES, Maker

TOOLS = {"bash_stateful", "terminal_stateful", "tmux"}


@pytest.fixture
def readable_folder() -> Iterator[Path]:
    """A folder that a slot of the mode `none` can read."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def offered(harness: AgentHarness) -> set[str]:
    """Which of the tools the agent offers."""
    return TOOLS & set(harness.link.hello["capabilities"]["tools"])


@pytest.mark.parametrize(("mode", "user"), MODES)
async def test_tools_that_work_are_offered_and_their_probe_leaves_nothing(make_harness: Maker, mode: str, user: str) -> None:
    harness = await make_harness(mode, user, slots=1, require_stateful_sandbox=True)

    assert offered(harness) == TOOLS
    assert harness.link.hello["capabilities"]["tool_problems"] == {}
    names = {child.name() for child in psutil.Process(harness.process.pid).children(recursive=True)}
    assert not [name for name in names if "tmux" in name or name == "bash"]
    assert (await harness.bash('find . "${TMPDIR:-/tmp}" -mindepth 1')).text == ""
    first = await harness.call("tmux", args={"action": "capture"})
    assert (first.metadata["terminal"], first.metadata["recording"]) == ("started", "terminal.cast")


async def test_a_tmux_that_starts_no_pane_is_not_offered_and_the_agent_says_why(make_harness: Maker, readable_folder: Path) -> None:
    program = readable_folder / "tmux"
    program.write_text("#!/bin/sh\n[ \"$1\" = -V ] && echo 'tmux 3.4' && exit\nexit 1\n")
    program.chmod(0o755)
    settings = {"slots": 1, "env_vars": {"PATH": f"{readable_folder}:/usr/bin:/bin"}}

    unproven, proven = [await make_harness("none", "user", **settings, require_stateful_sandbox=required) for required in (False, True)]

    assert offered(unproven) == TOOLS
    assert offered(proven) == TOOLS - {"tmux"}
    problems = proven.link.hello["capabilities"]["tool_problems"]
    assert list(problems) == ["tmux"]
    assert "the terminal has ended" in problems["tmux"]
    assert (await proven.bash("echo up")).text == "up\n"


async def test_slots_that_can_start_no_process_offer_neither(make_harness: Maker) -> None:
    harness = await make_harness(slots=1, limits={"processes": 1}, require_stateful_sandbox=True)

    assert offered(harness) == set()
    assert set(harness.link.hello["capabilities"]["tool_problems"]) == {"bash_stateful", "tmux"}
