"""Run pytest on some tests and write the number of each test that passed to a pipe. This file is read from standard input, by `python -I -S`.

pytest is imported before anything of the repository can be: no module of the repository can take the place of one of pytest's, and neither
`sitecustomize` nor `usercustomize` is imported at all.
"""

import json
import os
import site
import sys
import types
from typing import Any, Dict, List, Set


def main() -> None:
    """Read the order from standard input, run pytest, and end with its exit code."""
    order = json.loads(sys.stdin.readline())
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.set_inheritable(order["report_fd"], False)
    with open(order["ids"]) as file:
        ids = json.load(file)
    for name in ("sitecustomize", "usercustomize"):
        sys.modules[name] = types.ModuleType(name)
    if not order["late_import"]:
        import_pytest(order["search_path"])
    site.ENABLE_USER_SITE = False
    site.main()
    import pytest

    files = existing_files(ids, order["repository"])
    options = ["-p", "no:cacheprovider", "-q", "--rootdir", order["repository"], "--continue-on-collection-errors", "--tb=short", *order["options"]]
    plugins = [word for module in order["plugins"] for word in ("-p", module)]
    sys.argv = ["pytest", *options, *files]
    plugin = ResultWriter(ids, order["token"], order["report_fd"], order["repository"])
    sys.exit(int(pytest.main([*plugins, *options, *files], plugins=[plugin])) if files else 5)


def import_pytest(search_path: List[str]) -> None:
    """Import pytest.

    Args:
        search_path: where modules are looked for meanwhile: the environment and the system, without the repository.
    """
    before = list(sys.path)
    sys.path[:] = search_path
    import doctest  # noqa: F401 - pytest imports these when it needs them, and finds them imported
    import pdb  # noqa: F401
    import unittest.mock  # noqa: F401

    import _pytest.config
    import pytest  # noqa: F401

    for name in _pytest.config.default_plugins:
        __import__("_pytest." + name)
    for name in ("pygments.lexers.python", "pygments.formatters.terminal", "exceptiongroup", "tomli", "py"):
        try:
            __import__(name)
        except ImportError:
            pass  # optional
    sys.path[:] = before


def existing_files(ids: List[str], repository: str) -> List[str]:
    """Return the files of the tests, each once. One that is missing would end pytest before it runs the others."""
    files = dict.fromkeys(test.split("::", 1)[0] for test in ids)
    return [os.path.join(repository, path) for path in files if os.path.isfile(os.path.join(repository, path))]


class ResultWriter:
    """A plugin of pytest that runs only the given tests, and writes the number of each one that passed.

    Args:
        ids: the ids of the tests. An id may end at the first space of its parameters, as in data sets that were made from pytest's summary.
        token: what each line begins with.
        report_fd: the file descriptor to write to.
        repository: the folder of the repository.
    """

    def __init__(self, ids: List[str], token: str, report_fd: int, repository: str) -> None:
        self._numbers = {test: number for number, test in enumerate(ids)}
        self._token = token
        self._report_fd = report_fd
        self._repository = repository
        self._collected: Dict[int, Set[str]] = {}
        self._passed: Dict[str, Set[str]] = {}
        self._failed: Set[int] = set()

    def _number(self, node_id: str) -> Any:
        number = self._numbers.get(node_id)
        return self._numbers.get(node_id.split(" ", 1)[0]) if number is None else number

    def pytest_collection_modifyitems(self, config: Any, items: List[Any]) -> None:
        """Leave out the tests that are not asked for."""
        chosen: List[Any] = []
        others: List[Any] = []
        for item in items:
            number = self._number(item.nodeid)
            (others if number is None else chosen).append(item)
            if number is not None:
                self._collected.setdefault(number, set()).add(item.nodeid)
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = chosen

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Take note of a test that the model's source has declared an expected failure: only what was kept, or lies outside of the repository, may do that."""
        import _pytest.outcomes
        import pytest

        number = self._number(item.nodeid)
        if number is None or call.excinfo is None or not isinstance(call.excinfo.value, pytest.xfail.Exception):
            return
        traceback, caller = call.excinfo.tb, ""
        while traceback is not None:
            path = traceback.tb_frame.f_code.co_filename
            if path != _pytest.outcomes.__file__:  # the function `pytest.xfail` itself
                caller = os.path.realpath(path)
            traceback = traceback.tb_next
        inside = os.path.relpath(caller, self._repository)
        if not inside.startswith("../") and not os.path.isfile(os.path.join(os.path.dirname(self._repository), ".tests", "files", inside)):
            self._failed.add(number)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Take note of a phase of a test. A test has passed when its set-up, itself and its tear-down have; an expected failure counts as passed."""
        number = self._number(report.nodeid)
        if number is None:
            return
        if report.outcome == "passed" or (report.outcome == "skipped" and hasattr(report, "wasxfail")):
            self._passed.setdefault(report.nodeid, set()).add(report.when)
        else:
            self._failed.add(number)
        if report.when == "teardown":
            self._write(number)

    def _write(self, number: int) -> None:
        nodes = self._collected.get(number, set())
        if number not in self._failed and nodes and all({"call", "teardown"} <= self._passed.get(node, set()) or self._xfailed(node) for node in nodes):
            os.write(self._report_fd, ("%s %d passed\n" % (self._token, number)).encode())

    def _xfailed(self, node: str) -> bool:
        """Whether a test was expected to fail and therefore not run: then it has no phase `call`."""
        return {"setup", "teardown"} == self._passed.get(node, set())


main()
