"""Interactive programs on a terminal, in every isolation mode."""

from __future__ import annotations

import json

import pytest

from tests.integration.terminals.conftest import MODES, TerminalHarness

#: Opens every terminal that the slot can name, and takes the controlling terminals of others, as a program that means harm would.
INTRUDER = """
import errno, fcntl, glob, os, termios
own, opened, denied = os.ttyname(0), [], []
for path in glob.glob("/dev/pts/[0-9]*"):
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY)
    except OSError as error:
        denied.append(error.errno)
        continue
    if path != own:
        opened.append(path)
try:
    fcntl.ioctl(0, termios.TIOCSTI, b"x")
    injected = True
except OSError:
    injected = False
masters = []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        masters += [name for name in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{name}").endswith("ptmx")]
    except OSError:
        pass
print("FOUND", opened, injected, masters, "DONE")
"""


async def test_a_person_works_with_python(every_mode: TerminalHarness, lease_in_mode: str) -> None:
    async with every_mode.terminal(lease_in_mode, cols=90, rows=30) as terminal:
        await terminal.type("exec /usr/bin/python3 -q\n")
        await terminal.until(b">>> ")
        await terminal.type("import os; os.get_terminal_size(), os.isatty(0), os.ttyname(1).startswith('/dev/pts/'), os.tcgetpgrp(0) == os.getpgrp()\n")
        await terminal.until(b"(os.terminal_size(columns=90, lines=30), True, True, True)")
        await terminal.send(type="resize", cols=1000, rows=1)
        await terminal.type("os.get_terminal_size()\n")
        await terminal.until(b"columns=1000, lines=1)")
        await terminal.type("import time; print('be' 'gun'); time.sleep(1000)\n")
        await terminal.until(b"begun")
        await terminal.type(b"\x03")
        await terminal.until(b"KeyboardInterrupt")
        await terminal.type("import sys; sys.exit(42)\n")

        assert await terminal.exit_code() == 42
    assert terminal.reports[0] == {"type": "session", "session": terminal.session, "new": True, "writer": True, "cols": 90, "rows": 30}


async def test_the_shell_has_the_slot_and_nothing_of_the_agent(every_mode: TerminalHarness, lease_in_mode: str) -> None:
    every_mode.bash(lease_in_mode, "echo beside > file")
    async with every_mode.terminal(lease_in_mode) as terminal:
        assert await terminal.run("cat file; echo $TERM $-; id -u") == f"beside\nxterm-256color himBHs\n{every_mode.bash(lease_in_mode, 'id -u')}"
        assert set((await terminal.run("ls -l /proc/$$/fd | sed -n 's/.*-> //p' | sort -u")).split()) == {(await terminal.run("tty")).strip()}
        assert (await terminal.run("stat -c %U:%u $(tty)")).strip().endswith(":" + every_mode.bash(lease_in_mode, "id -u").strip())
        await terminal.type("exit 3\n")

        assert await terminal.exit_code() == 3
    assert every_mode.bash(lease_in_mode, "ls -A") == "file\n"


async def test_every_byte_passes_both_ways(every_mode: TerminalHarness, lease_in_mode: str) -> None:
    every_byte = bytes(range(256)) * 40
    async with every_mode.terminal(lease_in_mode) as terminal:
        await terminal.type(f"stty raw -echo; printf %s REA DY; head -c {len(every_byte)}; printf %s EN D; stty sane\n")
        await terminal.until(b"READY")
        for at in range(0, len(every_byte), 1000):
            await terminal.type(every_byte[at : at + 1000])

        assert (await terminal.until(b"END")).removesuffix(b"END") == every_byte


async def test_the_end_of_the_lease_ends_the_terminal(every_mode: TerminalHarness) -> None:
    lease_id = every_mode.acquire()
    async with every_mode.terminal(lease_id) as terminal:
        assert (await terminal.run("sleep 31341 & disown; echo started")).endswith("started\n")
        every_mode.release(lease_id)
        code, reason = await terminal.closed()

    assert code == 4410
    assert lease_id in reason
    assert "released" in reason


@pytest.mark.parametrize("every_mode", [mode for mode in MODES if mode[0] != "none"], indirect=True, ids="-".join)  # `none` separates nothing
async def test_no_terminal_of_another_slot_can_be_reached(every_mode: TerminalHarness, lease_in_mode: str) -> None:
    other = every_mode.acquire()
    try:
        async with every_mode.terminal(other) as victim, every_mode.terminal(lease_in_mode) as terminal:
            await victim.type("read secret\n")
            every_mode.http.put(f"/v1/leases/{lease_in_mode}/files", params={"path": "intruder.py"}, content=INTRUDER).raise_for_status()
            found = (await terminal.run("/usr/bin/python3 intruder.py")).partition("FOUND ")[2]

        assert found == f"[] {json.dumps(False).capitalize()} [] DONE\n"
    finally:
        every_mode.release(other)
