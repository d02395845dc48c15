"""Draws the pictures of the documentation, beside this file or in a folder that is named."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import _attention_backward
import _decode
import _how_a_call_runs
import _latent_attention
import _latent_decode
import _linear
import _quantised_decode
import _quantised_prefill
import _shared_prefix
import _sm80_attention
import _sm90_attention
import _sm90_wide_attention
import _speeds
import _training_memory
from _picture import COLOURS, EMPTY, FAINT, INK, PAPER, RESERVED, SHARED, Picture

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ACCURACY = RESULTS / "kv-accuracy.json"
TRAINING = sorted(RESULTS.glob("training-[!m]*.jsonl"))  # the losses of each device
GENERATE = sorted(RESULTS.glob("generate-*.jsonl"))  # likewise
LINEAR = sorted(RESULTS.glob("linear-*.jsonl"))
SLOT = 22  # the side of a token's cell
PAGE_SIZE = 4


def draw_page(picture: Picture, x: float, y: float, tokens: list[tuple[str, str]], name: str = "") -> None:
    """A page of slots. A token is what is written in it and its colour."""
    for slot in range(PAGE_SIZE):
        words, fill = tokens[slot] if slot < len(tokens) else ("", EMPTY)
        picture.box(x + slot * SLOT, y, SLOT, SLOT, fill, FAINT if fill == EMPTY else INK, r=2)
        if words:
            picture.text(x + slot * SLOT + SLOT / 2, y + 15, words, 11, PAPER)
    if name:
        picture.text(x + PAGE_SIZE * SLOT / 2, y - 5, name, 11)


def tokens_of(sequence: str, begin: int, end: int, colour: str = "") -> list[tuple[str, str]]:
    return [(f"{sequence}{i}", colour or COLOURS[sequence]) for i in range(begin, end)]


def page_table() -> Picture:
    lengths, tables = {"A": 7, "B": 10}, {"A": [5, 2], "B": [0, 7, 3]}
    picture = Picture(860, 300)
    picture.text(20, 30, "What the model sees", 15, anchor="start", weight=600)
    picture.text(412, 30, "What the allocator knows", 15, weight=600)
    picture.text(720, 30, "What the cache holds", 15, weight=600)

    place = {}  # of each page in the cache
    for page in range(8):
        x, y = 650, 46 + page * 31
        place[page] = x, y
        owner = next((name for name, pages in tables.items() if page in pages), None)
        tokens = []
        if owner:
            begin = tables[owner].index(page) * PAGE_SIZE
            tokens = tokens_of(owner, begin, min(begin + PAGE_SIZE, lengths[owner]))
        draw_page(picture, x, y, tokens)
        picture.text(x + PAGE_SIZE * SLOT + 10, y + 15, f"page {page}", 12, anchor="start")

    for row, (name, pages) in enumerate(tables.items()):
        y = 96 + row * 96
        picture.text(20, y - 14, f"sequence {name}, {lengths[name]} tokens", anchor="start")
        for i, (words, fill) in enumerate(tokens_of(name, 0, lengths[name])):
            x = 20 + i * SLOT + i // PAGE_SIZE * 8
            picture.box(x, y, SLOT, SLOT, fill, r=2)
            picture.text(x + SLOT / 2, y + 15, words, 11, PAPER)
        picture.code(352, y - 14, "page_table")
        for i in range(3):
            x = 312 + i * 30
            picture.box(
                x, y - 4, 30, 30, PAPER if i < len(pages) else EMPTY, INK if i < len(pages) else FAINT
            )
            picture.code(
                x + 15, y + 16, str(pages[i]) if i < len(pages) else "-", 14, INK if i < len(pages) else FAINT
            )
        picture.code(462, y - 14, "seq_lens")
        picture.box(440, y - 4, 44, 30)
        picture.code(462, y + 16, str(lengths[name]), 14)
        for page in pages:
            x, py = place[page]
            picture.arrow(490, y + 11, x - 3, py + 11, COLOURS[name])
    picture.text(
        20,
        282,
        "page_size 4: a token at position p is in slot p % 4 of page page_table[p // 4].",
        13,
        anchor="start",
    )
    return picture


def memory() -> Picture:
    lengths, longest = {"A": 7, "B": 14, "C": 3}, 16
    cell = 15
    picture = Picture(860, 276)
    picture.text(20, 30, "Contiguous, each at the maximum length", 15, anchor="start", weight=600)
    for row, (name, length) in enumerate(lengths.items()):
        for i in range(longest):
            fill = COLOURS[name] if i < length else RESERVED
            picture.box(20 + i * cell, 48 + row * 34, cell, 22, fill, INK if i < length else FAINT, r=1)
    used = sum(lengths.values())
    total = longest * len(lengths)
    picture.text(
        20, 172, f"{total} slots for {used} tokens: {1 - used / total:.0%} is waste,", anchor="start"
    )
    picture.text(20, 190, "and a fourth sequence does not fit.", anchor="start")

    picture.text(440, 30, "Pages of 4, handed out as sequences grow", 15, anchor="start", weight=600)
    tokens = [(n, begin) for n, length in lengths.items() for begin in range(0, length, PAGE_SIZE)]
    order = [4, 0, 6, 3, 1, 5, 2]  # as they came
    pages: dict[int, tuple[str, int]] = {slot: tokens[i] for i, slot in enumerate(order[: len(tokens)])}
    for slot in range(12):
        x, y = 440 + slot % 4 * (4 * cell + 12), 48 + slot // 4 * 34
        for i in range(PAGE_SIZE):
            owner = pages.get(slot)
            full = owner is not None and owner[1] + i < lengths[owner[0]]
            fill = COLOURS[owner[0]] if full and owner else RESERVED if owner else EMPTY
            picture.box(x + i * cell, y, cell, 22, fill, INK if full else FAINT, r=1)
    held = len(tokens) * PAGE_SIZE
    picture.text(
        440, 172, f"The same memory: {held} slots for {used} tokens, five pages free.", anchor="start"
    )
    picture.text(440, 190, "At most page_size - 1 slots of a sequence are empty.", anchor="start")
    for i, (fill, words) in enumerate(
        [*((COLOURS[n], f"sequence {n}") for n in lengths), (RESERVED, "reserved, empty"), (EMPTY, "free")]
    ):
        picture.box(20 + i * 150, 228, 16, 16, fill, FAINT if fill in (EMPTY, RESERVED) else INK, r=2)
        picture.text(44 + i * 150, 241, words, anchor="start")
    return picture


def fork() -> Picture:
    picture = Picture(860, 330)
    panels = ("A prompt of 6 tokens", "fork(): both hold the same pages", "Both grow: copy on write")
    for panel, title in enumerate(panels):
        x = 20 + panel * 284
        picture.text(x, 30, title, 14, anchor="start", weight=600)
        if panel:
            picture.box(x - 14, 14, 0.5, 300, FAINT, FAINT, r=0)
        names = "A" if panel == 0 else "AB"
        last = {"A": "3" if panel == 2 else "1", "B": "1"}
        for row, name in enumerate(names):
            y = 60 + row * 44
            picture.text(x, y + 20, name, 15, COLOURS[name], "start", 700)
            for i, page in enumerate(("4", last[name])):
                picture.box(x + 24 + i * 30, y, 30, 30)
                picture.code(x + 39 + i * 30, y + 20, page, 14)
            picture.code(x + 102, y + 20, f"seq_len {7 if panel == 2 else 6}", anchor="start")
        first = tokens_of("p", 0, 4, SHARED if panel else COLOURS["A"])
        draw_page(picture, x, 186, first, "page 4")
        if panel == 2:  # A came first, and took a page of its own
            for name, place, number in (("B", x, 1), ("A", x + 150, 3)):
                colour = COLOURS[name]
                tokens = [*tokens_of("p", 4, 6, colour), (f"{name.lower()}6", colour)]
                draw_page(picture, place, 250, tokens, f"page {number}")
            picture.arrow(x + 92, 261, x + 146, 261)
            picture.text(x + 119, 250, "copy", 11)
            picture.text(x, 300, "take_copies() gives (1, 3) to copy_pages", 12, anchor="start")
        else:
            draw_page(picture, x, 250, tokens_of("p", 4, 6, SHARED if panel else COLOURS["A"]), "page 1")
        if panel:
            picture.text(x + 98, 202, "held twice", 12, SHARED, "start")
        if panel == 1:
            picture.text(x + 98, 266, "held twice", 12, SHARED, "start")
            picture.text(x, 300, "No page is copied", 12, anchor="start")
    return picture


def step() -> Picture:
    picture = Picture(860, 250)
    boxes = (
        ("alloc.step", "hands out pages", "writes page_table,", "seq_lens, copies"),
        ("copy_pages", "copies what must", "not be shared", "any longer"),
        ("append_kv", "writes the new", "tokens' K and V into", "their pages"),
        ("paged_attention", "reads the pages of", "each sequence,", "writes out"),
    )
    picture.text(20, 30, "Once a step (host)", 14, anchor="start", weight=600)
    picture.text(240, 30, "In every layer (device)", 14, anchor="start", weight=600)
    picture.box(216, 14, 0.5, 150, FAINT, FAINT, r=0)
    for i, (name, *lines) in enumerate(boxes):
        x = 20 + i * 212 + (8 if i else 0)
        picture.box(x, 48, 172, 108, EMPTY, COLOURS["A"] if i == 0 else INK, r=8)
        picture.code(x + 86, 74, name, 14)
        for row, line in enumerate(lines):
            picture.text(x + 86, 98 + row * 18, line, 12)
        if i:
            picture.arrow(x - 36 if i > 1 else x - 44, 102, x - 3, 102)
            picture.arrow_down(x + 86, *((190, 158) if name == "paged_attention" else (158, 190)))
    picture.box(240, 192, 600, 40, PAPER, COLOURS["C"], r=8)
    picture.code(540, 217, "k_pages, v_pages  [num_pages, page_size, num_kv_heads, head_dim]")
    return picture


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted places apart as little as it takes for each two to have a gap between them."""
    groups: list[list[float]] = []  # the place of the first one, and how many there are
    for place in places:
        groups.append([place, 1])
        while len(groups) > 1 and groups[-1][0] < groups[-2][0] + gap * groups[-2][1]:
            (first, number), (later, more) = groups[-2:]
            mean = (number * first + more * (later - gap * number)) / (number + more)
            groups[-2:] = [[mean, number + more]]
    return [first + gap * i for first, number in groups for i in range(int(number))]


