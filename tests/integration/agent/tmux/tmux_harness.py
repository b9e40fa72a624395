"""The terminal of a slot as the tests of this folder use it."""

from __future__ import annotations

import json
from typing import Any

import pyte

from tests.integration.agent.agent_harness import AgentHarness, Answer


class Terminal:
    """Calls of the tool `tmux` in one slot, each of which must succeed.

    Args:
        harness: the agent.
        slot: the slot.
    """

    def __init__(self, harness: AgentHarness, slot: str = "0") -> None:
        self._harness = harness
        self._slot = slot

    async def act(self, action: str, **args: Any) -> Answer:
        answer = await self._harness.call("tmux", self._slot, args={"action": action, **args})
        assert answer.reason == "exit", answer.error
        return answer

    async def type(self, *keys: str, **args: Any) -> Answer:
        """Send keys, and wait until the program has settled."""
        answer = await self.act("send_keys", keys=list(keys), block=True, **args)
        assert answer.metadata["settled"], answer.text
        return answer

    async def until_shown(self, text: str) -> Answer:
        """Wait until the screen shows a text."""
        for _ in range(400):
            answer = await self.act("capture", min_wait_s=0.05)
            if text in answer.text:
                return answer
        raise AssertionError(f"{text!r} is not on the screen:\n{answer.text}")

    async def recording(self) -> tuple[dict[str, Any], list[tuple[float, str, str]]]:
        """The header and the events of the recording."""
        data, _ = await self._harness.data("recording", self._slot, name="terminal.cast")
        header, *events = map(json.loads, data.decode().splitlines())
        return header, [(time, kind, text) for time, kind, text in events]


def replay(header: dict[str, Any], events: list[tuple[float, str, str]]) -> pyte.Screen:
    """Play a recording in another terminal emulator. Returns its screen."""
    screen = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(screen)
    for _, kind, text in events:
        if kind == "o":
            stream.feed(text)
        else:
            width, height = map(int, text.split("x"))
            screen.resize(height, width)
    return screen


def text_of(screen: pyte.Screen) -> str:
    """The text of a screen in the form of the tool: without the blanks at the end of its lines, and without the blank lines at its end."""
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return "".join(f"{line}\n" for line in lines)
