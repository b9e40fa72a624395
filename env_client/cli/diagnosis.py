"""The checks of `sandbox doctor`: what a machine, a pool and a backend can do, and how to get what is missing. The checks change nothing."""

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from env_client.values import PoolInfo

BACKENDS = ("local", "docker", "nomad", "modal")
_CHECK_S = 30.0
_ISOLATING = ("bwrap", "uid")


class FindingState(enum.StrEnum):
    """The outcome of a check."""

    #: It works.
    OK = "ok"
    #: It works with restrictions.
    LIMITED = "limited"
    #: It does not work, and slots need it.
    MISSING = "missing"
    #: It is not used, and slots do not need it.
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Args:
        name: what was checked.
        state: the outcome.
        detail: what was found.
        fix: how to correct it; empty if nothing needs to be corrected.
    """

    name: str
    state: FindingState
    detail: str
    fix: str = ""


def machine_findings() -> list[Finding]:
    """Check what this machine offers to slots of the local backend."""
    return [
        _system_finding(),
        _service_package_finding(),
        _bubblewrap_finding(),
        _user_namespaces_finding(),
        _cgroups_finding(),
        _tmux_finding(),
    ]


def _system_finding() -> Finding:
    what = f"Linux {platform.release()}, Python {platform.python_version()}, {'root' if os.geteuid() == 0 else 'an ordinary user'}"
    if sys.platform != "linux":
        return Finding(
            "system", FindingState.LIMITED, f"{platform.system()}: slots of the local backend need Linux", "use a service elsewhere: set SANDBOX_URL"
        )
    return Finding("system", FindingState.OK, what)


def _service_package_finding() -> Finding:
    if all(map(importlib.util.find_spec, ("fastapi", "uvicorn", "pydantic"))):
        return Finding("service", FindingState.OK, "can be started here: python -m sandbox_server serve")
    return Finding("service", FindingState.LIMITED, "its packages are not installed, so this machine can only be a client", _pip_install_command("server"))


def _bubblewrap_finding() -> Finding:
    path = shutil.which("bwrap")
    if path is None:
        return Finding(
            "bubblewrap", FindingState.LIMITED, "not installed, so slots cannot be isolated in mode bwrap, the best mode", _install_command("bubblewrap")
        )
    return Finding("bubblewrap", FindingState.OK, f"{_first_line([path, '--version']).removeprefix('bubblewrap ')}, {path}")


def _user_namespaces_finding() -> Finding:
    if os.geteuid() == 0:
        return Finding("namespaces", FindingState.OK, "root needs no user namespaces")
    for path, off, fix in (
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root"),
    ):
        if _read_text(path) == off:
            return Finding("namespaces", FindingState.LIMITED, f"ordinary users may not create any ({path} is {off}), and mode bwrap needs them", fix)
    return Finding("namespaces", FindingState.OK, "ordinary users may create them")


def _cgroups_finding() -> Finding:
    controllers = _read_text("/sys/fs/cgroup/cgroup.controllers")
    version = "v2" if controllers is not None else "v1" if Path("/sys/fs/cgroup").is_dir() and os.listdir("/sys/fs/cgroup") else None
    if version is None:
        return Finding("cgroups", FindingState.LIMITED, "none are mounted: memory is limited per process", "mount cgroup v2 at /sys/fs/cgroup")
    writable = os.access("/sys/fs/cgroup", os.W_OK)
    what = f"{version}{', ' + controllers.replace(' ', ', ') if controllers else ''}"
    if not writable:
        fix = "run as root, or with a delegated cgroup (systemd: Delegate=yes)"
        return Finding("cgroups", FindingState.LIMITED, f"{what}, not writable: memory is limited per process", fix)
    return Finding("cgroups", FindingState.OK, f"{what}, writable")


def _tmux_finding() -> Finding:
    path = shutil.which("tmux")
    if path is None:
        return Finding("tmux", FindingState.LIMITED, "not installed, so the tool tmux is missing on the local backend", _install_command("tmux"))
    return Finding("tmux", FindingState.OK, f"{_first_line([path, '-V']).removeprefix('tmux ')}, {path}")


def draining_reason(pool: PoolInfo) -> str:
    """Describe why a pool is draining; empty if it is not, or if the service is of an older version that does not send the state."""
    if pool.state != "draining":
        return ""
    return f"draining: {pool.last_error or 'it gives no new leases, and is deleted when its last lease ends'}"


def pool_findings(pool: PoolInfo) -> list[Finding]:
    """Check what the sandboxes of a pool can do, from the capabilities that their agent found by trying."""
    capabilities = pool.capabilities
    draining = draining_reason(pool)
    findings = [Finding("state", FindingState.LIMITED, draining, "acquire from another pool")] if draining else []
    if draining and not capabilities:
        return findings
    findings.append(_isolation_finding(pool))
    modes = capabilities.get("modes")
    for mode, probe_result in modes.items() if isinstance(modes, dict) else ():
        findings.append(_mode_finding(str(mode), str(probe_result), pool))
    if pool.last_error and not draining:
        state = FindingState.LIMITED if pool.sandboxes.get("ready") else FindingState.MISSING
        findings.append(Finding("last error", state, pool.last_error, "correct the cause; the pool tries again by itself"))
    if not capabilities:
        return findings
    findings.append(_network_finding(_string_list(capabilities.get("network"))))
    if isinstance(capabilities.get("internet"), str):
        findings.append(_internet_finding(_string_list(capabilities.get("network")), str(capabilities["internet"])))
    limits = capabilities.get("limits")
    for name, mechanism in limits.items() if isinstance(limits, dict) else ():
        findings.append(_limit_finding(str(name), str(mechanism)))
    proves = _string_list(capabilities.get("proves"))
    findings.append(Finding("verdicts", FindingState.OK if proves else FindingState.LIMITED, f"can prove {', '.join(proves) or 'no limit that was hit'}"))
    findings.append(Finding("tools", FindingState.OK, ", ".join(_string_list(capabilities.get("tools")))))
    return findings


def _isolation_finding(pool: PoolInfo) -> Finding:
    if pool.isolation in _ISOLATING or pool.isolation == "dedicated":
        return Finding("isolation", FindingState.OK, f"slots are isolated by mode {pool.isolation}")
    if pool.isolation == "none":
        detail = "slots are NOT isolated from each other (mode none): one tenant and run at a time"
        return Finding("isolation", FindingState.LIMITED, detail, "make a better mode work, see below")
    state = FindingState.MISSING if pool.last_error else FindingState.LIMITED
    return Finding("isolation", state, "no sandbox has started yet, so the isolation is not known", "see the pool's last error")


def _mode_finding(mode: str, probe_result: str, pool: PoolInfo) -> Finding:
    if probe_result == "ok":
        return Finding(f"mode {mode}", FindingState.OK, "in use" if pool.isolation == mode else "works")
    if mode == "none":
        fix = "only for trusted work: `allow_none: true` in the pool's spec" if pool.isolation is None else ""
        return Finding("mode none", FindingState.OFF, f"no isolation: {probe_result}", fix)
    better = pool.isolation in _ISOLATING and (mode != "bwrap" or pool.isolation == "bwrap")
    return Finding(f"mode {mode}", FindingState.OFF if better else FindingState.LIMITED, probe_result, _mode_fix(mode, probe_result))


def _mode_fix(mode: str, probe_result: str) -> str:
    if "not in PATH" in probe_result:
        return _install_command("bubblewrap")
    if mode == "uid":
        return "run the service as root" if "root" in probe_result else ""
    if "denied" in probe_result or "not permitted" in probe_result.lower():
        return "run the service as root, or let ordinary users create user namespaces (see above); in a container: --security-opt seccomp=unconfined"
    return ""


def _network_finding(kinds: list[str]) -> Finding:
    if "none" in kinds:
        return Finding("network", FindingState.OK, f"{', '.join(kinds)}: `allow_network: false` is enforced")
    return Finding(
        "network", FindingState.LIMITED, f"{', '.join(kinds) or 'nothing'}: slots without network are not possible", "mode bwrap makes them possible"
    )


def _internet_finding(kinds: list[str], found: str) -> Finding:
    """Say whether slots share the network of their sandbox, and whether they need not."""
    if "internet" in kinds:
        return Finding("internet", FindingState.OK, "each slot has a network of its own, with a way to public hosts alone")
    shares = "slots share the network of their sandbox, and reach what listens on the machine"
    if found == "ok":
        return Finding("internet", FindingState.OFF, f"{shares}; nothing is missing for networks of their own", "set `network: internet` in the pool's spec")
    return Finding("internet", FindingState.OFF, f"{shares}; for networks of their own: {found}", _internet_fix(found))


def _internet_fix(found: str) -> str:
    for package in ("passt", "libnftables1"):
        if f"package {package}" in found:
            return _install_command(package)
    return ""


def _limit_finding(name: str, mechanism: str) -> Finding:
    if mechanism.startswith("cgroup"):
        return Finding(f"{name} limit", FindingState.OK, f"by {mechanism}")
    if mechanism == "none":
        fix = "set slot_memory_mb in the pool's spec" if name == "memory" else "run where cgroups are writable"
        return Finding(f"{name} limit", FindingState.LIMITED, "none: one slot can use up what the others need", fix)
    if mechanism == "accounting":
        fix = "run where cgroups are writable" if name == "memory" else ""
        return Finding(
            f"{name} limit",
            FindingState.LIMITED if fix else FindingState.OK,
            "measured every few seconds or sooner, so a slot can exceed it for that time",
            fix,
        )
    return Finding(f"{name} limit", FindingState.LIMITED, f"by {mechanism}: per process, not for the slot as a whole", "run where cgroups are writable")


def backend_findings() -> list[Finding]:
    """Check which backends the pools of a service on this machine could use, by running its configuration check with a pool on each of them."""
    with tempfile.TemporaryDirectory(prefix="sandbox-doctor-") as folder:
        config = Path(folder, "pools.yaml")
        config.write_text(json.dumps({"pools": {name: {"backend": name} for name in BACKENDS}, "default_pool": BACKENDS[0]}))
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
            return [Finding(name, FindingState.LIMITED, f"could not be checked within {_CHECK_S:.0f} s") for name in BACKENDS]
    if done.returncode == 0:
        return [_backend_finding(name, None) for name in BACKENDS]
    problems = done.stderr.strip().splitlines() or ["the configuration check printed no reason"]
    return [_backend_finding(name, reason) for name, reason in reasons_by_backend(problems).items()]


def reasons_by_backend(problems: Sequence[str]) -> dict[str, str | None]:
    """Return for each backend why it is not available, None for one that is.

    Args:
        problems: the error messages of the configuration check, one a line. If none of them names a pool, the check itself failed, with the last one.
    """
    found: dict[str, str | None] = dict.fromkeys(BACKENDS)
    for name in BACKENDS:
        for line in problems:
            _, marker, reason = line.partition(f": pools.{name}.backend: ")
            if marker:
                found[name] = reason
    return found if any(found.values()) else dict.fromkeys(BACKENDS, problems[-1])


def _backend_finding(name: str, reason: str | None) -> Finding:
    """Return the result for one backend.

    Args:
        name: the backend.
        reason: why it is not available; None if it is.
    """
    if reason is None:
        return Finding(name, FindingState.OK, _BACKEND_NOTES.get(name, "can be used in a pool's spec"))
    sentence, _, fix = reason.partition(": in a clone ")
    if fix:
        return Finding(name, FindingState.OFF, sentence, f"in a clone {fix}")
    return Finding(name, FindingState.OFF, sentence, _pip_install_command("server") if "No module named" in reason else "")


_BACKEND_NOTES = {"local": "slots on this machine; it needs nothing else", "modal": "its package is installed; `modal token new` creates credentials"}


def _install_command(package: str) -> str:
    for manager, command in (("apt-get", "apt-get install"), ("dnf", "dnf install"), ("apk", "apk add"), ("pacman", "pacman -S"), ("zypper", "zypper install")):
        if shutil.which(manager):
            return f"{command} {package}"
    return f"install {package}"


def _pip_install_command(extra: str) -> str:
    return f"in a clone of the repository: pip install '.[{extra}]'"


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})"
    return (done.stdout.strip() or done.stderr.strip() or "?").splitlines()[0]


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _string_list(value: object) -> list[str]:
    return [str(one) for one in value] if isinstance(value, Iterable) and not isinstance(value, str) else []
