"""A map of an allocator's pages over time, drawn from a recorded trace.

Record with octavo.pages.Trace, then

    python -m octavo.pages trace.npz -o pages.svg

draws one column a step and one row a page: a colour for each sequence that holds pages of its own, dark grey
for pages that several share, a light tint for free ones still found by their tokens. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import colorsys
import sys
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo._core import PageAllocator

FREE, CACHED, SHARED, RESERVED = -1, -2, -3, -4  # as PageAllocator.page_map()
STATES = {
    SHARED: ("shared", (0.25, 0.25, 0.25)),
    CACHED: ("cached", (0.87, 0.92, 0.97)),
    RESERVED: ("copied or in transfer", (0.85, 0.1, 0.1)),
    FREE: ("free", (1.0, 1.0, 1.0)),
}
PRIVATE_EXAMPLE = (0.35, 0.65, 0.45)


class Trace:
    """Who holds which page, step by step.

    Args:
        alloc: the allocator to look at.
        group: of layers.

    A trace file is what numpy.savez_compressed makes of
        page_map: int64 [num_steps, num_pages], each row as PageAllocator.page_map() gives it.
        page_size: int64, tokens in a page.
    """

    def __init__(self, alloc: PageAllocator, group: int = 0) -> None:
        self._alloc = alloc
        self._group = group
        self._rows: list[NDArray[np.int64]] = []

    def record(self) -> None:
        """Takes the map of this moment; O(pages)."""
        self._rows.append(self._alloc.page_map(self._group))

    def page_map(self) -> NDArray[np.int64]:
        """What was recorded: int64 [num_steps, num_pages]."""
        if not self._rows:
            return np.empty((0, len(self._alloc.page_map(self._group))), np.int64)
        return np.stack(self._rows)

    def save(self, path: str | Path) -> None:
        """Writes the trace file."""
        page_size = int(self._alloc.stats(self._group)["page_size"])
        np.savez_compressed(path, page_map=self.page_map(), page_size=np.int64(page_size))


def colours(page_map: NDArray[np.int64]) -> NDArray[np.float64]:
    """RGB of each entry: [..., 3]. A sequence keeps its colour; sequences in order of handle differ most."""
    codes, positions = np.unique(page_map, return_inverse=True)
    palette = np.empty((len(codes), 3))
    first_sequence = int(np.searchsorted(codes, 0))
    for i, code in enumerate(codes):
        if i < first_sequence:
            palette[i] = STATES[int(code)][1]
        else:
            turn = (i - first_sequence) * 0.61803398875 % 1.0  # the golden ratio spreads hues evenly
            hue = 0.07 + 0.86 * turn  # red means something else
            palette[i] = colorsys.hls_to_rgb(hue, 0.58, 0.55)
    return palette[positions].reshape(*page_map.shape, 3)


def draw(page_map: NDArray[np.int64], path: str | Path, title: str = "") -> None:
    """Draws a map [num_steps, num_pages] to an .svg or .png file; ModuleNotFoundError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow(colours(page_map).transpose(1, 0, 2), aspect="auto", interpolation="nearest", origin="lower")
    axes.set(xlabel="step", ylabel="page", title=title)
    kinds = {"one sequence's own (a colour each)": PRIVATE_EXAMPLE} | dict(STATES.values())
    patches = [Patch(facecolor=colour, edgecolor="0.6", label=label) for label, colour in kinds.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize="small")
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m octavo.pages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trace", type=Path, help="what Trace.save() wrote")
    parser.add_argument("-o", "--output", type=Path, default=Path("pages.svg"), help=".svg or .png file")
    parser.add_argument("--title", default="")
    args = parser.parse_args(arguments)
    if args.output.suffix not in (".svg", ".png"):
        parser.error(f"output must end in .svg or .png; got {args.output}")
    try:
        with np.load(args.trace) as trace:
            page_map = trace["page_map"]
    except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        parser.error(f"{args.trace} must be a file that Trace.save() wrote ({error})")
    if page_map.size == 0:
        parser.error(f"{args.trace} has no steps")
    try:
        draw(page_map, args.output, args.title)
    except ModuleNotFoundError as error:
        parser.error(f"drawing needs {error.name}: pip install matplotlib")
    print(args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
