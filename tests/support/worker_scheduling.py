"""Which tests run in the same worker process of pytest-xdist."""

from __future__ import annotations

from typing import Final

from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

HOSTILE: Final = "tests/hostile/"


class WorkerScheduling(LoadScopeScheduling):
    """Gives whole files to the workers, so that the tests of a file share their fixtures; the hostile suite shares its services and its table.

    The marks of `--dist loadgroup` are not used: pytest-xdist 3.8 writes them into the identifiers of the tests, where pytest 9.2 and newer ignores them.
    """

    @override
    def _split_scope(self, nodeid: str) -> str:
        return HOSTILE if nodeid.startswith(HOSTILE) else nodeid.split("::", 1)[0]
