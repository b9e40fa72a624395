"""The exit codes of `sandbox` itself. All other exit codes are those of the command that was run."""

#: `doctor` found that something is missing that slots need.
SOMETHING_MISSING = 1
#: `pool verify` found traces.
NOT_CLEAN = 1
#: `run-many` ran all programs, and not every one succeeded.
PROGRAM_FAILED = 1
#: The command passed its timeout: the exit code of timeout(1).
TIMED_OUT = 124
#: `sandbox` itself failed, as docker uses this code.
OWN_FAILURE = 125
#: The command cannot be started: the exit code of env(1) and of shells. Here, the reason is a working folder that cannot be entered.
CANNOT_START = 126
#: The program does not exist: the exit code of bash.
NOT_FOUND = 127
#: 128 + SIGKILL: the exit code of a process that the kernel killed because of its memory.
OUT_OF_MEMORY = 137