def kv_accuracy() -> Picture:
    rows = json.loads(ACCURACY.read_text(encoding="utf-8"))["rows"]
    colours = {"int4": "#c0504d", "int8_int4": COLOURS["B"], "float16": INK, "bfloat16": INK}
    colours |= {"int8": COLOURS["A"], "float8_e4m3fn": COLOURS["C"], "float8_e5m2": SHARED}
    left, right, top, bottom = 84, 840, 50, 450
    least, most = 33500, 133000  # bytes a token
    lowest, highest = -7, 0  # decimal logarithms of divergences

    def x_of(num_bytes: float) -> float:
        return round(left + (right - left) * math.log(num_bytes / least) / math.log(most / least), 1)

    def y_of(divergence: float) -> float:
        return round(bottom - (bottom - top) * (math.log10(divergence) - lowest) / (highest - lowest), 1)

    picture = Picture(860, 510)
    picture.text(20, 30, "KL divergence of the predictions, nats a token", 14, anchor="start", weight=600)
    for power in range(lowest, highest + 1):
        y = y_of(10**power)
        picture.line(left, y, right, y, EMPTY)
        picture.text(left - 8, y + 4, f"{10.0**power:.{-power}f}", 11, anchor="end")
    picture.text((left + right) / 2, 498, "Bytes a token of Llama-3-8B's keys and values, with their scales")

    columns: dict[int, list[tuple[float, float, str, str]]] = {}
    for row in rows:
        # Other keys have the colour of their type, and are named alone.
        names = [row["variant"]] if row["variant"].startswith("keys") else [row["kind"], row["variant"]]
        words = ", ".join(filter(None, names)).replace("keys", "K")
        point = x_of(row["bytes_per_token"]), y_of(row["mean_kl"]), words, colours[row["kind"]]
        # Static scales are in one column with those of tokens, which take hardly more.
        column = 67584 if row["bytes_per_token"] == 65536 else row["bytes_per_token"]
        columns.setdefault(column, []).append(point)
    for column, points in columns.items():
        points.sort(key=lambda point: point[1])
        picture.line(x_of(column), bottom, x_of(column), bottom + 6, INK)
        picture.text(x_of(column), bottom + 20, str(column), 11)
        side, anchor = (1, "start") if x_of(column) < 700 else (-1, "end")
        for (x, y, words, colour), at in zip(points, spread([y for _, y, *_ in points], 14), strict=True):
            picture.line(x, y, x_of(column) + side * 14, at, colour)
            picture.dot(x, y, colour)
            picture.text(x_of(column) + side * 17, at + 4, words, 11, colour, anchor)
    return picture


