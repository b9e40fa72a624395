"""An embedded service ends with the process that started it, even if a forked child of that process keeps the pipe open."""

from __future__ import annotations

import os
import select
import subprocess
import sys

END_S = 30.0
FORKING = """
import os, signal, sys
from env_client import embedded
service = embedded({"default": {"slots_per_sandbox": 1, "min_sandboxes": 1, "max_sandboxes": 1}})
child = os.fork()
if child == 0:
    signal.pause()
print(service.pid, child, flush=True)
signal.pause()
"""


def test_it_ends_though_a_forked_child_lives_on() -> None:
    with subprocess.Popen([sys.executable, "-c", FORKING], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        service, child = map(int, owner.stdout.readline().split())
        ending = os.pidfd_open(service)
        owner.kill()
        owner.wait()
        try:
            assert select.select([ending], [], [], END_S)[0]
            os.kill(child, 0)
        finally:
            os.kill(child, 9)
            os.close(ending)
