"""Attention on Hopper: what the warps of one CTA do at a time."""

from __future__ import annotations

from _picture import Picture
from _schedule import Lanes, block, heading, legend, lines, paragraph

END = 16.0

Bars = list[tuple[float, float, str, str]]


def consumer(turns: list[float], first: float) -> tuple[Bars, Bars]:
    """The bars of one warpgroup: its products, which take a time each, and its softmax, which takes two."""
    products: Bars = [(first, first + 1, "Q K3", "product")]
    softmax: Bars = [(first + 1, first + 3, "softmax 3", "softmax")]
    for i, turn in enumerate(turns):
        tile = 2 - i
        if tile >= 0:
            products += [
                (turn, turn + 1, f"Q K{tile}", "product"),
                (turn + 1, turn + 2, f"P V{tile + 1}", "product"),
            ]
            softmax.append((turn + 1, turn + 3, f"softmax {tile}", "softmax"))
        else:
            products.append((turn, turn + 1, "P V0", "product"))
    return products, softmax


def draw() -> Picture:
    picture = Picture(860, 548)
    heading(
        picture, 20, 30, "One CTA at work on a row tile of 128 rows and four tiles of keys (head dim 128)"
    )
    paragraph(
        picture,
        20,
        50,
        "Each consumer warpgroup owns 64 rows. Tiles of keys come from the last to the first: 3, 2,"
        " 1, 0. A row is one query token of one query head.",
    )
    lanes = Lanes(picture, 176, 41)
    copies: Bars = [(0, 1, "K3", "copy"), (1, 2, "Q", "copy"), (2, 3, "K2", "copy")]
    copies += [(4, 5, "K1", "copy"), (8, 9, "K0", "copy"), (12, 15, "K, Q of the next rows", "copy")]
    values: Bars = [(1, 2, "V3", "copy"), (3, 4, "V2", "copy"), (5, 6, "V1", "copy"), (9, 10, "V0", "copy")]
    lanes.lane(88, "warp 0: work, K, Q", copies, END)
    lanes.lane(116, "warp 1: V", values, END)
    one, one_softmax = consumer([5, 9, 13, 15], 2)
    other, other_softmax = consumer([7, 11], 3)
    other += [(15, 16, "Q K0", "product")]
    one = [bar for bar in one if bar[1] <= 15]
    lanes.lane(160, "warpgroup 1: products", one, END)
    lanes.lane(188, "softmax", one_softmax, END)
    lanes.lane(232, "warpgroup 2: products", other, END)
    lanes.lane(260, "softmax", other_softmax, END)
    lanes.lane(304, "warp 2: results", [(0, 3, "rows before to out", "copy")], END)
    lanes.axis(342, END)
    paragraph(
        picture,
        20,
        372,
        "In its turn at the tensor cores a warpgroup issues Q K of one tile and P V of the tile "
        "before; then it passes the turn on. Its softmax runs under its own P V and under the turns"
        " of the others.",
    )
    heading(picture, 20, 424, "Shared memory of this CTA: 224 KB, slots of 32 KB")
    x = 20.0
    for name, count, kind in (("Q", 2, "none"), ("K", 2, "copy"), ("V", 3, "copy")):
        for i in range(count):
            block(picture, x, 438, 66, 34, f"{name} slot {i}", kind)
            x += 66
        x += 20
    lines(
        picture,
        540,
        450,
        ["Each slot has two barriers, full and empty.", "A result leaves through its queries' slot."],
    )
    paragraph(
        picture,
        20,
        496,
        "A producer warp fills a slot, and the consumers read it: no barrier holds the whole CTA, "
        "and copies run on over the end of a row tile. P V0 goes together with the first Q K of the"
        " next rows, where the table says chained.",
    )
    legend(picture, 20, 540, ("copy", "product", "softmax"))
    return picture
