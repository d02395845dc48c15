"""A shared prefix: which keys are read once, and the three launches."""

from __future__ import annotations

from _picture import Picture
from _schedule import KINDS, Lanes, block, heading, legend, lines


def draw() -> Picture:
    picture = Picture(860, 560)
    heading(picture, 20, 30, "Four sequences that share their first keys")
    left, cell = 150, 44
    for row in range(4):
        y = 46 + row * 26
        picture.text(left - 12, y + 16, f"sequence {row}", 12, anchor="end")
        for i in range(9):
            picture.box(left + i * cell, y, cell, 22, *KINDS["product"], r=2)
        for i in range((2, 4, 1, 3)[row]):
            picture.box(left + (9 + i) * cell + 8, y, cell, 22, *KINDS["copy"], r=2)
    picture.text(left + 4.5 * cell, 166, "shared_prefix_len keys, the same pages", 12)
    picture.text(left + 11 * cell + 8, 166, "keys of each sequence alone", 12)

    heading(picture, 20, 206, "1. Over the prefix: the queries of all sequences are one matrix")
    block(picture, 20, 222, 120, 84, ["rows of all", "sequences", "and the group"], "plain")
    for run in range(3):
        x = 170 + run * 3 * cell
        block(
            picture,
            x,
            222,
            3 * cell - 6,
            44,
            [f"run {run} of the prefix", "256 keys and more"],
            "product",
            11,
        )
        block(picture, x, 276, 3 * cell - 6, 30, f"out and LSE of run {run}", "combine", 11)
    lines(
        picture,
        580,
        238,
        [
            "Runs give every SM work. To the",
            "kernel they are a batch of sequences",
            "with the same queries (stride 0) and",
            "pages further on.",
        ],
    )

    heading(picture, 20, 342, "2 and 3. Behind it, and the combination, in time")
    lanes = Lanes(picture, 210, 62)
    end = 10.0
    lanes.lane(358, "sm90_attention_beside", [(0, 4.6, "the prefix: products", "product")], end)
    lanes.lane(
        388,
        "split_kv_decode",
        [(0.5, 8, "behind the prefix: reads keys and values of each sequence", "copy")],
        end,
    )
    lanes.lane(418, "combine_prefix", [(8.1, 9.9, "one warp a row", "combine")], end)
    lanes.axis(456, end)
    heading(picture, 20, 490, "One SM of a Hopper GPU meanwhile")
    block(picture, 20, 504, 260, 26, "sm90 CTA: 97 KB, waits for tensor cores", "product", 11)
    block(picture, 286, 504, 260, 26, "decode CTA: beside it, waits for memory", "copy", 11)
    lines(
        picture,
        560,
        514,
        ["Where no CTA fits beside the other,", "the two kernels run one after the other."],
    )
    legend(picture, 20, 552, ("copy", "product", "combine"))
    return picture
