"""Attention from sm_80 on: the partition into row tiles, and one tile of keys in time."""

from __future__ import annotations

from _picture import FAINT, Picture
from _schedule import Lanes, block, heading, legend, lines

Bars = list[tuple[float, float, str, str]]


def partition(picture: Picture) -> None:
    heading(picture, 20, 30, "One CTA: a tile of rows of one KV head, and all keys that some of them see")
    lines(picture, 20, 52, ["rows: query tokens x", "heads of the group"])
    cell, top = 62, 76
    for i in range(8):
        picture.text(200 + (i + 0.5) * cell, 66, f"keys {64 * i}", 11)
    for warp in range(4):
        y = top + warp * 30
        block(picture, 20, y, 160, 30, f"warp {warp}: 32 rows", "grey" if warp % 2 == 0 else "plain")
        for i in range(8):
            seen = i < 5 + warp // 2
            partly = i == 4 + warp // 2
            kind = "product" if seen else "none"
            block(picture, 200 + i * cell, y, cell, 30, "mask" if partly else "", kind, 11)
    lines(
        picture,
        716,
        96,
        [
            "A warp skips tiles",
            "that none of its rows",
            "sees, and masks those",
            "seen in part. Warps",
            "exchange no scores.",
        ],
    )


def timeline(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "Two stages: K and V arrive a whole tile ahead, one barrier a tile")
    lanes = Lanes(picture, 130, 89)
    end = 8.0
    lanes.lane(
        y + 16,
        "cp.async",
        [(0, 1, "K0, V0", "copy"), (1, 2.5, "K1, V1", "copy"), (4, 5.5, "K2, V2", "copy")],
        end,
    )
    bars: Bars = []
    for i in range(2):
        begin = 1.0 + 3 * i
        bars += [
            (begin, begin + 1, f"S = Q K{i}", "product"),
            (begin + 1, begin + 2, f"softmax {i}", "softmax"),
            (begin + 2, begin + 3, f"O += P V{i}", "product"),
        ]
    bars.append((7, 8, "S = Q K2", "product"))
    lanes.lane(y + 46, "each warp", bars, end)
    for time in (1, 4, 7):
        lanes.mark(time, y + 10, y + 80)
    picture.text(lanes.x_of(1), y + 94, "barrier", 11)
    picture.text(lanes.x_of(4), y + 94, "barrier", 11)
    picture.text(lanes.x_of(7), y + 94, "barrier", 11)

    y += 126
    heading(picture, 20, y, "One stage, where shared memory is short: two barriers a tile")
    lanes.lane(
        y + 16,
        "cp.async",
        [
            (0, 1, "K0", "copy"),
            (1, 2, "V0", "copy"),
            (2, 3.5, "K1", "copy"),
            (4, 5, "V1", "copy"),
            (5, 6.5, "K2", "copy"),
        ],
        end,
    )
    lanes.lane(y + 46, "each warp", bars, end)
    for time in (1, 2, 4, 5, 7):
        lanes.mark(time, y + 10, y + 80)
    lanes.axis(y + 92, end)


def splits(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "Splits: in paged calls of few rows, several CTAs share the keys of a row tile")
    for i in range(3):
        block(
            picture,
            20 + i * 112,
            y + 16,
            104,
            40,
            [f"CTA of split {i}", "a run of keys"],
            "grey" if i % 2 == 0 else "plain",
            11,
        )
    picture.arrow(348, y + 36, 396, y + 36)
    block(
        picture, 398, y + 16, 190, 40, ["float32 results and LSE", "[splits, tokens, heads]"], "combine", 11
    )
    picture.arrow(588, y + 36, 636, y + 36)
    block(picture, 638, y + 16, 202, 40, ["combine_splits_kernel", "weights by LSE, to out"], "combine", 11)
    picture.line(20, y + 66, 840, y + 66, FAINT)


def draw() -> Picture:
    picture = Picture(860, 600)
    partition(picture)
    timeline(picture, 232)
    splits(picture, 494)
    legend(picture, 20, 586)
    return picture
