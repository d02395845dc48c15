"""Pages of the documentation say what the committed rows of the benchmarks say."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _report import OCTAVO, floor_us, geometric_mean, read_rows  # noqa: E402
from _results_of_models import OCTAVO_STEPS  # noqa: E402
from _results_rows import GPUS, RESULTS, best_peer, load  # noqa: E402

from support.benchmark_cases import DECODE_SHARED, KINDS_OF_CODES  # noqa: E402

Row = dict[str, Any]


def rows_with_octavo(benchmark: str, gpu: str) -> list[Row]:
    return [row for row in load(RESULTS, benchmark, gpu) if OCTAVO in row["us"]]


def mean(ratio: Callable[[Row], float], rows: list[Row]) -> str:
    return f"{geometric_mean([ratio(row) for row in rows]):.2f}"


def floor_of(row: Row) -> float:
    return floor_us(row["num_bytes"], row["machine"]["read_bandwidth"])


def over_floor(row: Row) -> float:
    return row["us"][OCTAVO] / floor_of(row)


def over_peer(row: Row) -> float:
    """Octavo's time divided by the best peer's."""
    return row["us"][OCTAVO] / row["us"][best_peer(row["us"])]


def invariant(row: Row) -> float:
    return row["us"]["octavo_batch_invariant"] / row["us"][OCTAVO]


def decode() -> list[str]:
    h100, h200 = (rows_with_octavo("decode", gpu) for gpu in GPUS)
    extra = [rows_with_octavo("decode-extra", gpu) for gpu in GPUS]
    others = [[row for row in rows if "room" not in row["case"]] for rows in extra]
    with_room = [row for row in extra[1] if "room" in row["case"] and best_peer(row["us"])]
    peer, floor, cost = (
        [mean(ratio, rows) for rows in (h100, h200)] for ratio in (over_peer, over_floor, invariant)
    )
    more = [mean(over_floor, rows) for rows in others]
    room = mean(over_peer, with_room)
    assert max(map(over_peer, h100 + h200)) < 1
    of_case = [{row["case"]: row for row in rows} for rows in (h100, h200)]
    many, long, one_head, one = (
        " and ".join(f"{invariant(rows[case]):.2f}" for rows in of_case)
        for case in ("70btp8_b256_s1024", "8b_b64_s4096", "70btp8_b1_s8192", "8b_b1_s8192")
    )
    [wide] = [row for row in extra[1] if row["case"] == "dim512_b32_s2048"]
    return [
        f"CTAs with nothing to combine: {many}. Where the default cuts as well, as 64 sequences of 4096 "
        f"keys, it is {long}.",
        f"of one KV head have 16 splits, by default 32: {one_head}.",
        f"as at 8b_b1_s8192: {one}.",
        f"take {over_floor(wide):.2f} floors (H200), batch-invariant "
        f"{over_floor(wide) * invariant(wide):.2f}.",
        f"takes {peer[0]} (H100) and {peer[1]} (H200) times the best peer's time",
        f"in all {len(h100)} rows. That is {floor[0]} and {floor[1]} times the floor",
        f"takes {cost[0]} and {cost[1]} times as long as the default",
        f"take {more[0]} and {more[1]} floors in the mean of {len(others[0])} and {len(others[1])} rows",
        f"{len(with_room)} rows of tables with much room that peers serve, {room} times",
    ]


def sm90_attention() -> list[str]:
    h100, h200 = ([1 / over_peer(row) for row in rows_with_octavo("prefill", gpu)] for gpu in GPUS)
    dense = [
        [1 / over_peer(row) for row in rows_with_octavo("prefill", gpu) if row["shape"]["page_size"] == 0]
        for gpu in GPUS
    ]
    short = [sum(speed < 1.03 for speed in speeds) for speeds in dense]
    assert [sum(speed < 1 for speed in speeds) for speeds in (h100, h200)] == [4, 0]
    extra = {row["case"]: 1 / over_peer(row) for row in rows_with_octavo("prefill-extra", "H200")}
    small_pages = [speed for case, speed in extra.items() if case.endswith("_page1")]
    return [
        f"FlashAttention-3 takes {min(small_pages):.2f} to {max(small_pages):.2f} of the time over pages of "
        f"one token (H200), and with heavy-tailed lengths {extra['spec8_heavy_tail32']:.2f} for drafts, "
        f"{extra['chunks_heavy_tail16']:.2f} for chunks.",
        f"{geometric_mean(h200):.2f} times the speed of the better of cuDNN and FlashAttention-3",
        f"on an H200 (at least {min(h200):.2f}), and {geometric_mean(h100):.2f} on an H100",
        f"behind in four rows on an H100, by {100 * (1 - min(h100)):.0f} % at most",
        f"missed in {short[0]} rows of {len(dense[0])} on an H100 and in {short[1]} on an H200",
    ]


def sm90_wide_attention() -> list[str]:
    """H200 rows of head dim 512, beside head dim 256 with twice the heads."""
    [row] = [row for row in load(RESULTS, "options", "H200") if row["name"] == "prompt_d512"]
    call = row["call"]
    products = call["batch"] * call["num_q_heads"] * call["queries"] * call["keys"] * call["head_dim"]
    # 4 flops, half of them under a causal mask.
    wide, plain = (2 * products / row[us] / 1e6 for us in ("us", "plain_us"))
    return [
        f"On an H200, in [one run](../results.md#what-options-cost): "
        f"{call['batch']} x {call['queries']} causal, "
        f"with {call['num_q_heads']} query heads and {call['num_kv_heads']} KV heads, "
        f"takes {row['us']:.0f} us.",
        f"takes {row['plain_us']:.0f} us. That is {wide:.0f} beside {plain:.0f} TFLOP/s, "
        f"{wide / plain:.2f} of the rate.",
    ]


def attention_backward() -> list[str]:
    lines = []
    for head_dim in (64, 128, 256):
        cells = []
        for gpu in GPUS:
            rows = [row for row in rows_with_octavo("backward", gpu) if row["group"] == f"d{head_dim}"]
            speeds = [1 / over_peer(row) for row in rows]
            cells.append(f"{min(speeds):.2f} to {max(speeds):.2f}")
        lines.append(f"| {head_dim} | {cells[0]} | {cells[1]} |")
    return lines


def quantised_decode() -> list[str]:
    rows = [rows_with_octavo("quantised", gpu) for gpu in GPUS]

    def means(kind: str) -> str:
        of_kind = [[row for row in some if re.match(rf"{kind}_(?!int4)", row["case"])] for some in rows]
        return " and ".join(mean(over_floor, some) for some in of_kind)

    fp8 = [row for some in rows for row in some if row["case"].startswith("fp8")]
    speeds = [1 / over_peer(row) for row in fp8]
    # FlashInfer's two kernels count as one.
    names = (OCTAVO, "flashinfer_(?!xqa)", "flashinfer_xqa", "fa3")
    error = [
        max(x for row in fp8 for contestant, x in row["max_error"].items() if re.match(name, contestant))
        for name in names
    ]
    cost = [mean(invariant, some) for some in rows]
    one = {row["case"]: row["us"][OCTAVO] for row in rows[1] if "_b1_" in row["case"]}
    assert f"{one['fp8_b1_s8192']:.1f}" == f"{one['int8_b1_s8192']:.1f}"
    return [
        f"1 x 8192 takes {one['int8_b1_s8192']:.1f} us for 8 bits and {one['int4_b1_s8192']:.1f} for int4",
        f"fp8 takes {means('fp8')} floors, int8 {means('int8')}, int8 with int4 {means('int8_int4')}, int4 "
        f"{means('int4')}.",
        f"takes {min(speeds):.2f} to {max(speeds):.1f} times as long",
        f"is {error[0]:.1%} for Octavo, {error[1]:.1%} for FlashInfer, {error[2]:.1%} for XQA and "
        f"{error[3]:.1%} for FlashAttention-3.".replace("%", " %"),
        f"batch-invariant mode takes {cost[0]} and {cost[1]} times as long",
    ]


def quantised_prefill() -> list[str]:
    titles = {
        "fp8": "fp8, one scale",
        "int8": "int8, scales of each token",
        "int4": "int4, likewise",
        "int8_int4": "int8 with int4, likewise",
    }
    assert titles.keys() == KINDS_OF_CODES.keys()
    times = [{row["case"]: row["us"][OCTAVO] for row in load(RESULTS, "quantised-prefill", x)} for x in GPUS]
    cases = ("chunk512_ctx8k", "prefill4k", "mixed", "spec8")
    over_fp8 = [
        row["max_error"]
        for gpu in GPUS
        for row in load(RESULTS, "quantised-prefill", gpu)
        if row["case"].startswith("fp8")
    ]
    fa3, octavo = (100 * max(error[name] for error in over_fp8) for name in ("fa3", OCTAVO))
    return [f"Its errors were up to {fa3:.1f} % of a row's largest element (Octavo: {octavo:.1f} %)."] + [
        f"| {title} | "
        + " | ".join(", ".join(f"{us[case] / us[f'{kind}_{case}']:.2f}" for us in times) for case in cases)
        + " |"
        for kind, title in titles.items()
    ]


def latent_attention() -> list[str]:
    times = [{row["case"]: row for row in load(RESULTS, "latent", gpu)} for gpu in GPUS]

    def cells(heads: str, number: Callable[[Row], str], batches: tuple[int, ...] = (32, 128)) -> str:
        of_gpus = [[number(rows[f"mla_b{batch}_s4096_{heads}"]) for batch in batches] for rows in times]
        return f"| {', '.join(of_gpus[0])} | {', '.join(of_gpus[1])} |"

    def speeds(row: Row) -> str:
        peer = best_peer(row["us"])
        return f"{row['us'][peer] / row['us'][OCTAVO]:.2f}" if peer else "-"

    def floors(row: Row) -> str:
        return f"{row['us'][OCTAVO] / row['floor_us']:.2f}"

    def tflops(row: Row) -> str:
        return f"{row['flops'] / row['us'][OCTAVO] / 1e6:.0f}"

    def over_flashinfer(row: Row) -> float:
        names = [name for name in row["us"] if name.startswith("flashinfer")]
        return min(row["us"][name] for name in names) / row["us"][OCTAVO]

    every = [row for of_gpu in times for row in of_gpu.values()]
    fp8 = [over_flashinfer(row) for row in every if re.search("_s4096_.*fp8", row["case"])]
    over_16_bits = [
        row["us"][OCTAVO] / of_gpu[case.removesuffix("_fp8")]["us"][OCTAVO]
        for of_gpu in times
        for case, row in of_gpu.items()
        if case.endswith("h128_fp8")
    ]
    unlike = ", ".join(speeds(times[1][f"mla_b{batch}_supto8192_h128"]) for batch in (32, 128))
    return [
        f"which takes {min(fp8):.1f} to {max(fp8):.1f} times as long over fp8.",
        f"fp8 takes {min(over_16_bits):.2f} to {max(over_16_bits):.2f} times as long as 16 bits",
        f"lengths up to 8192, 32 and 128 sequences, best peer = 1 | | {unlike} |",
        f"| 16 heads, 32 and 128 sequences, time / floor {cells('h16', floors)}",
        f"| 128 heads, 32 and 128 sequences, TFLOP/s {cells('h128', tflops)}",
        f"| fp8, 16 heads, 32 and 128 sequences, time / floor {cells('h16_fp8', floors)}",
        f"| 16 heads, 1, 32 and 128 sequences, best peer = 1 {cells('h16', speeds, (1, 32, 128))}",
        f"| 128 heads, 1, 32 and 128 sequences, best peer = 1 {cells('h128', speeds, (1, 32, 128))}",
    ]


def shared_prefix() -> list[str]:
    rows = [{row["case"]: row for row in load(RESULTS, "shared-prefix", gpu)} for gpu in GPUS]
    lines = []
    for case in DECODE_SHARED:
        if case.cascade:
            continue
        numbers = []
        for of_gpu in rows:
            plain, shared = of_gpu[case.name], of_gpu[f"{case.name}_cascade"]
            times = (plain["us"]["fa3"], plain["us"][OCTAVO], shared["us"][OCTAVO], floor_of(plain))
            numbers += [f"{us:.1f}" for us in times]
        own = case.seqlens_k[0] - case.shared_prefix
        shape = (case.batch, case.shared_prefix, own, case.seqlens_q[0], f"{plain['num_bytes'] / 1e6:.0f}")
        lines.append(f"| {' | '.join(map(str, (*shape, *numbers)))} |")
    codes = [
        {row["case"]: row["us"][OCTAVO] for row in load(RESULTS, "quantised-shared-prefix", x)} for x in GPUS
    ]
    for batch, prefix, own in ((64, 4096, 256), (256, 2048, 256), (16, 8192, 512)):
        case = f"fp8_shared_b{batch}_p{prefix}_s{own}"
        gains = " and ".join(f"{us[case]:.0f} to {us[f'{case}_cascade']:.0f}" for us in codes)
        lines.append(f"{batch} x ({prefix} + {own}) {gains}")
    return lines


def models() -> list[str]:
    decodes = [{row["case"]: row for row in rows_with_octavo("decode", gpu)} for gpu in GPUS]
    extras = [{row["case"]: row for row in rows_with_octavo("decode-extra", gpu)} for gpu in GPUS]
    options = {row["name"]: row["ratio"] for row in load(RESULTS, "options", "H200")}
    gradients = {row["case"]: row["us"] for row in load(RESULTS, "backward", "H100")}
    latent = {row["case"]: row["us"] for row in load(RESULTS, "latent", "H100")}
    steps = [
        next(row["tokens_per_s"] for row in load(RESULTS, "generate", gpu) if row["case"] == "7b_b1_s1024")
        for gpu in GPUS
    ]
    speeds = [max(of_gpu[name] for name in OCTAVO_STEPS if name in of_gpu) for of_gpu in steps]
    serving = read_rows(RESULTS / "serving-cpu.jsonl")
    [requests] = [
        row for row in serving if (row["model"], row["case"], row["way"]) == ("smollm2", "one", "pages")
    ]

    def times(rows: list[dict[str, Row]], case: str) -> str:
        return ", ".join(f"{of_gpu[case]['us'][OCTAVO]:.1f}" for of_gpu in rows)

    def floors(case: str) -> str:
        return ", ".join(f"{floor_of(of_gpu[case]):.1f}" for of_gpu in extras)

    def dropout(head_dim: int) -> str:
        us = gradients[f"d{head_dim}_causal_8x2048_dropout"]
        return f"{us[OCTAVO] / us['octavo_plain']:.2f}"

    plain = times(decodes, "8b_b32_s2048")
    h100, h200 = plain.split(", ")
    assert {f"{options[name]:.2f}" for name in ("drafts16_tree", "drafts64_tree")} == {"1.06"}
    return [
        f"bfloat16: {h100} us on an H100 and {h200} on an H200",
        f"a multiple of `num_kv_heads`) | {plain} us |",
        f"| {times(extras, 'group7_b32_s4096')} us for 32 x 4096, where the floor is "
        f"{floors('group7_b32_s4096')} |",
        f"| {times(extras, 'window512_b32_s2048')} us with a window of 512;",
        f"| `softcap` | {times(extras, 'softcap_b32_s2048')} us |",
        f"| {times(extras, 'dim256_b32_s2048')} us for twice the bytes (floor "
        f"{floors('dim256_b32_s2048')}) |",
        f"| {options['step_d512']:.2f} times a call of head dim 256 with the same bytes, and a prompt about "
        f"{options['prompt_d512']:.1f} times one",
        f"some {100 * options['prompt_sinks_window127'] - 100:.0f} % in a prompt with a window of 127",
        f"head dim 64: {times(extras, 'dim64_b32_s4096')} us for 32 x 4096 (floor "
        f"{floors('dim64_b32_s4096')}) |",
        f"{options['step_chunks8192']:.2f} of a step at 12,288 tokens and "
        f"{options['prompt_chunks8192']:.2f} of a prompt",
        f"| `alibi_slopes` | {times(extras, 'alibi_b32_s2048')} us |",
        f"| {times(decodes, 'bloom_b32_s2048')} us for 32/32 heads",
        f"about {options['encoder_window64']:.1f} of the call without a window",
        f"about {options['encoder_alibi']:.1f} times the call without it",
        f"{dropout(128)} times as long at head dim 128 and {dropout(64)} at 64, on an H100",
        f"| {requests['requests_per_s']:.2f} requests/s of "
        f"{requests['generated_tokens'] / requests['num_requests']:.0f} tokens on two cores",
        f"at 1024 tokens: {speeds[0]:.0f} tokens/s on an H100, {speeds[1]:.0f} on an H200",
        f"take {latent['mla_b32_s4096_h128'][OCTAVO]:.1f} us on an H100 with 128 heads",
    ]


def results() -> list[str]:
    def machines(benchmark: str, key: str) -> list[float]:
        """Of each GPU, what most rows were measured beside."""
        of_gpus = [[row["machine"][key] / 1e12 for row in load(RESULTS, benchmark, gpu)] for gpu in GPUS]
        return [max(set(values), key=values.count) for values in of_gpus]

    read = [f"{value:.2f}" for value in machines("decode", "read_bandwidth")]
    decode_products, prefill_products = (
        [f"{value:.0f}" for value in machines(benchmark, "matmul_flops")]
        for benchmark in ("decode", "prefill")
    )
    _, usual = machines("quantised", "matmul_flops")
    apart = [
        row["case"]
        for row in load(RESULTS, "quantised", "H200")
        if row["machine"]["matmul_flops"] / 1e12 != usual
    ]
    fp8 = [
        row["max_error"]
        for gpu in GPUS
        for row in load(RESULTS, "quantised", gpu)
        if row["case"].startswith("fp8")
    ]
    fa3, xqa, octavo = (
        f"{100 * max(error[name] for error in fp8):.1f}" for name in ("fa3", "flashinfer_xqa", OCTAVO)
    )
    return [
        f"bandwidth {' and '.join(read)} TB/s, 8192^3 product {' and '.join(decode_products)} TFLOP/s)",
        f"each GPU in one run, but for {' and '.join(f'`{case}`' for case in apart)} of the H200",
        f"with errors of up to {fa3} and {xqa} % of a row's largest element (Octavo: {octavo} %)",
        f"ran at {prefill_products[0]} TFLOP/s on the H100, whose rows are of an earlier kernel, and at "
        f"{prefill_products[1]} on the H200",
    ]


def page_size() -> list[str]:
    rows = {row["case"]: row for row in rows_with_octavo("decode-extra", "H200")}
    one, eight, many = (f"{over_floor(rows[f'page{size}_b32_s2048']):.2f}" for size in (1, 8, 64))
    return [
        f"{one} times the floor (a launch, and what reading keys and values takes) with pages of one token, "
        f"{eight} with pages of 8, {many} with pages of 64",
    ]


def pytorch() -> list[str]:
    [us] = [row["us"] for row in load(RESULTS, "generate", "H200") if row["case"] == "7b_b1_s1024"]
    return [f"with 1056 tokens from {us[OCTAVO]:.0f} to {us['octavo_static']:.0f} us"]


def kv_cache() -> list[str]:
    us = {row["contestant"]: row["best_us"] for row in load(RESULTS, "kv-cache", "H100")}
    return [f"{us['torch KVCache']:.1f} and {us['torch both']:.1f} microseconds of the host's time"]


PAGES = {
    f"kernels/{page.__name__}": page
    for page in (
        decode,
        sm90_attention,
        sm90_wide_attention,
        attention_backward,
        quantised_decode,
        quantised_prefill,
        latent_attention,
        shared_prefix,
    )
} | {
    "models": models,
    "results": results,
    "page_size": page_size,
    "tutorials/pytorch": pytorch,
    "kv_cache": kv_cache,
}


@pytest.mark.parametrize("page", PAGES)
def test_page_says_what_its_rows_say(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    text = " ".join(text.split())
    missing = [claim for claim in PAGES[page]() if claim not in text]
    assert not missing, f"{page}.md has to say:\n" + "\n".join(missing)
