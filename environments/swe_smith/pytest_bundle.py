"""The pytest of this process, for slots that have none and no network: pytest and what it needs are pure Python."""

from __future__ import annotations

import io
import re
import tarfile
from functools import cache
from importlib import metadata

from environments.swe_smith.slot_steps import StepFailed

#: The distributions that pytest needs, those that only older versions of Python need included.
DISTRIBUTIONS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")


def supports(python_version: str) -> bool:
    """Whether the pytest of this process runs on a version of Python such as `3.11`."""
    required = metadata.metadata("pytest")["Requires-Python"] or ""
    found = re.search(r">=\s*(\d+)\.(\d+)", required)
    major, minor = (int(part) for part in python_version.split(".")[:2])
    return found is None or (major, minor) >= (int(found[1]), int(found[2]))


@cache
def packed_pytest(*, with_pygments: bool) -> bytes:
    """Return a gzipped tar of pytest and what it needs, to be unpacked into a folder `site-packages`.

    Args:
        with_pygments: whether to include Pygments, which has more files than all others together, and which many interpreters have.

    Raises:
        StepFailed: this process has no pytest.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=6) as archive:
        for name in DISTRIBUTIONS:
            if name == "pygments" and not with_pygments:
                continue
            try:
                distribution = metadata.distribution(name)
            except metadata.PackageNotFoundError:
                if name == "pytest":
                    raise StepFailed("the slot has no pytest, and neither has this process: install pytest beside the environment, or in the image") from None
                continue  # needed by older versions of Python alone
            for file in distribution.files or ():
                if ".." in file.parts or "__pycache__" in file.parts or file.suffix in (".so", ".pyc"):
                    continue  # programs outside of site-packages, and what is compiled for this machine
                archive.add(str(distribution.locate_file(file)), arcname=str(file), recursive=False)
    return buffer.getvalue()
