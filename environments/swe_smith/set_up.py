"""Set-up of a slot for a row: the repository at its commit, the environment, and what scoring needs. The model comes afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from environments.rollouts.exec_tool import ExecTool
from environments.swe_smith.pytest_bundle import packed_pytest, supports
from environments.swe_smith.repositories import CommitPacker, GitServer, LocalRepositories, repository_key
from environments.swe_smith.rows import SweRow, test_file
from environments.swe_smith.slot_steps import StepEnded, StepFailed, run_step, slot_files

log = logging.getLogger(__name__)

#: The entries of the workspace that the model can read and run, and must not change.
SEALED_ENTRIES = (".env", ".tests")
#: The file of an uploaded pack, in the workspace.
UPLOADED_PACK = ".uploaded.pack"
#: How long a step takes at most that neither installs nor fetches, in seconds.
STEP_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment that was built in a slot.

    Args:
        install: how the project is installed: `offline`, `index`, or `path` if its sources are only made importable.
        python: the interpreter on which the environment rests.
        python_version: such as `3.11`.
        pytest_version: such as `8.2.0`.
        plugins: the modules of the plugins of pytest.
        search_path: where modules are looked for, without the repository.
        late_import: whether pytest must not be imported before the repository, because the repository is a part of pytest.
        options: further options with which pytest accepts the settings of the repository.
    """

    install: str
    python: str
    python_version: str
    pytest_version: str
    plugins: list[str]
    search_path: list[str]
    late_import: bool
    options: list[str]


@dataclass(frozen=True, slots=True)
class Workspace:
    """What set-up has made in a slot. Scoring trusts this, and nothing that it finds in a slot in which a model has been.

    Args:
        repository: the path of the repository.
        test_folders: the folders that are kept whole, relative to the repository.
        environment: the environment.
        fetched: whether the commit was fetched or uploaded for this slot, rather than found in the cache of the sandbox.
        sealed: whether the model could not change `SEALED_ENTRIES`.
    """

    repository: str
    test_folders: tuple[str, ...]
    environment: Environment
    fetched: bool
    sealed: bool = True

    def as_meta(self) -> dict[str, Any]:
        """Return the value as the `workspace_meta` of a trajectory."""
        return asdict(self)

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Workspace:
        """Return the value of a `workspace_meta`."""
        known = {name: meta[name] for name in ("repository", "fetched", "sealed")}
        return cls(**known, test_folders=tuple(meta["test_folders"]), environment=Environment(**meta["environment"]))

    def unsealed(self) -> Workspace:
        """Return the value for a slot whose mode cannot make entries read-only."""
        return replace(self, sealed=False)


class WorkspaceSetUp:
    """Sets up slots.

    Args:
        repositories: where repositories come from.
        install_timeout_s: how long the environment may take, in seconds.
    """

    def __init__(self, repositories: GitServer | LocalRepositories, *, install_timeout_s: float) -> None:
        self._repositories = repositories
        self._install_timeout_s = install_timeout_s
        self._packer = CommitPacker()
        # The first slot of a sandbox fills its cache, and the other slots of a group wait for that.
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def close(self) -> None:
        """Delete the packs of local repositories."""
        self._packer.close()

    async def set_up(self, row: SweRow, exec_tool: ExecTool) -> Workspace:
        """Set up a slot for a row.

        Raises:
            UnusableRow: the repository or the commit does not exist, a file of the tests is not in it, or its project cannot be installed.
            StepFailed: set-up failed otherwise.
            RolloutFault: the slot was lost.
        """
        files = sorted({test_file(test) for test in (*row.pass_to_pass, *row.fail_to_pass)})
        try:
            async with self._lock(exec_tool, row):
                pack, fetched = await self._provide_commit(row, exec_tool)
            checked = await run_step(exec_tool, "check_out", {"pack": pack, "commit": row.base_commit, "tests": files}, timeout_s=STEP_TIMEOUT_S)
            async with self._lock(exec_tool, row):
                environment = await self._build_environment(row, exec_tool, files)
            kept = await run_step(exec_tool, "keep_tests", {"tests": files}, timeout_s=STEP_TIMEOUT_S)
        except StepEnded as ended:
            raise StepFailed(f"row {row.instance_id}: set-up was ended: {ended}") from ended
        return Workspace(checked["repository"], tuple(kept["folders"]), environment, fetched)

    def _lock(self, exec_tool: ExecTool, row: SweRow) -> asyncio.Lock:
        """Return the lock of a sandbox and a commit; one that nobody else has, where slots share no cache."""
        info = exec_tool.lease.info
        if info.cache == "none":
            return asyncio.Lock()
        return self._locks.setdefault((info.sandbox_id, row.base_commit), asyncio.Lock())

    async def _provide_commit(self, row: SweRow, exec_tool: ExecTool) -> tuple[str, bool]:
        """Return the path of the commit's pack in the slot, and whether it was not in the cache."""
        if isinstance(self._repositories, GitServer):
            request = {
                "key": repository_key(self._repositories.base_url, row.repo),
                "commit": row.base_commit,
                "repo": row.repo,
                "url": self._repositories.url(row.repo),
            }
            found = await run_step(exec_tool, "fetch_commit", request, timeout_s=self._install_timeout_s)
            return found["pack"], found["fetched"]
        repository = self._repositories.find(row.repo)
        request = {"key": repository_key(str(self._repositories.folder), row.repo), "commit": row.base_commit, "repo": row.repo}
        found = await run_step(exec_tool, "fetch_commit", request, timeout_s=STEP_TIMEOUT_S)
        if found["pack"] is None:
            packed = await self._packer.pack(repository, row.repo, row.base_commit)
            async with slot_files():
                await exec_tool.lease.put_file(UPLOADED_PACK, packed)
            found = await run_step(exec_tool, "fetch_commit", {**request, "upload": UPLOADED_PACK}, timeout_s=STEP_TIMEOUT_S)
        return found["pack"], found["fetched"]

    async def _build_environment(self, row: SweRow, exec_tool: ExecTool, files: list[str]) -> Environment:
        key = hashlib.sha256(f"{row.repo}\n{row.base_commit}".encode()).hexdigest()[:24]
        online = exec_tool.lease.info.allow_network
        request = {"key": key, "online": online, "timeout_s": self._install_timeout_s}
        built = await run_step(exec_tool, "build_environment", request, timeout_s=self._install_timeout_s + STEP_TIMEOUT_S)
        if built["description"] is not None:
            return Environment(**built["description"])
        if not built["has_pytest"]:
            await self._add_pytest(exec_tool, built)
        if built["install"] == "path":
            log.warning("row %s: the project %s could not be installed with what its slot has; its sources are only made importable", row.instance_id, row.repo)
        finish = {"key": key, "tests": files, **{name: built[name] for name in ("install", "site_packages", "python_version")}}
        finished = await run_step(exec_tool, "finish_environment", finish, timeout_s=STEP_TIMEOUT_S)
        return Environment(**finished["description"])

    async def _add_pytest(self, exec_tool: ExecTool, built: Mapping[str, Any]) -> None:
        if not supports(built["python_version"]):
            raise StepFailed(
                f"the slot has no pytest, and the one of this process does not run on its Python {built['python_version']}: use an image with pytest"
            )
        async with slot_files():
            await exec_tool.lease.put_archive(built["site_packages"], packed_pytest(with_pygments=not built["has_pygments"]))
