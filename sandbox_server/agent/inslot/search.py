"""The tool `search_files`: search the lines of all files of a tree with a regular expression."""

from __future__ import annotations

import os
import re
import stat
import warnings

from sandbox_server.agent.inslot.confine import READ_FLAGS, Refusal, quote_path, refusal_for_os_error, refusal_not_regular, resolve_tool_path
from sandbox_server.agent.inslot.files import FOLDER_OPEN_FLAGS, count_with_noun
from sandbox_server.agent.inslot.walk import walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Mapping, Pattern

    from sandbox_server.agent.inslot.reply import Reply

DEFAULT_MATCHES = 100
READ_BLOCK_BYTES = 256 << 10
BINARY_PROBE_BYTES = 8 << 10
MAX_PIECE_BYTES = 1 << 20  # A longer line is searched in pieces of this size.
MAX_SHOWN_CHARS = 400  # Of one line.


def search_files(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Reply with `path:line:text` for each line that matches. Binary files are skipped, and symlinks are not followed."""
    regex = _compile_regex("pattern", args["pattern"])
    is_wanted = glob_filter(args["glob"]) if args.get("glob") else None
    search = _FileSearch(regex, args["pattern"], args.get("max_matches") or DEFAULT_MATCHES)
    asked = args.get("path")
    path = resolve_tool_path(asked, ctx)
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        search.search_tree(path, "" if asked is None else f"{asked.rstrip('/')}/", is_wanted)
    elif stat.S_ISREG(mode):
        search.search_file(path, None, asked or path)
        if search.first_error is not None:
            raise search.first_error
    else:
        raise refusal_not_regular(path, mode)
    search.send_reply(reply)


def _kernel_devices() -> frozenset[int]:
    """Return the devices of /proc and /sys. Files there may have no end or side effects when they are read, so a search of `/` skips them."""
    return frozenset(os.stat(path).st_dev for path in ("/proc", "/sys") if os.path.ismount(path))


def _compile_regex(name: str, pattern: str) -> Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise Refusal("invalid_args", f"{name} is not a regular expression: {error}") from None


class _FileSearch:
    def __init__(self, regex: Pattern[str], pattern: str, max_matches: int) -> None:
        self.regex = regex
        # Most patterns are plain words. A block of the file that does not contain the word does not have to be split into lines.
        self.literal = pattern.encode("utf-8", "surrogateescape") if not set(pattern) & set(".^$*+?{}[]\\|()") else None
        self.max_matches = max_matches
        self.lines: list[str] = []
        self.searched = self.binary = self.unreadable = 0
        self.first_error: OSError | None = None
        self.first_unreadable = ""
        self.cut = False

    def search_tree(self, path: str, prefix: str, is_wanted: Callable[[str, str], bool] | None) -> None:
        top = os.open(path, FOLDER_OPEN_FLAGS)
        try:
            for entry in walk(top, True, self.add_error, avoid=_kernel_devices() - {os.fstat(top).st_dev}):
                if stat.S_ISREG(entry.info.st_mode) and (is_wanted is None or is_wanted(entry.path, entry.name)):
                    self.search_file(entry.name, entry.folder_fd, prefix + entry.path)
                    if self.cut:
                        return
        finally:
            os.close(top)

    def add_error(self, path: str, error: OSError) -> None:
        if not self.unreadable:
            self.first_error, self.first_unreadable = error, path
        self.unreadable += 1

    def search_file(self, name: str, folder_fd: int | None, shown: str) -> None:
        try:
            fd = os.open(name, READ_FLAGS | (os.O_NOFOLLOW if folder_fd is not None else 0), dir_fd=folder_fd)
        except FileNotFoundError:
            return
        except OSError as error:
            self.add_error(shown, error)
            return
        try:
            self._search_content(fd, shown)
        except OSError as error:
            self.add_error(shown, error)
        finally:
            os.close(fd)

    def _search_content(self, fd: int, shown: str) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return
        if b"\0" in os.pread(fd, BINARY_PROBE_BYTES, 0):
            self.binary += 1
            return
        self.searched += 1
        label, last = quote_path(shown), 0
        for number, line, start in self._find_matches(fd):
            if number == last:
                continue  # Another piece of the same long line.
            if len(self.lines) == self.max_matches:
                self.cut = True
                return
            last = number
            self.lines.append(f"{label}:{int(number)}:{_clip_line(line, start)}")

    def _find_matches(self, fd: int) -> Iterator[tuple[int, str, int]]:
        find = self.regex.search
        number = 1
        for block, whole in _read_blocks(fd):
            if self.literal is None or self.literal in block:
                at = number
                for line in block.decode("utf-8", "surrogateescape").split("\n"):
                    found = find(line[:-1] if line.endswith("\r") else line)
                    if found:
                        yield at, line, found.start()
                    at += 1
            number += block.count(b"\n") + whole

    def send_reply(self, reply: Reply) -> None:
        notes = []
        if self.cut:
            notes.append(f"[cut after {count_with_noun(len(self.lines), 'match')}: there are more; narrow the pattern, path or glob, or raise max_matches]")
        elif not self.lines:
            notes.append(f"[no match in {count_with_noun(self.searched, 'file')}]")
        if self.first_error is not None:
            first = refusal_for_os_error(self.first_error, self.first_unreadable).detail
            notes.append(f"[{count_with_noun(self.unreadable, 'place')} could not be read, the first: {first}]")
        text = "".join(f"{line}\n" for line in self.lines + notes)
        meta = {"files_searched": self.searched, "files_binary": self.binary, "unreadable": self.unreadable}
        reply.send_text(text, matches=len(self.lines), truncated=self.cut, **meta)


def _read_blocks(fd: int) -> Iterator[tuple[bytes, bool]]:
    """Read a file in blocks of whole lines.

    Yields:
        A block without its last newline, and True; or a piece of a line that is longer than `MAX_PIECE_BYTES`, and False.
    """
    rest = b""
    while True:
        data = os.read(fd, READ_BLOCK_BYTES)
        if not data:
            break
        block = rest + data
        end = block.rfind(b"\n")
        if end >= 0:
            yield block[:end], True
            rest = block[end + 1 :]
        elif len(block) >= MAX_PIECE_BYTES:
            yield block, False
            rest = b""
        else:
            rest = block
    if rest:
        yield rest, True


def _clip_line(line: str, start: int) -> str:
    """Return the line, or the part of a long line around its match."""
    if len(line) <= MAX_SHOWN_CHARS:
        return line
    begin = max(0, min(start - MAX_SHOWN_CHARS // 4, len(line) - MAX_SHOWN_CHARS))
    end = begin + MAX_SHOWN_CHARS
    return f"{'[...]' if begin else ''}{line[begin:end]}{'[...]' if end < len(line) else ''}"


def glob_filter(glob: str) -> Callable[[str, str], bool]:
    """Return a function that checks whether a relative path and its last component match a glob.

    A glob can contain `*`, `?`, `[...]`, `{a,b}` and `**`, which also matches slashes. A glob with a slash is compared with the path, any other with the name.

    Raises:
        Refusal: the glob is not valid.
    """
    regex = _compile_regex("glob", f"(?s:{_translate_glob(glob.lstrip('/') if glob != '/' else glob)})\\Z")
    if "/" in glob:
        return lambda path, name: regex.match(path) is not None
    return lambda path, name: regex.match(name) is not None


def _translate_glob(glob: str) -> str:
    out, at, depth = "", 0, 0
    while at < len(glob):
        char = glob[at]
        at += 1
        if char == "*" and glob[at : at + 2] == "*/":
            out, at = f"{out}(?:.*/)?", at + 2
        elif char == "*" and glob[at : at + 1] == "*":
            out, at = f"{out}.*", at + 1
        elif char in "*?":
            out += "[^/]*" if char == "*" else "[^/]"
        elif char == "[" and "]" in glob[at + 1 :]:
            end = glob.index("]", at + 1)
            inner = glob[at:end].replace("\\", "\\\\").replace("[", "\\[")
            out, at = out + f"[{(f'^{inner[1:]}' if inner[0] == '!' else inner)}]", end + 1
        elif char == "{" and "}" in glob[at:]:
            out, depth = f"{out}(?:", depth + 1
        elif depth and char in ",}":
            out, depth = out + ("|" if char == "," else ")"), depth - (char == "}")
        else:
            out += re.escape(char)
    return out + ")" * depth
