"""Set-up and scoring of SWE-smith rows in real slots, in each isolation mode, and attempts of a model to find the fix or to change its score."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from environments.rollouts.exec_tool import ExecTool
from environments.rollouts.service import PoolConnection
from environments.swe_smith.repositories import LocalRepositories
from environments.swe_smith.rows import SweRow, parse_row
from environments.swe_smith.scoring import Scorer
from environments.swe_smith.set_up import SEALED_ENTRIES, Workspace, WorkspaceSetUp
from tests.support.service import Service
from tests.support.swe.repository import FIXED, SECRET, BrokenRepository, make_repository
from tests.support.swe.slots import connected, service_in_mode, shell, slots

pytestmark = [pytest.mark.timeout(240), pytest.mark.privileged]

WRITE_FIX = f"printf '{FIXED}' > repo/src/fairsum/add.py"
#: What a plugin or module of the model does as soon as it is imported: it says so, and makes every test pass.
FORGERY = """
import os, pathlib
pathlib.Path("/tmp/pwned").mkdir(exist_ok=True)
pathlib.Path("/tmp/pwned/NAME").write_text("x")
def pytest_runtest_makereport(item, call):
    from _pytest.reports import TestReport
    call.excinfo = None
    return TestReport.from_item_and_call(item, call)
"""
#: Files that a model adds, in the hope that they are imported or read when it is scored. NAME is the marker that each leaves.
FORGED_FILES = (
    "repo/conftest.py", "repo/src/conftest.py", "repo/tests/sub/conftest.py", "conftest.py", "repo/sitecustomize.py", "repo/src/sitecustomize.py",
    "repo/src/usercustomize.py", "repo/src/_pytest/__init__.py", "repo/src/pluggy.py", "repo/src/py.py", "repo/src/pytest.py", "repo/src/iniconfig.py",
    "repo/tests/pytest.py", "repo/tests/pathlib.py", "repo/tests/__init__.py", ".local/lib/python3.11/site-packages/usercustomize.py", "sitecustomize.py",
)  # fmt: skip
SETTINGS = """[pytest]
addopts = -p forged --deselect tests/test_add.py
python_functions = none_at_all
"""
#: Commands of a model that wants another score. Those that set-up has made impossible fail.
ATTACKS = {
    "tests-edited": "for t in repo/tests/test_*.py; do echo 'def test_x(): pass' > $t; done; echo -1 > repo/tests/expected.txt",
    "ini-files": f"for n in repo/pytest.ini repo/.pytest.ini repo/tox.ini repo/tests/pytest.ini pytest.ini; do printf '{SETTINGS}' > $n; done",
    "other-settings": "printf '[tool:pytest]\\naddopts = -p forged\\n' > repo/setup.cfg; "
    "printf '[tool.pytest.ini_options]\\naddopts = \"-p forged\"\\n' > repo/pyproject.toml",
    "forged-plugin": "mkdir -p repo/src/forged.egg-info && printf '[pytest11]\\nforged = forged\\n' > repo/src/forged.egg-info/entry_points.txt && "
    "printf 'Metadata-Version: 2.1\\nName: forged\\nVersion: 1\\n' > repo/src/forged.egg-info/PKG-INFO && cp repo/conftest.py repo/src/forged.py",
    "fake-pytest": "mkdir -p bin .local/bin && for p in bin .local/bin; do for n in pytest python git; do "
    "printf '#!/bin/sh\\ntouch /tmp/pwned/path\\n' > $p/$n; chmod +x $p/$n; done; done; "
    "for n in .bashrc .profile .bash_profile; do echo 'mkdir -p /tmp/pwned; touch /tmp/pwned/rc; PATH=$HOME/bin:$PATH' > $n; done",
    "pth": "printf 'import os; os.makedirs(\"/tmp/pwned\", exist_ok=True); open(\"/tmp/pwned/pth\", \"w\")\\n' > .local/lib/python3.11/site-packages/x.pth; "
    "cp .local/lib/python3.11/site-packages/x.pth repo/src/x.pth",
    "git": "cd repo && printf '#!/bin/sh\\ntouch /tmp/pwned/git\\n' > /tmp/hook && chmod +x /tmp/hook && git config core.fsmonitor /tmp/hook && "
    "git config core.hooksPath /tmp && git config filter.x.clean /tmp/hook && git config filter.x.smudge /tmp/hook && echo '* filter=x' > .gitattributes && "
    "git config core.worktree /tmp && git config --file ~/.gitconfig core.fsmonitor /tmp/hook && mkdir -p .git/hooks && cp /tmp/hook .git/hooks/post-checkout",
    "links": "rm -rf repo/.pytest_cache; ln -s $PWD/repo .model-link; ln -s /tmp/outside .score; mkdir -p /tmp/outside; ln -s /tmp/outside repo/src/link; "
    "rm -rf repo/tests && mkdir -p /tmp/forged-tests && printf 'def test_add(): pass\\n' > /tmp/forged-tests/test_add.py && ln -s /tmp/forged-tests repo/tests",
    # It needs no process but `sleep` in each round, so that it does not keep the scoring itself from running.
    "background": "(setsid sh -c 'while true; do echo \"def test_add(): pass\" > repo/tests/test_add.py; [ -d /tmp/pwned ] || mkdir -p /tmp/pwned; "
    "[ -e .model-running ] || : > /tmp/pwned/background; sleep 0.02; done' >/dev/null 2>&1 &) ; touch .model-running",
}  # fmt: skip
#: Source under test that writes results wherever it can, and ends its process.
FORGED_REPORT = """
import glob, os
for fd in range(3, 20):
    try:
        os.write(fd, b"".join(b"%d passed\\n" % number for number in range(6)))
    except OSError:
        pass
