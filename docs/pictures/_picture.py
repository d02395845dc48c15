"""What the pictures of the documentation are drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

INK, FAINT, PAPER = "#1f2937", "#9ca3af", "#ffffff"
EMPTY, RESERVED = "#f3f4f6", "#cbd0d8"
COLOURS = {"A": "#4f86c6", "B": "#e08e45", "C": "#5aa469"}
SHARED = "#8d6fb8"


class Picture:
    """An SVG on paper of its own, so that it can be read on a light page and on a dark one."""

    def __init__(self, width: int, height: int) -> None:
        self._size = width, height
        self._parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = PAPER, stroke: str = INK, r: int = 3
    ) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}" fill="{fill}" '
            f'stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        fill: str = INK,
        anchor: str = "middle",
        weight: int = 400,
    ) -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-weight="{weight}">{escape(words)}</text>'
        )

    def code(
        self, x: float, y: float, words: str, size: int = 13, fill: str = INK, anchor: str = "middle"
    ) -> None:
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}" '
            f'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace">{escape(words)}</text>'
        )

    def dot(self, x: float, y: float, fill: str) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{fill}" stroke="{PAPER}"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str = FAINT) -> None:
        self._parts.append(f'<path d="M{x0:g},{y0:g} L{x1:g},{y1:g}" stroke="{colour}" stroke-width="1"/>')

    def curve(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str = INK) -> None:
        """From left to right, leaving and arriving level."""
        middle = (x0 + x1) / 2
        self._parts.append(
            f'<path d="M{x0:g},{y0:g} C{middle:g},{y0:g} {middle:g},{y1:g} {x1 - 6:g},{y1:g}" fill="none" '
            f'stroke="{colour}" stroke-width="1.6"/>'
            f'<path d="M{x1:g},{y1:g} l-8,-4 v8 z" fill="{colour}"/>'
        )

    def arrow_down(self, x: float, y0: float, y1: float) -> None:
        """From y0 to y1; upwards where y1 is the smaller."""
        back = 8 if y1 < y0 else -8
        self._parts.append(
            f'<path d="M{x:g},{y0:g} V{y1 + back / 2:g}" stroke="{INK}" stroke-width="1.6"/>'
            f'<path d="M{x:g},{y1:g} l-4,{back} h8 z" fill="{INK}"/>'
        )

    def save(self, path: Path) -> None:
        width, height = self._size
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="system-ui, Helvetica, DejaVu Sans, sans-serif">\n'
            f'<rect width="{width}" height="{height}" rx="8" fill="{PAPER}"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n",
            encoding="utf-8",
        )
