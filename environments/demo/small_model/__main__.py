"""Runs a program with the small model as its model server: `python -m environments.demo.small_model COMMAND… -- PROGRAM ARGUMENT…`.

The model answers each prompt with one of the commands, chosen at random, and never learns. The program finds the server, its type and the tokenizer in
environment variables, so `python x_env.py process` needs no further settings.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from environments.demo.model_server import LocalServer
from environments.demo.small_model.policy import CommandPolicy
from environments.demo.small_model.server import PolicyApplication
from environments.demo.tokenizer import TextTokenizer, make_tokenizer

_USAGE = "usage: python -m environments.demo.small_model COMMAND [COMMAND …] -- PROGRAM [ARGUMENT …]\n"


async def run_program(commands: Sequence[str], program: Sequence[str]) -> int:
    """Run a program with the small model as its model server, and return its exit code.

    Args:
        commands: the commands that the model can choose.
        program: the program and its arguments.
    """
    with tempfile.TemporaryDirectory(prefix="small-model-") as folder:
        tokenizer = TextTokenizer.load(make_tokenizer(Path(folder)))
        async with LocalServer(PolicyApplication(CommandPolicy(commands, tokenizer), tokenizer)) as server:
            variables = {"ATROPOS_SERVER_BASE_URL": server.base_url, "ATROPOS_SERVER_TYPE": "vllm", "TOKENIZER_NAME": folder, "HF_HUB_OFFLINE": "1"}
            process = await asyncio.create_subprocess_exec(*program, env=os.environ | variables)
            try:
                return await process.wait()
            finally:
                if process.returncode is None:  # this task was cancelled
                    with suppress(ProcessLookupError):
                        process.terminate()
                    await process.wait()


def main(arguments: Sequence[str]) -> int:
    """Run a program with the small model. Returns the exit code of the program."""
    commands, program = (arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]) if "--" in arguments else ((), ())
    if not commands or not program:
        sys.stderr.write(_USAGE)
        return 2
    try:
        code = asyncio.run(run_program(commands, program))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