for path in glob.glob("/proc/[0-9]*/fd/1"):
    try:
        open(path, "w").write('{"done": {"passed": "3f", "log": ""}}\\n')
    except OSError:
        pass
os._exit(0)
"""
#: Source under test that wants its failures not to count: what cannot be scored is rolled out again. Each leaves a test of PASS_TO_PASS without a result.
DISTURBING = {
    "kills what counts the results": "import os\nos.kill(os.getppid(), 9)\n",
    "takes away its open files": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))\nos._exit(1)\n",
    "removes its files": "import os, shutil\nshutil.rmtree(os.path.dirname(os.path.dirname(os.environ['HOME'])), ignore_errors=True)\nos._exit(1)\n",
}
#: Source that declares every failing test an expected failure: one of them with the function of pytest, and the others with its exception.
EXPECTED_FAILURES = """
import pytest
def add(first, second):
    if second == 0:
        return first
    if second == 1:
        pytest.xfail("later")
    raise pytest.xfail.Exception("later")
"""
#: A project whose installation ends every other process of the slot.
KILLING_SETUP = """
import os
for name in os.listdir("/proc"):
    if name.isdigit() and int(name) != os.getpid():
        try:
            os.kill(int(name), 9)
        except OSError:
            pass
"""
REFUSED_WHEN_SEALED = (
    "echo x > .env/bin/pytest", "echo import-me > .env/lib/python3.11/site-packages/x.pth", "rm -rf .tests/files", "mv .env other", "mv .tests other",
    "echo > .tests/files/tests/test_add.py", "chmod -R 777 .tests/git", "umount .env", "mount --bind /tmp .env",
)  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> BrokenRepository:
    return make_repository(tmp_path_factory.mktemp("repositories"))


@pytest.fixture(scope="module")
def services() -> Iterator[Mapping[str, Service]]:
    """A service in each mode, for all tests: the first test of each builds the environment of the repository, and the others find it in the cache."""
    with service_in_mode("bwrap") as bwrap, service_in_mode("uid") as uid:
        yield {"bwrap": bwrap, "uid": uid}


@pytest.fixture
def service(services: Mapping[str, Service], mode: str) -> Service:
    return services[mode]


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[PoolConnection]:
    async with connected(service) as connection:
        yield connection


@pytest.fixture
def row(repository: BrokenRepository) -> SweRow:
    return parse_row(repository.row())


@pytest.fixture
def set_up(repository: BrokenRepository) -> Iterator[WorkspaceSetUp]:
    made = WorkspaceSetUp(LocalRepositories(repository.base), install_timeout_s=120)
    yield made
    made.close()


@pytest.fixture
def scorer(set_up: WorkspaceSetUp) -> Scorer:
    return Scorer(set_up.set_up, include_fail_to_pass=True, test_timeout_s=120)


async def narrow(exec_tool: ExecTool, *, sealed: bool) -> None:
    """Take away what a model does not get. Where the mode can, that is the network, too, so that scoring finds nothing that it could still take."""
    network = False if exec_tool.lease.info.isolation == "bwrap" else None
    await exec_tool.narrow(cache="none", allow_network=network, read_only=SEALED_ENTRIES if sealed else ())


@pytest.mark.parametrize("mode", ["bwrap", "uid"])
async def test_a_group_fetches_once_finds_no_fix_and_does_not_change_what_it_is_scored_by(
    pool: PoolConnection, row: SweRow, set_up: WorkspaceSetUp, scorer: Scorer, repository: BrokenRepository
) -> None:
    """The first slot fixes the bug, and the second one attacks its scoring."""
    async with slots(pool, 2) as (first, second):
        cached = first.lease.info.cache == "rw"
        made = await asyncio.gather(set_up.set_up(row, first), set_up.set_up(row, second))
        assert [workspace.fetched for workspace in made].count(True) == (1 if cached else 2)
        assert made[0].environment.install == "offline"
        assert made[0].test_folders == ("tests",)
        for exec_tool in (first, second):
            await narrow(exec_tool, sealed=True)
        await _check_nothing_to_find(first, repository)

        assert await shell(first, f"cd repo && git status --porcelain && cd .. && {WRITE_FIX} && cd repo && git commit -qam mine && git log --format=%s")
        await shell(second, "cd repo && ../.env/bin/pytest -q; test $? = 1")
        for command in REFUSED_WHEN_SEALED:
            refused = await first("terminal", {"command": command})
            assert refused.metadata["exit_code"] != 0, command

        reward, meta = await scorer.score(row, first, made[0], tool_calls=3, valid_calls=3)
        assert (reward, meta["tests"]["passed_count"], meta["tests"]["test_count"]) == (1.0, 6, 6), meta
        await _check_attacks(row, second, made[1], scorer)
        # Elsewhere the model's slot keeps its processes until it is released, and is not used for scoring.
        assert (await second("terminal", {"command": "pgrep -u $(id -u) -fc 'whil[e] true'"})).output.strip() == "0"
        assert await scorer.score(row, second, made[1], tool_calls=0, valid_calls=0) == (0.0, {"tests": None})
        await second("write_file", {"path": "repo/src/fairsum/add.py", "content": FORGED_REPORT})
        reward, meta = await scorer.score(row, second, made[1], tool_calls=1, valid_calls=1)
        assert (reward, meta["tests"]["passed_count"]) == (0.0, 0), meta  # code that ends its process passes nothing


async def _check_nothing_to_find(exec_tool: ExecTool, repository: BrokenRepository) -> None:
    objects = await shell(exec_tool, "cd repo && git cat-file --batch-all-objects --batch-check")
    assert repository.base_commit in objects
    assert repository.fix_commit not in objects
    assert repository.fix_blob not in objects
    assert objects.count(" commit ") == 1
    assert await shell(exec_tool, "cd repo && git fsck --lost-found --no-progress; git remote; git tag; git stash list; git reflog --all") == ""
    assert (await shell(exec_tool, "cd repo && git for-each-ref --format='%(refname)'")).split() == ["refs/heads/main"]
    assert await shell(exec_tool, "cd repo/.git && ls; test ! -e logs && test ! -e objects/info/alternates && test ! -e FETCH_HEAD && test ! -e ORIG_HEAD")
    assert (await exec_tool("terminal", {"command": f"grep -rlE '{SECRET}|{repository.fix_commit}' . /tmp"})).output == ""
    assert (await exec_tool("terminal", {"command": "ls /cache"})).metadata["exit_code"] != 0
    assert await shell(exec_tool, "find /tmp -mindepth 1; ls -A") == ".env\n.tests\nrepo\n"


async def _check_attacks(row: SweRow, exec_tool: ExecTool, workspace: Workspace, scorer: Scorer) -> None:
    """Check that the score of a model that attacks its scoring is that of the commit with the bug, and that nothing it has added was run."""
    for number, name in enumerate(FORGED_FILES):
        forged = FORGERY.replace("NAME", f"file-{number}")
        await exec_tool("write_file", {"path": name, "content": forged})
    for command in ATTACKS.values():
        await shell(exec_tool, command)
    if not workspace.sealed:
        await shell(exec_tool, "echo 'import os; os._exit(0)' > .env/lib/python3.11/site-packages/x.pth; rm -rf .tests; mkdir -p .tests/files/tests")
        await shell(exec_tool, "printf 'def test_zero(): pass\\n' > .tests/files/tests/test_add.py; cp -r .tests/files/tests .tests/git")
    await shell(exec_tool, "rm -rf /tmp/pwned")

    reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=9, valid_calls=9)

    tests = meta["tests"]
    assert (reward, tests["passed_count"], tests["regressed"], tests["installs"]) == (0.4, 3, False, True), meta
    # A process in the background makes the folder again after it was removed; the file is made when the repository has been moved aside.
    assert (await exec_tool("terminal", {"command": "ls /tmp/pwned 2>/dev/null"})).output == "", meta


# Where the slot cannot be sealed, the tests run in another slot, by the same code in each mode.
@pytest.mark.parametrize("mode", ["bwrap"])
async def test_a_model_whose_slot_cannot_be_sealed_does_not_change_what_it_is_scored_by(
    pool: PoolConnection, row: SweRow, set_up: WorkspaceSetUp, scorer: Scorer
) -> None:
    async with slots(pool, 1) as (exec_tool,):
        workspace = (await set_up.set_up(row, exec_tool)).unsealed()
        await narrow(exec_tool, sealed=False)
        await _check_attacks(row, exec_tool, workspace, scorer)


@pytest.mark.parametrize("mode", ["bwrap"])
async def test_what_a_model_changes_in_a_slot_that_cannot_be_sealed(pool: PoolConnection, row: SweRow, set_up: WorkspaceSetUp, scorer: Scorer) -> None:
    async with slots(pool, 1) as (exec_tool,):
        workspace = (await set_up.set_up(row, exec_tool)).unsealed()
        await narrow(exec_tool, sealed=False)
        await shell(
            exec_tool,
            f"{WRITE_FIX}; mkdir -p repo/src/fairsum/deep && echo 'x = 1' > repo/src/fairsum/deep/new.py; rm repo/src/fairsum/name.py; ln -s /etc repo/etc",
        )
        reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=1, valid_calls=1)
        assert (reward, meta["tests"]["regressed"]) == (0.0, True), meta  # the module that the model has removed is missed in the other slot, too
        await shell(exec_tool, "echo \"NAME = 'fairsum'\" > repo/src/fairsum/name.py")
        reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=1, valid_calls=1)
        assert reward == 1.0, meta
        # A model that ends the collection of its changes has failed, whatever it has changed.
        await shell(exec_tool, "(setsid sh -c 'while true; do pkill -9 python; pkill -9 python3; done' >/dev/null 2>&1 &)")
        reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=1, valid_calls=1)
        assert (reward, meta["tests"]["end"]) == (0.0, "changes_unusable"), meta


@pytest.mark.parametrize("mode", ["bwrap"])
async def test_more_tests_than_one_process_runs(pool: PoolConnection, repository: BrokenRepository, set_up: WorkspaceSetUp, scorer: Scorer) -> None:
    """Sixty tests need two processes of pytest; their ids reach them through a file."""
    tests = [f"tests/test_many.py::test_many[{number}]" for number in range(60)]
    row = parse_row(repository.row(PASS_TO_PASS=json.dumps(tests), FAIL_TO_PASS="[]"))
    async with slots(pool, 1) as (exec_tool,):
        workspace = await set_up.set_up(row, exec_tool)
        await narrow(exec_tool, sealed=True)
        reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=1, valid_calls=1)
        assert (reward, meta["tests"]["passed_count"], meta["tests"]["not_passed"]) == (0.0, 59, ("tests/test_many.py::test_many[57]",))


@pytest.mark.parametrize("mode", ["bwrap"])
async def test_a_failure_counts_whatever_the_code_under_test_does_to_its_scoring(
    pool: PoolConnection, row: SweRow, set_up: WorkspaceSetUp, scorer: Scorer
) -> None:
    async with slots(pool, 1) as (exec_tool,):
        workspace = await set_up.set_up(row, exec_tool)
        await narrow(exec_tool, sealed=True)
        for name, source in DISTURBING.items():
            await exec_tool("write_file", {"path": "repo/src/fairsum/add.py", "content": source})
            reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=1, valid_calls=1)
            assert (reward, meta["tests"]["regressed"]) == (0.0, True), (name, meta)
        # Its project cannot be installed either, so the reward is that of its valid calls.
        await exec_tool("write_file", {"path": "repo/src/fairsum/add.py", "content": EXPECTED_FAILURES})
        await shell(exec_tool, "rm repo/pyproject.toml")
        await exec_tool("write_file", {"path": "repo/setup.py", "content": KILLING_SETUP})
        reward, meta = await scorer.score(row, exec_tool, workspace, tool_calls=1, valid_calls=1)
        tests = meta["tests"]
        assert (reward, tests["passed_count"], tests["regressed"], tests["installs"]) == (0.05, 3, False, False), meta
        assert set(tests["not_passed"]) == set(row.fail_to_pass), meta
