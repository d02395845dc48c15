"""What the benchmark of gradients compares with, and the contestants that it finds in Octavo and PyTorch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import oracle
from support.case import Case
from support.oracle_backward import attention_backward

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import _backward_formulas  # noqa: E402
from _backward_check import Sample  # noqa: E402
from _backward_contestants import (  # noqa: E402
    CuDnn,
    Eager,
    FlashAttention2,
    Octavo,
    PlainOctavo,
    TorchOperators,
)
from _backward_inputs import Inputs, make_inputs  # noqa: E402
from _backward_rows import GROUPS, Task  # noqa: E402
from _contestants import UnsupportedError  # noqa: E402

SMALL = Case("small", (40, 40), (40, 40), num_q_heads=4, num_kv_heads=2, head_dim=32, page_size=0)
EQUAL_HEADS = replace(SMALL, num_kv_heads=4)

pytestmark = pytest.mark.usefixtures("one_torch_thread", "seeded_torch")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backward_formulas, "QUERIES", 16)


# The check


def by_oracle(task: Task, inputs: Inputs, dropout: oracle.Dropout | None = None) -> Any:
    case = task.case
    q, k, v, dout = (x.flatten(0, 1).double().numpy() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    slopes = None if inputs.alibi_slopes is None else inputs.alibi_slopes.numpy()
    return attention_backward(
        *(q, k, v, dout, np.zeros(q.shape[:2]), case.seqlens_q, case.seqlens_k),
        dtype=case.dtype,
        lse=np.zeros(q.shape[:2]),
        causal=case.causal,
        softcap=case.softcap,
        alibi_slopes=slopes,
        alibi_symmetric=case.alibi_symmetric,
        dropout=dropout,
    )


def as_tensors(task: Task, gradients: Any) -> list[Any]:
    shape = (task.case.batch, -1)
    return [torch.from_numpy(x).unflatten(0, shape) for x in (gradients.dq, gradients.dk, gradients.dv)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"softcap": 2.0},
        {"alibi": "head"},
        {"alibi": "head", "alibi_symmetric": True, "causal": False},
        {"num_kv_heads": 4},
    ],
    ids=str,
)
def test_formulas_are_those_of_the_oracle(options: dict[str, Any]) -> None:
    """Exactly for float64, and for a plain implementation but for the order of sums in float32."""
    task = Task(replace(SMALL, **options))
    inputs = make_inputs(task, "cpu")
    reference = by_oracle(task, inputs)
    sample = Sample(task, inputs)
    assert len(sample.pairs) == 2
    error, plain_error = sample.errors(as_tensors(task, reference.true))
    assert error < 1e-12
    error_of_plain, _ = sample.errors(as_tensors(task, reference.plain))
    assert 1e-3 < plain_error < 1e-2 and error_of_plain == pytest.approx(plain_error, rel=0.05)
    exact = oracle.attention(
        *(x.flatten(0, 1).double().numpy() for x in (inputs.q, inputs.k, inputs.v)),
        task.case.seqlens_q,
        task.case.seqlens_k,
        dtype="bfloat16",
        alibi_slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes.numpy(),
        **task.case.masks,
    )
    assert np.abs(exact.lse - inputs.lse.flatten(0, 1).numpy()).max() < 2e-6
    assert exact.max_relative_error(inputs.out.double().numpy()) < 2**-8


def test_formulas_with_dropout() -> None:
    task = Task(SMALL, dropout_p=0.25)
    inputs = make_inputs(task, "cpu")
    assert inputs.out is None and inputs.lse is None
    sample = Sample(task, inputs)
    kept = Octavo().kept(task, inputs, sample.pairs)
    dropout = oracle.Dropout(0.25, 42)
    for (b, kv_head), mask in kept.items():
        of_sequence = dropout.keep(b, 4, 40, 40) / 0.75
        np.testing.assert_array_equal(mask.numpy(), of_sequence[2 * kv_head : 2 * kv_head + 2])
    error, _ = sample.errors(as_tensors(task, by_oracle(task, inputs, dropout).true), kept)
    assert error < 1e-12
    error, _ = sample.errors(as_tensors(task, by_oracle(task, inputs).true), kept)
    assert error > 0.1


def test_checks_find_wrong_gradients() -> None:
    task = Task(SMALL)
    inputs = make_inputs(task, "cpu")
    sample = Sample(task, inputs)
    gradients = [x.clone() for x in Octavo().prepare(task, inputs)()]
    error, plain_error = sample.errors(gradients)
    assert 0.0 < error <= 2.0 * plain_error
    for i in range(3):
        for spoil in (
            lambda x: x.mul_(1.02),
            lambda x: x.zero_(),
            lambda x: x[-1, 7].zero_(),  # one token of the last sequence
            lambda x: x[0, :, 0].neg_(),  # a head of the first one
        ):
            wrong = [x.clone() for x in gradients]
            spoil(wrong[i])
            assert sample.errors(wrong)[0] > 2.0 * plain_error
        wrong = [x.clone() for x in gradients]
        wrong[i][-1, -1, -1, -1] = torch.nan
        assert np.isnan(sample.errors(wrong)[0])


# The contestants


@pytest.mark.parametrize(
    "task",
    [
        Task(SMALL),
        Task(SMALL, forward=True),
        Task(replace(SMALL, softcap=3.0)),
        Task(replace(SMALL, alibi="head"), forward=True),
        Task(SMALL, dropout_p=0.5),
        Task(SMALL, deterministic=True),
    ],
    ids=str,
)
def test_octavo(task: Task) -> None:
    inputs = make_inputs(task, "cpu")
    sample = Sample(task, inputs)
    kept = Octavo().kept(task, inputs, sample.pairs) if task.dropout_p else None
    error, plain_error = sample.errors(Octavo().prepare(task, inputs)(), kept)
    assert error <= 2.0 * plain_error
    plain = Sample(task.plain, replace(inputs, alibi_slopes=None))
    error, plain_error = plain.errors(PlainOctavo().prepare(task, inputs)())
    assert error <= 2.0 * plain_error


def test_who_takes_part() -> None:
    everybody = (Octavo(), PlainOctavo(), CuDnn(), FlashAttention2(), Eager())

    def names(task: Task) -> list[str]:
        return [contestant.name for contestant in everybody if contestant.takes_part(task)]

    assert names(Task(SMALL)) == names(Task(SMALL, forward=True)) == ["octavo", "cudnn", "fa2"]
    for task in GROUPS["options"]:
        assert names(task) == ["octavo", "octavo_plain", "cudnn", "fa2"]
    assert names(Task(SMALL, forward=True, standard=True)) == ["octavo", "eager"]


def test_eager() -> None:
    task = Task(EQUAL_HEADS, forward=True, standard=True)
    inputs = make_inputs(task, "cpu")
    error, plain_error = Sample(task, inputs).errors(Eager().prepare(task, inputs)())
    assert error <= 2.0 * plain_error
    for wrong in (
        Task(SMALL, forward=True),
        Task(EQUAL_HEADS),
        Task(EQUAL_HEADS, forward=True, dropout_p=0.1),
    ):
        with pytest.raises(UnsupportedError, match="plain attention with equal heads"):
            Eager().prepare(wrong, inputs)


class MathAttention(TorchOperators):
    """In place of an operator for GPUs: keeps weights by a mask of its own, which the seed decides."""

    name = "math"

    def forward(self, task: Task, q: Any, k: Any, v: Any) -> Any:
        keep = torch.rand(*q.shape[:3], k.shape[2]) >= task.dropout_p
        k, v = (x.repeat_interleave(task.case.group_size, 1) for x in (k, v))
        scores = (q.double() @ k.double().transpose(2, 3)) * task.case.head_dim**-0.5
        scores = scores.masked_fill(~torch.ones(scores.shape[2:]).tril().bool(), -torch.inf)
        self.keep = keep
        return (scores.softmax(3) * keep / (1.0 - task.dropout_p) @ v.double()).to(q.dtype), keep

    def backward(self, task: Task, dout: Any, q: Any, k: Any, v: Any, results: Any) -> Any:
        assert torch.are_deterministic_algorithms_enabled() == task.deterministic
        return dout, k, v


def test_masks_of_dropout_are_read_off() -> None:
    task = Task(SMALL, dropout_p=0.3)
    inputs = make_inputs(task, "cpu")
    contestant = MathAttention()
    contestant.prepare(task, inputs)
    used = contestant.keep
    pairs = [(0, 0), (1, 1)]
    for (b, kv_head), kept in contestant.kept(task, inputs, pairs).items():
        expected = used[b, 2 * kv_head : 2 * kv_head + 2].tril() / 0.7
        np.testing.assert_allclose(kept.numpy(), expected.numpy(), rtol=1e-6)


def test_deterministic_algorithms_are_on_during_the_backward_only() -> None:
    task = Task(EQUAL_HEADS, deterministic=True)
    MathAttention().prepare(task, make_inputs(task, "cpu"))()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(UnsupportedError, match="keeps the plan"):
        CuDnn().prepare(task, make_inputs(task, "cpu"))


@pytest.mark.parametrize("contestant", [CuDnn(), FlashAttention2()], ids=lambda each: each.name)
@pytest.mark.parametrize("options", [{}, {"forward": True}, {"dropout_p": 0.1}], ids=str)
def test_operators_of_pytorch(contestant: TorchOperators, options: dict[str, Any]) -> None:
    """What they return on a GPU, as far as PyTorch knows without one: gradients like q, k and v."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    task = Task(SMALL, **options)
    with FakeTensorMode():
        q, k, v, dout = (
            torch.empty(2, 40, heads, 32, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2, 4)
        )
        gradients = contestant.prepare(task, Inputs(q, k, v, dout, None))()
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    for option in ({"alibi": "head"}, {"softcap": 1.0}):
        with pytest.raises(UnsupportedError, match="no ALiBi and no softcap"):
            contestant.prepare(Task(replace(SMALL, **option)), Inputs(q, k, v, dout, None))
