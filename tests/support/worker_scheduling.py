"""Which tests run in the same worker process of pytest-xdist."""

from __future__ import annotations

from typing import Final

from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

#: Tests whose nodes begin with one of these run in one worker: the name of the group, and its beginnings.
GROUPS: Final = {
    "hostile": ("tests/hostile/",),  # they share their services and their table
    "environments": ("tests/integration/environments/", "tests/docs/test_documents.py"),  # they share the prepared environments, which take 5 s to import
}


class WorkerScheduling(LoadScopeScheduling):
    """Gives whole files to the workers, so that the tests of a file share their fixtures, and some groups of files, which share more.

    The marks of `--dist loadgroup` are not used: pytest-xdist 3.8 writes them into the identifiers of the tests, where pytest 9.2 and newer ignores them.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((group for group, beginnings in GROUPS.items() if file.startswith(beginnings)), file)
