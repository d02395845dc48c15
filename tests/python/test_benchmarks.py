"""The benchmarks: what of them needs no GPU."""

import json
import math
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import octavo
from support import cases, oracle
from support.benchmark_cases import DECODE_EXTRA, DECODE_SHARED, DECODE_SWEEP, DECODE_TABLE, ROWS
from support.case import Case

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from _command import Table  # noqa: E402
from _report import (  # noqa: E402
    INT64,
    INVARIANT,
    OCTAVO,
    Machine,
    Row,
    describe,
    floor_us,
    format_machine,
    format_row,
    format_summary,
    geometric_mean,
    read_json,
    read_rows,
    write_json,
)

# Megabytes and floor of the table at a read bandwidth of 3.05 TB/s.
BYTES_AND_FLOOR = {
    "seed_seq128": (2.1, 3.7),
    "seed_seq1024": (16.8, 8.5),
    "seed_seq4096": (67.1, 25.0),
    "seed_batch8": (16.9, 8.5),
    "seed_batch32": (67.6, 25.2),
    "seed_batch512": (1082.1, 357.8),
    "8b_b1_s1024": (4.2, 4.4),
    "8b_b1_s8192": (33.6, 14.0),
    "8b_b8_s4096": (134.3, 47.0),
    "8b_b32_s2048": (269.0, 91.2),
    "8b_b64_s4096": (1074.8, 355.4),
    "8b_b128_s1024": (539.0, 179.7),
    "70btp8_b1_s8192": (4.2, 4.4),
    "70btp8_b64_s8192": (268.7, 91.1),
    "70btp8_b256_s1024": (135.3, 47.3),
    "8b_ragged64": (446.0, 149.2),
    "8b_fp8_b1_s8192": (16.8, 8.5),
    "8b_fp8_b32_s2048": (134.7, 47.2),
    "8b_fp8_b64_s4096": (537.9, 179.4),
    "bloom_b1_s2048": (33.6, 14.0),
    "bloom_b32_s2048": (1074.3, 355.2),
}

MACHINE = Machine(
    device="Some GPU",
    driver="580",
    versions={"octavo": "0.1.0"},
    l2_bytes=50 << 20,
    read_bandwidth=3.05e12,
    matmul_flops=787e12,
    probe_us={"scattered": {"1": 2.3, "2": 3.0}, "contiguous": {"1": 2.1, "2": 2.5}},
)


def make_row(case: Case, us: dict[str, float], skipped: dict[str, str]) -> Row:
    return Row(case.name, describe(case), case.num_bytes, us, dict.fromkeys(us, 0.001), skipped, MACHINE)


@pytest.fixture
def rows() -> list[Row]:
    seq128, batch512, b32, bloom, fp8 = cases.named(
        "seed_seq128", "seed_batch512", "8b_b32_s2048", "bloom_b1_s2048", "8b_fp8_b1_s8192"
    )
    return [
        make_row(
            seq128,
            {
                OCTAVO: 4.0,
                INVARIANT: 4.5,
                "fa3": 8.8,
                "flashinfer_cuda_cores": 5.0,
                "flashinfer_tensor_cores": 6.0,
            },
            {},
        ),
        make_row(batch512, {OCTAVO: 380.0, "fa3": 453.6}, {}),
        make_row(b32, {OCTAVO: 95.0, "fa3": 100.0}, {}),
        make_row(bloom, {OCTAVO: 15.0}, {"fa3": "no ALiBi"}),
        make_row(fp8, {"fa3": 17.9}, {OCTAVO: "not supported yet"}),
    ]


def test_list_needs_no_gpu() -> None:
    options = ["--list", "--extra", "--shared", "--sweep"]
    command = [sys.executable, str(BENCHMARKS / "bench_decode.py"), *options]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    names = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines()[2:]]
    assert names == [case.name for case in (*DECODE_TABLE, *DECODE_EXTRA, *DECODE_SHARED, *DECODE_SWEEP)]
    assert len(set(names)) == len(names)


def test_vllm_list_needs_neither_vllm_nor_a_gpu() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_vllm.py"), "--list", "--rows", "^8b_b(1|64)_"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert shown.splitlines() == [
        "8b_b1_s8192: 1 sequences, 1 new tokens",
        "8b_b64_s4096: 64 sequences, 64 new tokens",
    ]


def test_list_selects_rows() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_decode.py"), "--list", "--rows", "^seed_batch(8|32)$"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in shown.splitlines()[2:]] == ["seed_batch8", "seed_batch32"]


