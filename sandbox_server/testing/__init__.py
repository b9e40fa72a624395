"""Fakes that ship with the package: a clock, a backend, an agent. Each stands at a seam; a fault is a subclass of a few lines."""

from sandbox_server.testing.agent import FakeAgent, FakeLink, FakeSlot
from sandbox_server.testing.backend import FakeBackend
from sandbox_server.testing.clock import FakeClock, settle

__all__ = ["FakeAgent", "FakeBackend", "FakeClock", "FakeLink", "FakeSlot", "settle"]
