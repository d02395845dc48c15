"""The table of linear's dataflow is what was measured, and the estimate in place of one picks fast tiles."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import octavo
from octavo._tune_linear import LIBRARY_LEAD, MANY_ROWS, Problem, Times

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import linear_table  # noqa: E402

PRODUCTS = {
    gpu: linear_table.read_sweep(ROOT / "benchmarks" / "results" / f"tiles-{gpu}.jsonl")[1]
    for gpu in ("h100", "h200")
}
# By more than 3 %: N, K and M; docs/notebook/linear.md has their times, and what is known of the reasons.
SLOWER = {
    "h100": {
        *((1280, 8192, 128), (1536, 576, 16), (1536, 576, 32), (1536, 576, 128), (4096, 11008, 32)),
        *((5120, 5120, 16), (128256, 4096, 8), (128256, 4096, 32)),
        *((2048, 2048, 8), (2560, 9728, 1)),  # held out
    },
    "h200": {
        *((576, 1536, 1), (576, 1536, 8), (1280, 8192, 128), (1536, 576, 16), (1536, 576, 32)),
        *((8192, 1024, 1), (8192, 1024, 32), (22016, 4096, 64), (128256, 4096, 128)),
        (2048, 2048, 128),  # held out
    },
}


def is_held_out(product: linear_table.Measured) -> bool:
    return (product.N, product.K) in linear_table.HELD_OUT


def losses(gpu: str) -> Iterator[tuple[float, linear_table.Measured]]:
    """By how much the tile with the least estimate is slower than the fastest one, of each product."""
    for product in PRODUCTS[gpu]:
        estimates = linear_table.estimates(*product[:3], gpu)
        assert set(product.tiles) <= set(estimates)
        picked = min(estimates, key=estimates.__getitem__)
        assert picked in product.tiles, (product[:3], picked)
        yield product.tiles[picked].plain / min(us.plain for us in product.tiles.values()) - 1, product


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_table_is_what_was_measured(gpu: str) -> None:
    measured = linear_table.read_sweep(ROOT / "benchmarks" / "results" / f"tiles-{gpu}.jsonl")
    table = ROOT / "src" / "cuda" / "linear" / "tables" / f"{gpu}.inc"
    assert linear_table.write_table(gpu.upper(), *measured) + "\n" == table.read_text()


@pytest.mark.parametrize(("gpu", "most"), [("h100", 0.054), ("h200", 0.018)])
def test_tables_hold_the_fastest(gpu: str, most: float) -> None:
    """What is best in both modes, without static_weight; the library where it is faster.

    With few rows, it has to be faster than static weights, too. The times are the benchmark's where there are
    any, and otherwise the sweep's.
    """
    _, products = linear_table.read_sweep(ROOT / "benchmarks" / "results" / f"tiles-{gpu}.jsonl")
    for product in products:
        if is_held_out(product):
            continue
        plan = octavo.linear_plan(product.M, product.N, product.K, "bfloat16", gpu)
        if product.benchmark:
            us, static_us, library_us = product.benchmark
            few = product.M < MANY_ROWS
            leads = us > LIBRARY_LEAD * library_us and not (few and static_us <= library_us)
            assert (plan.kernel == "library") == leads, product[:3]
            continue
        if plan.kernel == "library":
            us = product.library_us
        else:
            tile = linear_table.Tile(plan.kernel[5:], plan.w_rows, plan.splits, plan.ctas_per_sm)
            us = product.tiles[tile].plain
        fastest = min(us.plain for us in product.tiles.values())
        if product.M >= MANY_ROWS:
            fastest = min(fastest, product.library_us)
        assert us / fastest - 1 < most, product[:3]


@pytest.mark.parametrize(
    ("gpu", "held_out", "count", "mean", "most"),
    [
        ("h100", False, 102, 0.0102, 0.098),
        ("h200", False, 102, 0.0089, 0.073),
        ("h100", True, 24, 0.0095, 0.046),
        ("h200", True, 24, 0.0089, 0.035),
    ],
)
def test_the_estimate_picks_fast_tiles(
    gpu: str, held_out: bool, count: int, mean: float, most: float
) -> None:
    """What the estimate reaches, as if there were no table, and for layers that are in none."""
    of_few = [(loss, p) for loss, p in losses(gpu) if p.M <= 128 and is_held_out(p) == held_out]
    assert len(of_few) == count
    slower = {product[:3] for loss, product in of_few if loss > 0.03}
    assert slower == {(n, k, m) for n, k, m in SLOWER[gpu] if ((n, k) in linear_table.HELD_OUT) == held_out}
    assert max(loss for loss, _ in of_few) < most
    assert statistics.mean(loss for loss, _ in of_few) < mean


@pytest.mark.parametrize(
    ("gpu", "count", "mean", "most"), [("h100", 21, 0.0059, 0.051), ("h200", 21, 0.0055, 0.051)]
)
def test_the_estimate_of_many_rows(gpu: str, count: int, mean: float, most: float) -> None:
    """Which C++ and C alone ask for: Python hands these products to a library where there is no table."""
    of_many = [loss for loss, product in losses(gpu) if product.M > 128]
    assert len(of_many) == count and max(of_many) < most and statistics.mean(of_many) < mean


def test_candidates_of_empty_products_are_refused() -> None:
    for lengths in ((0, 64, 64), (1, 0, 64), (1, 64, 0)):
        with pytest.raises(ValueError, match="tune_linear: M, N and K must be at least 1; got"):
            octavo._core.linear_candidates(*lengths, "bfloat16", "h200")


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_estimates_are_times(gpu: str) -> None:
    """Roughly those that were measured, of the three tiles that ought to be the fastest."""
    compared = 0
    for product in PRODUCTS[gpu]:
        if product.M > 128 or product.N * product.K < 1e7:
            continue
        estimates = linear_table.estimates(*product[:3], gpu)
        for tile in sorted(estimates, key=estimates.__getitem__)[:3]:
            if tile in product.tiles:
                assert estimates[tile] == pytest.approx(product.tiles[tile].plain, rel=0.17), (
                    product[:3],
                    tile,
                )
                compared += 1
    assert compared > 200


def test_the_benchmark_decides_what_the_library_computes(tmp_path: Path) -> None:
    """Where it ran the table's tile; what was confirmed before stays otherwise.

    With fewer than 128 rows, the library has to be faster than static weights, too.
    """
    sweep, benchmark = tmp_path / "tiles.jsonl", tmp_path / "linear.jsonl"
    tiles = [["wide", 64, 1, 1, 10.0, 9.0], ["wide", 96, 1, 1, 11.0, 10.0]]
    lines = [{"N": 64, "K": 512, "M": m, "library_us": 10.0, "tiles": tiles} for m in (64, 128, 256)]

    def confirm_few(us: float, static_us: float) -> bool:
        product = {"w_rows": 64, "depth": 512, "gated": False, "residual": False}
        row = {
            "shape": {"num_rows": 64, "products": [product]},
            "dtype": "bfloat16",
            "us": {"octavo": us, "octavo_static_weight": static_us, "cublas": 10.0},
            "kernels": ["sm90_wide<bfloat16, 64x64>"],
        }
        benchmark.write_text(f"{json.dumps(row)}\n")
        linear_table.confirm(sweep, benchmark)
        return linear_table.read_sweep(sweep)[1][0].library_is_faster

    for us, static_us, leads in ((10.3, 9.9, False), (10.3, 10.1, True), (10.1, 10.1, False)):
        sweep.write_text("".join(f"{json.dumps(line)}\n" for line in ({"gpu": "h200"}, *lines)))
        assert confirm_few(us, static_us) == leads
    sweep.write_text("".join(f"{json.dumps(line)}\n" for line in ({"gpu": "h200"}, *lines)))

    def confirm(kernel: str, us: float, gated: bool = False) -> list[tuple[bool, object]]:
        product = {"w_rows": 64, "depth": 512, "gated": gated, "residual": False}
        times = {"octavo": us, "octavo_static_weight": 9.5, "cublas": 10.004}
        rows = [
            {
                "shape": {"num_rows": m, "products": [product]},
                "dtype": "bfloat16",
                "us": times,
                "kernels": ["sm90_wide<bfloat16, 96x64>" if m == 64 else kernel],
            }
            for m in (64, 128)
        ]
        benchmark.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        linear_table.confirm(sweep, benchmark)
        _, products = linear_table.read_sweep(sweep)
        return [(product.library_is_faster, product.benchmark) for product in products]

    untouched = (False, None)
    assert confirm("sm90_wide<bfloat16, 96x128>", 12.0) == [untouched] * 3
    assert confirm("sm90_wide<bfloat16, 64x128>", 12.0, gated=True) == [untouched] * 3
    slower = [untouched, (True, (10.3, 9.5, 10.0)), untouched]
    assert confirm("sm90_wide<bfloat16, 64x128>", 10.3) == slower
    assert confirm("matmul of the arrays' library<bfloat16>", 10.0) == slower
    level = (False, (10.1, 9.5, 10.0))
    assert confirm("sm90_wide<bfloat16, 64x128>", 10.1) == [untouched, level, untouched]


def test_a_sweep_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """With invented times, of a GPU that need not be here; the lines are those that tables are made of.

    The library, and what is within 6 % of the fastest tile in either mode, is measured again.
    """
    asked: list[Problem] = []
    finalists: list[int] = []

    def measure(problem: Problem, plans: Sequence[octavo.LinearPlan], rounds: int) -> list[Times]:
        if plans[-1].kernel != "library":
            assert rounds == linear_table.ROUNDS
            asked.append(problem)
            return [Times(100 * problem.M + i, 50 + abs(4 - i)) for i in range(len(plans))]
        assert rounds == linear_table.FINAL_ROUNDS
        finalists.append(len(plans) - 1)
        return [Times(200 * problem.M + i, 0.5) for i in range(len(plans))]

    problems = [Problem(64, 512, m, "bfloat16") for m in (8, 1)]
    path = tmp_path / "tiles.jsonl"
    linear_table.sweep(path, problems[:1], "h200", measure)
    linear_table.sweep(path, problems, "h200", measure)
    assert asked == problems
    machine, products = linear_table.read_sweep(path)
    assert machine["gpu"] == "h200" and machine["memory_gb_per_s"] > 4000
    assert [product.M for product in products] == [1, 8]
    for product in products:
        plans = octavo._core.linear_candidates(product.M, 64, 512, "bfloat16", "h200")
        fastest = linear_table.Tile(
            plans[0][0]["kernel"][5:], *(plans[0][0][x] for x in ("w_rows", "splits", "ctas_per_sm"))
        )
        assert product.tiles[fastest] == (200 * product.M, 0.5)
        measured_again = sum(us.static_weight == 0.5 for us in product.tiles.values())
        assert 8 <= measured_again < len(product.tiles) and measured_again in finalists
        assert product.library_us == 200 * product.M + measured_again
    table = linear_table.write_table("H200", machine, products)
    assert "LinearTable kH200{" in table and "{64, 512, 8, " in table
    held_out = [product._replace(N=2048, K=2048) for product in products]
    assert "{2048, 2048" not in linear_table.write_table("H200", machine, held_out)
