"""Build the environment of a repository: a virtual environment with its dependencies, and an editable install of the project."""

import glob
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from typing import Any, Dict, List

from environments.swe_smith.in_slot.base import RowError, StepError, cache_folder, last_lines, repository, run, run_step, workspace

#: Extras with which projects name what their tests need.
TEST_EXTRAS = ("test", "tests", "testing", "dev")
#: Files with which projects name what their tests need.
REQUIREMENT_FILES = (
    "requirements.txt", "requirements-dev.txt", "requirements_dev.txt", "dev-requirements.txt", "requirements-test.txt", "requirements_test.txt",
    "requirements-tests.txt", "test-requirements.txt", "test_requirements.txt", "requirements/dev.txt", "requirements/test.txt", "requirements/tests.txt",
    "tests/requirements.txt",
)  # fmt: skip
#: What pip says when it cannot reach its index.
NO_INDEX = (
    "connection broken",
    "max retries exceeded",
    "temporary failure in name resolution",
    "connecttimeout",
    "readtimeout",
    "network is unreachable",
    "newconnectionerror",
)
DESCRIBE = """
import importlib.util, json, sys, sysconfig
has = (importlib.util.find_spec(name) is not None for name in ("pytest", "pygments"))
print(json.dumps([sysconfig.get_path("purelib"), "%d.%d" % sys.version_info[:2], *has]))
"""
#: The file in the environment that describes it.
DESCRIPTION = "swe_smith.json"


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(build_environment, request, nonce)


def build_environment(request: Dict[str, Any]) -> Dict[str, Any]:
    """Build the environment, or unpack it from the cache of the sandbox.

    Args:
        request: `key` (names the environment in the cache), `online` (whether pip may use its index), and `timeout_s` for all of it, in seconds.

    Returns:
        `description` if the environment came from the cache, else null; `install`, `site_packages`, `python_version`,
        `has_pytest` and `has_pygments` of one that was just built.

    Raises:
        RowError: the project cannot be installed.
        StepError: the slot has no usable Python.
    """
    folder = os.path.join(workspace(), ".env")
    cached = os.path.join(cache_folder() or "/nonexistent", "environment-%s.tar" % request["key"])
    if os.path.exists(cached):
        with tarfile.open(cached) as archive:
            # Set-up wrote the archive, and it has absolute links, which newer versions of Python refuse by default.
            archive.extraction_filter = getattr(tarfile, "fully_trusted_filter", None)
            archive.extractall(workspace())
        with open(os.path.join(folder, DESCRIPTION)) as file:
            return {"description": json.load(file)}
    shutil.rmtree(folder, ignore_errors=True)
    _create(folder)
    python = os.path.join(folder, "bin", "python")
    how = Installer(python, request["online"], time.monotonic() + request["timeout_s"]).install()
    code, output = run([python, "-I", "-c", DESCRIBE], cwd="/")
    if code != 0:
        raise StepError("the Python of the new environment does not run: %s" % last_lines(output))
    site_packages, version, has_pytest, has_pygments = json.loads(output.strip().splitlines()[-1])
    if how == "path":
        _add_paths(site_packages)
    built = {"install": how, "site_packages": site_packages, "python_version": version, "has_pytest": has_pytest, "has_pygments": has_pygments}
    return {"description": None, **built}


def _create(folder: str) -> None:
    """Create the virtual environment. It also sees what is installed beside the interpreter of the slot, which is all there is without a network."""
    code, output = run([sys.executable, "-I", "-S", "-m", "venv", "--system-site-packages", "--without-pip", folder])
    if code != 0:
        raise StepError("the Python of the slot (%s) cannot create a virtual environment: %s" % (sys.executable, last_lines(output)))
    # The interpreter may itself be that of a virtual environment, whose packages the new one would not see.
    code, output = run([sys.executable, "-I", "-c", "import json, site, sys; print(json.dumps([sys.prefix != sys.base_prefix, site.getsitepackages()]))"])
    nested, folders = json.loads(output.strip().splitlines()[-1]) if code == 0 else (False, [])
    for own in glob.glob(os.path.join(folder, "lib", "python*", "site-packages")) if nested else []:
        with open(os.path.join(own, "outer_environment.pth"), "w") as file:
            file.write("".join(path + "\n" for path in folders))


