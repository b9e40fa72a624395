"""Run tests with pytest in processes of their own, and count which passed.

The process that runs this file imports nothing that a model could have changed, and cannot be traced by the tests. It alone knows the nonce of the reply,
and reads the result of each test from a pipe. The tests run in the same process as pytest, so code under test that is written to deceive pytest can do so.
"""

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, List, Sequence, Set

from environments.swe_smith.in_slot.base import SHOWN_CHARACTERS, StepError, protect_from_children, repository, run_step, workspace

PR_SET_CHILD_SUBREAPER = 36
#: How much one process of pytest may report, in bytes.
MAX_REPORT_BYTES = 4 << 20
#: How many of the tests that did not pass are named.
MAX_NAMED = 20
#: How long a test id is shown, in characters.
SHOWN_ID_CHARACTERS = 200


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(run_tests, request, nonce)


def run_tests(request: Dict[str, Any]) -> Dict[str, Any]:
    """Run the tests, chunk by chunk.

    Args:
        request: `chunks` (lists of test ids), `runner` (the source of `pytest_runner.py`), `description` (of the environment).

    Returns:
        `passed`: the positions of the tests that passed, see `as_bits`; `log`: the end of what pytest wrote for the first chunk in which one failed.

    Raises:
        StepError: this process cannot be protected from the tests.
    """
    protect_from_children()
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise StepError("the process that runs the tests cannot be protected from them")
    folder = tempfile.mkdtemp(prefix="swe-score-")
    passed: List[int] = []
    log, start = "", 0
    try:
        for number, chunk in enumerate(request["chunks"]):
            written = _run_chunk(chunk, request, os.path.join(folder, str(number)))
            passed.extend(start + position for position in sorted(written["passed"]))
            if len(written["passed"]) < len(chunk) and not log:
                log = written["log"]
            start += len(chunk)
    except (OSError, MemoryError) as error:  # the tests have the user of this process: they can remove its files, and lower its limits
        log = log or "the tests were not all run, because they disturbed the process that runs them: %s" % error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"passed": as_bits(passed), "log": log}


def as_bits(numbers: Sequence[int]) -> str:
    """Return numbers as the bits of a hexadecimal number, which is short however many tests there are: an output that is too long is cut."""
    return "%x" % sum(1 << number for number in numbers)


def _run_chunk(chunk: List[str], request: Dict[str, Any], folder: str) -> Dict[str, Any]:
    """Run one chunk in a new process. Returns the positions of the tests that passed, and the end of the log."""
    home = os.path.join(folder, "home")
    os.makedirs(home)
    ids_path, log_path = os.path.join(folder, "tests.json"), os.path.join(folder, "log")
    with open(ids_path, "w") as file:
        json.dump(chunk, file)
    token = os.urandom(16).hex()
    order = {"ids": ids_path, "token": token, "repository": repository(), **request["description"]}
    python = os.path.join(workspace(), ".env", "bin", "python")
    read_end, write_end = os.pipe()
    with open(log_path, "wb") as log:
        child = subprocess.Popen(
            [python, "-I", "-S", "-c", "import json, sys; exec(compile(json.loads(sys.stdin.readline()), 'pytest_runner', 'exec'))"],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=repository(), env=_environment(home), pass_fds=[write_end], start_new_session=True,
        )  # fmt: skip
    os.close(write_end)
    assert child.stdin is not None
    try:
        order["report_fd"] = write_end
        child.stdin.write(json.dumps(request["runner"]).encode() + b"\n" + json.dumps(order).encode() + b"\n")
        child.stdin.close()
    except BrokenPipeError:
        pass  # it has ended already, and reported nothing
    lines = _read_report(read_end, child)
    _end_all(child)
    passed = _passed(lines, token, len(chunk))
    with open(log_path, "rb") as file:
        file.seek(max(0, os.path.getsize(log_path) - SHOWN_CHARACTERS))
        return {"passed": passed, "log": file.read(SHOWN_CHARACTERS).decode("utf-8", "replace")}


def _environment(home: str) -> Dict[str, str]:
    """Return the environment variables of the tests: nothing of the model's, and a PATH on which only the environment and the system are."""
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "LC_ALL", "TERM", "TZ", "OMP_NUM_THREADS", "PYTHON_CPU_COUNT")}
    path = os.path.join(workspace(), ".env", "bin") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {
        **kept, "PATH": path, "HOME": home, "TMPDIR": home, "PYTHONNOUSERSITE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "VIRTUAL_ENV": os.path.join(workspace(), ".env"), "GIT_CONFIG_NOSYSTEM": "1",
    }  # fmt: skip


def _read_report(read_end: int, child: "subprocess.Popen[bytes]") -> bytes:
    """Read the pipe until pytest has ended. A process that it leaves behind may keep the pipe open."""
    report, ended = b"", False
    with open(read_end, "rb", buffering=0) as pipe:
        while len(report) < MAX_REPORT_BYTES:
            if not select.select([pipe], [], [], 0 if ended else 0.05)[0]:
                if ended:
                    break
                ended = child.poll() is not None
                continue
            data = pipe.read(65536)
            if not data:
                break
            report += data
    child.wait()
    return report


def _end_all(child: "subprocess.Popen[bytes]") -> None:
    """End what the tests have left running: it would see, and could change, the next chunk."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        children = _children()
        if not children:
            return
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _children() -> Set[int]:
    """Return the children of this process; processes whose parents have ended become its children."""
    own, found = os.getpid(), set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name) as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == own:
                found.add(int(name))
    return found


def _passed(report: bytes, token: str, count: int) -> Set[int]:
    """Return the positions of the tests of which the report, line by line, says that they passed."""
    pattern = re.compile(r"^%s (\d{1,6}) passed$" % token)
    found = (pattern.match(line) for line in report.decode("ascii", "replace").splitlines())
    return {int(match.group(1)) for match in found if match and int(match.group(1)) < count}


if sys.version_info < (3, 8):  # noqa: UP036 - the slot decides about the version
    raise SystemExit("the tests need Python 3.8 or later")
