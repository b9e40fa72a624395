"""The scripted model server as an ASGI application. It uses no framework, so that its own time is small beside that of what is measured against it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from environments.demo.answers import AnswerWriter
from environments.demo.conversations import ConversationTracker, Taken, UnknownConversation
from environments.demo.request_log import RequestLog, RequestRecord
from environments.demo.script import ANSWER_FAULTS, Fault, FaultKind, Script
from environments.demo.tokenizer import TextTokenizer
from environments.demo.wire import AnswerRequest, BadRequest, read_chat_request, read_generate_request

Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

_CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class _Reply:
    """What the server does about a request.

    Args:
        status: the status of the response.
        value: its body, a JSON value.
        fault: the fault that stands in for the response, or None.
        delay_s: how long the server waits before it, in seconds.
    """

    status: int
    value: Any
    fault: FaultKind | None = None
    delay_s: float = 0.0


class ModelApplication:
    """Answers the requests of clients by a script.

    Args:
        script: the script.
        writer: writes the answers.
        tokenizer: encodes and decodes the prompts of `/generate`, or None.
        log: keeps the requests.
    """

    def __init__(self, script: Script, writer: AnswerWriter, tokenizer: TextTokenizer | None, log: RequestLog) -> None:
        self._script = script
        self._writer = writer
        self._tokenizer = tokenizer
        self._log = log
        self._tracker = ConversationTracker(script.prompts)
        self._request_faults = {fault.request: fault for fault in script.faults}
        self._answer_count = 0
        self._closing = asyncio.Event()

    @property
    def conversation_count(self) -> int:
        """How many conversations began."""
        return self._tracker.conversation_count

    def close(self) -> None:
        """End the requests that are left unanswered on purpose."""
        self._closing.set()

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI calls an application."""
        if scope["type"] != "http":
            raise RuntimeError(f"The scripted model server has no {scope['type']} connections.")
        data = await read_body(receive)
        await self._send_reply(self._reply(scope["method"], scope["path"], data), receive, send)

    def _reply(self, method: str, path: str, data: bytes) -> _Reply:
        match method, path:
            case "GET", "/health":
                return _Reply(200, {})
            case "GET", "/v1/models":
                return _Reply(200, {"object": "list", "data": [{"id": self._script.model, "object": "model", "created": 0, "owned_by": "script"}]})
            case "POST", "/v1/chat/completions" | "/generate":
                return self._answer(path, data)
        return _error(404, f"The scripted model server has no {method} {path}.")

    def _answer(self, path: str, data: bytes) -> _Reply:
        """Answer a request of the model. No other request is looked at in between, so that the conversations are in a consistent state."""
        number = self._log.next_number()
        try:
            request = self._read(path, data)
            taken = self._tracker.take(request.conversation, request.count, request.first_message)
        except (BadRequest, UnknownConversation) as error:
            self._log.add(RequestRecord(number, path, data, 400, error=str(error)))
            return _error(400, str(error))
        first = taken[0].position
        fault = self._fault(number, taken[0])
        reply = self._play(request, taken, fault, number)
        status = 0 if reply.fault in (FaultKind.SILENCE, FaultKind.CUT) else reply.status
        self._log.add(
            RequestRecord(
                number, path, data, status, fault=fault.kind.value if fault else "", trajectory=first.conversation.trajectory.name, turn=first.turn + 1,
                conversations=tuple(one.position.conversation.number for one in taken),
            )
        )  # fmt: skip
        return reply

    def _read(self, path: str, data: bytes) -> AnswerRequest:
        try:
            body = json.loads(data)
        except ValueError as error:
            raise BadRequest(f"The body of the request is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("The body of the request is not a JSON object.")
        return read_chat_request(body, self._script.model) if path == _CHAT_PATH else read_generate_request(body, self._tokenizer)

    def _fault(self, number: int, taken: Taken) -> Fault | None:
        """Return the fault of a request: its own, or that of the turn, the trajectory, or the prompt."""
        if number in self._request_faults:
            return self._request_faults[number]
        conversation, turn = taken.position.conversation, taken.position.turn
        turns = conversation.trajectory.turns
        if turn >= len(turns):
            return None
        fault = turns[turn].fault or conversation.trajectory.fault or conversation.prompt.fault
        if fault is None or fault.kind in ANSWER_FAULTS or fault.times is None:
            return fault
        count = conversation.fault_counts.get(turn, 0)
        conversation.fault_counts[turn] = count + 1
        return fault if count < fault.times else None

    def _play(self, request: AnswerRequest, taken: list[Taken], fault: Fault | None, number: int) -> _Reply:
        turns = [self._writer.turn(one.position.conversation.trajectory.turns, one.position.turn) for one in taken]
        delay_s = turns[0].delay_s if turns[0].delay_s is not None else self._script.delay_s
        if fault and fault.kind not in ANSWER_FAULTS and fault.kind is not FaultKind.CUT:
            self._put_back(taken)
            if fault.kind is FaultKind.NO_CHOICES:
                return _Reply(200, request.response([], number), delay_s=delay_s)
            error = _error(fault.status, "The script has a fault here.")
            return _Reply(fault.status, error.value, FaultKind.SILENCE if fault.kind is FaultKind.SILENCE else None, delay_s)
        played = []
        for turn in turns:
            self._answer_count += 1
            played.append(request.play(self._writer, turn, fault, self._answer_count))
        if fault and fault.kind is FaultKind.CUT:
            self._put_back(taken)
            return _Reply(200, request.response(played, number), FaultKind.CUT, delay_s)
        for one, answer in zip(taken, played, strict=True):
            self._tracker.answered(one, answer.next_request)
        return _Reply(200, request.response(played, number), delay_s=delay_s)

    def _put_back(self, taken: list[Taken]) -> None:
        for one in reversed(taken):
            self._tracker.put_back(one)

    async def _send_reply(self, reply: _Reply, receive: Receive, send: Send) -> None:
        if reply.delay_s > 0:
            await asyncio.sleep(reply.delay_s)
        if reply.fault is FaultKind.SILENCE:
            await self._wait_for_disconnect(receive)
            _abort(send)
            return
        if reply.fault is FaultKind.CUT:
            body = await _start_response(reply.status, reply.value, send)
            await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
            _abort(send)
            await receive()  # uvicorn reports an application that returns before the connection has ended
            return
        await send_json(reply.status, reply.value, send)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        """Wait until the client closes the connection, or the server stops."""
        waits = [asyncio.ensure_future(receive()), asyncio.ensure_future(self._closing.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


async def read_body(receive: Receive) -> bytes:
    """Return the body of a request."""
    data = bytearray()
    while True:
        event = await receive()
        data += event.get("body", b"")
        if not event.get("more_body"):
            return bytes(data)


async def send_json(status: int, value: Any, send: Send) -> None:
    """Send a response.

    Args:
        status: its status.
        value: its body, a JSON value.
        send: sends an event, as ASGI gives it to an application.
    """
    body = await _start_response(status, value, send)
    await send({"type": "http.response.body", "body": body})


async def _start_response(status: int, value: Any, send: Send) -> bytes:
    """Send the status and the headers of a response, and return its body."""
    body = json.dumps(value).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    return body


def _error(status: int, message: str) -> _Reply:
    return _Reply(status, {"error": {"message": message, "type": "scripted", "code": status}})


def _abort(send: Send) -> None:
    """Abort the connection. uvicorn alone gives access to it."""
    transport: asyncio.Transport = send.__self__.transport  # type: ignore[attr-defined]  # the method of uvicorn's request
    transport.abort()
