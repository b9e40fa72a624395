"""Writing a download to a local file."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_when_complete(target: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `target` if the block succeeds, and is deleted if it raises."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    with open(partial, "xb") as file:
        try:
            yield file
            file.flush()
            os.replace(partial, target)
        except BaseException:  # also if the download is cancelled: no incomplete file stays
            os.unlink(partial)
            raise
