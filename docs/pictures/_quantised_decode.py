"""Decode over caches of codes: the way of a block through one warp."""

from __future__ import annotations

from _picture import Picture
from _schedule import KINDS, block, heading, legend, lines, paragraph


def bits(picture: Picture, x: float, y: float, parts: list[tuple[str, int, str]], name: str) -> None:
    """A word of 16 bits, its parts with their number of bits."""
    picture.text(x - 10, y + 17, name, 12, anchor="end")
    for words, count, kind in parts:
        block(picture, x, y, count * 20, 26, words, kind, 11)
        x += count * 20


def draw() -> Picture:
    picture = Picture(860, 560)
    heading(picture, 20, 30, "One warp, one block of 32 keys")
    steps = (
        ("codes of K and V,", "a scale for each", "cp.async", "copy"),
        ("shared memory", "as they were stored", "ldmatrix, V .trans", "copy"),
        ("bytes of a word,", "masked: float16", "a few bit operations", "softmax"),
        ("mma.sync", "float16 x float16", "float32 sums", "product"),
    )
    for i, (first, second, below, kind) in enumerate(steps):
        x = 20 + i * 212
        block(picture, x, 46, 176, 48, [first, second], kind)
        picture.text(x + 88, 112, below, 11)
        if i:
            picture.arrow(x - 36, 70, x, 70)
    paragraph(
        picture,
        20,
        140,
        "No number is scaled by itself, and only those of float8_e4m3fn are converted: a masked "
        "byte already is a float16, though a very small one (a subnormal), which tensor cores take "
        "at full speed.",
    )

    heading(picture, 20, 186, "A code as a float16")
    bits(picture, 120, 200, [("0000 0000", 8, "none"), ("byte n", 8, "copy")], "int8, + 128")
    picture.text(
        456, 218, "= n x 2^-24, exactly; the 128 counts by sums of Q or of weights", 12, anchor="start"
    )
    bits(picture, 120, 232, [("0000 0000 0000", 12, "none"), ("code n", 4, "copy")], "int4")
    picture.text(456, 250, "= n x 2^-24, or x 2^-20 where it stands four bits higher", 12, anchor="start")
    bits(picture, 120, 264, [("byte", 8, "copy"), ("0000 0000", 8, "none")], "float8_e5m2")
    picture.text(456, 282, "it is the upper byte of a float16", 12, anchor="start")
    bits(picture, 120, 296, [("cvt.rn.f16x2.e4m3x2", 16, "softmax")], "float8_e4m3fn")
    picture.text(456, 314, "converted by the GPU, two in one instruction", 12, anchor="start")

    heading(picture, 20, 352, "Where the scales go")
    flow = (
        (["S^T = K Q^T", "32 keys x 8 rows"], "product"),
        (["S^T x scale of the key", "(int4: + minimum x sum of Q)"], "softmax"),
        (["+ log2 of the value's scale,", "then exp2(S^T - max)"], "softmax"),
        (["O^T += V^T P^T", "weights carry the scale"], "product"),
    )
    for i, (text, kind) in enumerate(flow):
        x = 20 + i * 212
        block(picture, x, 368, 186, 48, text, kind, 11)
        if i:
            picture.arrow(x - 26, 392, x, 392)
    picture.box(444, 438, 186, 34, *KINDS["softmax"])
    picture.text(537, 459, "sum += weight / scale", 11)
    picture.arrow_down(537, 416, 438)
    lines(
        picture,
        20,
        450,
        ["The sum of weights takes each weight without", "the scale that it carries."],
    )
    paragraph(
        picture,
        20,
        506,
        "Q's rows are multiplied by a power of two and put into the order in which ldmatrix brings "
        "the dims of K, once an item.",
    )
    legend(picture, 20, 546, ("copy", "product", "softmax"))
    return picture
