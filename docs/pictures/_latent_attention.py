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
        "sm90_latent_attention_kernel: 64 rows a CTA, a scoring warpgroup and two that multiply",
    )
    paragraph(
        picture,
        20,
        y + 20,
        "There are three places for tiles of 64 keys. The scorer has the queries in registers; each "
        "multiplier has the sums of half of the columns, and loads that half of the keys. Lengths are not to "
        "scale.",
    )
    lanes = Lanes(picture, 176, 47)
    lanes.lane(
        y + 58,
        "loads",
        [(2.2, 4.4, "K3", "copy"), (6.3, 8.5, "K4", "copy"), (10.4, 12.6, "K5", "copy")],
        END,
    )
    scores = [(0, 2.2), (4.1, 6.3), (8.2, 10.4)]
    lanes.lane(
        y + 102,
        "scorer: products",
        [(begin, end, f"S{i} = Q K{i}", "product") for i, (begin, end) in enumerate(scores, start=1)],
        END,
    )
    lanes.lane(
        y + 130,
        "weights",
        [(end, end + 1.9, f"P{i}", "softmax") for i, (_, end) in enumerate(scores, start=1)],
        END,
    )
    for half, top in ((0, 174), (1, 202)):
        lanes.lane(
            y + top,
            f"multiplier {half}: products",
            [(end, end + 1.9, f"O{half} += P{i} V{i}", "product") for i, (_, end) in enumerate(scores)],
            END,
        )
    for i, (_, end) in enumerate(scores):
        lanes.mark(end, y + 154, y + 174)
        picture.text(lanes.x_of(end) + 4, y + 168, f"P{i}", 11, anchor="start")
    lanes.axis(y + 240, END)
    paragraph(
        picture,
        20,
        y + 270,
        "The scorer lays weights where the rotary part of their tile was, with the factors by which earlier "
        "sums shrink, and hands them over when the next scores are nearly computed: then the tensor cores "
        "multiply values while these become weights. A half of a tile is loaded again when its multiplier "
        "has read it.",
    )


def draw() -> Picture:
    picture = Picture(860, 640)
    cached_vector(picture, 30)
    every_gpu(picture, 128)
    hopper(picture, 258)
    legend(picture, 20, 626, ("copy", "product", "softmax"))
    return picture
