"""`sandbox run-many`: many programs of a file, each in a fresh slot of its own."""

from __future__ import annotations

import base64
import json
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from env_client.cli.arguments import PoolOption, RunOption, read_count
from env_client.cli.connection import connect_to_service
from env_client.cli.exit_codes import PROGRAM_FAILED
from env_client.cli.failures import Failure, Interrupted
from env_client.cli.printer import JsonFlag, Printer, to_json_value
from env_client.client import SandboxClient
from env_client.errors import InvalidRequest, SandboxError
from env_client.messages.programs import Artifact, ProgramResult

STANDARD_INPUT = "-"
_LINE_HELP = 'each line is a program, such as {"tool": "bash", "args": {"command": "python3 main.py"}, "files": {"main.py": "print(42)"}}'


def run_many(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl", hidden=True)],
    pool: PoolOption = None,
    run_id: RunOption = None,
    max_parallel: Annotated[
        int | None, typer.Option("--max-parallel", metavar="N", parser=read_count, help="How many run at once.  [default: half of the pool's slots]")
    ] = None,
    request_key: Annotated[
        str | None, typer.Option("--request-key", metavar="KEY", help="Names the request: the same key gets the same results again, for an hour.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the results to a file.  [default: standard output]")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run many programs, each in a fresh slot of its own. Each line of the file is a program, and each line of the output its result, as it finishes.

    The exit code is 1 if a program did not succeed.
    """
    printer = Printer(as_json)
    programs = _read_programs(file)
    own_run_id = f"cli-{secrets.token_hex(8)}"
    summary = Summary(len(programs), keeps_results=as_json and output is None)
    with connect_to_service() as client, ExitStack() as stack:
        target = _open_target(output, stack) if output is not None else None if as_json else sys.stdout
        results = client.run_many(programs, pool=pool, run_id=run_id or own_run_id, request_key=request_key, max_parallel=max_parallel)
        try:
            _collect(results, target, summary, show_bar=not as_json and (output is not None or not sys.stdout.isatty()))
        except InvalidRequest as error:
            raise _failure_of_line(file, error) from error
        except Interrupted:
            if run_id is None and request_key is None:
                _end_programs(client, own_run_id, printer)
            raise
    if as_json:
        printer.print_json(summary.document())
    else:
        printer.print_note(summary.sentence())
    if summary.succeeded_count < summary.count:
        raise typer.Exit(PROGRAM_FAILED)


class Summary:
    """What came of the programs.

    Args:
        count: how many there are.
        keeps_results: whether the results are kept for the JSON document.
    """

    def __init__(self, count: int, *, keeps_results: bool) -> None:
        self.count = count
        self.succeeded_count = 0
        self._results: list[dict[str, Any]] | None = [] if keeps_results else None
        self._failures: Counter[str] = Counter()

    def add(self, result: ProgramResult, document: dict[str, Any]) -> None:
        """Count a result."""
        if result.success:
            self.succeeded_count += 1
        else:
            self._failures[f"exit code {result.exit_code}" if result.reason == "exit" else result.reason] += 1
        if self._results is not None:
            self._results.append(document)

    def document(self) -> dict[str, Any]:
        """The document that `--json` prints, with the results in the order of the programs."""
        counts: dict[str, Any] = {"count": self.count, "succeeded": self.succeeded_count, "failed": dict(self._failures)}
        return counts if self._results is None else {**counts, "results": sorted(self._results, key=lambda result: int(result["index"]))}

    def sentence(self) -> str:
        """The note for standard error."""
        failures = ", ".join(f"{count:,} {what}" for what, count in self._failures.most_common())
        return f"{self.succeeded_count:,} of {self.count:,} programs succeeded" + (f"; {failures}" if failures else "")


def _read_programs(file: str) -> list[Mapping[str, Any]]:
    """Read the programs of a file, or of standard input."""
    with ExitStack() as stack:
        source: TextIO = sys.stdin if file == STANDARD_INPUT else stack.enter_context(open(file, encoding="utf-8"))
        try:
            lines = [line for line in source if line.strip()]
        except UnicodeDecodeError as error:
            raise Failure(f"{file} is not text in UTF-8", 'send other bytes as base64: {"files": {"data": {"base64": "…"}}}') from error
    programs: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            program = json.loads(line)
        except ValueError as error:
            raise Failure(f"{file}: program {number} is not JSON: {error}", _LINE_HELP) from error
        if not isinstance(program, dict):
            raise Failure(f"{file}: program {number} is not a JSON object", _LINE_HELP)
        programs.append(program)
    if not programs:
        raise Failure(f"{file} has no programs", _LINE_HELP)
    return programs


def _open_target(output: Path, stack: ExitStack) -> TextIO:
    return stack.enter_context(output.open("w", encoding="utf-8"))


def _collect(results: Iterator[ProgramResult], target: TextIO | None, summary: Summary, *, show_bar: bool) -> None:
    """Write each result as a line, and show how many there are on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Standard output is for the results, which the bar must not redirect to standard error.
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False, disable=not (show_bar and console.is_terminal))
    with bar:
        task = bar.add_task("programs", total=summary.count)
        for result in results:
            document = _document(result)
            summary.add(result, document)
            if target is not None:
                target.write(json.dumps(document) + "\n")
                target.flush()
            bar.advance(task)


def _document(result: ProgramResult) -> dict[str, Any]:
    """The result as the HTTP contract has it."""
    document: dict[str, Any] = to_json_value({**{name: getattr(result, name) for name in _FIELDS}})
    return {**document, "artifacts": {path: _artifact(artifact) for path, artifact in result.artifacts.items()}}


_FIELDS = tuple(name for name in ProgramResult.__dataclass_fields__ if name != "artifacts")


def _artifact(artifact: Artifact) -> dict[str, str]:
    if artifact.content is None:
        return {"error": artifact.error, "code": artifact.code}
    return {"base64": base64.b64encode(artifact.content).decode("ascii")}


def _failure_of_line(file: str, error: InvalidRequest) -> Failure | InvalidRequest:
    """Name the program that the service refuses as people count the lines of a file."""
    index = error.extra.get("index")
    if not isinstance(index, int):
        return error
    return Failure(f"{file}: program {index + 1}: {error.detail}", _LINE_HELP, error.code)


def _end_programs(client: SandboxClient, run_id: str, printer: Printer) -> None:
    try:
        client.release(run_id=run_id)
    except SandboxError as error:
        printer.print_note(f"the programs that run could not be ended; they end at their timeouts: {error.detail}")
