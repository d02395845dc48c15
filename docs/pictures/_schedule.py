"""What the drawings of the kernels have in common: boxes by what is done in them, lanes of time, a legend."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from _picture import COLOURS, EMPTY, FAINT, INK, PAPER, SHARED, Picture

KINDS = {  # the fill and the outline of what is done
    "copy": ("#d3e2f4", COLOURS["A"]),
    "product": ("#fae0c8", COLOURS["B"]),
    "softmax": ("#d3ead8", COLOURS["C"]),
    "combine": ("#e4daf0", SHARED),
    "plain": (PAPER, INK),
    "none": (EMPTY, FAINT),
    "grey": ("#e2e5ea", INK),  # by turns with plain ones, to tell neighbours apart
}
MEANINGS = {
    "copy": "copies",
    "product": "products on tensor cores",
    "softmax": "other arithmetic",
    "combine": "partial results",
}
LINE = 16  # from one line of text to the next


def heading(picture: Picture, x: float, y: float, words: str) -> None:
    picture.text(x, y, words, 15, anchor="start", weight=600)


def lines(
    picture: Picture, x: float, y: float, text: Sequence[str], size: int = 12, anchor: str = "start"
) -> None:
    """Lines of text, the first one at y."""
    for i, line in enumerate(text):
        picture.text(x, y + i * LINE, line, size, anchor=anchor)


def paragraph(picture: Picture, x: float, y: float, text: str, columns: int = 118) -> None:
    """Text in lines of this many characters at most."""
    lines(picture, x, y, textwrap.wrap(text, columns))


def block(
    picture: Picture,
    x: float,
    y: float,
    w: float,
    h: float,
    words: str | Sequence[str] = "",
    kind: str = "plain",
    size: int = 12,
) -> None:
    """A box with text in its middle."""
    fill, stroke = KINDS[kind]
    picture.box(x, y, w, h, fill, stroke)
    text = [words] if isinstance(words, str) else words
    first = y + h / 2 + size * 0.36 - (len(text) - 1) * LINE / 2
    for i, line in enumerate(text):
        picture.text(x + w / 2, first + i * LINE, line, size)


def legend(picture: Picture, x: float, y: float, kinds: Sequence[str] = tuple(MEANINGS)) -> None:
    """What the colours mean, in one line."""
    for kind in kinds:
        fill, stroke = KINDS[kind]
        picture.box(x, y - 11, 14, 14, fill, stroke, r=2)
        picture.text(x + 20, y, MEANINGS[kind], 12, anchor="start")
        x += 44 + 6.9 * len(MEANINGS[kind])


class Lanes:
    """What several actors do over time, from left to right: a lane each, with bars."""

    def __init__(self, picture: Picture, left: float, unit: float, height: int = 24) -> None:
        self._picture = picture
        self._left = left
        self._unit = unit
        self._height = height

    def x_of(self, time: float) -> float:
        return self._left + time * self._unit

    def lane(self, y: float, name: str, bars: Sequence[tuple[float, float, str, str]], end: float) -> None:
        """Bars are begin, end, words and kind; the lane ends at `end`."""
        self._picture.text(self._left - 12, y + self._height / 2 + 4, name, 12, anchor="end")
        self._picture.box(self._left, y, (end * self._unit), self._height, EMPTY, EMPTY, r=2)
        for begin, until, words, kind in bars:
            width = (until - begin) * self._unit
            block(self._picture, self.x_of(begin), y, width, self._height, words, kind, 11)

    def mark(self, time: float, y0: float, y1: float) -> None:
        """A moment that several lanes share."""
        x = self.x_of(time)
        self._picture.line(x, y0, x, y1, INK)

    def axis(self, y: float, end: float) -> None:
        self._picture.arrow(self._left, y, self.x_of(end), y, FAINT)
        self._picture.text(self.x_of(end), y + 14, "time", 11, anchor="end")
