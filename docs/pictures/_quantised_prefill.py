"""Prefill over caches of codes: producer, converter and consumers of one CTA."""

from __future__ import annotations

from _picture import Picture
from _schedule import Lanes, block, heading, legend, paragraph

END = 16.2

Bars = list[tuple[float, float, str, str]]


def draw() -> Picture:
    picture = Picture(860, 532)
    heading(
        picture, 20, 30, "One CTA of four warpgroups at work on 128 rows (head dim 128, tiles of 96 keys)"
    )
    lanes = Lanes(picture, 196, 39.5)
    lanes.lane(
        50, "warp 0: work, queries", [(0, 1.2, "Q", "copy"), (10.6, 13.6, "Q of the next rows", "copy")], END
    )
    lanes.lane(
        78,
        "warps 1, 3: queries",
        [(1.2, 3.2, "to float16", "softmax"), (13.6, 15.6, "to float16", "softmax")],
        END,
    )
    loads: Bars = [(0, 1.5, "codes K3", "copy"), (1.5, 3, "codes V3", "copy")]
    converts: Bars = []
    for i in range(4):
        begin = 1.6 + 3.2 * i
        tile = 3 - i
        converts += [
            (begin, begin + 1.6, f"K{tile}", "softmax"),
            (begin + 1.6, begin + 3.2, f"V{tile}", "softmax"),
        ]
        if tile:
            loads += [
                (begin + 1.6, begin + 3.2, f"codes K{tile - 1}", "copy"),
                (begin + 3.2, begin + 4.8, f"codes V{tile - 1}", "copy"),
            ]
    lanes.lane(114, "converter: its registers", loads, END)
    lanes.lane(142, "converts to slots", converts, END)
    one: Bars = [(3.2, 4.2, "Q K3", "product")]
    soft: Bars = [(4.2, 6.2, "softmax 3", "softmax")]
    other: Bars = [(4.2, 5.2, "Q K3", "product")]
    other_soft: Bars = [(5.2, 7.2, "softmax 3", "softmax")]
    for i in range(3):
        begin = 6.6 + 3.2 * i
        tile = 2 - i
        if begin + 1 <= END:
            one.append((begin, begin + 0.8, f"Q K{tile}", "product"))
            one.append((begin + 0.8, begin + 1.6, f"P V{tile + 1}", "product"))
            soft.append((begin + 0.8, min(begin + 2.6, END), f"softmax {tile}", "softmax"))
            other.append((begin + 1.6, begin + 2.4, f"Q K{tile}", "product"))
            other.append((begin + 2.4, begin + 3.2, f"P V{tile + 1}", "product"))
            if begin + 4.2 <= END:
                other_soft.append((begin + 2.4, begin + 4.2, f"softmax {tile}", "softmax"))
    lanes.lane(178, "warpgroup 2: products", one, END)
    lanes.lane(206, "softmax", soft, END)
    lanes.lane(242, "warpgroup 3: products", other, END)
    lanes.lane(270, "softmax", other_soft, END)
    lanes.axis(306, END)
    paragraph(
        picture,
        20,
        342,
        "Warp 2 of the producer stores results. The consumers are those over 16 bits; the converter"
        " leaves tiles as the copy engine would. The next tile's codes come from global memory to "
        "registers while the tile before is converted.",
    )
    heading(picture, 20, 394, "The way of one tile")
    way = (
        (["codes and scales", "in pages"], "copy"),
        (["registers of four warps,", "24 keys each"], "copy"),
        (["float16, times the", "scales of tokens"], "softmax"),
        (["slot in shared memory,", "swizzled"], "copy"),
        (["wgmma of the", "consumers"], "product"),
    )
    for i, (text, kind) in enumerate(way):
        x = 20 + i * 168
        block(picture, x, 410, 144, 48, text, kind, 11)
        if i:
            picture.arrow(x - 24, 434, x, 434)
    paragraph(
        picture,
        20,
        484,
        "Scales of whole KV heads are left out of the numbers: they multiply dot products and "
        "results, once a row.",
    )
    legend(picture, 20, 518, ("copy", "product", "softmax"))
    return picture
