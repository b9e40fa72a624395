"""What can be found out about a machine, a pool and a backend, and what mends it. Looks; changes nothing."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from env_client.values import PoolInfo

BACKENDS = ("local", "docker", "nomad", "modal")
_CHECK_S = 30.0
_ISOLATING = ("bwrap", "uid")


class State(enum.StrEnum):
    """How something stands."""

    OK = "ok"
    LIMITED = "limited"
    MISSING = "missing"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `fix` is empty where nothing needs mending."""

    name: str
    state: State
    detail: str
    fix: str = ""


def machine_findings() -> list[Finding]:
    """What this machine has that slots want."""
    return [_system(), _service_package(), _bubblewrap(), _user_namespaces(), _cgroups(), _tmux()]


def _system() -> Finding:
    what = f"Linux {platform.release()}, Python {platform.python_version()}, {'root' if os.geteuid() == 0 else 'an ordinary user'}"
    if sys.platform != "linux":
        return Finding("system", State.LIMITED, f"{platform.system()}: slots of the local backend need Linux", "use a service elsewhere: set SANDBOX_URL")
    return Finding("system", State.OK, what)


def _service_package() -> Finding:
    if all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "pydantic"))):
        return Finding("service", State.OK, "can be started here: python -m sandbox_server serve")
    return Finding("service", State.LIMITED, "its packages are not installed, so this machine is only a client", _package("server"))


def _bubblewrap() -> Finding:
    path = shutil.which("bwrap")
    if path is None:
        return Finding("bubblewrap", State.LIMITED, "not installed, so slots cannot be kept apart in mode bwrap, the best one", _install("bubblewrap"))
    return Finding("bubblewrap", State.OK, f"{_first_line([path, '--version']).removeprefix('bubblewrap ')}, {path}")


def _user_namespaces() -> Finding:
    if os.geteuid() == 0:
        return Finding("namespaces", State.OK, "root needs no user namespaces")
    for path, off, fix in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root"),
    ):
        if _read(path) == off:
            return Finding("namespaces", State.LIMITED, f"ordinary users may make none ({path} is {off}), which mode bwrap needs", fix)
    return Finding("namespaces", State.OK, "ordinary users may make them")


def _cgroups() -> Finding:
    controllers = _read("/sys/fs/cgroup/cgroup.controllers")
    version = "v2" if controllers is not None else "v1" if Path("/sys/fs/cgroup").is_dir() and os.listdir("/sys/fs/cgroup") else None
    if version is None:
        return Finding("cgroups", State.LIMITED, "none are mounted: memory is limited per process", "mount cgroup v2 at /sys/fs/cgroup")
    writable = os.access("/sys/fs/cgroup", os.W_OK)
    what = f"{version}{', ' + controllers.replace(' ', ', ') if controllers else ''}"
    if not writable:
        fix = "run as root, or with a delegated cgroup (systemd: Delegate=yes)"
        return Finding("cgroups", State.LIMITED, f"{what}, not writable: memory is limited per process", fix)
    return Finding("cgroups", State.OK, f"{what}, writable")


def _tmux() -> Finding:
    path = shutil.which("tmux")
    if path is None:
        return Finding("tmux", State.LIMITED, "not installed, so the tool tmux is missing on the local backend", _install("tmux"))
    return Finding("tmux", State.OK, f"{_first_line([path, '-V']).removeprefix('tmux ')}, {path}")


def draining_for(pool: PoolInfo) -> str:
    """That a pool is going away, and why; nothing where it is not, or where an older service does not say."""
    if pool.state != "draining":
        return ""
    return f"draining: {pool.last_error or 'it gives no new leases, and is gone with its last one'}"


def pool_findings(pool: PoolInfo) -> list[Finding]:
    """What a pool's sandboxes can do, as their agent found out by trying."""
    can = pool.capabilities
    draining = draining_for(pool)
    found = [Finding("state", State.LIMITED, draining, "acquire from another pool")] if draining else []
    if draining and not can:
        return found
    found.append(_isolation(pool))
    modes = can.get("modes")
    for mode, verdict in modes.items() if isinstance(modes, dict) else ():
        found.append(_mode(str(mode), str(verdict), pool))
    if pool.last_error and not draining:
        state = State.LIMITED if pool.sandboxes.get("ready") else State.MISSING
        found.append(Finding("last error", state, pool.last_error, "mend that; the pool tries again by itself"))
    if not can:
        return found
    found.append(_network(_words(can.get("network"))))
    limits = can.get("limits")
    for name, how in limits.items() if isinstance(limits, dict) else ():
        found.append(_limit(str(name), str(how)))
    proves = _words(can.get("proves"))
    found.append(Finding("verdicts", State.OK if proves else State.LIMITED, f"can prove {', '.join(proves) or 'no limit that was hit'}"))
    found.append(Finding("tools", State.OK, ", ".join(_words(can.get("tools")))))
    return found


