"""The gradients of attention on Hopper: what a CTA owns, and one step of its loop."""

from __future__ import annotations

from _picture import Picture
from _schedule import KINDS, Lanes, block, heading, legend, lines, paragraph


def owned(picture: Picture) -> None:
    heading(picture, 20, 30, "A CTA owns 128 keys of a KV head at a time and walks the queries that see them")
    left, top, cell = 150, 62, 44
    for i in range(8):
        for j in range(6):
            kind = "product" if i >= 3 and j == 3 else "none"
            picture.box(left + j * cell, top + i * 22, cell, 22, *KINDS[kind], r=1)
    picture.text(left + 3 * cell, 54, "tiles of 128 keys", 12)
    lines(picture, 20, 110, ["tiles of queries", "(64 or 128), of", "each head of the", "group in turn"])
    picture.arrow_down(left + 3.5 * cell, top + 3 * 22 + 8, top + 8 * 22 - 6)
    picture.arrow(left + 4 * cell, 150, 470, 110)
    block(
        picture,
        472,
        78,
        368,
        60,
        ["dK, dV of 128 keys: 64 each in the registers", "of two warpgroups, until the last step"],
        "product",
    )
    picture.arrow(left + 4 * cell, 172, 470, 196)
    block(
        picture,
        472,
        166,
        368,
        60,
        ["dQ of each tile of queries: added to float32 sums", "in global memory, by every CTA that meets it"],
        "combine",
    )


def step(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "Step i of a warpgroup with its 64 keys (head dims 64 and 128)")
    lanes = Lanes(picture, 150, 68)
    end = 10.0
    lanes.lane(
        y + 16,
        "loader: one thread",
        [(0, 4, "Q, dO and statistics of step i + 1", "copy")],
        end,
    )
    lanes.lane(
        y + 46,
        "products",
        [
            (0, 1.3, "S = K Q", "product"),
            (1.3, 2.6, "dP = V dO", "product"),
            (5, 7, "dQ of step i - 1", "product"),
            (7, 8.5, "dV += P dO", "product"),
            (8.5, 10, "dK += dS Q", "product"),
        ],
        end,
    )
    lanes.lane(
        y + 74,
        "arithmetic",
        [
            (1.3, 2.9, "P = exp2(S)", "softmax"),
            (2.9, 4.2, "dS = P x dP", "softmax"),
            (4.2, 5, "dS out", "copy"),
            (7.1, 9.2, "adds dQ to its sums", "combine"),
        ],
        end,
    )
    lanes.axis(y + 112, end)
    paragraph(
        picture,
        20,
        y + 142,
        "Scores are computed transposed, keys by queries, so that P and dS are operands of dV and "
        "dK as they lie in registers. dQ needs the dS of both warpgroups: it passes through shared "
        "memory, and is read a step late so that none waits.",
    )


def roles(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "Above head dim 128: two warpgroups share 64 keys")
    lanes = Lanes(picture, 150, 68)
    end = 10.0
    lanes.lane(
        y + 16,
        "warpgroup 1: dV",
        [(0, 2, "S = K Q", "product"), (2, 4, "P = exp2(S)", "softmax"), (4, 7, "dV += P dO", "product")],
        end,
    )
    lanes.lane(
        y + 52,
        "warpgroup 2: dK",
        [
            (1.5, 4.2, "dP = V dO", "product"),
            (4.6, 6.6, "dS = P x dP", "softmax"),
            (6.6, 9.6, "dK += dS Q", "product"),
        ],
        end,
    )
    picture.arrow(lanes.x_of(4), y + 46, lanes.x_of(4.6), y + 58, KINDS["copy"][1])
    picture.text(lanes.x_of(7.2), y + 34, "P, through shared memory", 11, anchor="start")
    paragraph(
        picture,
        20,
        y + 100,
        "dQ then has a kernel of its own, as for deterministic=True in short calls: a warpgroup owns 64 "
        "queries and walks their keys, and nothing is summed in global memory.",
    )


def draw() -> Picture:
    picture = Picture(860, 620)
    owned(picture)
    step(picture, 278)
    roles(picture, 466)
    legend(picture, 20, 610)
    return picture
