"""One call, from the caller's arrays to the kernel."""

from __future__ import annotations

from _picture import FAINT, PAPER, Picture
from _schedule import KINDS, block, heading, lines


def draw() -> Picture:
    picture = Picture(860, 470)
    heading(picture, 20, 30, "Every call")
    stages = (
        (["arrays of any", "library"], "python/octavo"),
        (["views through", "DLPack, no copy"], "src/bindings"),
        (["the checks of all", "arguments"], "src/checks"),
        (["parameters:", "plain data"], "src/params"),
        (["CPU or CUDA,", "by the arrays"], "src/operators"),
    )
    for i, (words, path) in enumerate(stages):
        x = 20 + i * 168
        block(picture, x, 52, 148, 54, words)
        picture.code(x + 74, 124, path, 10)
        if i:
            picture.arrow(x - 20, 79, x, 79)

    picture.box(20, 150, 820, 236, PAPER, FAINT, r=8)
    heading(picture, 36, 176, "On a GPU, the plan: parameters and GPU in, a small struct out (on the host)")
    lines(picture, 36, 196, ["For attention: the first kernel in this order that can serve the call."])
    candidates = (
        ("shared_prefix", "a promised prefix, where reading it once pays"),
        ("split_kv_decode", "few rows a KV head, the host can share them out"),
        ("stream_k_decode", "few rows a KV head, only the device can"),
        ("sm90_attention", "Hopper, rows that its copy engine can move"),
        ("sm80_attention", "everything else"),
    )
    for i, (name, serves) in enumerate(candidates):
        y = 210 + i * 34
        picture.box(36, y, 160, 26, *KINDS["product"])
        picture.code(116, y + 17, name, 12)
        picture.text(208, y + 17, serves, 12, anchor="start")
        if i:
            picture.arrow_down(116, y - 8, y)
        picture.arrow(516, y + 13, 610, 265, FAINT)
    block(picture, 612, 238, 104, 54, ["launch of an", "instance"], "copy")
    picture.code(664, 312, "run.cpp, launch.cuh", 10)
    picture.arrow(716, 265, 740, 265)
    block(picture, 742, 238, 86, 54, ["kernel on", "the stream"], "product")
    picture.arrow_down(826, 106, 150)
    picture.box(20, 404, 586, 46, *KINDS["softmax"])
    picture.code(36, 424, "octavo.explain(...)", 12, anchor="start")
    picture.text(190, 424, "stops here: it makes the plan, and launches nothing.", 12, anchor="start")
    picture.text(
        36, 441, "OCTAVO_PRINT_KERNELS=1 prints the plans of the calls that do run.", 12, anchor="start"
    )
    picture.arrow_down(313, 386, 404)
    lines(
        picture,
        628,
        410,
        ["On the CPU there is one kernel for", "each operator, compiled for several", "instruction sets."],
    )
    return picture