def test_rows_that_there_are_not() -> None:
    """Those of an option that is not given, as well: a table without rows would say that all is well."""
    command = [sys.executable, str(BENCHMARKS / "bench_decode.py"), "--rows", "^dim512"]
    shown = subprocess.run([*command, "--list"], capture_output=True, text=True, check=False)
    assert shown.returncode == 1 and shown.stdout == ""
    assert shown.stderr.startswith(f"--rows: '^dim512' finds none of {len(DECODE_TABLE)} rows")
    extra = subprocess.run([*command, "--list", "--extra"], capture_output=True, text=True, check=True)
    names = [line.split()[1] for line in extra.stdout.splitlines()[2:]]
    assert names == ["dim512_b32_s2048", "dim512_b1_s8192"]


# In place of the GPU: the machine is known, one row is measured, and the next one ends the process.
KILLED = """
import os, sys, types
sys.path[:0] = sys.argv.pop(1).split(os.pathsep)
import bench_decode
from test_benchmarks import MACHINE

def measure_all(cases, contestants, call_us, rounds):
    assert [case.name for case in cases] == ["dim512_b32_s2048", "dim512_b1_s8192"] and rounds == 5
    found = types.SimpleNamespace(us={"octavo": call_us(cases[0])}, max_error={}, skipped={})
    yield cases[0], found
    os.kill(os.getpid(), 9)

sys.modules["_device"] = types.SimpleNamespace(describe_machine=lambda rounds: MACHINE)
sys.modules["_measure"] = types.SimpleNamespace(measure_all=measure_all, compile_kernels=lambda *_: None)
bench_decode.main(sys.argv[1:])
"""


