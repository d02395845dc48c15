"""octavo.linear_plan, plan= of octavo.linear, and octavo.linear_table."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import octavo
from conftest import gpu_count
from octavo import LinearPlan
from support.linear import Problem
from support.targets import Target


@dataclasses.dataclass(frozen=True)
class Shape:
    """All that explain() needs of an array."""

    shape: tuple[int, ...]
    dtype: Any = "bfloat16"


def explain(rows: int, plan: LinearPlan | None = None, device: str = "h100", **options: Any) -> Any:
    return octavo.explain(
        "linear", Shape((rows, 4096)), Shape((4096, 4096)), plan=plan, device=device, **options
    )


def test_plans_of_the_table_and_without_one() -> None:
    measured = octavo.linear_plan(8, 4096, 4096, "bfloat16", "h100")
    assert measured == LinearPlan("sm90_flat", "bfloat16", 16, 8, 1, 2, "measured")
    assert octavo.linear_plan(5, 4096, 4096, "bfloat16", "h100") == measured  # up to eight rows
    assert octavo.linear_plan(9, 4096, 4096, "bfloat16", "h100").x_rows == 16
    estimated = octavo.linear_plan(8, 4104, 4096, "float16", "h100")
    assert estimated.source == "estimated" and estimated.dtype == "float16" and estimated.w_rows > 0
    assert octavo.linear_plan(8, 4096, 4096, "bfloat16", "sm_90") == measured
    assert octavo.linear_plan(16, 64, 64, "float16", "a100") == LinearPlan(
        "sm80_linear", "float16", 32, 16, 1, 1
    )


def test_library() -> None:
    """By the table, by the number of rows, where there is no kernel; never with batch_invariant."""
    library = LinearPlan("library", "bfloat16")
    assert octavo.linear_plan(128, 576, 576, "bfloat16", "h100") == library
    assert octavo.linear_plan(64, 576, 576, "bfloat16", "h100") != library
    assert octavo.linear_plan(256, 4096, 11008, "bfloat16", "h100").source == "measured"
    assert octavo.linear_plan(256, 4096, 11008, "bfloat16", "h100") != library
    assert octavo.linear_plan(257, 4096, 11008, "bfloat16", "h100") == library
    assert octavo.linear_plan(65, 4096, 4096, "bfloat16", "h100") == library
    assert octavo.linear_plan(129, 4104, 4096, "bfloat16", "h100") == library
    assert octavo.linear_plan(17, 4096, 4096, "bfloat16", "a100") == library
    assert octavo.linear_plan(1, 4096, 4095, "bfloat16", "h100") == library  # rows not on 16 bytes
    assert octavo.linear_plan(1, 8, 8, "float32", "h100") == LinearPlan("library", "float32")
    for rows in (1, 64, 1000):
        plan = octavo.linear_plan(rows, 11008, 4096, "bfloat16", "h100", batch_invariant=True)
        assert (plan.kernel, plan.source) == ("sm90_flat", "estimated")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_largest_products(dtype: str) -> None:
    most = 2**30
    for m, n, k in ((most, most, most), (1, most, most), (most, 8, 8)):
        assert octavo.linear_plan(m, n, k, dtype, "h100").dtype == dtype


def test_invariant_plans_add_up_in_one_order() -> None:
    plans = [
        octavo.linear_plan(rows, 8192, 1024, "float16", "h100", batch_invariant=True)
        for rows in (0, 1, 9, 40, 1000)
    ]
    assert len({(plan.kernel, plan.w_rows, plan.splits) for plan in plans}) == 1
    assert [plan.x_rows for plan in plans] == [8, 8, 16, 64, 64]


def test_a_plan_is_printable_and_comparable() -> None:
    plan = octavo.linear_plan(8, 4096, 4096, "bfloat16", "h100")
    assert str(plan) == "sm90_flat<bfloat16, 16x8, splits 1, CTAs per SM 2> (measured)"
    assert str(LinearPlan("library", "float16")) == "library<float16> (estimated)"
    other = dataclasses.replace(plan, source="tuned")
    assert other == plan and hash(other) == hash(plan) and dataclasses.replace(plan, splits=2) != plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.splits = 2  # type: ignore[misc]


@pytest.mark.parametrize("dtype", ["float16", np.dtype("float16"), "torch.float16", "jnp.float16"])
def test_dtypes(dtype: Any) -> None:
    if isinstance(dtype, str) and "." in dtype:
        library, _, name = dtype.partition(".")
        dtype = getattr(pytest.importorskip({"jnp": "jax.numpy"}.get(library, library)), name)
    assert octavo.linear_plan(1, 64, 64, dtype, "h100").dtype == "float16"


def test_what_linear_plan_says_is_what_explain_says() -> None:
    for rows, device in ((1, "h100"), (64, "h200"), (8, "a100"), (300, "h100")):
        plan = octavo.linear_plan(rows, 4096, 4096, "bfloat16", device)
        explained = explain(rows, device=device).plan
        assert explained["kernel"] == plan.kernel
        if plan.kernel != "library":
            assert (explained["w_rows"], explained["x_rows"]) == (plan.w_rows, plan.x_rows)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.5, 8, 8, "float16", "h100"), TypeError, "linear_plan: M must be an int; got float"),
        ((1, -1, 8, "float16", "h100"), ValueError, r"of w, N, must lie in \[0, 1073741824\]; got -1$"),
        (
            (2**60, 8, 8, "float16", "h100"),
            ValueError,
            r"^linear_plan: the number of rows of x, M, must lie in \[0, 1073741824\]; got 11529215046",
        ),
        (
            (1, 8, 2**30 + 1, "float16", "h100"),
            ValueError,
            r"^linear_plan: the depth, K, must lie in \[0, 1073741824\]; got 1073741825",
        ),
        ((1, 8, 8, "float17", "h100"), ValueError, "dtype must be float32, float16 or bfloat16; got float17"),
        ((1, 8, 8, 16, "h100"), ValueError, "linear_plan: dtype"),
        (
            (1, 8, 8, "int8", "h100"),
            TypeError,
            "linear_plan: dtype must be float32, float16 or bfloat16; got int8",
        ),
        ((1, 8, 8, "int32", "h100"), TypeError, "float32, float16 or bfloat16"),
        ((1, 8, 8, "\ud800"), ValueError, "dtype must be text without null characters and lone surrogates"),
        ((1, 8, 8, "float16", "cpu"), ValueError, "device must be a GPU; on the CPU one kernel"),
        ((1, 8, 8, "float16", "h101"), ValueError, "linear_plan: device must be one of cpu, sm_80"),
        ((1, 8, 8, "float16", 0), TypeError, "linear_plan: device must be a str or None; got int"),
    ],
)
def test_refusals_of_linear_plan(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        octavo.linear_plan(*arguments)


def test_further_refusals_of_linear_plan() -> None:
    with pytest.raises(ValueError, match="activation must be silu, gelu, silu_gate or None; got relu"):
        octavo.linear_plan(1, 8, 8, "float16", "h100", activation="relu")
    message = "^linear_plan: w must have an even number of rows with activation silu_gate; got 7"
    with pytest.raises(ValueError, match=message):
        octavo.linear_plan(1, 7, 8, "float16", "h100", activation="silu_gate")
    with pytest.raises(TypeError, match="batch_invariant=True needs a kernel of Octavo's"):
        octavo.linear_plan(1, 8, 8, "float32", "h100", batch_invariant=True)


@pytest.mark.skipif(gpu_count() > 0, reason="there is a GPU")
def test_without_a_gpu_one_must_be_named() -> None:
    calls = {
        "linear_plan": lambda: octavo.linear_plan(1, 8, 8, "float16"),
        "linear_table": octavo.linear_table,
    }
    for operator, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{operator}: there is no cuda:0 here: "):
            call()


def test_a_plan_decides() -> None:
    """In place of the one that is chosen, whatever the number of rows."""
    plan = LinearPlan("sm90_wide", "bfloat16", 96, 32, 2, 1)
    for rows in (1, 300):
        explained = explain(rows, plan)
        assert explained.kernel == "sm90_wide<bfloat16, 96x32>" and explained.plan["splits"] == 2
        assert explained.why_not == {"other kernels": "the plan of the call says so"}
    assert explain(8, LinearPlan("sm80_linear", "bfloat16", 32, 8, 1, 1)).plan["kernel"] == "sm80_linear"
    handed_over = explain(8, LinearPlan("library", "bfloat16"))
    assert handed_over.plan["kernel"] == "library" and "the plan of the call says so" in handed_over.summary


FLAT = LinearPlan("sm90_flat", "bfloat16", 16, 8, 1, 1)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (dataclasses.replace(FLAT, dtype="float16"), r"dtype of x \(bfloat16\); it is for float16"),
        (dataclasses.replace(FLAT, w_rows=17), "does not serve this call: it has no instance of this tile"),
        (dataclasses.replace(FLAT, x_rows=24), "it has no instance of this tile"),
        (dataclasses.replace(FLAT, splits=3), "it has no instance of this tile"),
        (dataclasses.replace(FLAT, ctas_per_sm=3), "it has no instance of this tile"),
        (dataclasses.replace(FLAT, w_rows=112, x_rows=64), "it has no instance of this tile"),
        (LinearPlan("sm90_wide", "bfloat16", 192, 64, 8, 2), "no room for this many CTAs"),
        (dataclasses.replace(FLAT, kernel="sm80_linear"), "sm80_linear has no instance of this tile"),
        (dataclasses.replace(FLAT, kernel="flat"), "plan.kernel must be one of library, sm80_linear"),
        (dataclasses.replace(FLAT, source="guessed"), "plan.source must be one of measured, tuned"),
        (dataclasses.replace(FLAT, splits=-1), "plan.splits must be at least 0 and fit in 32 bits; got -1"),
    ],
)
def test_refused_plans(plan: LinearPlan, message: str) -> None:
    with pytest.raises(ValueError, match=f"^linear: .*{message}"):
        explain(8, plan)


def test_plans_refused_elsewhere() -> None:
    with pytest.raises(TypeError, match=r"linear: plan must be an octavo\.LinearPlan or None; got str"):
        explain(8, "sm90_flat")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"plan\.w_rows must be an int; got float"):
        explain(8, dataclasses.replace(FLAT, w_rows=16.0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not serve this call: it is for Hopper"):
        explain(8, FLAT, "a100")
    with pytest.raises(ValueError, match="plan is for a GPU; device is cpu"):
        explain(8, FLAT, "cpu")
    x = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="plan is for arrays on a GPU; x is on the CPU"):
        octavo.linear(x, x, plan=LinearPlan("library", "float32"))


def test_torch_takes_none() -> None:
    torch = pytest.importorskip("torch")
    import octavo.torch

    with pytest.raises(ValueError, match=r"linear: plan must be None in octavo\.torch"):
        octavo.torch.linear(torch.ones(2, 8), torch.ones(4, 8), plan=FLAT)


def test_plan_beside_batch_invariant() -> None:
    """It has to add up in the order of the others."""
    plan = octavo.linear_plan(40, 4096, 4096, "bfloat16", "h100", batch_invariant=True)
    assert explain(1, plan, batch_invariant=True).plan["x_rows"] == 64
    for other in (
        dataclasses.replace(plan, splits=2 * plan.splits),
        LinearPlan("sm90_wide", "bfloat16", 64, 16, 1, 1),
    ):
        with pytest.raises(ValueError, match="plan must be that of linear_plan"):
            explain(1, other, batch_invariant=True)
    with pytest.raises(ValueError, match="plan must not hand over to the library with batch_invariant"):
        explain(1, LinearPlan("library", "bfloat16"), batch_invariant=True)


@pytest.mark.parametrize("k", [96, 100])
def test_one_order_for_any_number_of_rows(k: int) -> None:
    """A single row always starts on 16 bytes, which several need not do."""
    plans = [octavo.linear_plan(m, 64, k, "bfloat16", "h100", batch_invariant=True) for m in (1, 2, 64, 300)]
    assert len({(plan.kernel, plan.w_rows, plan.splits) for plan in plans}) == 1


def test_the_shipped_table() -> None:
    table = octavo.linear_table("h100")
    assert table.device == "h100" and list(table.sources) == ["measured"] and table.most_rows == 128
    assert table.sources["measured"].gpu == "NVIDIA H100 80GB HBM3"
    for row in table.rows:
        assert row.plan == octavo.linear_plan(row.M, row.N, row.K, row.plan.dtype, "h100")
        assert row.plan.source == "measured"
    assert {row.plan.dtype for row in table.rows} == {"float16", "bfloat16"}
    assert "[4096, 4096] x 8: sm90_flat<bfloat16, 16x8, splits 1, CTAs per SM 2> (measured)" in str(table)
    with pytest.raises(TypeError, match="linear_table: device must be a str or None; got int"):
        octavo.linear_table(0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="linear_table: device must be a GPU"):
        octavo.linear_table("cpu")


@pytest.mark.parametrize(
    ("device", "of_wide"),
    [("h100", set()), ("h200", {(8192, 1024), (22016, 4096), (28672, 4096)})],
)
def test_a_norm_inside_of_the_product(device: str, of_wide: set[tuple[int, int]]) -> None:
    """It keeps the table's tile of sm90_flat, and takes the best of those in place of one of sm90_wide."""
    others = set()
    for row in octavo.linear_table(device).rows:
        if row.M > 16 or row.plan.dtype != "bfloat16":
            continue
        x, w, norm_weight = (Shape(shape) for shape in ((row.M, row.K), (row.N, row.K), (row.K,)))
        plan = octavo.explain("linear", x, w, norm_weight=norm_weight, device=device).plan
        assert octavo.linear_plan(row.M, row.N, row.K, "bfloat16", device) == row.plan
        assert plan["norm"] == plan["kernel"] == "sm90_flat"
        if row.plan.kernel == "sm90_flat":
            names = ("w_rows", "x_rows", "splits", "ctas_per_sm", "source")
            assert [plan[name] for name in names] == [getattr(row.plan, name) for name in names]
        else:
            assert plan["source"] == "estimated"
            others.add((row.N, row.K))
    assert others == of_wide


