"""The service, which stops soon although requests run: `python -m tests.support.quick_stop_main`, with the arguments of `python -m sandbox_server`."""

from __future__ import annotations

import sys

from sandbox_server.__main__ import main
from sandbox_server.app import Parts

if __name__ == "__main__":
    sys.exit(main(parts=Parts(requests_grace_s=0.2)))