def means(values: Sequence[float], number: int) -> list[float]:
    """The means of runs of `number` values, one run after another."""
    return [math.fsum(values[i : i + number]) / number for i in range(0, len(values) - number + 1, number)]


def training(path: Path) -> Picture:
    """The losses of octavo's attention beside eager attention's, and how little they differ."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = {(row["settings"]["attention"], row["settings"]["seed"]): row["losses"] for row in rows}
    steps = rows[0]["settings"]["steps"]
    number = steps // 50  # that a point is the mean of
    left, right = 84, 840
    picture = Picture(860, 560)

    def x_of(step: float) -> float:
        return left + (right - left) * step / steps

    def points(values: Sequence[float], y_of: Callable[[float], float]) -> list[tuple[float, float]]:
        return [(x_of(number * (i + 0.5)), y_of(value)) for i, value in enumerate(means(values, number))]

    top, bottom = 50, 300
    highest = math.ceil(max(means(losses["octavo", 0], number)))
    lowest = math.floor(min(means(losses["octavo", 0], number)))

    def y_of_loss(loss: float) -> float:
        return bottom - (bottom - top) * (loss - lowest) / (highest - lowest)

    picture.text(20, 30, "Loss, nats a token", 14, anchor="start", weight=600)
    for loss in range(lowest, highest + 1):
        picture.line(left, y_of_loss(loss), right, y_of_loss(loss), EMPTY)
        picture.text(left - 8, y_of_loss(loss) + 4, str(loss), 11, anchor="end")
    picture.curve(points(losses["octavo", 0], y_of_loss), COLOURS["A"])
    for x, y in points(losses["eager", 0], y_of_loss):
        picture.dot(round(x, 1), round(y, 1), COLOURS["B"])
    unigram = y_of_loss(rows[0]["unigram_loss"])
    picture.line(left, round(unigram, 1), right, round(unigram, 1), INK)
    picture.text(right, unigram - 6, "by how often each token occurs", 12, anchor="end")
    picture.text(right, top + 14, "octavo.torch.attention", 12, COLOURS["A"], "end", 600)
    picture.text(right - 170, top + 14, "eager attention", 12, COLOURS["B"], "end", 600)

    top, bottom = 360, 510
    smallest, largest = -7, 0  # decimal logarithms

    def y_of_difference(difference: float) -> float:
        power = math.log10(max(difference, 10**smallest))
        return bottom - (bottom - top) * (power - smallest) / (largest - smallest)

    picture.text(20, 340, "How much two runs differ in the loss of a step", 14, anchor="start", weight=600)
    for power in range(smallest, largest + 1):
        y = y_of_difference(10**power)
        picture.line(left, round(y, 1), right, round(y, 1), EMPTY)
        picture.text(left - 8, y + 4, f"{10.0**power:.{-power}f}", 11, anchor="end")
    for (one, other), words, colour in (
        ((("octavo", 0), ("octavo", 1)), "another seed", COLOURS["C"]),
        ((("octavo", 0), ("eager", 0)), "another attention, the same seed", SHARED),
    ):
        pairs = zip(losses[one], losses[other], strict=True)
        line = points([abs(a - b) for a, b in pairs], y_of_difference)
        picture.curve(line, colour)
        picture.text(line[-1][0], round(min(y for _, y in line[-20:]) - 8, 1), words, 12, colour, "end")
    for step in range(0, steps + 1, steps // 5):
        picture.text(x_of(step), bottom + 20, str(step), 11)
    picture.text((left + right) / 2, bottom + 38, "Steps")
    return picture


ENGINES = {
    "hf_eager": ("transformers, eager", FAINT),
    "hf_sdpa": ("transformers, SDPA", COLOURS["C"]),
    "hf_static": ("transformers, compiled", SHARED),
    "compiled": ("compiled PyTorch", COLOURS["B"]),
    "compiled_flex": ("compiled, FlexAttention", "#c0504d"),
    "compiled_whole": ("compiled, whole step", "#7a5c3e"),
    "octavo": ("Octavo", COLOURS["A"]),
    "octavo_static_weight": ("Octavo, static weights", INK),
    "octavo_static": ("Octavo, static past too", "#d6409f"),
}


def draw_legend(picture: Picture, dots: Sequence[tuple[str, str]]) -> None:
    """What dots of each colour are, four in a line."""
    for i, (words, colour) in enumerate(dots):
        x, y = 30 + i % 4 * 205, 52 + i // 4 * 22
        picture.dot(x, y - 4, colour)
        picture.text(x + 10, y, words, 12, anchor="start")


def generate(path: Path) -> Picture:
    """How many times the floor's time each engine takes for a decode step: a line for each row."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    engines = [name for name in ENGINES if any(name in row["us"] for row in rows)]
    left, right, top, height = 240, 840, 56 + 22 * math.ceil(len(engines) / 4), 26
    bottom = top + height * len(rows)
    picture = Picture(860, bottom + 50)
    largest = max(ratio for row in rows for ratio in row["over_floor"].values())
    ticks = [x for power in (1, 10, 100, 1000) for x in (power, 2 * power, 5 * power)]
    end = next(tick for tick in ticks if tick >= largest)

    def x_of(ratio: float) -> float:
        # Below the floor, which was measured by another kernel, there may be a little.
        return round(left + (right - left) * math.log(ratio / 0.9) / math.log(end / 0.9), 1)

    picture.text(20, 30, f"Decode steps, {rows[0]['machine']['device']}", 14, anchor="start", weight=600)
    draw_legend(picture, [ENGINES[name] for name in engines])
    for tick in (tick for tick in ticks if tick <= end):
        picture.line(x_of(tick), top, x_of(tick), bottom, INK if tick == 1 else EMPTY)
        picture.text(x_of(tick), bottom + 18, str(tick), 11)
    for i, row in enumerate(rows):
        shape, y = row["shape"], top + height * (i + 0.5)
        picture.line(left, y, right, y, EMPTY)
        words = f"{shape['model']}, {shape['layers']} layers, {shape['batch']} x {shape['context']}"
        picture.text(left - 12, y + 4, words, 12, anchor="end")
        for name in engines:
            if name in row["over_floor"]:
                picture.dot(x_of(row["over_floor"][name]), y, ENGINES[name][1])
    words = "Time of a step / time to read the weights, keys and values"
    picture.text((left + right) / 2, bottom + 38, words)
    return picture


