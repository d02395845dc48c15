"""How many times as fast as its fastest peer Octavo is, a dot for each row that was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from _picture import COLOURS, EMPTY, INK, Picture
from _schedule import heading

Row = dict[str, Any]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GPUS = {"h100": COLOURS["A"], "h200": COLOURS["B"]}


def is_any(row: Row) -> bool:  # noqa: ARG001
    return True


def is_fp8(row: Row) -> bool:
    return row["case"].startswith("fp8")


def is_plain(row: Row) -> bool:
    return row["group"] in ("d64", "d128", "d256", "other")


def has_forward(row: Row) -> bool:
    return row["group"] == "forward"


def is_narrow(row: Row) -> bool:
    return row["shape"]["num_rows"] <= 128


GROUPS = (  # what it is called, its file, and which rows of the file are meant
    ("Paged decode", "decode", is_any),
    ("Decode over fp8 caches", "quantised", is_fp8),
    ("Prefill and training, forward", "prefill", is_any),
    ("Prefill over fp8 caches", "quantised-prefill", is_fp8),
    ("Gradients, without options", "backward", is_plain),
    ("Forward with gradients", "backward", has_forward),
    ("Linear layers, up to 128 rows", "linear", is_narrow),
)
LEFT, RIGHT, TOP, HEIGHT = 220, 836, 96, 46


def speeds(benchmark: str, gpu: str, is_meant: Callable[[Row], bool]) -> Iterable[float]:
    """The time of the fastest peer divided by Octavo's, of each row where both have one."""
    path = RESULTS / f"{benchmark}-{gpu}.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        peers = [us for name, us in row["us"].items() if not name.startswith("octavo")]
        if "octavo" in row["us"] and peers and is_meant(row):
            yield min(peers) / row["us"]["octavo"]


def draw() -> Picture:
    rows = [
        (words, {gpu: sorted(speeds(benchmark, gpu, is_meant)) for gpu in GPUS})
        for words, benchmark, is_meant in GROUPS
    ]
    everything = [speed for _, of_gpu in rows for some in of_gpu.values() for speed in some]
    first, last = math.floor(10 * min(everything)), math.ceil(10 * max(everything))  # tenths
    bottom = TOP + HEIGHT * len(rows)

    def x_of(speed: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * math.log(10 * speed / first) / math.log(last / first), 1)

    picture = Picture(860, bottom + 60)
    heading(picture, 20, 30, "Octavo beside the fastest of its peers, one dot for each row that was measured")
    for i, (gpu, colour) in enumerate(GPUS.items()):
        picture.dot(30 + 90 * i, 54, colour)
        picture.text(40 + 90 * i, 58, gpu.upper(), 12, anchor="start")
    picture.text(x_of(1) - 10, TOP - 12, "peer faster", 12, anchor="end")
    picture.text(x_of(1) + 10, TOP - 12, "Octavo faster", 12, anchor="start")
    for tenths in range(first, last + 1):
        x = x_of(tenths / 10)
        picture.line(x, TOP, x, bottom, INK if tenths == 10 else EMPTY)
        if tenths % 2 == 0:
            picture.text(x, bottom + 18, f"{tenths / 10:g}", 11)
    picture.text((LEFT + RIGHT) / 2, bottom + 42, "Time of the fastest peer / time of Octavo")
    for i, (words, of_gpu) in enumerate(rows):
        y = TOP + HEIGHT * (i + 0.5)
        picture.text(LEFT - 14, y + 4, words, 13, anchor="end")
        for place, (gpu, some) in enumerate(of_gpu.items()):
            for speed in some:
                picture.dot(x_of(speed), y - 9 + 18 * place, GPUS[gpu])
    return picture
