"""Programs that have themselves traced, as anti-debugging checks do: their parent is init, which debugs nobody, and they run as if untraced."""

from __future__ import annotations

import asyncio

from tests.integration.agent.agent_harness import AgentHarness, Answer

TRACE_ME = """
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)

def trace_me():
    assert libc.ptrace(0, 0, None, None) == 0, os.strerror(ctypes.get_errno())

"""


async def run_traced(harness: AgentHarness, script: str, **options: object) -> Answer:
    """A program whose parent is init."""
    return await harness.bash("exec python3 -u -", stdin=TRACE_ME + script, **options)  # type: ignore[arg-type]


PROGRAMS = {
    "goes on": "trace_me(); print('on'); sys.exit(3)",
    "handles a signal": "signal.signal(signal.SIGUSR1, lambda *_: print('on')); trace_me(); os.kill(os.getpid(), signal.SIGUSR1); sys.exit(3)",
    "executes a program": "trace_me(); os.execv('/bin/sh', ['sh', '-c', 'echo on; exit 3'])",
    "executes twice": "trace_me(); os.execv('/bin/sh', ['sh', '-c', 'exec sh -c \"echo on; exit 3\"'])",
    "has children": "trace_me(); print(os.popen('echo on').read(), end=''); sys.exit(3)",
    "handles a breakpoint": (
        "signal.signal(signal.SIGTRAP, lambda *_: (print('on'), os._exit(3))); trace_me()\nsignal.raise_signal(signal.SIGTRAP); time.sleep(20)"
    ),
    "is stopped and continued": (
        "trace_me()\nme = os.getpid()\nif os.fork() == 0:\n"
        "    while open(f'/proc/{me}/stat').read().rpartition(') ')[2][0] not in 'Tt': time.sleep(0.01)\n"
        "    time.sleep(0.2); os.kill(me, signal.SIGCONT); os._exit(0)\n"
        "os.kill(me, signal.SIGSTOP); print('on'); sys.exit(3)"
    ),
    "traces a thread": (
        "def work():\n    trace_me(); signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('on'))\nthread = threading.Thread(target=work); thread.start(); thread.join(); sys.exit(3)"
    ),
}


async def test_a_program_that_has_itself_traced_runs_to_its_own_end(harness: AgentHarness) -> None:
    answers = await asyncio.gather(*(run_traced(harness, script) for script in PROGRAMS.values()))

    for program, answer in zip(PROGRAMS, answers, strict=True):
        assert (answer.reason, answer.code, answer.text) == ("exit", 3, "on\n"), (program, answer.meta)


async def test_a_signal_that_kills_a_traced_program_is_its_end(harness: AgentHarness) -> None:
    answer = await run_traced(harness, "trace_me(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)")

    assert (answer.reason, answer.code) == ("exit", 128 + 15), answer.meta
    assert answer.metadata["evidence"]["signal"] == "SIGTERM"


async def test_a_traced_program_that_stops_itself_is_still_running_and_dies_at_its_deadline(harnesses: list[AgentHarness]) -> None:
    script = "trace_me(); os.kill(os.getpid(), signal.SIGSTOP); print('no')"
    answers = await asyncio.gather(*(run_traced(harness, script, timeout_s=1.0) for harness in harnesses))

    for harness, answer in zip(harnesses, answers, strict=True):
        assert (answer.reason, answer.text) == ("timeout", ""), (harness.mode, answer.meta)
        assert "processes_left" not in answer.metadata["evidence"]


async def test_an_orphan_that_has_itself_traced_runs_on(harness: AgentHarness) -> None:
    script = (
        "me = os.getpid()\n"
        "if os.fork(): os._exit(0)\n"
        "while os.getppid() == me: time.sleep(0.01)\n"
        "signal.signal(signal.SIGUSR1, lambda *_: open('done', 'w').close()); trace_me(); os.kill(os.getpid(), signal.SIGUSR1)"
    )
    assert (await run_traced(harness, script)).code == 0
    await asyncio.wait_for(harness.until("test -e done"), 15)
