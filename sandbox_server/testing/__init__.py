"""Fakes that ship with the package: a clock, a backend, an agent. A test makes a fault with a subclass that overrides one method."""

from sandbox_server.testing.agent import FakeAgent, FakeLink, FakeSlot
from sandbox_server.testing.backend import FakeBackend
from sandbox_server.testing.clock import FakeClock, settle

__all__ = ["FakeAgent", "FakeBackend", "FakeClock", "FakeLink", "FakeSlot", "settle"]
