"""Latent decode: how sequences are shared out, and a CTA at work on tiles of keys."""

from __future__ import annotations

from _picture import Picture
from _schedule import Lanes, block, heading, legend, paragraph

SEQUENCES = (9, 5, 15, 4)  # their tiles
CTAS = 5
END = 14.0


def shares(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "Who reads which tiles: every CTA has an equal run of them")
    total = sum(SEQUENCES)
    unit = 690 / total
    picture.text(20, y + 33, "sequences", 12, anchor="start")
    begin = 0
    for number, tiles in enumerate(SEQUENCES):
        style = "grey" if number % 2 else "plain"
        block(picture, 120 + begin * unit, y + 14, tiles * unit, 28, f"sequence {number}", style)
        begin += tiles
    picture.text(20, y + 73, "CTAs", 12, anchor="start")
    for cta in range(CTAS):
        first, last = (total * (cta + i) // CTAS for i in range(2))
        block(picture, 120 + first * unit, y + 54, (last - first) * unit, 28, f"CTA {cta}", "copy")
    paragraph(
        picture,
        20,
        y + 104,
        "A CTA works on its last sequence first, and pushes the sums if the sequence goes on in the next "
        "CTA. The CTA that has a sequence's end comes to that sequence last, and adds what others have "
        "pushed.",
    )


def one_cta(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "What its warps do: four copy, eight multiply")
    lanes = Lanes(picture, 176, 47)
    lanes.lane(
        y + 24,
        "copying warps",
        [(i * 3.5, i * 3.5 + 2, f"tile {i + 3}", "copy") for i in range(4)],
        END,
    )
    lanes.lane(
        y + 66,
        "products of all warps",
        [
            part
            for i in range(4)
            for part in (
                (i * 3.5, i * 3.5 + 1.2, f"S{i + 1} = Q K", "product"),
                (i * 3.5 + 2.2, i * 3.5 + 3.4, f"O += P{i} V", "product"),
            )
        ],
        END,
    )
    lanes.lane(y + 94, "weights", [(i * 3.5 + 1.2, i * 3.5 + 2.2, f"P{i}", "softmax") for i in range(4)], END)
    for turn in range(1, 4):
        lanes.mark(turn * 3.5, y + 56, y + 120)
    lanes.axis(y + 132, END)
    paragraph(
        picture,
        20,
        y + 162,
        "A line is the one barrier of a tile. Behind it the scores of the next tile are made (S: each warp "
        "has a quarter of the keys and half of their numbers), then the weights of this tile from scores "
        "that lie in shared memory, and their product with the values (each warp has half of the keys and a "
        "quarter of the columns). Lengths are not to scale.",
    )


def draw() -> Picture:
    picture = Picture(860, 412)
    shares(picture, 30)
    one_cta(picture, 178)
    legend(picture, 20, 398, ("copy", "product", "softmax"))
    return picture
