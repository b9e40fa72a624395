"""Which conversation of a scripted model a request belongs to, recognised by the conversation so far.

An answer leaves a *mark*: what the next request of the conversation starts with. Conversations with equal marks are interchangeable, so a request takes any
of those that wait at its mark. Conversations that did not get an answer, because of a fault, wait at the mark where they were.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from environments.demo.script import ScriptedPrompt, Trajectory

#: How many marks are remembered. The one that was made first is forgotten first.
MAX_MARKS = 20_000
_Key = TypeVar("_Key")


class UnknownConversation(Exception):
    """The request belongs to no conversation of the server, and begins none. The message says why."""


@dataclass(frozen=True, slots=True)
class ConversationSoFar:
    """What a request says about its conversation.

    Args:
        data: the conversation as bytes, so that the data of an earlier request and its answer is the beginning of the data of the next request.
        boundaries: the indices in `data` at which an answer may end, in ascending order.
        key: what identifies the latest answer alone, such as the identifiers of its calls; empty if nothing does.
    """

    data: bytes
    boundaries: Sequence[int] = ()
    key: bytes = b""


@dataclass(slots=True, eq=False)
class Conversation:
    """A conversation that plays a trajectory.

    Args:
        number: its number among all conversations of the server, counted from 0.
        prompt: the prompt with which it began.
        trajectory: what it plays.
        fault_counts: how many faults each turn had so far.
    """

    number: int
    prompt: ScriptedPrompt
    trajectory: Trajectory
    fault_counts: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a conversation is.

    Args:
        conversation: the conversation.
        turn: the index of the turn that the model writes next.
    """

    conversation: Conversation
    turn: int


@dataclass(slots=True, eq=False)
class _Mark:
    """The conversations at one mark.

    Args:
        waiting: those whose next request has not come yet.
        latest: the one whose request came last. A client that repeats a request, because it lost the answer, gets this one's answer again.
    """

    waiting: deque[Position] = field(default_factory=deque)
    latest: Position | None = None

    def take(self) -> Taken | None:
        """Take a conversation that waits, or else the latest one."""
        repeated = not self.waiting
        if self.waiting:
            self.latest = self.waiting.popleft()
        return Taken(self.latest, self, repeated) if self.latest else None


@dataclass(frozen=True, slots=True)
class Taken:
    """A conversation that a request has taken.

    Args:
        position: the conversation and its turn.
        mark: where it waited.
        repeated: whether the same turn has been taken before.
    """

    position: Position
    mark: _Mark
    repeated: bool


class ConversationTracker:
    """The conversations of a scripted model. It does no I/O.

    Args:
        prompts: the prompts of the script.
        max_marks: how many marks of answers, and as many of beginnings, are remembered.
    """

    def __init__(self, prompts: Sequence[ScriptedPrompt], max_marks: int = MAX_MARKS) -> None:
        self._prompts = prompts
        self._max_marks = max_marks
        self._answered: OrderedDict[bytes, _Mark] = OrderedDict()
        self._begun: OrderedDict[tuple[int, bytes], _Mark] = OrderedDict()  # by the length of the data, and its digest
        self._counts = [0] * len(prompts)
        self.conversation_count = 0

    def take(self, request: ConversationSoFar, count: int, first_message: Callable[[], str]) -> list[Taken]:
        """Return the conversations that a request continues or begins.

        Args:
            request: the conversation so far.
            count: how many answers the request asks for. A request that begins a conversation begins as many.
            first_message: returns the first message of the user. It is called only for a request that begins a conversation.

        Raises:
            UnknownConversation: no prompt of the script matches, or an earlier answer of the model was changed.
        """
        mark = self._find_answered(request)
        taken = [mark.take() for _ in range(count)] if mark else []
        if taken and all(taken):
            return [one for one in taken if one]
        key = (len(request.data), _digest(request.data))
        begun = self._begun.get(key)
        if begun is None:
            self._refuse_changed(request)
            begun = _Mark()
            _remember(self._begun, key, begun, self._max_marks)
        return [(begun.take() if begun.waiting else None) or self._begin(first_message(), begun) for _ in range(count)]

    def answered(self, taken: Taken, next_request: ConversationSoFar) -> None:
        """Record that a conversation got its answer.

        Args:
            taken: the conversation.
            next_request: what its next request starts with, and the key of the answer.
        """
        digest = _digest(next_request.key or next_request.data)
        mark = self._answered.get(digest)
        if mark is None:
            mark = _Mark()
            _remember(self._answered, digest, mark, self._max_marks)
        mark.waiting.append(Position(taken.position.conversation, taken.position.turn + 1))

    def put_back(self, taken: Taken) -> None:
        """Let a conversation that got no answer wait where it was taken."""
        if not taken.repeated:
            taken.mark.waiting.appendleft(taken.position)

    def _find_answered(self, request: ConversationSoFar) -> _Mark | None:
        if request.key:
            return self._answered.get(_digest(request.key))
        found = None
        hashed, end = hashlib.blake2b(digest_size=16), 0
        for boundary in request.boundaries:
            hashed.update(request.data[end:boundary])
            end = boundary
            found = self._answered.get(hashed.digest(), found)
        return found

    def _refuse_changed(self, request: ConversationSoFar) -> None:
        """Refuse a request that starts as an earlier one, and goes on after it with an answer that the server did not give."""
        if not request.boundaries:
            return
        hashed, end = hashlib.blake2b(digest_size=16), 0
        for length in sorted({length for length, _ in self._begun if length < len(request.data)}):
            hashed.update(request.data[end:length])
            end = length
            if (length, hashed.digest()) in self._begun:
                raise UnknownConversation("The request continues a conversation with an answer that the model did not give. Send its answers back unchanged.")

    def _begin(self, first_message: str, mark: _Mark) -> Taken:
        for index, prompt in enumerate(self._prompts):
            if prompt.match in first_message:
                conversation = Conversation(self.conversation_count, prompt, prompt.trajectory(self._counts[index]))
                self._counts[index] += 1
                self.conversation_count += 1
                return Taken(Position(conversation, 0), mark, repeated=False)
        raise UnknownConversation(f"No prompt of the script matches the first message of the user: {first_message[:200]!r}.")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _remember(marks: OrderedDict[_Key, _Mark], key: _Key, mark: _Mark, most: int) -> None:
    marks[key] = mark
    if len(marks) > most:
        marks.popitem(last=False)