def test_a_run_that_is_killed_has_shown_how_far_it_came(tmp_path: Path) -> None:
    """Into a pipe, which Python otherwise fills block by block."""
    pytest.importorskip("torch")
    folders = f"{BENCHMARKS}{os.pathsep}{Path(__file__).parent}"
    options = ["--extra", "--rows", "dim512", "--quick", "--no-flashinfer", "--json", tmp_path / "rows.jsonl"]
    command = [sys.executable, "-c", KILLED, folders, *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -9, done.stderr
    assert done.stdout.startswith(format_machine(MACHINE))
    assert done.stdout.splitlines()[-1].startswith(
        "| dim512_b32_s2048 | 32 x 2048 | 32/4 | 512, bfloat16 | 539.0 | "
    )
    assert [row.case for row in read_json(tmp_path / "rows.jsonl")] == ["dim512_b32_s2048"]


def test_a_benchmark_of_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(case: Case) -> dict[str, Any]:
        row = {"name": case.name, "error": 0.5 if case.name == "wrong" else 0.001}
        return {**row, "wrong": True} if case.name == "wrong" else {**row, "us": 4.0}

    rounds: list[int] = []
    table = Table(
        "What it measures.",
        [Case(name, (1,), (8,)) for name in ("right", "wrong")],
        lambda number: rounds.append(number) or measure,
        {"case": lambda row: row["name"], "time, us": lambda row: f"{row['us']:.1f}"},
        lambda case: f"{case.name}: {case.batch}",
    )
    assert table.main(["--list"]) == 0 and rounds == []
    assert capsys.readouterr().out.splitlines() == ["right: 1", "wrong: 1"]
    path = tmp_path / "rows.jsonl"
    assert table.main(["--quick", "--json", str(path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "| case | time, us |",
        "|---|--:|",
        "| right | 4.0 |",
        "| wrong | wrong: off by 0.5 |",
    ]
    assert [row["name"] for row in read_rows(path)] == ["right", "wrong"]
    assert table.main(["--rows", "^r"]) == 0 and rounds == [5, 31]
    with pytest.raises(SystemExit, match="'neither' finds none of 2 rows"):
        table.main(["--rows", "neither"])


@pytest.mark.parametrize(
    ("name", "first", "count"),
    [
        ("sparse_decode", "b32_s8192_p16_25%", 9),
        ("block_sparse", "d128_causal_b128_16384_25%", 24),
        ("latent", "mla_b1_s4096_h16: 4.8 MB", 20),
    ],
)
def test_lists_of_benchmarks_of_one_table(name: str, first: str, count: int) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(BENCHMARKS / f"bench_{name}.py"), "--list"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert (shown[0], len(shown), len(set(shown))) == (first, count, count)


def test_prefill_list_and_operations() -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_prefill.py"), "--list", "--extra"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in shown.splitlines()[2:]}
    assert len(rows) == len(shown.splitlines()) - 2
    gflop = {name: float(line.split(" | ")[-1].removesuffix(" |")) for name, line in rows.items()}
    assert gflop["d128_full_1x16384"] == 4 * 16384**2 * 2048 // 10**8 / 10
    assert gflop["d128_causal_1x16384"] == gflop["d128_full_1x16384"] / 2
    assert gflop["chunk512_ctx8k"] == round(4 * 4 * 512 * (7680 + 256) * 4096 / 1e9, 1)
    assert gflop["d128_causal_2x8192_window_left"] < gflop["d128_causal_2x8192"] * 2 * 1025 / 8192


def test_bytes_and_floor_of_the_table() -> None:
    got = {
        case.name: (round(case.num_bytes / 1e6, 1), round(floor_us(case.num_bytes, 3.05e12), 1))
        for case in DECODE_TABLE
    }
    assert got == BYTES_AND_FLOOR


def test_ragged_lengths() -> None:
    (case,) = cases.named("8b_ragged64")
    assert (case.batch, sum(case.seqlens_k), max(case.seqlens_k)) == (64, 108637, 8613)


def test_bytes_of_options() -> None:
    case = Case("", (1, 1), (100, 5), num_kv_heads=2, dtype="float16")
    queries_and_results, token = 2 * (2 * 4 * 64) * 2, 2 * (2 * 64) * 2
    assert case.num_bytes == queries_and_results + 105 * token
    assert replace(case, window_left=9).num_bytes == queries_and_results + (10 + 5) * token
    three = replace(case, window_left=9, seqlens_q=(3, 3))
    assert three.num_bytes == 3 * queries_and_results + (12 + 5) * token
    assert replace(case, shared_prefix=4).num_bytes == queries_and_results + (105 - 4) * token
    assert replace(case, return_lse=True).num_bytes == case.num_bytes + 2 * 4 * 4
    assert replace(case, kv_dtype="float8_e4m3fn").num_bytes == queries_and_results + 105 * token // 2
    assert replace(case, page_size=64, head_major=True).num_bytes == case.num_bytes


def test_goal_and_best_peer(rows: list[Row]) -> None:
    near_floor, at_peer_or_floor, peer, no_peer, no_octavo = rows
    assert near_floor.best_peer_us == 5.0 and near_floor.goal_us == pytest.approx(4.25, abs=0.005)
    assert at_peer_or_floor.goal_us == pytest.approx(1.15 * 357.8, abs=0.1)
    assert replace(peer, us={OCTAVO: 95.0, "fa3": 96.2}).goal_us == 96.2
    assert no_peer.best_peer_us is None and no_peer.goal_us == 1.15 * no_peer.floor_us
    assert no_octavo.octavo_us is None and no_octavo.best_peer_us == 17.9
    assert near_floor.peer_us("FlashInfer") == 5.0 and peer.peer_us("FlashInfer") is None


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert geometric_mean([0.8, 0.9, 1.25]) == pytest.approx(0.9 ** (1 / 3))
    assert np.isnan(geometric_mean([]))


def test_summary(rows: list[Row]) -> None:
    summary = format_summary(rows)
    mean = (4.0 / 5.0 * 380.0 / 453.6 * 95.0 / 100.0) ** (1 / 3)
    assert f"Octavo / best peer: geometric mean {mean:.3f} of 3 rows" in summary
    assert "Batch-invariant / Octavo: geometric mean 1.125 of 1 rows" in summary
    assert "At or below the goal: 4 of 4 rows" in summary
    assert "int64" not in summary
    us = {OCTAVO: 4.0, INT64: 4.4, "fa3": 5.0}
    assert "With int64 / with int32: geometric mean 1.100 of 1 rows, at most 1.100" in format_summary(
        [replace(rows[0], us=us)]
    )
    assert replace(rows[0], us=us).best_peer_us == 5.0
    assert "bloom_b1_s2048: fa3: no ALiBi" in summary


def test_table(rows: list[Row]) -> None:
    assert format_row(rows[0]) == (
        "| seed_seq128 | 1 x 128 | 32/32 | 128, float16 | 2.1 | 4.0 | 4.5 | 8.8 | 5.0 |  | 3.7 | 4.2 "
        "| 0.94 | 0.80 | 1.08 | 0.53 |"
    )
    assert format_row(rows[4]) == (
        "| 8b_fp8_b1_s8192 | 1 x 8192 | 32/8 | 128, bfloat16, KV float8_e4m3fn | 16.8 "
        "|  |  | 17.9 |  |  | 8.5 | 9.8 |  |  |  |  |"
    )
    assert "pure read 3.05 TB/s, 8192^3 bfloat16 product 787 TFLOP/s" in format_machine(MACHINE)


def test_json_keeps_the_rows(rows: list[Row], tmp_path: Path) -> None:
    write_json(tmp_path / "rows.jsonl", rows)
    assert read_json(tmp_path / "rows.jsonl") == rows


def test_plot(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from _report import plot

    drawn = [
        make_row(case, {OCTAVO: 10.0 + i, "fa3": 20.0 + i}, {})
        for i, case in enumerate((*DECODE_TABLE, *DECODE_SWEEP))
        if case.name != "sweep_8b_s512"
    ]
    plot(tmp_path / "decode.svg", drawn)
    assert "<svg" in (tmp_path / "decode.svg").read_text()


SAMPLED = Case("", (1,) * 3, (5, 37, 16), num_q_heads=6, num_kv_heads=2, head_dim=16, dtype="float16")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seqlens_q": (3,) * 3},
        {"seqlens_q": (2,) * 3, "window_left": 20},
        {"softcap": 2.0},
        {"alibi": "head", "page_size": 1},
        {"head_major": True, "page_size": 7},
        {"shared_prefix": 4, "page_size": 2},
        {"seqlens_q": (5, 20, 16), "page_size": 0},
        {"seqlens_q": (5, 20, 16), "page_size": 0, "causal": False, "window_right": 2},
    ],
    ids=str,
)
def test_sampled_rows(options: dict[str, Any]) -> None:
    """Those of a small case, whose pairs are all chosen, are those of the oracle over everything."""
    torch = pytest.importorskip("torch")
    from _check import Sample
    from _inputs import make_inputs

    case = replace(SAMPLED, **options)
    inputs = make_inputs(case, "cpu")
    k, v = (
        torch.cat(parts).double().numpy()
        for parts in zip(*(inputs.keys_and_values(case, b) for b in range(case.batch)), strict=True)
    )
    if inputs.page_table is not None:
        gathered = oracle.gather_pages(
            inputs.k.double().numpy(), inputs.page_table.numpy(), inputs.seq_lens.numpy()
        )
        np.testing.assert_array_equal(k, gathered)
    whole = oracle.attention(
        inputs.q.double().numpy(),
        k,
        v,
        case.seqlens_q,
        case.seqlens_k,
        dtype="float16",
        alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes.numpy(),
        **case.masks,
    )
    sample = Sample(case, inputs)
    out = torch.from_numpy(whole.out)
    assert sample.reference.out.shape[0] == 2 * sum(min(n, 8) for n in case.seqlens_q)
    assert sample.max_error(out) < 1e-12
    sample.reference.check_out(sample.of(out))
    assert np.isnan(sample.max_error(torch.full_like(inputs.out, torch.nan)))
    wrong = out.clone()
    wrong[-1, -1, 0] += 0.5 * wrong[-1, -1].abs().max()  # the last row is among them, whatever the case
    assert sample.max_error(wrong) == pytest.approx(0.5)


def test_sampled_pairs() -> None:
    pytest.importorskip("torch")
    from _check import MAX_KEYS, MAX_PAIRS, choose_pairs

    for case in ROWS:
        pairs, num_pairs = choose_pairs(case), case.batch * case.num_kv_heads
        ends = [(0, 0), (case.batch - 1, case.num_kv_heads - 1)]
        assert pairs[:2] == ends[:num_pairs] and len(set(pairs)) == len(pairs) <= MAX_PAIRS, case
        num_keys = sum(case.seqlens_k[b] for b, _ in pairs)
        assert len(pairs) == 2 or num_keys <= MAX_KEYS, case
        assert len(pairs) == min(MAX_PAIRS, num_pairs) or num_keys + max(case.seqlens_k) > MAX_KEYS, case


def test_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is right has a time; what is wrong, or cannot run a case, has a reason instead."""
    pytest.importorskip("torch")
    import _measure
    from _contestants import BatchInvariantOctavo, Contestant, Octavo, TorchAttention, UnsupportedError
    from _inputs import Inputs, make_inputs
    from torch.nn.attention import SDPBackend

    class Peer(Contestant):
        def __init__(self, name: str, call: Callable[[Inputs], object]) -> None:
            self.name, self.call = name, call

        def prepare(self, case: Case, inputs: Inputs) -> Callable[[], object]:
            if self.name == "unsupported":
                raise UnsupportedError("not for it")
            return lambda: self.call(inputs)

    class Calls:
        """In place of a CUDA graph."""

        def __init__(self, calls: list[Callable[[], object]], repeats: int) -> None:
            assert repeats > 0
            self.calls = calls
            self.replay()

        def replay(self) -> None:
            for call in self.calls:
                call()

    def fail(_: Inputs) -> None:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr(_measure, "capture", Calls)
    monkeypatch.setattr(_measure, "replay_times", lambda graphs, rounds: dict.fromkeys(graphs, 600.0))
    monkeypatch.setattr(_measure, "make_inputs", lambda case: make_inputs(case, "cpu"))
    case = Case("", (40, 40), (40, 40), num_kv_heads=2, page_size=0)
    contestants = [
        Octavo(),
        TorchAttention("math", SDPBackend.MATH),
        Peer("unsupported", fail),
        Peer("failing", fail),
        Peer("wrong", lambda inputs: inputs.out.zero_()),
        Peer("idle", lambda inputs: None),
    ]
    found = _measure.measure(case, contestants, 10 * case.num_bytes, call_us=100.0, rounds=3)
    # A graph goes through all 21 copies once, since they take 2100 microseconds.
    assert found.us == {"octavo": 600 / 21, "math": 600 / 21}
    assert 0 < found.max_error["octavo"] < 0.02 and 0 < found.max_error["math"] < 0.02
    assert found.skipped["unsupported"] == "not for it"
    assert found.skipped["failing"] == "ValueError: first line"
    assert found.skipped["wrong"] == "WRONG: error 1, tolerance 0.02"
    assert found.skipped["idle"] == "WRONG: error nan, tolerance 0.02"
    paged = replace(case, page_size=16)
    found = _measure.measure(paged, [BatchInvariantOctavo(), contestants[1]], 0, call_us=100.0, rounds=3)
    assert found.us == {INVARIANT: 600 / (8 * 2)}
    assert found.skipped == {"math": "dense arrays without window, softcap and ALiBi only"}
    monkeypatch.setattr(Octavo, "prepare", lambda *_: fail(None))
    with pytest.raises(ValueError, match="first line"):
        _measure.measure(case, [Octavo()], 0, call_us=100.0, rounds=3)


def test_call_benchmark(tmp_path):
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, BENCHMARKS / "bench_call.py", "--calls", "20", "--rounds", "3", "--json", rows]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    cases = {("empty", "numpy"), ("tiny", "numpy"), ("tiny", "numpy both"), ("tiny", "numpy KVCache")}
    assert cases <= {(row["case"], row["contestant"]) for row in found}
    assert all(0 < row["best_us"] <= row["median_us"] < 1e5 for row in found)
    assert len(done.stdout.splitlines()) == len(found)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_what_a_kv_cache_costs_a_layer(name):
    """At most 2 us more than the operators that it calls, or a quarter of them on slower machines."""
    import bench_call

    library = pytest.importorskip(name)
    convert = np.asarray if name == "numpy" else library.from_numpy
    number, best = 500, [math.inf, math.inf]
    num_threads = octavo.get_num_threads()
    octavo.set_num_threads(1)
    contestants = list(bench_call.with_a_cache(name, "", (1, 1), 64, "float32", convert))
    assert [contestant.name for contestant in contestants] == [f"{name} both", f"{name} KVCache"]

    def is_cheap() -> bool:
        both, attend = best
        return attend - both <= max(2.0, both / 4)

    for turn in range(240):  # in turns, by the time of the processor: other programs may run
        for i, contestant in enumerate(contestants):
            took = timeit.timeit(contestant.call, number=number, timer=time.thread_time)
            best[i] = min(best[i], took / number * 1e6)
        if turn >= 60 and is_cheap():
            break
    octavo.set_num_threads(num_threads)
    assert is_cheap(), best


def test_jax_benchmark(monkeypatch):
    """Octavo's programs, on a small shape; Pallas has no kernel for the CPU."""
    pytest.importorskip("jax", reason="JAX is not installed")
    import bench_jax

    octavo_alone = [next(bench_jax.contestants())]
    monkeypatch.setattr(bench_jax, "contestants", lambda: octavo_alone)
    tiny = Case("tiny", (1, 1), (64, 64), num_q_heads=32, num_kv_heads=8, head_dim=128)
    monkeypatch.setattr(bench_jax, "POOL_BYTES", 1 << 20)
    monkeypatch.setattr(bench_jax, "PROGRAM_BYTES", 4e6)
    rows = list(bench_jax.measure(tiny, rounds=2))
    assert [row.program for row in rows] == ["attention", "decode loop"]
    assert all(row.contestant == "octavo" and row.us > 0 for row in rows)
