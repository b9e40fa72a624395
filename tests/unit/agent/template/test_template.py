"""What the template of slots imports, and what its forks have in common: their memory, but no random numbers, and not the template as their parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sandbox_server.agent.template import system_calls
from tests.support.users import ROOT
from tests.unit.agent.init.test_imports import LARGE_MODULES

NAMES = "import sys; sys.path.insert(0, sys.argv[1]); import sandbox_server.agent.template.template; print(*sys.modules)"
FORKS = """
import os, random, sys
sys.path.insert(0, sys.argv[1])
from sandbox_server.agent.template import system_calls
for _ in range(2):
    if system_calls.fork_sibling(0) == 0:
        os.write(1, ("%d %d %r %s\\n" % (os.getppid(), os.getpid(), random.random(), os.urandom(8).hex())).encode())
        os._exit(0)
"""
# Fills the keys that an ordinary user may have, and asks for another session keyring.
KEYRINGS = """
import ctypes, errno, os, sys
sys.path.insert(0, sys.argv[1])
from sandbox_server.agent.template import system_calls
os.setresuid(1999999999, 1999999999, 1999999999)
system_calls.join_new_session_keyring(needs_new=True)
libc, add_key, number = ctypes.CDLL(None, use_errno=True), {"x86_64": 248, "aarch64": 217}[os.uname().machine], 0
while libc.syscall(ctypes.c_long(add_key), b"keyring", b"%d" % number, None, ctypes.c_size_t(0), ctypes.c_int(-3)) > 0:
    number += 1
print(errno.errorcode[ctypes.get_errno()])
system_calls.join_new_session_keyring(needs_new=False)
system_calls.join_new_session_keyring(needs_new=True)
"""


@pytest.mark.privileged
def test_a_slot_starts_even_if_its_user_can_have_no_further_keyring() -> None:
    done = subprocess.run([sys.executable, "-I", "-B", "-c", KEYRINGS, str(ROOT)], capture_output=True, text=True, check=False)
    if done.stdout in ("ENOSYS\n", "EPERM\n"):
        pytest.skip("keyrings cannot be used here")

    assert done.stdout == "EDQUOT\n"
    assert done.stderr.splitlines()[-1] == "OSError: [Errno 122] keyctl: Disk quota exceeded"


def test_the_template_imports_no_large_module() -> None:
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", NAMES, str(ROOT)], capture_output=True, text=True, check=True)
    names = set(done.stdout.split())

    assert not names & LARGE_MODULES
    assert {name.split(".")[2] for name in names if name.startswith("sandbox_server.agent.")} == {"init", "template"}


def test_forks_are_children_of_the_parent_and_draw_their_own_random_numbers() -> None:
    read_end, write_end = os.pipe()
    template = os.posix_spawn(sys.executable, [sys.executable, "-I", "-B", "-c", FORKS, str(ROOT)], {}, file_actions=[(os.POSIX_SPAWN_DUP2, write_end, 1)])
    os.close(write_end)
    with os.fdopen(read_end) as output:
        lines = [line.split() for line in output]
    ended = {os.waitpid(int(pid), 0) for _, pid, _, _ in lines}

    assert os.waitpid(template, 0) == (template, 0)
    assert ended == {(int(pid), 0) for _, pid, _, _ in lines}
    assert [int(parent) for parent, *_ in lines] == [os.getpid()] * 2
    assert len({number for _, _, number, _ in lines}) == len({number for *_, number in lines}) == 2


def test_a_refused_system_call_is_an_error_with_its_name() -> None:
    with pytest.raises(OSError, match="setns"):
        system_calls.join_namespace(-1, system_calls.CLONE_NEWNS)
