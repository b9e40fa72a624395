"""Fixtures and settings for all tests. Fixtures for the tests of one folder are in that folder."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from xdist.remote import Producer

from tests.support.matrix_in_readme import MatrixInReadme
from tests.support.service import Service, running_service
from tests.support.users import ROOT
from tests.support.worker_scheduling import WorkerScheduling

# Compiled modules of this process and of every process that the tests start. They start hundreds of times, and compiling takes half of each start.
BYTECODE = ROOT / "build" / "bytecode"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--readme", choices=("check", "write"), default="check", help="what to do with the README's isolation table after the hostile suite")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(BYTECODE)
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(BYTECODE)
    # A test run in the background, or under nohup, starts with these signals ignored, and so would every program that it starts.
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    config.pluginmanager.register(MatrixInReadme(write=config.getoption("--readme") == "write"), "matrix-in-readme")


@pytest.hookimpl(optionalhook=True)  # a run without pytest-xdist has no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> WorkerScheduling:
    return WorkerScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("privileged"):
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(scope="session", autouse=True)
def _clean_environ() -> Iterator[None]:
    """Keep the settings and proxies of the person who runs the tests out of them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("SANDBOX_") or name.lower() in {"http_proxy", "https_proxy", "all_proxy"}:
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """A real service on a real port with one small pool, shared by all tests of a worker. `running_service` starts one with other settings."""
    with running_service() as running:
        yield running
