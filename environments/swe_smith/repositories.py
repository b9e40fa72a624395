"""Where repositories come from: a Git server that the slot asks, or a folder of this machine, out of which this process packs one commit."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from environments.dataset_rows import UnusableRow

DEFAULT_BASE_URL = "https://github.com"
#: How long Git may take to pack one commit, in seconds.
PACK_TIMEOUT_S = 300.0


class RepositoryError(Exception):
    """The setting `repo_base_url` cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class GitServer:
    """A Git server, such as `https://github.com`.

    Args:
        base_url: the address, to which `/owner/name` is added.
    """

    base_url: str

    def url(self, repo: str) -> str:
        """Return the address of a repository."""
        return f"{self.base_url.rstrip('/')}/{repo}"


@dataclass(frozen=True, slots=True)
class LocalRepositories:
    """A folder of this machine that holds `owner/name` or `owner/name.git`.

    Args:
        folder: the folder.
    """

    folder: Path

    def find(self, repo: str) -> Path:
        """Return the folder of a repository.

        Raises:
            UnusableRow: there is none.
        """
        for path in (self.folder / repo, self.folder / f"{repo}.git"):
            if path.is_dir():
                return path
        raise UnusableRow(f"the repository {repo} is not in {self.folder}: there is neither {repo} nor {repo}.git")


def parse_base_url(text: str) -> GitServer | LocalRepositories:
    """Return where repositories come from.

    Args:
        text: the setting `repo_base_url`: an http(s) address, or the path of a folder.

    Raises:
        RepositoryError: it is neither.
    """
    scheme = urlsplit(text).scheme
    if scheme in ("http", "https"):
        return GitServer(text)
    if scheme and "://" in text:
        raise RepositoryError(f"repo_base_url: {scheme} is not supported; give an https address, or the path of a folder that holds owner/name")
    folder = Path(text).expanduser()
    if not text or not folder.is_dir():
        raise RepositoryError(f"repo_base_url: {text or '(empty)'} is neither an https address nor a folder of this machine")
    return LocalRepositories(folder.resolve())


def repository_key(base_url: str, repo: str) -> str:
    """Return the name of a repository in the set-up cache: the same repository from another place has another name."""
    return hashlib.sha256(f"{base_url}\n{repo}".encode()).hexdigest()[:24]


class CommitPacker:
    """Packs single commits of local repositories. A pack stays in a temporary folder until `close`, so a group packs its commit once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="swe-packs-")
        self._locks: dict[str, asyncio.Lock] = {}

    def close(self) -> None:
        """Delete the packs."""
        self._folder.cleanup()

    async def pack(self, repository: Path, repo: str, commit: str) -> Path:
        """Return a file with the pack of one commit: its trees and files, and no other commit.

        Args:
            repository: the folder of the repository.
            repo: its name, for messages.
            commit: the id of the commit.

        Raises:
            UnusableRow: there is no such commit, or no such repository.
        """
        path = Path(self._folder.name) / f"{hashlib.sha256(str(repository).encode()).hexdigest()[:24]}-{commit}.pack"
        async with self._locks.setdefault(path.name, asyncio.Lock()):
            if not path.exists():
                await asyncio.to_thread(_pack_commit, repository, repo, commit, path)
        return path


def _pack_commit(repository: Path, repo: str, commit: str, path: Path) -> None:
    checked = _git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
    if checked.returncode != 0:
        if _git(repository, "rev-parse", "--git-dir").returncode != 0:
            raise UnusableRow(f"the folder {repository} of {repo} is not a Git repository: {checked.stderr.decode(errors='replace').strip()[:500]}")
        raise UnusableRow(f"the repository {repo} in {repository} has no commit {commit}")
    listed = _git(repository, "rev-list", "--objects", "--no-walk", commit)
    packed = _git(repository, "pack-objects", "-q", "--stdout", data=listed.stdout) if listed.returncode == 0 else listed
    if packed.returncode != 0:
        raise UnusableRow(f"the commit {commit} of {repo} cannot be packed: {packed.stderr.decode(errors='replace').strip()[:500]}")
    partial = path.with_suffix(".part")
    partial.write_bytes(packed.stdout)
    partial.rename(path)


def _git(repository: Path, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return subprocess.run(["git", "-C", str(repository), *words], input=data, env=env, capture_output=True, timeout=PACK_TIMEOUT_S, check=False)
