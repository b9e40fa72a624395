"""The C library, for system calls that Python has no function for.

All modules that run in an init share this object. ctypes makes an object for each function at its first use; here that happens when the module is imported,
because an init would change memory by it that it shares with its template.

For the same reason, small integers are passed as they are: they are extended to the width of a register. What the kernel only reads is passed as packed bytes.
Values of ctypes, such as `c_ulong(1)`, are objects whose types each init would change.
"""

from __future__ import annotations

import ctypes

libc = ctypes.CDLL(None, use_errno=True)
for _name in ("capget", "capset", "ioctl", "mount", "prctl", "ptrace", "setfsuid", "sethostname", "setns", "syscall", "umount2", "unshare"):
    getattr(libc, _name)
