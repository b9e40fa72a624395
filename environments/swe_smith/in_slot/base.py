"""What the scripts share: the reply to the environment, subprocesses, Git, and the folders of the workspace."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

PR_SET_DUMPABLE = 4
#: How much of what a program wrote is shown in a message, in characters.
SHOWN_CHARACTERS = 1500
#: The names of files with which pytest is configured.
SETTINGS_NAMES = ("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")


class RowError(Exception):
    """The row of the data set cannot be used."""


class StepError(Exception):
    """The step failed, through no fault of the row."""


def run_step(step: Callable[[Dict[str, Any]], Dict[str, Any]], request: Dict[str, Any], nonce: str) -> None:
    """Run a step and write its reply to standard output, as one line that begins with the nonce."""
    try:
        reply = {"done": step(request)}
    except RowError as error:
        reply = {"row_error": {"message": str(error)}}
    except StepError as error:
        reply = {"step_error": {"message": str(error)}}
    except Exception:  # a mistake in a step: the environment must learn of it, and gets the traceback
        reply = {"step_error": {"message": traceback.format_exc()[-SHOWN_CHARACTERS:]}}
    sys.stdout.write("\n%s%s\n" % (nonce, json.dumps(reply)))
    sys.stdout.flush()


def protect_from_children() -> None:
    """Deny the processes of the same user access to the memory and the open files of this process, before code of the model runs.

    Raises:
        StepError: the kernel has refused it.
    """
    if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise StepError("the process that counts the results cannot be protected from the model's code")


def workspace() -> str:
    """Return the working folder of the slot."""
    return os.path.realpath(os.environ.get("SANDBOX_WORKSPACE") or os.getcwd())


def repository() -> str:
    """Return the folder of the repository."""
    return os.path.join(workspace(), "repo")


def cache_folder() -> Optional[str]:
    """Return the folder of the set-up cache, or None if the slot has none."""
    path = os.environ.get("SANDBOX_CACHE")
    if not path or not os.path.isdir(path):
        return None
    folder = os.path.join(path, "swe_smith")
    os.makedirs(folder, exist_ok=True)
    return folder


def last_lines(text: str) -> str:
    """Return the end of what a program wrote, for a message."""
    return text.strip()[-SHOWN_CHARACTERS:] or "(it wrote nothing)"


def run(
    words: Sequence[str], cwd: Optional[str] = None, env: Optional[Dict[str, str]] = None, timeout_s: Optional[float] = None, data: Optional[bytes] = None
) -> Tuple[int, str]:
    """Run a program; return its exit code and what it wrote. A program that takes longer than `timeout_s` seconds is ended, with the exit code -1."""
    try:
        ended = subprocess.run(
            list(words),
            cwd=cwd,
            env=env,
            timeout=timeout_s,
            input=data if data is not None else b"",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return -1, (error.stdout or b"").decode("utf-8", "replace") + "\nended after %.0f s" % (timeout_s or 0)
    except OSError as error:
        return -1, str(error)
    return ended.returncode, ended.stdout.decode("utf-8", "replace")


class Git:
    """Git without the configuration of the machine or of a user, for set-up alone: nothing that a model wrote is there yet."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="swe-git-")
        settings = os.path.join(self.folder, ".gitconfig")
        with open(settings, "w") as file:
            file.write(
                "[safe]\n\tdirectory = *\n[core]\n\thooksPath = /dev/null\n\tlogAllRefUpdates = false\n[gc]\n\tauto = 0\n[advice]\n\tdetachedHead = false\n"
            )
        kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or name in ("GIT_SSL_CAINFO", "GIT_SSL_NO_VERIFY")}
        self.env = {
            **kept,
            "HOME": self.folder,
            "GIT_CONFIG_GLOBAL": settings,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_ASKPASS": "/bin/false",
            "GCM_INTERACTIVE": "never",
            "LC_ALL": "C",
        }

    def __enter__(self) -> "Git":
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *words: str, cwd: Optional[str] = None, data: Optional[bytes] = None, timeout_s: Optional[float] = None) -> Tuple[int, str]:
        """Run `git WORDS`; return its exit code and what it wrote."""
        return run(["git", *words], cwd=cwd, env=self.env, data=data, timeout_s=timeout_s)

    def check(self, *words: str, cwd: Optional[str] = None, data: Optional[bytes] = None) -> str:
        """Run `git WORDS` and return what it wrote.

        Raises:
            StepError: it failed.
        """
        code, output = self.run(*words, cwd=cwd, data=data)
        if code != 0:
            raise StepError("git %s failed (%d): %s" % (" ".join(words[:3]), code, last_lines(output)))
        return output


def write_commit_pack(git: Git, repo: str, commit: str, path: str) -> None:
    """Write a pack with the objects of one commit, its trees and its files, and no other commit.

    Raises:
        StepError: Git failed.
    """
    listed = git.check("rev-list", "--objects", "--no-walk", commit, cwd=repo)
    partial = "%s.%d" % (path, os.getpid())
    with open(partial, "wb") as target:
        packed = subprocess.run(
            ["git", "pack-objects", "-q", "--stdout"], cwd=repo, env=git.env, input=listed.encode(), stdout=target, stderr=subprocess.PIPE, check=False
        )
    if packed.returncode != 0:
        os.unlink(partial)
        raise StepError("git pack-objects failed: %s" % last_lines(packed.stderr.decode("utf-8", "replace")))
    os.chmod(partial, 0o664)
    os.rename(partial, path)


def tracked_files(git: Git, *options: str) -> List[str]:
    """Return the paths of the tracked files of the repository, or with options of `git ls-files`, other files."""
    return [path for path in git.check("ls-files", "-z", *options, cwd=repository()).split("\0") if path]
