"""Tables of single operators: the cost of a call, decode, prefill, MLA, products and gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from _linear_report import MODES, RATIOS, TRITON, best_cublas, is_alone, number, summarise
from _report import OCTAVO, floor_us
from _results_rows import PEERS, Row, best_peer, format_table, gpus_with, load, rows_of

CALLERS = {
    "torch": "Octavo, torch tensors",
    "cupy": "Octavo, CuPy arrays",
    "octavo.torch": "`octavo.torch`",
    "fa3": "FlashAttention-3",
    "flashinfer_cuda_cores": "FlashInfer",
    "flashinfer_cuda_cores plan": "FlashInfer's `plan`, once a step",
    "torch scaled_dot_product_attention": "`torch` `scaled_dot_product_attention`",
    "torch add": "`torch.add`",
}


def calls(results: Path) -> str:
    """What a call costs the host, with its launch."""
    gpus = gpus_with(results, "call")
    found = {
        (gpu, row["contestant"]): f"{row['best_us']:.1f}"
        for gpu in gpus
        for row in load(results, "call", gpu)
        if row["device"] == "cuda"
    }
    rows = [[label, *(found.get((gpu, name), "") for gpu in gpus)] for name, label in CALLERS.items()]
    return format_table(["", *gpus], rows, numbers=len(gpus))


def jax(results: Path) -> str:
    """Octavo beside Pallas with its best number of splits."""
    gpus = gpus_with(results, "jax")
    best: dict[tuple[str, str, str, str], float] = {}
    cases: dict[str, None] = {}  # in the order of the rows
    for gpu in gpus:
        for row in load(results, "jax", gpu):
            key = (gpu, row["case"], row["program"], row["contestant"].partition(",")[0])
            best[key] = min(row["us"], best.get(key, row["us"]))
            cases[row["case"]] = None
    columns = [
        (gpu, program, contestant)
        for gpu in gpus
        for program in ("attention", "decode loop")
        for contestant in ("octavo", "pallas")
    ]
    titles = {"attention": "", "decode loop": " with `append_kv`"}
    header = [
        "batch x length",
        *(f"{name.capitalize()}{titles[program]}, {gpu}" for gpu, program, name in columns),
    ]
    rows = []
    for case in cases:
        times = [best.get((gpu, case, program, contestant)) for gpu, program, contestant in columns]
        shape = re.sub(r"8b_b(\d+)_s(\d+)", r"\1 x \2", case)
        rows.append([shape, *("" if us is None else f"{us:.1f}" for us in times)])
    return format_table(header, rows, numbers=len(columns))


def _beside_the_floor(
    results: Path, benchmark: str, names: tuple[str, ...], texts: Callable[[Row, float], list[str]]
) -> str:
    """A line a case: of each GPU the texts of its row and floor, of which the first one is Octavo's time.

    They are empty where a GPU lacks the case.
    """
    gpus = gpus_with(results, benchmark)

    def texts_of(gpu: str) -> dict[str, list[str]]:
        rows = load(results, benchmark, gpu)
        floors = (floor_us(row["num_bytes"], row["machine"]["read_bandwidth"]) for row in rows)
        return {row["case"]: texts(row, floor) for row, floor in zip(rows, floors, strict=True)}

    found = [texts_of(gpu) for gpu in gpus]
    cases = dict.fromkeys(case for of_gpu in (max(found, key=len), *found) for case in of_gpu)
    missing = [""] * (1 + len(names))
    rows = [[case, *(text for of_gpu in found for text in of_gpu.get(case, missing))] for case in cases]
    header = ["case", *(name for gpu in gpus for name in (gpu, *names))]
    return format_table(header, rows, numbers=len(header) - 1)


def decode(results: Path) -> str:
    """Paged decode, beside the batch-invariant mode, the best peer and the floor."""

    def texts(row: Row, floor: float) -> list[str]:
        us, peer = row["us"], best_peer(row["us"])
        times = (us[OCTAVO], us["octavo_batch_invariant"], us[peer] if peer else None, floor)
        return ["" if x is None else f"{x:.1f}" for x in times]

    return _beside_the_floor(results, "decode", ("invariant", "best peer", "floor"), texts)


def quantised(results: Path) -> str:
    """Decode over caches of codes, beside the floor and the best peer."""

    def texts(row: Row, floor: float) -> list[str]:
        us, peer = row["us"], best_peer(row["us"])
        theirs = f"{us[peer]:.1f} {PEERS[peer]}" if peer else ""
        return [f"{us[OCTAVO]:.1f}", f"{floor:.1f}", f"{us[OCTAVO] / floor:.2f}", theirs]

    return _beside_the_floor(results, "quantised", ("floor", "ratio", "best peer"), texts)


# Bytes of a token in Llama-3-8B, and the case of `decode-extra` or `quantised` that was measured.
CACHES = {
    "float16, bfloat16": (131072, "head_major_b32_s2048"),
    "int8, float8_e4m3fn, float8_e5m2": (67584, "int8_b32_s2048"),
    "the same with one scale for all tokens": (65536, "fp8_b32_s2048"),
    "int8_int4": (51200, "int8_int4_b32_s2048"),
    "int4": (34816, "int4_b32_s2048"),
}


def quantised_cache(results: Path) -> str:
    """What a token takes in caches of each type, and what a decode call over it takes."""
    gpus = gpus_with(results, "quantised")
    times = {
        (gpu, row["case"]): f"{row['us'][OCTAVO]:.1f}"
        for gpu in gpus
        for benchmark in ("decode-extra", "quantised")
        for row in load(results, benchmark, gpu)
        if OCTAVO in row["us"]
    }
    rows = []
    for label, (num_bytes, case) in CACHES.items():
        us = [times.get((gpu, case), "") for gpu in gpus]
        rows.append([label, str(num_bytes), str(64 * 10**9 // num_bytes), *us])
    header = ["type", "bytes a token", "tokens in 64 GB", *(f"a call on an {gpu}, us" for gpu in gpus)]
    return format_table(header, rows, numbers=len(header) - 1)


def quantised_prefill(results: Path) -> str:
    """Batches of many queries over caches of codes, beside the same ones over bfloat16."""
    kinds = {"fp8": "fp8, one scale", "int8": "int8", "int8_int4": "int8 / int4", "int4": "int4"}
    rows = []
    for gpu in gpus_with(results, "quantised-prefill"):
        times = {row["case"]: row["us"] for row in load(results, "quantised-prefill", gpu)}
        for case in (name for name in times if f"fp8_{name}" in times):
            base, peer = times[case]["octavo"], times[f"fp8_{case}"].get("fa3")
            found = [times[f"{kind}_{case}"]["octavo"] for kind in kinds]
            cells = [f"{us:.0f} ({base / us:.2f})" for us in found]
            rows.append([case, gpu, f"{base:.0f}", *cells, f"{peer:.0f}" if peer else ""])
    header = ["case", "GPU", "bfloat16", *kinds.values(), "FlashAttention-3, fp8 queries"]
    return format_table(header, rows, numbers=len(header) - 2)


def _prefill_rows(results: Path, paged: bool) -> dict[str, dict[str, Row]]:
    """The rows of prefill by case and GPU, of paged arrays or of the others."""
    rows: dict[str, dict[str, Row]] = {}
    for gpu, row in rows_of(results, "prefill"):
        if bool(row["shape"]["page_size"]) == paged:
            rows.setdefault(row["case"], {})[gpu] = row
    return rows


def prefill(results: Path) -> str:
    """Attention over dense and packed arrays beside the peers, in TFLOP/s."""
    gpus = gpus_with(results, "prefill")
    lines = []
    for case, by_gpu in _prefill_rows(results, paged=False).items():
        cells = [case.replace("_", " "), next(iter(by_gpu.values()))["shape"]["heads"]]
        for gpu in gpus:
            rates = by_gpu[gpu]["tflops"] if gpu in by_gpu else {}
            found = [rates.get(contestant) for contestant in (OCTAVO, "cudnn", "fa3")]
            peers = [x for x in found[1:] if x]
            cells += ["" if x is None else f"{x:.0f}" for x in found]
            cells.append(f"{found[0] / max(peers):.2f}" if found[0] and peers else "")
        lines.append(cells)
    header = ["case", "heads", *(x for gpu in gpus for x in (gpu, "cuDNN", "FA3", "ratio"))]
    return format_table(header, lines, numbers=len(header) - 2)


def paged_prefill(results: Path) -> str:
    """Paged batches of many queries beside FlashAttention-3, in microseconds."""
    gpus = gpus_with(results, "prefill")
    lines = []
    for case, by_gpu in _prefill_rows(results, paged=True).items():
        times = [by_gpu[gpu]["us"].get(x) if gpu in by_gpu else None for gpu in gpus for x in (OCTAVO, "fa3")]
        lines.append([case, *("" if us is None else f"{us:.0f}" for us in times)])
    header = ["case", *(x for gpu in gpus for x in (gpu, "FA3"))]
    return format_table(header, lines, numbers=len(header) - 1)


def latent(results: Path) -> str:
    """Latent attention beside the peers and the floor, and what its products come to."""
    rows = []
    for gpu, row in rows_of(results, "latent"):
        us, floor = row["us"], row["floor_us"]
        own, by_peer = us[OCTAVO], {peer: time for peer, time in us.items() if peer in PEERS}
        peers = []
        for label in ("FlashMLA", "FlashInfer"):
            best = min((time for peer, time in by_peer.items() if PEERS[peer] == label), default=None)
            peers.append(f"{best:.1f}" if best else "")
        numbers = [f"{floor:.1f}", f"{own / floor:.2f}", f"{row['flops'] / own / 1e6:.0f}"]
        rows.append([row["case"], gpu, f"{own:.1f}", *peers, *numbers])
    header = ["case", "GPU", "Octavo", "FlashMLA", "FlashInfer", "floor", "/ floor", "TFLOP/s"]
    return format_table(header, rows, numbers=6)


def options(results: Path) -> str:
    """What masks, biases and head dims cost, beside plain calls."""
    rows = [
        [row["name"], gpu, f"{row['plain_us']:.1f}", f"{row['us']:.1f}", f"{row['ratio']:.2f}"]
        for gpu, row in rows_of(results, "options")
    ]
    return format_table(["case", "GPU", "plain", "with it", "ratio"], rows, numbers=3)


def block_sparse(results: Path) -> str:
    """Block masks beside no mask, with gradients."""
    rows = []
    for gpu, row in rows_of(results, "block-sparse"):
        numbers = [
            *(f"{row[name]:.0f}" for name in ("dense_us", "sparse_us")),
            f"{row['ratio']:.2f}",
            *(f"{row[name]:.0f}" for name in ("dense_backward_us", "sparse_backward_us")),
            f"{row['backward_ratio']:.2f}",
        ]
        mask = "causal" if row["causal"] else "full"
        rows.append(
            [str(row["head_dim"]), mask, str(row["block_size"]), f"{100 * row['kept']:g} %", gpu, *numbers]
        )
    header = ["head dim", "mask", "blocks of", "kept", "GPU"]
    numbers_of = ["no mask", "block mask", "ratio", "gradients, no mask", "block mask", "ratio"]
    return format_table([*header, *numbers_of], rows, numbers=len(numbers_of))


def sparse_decode(results: Path) -> str:
    """Decoding over chosen pages beside all pages, and beside the floor of what is chosen."""
    rows = []
    for gpu, row in rows_of(results, "sparse-decode"):
        floor = row["floor_us"]
        numbers = [row["dense_us"], row["sparse_us"], row["ratio"], floor, row["sparse_us"] / floor]
        digits = (1, 1, 2, 1, 2)
        what = f"{row['batch']} x {row['length']}, pages of {row['page_size']}"
        what += ", ALiBi" if row["alibi"] else ""
        cells = [f"{x:.{n}f}" for x, n in zip(numbers, digits, strict=True)]
        rows.append([what, f"{100 * row['kept']:g} %", gpu, *cells])
    header = ["sequences", "chosen", "GPU", "all pages", "chosen ones", "ratio", "floor", "/ floor"]
    return format_table(header, rows, numbers=5)


LINEAR_ROWS = (1, 8, 16, 64, 128)  # of x, that the table of shapes has; the files have more


def linear(results: Path) -> str:
    """What all shapes together say, for each number of rows of x."""
    found = [(gpu, summarise(load(results, "linear", gpu))) for gpu in gpus_with(results, "linear")]
    rows = [[gpu, str(num_rows), *cells] for gpu, lines in found for num_rows, cells in lines.items()]
    return format_table(["GPU", "M", *RATIOS.values()], rows, numbers=1 + len(RATIOS))


def _times_of_linear(row: Row) -> str:
    """Octavo in both modes, the fastest of cuBLAS, and Triton where it ran."""
    us = row["us"]
    times = [number(time, ".1f") or "-" for time in (*map(us.get, MODES), best_cublas(us))]
    return " / ".join([*times, f"{us[TRITON]:.1f}"] if TRITON in us else times)


def linear_shapes(results: Path) -> str:
    """Microseconds of each shape, and of the four products of layers."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for gpu, row in rows_of(results, "linear"):
        lines.setdefault((gpu, row["shape"]["label"]), []).append(row)
    table = []
    for (gpu, label), rows in lines.items():
        times = {row["shape"]["num_rows"]: _times_of_linear(row) for row in rows}
        shape = label.replace("x", " x ") if is_alone(rows[0]) else label.replace("_", ", ")
        floor = f"{rows[0]['floor_us']:.1f}"
        table.append([shape, gpu, floor, *(times.get(num_rows, "") for num_rows in LINEAR_ROWS)])
    header = ["N x K", "GPU", "floor", *(f"M = {num_rows}" for num_rows in LINEAR_ROWS)]
    return format_table(header, table, numbers=1 + len(LINEAR_ROWS))


