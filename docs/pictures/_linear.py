"""Linear layers for few rows: what a CTA owns, how its warps share a stage, how splits are added up."""

from __future__ import annotations

from _picture import FAINT, Picture
from _schedule import KINDS, Lanes, block, heading, legend, lines


def owned(picture: Picture) -> None:
    heading(picture, 20, 30, "One CTA: a tile of rows of w, all or part of K, and up to 128 rows of x")
    left, top = 120, 50
    picture.text(left - 12, top + 14, "x", 13, anchor="end", weight=600)
    picture.text(left - 12, top + 76, "w", 13, anchor="end", weight=600)
    for i in range(8):
        picture.box(left + i * 50, top, 50, 22, *KINDS["copy" if i < 4 else "none"], r=1)
        for row in range(4):
            kind = "copy" if row == 1 and i < 4 else "none"
            picture.box(left + i * 50, top + 32 + row * 22, 50, 22, *KINDS[kind], r=1)
    picture.text(left + 200, top + 138, "K, in stages of 1 to 4 panels of 64 columns", 12)
    lines(
        picture,
        560,
        66,
        [
            "Blue: what this CTA reads, here with K",
            "in two splits. Weights are read once and",
            "leave the L2 cache first; x stays in it.",
        ],
    )


def ring(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "In time: one thread copies, all others multiply (a ring of four stages)")
    lanes = Lanes(picture, 160, 56.5)
    end = 12.0
    copies = [(2 + 0.8 * i, 2.8 + 0.8 * i, str(i), "copy") for i in range(4)]
    copies += [(5.4 + i, 6.2 + i, str(4 + i), "copy") for i in range(4)]
    products = [(4.4 + i, 5.4 + i, f"stage {i}", "product") for i in range(7)]
    lanes.lane(y + 16, "the kernel in front", [(0, 2, "its end", "none")], end)
    lanes.lane(y + 46, "one thread: TMA", copies, end)
    lanes.lane(
        y + 74,
        "with static_weight",
        [(0, 2, "w of stages 0 to 3", "copy"), (2, 3, "their x", "copy")],
        end,
    )
    lanes.lane(y + 104, "warps", products, end)
    lanes.mark(2, y + 8, y + 134)
    lanes.axis(y + 142, end)


def flat(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "sm90_flat: mma.sync")
    for warp in range(8):
        block(
            picture,
            20 + warp * 46,
            y + 16,
            46,
            40,
            ["warp", str(warp)],
            "grey" if warp % 2 == 0 else "plain",
            11,
        )
    lines(
        picture,
        20,
        y + 76,
        [
            "Each warp multiplies an eighth of the columns of",
            "every stage, in tiles of 16 rows of w by 8 of x.",
            "The eight sums are added once, at the end.",
        ],
    )
    heading(picture, 440, y, "sm90_wide: wgmma")
    block(picture, 440, y + 16, 120, 40, ["x: 64 rows for", "a warpgroup"], "product", 11)
    block(picture, 566, y + 16, 274, 40, "w: 64 to 256 rows on the other side", "product", 11)
    lines(
        picture,
        440,
        y + 76,
        [
            "A CTA works through several tiles. Fewer rows",
            "of x than 64 are not padded: sums of rows that",
            "are none are dropped.",
        ],
    )


def splits(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "K in four splits: the CTAs of a cluster")
    for i in range(4):
        x = 20 + i * 170
        block(
            picture, x, y + 16, 150, 34, f"CTA {i}: quarter {i} of K", "grey" if i % 2 == 0 else "plain", 11
        )
        block(picture, x, y + 86, 150, 34, f"adds tiles {i}, {i + 4}, ...", "combine", 11)
        for j in range(4):
            picture.line(x + 75, y + 50, 95 + j * 170, y + 86, FAINT if i == j else KINDS["combine"][1])
    lines(
        picture,
        700,
        y + 40,
        [
            "st.async, into the",
            "shared memory of",
            "the owner, who adds",
            "in the order of K:",
            "no workspace",
        ],
    )


def draw() -> Picture:
    picture = Picture(860, 690)
    owned(picture)
    ring(picture, 220)
    flat(picture, 402)
    splits(picture, 536)
    legend(picture, 20, 678, ("copy", "product", "combine"))
    return picture
