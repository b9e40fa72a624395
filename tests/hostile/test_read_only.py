"""Entries of the workspace that `narrow` has made read-only: what a slot prepares before, and whatever it tries afterwards, it cannot change them."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

from tests.hostile.attacks import PRELUDE
from tests.hostile.harness import Harness

# Set-up by a slot that is hostile already: second names, open descriptors and mappings, a process that writes on, rights that invite others.
BEFORE = r"""
import mmap, os, socket, subprocess
os.makedirs("tests/sub")
for name, text in (("tests/a", "one"), ("tests/sub/b", "two"), ("conftest.py", "three"), ("free", "four")):
    with open(name, "w") as file: file.write(text)
os.link("tests/a", "second-name")
os.link("tests/sub/b", "/".join(("tests", "sub", "inner-name")))
os.link("conftest.py", "third-name")
os.symlink("tests", "to-tests")
os.symlink("../free", "tests/to-free")
os.mkfifo("tests/fifo")
socket.socket(socket.AF_UNIX).bind("tests/socket")
os.chmod("tests/a", 0o6777)
os.chmod("tests/sub", 0o555)
subprocess.Popen(["/usr/bin/python3", "-I", "-c", '''
import mmap, os, time
file, folder = os.open("tests/sub/b", os.O_RDWR), os.open("tests", os.O_RDONLY)
view = mmap.mmap(file, 3)
while True:
    view[:3] = b"MAP"
    os.pwrite(file, b"FDS", 0)
    os.close(os.open("by-descriptor", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.rename("by-descriptor", "by-descriptor-too", src_dir_fd=folder, dst_dir_fd=folder)
    time.sleep(0.01)
'''], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""

# Each way to change an entry, by itself. A way that raises nothing has succeeded.
AFTER = r"""
import fcntl, shutil, threading
os.chdir(os.environ["HOME"])
broken = []

def attack(name):
    def run(way):
        try:
            way()
        except (OSError, subprocess.CalledProcessError, shutil.Error):
            return
        broken.append(name)
    return run

def write(path, flags=os.O_WRONLY): os.write(os.open(path, flags), b"x")
def system(*args):
    result, number = syscall(*args)
    if result < 0: raise OSError(number, "refused")
def renameat2(old, new, flags): system(316, -100, old, -100, new, flags)
def run(*argv): subprocess.run(argv, check=True, capture_output=True)
def through_mapping():
    import mmap
    mmap.mmap(os.open("tests/a", os.O_RDONLY), 1, prot=mmap.PROT_READ | mmap.PROT_WRITE)[0] = 1
def other_view(prefix):
    write(prefix + os.getcwd() + "/tests/a")
def through_reopened():
    fd = os.open("tests/a", os.O_RDONLY)
    write("/proc/self/fd/%d" % fd)
def through_path_descriptor():
    fd = os.open("tests/a", os.O_PATH)
    write("/proc/self/fd/%d" % fd)
def through_folder():
    os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=os.open("tests", os.O_PATH))
def parent_renamed():
    here = os.getcwd()
    os.rename(here, here + "-moved")
    os.mkdir(here)

W, A, T, C = os.O_WRONLY, os.O_WRONLY | os.O_APPEND, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_CREAT
for path in ("tests/a", "tests/sub/b", "tests/sub/inner-name", "conftest.py", "to-tests/a"):
    attack("write " + path)(lambda: write(path))
    attack("append " + path)(lambda: write(path, A))
    attack("truncate at open " + path)(lambda: os.open(path, T))
    attack("truncate " + path)(lambda: os.truncate(path, 0))
    attack("chmod " + path)(lambda: os.chmod(path, 0o777))
    attack("chown " + path)(lambda: os.chown(path, os.getuid(), os.getgid()))
    attack("utime " + path)(lambda: os.utime(path, (1, 1)))
    attack("xattr " + path)(lambda: os.setxattr(path, "user.x", b"x"))
    attack("link out " + path)(lambda: os.link(path, "linked-out"))
    attack("unlink " + path)(lambda: os.unlink(path))
    attack("rename over " + path)(lambda: os.rename("free", path))
    attack("rename away " + path)(lambda: os.rename(path, "moved"))
    attack("exchange " + path)(lambda: renameat2(b"free", path.encode(), 2))
for path in ("tests", "tests/sub"):
    attack("create in " + path)(lambda: os.open(path + "/new", C))
    attack("mkdir in " + path)(lambda: os.mkdir(path + "/new"))
    attack("symlink in " + path)(lambda: os.symlink("x", path + "/new"))
    attack("link into " + path)(lambda: os.link("free", path + "/new"))
    attack("temporary file in " + path)(lambda: os.open(path, os.O_TMPFILE | os.O_WRONLY))
    attack("chmod " + path)(lambda: os.chmod(path, 0o777))
    attack("rename " + path)(lambda: os.rename(path, "moved"))
    attack("rmtree " + path)(lambda: shutil.rmtree(path))
    attack("exchange " + path)(lambda: renameat2(b"empty", path.encode(), 2))
    os.makedirs("empty", exist_ok=True)
    attack("rename over " + path)(lambda: os.rename("empty", path))
attack("reopened")(through_reopened)
attack("path descriptor")(through_path_descriptor)
attack("folder descriptor")(through_folder)
attack("shared mapping")(through_mapping)
attack("fifo replaced")(lambda: os.unlink("tests/fifo"))
attack("parent renamed")(parent_renamed)
attack("grandparent renamed")(lambda: os.rename(os.path.dirname(os.getcwd()), os.path.dirname(os.getcwd()) + "-moved"))
for pid in pids():
    attack("root of %d" % pid)(lambda: other_view("/proc/%d/root" % pid))
    attack("cwd of %d" % pid)(lambda: write("/proc/%d/cwd/tests/a" % pid))
MOUNT, UMOUNT, UNSHARE, SETNS, OPEN_TREE, MOVE_MOUNT, SETATTR = 165, 166, 272, 308, 428, 429, 442
here = os.getcwd().encode()
target = here + b"/tests"
if os.uname().machine == "x86_64":
    attack("umount")(lambda: system(UMOUNT, target, 2))
    attack("remount")(lambda: system(MOUNT, b"none", target, None, 32 | 4096, None))
    attack("bind over")(lambda: system(MOUNT, here + b"/empty", target, None, 4096, None))
    attack("bind of the parent")(lambda: system(MOUNT, here, here + b"/empty", None, 4096, None))
    attack("user namespace")(lambda: system(UNSHARE, 0x10000000 | 0x20000))
    attack("mount namespace")(lambda: system(UNSHARE, 0x20000))
    attack("other namespace")(lambda: system(SETNS, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0))
    attack("open_tree")(lambda: system(OPEN_TREE, -100, here, 1))
    attack("mount_setattr")(lambda: system(SETATTR, -100, target, 0, b"\0" * 8 + (1).to_bytes(8, "little") + b"\0" * 16, 32))
attack("unshare")(lambda: run("unshare", "-Urm", "true"))
attack("umount program")(lambda: run("umount", "-l", "tests"))
for name in ("second-name", "third-name"):
    with open(name, "w") as file: file.write("CHANGED")
os.chmod("second-name", 0o777)

found = {}
for name in ("tests/a", "tests/sub/b", "tests/sub/inner-name", "conftest.py"):
    with open(name) as file: found[name] = file.read()
    found["set-uid " + name] = bool(os.stat(name).st_mode & 0o6000) and not os.statvfs(name).f_flag & os.ST_NOSUID
print(json.dumps({"broken": broken, "found": found, "tests": sorted(os.listdir("tests"))}))
"""


def _narrow(harness: Harness, lease: dict[str, Any], **body: Any) -> Any:
    return harness.post(f"/v1/leases/{lease['lease_id']}/narrow", body)


def _attack(harness: Harness, lease: dict[str, Any]) -> dict[str, Any]:
    result = harness.python(lease, 'KNOWN_JSON = "{}"\n' + PRELUDE + AFTER)
    assert result["success"], result
    report: dict[str, Any] = json.loads(result["output"].splitlines()[-1])
    return report


def _archive(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    return buffer.getvalue()


def test_what_is_read_only_stays_as_it_was(harness: Harness) -> None:
    lease = harness.acquire()
    url = f"/v1/leases/{lease['lease_id']}"
    assert harness.python(lease, "import os; os.chdir(os.environ['HOME'])\n" + BEFORE)["success"]
    assert harness.bash(lease, "until test -e tests/by-descriptor-too; do sleep 0.01; done")["success"]

    narrowed = _narrow(harness, lease, read_only=["tests", "conftest.py"])
    assert narrowed.status_code == 200, narrowed.text
    assert narrowed.json()["read_only"] == ["tests", "conftest.py"]
    before = harness.bash(lease, "cat tests/a tests/sub/b conftest.py; ls -A tests")["output"]

    first = _attack(harness, lease)
    again = _narrow(harness, lease, read_only=["free"])  # A second one that omits the entries restarts the slot, and they stay read-only.
    second = _attack(harness, lease)

    assert again.json()["read_only"] == ["tests", "conftest.py", "free"]
    assert (first["broken"], second["broken"]) == ([], [])
    assert first["found"] == second["found"]
    assert not any(value for name, value in first["found"].items() if name.startswith("set-uid"))
    assert harness.bash(lease, "cat tests/a tests/sub/b conftest.py; ls -A tests")["output"] == before
    for path in ("tests/a", "tests/new", "conftest.py", "free"):
        put = harness.client.put(f"{url}/files", params={"path": path}, content=b"x")
        assert (put.status_code, put.json()["code"]) == (409, "file_error"), (path, put.text)
        assert not harness.call(lease, "write_file", {"path": path, "content": "x"})["success"], path
    assert not harness.call(lease, "edit_file", {"path": "tests/a", "old": "one", "new": "x"})["success"]
    for name, folder in (("tests/a", "."), ("a", "tests"), ("conftest.py", ".")):
        unpacked = harness.client.put(f"{url}/archive", params={"path": folder}, content=_archive(name))
        assert unpacked.status_code == 409, (name, unpacked.text)
    job = harness.bash(lease, "(sleep 0.1; echo x >> tests/a || echo refused > job) & wait; cat job; echo fine > other; cat other")
    assert job["output"].splitlines()[-2:] == ["refused", "fine"], job
    assert harness.bash(lease, "cat tests/a tests/sub/b conftest.py; ls -A tests")["output"] == before

    harness.release(lease)
    harness.settled()
    harness.still_sound()
    for fresh in harness.every_slot():
        assert "read_only" not in fresh
        assert harness.bash(fresh, "ls -A; grep -c /tests /proc/self/mountinfo; mkdir tests && touch tests/a && rm -r tests")["output"] == "0\n"


def test_what_cannot_be_made_read_only_is_refused_by_name_and_changes_nothing(harness: Harness) -> None:
    lease = harness.acquire()
    make = "mkdir -p real deep two; ln -s real link; mkfifo fifo; ln -s /etc out; sleep 600 >/dev/null 2>&1 & "
    links = "for n in 1 2 3 4 5; do truncate -s 60M big$n; ln big$n two; done; d=deep; for n in $(seq 110); do d=$d/x; mkdir $d; done"
    assert harness.bash(lease, f"set -e; {make}{links}")["success"]

    for name, word in (("link", "symbolic link"), ("out", "symbolic link"), ("fifo", "neither"), ("none", "no entry")):
        answer = _narrow(harness, lease, read_only=["real", name])
        assert (answer.status_code, answer.json()["code"], answer.json()["field"]) == (422, "invalid_request", "read_only"), answer.text
        assert name in answer.json()["detail"] and word in answer.json()["detail"]
    assert harness.bash(lease, "pgrep -x sleep")["success"], "a wrong name ends no process"
    for name, word in (("two", "hard links"), ("deep", "folders deep")):
        answer = _narrow(harness, lease, read_only=["real", name])
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), answer.text
        assert name in answer.json()["detail"] and word in answer.json()["detail"]

    shown = harness.client.get(f"/v1/leases/{lease['lease_id']}").json()
    assert "read_only" not in shown
    assert harness.bash(lease, "touch real/x two/x deep/x && ls real")["output"] == "x\n"
