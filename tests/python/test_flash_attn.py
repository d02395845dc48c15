"""octavo.flash_attn: signatures, and attention over dense and packed arrays.

test_flash_attn_cache.py has its cache, test_flash_attn_training.py gradients and dropout.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import octavo.flash_attn  # noqa: E402
import octavo.torch  # noqa: E402
from octavo.flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402
from support import calls, cases, problems  # noqa: E402
from support.case import Case  # noqa: E402
from support.oracle import Reference  # noqa: E402
from support.problems import Inputs  # noqa: E402
from support.strategies import drawn_cases  # noqa: E402
from support.targets import Target  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TARGETS = [
    *(Target("torch", "cpu", dtype) for dtype in ("float32", "float16", "bfloat16")),
    *(pytest.param(Target("torch", "cuda", x), marks=pytest.mark.gpu) for x in ("float16", "bfloat16")),
]
every_target = pytest.mark.parametrize("target", TARGETS, ids=str)

# The parameters of FlashAttention 2.6.1 to 2.8.
SCORES = {
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
}
DENSE = {"dropout_p": 0.0, **SCORES, "deterministic": False, "return_attn_probs": False}
REQUIRED = inspect.Parameter.empty
LENGTHS = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED)
SIGNATURES: dict[str, dict[str, Any]] = {
    "flash_attn_func": {"q": REQUIRED, "k": REQUIRED, "v": REQUIRED, **DENSE},
    "flash_attn_kvpacked_func": {"q": REQUIRED, "kv": REQUIRED, **DENSE},
    "flash_attn_qkvpacked_func": {"qkv": REQUIRED, **DENSE},
    "flash_attn_varlen_func": {
        "q": REQUIRED,
        "k": REQUIRED,
        "v": REQUIRED,
        **LENGTHS,
        **DENSE,
        "block_table": None,
    },
    "flash_attn_varlen_kvpacked_func": {"q": REQUIRED, "kv": REQUIRED, **LENGTHS, **DENSE},
    "flash_attn_varlen_qkvpacked_func": {
        "qkv": REQUIRED,
        "cu_seqlens": REQUIRED,
        "max_seqlen": REQUIRED,
        **DENSE,
    },
    "flash_attn_with_kvcache": {
        "q": REQUIRED,
        "k_cache": REQUIRED,
        "v_cache": REQUIRED,
        "k": None,
        "v": None,
        "rotary_cos": None,
        "rotary_sin": None,
        "cache_seqlens": None,
        "cache_batch_idx": None,
        "cache_leftpad": None,
        "block_table": None,
        "softmax_scale": None,
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "alibi_slopes": None,
        "num_splits": 0,
        "return_softmax_lse": False,
    },
}


@pytest.mark.parametrize("name", octavo.flash_attn.__all__)
def test_signatures_are_those_of_flash_attention(name: str) -> None:
    parameters = inspect.signature(getattr(octavo.flash_attn, name)).parameters.values()
    assert {x.kind for x in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    found = [(x.name, x.default) for x in parameters]
    assert found == list(SIGNATURES[name].items())
    assert [type(default) for _, default in found] == [type(x) for x in SIGNATURES[name].values()]


def can_be_served(case: Case) -> bool:
    """FlashAttention-2 has neither sinks nor chunks."""
    return not case.sinks and not case.attention_chunk


def as_theirs(case: Case) -> Case:
    """FlashAttention has no prefix-LM, and its ALiBi goes by distances."""
    return dataclasses.replace(case, prefix_lens=None, alibi_symmetric=bool(case.alibi))


def scores_of(target: Target, case: Case, inputs: Inputs) -> dict[str, Any]:
    """In FlashAttention's words."""
    slopes = inputs.alibi_slopes
    return {
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "window_size": (case.window_left, case.window_right),
        "softcap": case.softcap,
        "alibi_slopes": None if slopes is None else target.library.float32(slopes),
    }


def lengths_of(target: Target, case: Case, inputs: Inputs) -> dict[str, Any]:
    return {
        "cu_seqlens_q": target.int32(inputs.cu_seqlens_q),
        "cu_seqlens_k": target.int32(inputs.cu_seqlens_k),
        "max_seqlen_q": max(case.seqlens_q),
        "max_seqlen_k": max(case.seqlens_k),
    }


