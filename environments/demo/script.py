"""The script of a scripted model server, as plain data: what the model answers to which prompt, and which faults the server has.

A script is a YAML or JSON file, or the same as a dictionary::

    tool_call_family: hermes
    prompts:
      - match: Fix the bug
        trajectories:
          - name: fixes
            turns:
              - text: I look first.
                calls: [{tool: terminal, arguments: {command: ls}}]
                fault: {kind: http_error, status: 500, times: 2}
              - text: Done.
    faults:
      - {request: 7, kind: silence}
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from environments.tool_call_parsers import PARSERS
from environments.tool_call_parsers.arguments import encode_json


class ScriptError(ValueError):
    """The script is not valid. The message names the place and the problem."""


class FaultKind(enum.StrEnum):
    """What a scripted server does wrong."""

    #: The arguments of every call of the turn are broken JSON.
    MALFORMED_CALL = "malformed_call"
    #: The arguments are a JSON string that holds the JSON object.
    DOUBLE_ENCODED = "double_encoded"
    #: The arguments are the text of the first argument alone, such as a command.
    BARE_STRING = "bare_string"
    #: The calls name a tool that does not exist.
    UNKNOWN_TOOL = "unknown_tool"
    #: The answer goes on until its limit of tokens, and calls no tool.
    LENGTH = "length"
    #: The server does not answer until the client closes the connection.
    SILENCE = "silence"
    #: The server answers with an error status.
    HTTP_ERROR = "http_error"
    #: The answer has no choices.
    NO_CHOICES = "no_choices"
    #: The server closes the connection in the middle of the answer.
    CUT = "cut"


#: The faults that change what the model writes. The conversation goes on after them.
ANSWER_FAULTS = frozenset({FaultKind.MALFORMED_CALL, FaultKind.DOUBLE_ENCODED, FaultKind.BARE_STRING, FaultKind.UNKNOWN_TOOL, FaultKind.LENGTH})
_CALL_FAULTS = ANSWER_FAULTS - {FaultKind.LENGTH}


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Fault(_Value):
    """A fault of the server or of the model.

    Args:
        kind: what goes wrong.
        status: the status of an `http_error`.
        times: how often a turn has the fault before it is answered; None for always. A fault that changes what the model writes does so every time.
    """

    kind: FaultKind
    status: int = Field(default=500, ge=400, le=599)
    times: int | None = Field(default=1, ge=1)


class RequestFault(Fault):
    """A fault of one request.

    Args:
        request: the number of the request, counted from 1 over all requests for an answer.
    """

    request: int = Field(ge=1)


class ScriptedCall(_Value):
    """A tool call of the model.

    Args:
        tool: the name of the tool.
        arguments: the arguments: an object, or the text that the model writes in its place.
    """

    tool: str
    arguments: dict[str, Any] | str = {}

    @property
    def arguments_text(self) -> str:
        """The arguments as the model writes them."""
        return self.arguments if isinstance(self.arguments, str) else encode_json(self.arguments)


class Turn(_Value):
    """One answer of the model: text and calls, or raw text.

    Args:
        text: the text in front of the calls.
        calls: the tool calls.
        raw: the whole answer as the model writes it, with the markup of its calls.
        reasoning: the reasoning in front of the answer.
        delay_s: how long the server waits before it answers, in seconds; None for the delay of the script.
        fault: a fault of this turn.
    """

    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    raw: str | None = None
    reasoning: str = ""
    delay_s: float | None = Field(default=None, ge=0)
    fault: Fault | None = None

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if self.raw is not None and (self.text or self.calls or self.reasoning):
            raise ValueError("a turn has either `raw`, or `text`, `calls` and `reasoning`")
        if self.fault and self.fault.kind in _CALL_FAULTS and not self.calls:
            raise ValueError(f"the fault {self.fault.kind.value} needs `calls`; write what is wrong into `raw`")
        return self


class Trajectory(_Value):
    """The answers of the model in one conversation.

    Args:
        name: the name, for the record of requests.
        turns: the answers in order.
        fault: a fault of every turn that has none of its own.
    """

    name: str = ""
    turns: tuple[Turn, ...] = Field(min_length=1)
    fault: Fault | None = None


class ScriptedPrompt(_Value):
    """The conversations that begin with a prompt. Conversation number n plays trajectory number n.

    Args:
        match: a text in the first message of the user. An empty text matches every prompt.
        trajectories: the trajectories in order.
        after_last: which trajectory a conversation plays when all have been played: the last one, the first one, or all of them in order again (`cycle`).
        fault: a fault of every turn that has none of its own, and whose trajectory has none.
    """

    match: str = ""
    trajectories: tuple[Trajectory, ...] = Field(min_length=1)
    after_last: Literal["last", "first", "cycle"] = "last"
    fault: Fault | None = None

    def trajectory(self, number: int) -> Trajectory:
        """Return the trajectory of a conversation.

        Args:
            number: the number of the conversation among those of this prompt, counted from 0.
        """
        count = len(self.trajectories)
        if number < count:
            return self.trajectories[number]
        return self.trajectories[{"last": count - 1, "first": 0, "cycle": number % count}[self.after_last]]


class Script(_Value):
    """What a scripted model server plays.

    Args:
        prompts: the prompts. The first one that matches is played.
        tool_call_family: the family of models whose format of tool calls the text of the model has, such as `hermes`.
        model: the name of the model.
        closing_text: what the model answers when the turns of its trajectory are used up.
        delay_s: how long the server waits before each answer, in seconds.
        faults: faults of single requests. They come before those of turns.
    """

    prompts: tuple[ScriptedPrompt, ...] = Field(min_length=1)
    tool_call_family: str = "hermes"
    model: str = "scripted"
    closing_text: str = "Done."
    delay_s: float = Field(default=0.0, ge=0)
    faults: tuple[RequestFault, ...] = ()

    @model_validator(mode="after")
    def _names_a_family(self) -> Self:
        if self.tool_call_family not in PARSERS:
            raise ValueError(f"there is no tool_call_family {self.tool_call_family!r}; the families are {', '.join(sorted(PARSERS))}")
        return self


def parse_script(data: Mapping[str, Any]) -> Script:
    """Return the script that a dictionary describes.

    Raises:
        ScriptError: it does not describe a script.
    """
    try:
        return Script.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, problem['loc'])) or 'script'}: {problem['msg']}" for problem in error.errors())
        raise ScriptError(f"The script is not valid: {problems}.") from error


def load_script(path: Path) -> Script:
    """Read a script from a YAML or JSON file.

    Raises:
        OSError: the file cannot be read.
        ScriptError: the file does not hold a script.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ScriptError(f"The file {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(data, dict):
        raise ScriptError(f"The file {path} does not hold an object with the prompts of a script.")
    return parse_script(data)
