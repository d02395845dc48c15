"""What the benchmarks share of a command: options, the choice of rows, and what becomes of measured ones.

Needs neither torch nor a GPU.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from _report import exit_status, read_rows, write_rows


class Named(Protocol):
    @property
    def name(self) -> str: ...


AnyCase = TypeVar("AnyCase", bound=Named)
AnyRow = TypeVar("AnyRow")

OPTIONS: dict[str, dict[str, Any]] = {
    "--rows": {"metavar": "REGEX", "type": re.compile, "help": "only rows whose name it finds"},
    "--list": {"action": "store_true", "help": "print the rows; needs no GPU"},
    "--json": {"metavar": "PATH", "type": Path, "help": "write one JSON object a row here"},
    "--from-json": {"metavar": "PATH", "type": Path, "help": "show these rows; measure nothing"},
}


class Parser(argparse.ArgumentParser):
    """Its description is a benchmark's docstring."""

    def __init__(self, doc: str | None) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)

    def add_shared(self, *options: str) -> None:
        for option in options:
            self.add_argument(option, **OPTIONS[option])

    def add_quick(self, rounds: int = 31, few: int = 5) -> None:
        """--quick, which sets `rounds` of the parsed arguments."""
        text = f"{few} replays instead of {rounds}"
        self.add_argument(
            "--quick", dest="rounds", action="store_const", const=few, default=rounds, help=text
        )

    def split_names(self, option: str, names: str, known: Iterable[str]) -> tuple[str, ...]:
        """The names between commas; an error unless all are known."""
        found = tuple(names.split(","))
        for name in found:
            if name not in known:
                self.error(f"{option}: there is no {name!r}; there are {', '.join(known)}")
        return found


def matching(cases: Iterable[AnyCase], pattern: re.Pattern[str] | None) -> list[AnyCase]:
    """Those whose name the pattern of --rows finds; ends the program if it finds none."""
    named = list(cases)
    if pattern is None:
        return named
    found = [case for case in named if pattern.search(case.name)]
    if not found:
        raise SystemExit(
            f"--rows: {pattern.pattern!r} finds none of {len(named)} rows, "
            "which --list with the same other options names"
        )
    return found


def show_rows(
    rows: Iterable[AnyRow],
    format_row: Callable[[AnyRow], str],
    path: Path | None,
    write: Callable[[Path, list[AnyRow]], None] = write_rows,
) -> list[AnyRow]:
    """Print each row as soon as it is measured, and write all so far: whatever ends a run leaves these."""
    shown = []
    for row in rows:
        shown.append(row)
        print(format_row(row))
        if path:
            write(path, shown)
    return shown


def run(
    args: argparse.Namespace,
    select: Callable[[argparse.Namespace], list[AnyCase]],
    list_cases: Callable[[list[AnyCase]], None],
    measure: Callable[[argparse.Namespace, list[AnyCase]], list[AnyRow]],
    format_rows: Callable[[list[AnyRow]], str] | None = None,
    *,
    read: Callable[[Path], list[AnyRow]] = read_rows,
    finish: Callable[[list[AnyRow]], int] = exit_status,
) -> int:
    """List the cases, or measure them, or show the rows of --from-json, where there is such an option."""
    # Line by line into a pipe or a file as well: a run that is killed has said how far it came.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if args.list:
        list_cases(select(args))
        return 0
    if format_rows is not None and args.from_json:
        rows = read(args.from_json)
        print(format_rows(rows))
    else:
        rows = measure(args, select(args))
    return finish(rows)


def on_machine(
    measure: Callable[[AnyCase, int, float], dict[str, Any]],
) -> Callable[[int], Callable[[AnyCase], dict[str, Any]]]:
    """What starts a table of rows that say where they ran: `with_machine`, which needs a GPU from then on."""

    def start(rounds: int) -> Callable[[AnyCase], dict[str, Any]]:
        from _device import with_machine

        return with_machine(measure, rounds)

    return start


@dataclass(frozen=True)
class Table(Generic[AnyCase]):
    """A benchmark of a single table: what it measures, and its columns."""

    doc: str | None
    cases: Sequence[AnyCase]
    # Called once with the number of replays; what it returns measures a case, and gives the row for JSON. A
    # row that is "wrong" has no times, but its "error".
    start: Callable[[int], Callable[[AnyCase], dict[str, Any]]]
    columns: Mapping[str, Callable[[dict[str, Any]], str]]  # by heading; the first is the row's name
    list_line: Callable[[AnyCase], str] = lambda case: case.name

    def header(self) -> str:
        return f"| {' | '.join(self.columns)} |\n|---|{'--:|' * (len(self.columns) - 1)}"

    def format_row(self, row: dict[str, Any]) -> str:
        name, *others = self.columns.values()
        cells = [f"wrong: off by {row['error']:.3g}"] if "wrong" in row else [cell(row) for cell in others]
        return f"| {' | '.join([name(row), *cells])} |"

    def main(self, argv: list[str] | None = None) -> int:
        parser = Parser(self.doc)
        parser.add_shared("--rows", "--list")
        parser.add_quick()
        parser.add_shared("--json")
        return run(parser.parse_args(argv), self._select, self._list_cases, self._measure)

    def _select(self, args: argparse.Namespace) -> list[AnyCase]:
        return matching(self.cases, args.rows)

    def _list_cases(self, cases: list[AnyCase]) -> None:
        print(*map(self.list_line, cases), sep="\n")

    def _measure(self, args: argparse.Namespace, cases: list[AnyCase]) -> list[dict[str, Any]]:
        measure_case = self.start(args.rounds)
        print(self.header())
        return show_rows(map(measure_case, cases), self.format_row, args.json)