def from_their_lse(lse: Any) -> NDArray[np.float32]:
    """[heads, total] or [batch, heads, seqlen] to [total, heads], with -inf where no key is seen."""
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    found = lse.detach().cpu().numpy()
    assert not np.isneginf(found).any()
    return np.moveaxis(np.where(np.isposinf(found), -np.inf, found), -2, -1).reshape(-1, found.shape[-2])


def check(reference: Reference, target: Target, q: Any, results: Any) -> None:
    out, lse, weights = results
    assert out.shape == reference.out.shape or out.flatten(0, 1).shape == reference.out.shape
    assert out.dtype == q.dtype and out.device == q.device
    heads, tokens = q.shape[-2], q.shape[-3]
    assert lse.shape == (*q.shape[:-3], heads, tokens)
    assert weights.shape == (0,) and weights.dtype == q.dtype and weights.device == q.device
    reference.check(target.library.to_float64(out), from_their_lse(lse))


def check_dense(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    k, v = problems.poisoned(case, inputs)
    arrays = [target.array(calls.dense(case, x)) for x in (inputs.q, k, v)]
    scores = scores_of(target, case, inputs)
    results = flash_attn_func(*arrays, **scores, return_attn_probs=True)
    check(problems.make_reference(case, inputs, target.dtype), target, arrays[0], results)
    assert torch.equal(flash_attn_func(*arrays, **scores), results[0])


def check_packed(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    k, v = problems.poisoned(case, inputs)
    arrays = [target.array(x) for x in (inputs.q, k, v)]
    arguments = {**lengths_of(target, case, inputs), **scores_of(target, case, inputs)}
    results = flash_attn_varlen_func(*arrays, **arguments, return_attn_probs=True)
    check(problems.make_reference(case, inputs, target.dtype), target, arrays[0], results)
    assert torch.equal(flash_attn_varlen_func(*arrays, **arguments), results[0])


def check_pages(target: Target, case: Case) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    cache = problems.make_cache(case, inputs)
    arrays = [target.array(x) for x in (inputs.q, cache.k_pages, cache.v_pages)]
    arguments = {
        **lengths_of(target, case, inputs),
        **scores_of(target, case, inputs),
        "block_table": target.int32(cache.page_table),
    }
    results = flash_attn_varlen_func(*arrays, **arguments, return_attn_probs=True)
    check(problems.make_reference(case, inputs, target.dtype), target, arrays[0], results)
    assert torch.equal(flash_attn_varlen_func(*arrays, **arguments), results[0])


DENSE_CASES = [*dict.fromkeys(as_theirs(case) for case in cases.DENSE)]
PACKED_CASES = [*dict.fromkeys(as_theirs(case) for case in cases.PACKED)]


@every_target
@pytest.mark.parametrize("case", [case for case in DENSE_CASES if can_be_served(case)], ids=str)
def test_dense(target: Target, case: Case) -> None:
    check_dense(target, case)


@every_target
@given(case=drawn_cases(dense=True).map(as_theirs).filter(can_be_served))
def test_dense_of_any_shape(target: Target, case: Case) -> None:
    check_dense(target, case)


@every_target
@pytest.mark.parametrize("case", [case for case in PACKED_CASES if can_be_served(case)], ids=str)
def test_packed(target: Target, case: Case) -> None:
    check_packed(target, case)


@every_target
@given(case=drawn_cases().map(as_theirs).filter(can_be_served))
def test_packed_of_any_shape(target: Target, case: Case) -> None:
    check_packed(target, case)


@every_target
@given(case=drawn_cases(paged=True, value_dims=True).map(as_theirs).filter(can_be_served))
def test_packed_over_pages(target: Target, case: Case) -> None:
    check_pages(target, dataclasses.replace(case, k_scale=None, v_scale=None))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [1, 20, 63])
def test_any_head_dim(device: str, head_dim: int) -> None:
    """Padded to a multiple of 8, but with the scale of the given one."""
    target = Target("torch", device, "bfloat16")
    case = Case(f"head_dim_{head_dim}", (5, 5), (9, 9), num_kv_heads=2, head_dim=head_dim)
    check_dense(target, case)
    check_packed(target, case)
    check_pages(target, case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_equals_octavo(name: str, device: str) -> None:
    """Bit for bit, also what is no window, no cap, or not contiguous."""
    target = Target("torch", device, "float16")
    case = Case("equal", (7, 7), (40, 40), num_q_heads=6, num_kv_heads=2)
    inputs = problems.make_inputs(case, target.dtype)
    arrays = [target.array(x) for x in (inputs.q, inputs.k, inputs.v)]
    lengths: dict[str, Any] = lengths_of(target, case, inputs)
    if name == "flash_attn_func":
        arrays, lengths = [x.unflatten(0, (2, -1)) for x in arrays], {}
    function = getattr(octavo.flash_attn, name)
    plain, lse = octavo.attention(*arrays, **lengths, return_lse=True)
    for options in ({}, {"softcap": -1.0}, {"window_size": (-5, -2)}, {"window_size": [-1, -1]}):
        out, their_lse, _ = function(*arrays, **lengths, **options, return_attn_probs=True)
        assert torch.equal(out, plain) and torch.equal(their_lse, lse.transpose(-1, -2))
    transposed = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in arrays]
    assert transposed[0].stride(-1) != 1
    assert torch.equal(function(*transposed, **lengths), plain)
    masked = function(*arrays, **lengths, causal=True, window_size=(3, 7))
    assert torch.equal(masked, octavo.attention(*arrays, **lengths, causal=True, window_left=3))


def small(device: str = "cpu", *, requires_grad: bool = False, seqlen: int = 9) -> list[Any]:
    """q, k and v."""
    torch.manual_seed(1)
    dtype = torch.float32 if device == "cpu" else torch.float16
    shapes = ((2, seqlen, 4, 16), (2, seqlen, 2, 16), (2, seqlen, 2, 16))
    return [torch.randn(x, device=device, dtype=dtype, requires_grad=requires_grad) for x in shapes]


def dense_step(q: Any, k: Any, v: Any) -> Any:
    out, lse, _ = flash_attn_func(
        q * 2, k, v, causal=True, window_size=(5, 0), softcap=4.0, return_attn_probs=True
    )
    return out * 3, lse


def packed_step(q: Any, k: Any, v: Any) -> Any:
    cu_seqlens = torch.tensor([0, 4, 2 * q.shape[1]], dtype=torch.int32, device=q.device)
    arrays = [x.flatten(0, 1) for x in (q * 2, k, v)]
    lengths = (cu_seqlens, cu_seqlens, 2 * q.shape[1], 2 * q.shape[1])
    out, lse, _ = flash_attn_varlen_func(*arrays, *lengths, window_size=(5, 2), return_attn_probs=True)
    return out * 3, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", [dense_step, packed_step])
def test_compiled(step: Any, device: str) -> None:
    """One graph, whose lengths become dynamic, and its gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for seqlen in (9, 12, 13):
        results, gradients = [], []
        for function in (step, compiled):
            arrays = small(device, requires_grad=True, seqlen=seqlen)
            out, lse = function(*arrays)
            (out.sum() + lse.sum()).backward()
            results.append((out, lse))
            gradients.append([x.grad for x in arrays])
        for expected, actual in (results, gradients):
            for x, y in zip(actual, expected, strict=True):
                torch.testing.assert_close(x, y)


CU_SEQLENS = torch.tensor([0, 4, 18], dtype=torch.int32)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "weights": (
        {"dropout_p": 0.5, "return_attn_probs": True},
        r"return_attn_probs must be False under dropout.* got dropout_p=0\.5",
    ),
    "window of one number": ({"window_size": 5}, r"window_size must be \(left, right\); got 5"),
    "window of three numbers": ({"window_size": (1, 2, 3)}, r"window_size must be .*; got \(1, 2, 3\)"),
}
PAGED_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout_p": 0.5}, "dropout_p must be 0 with block_table; got 0.5"),
}


@pytest.mark.parametrize("options", REFUSALS.values(), ids=REFUSALS)
def test_refusals(options: tuple[dict[str, Any], str]) -> None:
    arguments, message = options
    arrays = small()
    with pytest.raises(ValueError, match=f"flash_attn_func: {message}"):
        flash_attn_func(*arrays, **arguments)
    packed = [x.flatten(0, 1) for x in arrays]
    with pytest.raises(ValueError, match=f"flash_attn_varlen_func: {message}"):
        flash_attn_varlen_func(*packed, CU_SEQLENS, CU_SEQLENS, 14, 14, **arguments)


@pytest.mark.parametrize("window_size", [(None, None), (3, None), (1.5, 0)])
def test_windows_of_no_ints_are_refused(window_size: Any) -> None:
    message = "flash_attn_func: window_size must be two ints (left, right), -1 for all keys; got "
    with pytest.raises(TypeError, match=f"^{re.escape(message + repr(window_size))}$"):
        flash_attn_func(*small(), window_size=window_size)


@pytest.mark.parametrize("options", PAGED_REFUSALS.values(), ids=PAGED_REFUSALS)
def test_refusals_over_pages(options: tuple[dict[str, Any], str]) -> None:
    arguments, message = options
    q, k, v = small()
    with pytest.raises(ValueError, match=f"flash_attn_varlen_func: {message}"):
        flash_attn_varlen_func(
            q.flatten(0, 1), k, v, CU_SEQLENS, CU_SEQLENS, 14, 14, **arguments, block_table=TABLE
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_numbers_are_refused(deterministic: bool) -> None:
    number = torch.tensor(0.5, requires_grad=True)
    for name in ("softmax_scale", "softcap"):
        message = f"flash_attn_func: {name} requires grad, and this call has no backward for numbers"
        with pytest.raises(TypeError, match=message):
            flash_attn_func(*small(), **{name: number}, deterministic=deterministic)
        flash_attn_func(*small(), **{name: number.detach()}, deterministic=deterministic)


def test_tables_of_any_strides() -> None:
    q, k, v = small()
    table = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    results = [
        flash_attn_varlen_func(
            q.flatten(0, 1), k, v, CU_SEQLENS, CU_SEQLENS, 14, 14, causal=True, block_table=x
        )
        for x in (table, table.T.contiguous().T)
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("index", range(3))
def test_gradients_over_pages_are_refused(index: int) -> None:
    q, k, v = small()
    arrays = [q.flatten(0, 1), k, v]
    arrays[index].requires_grad_()
    message = f"flash_attn_varlen_func: {'qkv'[index]} requires grad, and this call has no backward"
    with pytest.raises(TypeError, match=message):
        flash_attn_varlen_func(*arrays, CU_SEQLENS, CU_SEQLENS, 14, 14, block_table=TABLE)


def test_a_single_query_may_have_slopes_and_a_window_to_the_right() -> None:
    """It sits at the last key."""
    q, k, v = small()
    slopes = torch.rand(4)
    expected = octavo.attention(q[:, -1:], k, v, alibi_slopes=slopes, window_left=3)
    each: list[dict[str, Any]] = [{"window_size": (3, -1)}, {"window_size": (3, 4)}]
    for options in [*each, {"window_size": [3, 0], "causal": True}]:
        out = flash_attn_func(q[:, -1:], k, v, alibi_slopes=slopes, **options)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        paged = flash_attn_varlen_func(
            q[:, -1],
            k,
            v,
            torch.arange(3, dtype=torch.int32),
            torch.tensor([0, 9, 18], dtype=torch.int32),
            1,
            9,
            alibi_slopes=slopes,
            block_table=torch.tensor([[0], [1]], dtype=torch.int32),
            **options,
        )
        torch.testing.assert_close(paged, expected[:, 0])


def test_no_option_is_forgotten() -> None:
    """Each changes the result, in the place that FlashAttention gives it."""
    arrays = small(seqlen=12)
    values = {
        "dropout_p": 0.5,
        "softmax_scale": 0.9,
        "causal": True,
        "window_size": (2, 1),
        "softcap": 0.5,
    }
    plain = flash_attn_func(*arrays)
    names = list(SIGNATURES["flash_attn_func"])[3:]
    for name, value in values.items():
        torch.manual_seed(0)
        by_name = flash_attn_func(*arrays, **{name: value})
        assert not torch.equal(by_name, plain)
        before = [DENSE[x] for x in itertools.takewhile(lambda x, name=name: x != name, names)]
        torch.manual_seed(0)
        assert torch.equal(flash_attn_func(*arrays, *before, value), by_name)
