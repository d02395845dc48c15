"""What the user sees: the text as it comes, the prefill's progress, and a table at the end."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import octavo
from octavo.serving import Output, Statistics

LIVE_LINES = 6  # of an unfinished text


class Display(Protocol):
    def __enter__(self) -> Display: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def prefilled(self, num_tokens: int) -> None: ...
    def write(self, output: Output, text: str) -> None: ...


def make_display(prompts: list[str], num_samples: int, prefill_total: int) -> Display:
    kind = TerminalDisplay if sys.stdout.isatty() else LineDisplay
    return kind(prompts, num_samples, prefill_total)


class Labels:
    """The prompt's number, or prompt.sample where there are several samples; counted from 1."""

    def __init__(self, num_prompts: int, num_samples: int) -> None:
        self.single = num_prompts == num_samples == 1
        self._num_samples = num_samples

    def of(self, output: Output) -> str:
        sample = f".{output.sample + 1}" if self._num_samples > 1 else ""
        return f"{output.request.index + 1}{sample}"


def progress_bar(console: Console, total: int) -> Progress:
    columns = TextColumn("prefill"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens")
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task("prefill", total=total)
    return progress


class LineDisplay:
    """For pipes and files: a line at a time, labelled; a single text as it comes, unlabelled. The progress
    bar goes to standard error, if that is a terminal."""

    def __init__(self, prompts: list[str], num_samples: int, prefill_total: int) -> None:
        self._labels = Labels(len(prompts), num_samples)
        self._prompts = prompts
        self._unfinished_lines: dict[str, str] = {}
        self._progress = progress_bar(Console(stderr=True), prefill_total)

    def __enter__(self) -> LineDisplay:
        if not self._labels.single:
            for number, prompt in enumerate(self._prompts, 1):
                print(f"[{number}] > {prompt}")
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        for label, line in self._unfinished_lines.items():  # of texts that were interrupted
            if line.strip():
                print(f"[{label}] {line}", flush=True)

    def prefilled(self, num_tokens: int) -> None:
        self._progress.update(self._progress.task_ids[0], completed=num_tokens)
        if self._progress.finished:
            self._progress.stop()

    def write(self, output: Output, text: str) -> None:
        end = "\n" if output.finish_reason else ""
        if self._labels.single:
            print(text, end=end, flush=True)
            return
        label = self._labels.of(output)
        *lines, rest = (self._unfinished_lines.get(label, "") + text + end).split("\n")
        self._unfinished_lines[label] = rest
        for line in filter(str.strip, lines):
            print(f"[{label}] {line}", flush=True)


class TerminalDisplay:
    """A panel for each running text, redrawn as it grows; a finished one scrolls up and stays."""

    def __init__(self, prompts: list[str], num_samples: int, prefill_total: int) -> None:
        self._labels = Labels(len(prompts), num_samples)
        self._prompts = prompts
        self._texts: dict[str, tuple[Output, str]] = {}  # by label; the last output
        self._console = Console()
        self._progress = progress_bar(self._console, prefill_total)
        self._live = Live(console=self._console, get_renderable=self._render, transient=True)

    def __enter__(self) -> TerminalDisplay:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def prefilled(self, num_tokens: int) -> None:
        self._progress.update(self._progress.task_ids[0], completed=num_tokens)

    def write(self, output: Output, text: str) -> None:
        label = self._labels.of(output)
        _, before = self._texts.get(label, (output, ""))
        self._texts[label] = output, before + text
        if output.finish_reason:
            self._console.print(self._panel(*self._texts.pop(label)))

    def _render(self) -> RenderableType:
        running = list(self._texts.values())  # the display's own thread draws while texts are added
        panels = [self._panel(output, last_lines(text, self._console.width - 4)) for output, text in running]
        return Group(*panels) if self._progress.finished else Group(self._progress, *panels)

    def _panel(self, output: Output, text: str) -> Panel:
        prompt = self._prompts[output.request.index].split("\n")[0]
        title = Text(prompt if self._labels.single else f"{self._labels.of(output)}  {prompt}")
        title.truncate(self._console.width - 8, overflow="ellipsis")
        return Panel(Text(text), title=title, title_align="left")


def last_lines(text: str, width: int) -> str:
    return "\n".join(text.split("\n")[-LIVE_LINES:])[-LIVE_LINES * width :]


def summary(statistics: Statistics, cache: octavo.KVCache) -> Table:
    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens / seconds:.0f} tokens/s ({tokens} tokens)" if tokens else "none"

    used, unshared = statistics.peak_used_pages, statistics.peak_unshared_pages
    table = Table(show_header=False)
    table.add_row("prefill", rate(statistics.prefill_tokens, statistics.prefill_seconds))
    table.add_row("decode", rate(statistics.decode_tokens, statistics.decode_seconds))
    table.add_row("prompt tokens shared, not computed", f"{statistics.found_tokens}")
    megabytes = cache.num_pages * cache.page_size * cache.bytes_per_token / 1e6
    table.add_row("memory of the cache", f"{cache.bytes_per_token} bytes a token, {megabytes:.1f} MB in all")
    table.add_row("pages used at the peak", f"{used} of {cache.num_pages}")
    table.add_row("pages saved by sharing", f"{unshared - used} ({unshared} without it)")
    table.add_row("waste in used pages", f"{statistics.peak_waste_percent:.1f} %")
    if statistics.num_preemptions:
        times = "once" if statistics.num_preemptions == 1 else f"{statistics.num_preemptions} times"
        table.add_row("gave way for lack of pages", times)
    return table
