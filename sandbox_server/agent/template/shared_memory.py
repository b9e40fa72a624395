"""Arranges the memory of the template so that inits change as little of it as possible: each page that one changes is copied, and its slot then holds the copy.

An object changes whenever it is used, because its references are counted. So what inits use lies close together: it is imported last, after all gaps between
other objects have been filled. And the interpreter remembers which attribute a name means; an init finds that in the memory that it shares.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any, Iterable, Iterator, List, Sequence, Set

_LARGEST_SMALL_OBJECT_BYTES, _SIZE_STEP_BYTES = 512, 16
#: The memory of small objects is divided into pools, each of which has objects of one size. Their first bytes describe the pool.
_POOL_BYTES, _POOL_HEADER_BYTES = (16 << 10) if sys.version_info >= (3, 10) else (4 << 10), 48
_BYTES_OVERHEAD = sys.getsizeof(b"")
_MOST_FILLED_BYTES = 64 << 10  # of each size, so that little memory is lost should an interpreter manage its memory in another way

_fillers: List[Any] = []


def prepare() -> None:
    """Prepare the memory. Call it before anything is imported that inits use.

    First it imports what only the children of inits use that they fork for file operations: they share its memory, too, and need no time for it.
    """
    from sandbox_server.agent.inslot import child, files, search, transfer  # noqa: F401

    _fill_gaps()


def _fill_gaps() -> None:
    """Create objects in the gaps that ended objects have left in the pools, so that every further object lies in a new pool, beside those that follow it."""
    for size in range(_SIZE_STEP_BYTES, _LARGEST_SMALL_OBJECT_BYTES + 1, _SIZE_STEP_BYTES):
        for number in range(_MOST_FILLED_BYTES // size):
            filler = _new_object(size, number)
            _fillers.append(filler)
            if id(filler) % _POOL_BYTES == _POOL_HEADER_BYTES:
                break  # It is the first one of a new pool, so the others are full.


def _new_object(size: int, number: int) -> Any:
    """Return a new object of which so many bytes lie in a pool, and that refers to no other object."""
    if size >= _BYTES_OVERHEAD + 2:  # The interpreter makes shorter ones only once.
        return bytes(size - _BYTES_OVERHEAD)
    return object() if size == sys.getsizeof(object()) else float(number)


def remember_attributes(modules: Sequence[ModuleType], types: Sequence[type]) -> None:
    """Have the interpreter look up, and so remember, the attributes of modules and of instances that the code of some modules uses.

    Args:
        modules: the modules.
        types: the types of the instances.
    """
    names: Set[str] = set()
    for module in modules:
        for code in _list_code(vars(module).values(), module.__name__):
            names.update(code.co_names)
    for name in sorted(names):
        hasattr(sys, name)  # It remembers this for modules in general, also that they have no such attribute of their type.
        for kind in types:
            if any(name in vars(base) for base in kind.__mro__):
                getattr(kind, name)


def _list_code(values: Iterable[Any], module_name: str) -> Iterator[CodeType]:
    """Yield the code of the functions among the values that a module defines, and of the methods of its classes."""
    for value in values:
        if getattr(value, "__module__", None) != module_name:
            continue
        if isinstance(value, type):
            yield from _list_code(vars(value).values(), module_name)
        elif hasattr(value, "__code__"):
            yield value.__code__
