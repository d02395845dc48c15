"""Wide heads on Hopper: what the warpgroups of one CTA do at a time."""

from __future__ import annotations

from _picture import Picture
from _schedule import Lanes, block, heading, legend, lines, paragraph

END = 10.0


def draw() -> Picture:
    picture = Picture(860, 512)
    heading(picture, 20, 30, "One CTA at work on 64 rows of 512 columns and four tiles of 64 keys")
    paragraph(
        picture,
        20,
        50,
        "One warpgroup makes the weights of all 64 rows; two multiply them with values, 256 columns each. "
        "Tiles of keys come from the last to the first: 3, 2, 1, 0. Lengths are not to scale.",
    )
    lanes = Lanes(picture, 176, 65)
    lanes.lane(
        88,
        "warp 0: work, Q, K",
        [
            (0, 1.3, "K3 and Q", "copy"),
            (1.4, 2.6, "K2", "copy"),
            (3.4, 4.6, "K1", "copy"),
            (5.4, 6.6, "K0", "copy"),
        ],
        END,
    )
    lanes.lane(
        116,
        "warp 1: V",
        [
            (0.6, 1.8, "V3", "copy"),
            (4.4, 5.6, "V2", "copy"),
            (6.4, 7.6, "V1", "copy"),
            (8.4, 9.6, "V0", "copy"),
        ],
        END,
    )
    products = [(1 + 2 * i, 2 + 2 * i, f"Q K{3 - i}", "product") for i in range(4)]
    weights = [(2 + 2 * i, 3 + 2 * i, f"softmax {3 - i}", "softmax") for i in range(4)]
    lanes.lane(160, "scorer: products", [(float(a), float(b), c, d) for a, b, c, d in products], END)
    lanes.lane(188, "softmax", [(float(a), float(b), c, d) for a, b, c, d in weights], END)
    for number, y in ((0, 232), (1, 260)):
        values = [(4.0 + 2 * i, 5.0 + 2 * i, f"P V{3 - i}, half {number}", "product") for i in range(3)]
        values.append((9.0, 10.0, f"P V0, half {number}", "product"))
        lanes.lane(y, f"multiplier {number}", values, END)
    lanes.axis(298, END)
    paragraph(
        picture,
        20,
        328,
        "Weights are handed on once the next scores are there, so that the tensor cores multiply values "
        "while the scorer makes the next weights.",
    )
    heading(picture, 20, 380, "Shared memory of this CTA: 210 KB, chunks of 128 columns, 16 KB each")
    x = 20.0
    for name, kind in (("Q", "none"), ("K", "copy"), ("V", "copy")):
        for i in range(4):
            block(picture, x, 394, 44, 34, f"{name}[{i}]", kind)
            x += 44
        x += 12
    block(picture, x, 394, 44, 34, ["P, 2"], "softmax")
    lines(
        picture,
        x + 62,
        406,
        ["A chunk is loaded again as soon", "as it was multiplied."],
    )
    paragraph(
        picture,
        20,
        456,
        "Two CTAs of a cluster walk the same tiles of keys, for 64 rows each. Each brings half of the "
        "columns of every chunk of K and V to both.",
    )
    legend(picture, 20, 502, ("copy", "product", "softmax"))
    return picture
