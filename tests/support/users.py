"""Running programs as another user: tests that run as root start services as an ordinary user, who cannot read root's home or virtual environment."""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
OUR_PACKAGES = ("sandbox_server", "env_client")
DISTRIBUTION = "sandbox-pool"
ORDINARY_USER = "nobody"
#: For further workers of pytest-xdist: ids that no user of the machine has, and no slot.
FURTHER_UIDS = range(64_000, 65_000)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A user for processes, with an interpreter and a folder that this user can read."""

    name: str
    python: str
    cwd: Path
    uid: int
    gid: int
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def popen_options(self) -> dict[str, Any]:
        """The options of `subprocess.Popen` that start a process as this user."""
        if self.uid == os.geteuid():
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        """Make this user the owner of `path`."""
        if self.uid != os.geteuid():
            os.chown(path, self.uid, self.gid)

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as this user and return the completed process."""
        environ = {**os.environ, **self.environ, **options.pop("env", {})}
        return subprocess.run(command, cwd=self.cwd, env=environ, text=True, capture_output=True, check=False, **self.popen_options, **options)


ME = Runner(name="root" if os.geteuid() == 0 else "user", python=sys.executable, cwd=ROOT, uid=os.geteuid(), gid=os.getegid())


@functools.cache
def ordinary_user() -> Runner:
    """Return an ordinary user with an interpreter and a copy of the service that the user can read.

    Not root ourselves: that is us. Root: `nobody`, with copies made once per process and removed at its end. Of several workers of pytest-xdist, each has a
    user of its own, because some tests use up what the kernel counts by user: processes, and descriptors in flight.
    """
    if os.geteuid() != 0:
        return ME
    entry = pwd.getpwnam(ORDINARY_USER)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    folder = _shared_folder()
    runner = Runner(
        name="user",
        python=str(_readable_python(folder)),
        cwd=folder,
        uid=entry.pw_uid if worker == 0 else FURTHER_UIDS.start + worker,
        gid=entry.pw_gid,
        environ={
            "PYTHONPATH": str(_readable_packages(folder)),
            "PYTHONPYCACHEPREFIX": "",
            "LD_LIBRARY_PATH": str(folder / "python" / "lib"),
            "HOME": "/nonexistent",
        },
    )
    probe = runner.run(runner.python, "-c", "import sandbox_server, fastapi, uvicorn, httpx")
    assert probe.returncode == 0, f"the copy for {ORDINARY_USER} does not import: {probe.stderr}"
    return runner


_folders: list[Path] = []


def _shared_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sp-user-", dir="/tmp"))
    if not _folders:
        atexit.register(remove_copies)
    _folders.append(folder)
    folder.chmod(0o755)
    return folder


def remove_copies() -> None:
    """Delete the copies that `ordinary_user` made."""
    ordinary_user.cache_clear()
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


def _readable_python(folder: Path) -> Path:
    """Return this interpreter if every user may run it, else the system's of the same version, else a copy with its standard library."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.executable).resolve()
    for interpreter in (own, Path("/usr/bin") / version, Path("/usr/local/bin") / version):
        if interpreter.exists() and all(part.stat().st_mode & 0o005 == 0o005 for part in (interpreter, *interpreter.parents)):
            return interpreter
    base, copy = Path(sys.base_prefix), folder / "python"
    (copy / "bin").mkdir(parents=True)
    shutil.copy2(own, copy / "bin" / version)
    unneeded = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "*.a", "config-*")
    shutil.copytree(base / "lib" / version, copy / "lib" / version, symlinks=True, ignore=unneeded)
    for library in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(library, copy / "lib" / library.name, follow_symlinks=False)
    return copy / "bin" / version


def _readable_packages(folder: Path) -> Path:
    """Return a folder with the project's packages and all their dependencies, which every user can import."""
    target = folder / "packages"
    target.mkdir()
    # The user cannot write there, and would compile every module again in every process. Most modules have been compiled for the tests already.
    subprocess.run([sys.executable, "-m", "compileall", "-q", *OUR_PACKAGES], check=True, cwd=ROOT)
    for name in OUR_PACKAGES:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=_link_or_copy)
        for source in (ROOT / name).rglob("*.py"):
            compiled = Path(importlib.util.cache_from_source(str(source)))
            cache = (target / source.relative_to(ROOT)).parent / "__pycache__"
            cache.mkdir(exist_ok=True)
            _link_or_copy(compiled, cache / compiled.name)
    for distribution in _needed({"server"}):
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            if ".." in file.parts or not source.is_file():
                continue
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(source, target / file)
    return target


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make a file that everybody can read appear in another folder: as another name of it if both are on one file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _needed(extras: set[str]) -> list[importlib.metadata.Distribution]:
    """Return the installed distributions that the project needs with these extras, including indirect dependencies."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [(DISTRIBUTION, frozenset(extras))]
    seen = set(waiting)
    while waiting:
        name, wanted = waiting.pop()
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a dependency for another platform or interpreter
        if name != DISTRIBUTION:
            found[name] = distribution
        for requirement in distribution.requires or ():
            text, _, condition = requirement.partition(";")
            extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", condition)
            if extra and extra.group(1) not in wanted:
                continue
            parsed = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^]]*)])?", text)
            assert parsed, requirement
            entry = (re.sub(r"[-_.]+", "-", parsed.group(1)).lower(), frozenset(part.strip() for part in (parsed.group(2) or "").split(",") if part.strip()))
            if entry not in seen:
                seen.add(entry)
                waiting.append(entry)
    return list(found.values())
