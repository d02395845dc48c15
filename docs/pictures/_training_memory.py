"""The most memory that attention takes in training on the CPU, beside standard attention's."""

from __future__ import annotations

import json
import math
from pathlib import Path

from _picture import COLOURS, EMPTY, Picture
from _schedule import heading

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "training-memory-cpu.jsonl"
LEFT, RIGHT, TOP, BOTTOM = 84, 820, 60, 330
ATTENTIONS = {
    "octavo": ("octavo.torch.attention", COLOURS["A"]),
    "eager": ("standard attention", COLOURS["B"]),
}


def draw() -> Picture:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    lengths = sorted({row["length"] for row in rows})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    lowest = math.floor(math.log2(min(row["peak_mib"] for row in rows)))
    highest = math.ceil(math.log2(max(row["peak_mib"] for row in rows)))

    def x_of(length: int) -> float:
        return LEFT + 24 + (RIGHT - LEFT - 24) * (math.log2(length) - first) / (last - first)

    def y_of(mib: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log2(mib) - lowest) / (highest - lowest)

    picture = Picture(860, BOTTOM + 60)
    heading(picture, 20, 30, "Most memory of forward and backward, MiB besides the inputs")
    for power in range(lowest, highest + 1):
        y = round(y_of(2.0**power), 1)
        picture.line(LEFT, y, RIGHT, y, EMPTY)
        picture.text(LEFT - 8, y + 4, f"{2.0**power:g}", 11, anchor="end")
    for length in lengths:
        picture.text(round(x_of(length), 1), BOTTOM + 20, str(length), 11)
    picture.text(
        (LEFT + RIGHT) / 2, BOTTOM + 42, "Tokens of one causal sequence, one head of dim 64, float32"
    )
    for attention, (words, colour) in ATTENTIONS.items():
        places = [
            (round(x_of(row["length"]), 1), round(y_of(row["peak_mib"]), 1), row["peak_mib"])
            for row in rows
            if row["attention"] == attention
        ]
        picture.curve([(x, y) for x, y, _ in places], colour)
        for x, y, mib in places:
            picture.dot(x, y, colour)
            picture.text(x, y - 10, f"{mib:.{int(mib < 9.5)}f}", 11, colour)
        x, y, _ = places[len(places) // 2]
        picture.text(x + 14, y + 16, words, 12, colour, "start", 600)
    return picture
