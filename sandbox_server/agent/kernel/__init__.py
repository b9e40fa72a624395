"""What the kernel gives to bound and watch slots: control groups, seccomp, procfs, resource limits."""
