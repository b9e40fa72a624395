"""Creates the /etc of slots. It contains what programs need to resolve names, find certificates and know their user, and nothing else of the machine."""

from __future__ import annotations

import os
import shutil
from typing import Sequence

_FILES = (
    "hosts", "resolv.conf", "nsswitch.conf", "host.conf", "gai.conf", "ld.so.cache", "ld.so.conf", "localtime", "timezone", "ca-certificates.conf",
    "os-release", "debian_version", "lsb-release", "mime.types", "protocols", "services", "bash.bashrc", "profile", "inputrc", "gitconfig", "magic",
    "locale.alias", "shells", "login.defs",
)  # fmt: skip
_FOLDERS = (
    "ssl", "ca-certificates", "pki", "alternatives", "ld.so.conf.d", "terminfo", "profile.d", "perl", "fonts", "java", "maven", "groff", "xml", "sgml", "vim",
)  # fmt: skip
_FOLDER_PREFIXES = ("python3", "java-")


def _folders() -> list[str]:
    names = [name for name in os.listdir("/etc") if name in _FOLDERS or name.startswith(_FOLDER_PREFIXES)]
    return sorted(name for name in names if os.path.isdir(os.path.join("/etc", name)) and not os.path.islink(os.path.join("/etc", name)))


def write_etc(folder: str, name_server: str | None = None) -> None:
    """Create the folder that is mounted as /etc in every slot. Files are copied, so that a slot cannot access the files of the machine through it.

    Args:
        folder: the folder.
        name_server: the address of the only name server of the slots; None for those of the machine.
    """
    os.makedirs(folder, mode=0o755)
    os.chmod(folder, 0o755)
    for name in _FILES:
        source = os.path.join("/etc", name)
        if os.path.isfile(source) and os.access(source, os.R_OK):
            shutil.copyfile(source, os.path.join(folder, name))
            os.chmod(os.path.join(folder, name), 0o644)
    for name in (*_folders(), "passwd", "group"):
        path = os.path.join(folder, name)
        if name in ("passwd", "group"):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        else:
            os.mkdir(path, 0o755)
    # git refuses repositories of other users. In a shared cache or an exposed folder, the files belong to another user.
    with open(os.path.join(folder, "gitconfig"), "a", encoding="ascii") as file:
        file.write("\n[safe]\n\tdirectory = *\n")
    os.chmod(os.path.join(folder, "gitconfig"), 0o644)
    with open(os.path.join(folder, "hostname"), "w", encoding="ascii") as file:
        file.write("slot\n")
    if name_server is not None:
        with open(os.path.join(folder, "resolv.conf"), "w", encoding="ascii") as file:
            file.write("nameserver %s\n" % name_server)
        os.chmod(os.path.join(folder, "resolv.conf"), 0o644)
    os.symlink("/proc/self/mounts", os.path.join(folder, "mtab"))


def etc_args(folder: str) -> list[str]:
    """Return the arguments of bubblewrap that mount the folder as /etc."""
    args = ["--ro-bind", folder, "/etc"]
    for name in _folders():
        args += ["--ro-bind", "/etc/" + name, "/etc/" + name]
    return args


def write_accounts(folder: str, uid: int, groups: Sequence[int] = ()) -> tuple[str, str]:
    """Write the `passwd` and `group` files of one slot.

    Args:
        folder: the folder that the files are written to.
        uid: the user of the slot.
        groups: the supplementary groups of the slot.

    Returns:
        The paths of the files that are mounted as /etc/passwd and /etc/group.
    """
    passwd = os.path.join(folder, "passwd")
    group = os.path.join(folder, "group")
    users = "root:x:0:0:root:/root:/usr/sbin/nologin\nslot:x:%d:%d:slot:/workspace:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"
    caches = "".join("cache%d:x:%d:slot\n" % (number, gid) for number, gid in enumerate(groups))
    _write_public_file(passwd, users % (uid, uid))
    _write_public_file(group, "root:x:0:\nslot:x:%d:\nnogroup:x:65534:\n%s" % (uid, caches))
    return passwd, group


def _write_public_file(path: str, content: str) -> None:
    """Write a file that everybody can read. A file of an earlier slot runtime is overwritten in place, which is much cheaper than a new file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        os.fchmod(fd, 0o644)  # whatever the umask is
        os.write(fd, content.encode("ascii"))
        os.ftruncate(fd, len(content))
    finally:
        os.close(fd)
