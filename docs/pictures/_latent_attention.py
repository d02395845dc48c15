"""Latent attention: the widths of a cached vector, and both kernels at work on tiles of keys."""

from __future__ import annotations

from _picture import Picture
from _schedule import Lanes, block, heading, legend, lines, paragraph

END = 14.0


def cached_vector(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "A cached vector is a key whole, and a value but for its rotary part")
    unit = 0.72
    for begin, end, words in ((0, 256, "half 0: 256 numbers"), (256, 512, "half 1: 256 numbers")):
        block(
            picture, 20 + begin * unit, y + 14, (end - begin) * unit, 28, words, "grey" if begin else "plain"
        )
    block(picture, 20 + 512 * unit, y + 14, 64 * unit, 28, "rotary", "none", 11)
    picture.text(20 + 256 * unit, y + 60, "value: 512 numbers", 12)
    lines(
        picture,
        470,
        y + 24,
        [
            "All query heads read it. One tile in shared memory serves",
            "both products, so memory is read once.",
        ],
    )


def every_gpu(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "latent_attention_kernel: 16 rows a CTA, eight warps, on every GPU")
    steps = (
        (["cp.async", "64 keys, 3 stages"], "copy"),
        (["fp8: codes become", "16-bit numbers"], "softmax"),
        (["S = Q K^T", "8 keys a warp"], "product"),
        (["weights by", "16 threads a row"], "softmax"),
        (["O += P V", "64 columns a warp"], "product"),
    )
    for i, (text, kind) in enumerate(steps):
        block(picture, 20 + i * 168, y + 16, 140, 44, text, kind)
        if i:
            picture.arrow(20 + i * 168 - 28, y + 38, 20 + i * 168, y + 38)
    paragraph(
        picture,
        20,
        y + 82,
        "A barrier of the whole CTA lies between each two steps. Scores and weights pass from warp to warp "
        "through shared memory; queries and sums stay in registers.",
    )


def hopper(picture: Picture, y: float) -> None:
    heading(
        picture,
        20,
        y,
        "sm90_latent_attention_kernel: 64 rows a CTA, a loading warpgroup and two that multiply",
    )
    paragraph(
        picture,
        20,
        y + 20,
        "Tiles of 64 keys come in pairs. A warpgroup makes the scores of one tile of a pair, and sums up its "
        "half of the columns of the values for both tiles. Lengths are not to scale.",
    )
    lanes = Lanes(picture, 176, 47)
    lanes.lane(
        y + 58,
        "loads: next even tile",
        [(6, 7.5, "K2, half 0", "copy"), (7.5, 9.5, "half 1, rotary", "copy")],
        END,
    )
    lanes.lane(
        y + 86,
        "next odd tile",
        [(9.5, 11, "K3, half 1", "copy"), (11, 13, "half 0, rotary", "copy")],
        END,
    )
    lanes.lane(
        y + 130,
        "warpgroup 0: products",
        [
            (0, 2, "S0 = Q K0", "product"),
            (4, 6, "O0 += P0 V0", "product"),
            (7.5, 9.5, "O0 += P1 V1", "product"),
            (9.5, 11.5, "S2 = Q K2", "product"),
        ],
        END,
    )
    lanes.lane(y + 158, "weights", [(2, 4, "P0", "softmax"), (11.5, 13.5, "P2", "softmax")], END)
    lanes.lane(
        y + 202,
        "warpgroup 1: products",
        [
            (2, 4, "S1 = Q K1", "product"),
            (4, 6.5, "O1 += P0 V0", "product"),
            (7.5, 9.5, "O1 += P1 V1", "product"),
            (11.5, 13.5, "S3 = Q K3", "product"),
        ],
        END,
    )
    lanes.lane(y + 230, "weights", [(5, 7.5, "P1", "softmax")], END)
    for time, words in ((4, "P0, max"), (7.5, "P1, max")):
        lanes.mark(time, y + 182, y + 202)
        picture.text(lanes.x_of(time) + 4, y + 196, words, 11, anchor="start")
    lanes.axis(y + 268, END)
    paragraph(
        picture,
        20,
        y + 298,
        "max: the highest score of each row so far goes from tile to tile; whoever raises it hands on the "
        "factor by which earlier sums shrink. P0, P1: a warpgroup lays its weights where the rotary part of "
        "its tile was, and the other multiplies them with its own half of that tile. A half of a tile is "
        "loaded again, in the order of need, when its last reader has said that it may be.",
    )


def draw() -> Picture:
    picture = Picture(860, 640)
    cached_vector(picture, 30)
    every_gpu(picture, 128)
    hopper(picture, 258)
    legend(picture, 20, 626, ("copy", "product", "softmax"))
    return picture
