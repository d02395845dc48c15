"""What octavo.torch refuses before an operator's own checks: what its schema does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import octavo.torch  # noqa: E402

q = torch.ones(1, 3, 2, 8)
META = torch.ones(1, 3, 2, 8, device="meta")
GRAD = torch.tensor(0.5, requires_grad=True)
TABLE, LENS = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
ON_META = "must have memory, or all tensors be on meta; it is on meta"
NUMBER = "requires grad, and this call has no backward for numbers; use"
NO_ARRAY = "must be an array (an object with __dlpack__ and __dlpack_device__); got NoneType"
CASES = [
    (lambda: octavo.torch.attention([1.0], q, q), TypeError, "attention: q must be a torch.Tensor; got list"),
    (
        lambda: octavo.torch.attention(q, q.numpy(), q),
        TypeError,
        "attention: k must be a torch.Tensor; got ndarray",
    ),
    (lambda: octavo.torch.attention(q, q, None), TypeError, f"attention: v {NO_ARRAY}"),
    (
        lambda: octavo.torch.attention(q, q, q, alibi_slopes=[1.0]),
        TypeError,
        "attention: alibi_slopes must be a torch.Tensor; got list",
    ),
    (
        lambda: octavo.torch.attention(q, q, q, causal="yes"),
        TypeError,
        "attention: causal must be a bool; got str",
    ),
    (
        lambda: octavo.torch.attention(q, q, q, window_left=0.5, return_lse=True),
        TypeError,
        "attention: window_left must be an int; got float",
    ),
    (
        lambda: octavo.torch.attention(q, q, q, window_left=1 << 70),
        ValueError,
        "attention: window_left must fit in 64 bits",
    ),
    (
        lambda: octavo.torch.attention(q, q, q, out=[1]),
        TypeError,
        "attention: out must be a torch.Tensor; got list",
    ),
    (
        lambda: octavo.torch.paged_attention(q, q, q, [[0]], q),
        TypeError,
        "paged_attention: page_table must be a torch.Tensor; got list",
    ),
    (
        lambda: octavo.torch.paged_attention(q, q, q, q, q, softmax_scale="1", out=q),
        TypeError,
        "paged_attention: softmax_scale must be a float; got str",
    ),
    (
        lambda: octavo.torch.merge_states(q, q, q, 3),
        TypeError,
        "merge_states: lse_b must be a torch.Tensor; got int",
    ),
    (
        lambda: octavo.torch.rms_norm(q, [1.0]),
        TypeError,
        "rms_norm: weight must be a torch.Tensor; got list",
    ),
    (
        lambda: octavo.torch.rms_norm(q.numpy(), q, residual=q, residual_out=q),
        TypeError,
        "rms_norm: x must be a torch.Tensor; got ndarray",
    ),
    (
        lambda: octavo.torch.rms_norm(q, q[0, 0, 0], "1", residual=q),
        TypeError,
        "rms_norm: eps must be a float; got str",
    ),
    (
        lambda: octavo.torch.rms_norm(q, q[0, 0, 0], residual_out=q.clone()),
        ValueError,
        "rms_norm: residual and residual_out must be given together; got only residual_out",
    ),
    (
        lambda: torch.ops.octavo.rms_norm(q, q[0, 0, 0], residual=q),
        ValueError,
        "rms_norm: residual needs an operator with residual_out, such as rms_norm.residual",
    ),
    (
        lambda: torch.ops.octavo.rms_norm.out(q, q[0, 0, 0], q.clone(), residual=q),
        ValueError,
        "rms_norm: residual needs an operator with residual_out, such as rms_norm.residual",
    ),
    (
        lambda: torch.ops.octavo.rms_norm.residual(q, q[0, 0, 0]),
        ValueError,
        "rms_norm: residual_out needs residual; got none",
    ),
    (
        lambda: octavo.torch.append_kv(q, q, q, q.numpy(), q, q),
        TypeError,
        "append_kv: v_pages must be a torch.Tensor; got ndarray",
    ),
    (
        lambda: octavo.torch.append_kv(q, q, q, q, q, q, q=[1.0], rotary_cos=q, rotary_sin=q),
        TypeError,
        "append_kv: q must be a torch.Tensor; got list",
    ),
    (
        lambda: torch.ops.octavo.append_kv(q, q, q, q, q, q, q=q),
        ValueError,
        "append_kv: q needs an operator with q_out, such as append_kv.q",
    ),
    (
        lambda: torch.ops.octavo.append_kv.q(q, q, q, q, q, q),
        ValueError,
        "append_kv: q_out needs q; got none",
    ),
    (lambda: octavo.torch.append_kv(q, q, None, q, q, q), TypeError, f"append_kv: k_pages {NO_ARRAY}"),
    (
        lambda: octavo.torch.linear(q, q, activation=1),
        TypeError,
        "linear: activation must be a str; got int",
    ),
    (
        lambda: octavo.torch.linear(q, q, activation="\ud800"),
        ValueError,
        "linear: activation must have no lone surrogates",
    ),
    (
        lambda: octavo.torch.linear(q, q, 3.0),
        TypeError,
        "linear: bias must be a torch.Tensor; got float",
    ),
    (
        lambda: octavo.torch.copy_pages(q, q, [0]),
        TypeError,
        "copy_pages: copies must be a torch.Tensor; got list",
    ),
    (
        lambda: octavo.torch.copy_pages(q, q, q, to_k_pages=q),
        ValueError,
        "copy_pages: to_k_pages and to_v_pages must be given together; got only to_k_pages",
    ),
    (
        lambda: octavo.torch.copy_pages(q, q, q, to_k_pages=q, to_v_pages=[1]),
        TypeError,
        "copy_pages: to_v_pages must be a torch.Tensor; got list",
    ),
    (lambda: octavo.torch.attention(q, META, q), TypeError, f"attention: k {ON_META}, q on cpu"),
    (lambda: octavo.torch.attention(META, q, q), TypeError, f"attention: q {ON_META}, k on cpu"),
    (lambda: octavo.torch.attention(q, q, q, out=META), TypeError, f"attention: out {ON_META}, q on cpu"),
    (lambda: octavo.torch.linear(q, META[0, 0]), TypeError, f"linear: w {ON_META}, x on cpu"),
    (
        lambda: octavo.torch.append_kv(META[0], q[0], q, q, TABLE, LENS),
        TypeError,
        f"append_kv: k {ON_META}, v on cpu",
    ),
    (
        lambda: octavo.torch.append_kv(q[0], q[0], q, q, TABLE, LENS, k_scale=META[0, 0, 0]),
        TypeError,
        f"append_kv: k_scale {ON_META}, k on cpu",
    ),
    (
        lambda: octavo.torch.append_kv(q[0], q[0], q, q, TABLE, LENS, v_scale=GRAD[None]),
        TypeError,
        "append_kv: v_scale requires grad, and this call has no backward; use v_scale.detach() or "
        "torch.no_grad()",
    ),
    (
        lambda: octavo.torch.attention(q, q, q, softmax_phi=GRAD.expand(2), out=q),
        TypeError,
        "attention: softmax_phi requires grad, and this call has no backward; use octavo.torch.attention "
        "without out, softmax_phi.detach() or torch.no_grad()",
    ),
    (
        lambda: octavo.torch.attention(q, q, q, softmax_scale=GRAD),
        TypeError,
        f"attention: softmax_scale {NUMBER} softmax_scale.detach() or torch.no_grad()",
    ),
    (
        lambda: octavo.torch.attention_backward(q, q, q, q, q, q[..., 0], softcap=GRAD),
        TypeError,
        f"attention_backward: softcap {NUMBER} softcap.detach() or torch.no_grad()",
    ),
    (
        lambda: octavo.torch.paged_attention(q[0, :1], q, q, TABLE, LENS, softcap=GRAD),
        TypeError,
        f"paged_attention: softcap {NUMBER} softcap.detach() or torch.no_grad()",
    ),
    (
        lambda: octavo.torch.latent_attention(q[0], q[0], TABLE, LENS, softmax_scale=GRAD),
        TypeError,
        f"latent_attention: softmax_scale {NUMBER} softmax_scale.detach() or torch.no_grad()",
    ),
    (
        lambda: octavo.torch.linear(q, q[0, 0], norm_eps=GRAD),
        TypeError,
        f"linear: norm_eps {NUMBER} norm_eps.detach() or torch.no_grad()",
    ),
    (
        lambda: octavo.torch.rms_norm(q, q[0, 0, 0], GRAD),
        TypeError,
        f"rms_norm: eps {NUMBER} eps.detach() or torch.no_grad()",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CASES, ids=[message for *_, message in CASES])
def test_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def test_tensors_of_no_axis_are_numbers() -> None:
    wanted = octavo.torch.attention(q, q, q, softmax_scale=0.5)
    assert torch.equal(octavo.torch.attention(q, q, q, softmax_scale=GRAD.detach()), wanted)
    with torch.no_grad():
        assert torch.equal(octavo.torch.attention(q, q, q, softmax_scale=GRAD), wanted)


def test_a_cache_beside_meta_is_not_written() -> None:
    """Without a gradient, too, where the dispatcher comes to the operator by another way."""
    pages = torch.zeros(1, 4, 2, 8)
    with torch.inference_mode(), pytest.raises(TypeError, match="append_kv: k must have memory"):
        octavo.torch.append_kv(META[0, :1], q[0, :1], pages, pages.clone(), TABLE, LENS)
    on_meta = octavo.torch.attention(META, META, META)
    assert on_meta.device.type == "meta" and on_meta.shape == META.shape