BACKWARD_PEERS = ("cudnn", "fa2", "fa3", "fa4")


def _backward_rows(results: Path, *groups: str) -> list[tuple[str, Row]]:
    """The GPU of each row of these groups, and the row."""
    return [(gpu, row) for gpu, row in rows_of(results, "backward") if row["group"] in groups]


def backward(results: Path) -> str:
    """TFLOP/s of all, and how many times as fast as the best peer Octavo is."""
    rows = []
    for gpu, row in _backward_rows(results, "d64", "d128", "d256", "other"):
        us, peer = row["us"], best_peer(row["us"])
        speeds = [row["tflops"].get(name) for name in (OCTAVO, *BACKWARD_PEERS)]
        ratio = f"{us[peer] / us[OCTAVO]:.2f}" if peer and OCTAVO in us else ""
        rows.append([row["case"], gpu, *("" if x is None else f"{x:.0f}" for x in speeds), ratio])
    header = ["case", "GPU", "Octavo", *(PEERS[name] for name in BACKWARD_PEERS), "ratio to the best peer"]
    return format_table(header, rows, numbers=len(header) - 2)


def backward_options(results: Path) -> str:
    """Microseconds with an option, and what it costs."""
    rows = []
    for gpu, row in _backward_rows(results, "options"):
        us, peer = row["us"], best_peer(row["us"])
        with_it, without = us.get(OCTAVO), us.get("octavo_plain")
        cost = with_it / without if with_it and without else None
        cells = [*(f"{x:.0f}" if x else "" for x in (with_it, without)), f"{cost:.2f}" if cost else ""]
        rows.append([row["case"], gpu, *cells, f"{us[peer]:.0f} {PEERS[peer]}" if peer else ""])
    header = ["case", "GPU", "Octavo", "without it", "ratio", "best peer"]
    return format_table(header, rows, numbers=4)


def backward_with_forward(results: Path) -> str:
    """Microseconds of the forward and the backward together, and the memory that two ways to do it take."""
    found = _backward_rows(results, "forward", "standard")
    names = [name for name in (*BACKWARD_PEERS, "eager") if any(name in row["us"] for _, row in found)]
    rows = []
    for gpu, row in found:
        times = [row["us"].get(name) for name in (OCTAVO, *names)]
        sizes = [row["peak_bytes"].get(name) for name in (OCTAVO, "eager")]
        cells = [*(f"{x:.0f}" if x else "" for x in times), *(f"{x / 2**20:.0f}" if x else "" for x in sizes)]
        rows.append([row["case"].replace("_forward", ""), gpu, *cells])
    titles = ["Octavo", *(PEERS.get(name, name) for name in names), "MiB of Octavo", "MiB of eager"]
    return format_table(["case", "GPU", *titles], rows, numbers=len(titles))
