"""Two slots of one sandbox that cooperate: one opens what it has to the other, which then tries to change the read-only entries of the first.

The other slot has a mount namespace of its own, in which an entry of the first is no mount point, so nothing there would refuse to move it.
"""

from __future__ import annotations

import ctypes
import os
import platform

import pytest

from tests.hostile.hostile_harness import HostileHarness

pytestmark = pytest.mark.privileged

_LANDLOCK_CREATE_RULESET, _LANDLOCK_RETURN_VERSION, _VERSION_WITH_SCOPES = 444, 1, 6
# The end of a program that listens: in the background, it passes its folder to the first that connects, and keeps the connection open.
PASS_ON = r"""
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for number in (0, 1, 2): os.dup2(null, number)
client, _ = server.accept()
socket.send_fds(client, [b"x"], [os.open(".", os.O_RDONLY)])
client.recv(1)
"""
# The first slot: it opens its folders to everybody, and waits in the background for somebody to pass an open folder to.
OPEN_UP = r"""
import os, socket
for path in (".", ".."):
    try: os.chmod(path, 0o777)
    except OSError: pass
server = socket.socket(socket.AF_UNIX)
server.bind("\0" + os.environ["NAME"])
server.listen(1)
server.settimeout(60)
if os.fork():
    print(os.getcwd())
    os._exit(0)
"""
# The second slot: it gets that folder, or opens it by its path, and replaces the entry.
REPLACE = r"""
import os, socket
done = []
def replace(folder):
    os.rename("tests", "moved", src_dir_fd=folder, dst_dir_fd=folder)
    os.mkdir("tests", 0o777, dir_fd=folder)
    done.append(folder)
client = socket.socket(socket.AF_UNIX)
try:
    client.connect("\0" + os.environ["NAME"])
    replace(socket.recv_fds(client, 1, 1)[1][0])
except OSError as error: print("socket:", error.strerror)
try:
    replace(os.open(os.environ["FOLDER"], os.O_RDONLY))
except OSError as error: print("path:", error.strerror)
print("replaced", len(done))
"""
# The first slot again: it passes its empty workspace through a socket in the cache that both have.
PASS_FOLDER = r"""
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind("/cache/socket")
os.chmod("/cache/socket", 0o777)
server.listen(1)
server.settimeout(60)
if os.fork():
    os._exit(0)
"""
# The second slot keeps that folder open after the first has been given back, and lists it whenever another of its commands asks for that.
KEEP_FOLDER = r"""
import os, socket
client = socket.socket(socket.AF_UNIX)
client.connect("/cache/socket")
folder = socket.recv_fds(client, 1, 1)[1][0]
for name in ("/tmp/ask", "/tmp/answer"): os.mkfifo(name)
if os.fork():
    os._exit(0)
os.setsid()
null = os.open("/dev/null", os.O_RDWR)
for number in (0, 1, 2): os.dup2(null, number)
while True:
    open("/tmp/ask").read()
    names = os.listdir(folder)
    with open("/tmp/answer", "w") as answer: print("listed", names, file=answer)
"""
LIST_FOLDER = "echo > /tmp/ask; cat /tmp/answer"


def has_scopes() -> bool:
    """Whether the kernel can separate the abstract sockets of slots."""
    if platform.system() != "Linux":
        return False
    version = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_LANDLOCK_RETURN_VERSION))
    return bool(version >= _VERSION_WITH_SCOPES)


def test_a_slot_that_cooperates_cannot_move_the_read_only_entries_of_another(harness: HostileHarness) -> None:
    if not has_scopes():
        pytest.skip("this kernel has no Landlock with scopes (Linux 6.12), so slots that share a network can pass open files to each other")
    first, second = harness.acquire(), harness.acquire()
    for lease in (first, second):
        assert harness.bash(lease, "mkdir tests; echo kept > tests/expected")["success"]
        answer = harness.post(f"/v1/leases/{lease['lease_id']}/narrow", {"read_only": ["tests"]})
        assert answer.status_code == 200, answer.text
    name = f"cooperate-{os.urandom(8).hex()}"
    opened = harness.python(first, OPEN_UP + PASS_ON, NAME=name)
    assert opened["success"], opened

    tried = harness.python(second, REPLACE, NAME=name, FOLDER=opened["output"].strip())

    assert "socket: Operation not permitted" in tried["output"], tried
    assert tried["output"].splitlines()[-1] == "replaced 0", tried
    assert harness.bash(first, "cat tests/expected; ls")["output"] == "kept\ntests\n"


def test_a_slot_reaches_its_own_abstract_sockets(harness: HostileHarness) -> None:
    own = (
        "import os, socket\nserver = socket.socket(socket.AF_UNIX)\nserver.bind('\\0' + os.environ['NAME'])\nserver.listen(1)\n"
        "if not os.fork():\n    socket.socket(socket.AF_UNIX).connect('\\0' + os.environ['NAME'])\n    os._exit(0)\n"
        "server.accept()\nprint(os.wait()[1])"
    )
    result = harness.python(harness.acquire(), own, NAME=f"own-{os.urandom(8).hex()}")
    assert result["output"] == "0\n", result


def test_a_folder_that_a_slot_has_passed_on_is_not_that_of_the_next_holder(harness: HostileHarness) -> None:
    if harness.mode != "bwrap":
        pytest.skip("only this mode has caches, through which slots with the same one can pass open files")
    run_id = f"pass-{os.urandom(8).hex()}"
    first, second = (harness.acquire(cache="rw", run_id=run_id) for _ in range(2))
    passed = harness.python(first, PASS_FOLDER + PASS_ON)
    assert passed["success"], passed
    kept = harness.python(second, KEEP_FOLDER)
    assert kept["success"], kept
    assert harness.bash(second, LIST_FOLDER)["output"] == "listed []\n"
    harness.release(first)
    for _ in range(2):  # A runtime that is prepared while the first slot is reset gets what it has left, and serves the slot that is reset after it.
        harness.settled()
        others = [harness.acquire(), harness.acquire()]
        for lease in others:
            assert harness.bash(lease, "echo secret > secret; chmod 777 . secret")["success"]
        assert harness.bash(second, LIST_FOLDER)["output"] == "listed []\n"
        harness.release(*others)