def _add_paths(site_packages: str) -> None:
    """Make the sources importable without an install: for a project that cannot be built with what is there."""
    paths = [path for path in (os.path.join(repository(), "src"), repository()) if os.path.isdir(path)]
    with open(os.path.join(site_packages, "repository.pth"), "w") as file:
        file.write("".join(path + "\n" for path in paths))


class Installer:
    """Installs the project: with what is there, and if that is not enough, from the index of pip.

    Args:
        python: the interpreter of the environment.
        online: whether pip may use its index.
        deadline: when all of it must be done, as `time.monotonic()`.
    """

    def __init__(self, python: str, online: bool, deadline: float) -> None:
        self._python = python
        self._online = online and os.environ.get("PIP_NO_INDEX", "").lower() not in ("1", "true", "yes", "on")
        self._deadline = deadline
        # The folder is outside of the workspace, and the cache of pip in it goes with the set-up cache.
        self._home = tempfile.mkdtemp(prefix="swe-pip-")
        pip_cache = os.path.join(cache_folder() or self._home, "pip")
        self._env = {**os.environ, "HOME": self._home, "PIP_CACHE_DIR": pip_cache, "PYTHONNOUSERSITE": "1", "GIT_TERMINAL_PROMPT": "0"}

    def install(self) -> str:
        """Install the project; return how: `offline`, `index`, or `path` if it is only made importable.

        Raises:
            RowError: the project cannot be installed although the index can be reached.
        """
        try:
            return self._install()
        finally:
            shutil.rmtree(self._home, ignore_errors=True)

    def _install(self) -> str:
        installable = any(os.path.exists(os.path.join(repository(), name)) for name in ("setup.py", "pyproject.toml"))
        has_pip = run([self._python, "-I", "-c", "import importlib.util; raise SystemExit(importlib.util.find_spec('pip') is None)"])[0] == 0
        if not has_pip and run([self._python, "-I", "-m", "ensurepip"])[0] != 0:
            return "path"
        offline = installable and self._pip("--no-index", "--no-build-isolation", "-e", repository())[0] == 0
        requirements = [path for path in REQUIREMENT_FILES if os.path.isfile(os.path.join(repository(), path))]
        extras = _test_extras()
        if not self._online or (offline and not requirements and not extras):
            return "offline" if offline else "path"
        return self._install_from_index(installable, offline, extras, requirements)

    def _install_from_index(self, installable: bool, offline: bool, extras: List[str], requirements: List[str]) -> str:
        for path in requirements:
            self._pip("-r", os.path.join(repository(), path))  # what is missing in the end, the tests show
        if not installable:
            return "path"
        wanted = ["%s[%s]" % (repository(), ",".join(extras))] if extras else []
        output = ""
        for project in [*wanted, repository()]:
            code, output = self._pip("-e", project)
            if code == 0:
                return "index"
        if offline:
            return "offline"
        if any(text in output.lower() for text in NO_INDEX):
            return "path"
        raise RowError("its project cannot be installed: %s" % last_lines(output))

    def _pip(self, *words: str) -> "tuple[int, str]":
        common = ["--quiet", "--disable-pip-version-check", "--no-input", "--no-warn-script-location", "--retries", "1", "--timeout", "20"]
        left_s = max(1.0, self._deadline - time.monotonic())
        return run([self._python, "-I", "-m", "pip", "install", *common, *words], cwd=self._home, env=self._env, timeout_s=left_s)


def _test_extras() -> List[str]:
    """Return those of the usual extras that the project seems to have. pip only warns of one that it has not."""
    text = ""
    for name in ("pyproject.toml", "setup.cfg", "setup.py"):
        path = os.path.join(repository(), name)
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                text += file.read()
    if "extras_require" not in text and "optional-dependencies" not in text:
        return []
    return [extra for extra in TEST_EXTRAS if re.search(r"^\s*[\"']?%s[\"']?\s*[:=]" % extra, text, re.MULTILINE)]