def test_library_from() -> None:
    """M2: behind the last number of rows for which a kernel of Octavo is the faster one."""
    table = octavo.linear_table("h100")
    expected = {(576, 576): 65, (28672, 4096): 129, (4096, 11008): 257, (123, 456): 129}
    for (n, k), first in expected.items():
        assert table.library_from(n, k) == table.library_from(n, k, "float16") == first
        assert octavo.linear_plan(first, n, k, "bfloat16", "h100").kernel == "library"
        assert octavo.linear_plan(first - 1, n, k, "bfloat16", "h100").kernel != "library"


def test_a_gpu_without_a_table() -> None:
    table = octavo.linear_table("a100")
    assert (table.rows, table.sources, table.most_rows) == ((), {}, 16)
    assert table.library_from(4096, 4096) == 17


@pytest.mark.gpu
def test_plans_on_a_gpu() -> None:
    """Every plan computes the same function; a plan of the library has the arrays' own compute it."""
    target = Target("torch", "cuda", "bfloat16")
    problem = Problem.drawn("bfloat16", (9,), 264, 520)
    x, w, bias, residual = (
        target.array(values) for values in (problem.x, problem.w, problem.bias, problem.residual)
    )
    chosen = octavo.linear_plan(9, 264, 520, "bfloat16")
    plans = [chosen, LinearPlan("sm80_linear", "bfloat16", 32, 8, 1, 1), LinearPlan("library", "bfloat16")]
    if chosen.kernel.startswith("sm90"):
        plans += [
            LinearPlan("sm90_flat", "bfloat16", 32, 8, 2, 2),
            LinearPlan("sm90_wide", "bfloat16", 64, 16, 4, 1),
        ]
    for plan in plans:
        out = octavo.linear(x, w, bias, activation=problem.activation, residual=residual, plan=plan)
        problem.check(target.library.to_float64(out), every_step_rounds=plan.kernel == "library")
