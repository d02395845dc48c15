"""Gradients on a GPU: against those of the CPU in float32, from the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import octavo

pytestmark = pytest.mark.gpu

# The norm of the error, relative to the gradient's: results, weights and gradients of scores are rounded.
TOLERANCE = {"float16": 1.2e-3, "bfloat16": 8e-3}
SLOPES = [0.5 ** (i + 1) for i in range(4)]
SINKS = [3.0, -2.0, 0.5, 8.0]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window_left": 60},
    {"window_left": 20, "window_right": 31},
    {"causal": True, "attention_chunk": 50},
    {"causal": True, "attention_chunk": 100, "dropout_p": 0.2, "dropout_seed": 7},
    {"causal": True, "prefix_lens": [30, 0]},
    {"causal": True, "softcap": 3.0},
    {"causal": True, "alibi_slopes": SLOPES},
    {"alibi_slopes": [SLOPES, SLOPES[::-1]], "softcap": 5.0},
    {"alibi_slopes": SLOPES, "alibi_symmetric": True},
    {"alibi_slopes": SLOPES, "alibi_symmetric": True, "window_left": 60, "window_right": 31},
    {"alibi_slopes": SLOPES, "alibi_symmetric": True, "causal": True, "prefix_lens": [130, 0]},
    {"alibi_slopes": [SLOPES, SLOPES[::-1]], "alibi_symmetric": True, "sinks": SINKS},
    {"alibi_slopes": [SLOPES, SLOPES[::-1]], "alibi_symmetric": True, "dropout_p": 0.2, "dropout_seed": 7},
    {"dropout_p": 0.2, "dropout_seed": 7, "dropout_offset": 3},
    {"causal": True, "dropout_p": 0.5, "dropout_seed": 1, "alibi_slopes": SLOPES},
    {"softmax_scale": 0.3},
    {"causal": True, "sinks": SINKS},
    {"causal": True, "sinks": SINKS, "window_left": 60, "softcap": 5.0},
    {"sinks": SINKS, "alibi_slopes": SLOPES, "window_right": 31, "dropout_p": 0.2, "dropout_seed": 7},
]


def arrays_of(torch: Any, options: dict[str, Any], device: str) -> dict[str, Any]:
    dtypes = {"alibi_slopes": torch.float32, "prefix_lens": torch.int32, "sinks": torch.float32}
    return {
        name: torch.tensor(x, dtype=dtypes[name], device=device) if name in dtypes else x
        for name, x in options.items()
    }


def gradients(torch: Any, tensors: list[Any], options: dict[str, Any], dlse: Any = None) -> list[Any]:
    """Those of q, k, v, and of slopes and sinks where there are some, from a forward on the same device."""
    q, k, v, dout = tensors
    device = q.device.type
    given = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in arrays_of(torch, options, device).items()
    }
    forward = {name: x for name, x in given.items() if name != "deterministic"}
    out, lse = octavo.attention(q, k, v, return_lse=True, **forward)
    lse_gradient = {} if dlse is None else {"dlse": dlse.to(device)}
    asked = {"return_dalibi": "alibi_slopes" in given, "return_dsinks": "sinks" in given}
    return list(octavo.attention_backward(dout, q, k, v, out, lse, **given, **lse_gradient, **asked))


def check(torch: Any, found: list[Any], expected: list[Any], dtype: str) -> None:
    for name, x, wanted in zip(("dq", "dk", "dv", "other", "other"), found, expected, strict=False):
        error = (x.float().cpu() - wanted).norm().item()
        # Those of slopes are weighted by distances, and of theirs and those of sinks large ones cancel.
        tolerance = (3 if name == "other" else 1) * TOLERANCE[dtype]
        assert error <= tolerance * wanted.norm().item() + 1e-7, name
    assert len(found) == len(expected)


def random(torch: Any, dtype: str, *shapes: tuple[int, ...]) -> list[Any]:
    generator = torch.Generator().manual_seed(sum(shapes[0]))
    return [torch.randn(*shape, generator=generator).to(getattr(torch, dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_dense(torch: Any, options: dict[str, Any], head_dim: int, dtype: str) -> None:
    tensors = random(
        torch,
        dtype,
        (2, 150, 4, head_dim),
        (2, 203, 2, head_dim),
        (2, 203, 2, head_dim),
        (2, 150, 4, head_dim),
    )
    dlse = random(torch, "float32", (2, 150, 4))[0]
    expected = gradients(torch, [x.float() for x in tensors], options, dlse)
    found = gradients(torch, [x.cuda() for x in tensors], options, dlse)
    check(torch, found, expected, dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("lengths", [(203, 90), (130, 600), (600, 600)], ids=str)
def test_symmetric_alibi(torch: Any, lengths: tuple[int, int], head_dim: int) -> None:
    """Tiles of keys before, on and behind the diagonal; queries before the first key."""
    n, m = lengths
    tensors = random(torch, "bfloat16", (2, n, 4, head_dim), *[(2, m, 2, head_dim)] * 2, (2, n, 4, head_dim))
    options = {"alibi_slopes": SLOPES, "alibi_symmetric": True}
    expected = gradients(torch, [x.float() for x in tensors], options)
    check(torch, gradients(torch, [x.cuda() for x in tensors], options), expected, "bfloat16")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"alibi_slopes": [0.1] * 12}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize(("batch", "parts"), [(1, "some"), (96, "one")])
def test_parts_of_groups(
    torch: Any, batch: int, parts: str, head_dim: int, options: dict[str, Any], deterministic: bool
) -> None:
    """Several CTAs share the query heads of a KV head where there are few tiles of keys."""
    num_heads = 12
    tensors = random(
        torch,
        "bfloat16",
        (batch, 140, num_heads, head_dim),
        *[(batch, 150, 2, head_dim)] * 2,
        (batch, 140, num_heads, head_dim),
    )
    options = options | {"causal": True}
    expected = gradients(torch, [x.float() for x in tensors], options)
    given = options | {"deterministic": deterministic}
    found = [gradients(torch, [x.cuda() for x in tensors], given) for _ in range(2)]
    check(torch, found[0], expected, "bfloat16")
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    q, k, v, dout = (x.cuda() for x in tensors)
    lse = torch.zeros(batch, 140, num_heads, device="cuda")
    arrays = arrays_of(torch, given, "cuda")
    plan = octavo.explain("attention_backward", dout, q, k, v, dout, lse, **arrays).plan
    assert (plan["group_parts"] == 1) == (parts == "one")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_packed(torch: Any, causal: bool, head_dim: int, dtype: str, deterministic: bool) -> None:
    """Sequences of many lengths, without queries and without keys; nothing is written behind the last."""
    lengths_q, lengths_k = [129, 0, 64, 1, 300, 7], [129, 5, 130, 70, 200, 0]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    tensors = random(
        torch,
        dtype,
        (total_q, 6, head_dim),
        (total_k, 2, head_dim),
        (total_k, 2, head_dim),
        (total_q, 6, head_dim),
    )

    def run(device: str, tensors: list[Any]) -> list[Any]:
        begins = {
            f"cu_seqlens_{which}": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
            for which, lengths in (("q", lengths_q), ("k", lengths_k))
        }
        options = {"causal": causal, "max_seqlen_q": 300, "max_seqlen_k": 200, **begins}
        q, k, v, dout = tensors
        out, lse = octavo.attention(q, k, v, return_lse=True, **options)
        room = [
            torch.full((len(x) + 3, *x.shape[1:]), float("nan"), dtype=x.dtype, device=device)
            for x in (q, k, v)
        ]
        targets = [x[: len(of)] for x, of in zip(room, (q, k, v), strict=True)]
        into = dict(zip(("dq", "dk", "dv"), targets, strict=True))
        octavo.attention_backward(dout, q, k, v, out, lse, **into, deterministic=deterministic, **options)
        assert all(x[-3:].isnan().all() for x in room)
        return targets

    expected = run("cpu", [x.float() for x in tensors])
    check(torch, run("cuda", [x.cuda() for x in tensors]), expected, dtype)


@pytest.mark.parametrize("head_dim", [64, 128, 160])
def test_strides(torch: Any, head_dim: int) -> None:
    """Arrays that are parts of one, dout by strides of zero, and rows that do not start on 16 bytes."""
    qkv = random(torch, "bfloat16", (2, 100, 12, head_dim))[0]
    dout = random(torch, "bfloat16", (1, 1, 4, head_dim))[0].expand(2, 100, 4, head_dim)

    def parts(x: Any) -> list[Any]:
        return [x[:, :, 4 * i : 4 * i + 4] for i in range(3)]

    expected = gradients(torch, [*parts(qkv.float()), dout.float()], {"causal": True})
    on_gpu = qkv.cuda()
    q, k, v = parts(on_gpu)
    out, lse = octavo.attention(q, k, v, causal=True, return_lse=True)
    joint = torch.full_like(on_gpu, float("nan"))
    found = octavo.attention_backward(
        dout.cuda(),
        q,
        k,
        v,
        out,
        lse,
        causal=True,
        **dict(zip(("dq", "dk", "dv"), parts(joint), strict=True)),
    )
    check(torch, list(found), expected, "bfloat16")
    assert not joint.isnan().any()
    odd = torch.zeros(2, 100, 12, head_dim + 3, dtype=torch.bfloat16, device="cuda")[..., 1 : 1 + head_dim]
    odd.copy_(on_gpu)
    check(torch, gradients(torch, [*parts(odd), dout.cuda()], {"causal": True}), expected, "bfloat16")


@pytest.mark.parametrize("options", [{}, {"causal": True, "alibi_slopes": SLOPES}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_sequences_that_share_rows(torch: Any, head_dim: int, options: dict[str, Any]) -> None:
    """A batch stride of 0 alone: learned queries, and the gradient of a sum over the batch."""
    q, k, v, dout = random(torch, "bfloat16", *4 * [(3, 100, 4, head_dim)])
    one_q, one_dout = (x[:1].expand_as(x) for x in (q, dout))
    one_q_on_gpu, one_dout_on_gpu = (x[:1].cuda().expand_as(x) for x in (q, dout))
    for tensors, on_gpu in (
        ((one_q, k, v, dout), (one_q_on_gpu, k.cuda(), v.cuda(), dout.cuda())),
        ((q, k, v, one_dout), (q.cuda(), k.cuda(), v.cuda(), one_dout_on_gpu)),
        ((one_q, k, v, one_dout), (one_q_on_gpu, k.cuda(), v.cuda(), one_dout_on_gpu)),
    ):
        assert 0 in (on_gpu[0].stride(0), on_gpu[3].stride(0))
        expected = gradients(torch, [x.float() for x in tensors], options)
        check(torch, gradients(torch, list(on_gpu), options), expected, "bfloat16")


def kernel_of(torch: Any, head_dim: int, **options: Any) -> str:
    q = torch.zeros(1, 64, 2, head_dim, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(1, 64, 2, device="cuda")
    return octavo.explain("attention_backward", q, q, q, q, q, lse, **options).kernel.partition("<")[0]


def test_which_kernel(torch: Any) -> None:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    best = "sm90_backward" if hopper else "sm80_backward"
    for head_dim in (64, 128, 160, 256):
        assert kernel_of(torch, head_dim) == kernel_of(torch, head_dim, deterministic=True) == best
    for options in ({"softcap": 2.0}, {"dropout_p": 0.1, "dropout_seed": 1}):
        assert kernel_of(torch, 128, causal=True, **options) == best
        assert kernel_of(torch, 256, **options) == "sm80_backward"
        assert kernel_of(torch, 128, deterministic=True, **options) == "sm80_backward"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [4, 96])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_deterministic(torch: Any, head_dim: int, heads: int, causal: bool) -> None:
    """The same bits at every call, while another stream works too."""
    tensors = [x.cuda() for x in random(torch, "bfloat16", *[(2, 1100, heads, head_dim)] * 4)]
    q, k, v, dout = tensors
    out, lse = octavo.attention(q, k, v, causal=causal, return_lse=True)
    options = {"causal": causal, "deterministic": True}
    kernel = octavo.explain("attention_backward", dout, q, k, v, out, lse, **options).kernel
    takes_turns = torch.cuda.get_device_capability() == (9, 0) and head_dim <= 128 and heads == 96
    assert ("ordered" in kernel) == takes_turns
    side, load = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    first = None
    for _ in range(100):
        with torch.cuda.stream(side):
            load = (load @ load).clamp(-1, 1)
        found = octavo.attention_backward(dout, q, k, v, out, lse, **options)
        first = first or [x.clone() for x in found]
        assert all(torch.equal(x, y) for x, y in zip(found, first, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 160, 256])
def test_unseen_keys_spoil_nothing(torch: Any, head_dim: int, deterministic: bool) -> None:
    q, k, v, dout = (
        x.cuda()
        for x in random(
            torch, "bfloat16", (1, 50, 2, head_dim), *[(1, 400, 2, head_dim)] * 2, (1, 50, 2, head_dim)
        )
    )
    options = {"causal": True, "window_left": 100}
    out, lse = octavo.attention(q, k, v, return_lse=True, **options)
    clean = octavo.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    k[:, :250], v[:, :250] = float("nan"), float("nan")
    found = octavo.attention_backward(dout, q, k, v, out, lse, deterministic=deterministic, **options)
    for x, y in zip(found, clean, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    assert (found[1][:, :250] == 0).all() and (found[2][:, :250] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("head_dim", [64, 128, 160])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 3.0},
        {"alibi_slopes": SLOPES},
        {"dropout_p": 0.1, "dropout_seed": 7},
        {"dropout_p": 0.1, "dropout_seed": 7, "sinks": SINKS},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
def test_queries_that_see_nothing_spoil_nothing(
    torch: Any, options: dict[str, Any], head_dim: int, value: float
) -> None:
    """Whatever the gradient of their log-sum-exp is. That of a sink, which they do see, follows it."""
    q, k, v, dout = (
        x.cuda()
        for x in random(
            torch, "bfloat16", (1, 100, 4, head_dim), *[(1, 90, 2, head_dim)] * 2, (1, 100, 4, head_dim)
        )
    )
    options = {"causal": True, **options}
    dlse = torch.zeros(1, 100, 4)
    clean = gradients(torch, [q, k, v, dout], options, dlse)
    dlse[:, :10] = value
    found = gradients(torch, [q, k, v, dout], options, dlse)
    if "sinks" in options:
        assert not found.pop().isfinite().any()
    for x, y in zip(found, clean, strict=False):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    assert (found[0][:, :10] == 0).all()


@pytest.mark.parametrize("head_dim", [64, 128, 96, 160])
def test_graph(torch: Any, head_dim: int) -> None:
    """A captured call follows its arrays."""
    q, k, v, dout = (x.cuda() for x in random(torch, "bfloat16", *[(2, 300, 4, head_dim)] * 4))
    out, lse = octavo.attention(q, k, v, causal=True, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = octavo.attention_backward(dout, q, k, v, out, lse, causal=True)
    for seed in range(2):
        torch.manual_seed(seed)
        dout.normal_()
        graph.replay()
        expected = octavo.attention_backward(dout, q, k, v, out, lse, causal=True)
        for x, y in zip(captured, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192])
def test_sinks_of_packed_sequences(torch: Any, head_dim: int, deterministic: bool) -> None:
    """Some without keys, whose queries have their sinks alone: they add to the gradients of these, and of
    nothing else; the gradients of sinks have the same bits every time."""
    lengths_q, lengths_k = [129, 0, 64, 1, 300, 7], [129, 5, 13, 70, 200, 0]
    like_q, like_k = (sum(lengths_q), 6, head_dim), (sum(lengths_k), 2, head_dim)
    tensors = random(torch, "bfloat16", like_q, like_k, like_k, like_q)
    dlse = random(torch, "float32", (sum(lengths_q), 6))[0]

    def run(device: str, tensors: list[Any]) -> list[Any]:
        options: dict[str, Any] = {
            f"cu_seqlens_{which}": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)
            for which, lengths in (("q", lengths_q), ("k", lengths_k))
        }
        sinks = torch.linspace(-3.0, 4.0, 6, device=device)
        options |= {"causal": True, "window_left": 80, "sinks": sinks}
        q, k, v, dout = (x.to(device) for x in tensors)
        out, lse = octavo.attention(q, k, v, return_lse=True, **options)
        found = [
            octavo.attention_backward(
                *(dout, q, k, v, out, lse),
                dlse=dlse.to(device),
                deterministic=deterministic,
                return_dsinks=True,
                **options,
            )
            for _ in range(2)
        ]
        assert torch.equal(found[0][3], found[1][3])
        return list(found[0])

    check(torch, run("cuda", tensors), run("cpu", [x.float() for x in tensors]), "bfloat16")


def test_no_queries_or_keys(torch: Any) -> None:
    for seqlen_q, seqlen_k in ((0, 5), (5, 0), (0, 0)):
        q = torch.ones(1, seqlen_q, 2, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.ones(1, seqlen_k, 2, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = octavo.attention(q, k, k, return_lse=True)
        found = octavo.attention_backward(q, q, k, k, out, lse)
        assert [x.shape for x in found] == [q.shape, k.shape, k.shape]
        assert all((x == 0).all() for x in found)
        sinks, dlse = torch.ones(2, device="cuda"), torch.ones(1, seqlen_q, 2, device="cuda")
        out, lse = octavo.attention(q, k, k, return_lse=True, sinks=sinks)
        assert (out == 0).all() and (lse == 1).all()
        *found, dsinks = octavo.attention_backward(
            *(q, q, k, k, out, lse), dlse=dlse, sinks=sinks, return_dsinks=True
        )
        assert all((x == 0).all() for x in found)
        torch.testing.assert_close(dsinks, torch.full_like(sinks, seqlen_q))
