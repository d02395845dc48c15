"""Paged decode: who reads which blocks of keys, in both kernels, and what one warp does."""

from __future__ import annotations

import itertools

from _picture import COLOURS, FAINT, INK, Picture
from _schedule import KINDS, block, heading, legend, lines, paragraph

SPLITS, WARPS, BLOCKS = 2, 3, 12
ITEMS = (46, 16, 40, 18)  # blocks of each item
RUNS = (0, 30, 62, 90, 120)  # where CTAs begin; the second would begin at 60, two blocks before an item's end


def split_kv(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "split_kv_decode: the host shares out the blocks")
    lines(picture, 20, y + 20, ["An item is one KV head of one sequence, cut into blocks of 16 keys."])
    cell = 34
    for i in range(BLOCKS):
        kind = "grey" if i % SPLITS == 0 else "plain"
        block(picture, 20 + i * cell, y + 32, cell, 26, str(i), kind)
        picture.text(20 + (i + 0.5) * cell, y + 74, f"{i % SPLITS}.{i // SPLITS % WARPS}", 11)
    lines(
        picture,
        440,
        y + 48,
        ["Block i goes to split i % splits; within", "it, to its warps in turns: split.warp."],
    )
    for split in range(SPLITS):
        top = y + 92 + split * 62
        picture.box(20, top, 300, 52, *KINDS["grey" if split == 0 else "plain"])
        picture.text(30, top + 31, f"CTA of split {split}", 12, anchor="start")
        for warp in range(WARPS):
            own = [i for i in range(BLOCKS) if i % SPLITS == split and i // SPLITS % WARPS == warp]
            label = ["warp " + str(warp), ", ".join(map(str, own))]
            block(picture, 128 + warp * 62, top + 7, 56, 38, label, size=11)
        picture.arrow(320, top + 26, 388, y + 150)
    block(picture, 390, y + 124, 150, 52, ["workspace", "a row for each split"], "combine")
    picture.arrow(540, y + 150, 596, y + 150)
    block(picture, 598, y + 124, 120, 52, ["combiner CTA", "waits and adds"], "combine")
    picture.arrow(718, y + 150, 768, y + 150)
    block(picture, 770, y + 130, 70, 40, "out, lse")


def stream_k(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "stream_k_decode: the device shares them out")
    lines(
        picture,
        20,
        y + 20,
        ["One CTA for each SM takes an equal run of the blocks of all items, wherever items end."],
    )
    left, unit = 76.0, 764 / sum(ITEMS)
    picture.text(left - 12, y + 52, "items", 12, anchor="end")
    picture.text(left - 12, y + 88, "CTAs", 12, anchor="end")
    picture.text(left - 12, y + 108, "warps", 12, anchor="end")
    begin = 0
    for i, length in enumerate(ITEMS):
        block(picture, left + begin * unit, y + 34, length * unit, 26, f"item {i}", "none")
        begin += length
    for cta, (first, end) in enumerate(itertools.pairwise(RUNS)):
        kind = "grey" if cta % 2 == 0 else "plain"
        block(picture, left + first * unit, y + 70, (end - first) * unit, 26, f"CTA {cta}", kind)
        for warp in range(1, 8):  # equal shares of the CTA's run
            x = left + (first + (end - first) * warp / 8) * unit
            picture.line(x, y + 98, x, y + 108, INK)
        picture.line(left + first * unit, y + 108, left + end * unit, y + 108, FAINT)
    for cta in (0, 2):  # whose last item goes on in the next CTA, which has its end
        x = left + RUNS[cta + 1] * unit
        picture.arrow(x - 44, y + 128, x + 44, y + 128, KINDS["combine"][1])
        picture.text(x, y + 148, f"item {cta}: CTA {cta} pushes, CTA {cta + 1} adds and stores", 12)
    x = left + RUNS[2] * unit
    picture.line(x, y + 98, x, y + 118, COLOURS["C"])
    picture.text(x, y + 168, "a run that would end close to an item's end ends there", 12, COLOURS["C"])


def one_warp(picture: Picture, y: float) -> None:
    heading(picture, 20, y, "What one warp does, in both")
    paragraph(
        picture,
        20,
        y + 20,
        "Its own ring in shared memory is filled by cp.async "
        "(in stream-K K and V of a block at once): no barrier.",
    )
    cell = 58
    names = ("K 7", "K 4", "V 4", "K 5", "V 5", "K 6", "V 6")
    for i, name in enumerate(names):
        kind = "product" if i == 1 else "copy"
        block(picture, 20 + i * cell, y + 34, cell, 28, name, kind)
    picture.text(20 + 1.5 * cell, y + 78, "in use", 11)
    picture.text(20 + 4.5 * cell, y + 78, "on their way", 11)
    picture.text(20 + 0.5 * cell, y + 78, "next copy", 11)
    picture.text(446, y + 46, "page ids: 32 at a time, one in each lane; the next 32 are", 12, anchor="start")
    picture.text(446, y + 62, "asked for as soon as these come into use", 12, anchor="start")
    boxes = (
        (["S^T = K Q^T", "16 keys x 8 rows"], "product"),
        (["weights", "exp2(S^T - max)"], "softmax"),
        (["8 x 8 transpositions", "between lanes"], "softmax"),
        (["O^T += V^T P^T", "16 dims x 8 rows"], "product"),
    )
    for i, (text, kind) in enumerate(boxes):
        block(picture, 20 + i * 212, y + 94, 180, 44, text, kind)
        if i:
            picture.arrow(20 + i * 212 - 32, y + 116, 20 + i * 212, y + 116)


def draw() -> Picture:
    picture = Picture(860, 646)
    split_kv(picture, 30)
    stream_k(picture, 262)
    one_warp(picture, 468)
    legend(picture, 20, 634)
    return picture