def _isolation(pool: PoolInfo) -> Finding:
    if pool.isolation in _ISOLATING or pool.isolation == "dedicated":
        return Finding("isolation", State.OK, f"slots are kept apart by mode {pool.isolation}")
    if pool.isolation == "none":
        return Finding("isolation", State.LIMITED, "slots are NOT kept apart (mode none): one tenant and run at a time", "get a better mode to work, see below")
    state = State.MISSING if pool.last_error else State.LIMITED
    return Finding("isolation", state, "no sandbox has started yet, so nothing is known", "see the pool's last error")


def _mode(mode: str, verdict: str, pool: PoolInfo) -> Finding:
    if verdict == "ok":
        return Finding(f"mode {mode}", State.OK, "in use" if pool.isolation == mode else "works")
    if mode == "none":
        fix = "only for trusted work: `allow_none: true` in the pool's spec" if pool.isolation is None else ""
        return Finding("mode none", State.OFF, f"no isolation: {verdict}", fix)
    better = pool.isolation in _ISOLATING and (mode != "bwrap" or pool.isolation == "bwrap")
    return Finding(f"mode {mode}", State.OFF if better else State.LIMITED, verdict, _mode_fix(mode, verdict))


def _mode_fix(mode: str, verdict: str) -> str:
    if "not in PATH" in verdict:
        return _install("bubblewrap")
    if mode == "uid":
        return "run the service as root" if "root" in verdict else ""
    if "denied" in verdict or "not permitted" in verdict.lower():
        return "run the service as root, or let ordinary users make user namespaces (see above); in a container: --security-opt seccomp=unconfined"
    return ""


def _network(kinds: list[str]) -> Finding:
    if "none" in kinds:
        return Finding("network", State.OK, f"{', '.join(kinds)}: `allow_network: false` is enforced")
    return Finding("network", State.LIMITED, f"{', '.join(kinds) or 'nothing'}: a slot without network cannot be had", "mode bwrap can")


def _limit(name: str, how: str) -> Finding:
    if how.startswith("cgroup"):
        return Finding(f"{name} limit", State.OK, f"by {how}")
    if how == "none":
        fix = "set slot_memory_mb in the pool's spec" if name == "memory" else "run where cgroups are writable"
        return Finding(f"{name} limit", State.LIMITED, "none: one slot can take what the others need", fix)
    if how == "accounting":
        fix = "run where cgroups are writable" if name == "memory" else ""
        return Finding(f"{name} limit", State.LIMITED if fix else State.OK, "measured every few seconds or sooner, not refused at once", fix)
    return Finding(f"{name} limit", State.LIMITED, f"by {how}: per process, not for the slot as a whole", "run where cgroups are writable")


def backend_finding(name: str) -> Finding:
    """Whether a service of this machine could have pools on a backend, as the service itself says."""
    with tempfile.TemporaryDirectory(prefix="sandbox-doctor-") as folder:
        config = Path(folder, "pools.yaml")
        config.write_text(json.dumps({"pools": {"default": {"backend": name}}}))
        environ = {key: value for key, value in os.environ.items() if not key.startswith("SANDBOX_")}
        environ |= {"SANDBOX_CONFIG": str(config), "SANDBOX_STATE_DIR": str(Path(folder, "state"))}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "sandbox_server", "check-config"],
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CHECK_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Finding(name, State.LIMITED, f"could not be checked within {_CHECK_S:.0f} s")
    if done.returncode == 0:
        return Finding(name, State.OK, _BACKEND_NOTES.get(name, "can be used in a pool's spec"))
    told = (done.stderr.strip().splitlines() or ["the service could not be asked"])[-1]
    said = told.rpartition(".backend: ")[2]
    sentence, _, fix = said.partition(": in a clone ")
    if fix:
        return Finding(name, State.OFF, sentence, f"in a clone {fix}")
    return Finding(name, State.OFF, sentence, _package("server") if "No module named" in said else "")


_BACKEND_NOTES = {"local": "slots on this machine, nothing else needed", "modal": "its package is here; credentials: `modal token new`"}


def _install(package: str) -> str:
    for manager, command in (("apt-get", "apt-get install"), ("dnf", "dnf install"), ("apk", "apk add"), ("pacman", "pacman -S"), ("zypper", "zypper install")):
        if shutil.which(manager):
            return f"{command} {package}"
    return f"install {package}"


def _package(extra: str) -> str:
    return f"in a clone of the repository: pip install '.[{extra}]'"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})"
    return (done.stdout.strip() or done.stderr.strip() or "?").splitlines()[0]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _words(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, Iterable) and not isinstance(value, str) else []
