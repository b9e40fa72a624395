"""How the template arranges its memory, and what inits do not change of it."""

from __future__ import annotations

import subprocess
import sys
from marshal import dumps, loads

from sandbox_server.agent.init.reports import MARSHAL_VERSION
from tests.support.users import ROOT

# Leaves gaps between small objects, has them filled, and prints the distance of each new object from the one before it.
DISTANCES = """
import sys
sys.path.insert(0, sys.argv[1])
from sandbox_server.agent.template import shared_memory
scattered = [bytes(100) for _ in range(400)]
del scattered[::2]
if sys.argv[2] == "prepared":
    shared_memory.prepare()
objects = [bytes(100) for _ in range(20)]
print(*(id(after) - id(before) for before, after in zip(objects, objects[1:])))
"""


def distances_between_new_objects(how: str) -> set[str]:
    argv = [sys.executable, "-I", "-S", "-B", "-c", DISTANCES, str(ROOT), how]
    return set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())


def test_what_is_created_in_prepared_memory_lies_close_together() -> None:
    assert distances_between_new_objects("prepared") == {"144"}
    assert distances_between_new_objects("as it is") != {"144"}


def test_the_texts_of_a_request_are_no_objects_that_the_receiver_has_already() -> None:
    (received,) = loads(dumps({"workspace": 1}, MARSHAL_VERSION))
    (known,) = {"workspace": 1}

    assert received == known
    assert received is not known
