"""What every operator says of each of its arrays where that is on another device than the first one."""

from __future__ import annotations

import inspect

import pytest

from octavo import _core
from support.producers import Producer
from support.refusals import LATENT, OPERATORS, A, C, D, K, L, M, P, S, T, check_refused, f32

CALLS = dict((A, P, K, C, M, D, L, S, T, LATENT))


def arrays_of(op: str) -> list[str]:
    """All but the first, by their keywords; but for another cache to copy to, which may be elsewhere."""
    if op == "check_page_table":
        return ["seq_lens"]
    described = (x for x in _core.operator_arguments()[op] if x["type"] == "array")
    names = [x.get("in_place_of", x["name"]) for x in described]
    keywords = inspect.signature(OPERATORS[op]).parameters
    return [name for name in names[1:] if name in keywords and not name.startswith("to_")]


MISMATCHES = [(op, name) for op in CALLS for name in arrays_of(op)]


def test_no_array_is_left_out() -> None:
    assert {
        *(("linear", name) for name in ("w", "bias", "residual", "norm_weight", "out")),
        *(("rms_norm", name) for name in ("weight", "residual", "out", "residual_out")),
        *(
            ("attention_backward", name)
            for name in ("q", "k", "v", "out", "lse", "dlse", "dk", "alibi_slopes")
        ),
        *(("append_kv", name) for name in ("rotary_cos", "rotary_sin", "q", "q_out")),
        *(("attention", name) for name in ("softmax_phi", "alibi_slopes", "out")),
        ("copy_pages", "copies"),
    } <= set(MISMATCHES)


@pytest.mark.parametrize(("op", "name"), MISMATCHES)
def test_refused(op: str, name: str) -> None:
    message = f"all arrays must be on one device; {name} is on cuda:1, the first array on cpu"
    elsewhere = {name: Producer(f32(2), device=(2, 1))}
    check_refused(op, CALLS[op], elsewhere, RuntimeError, message)
