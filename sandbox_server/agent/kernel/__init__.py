"""What limits and observes slots through the kernel: control groups, seccomp, user ids and /proc. Also the deletion of folders that slots have filled."""