OF_PRODUCTS = {
    "cublas": ("cuBLAS", COLOURS["B"]),
    "cublaslt_best": ("best of cublasLt", COLOURS["C"]),
    "octavo": ENGINES["octavo"],
    "octavo_static_weight": ENGINES["octavo_static_weight"],
}


def linear(path: Path) -> Picture:
    """How many times the floor's time a product with weights takes, in a part for each number of rows."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row["shape"]["products"]) == 1]
    shapes = list(dict.fromkeys(row["shape"]["label"] for row in rows))
    numbers = sorted({row["shape"]["num_rows"] for row in rows} & {1, 8, 16, 64})
    ratios = [row["over_floor"][name] for row in rows for name in OF_PRODUCTS if name in row["over_floor"]]
    first, last = math.floor(10 * min(ratios)), math.ceil(10 * max(ratios))  # tenths
    left, top, height, gap = 120, 96, 22, 20
    width = (850 - left) / len(numbers) - gap
    bottom = top + height * len(shapes)
    picture = Picture(860, bottom + 56)
    device = rows[0]["machine"]["device"]
    picture.text(20, 30, f"Products with weights, {device}", 14, anchor="start", weight=600)
    draw_legend(picture, list(OF_PRODUCTS.values()))
    for i, shape in enumerate(shapes):
        picture.text(left - 12, top + height * (i + 0.5) + 4, shape.replace("x", " x "), 12, anchor="end")
    for part, num_rows in enumerate(numbers):
        start = left + part * (width + gap)

        def x_of(ratio: float, start: float = start) -> float:
            return round(start + width * (10 * ratio - first) / (last - first), 1)

        picture.text(start + width / 2, top - 8, f"M = {num_rows}", 12, weight=600)
        for tenths in range(first, last + 1):
            x = x_of(tenths / 10)
            picture.line(x, top, x, bottom, INK if tenths == 10 else EMPTY)
            if tenths % 5 == 0:
                picture.text(x, bottom + 18, f"{tenths / 10:g}", 11)
        for row in (row for row in rows if row["shape"]["num_rows"] == num_rows):
            y = top + height * (shapes.index(row["shape"]["label"]) + 0.5)
            for name, (_, colour) in OF_PRODUCTS.items():
                if name in row["over_floor"]:
                    picture.dot(x_of(row["over_floor"][name]), y, colour)
    picture.text((left + 850) / 2, bottom + 42, "Time / (3 us + time to read the weights)")
    return picture


PICTURES = {
    "page_table": page_table,
    "memory": memory,
    "fork": fork,
    "step": step,
    "kv_accuracy": kv_accuracy,
    "how_a_call_runs": _how_a_call_runs.draw,
    "decode": _decode.draw,
    "sm90_attention": _sm90_attention.draw,
    "sm90_wide_attention": _sm90_wide_attention.draw,
    "sm80_attention": _sm80_attention.draw,
    "shared_prefix": _shared_prefix.draw,
    "quantised_decode": _quantised_decode.draw,
    "quantised_prefill": _quantised_prefill.draw,
    "attention_backward": _attention_backward.draw,
    "latent_attention": _latent_attention.draw,
    "latent_decode": _latent_decode.draw,
    "linear": _linear.draw,
    "speeds": _speeds.draw,
    "training_memory": _training_memory.draw,
}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    pictures = PICTURES | {
        path.stem.replace("-", "_"): functools.partial(draw_rows, path)
        for draw_rows, paths in ((training, TRAINING), (generate, GENERATE), (linear, LINEAR))
        for path in paths
    }
    for name, draw in pictures.items():
        draw().save(folder / f"{name}.svg")
