"""Fixtures: both clients, connected to a service that sends prepared responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from env_client.client import AsyncSandboxClient, SandboxClient
from env_client.discovery import Endpoint
from env_client.operations.lease_operations import AsyncOperations, Operations
from env_client.retry import RetryPolicy
from env_client.transport.request_core import RequestCore
from env_client.transport.senders import AsyncSender, SyncSender
from tests.support.both_clients import KINDS, Face
from tests.support.scripted_responses import URL, FakeTime, Script, ScriptedTransport


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(params=KINDS)
def operations(request: pytest.FixtureRequest, script: Script, fake_time: FakeTime, runner: asyncio.Runner) -> Any:
    """The operations of one of the clients, with a fake clock and the longest jitter."""
    core = RequestCore(Endpoint(URL, "s3cret"), RetryPolicy(), clock=fake_time.clock, jitter=lambda: 1.0)
    if request.param == "sync":
        return Face(Operations(SyncSender(core, ScriptedTransport(script), sleep=fake_time.sleep)), runner)
    return Face(AsyncOperations(AsyncSender(core, ScriptedTransport(script), sleep=fake_time.asleep)), runner)


@pytest.fixture(params=KINDS)
def client(request: pytest.FixtureRequest, script: Script, runner: asyncio.Runner) -> Iterator[Any]:
    """One of the clients, with the real clock and without retries."""
    options: dict[str, Any] = {"transport": ScriptedTransport(script), "retry": RetryPolicy(total_s=0.0)}
    if request.param == "sync":
        with SandboxClient(URL, "s3cret", **options) as made:
            yield Face(made, runner)
    else:
        face = Face(AsyncSandboxClient(URL, "s3cret", **options), runner)
        yield face
        face.aclose()
