"""What the scripted model does with the repository of the demo: one trajectory for each reward, and one whose sandbox is killed."""

from __future__ import annotations

import enum

from environments.demo.project_files import BUG_LINE, BUG_PATH, FIXED_LINE
from environments.demo.repository import REPOSITORY
from environments.demo.script import Script, ScriptedCall, ScriptedPrompt, Trajectory, Turn

#: The folder in which the environment lays the repository, relative to the workspace of the slot.
REPOSITORY_PATH = "repo"
#: How long the trajectory whose sandbox is killed waits for that, in seconds.
WAIT_FOR_KILL_S = 25
_TESTS = "../.env/bin/python -m pytest -q -p no:cacheprovider"


class TrajectoryName(enum.StrEnum):
    """The trajectories of the demo."""

    #: It finds the bug and fixes it: reward 1.
    FIXES = "fixes the bug"
    #: It reads, and changes nothing: a shaped reward.
    LOOKS = "only looks"
    #: It makes the project unusable, and calls a tool that does not exist: reward 0.
    BREAKS = "breaks the project"
    #: Its sandbox is killed during a command: it is not scored, and repeated.
    KILLED = "loses its sandbox"


def make_script(repository_path: str = REPOSITORY_PATH, tool_call_family: str = "hermes") -> Script:
    """Return the script of the demo. A conversation after the fourth one, such as a repeated one, fixes the bug.

    Args:
        repository_path: the folder of the repository, relative to the workspace of the slot.
        tool_call_family: the family of models whose format of tool calls the text of the model has.
    """
    fixes = Trajectory(
        name=TrajectoryName.FIXES,
        turns=(
            Turn(text="I look at the parser first.", calls=(_read(repository_path),)),
            Turn(text="Each unit replaces the sum. It must be added.", calls=(_edit(repository_path, BUG_LINE, FIXED_LINE),)),
            Turn(text="Now I run the tests.", calls=(_terminal(f"cd {repository_path} && {_TESTS}"),)),
            Turn(text="parse_duration adds up all units now, and the tests pass."),
        ),
    )
    looks = Trajectory(
        name=TrajectoryName.LOOKS,
        turns=(
            Turn(text="I look around.", calls=(_terminal(f"ls -R {repository_path}/src"), _read(repository_path))),
            Turn(text="The parser looks right to me."),
        ),
    )
    breaks = Trajectory(
        name=TrajectoryName.BREAKS,
        turns=(
            Turn(text="I start over.", calls=(ScriptedCall(tool="rewrite_project", arguments={"path": repository_path}),)),
            Turn(text="I delete the parser and the settings.", calls=(_terminal(f"cd {repository_path} && rm -r src pyproject.toml"),)),
            Turn(text="Done."),
        ),
    )
    killed = Trajectory(
        name=TrajectoryName.KILLED,
        turns=(Turn(text="I wait for a while.", calls=(_terminal(f"sleep {WAIT_FOR_KILL_S}"),)), Turn(text="Nothing happened.")),
    )
    prompt = ScriptedPrompt(match=REPOSITORY, trajectories=(fixes, looks, breaks, killed), after_last="first")
    return Script(prompts=(prompt,), tool_call_family=tool_call_family, model="scripted")


def _terminal(command: str) -> ScriptedCall:
    return ScriptedCall(tool="terminal", arguments={"command": command})


def _read(repository_path: str) -> ScriptedCall:
    return ScriptedCall(tool="read_file", arguments={"path": f"{repository_path}/{BUG_PATH}"})


def _edit(repository_path: str, old: str, new: str) -> ScriptedCall:
    return ScriptedCall(tool="edit_file", arguments={"path": f"{repository_path}/{BUG_PATH}", "old": old, "new": new})
