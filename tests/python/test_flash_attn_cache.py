"""octavo.flash_attn.flash_attn_with_kvcache: dense and paged caches, and what is written to them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import octavo  # noqa: E402
from octavo.flash_attn import flash_attn_with_kvcache  # noqa: E402
from support import calls, oracle, problems  # noqa: E402
from support.case import Case  # noqa: E402
from support.strategies import HEAD_DIMS, PAGE_SIZES  # noqa: E402
from support.targets import Target  # noqa: E402
from test_flash_attn import DEVICES, every_target, from_their_lse, scores_of  # noqa: E402

LAYOUTS = ("dense", "rows", "pages")  # of the cache: a row a sequence, some rows of more, or pages


@dataclass(frozen=True)
class Setup:
    """How a case is called; its lengths count the tokens behind the padding, new ones included."""

    layout: str = "dense"
    seqlen_new: int = 0
    leftpad: tuple[int, ...] | None = None
    rotary_dim: int = 0
    interleaved: bool = True
    num_splits: int = 0
    spare_slots: int = 3  # of a dense cache, behind the longest sequence


@dataclass
class Cache:
    """A cache before and after the call, and where the sequences lie in it."""

    before: list[NDArray[np.float64]]  # of keys, and of values
    after: list[NDArray[np.float64]]
    arguments: dict[str, Any]  # int32 arrays


def make_cache(case: Case, setup: Setup, old: list[Any], whole: list[Any]) -> Cache:
    """With the tokens of `old` and of `whole`; all else is NaN."""
    padding = setup.leftpad or (0,) * case.batch
    lengths = [p + n for p, n in zip(padding, case.seqlens_k, strict=True)]
    first = [p + n - setup.seqlen_new for p, n in zip(padding, case.seqlens_k, strict=True)]
    arguments: dict[str, Any] = {"cache_seqlens": first}
    if setup.layout == "pages":
        table, num_pages = problems.make_page_table(case)
        shape = (num_pages, case.page_size)
        arguments["block_table"] = table
    else:
        num_rows = case.batch + (2 if setup.layout == "rows" else 0)
        shape = (num_rows, max(lengths) + setup.spare_slots)
        table = np.arange(num_rows, dtype=np.int32)[:, None]
        if setup.layout == "rows":
            table = np.random.default_rng(1).permutation(table)[: case.batch]
            arguments["cache_batch_idx"] = table[:, 0]
        if setup.leftpad is not None:
            arguments["cache_leftpad"] = list(setup.leftpad)

    def fill(packed: NDArray[Any], counts: list[int], ends: list[int]) -> NDArray[Any]:
        empty = np.full((*shape, *packed.shape[1:]), np.nan)
        # A sequence of length 0 would be padding to the oracle, and has nothing to be written either.
        return oracle.append_kv(packed, empty, table, ends, counts)

    kept = [n - setup.seqlen_new for n in case.seqlens_k]
    return Cache(
        [fill(x, kept, first) for x in old],
        [fill(x, list(case.seqlens_k), lengths) for x in whole],
        arguments,
    )


def check(target: Target, case: Case, setup: Setup) -> None:
    inputs = problems.make_inputs(case, target.dtype)
    is_new = np.concatenate([np.arange(n) >= n - setup.seqlen_new for n in case.seqlens_k])
    given_q, given_k = inputs.q, inputs.k[is_new]
    rotary: dict[str, Any] = {}
    if setup.rotary_dim:
        padding = setup.leftpad or (0,) * case.batch
        lengths = zip(padding, case.seqlens_k, strict=True)
        positions = np.concatenate([p + np.arange(n - setup.seqlen_new, n) for p, n in lengths])
        angles = np.random.default_rng(3).uniform(-4, 4, (positions.max() + 9, setup.rotary_dim // 2))
        cos, sin = (oracle.round_to(table, target.dtype) for table in (np.cos(angles), np.sin(angles)))
        options: dict[str, Any] = {"interleaved": setup.interleaved, "dtype": np.float32}
        q, new_k = (
            oracle.round_to(oracle.rotate(x, positions, cos, sin, **options), target.dtype)
            for x in (given_q, given_k)
        )
        k = inputs.k.copy()
        k[is_new] = new_k
        inputs = dataclasses.replace(inputs, q=q, k=k)
        rotary = {
            "rotary_cos": target.array(cos),
            "rotary_sin": target.array(sin),
            "rotary_interleaved": setup.interleaved,
        }
    cache = make_cache(case, setup, [x[~is_new] for x in (inputs.k, inputs.v)], [inputs.k, inputs.v])
    caches = [target.array(x) for x in cache.before]
    new = {"k": given_k, "v": inputs.v[is_new]} if setup.seqlen_new else {}
    q = target.array(calls.dense(case, given_q))
    out, lse = flash_attn_with_kvcache(
        q,
        *caches,
        **{name: target.array(calls.dense(case, x)) for name, x in new.items()},
        **{name: target.int32(x) for name, x in cache.arguments.items()},
        **scores_of(target, case, inputs),
        **rotary,
        num_splits=setup.num_splits,
        return_softmax_lse=True,
    )
    assert out.shape == (*q.shape[:-1], case.head_dim_v) and out.dtype == q.dtype
    assert lse.shape == (case.batch, case.num_q_heads, case.seqlens_q[0])
    for ours, expected in zip(caches, cache.after, strict=True):
        np.testing.assert_array_equal(target.library.to_float64(ours), expected)
    assert np.array_equal(target.library.to_float64(q), calls.dense(case, given_q))
    reference = problems.make_reference(case, inputs, target.dtype)
    reference.check(target.library.to_float64(out), from_their_lse(lse))


@st.composite
def calls_of_any_shape(draw: st.DrawFn) -> tuple[Case, Setup]:
    """All that is served, at once."""
    batch, seqlen_q = draw(st.integers(1, 4)), draw(st.sampled_from((1, 1, 2, 5, 20)))
    layout = draw(st.sampled_from(LAYOUTS))
    has_padding = layout != "pages" and draw(st.booleans())
    has_rotary = draw(st.booleans())
    seqlen_new = seqlen_q if has_rotary else draw(st.sampled_from((0, 1, seqlen_q, seqlen_q + 3)))
    causal, window_left = draw(st.booleans()), draw(st.sampled_from((-1, -1, 0, 7, 300)))
    window_right = draw(st.sampled_from((-1, -1, 0, 5, 300)))
    if has_rotary and seqlen_q > 1 and window_left < 0 and window_right < 0:
        causal = True
    num_kv_heads = draw(st.sampled_from((1, 2)))
    alibi = draw(st.sampled_from(("", "", "head", "batch")))
    each = st.integers(max(seqlen_q, seqlen_new), 90)
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    case = Case(
        f"drawn {draw(st.integers(0, 2**16))}",
        (seqlen_q,) * batch,
        tuple(draw(st.lists(each, min_size=batch, max_size=batch))),
        num_q_heads=num_kv_heads * draw(st.sampled_from((1, 3, 4))),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.sampled_from((0, 0, *HEAD_DIMS, 20))),
        page_size=draw(st.sampled_from(PAGE_SIZES)),
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0))),
        alibi=alibi,
        alibi_symmetric=alibi != "",
        softmax_scale=draw(st.sampled_from((None, 0.3))),
    )
    padding = st.lists(st.integers(0, 40), min_size=batch, max_size=batch)
    setup = Setup(
        layout,
        seqlen_new,
        tuple(draw(padding)) if has_padding else None,
        2 * draw(st.integers(1, head_dim // 2)) if has_rotary else 0,
        draw(st.booleans()),
        draw(st.sampled_from((0, 0, 1, 3))),
        draw(st.integers(0, 5)),
    )
    return case, setup


@every_target
@given(drawn=calls_of_any_shape())
def test_calls_of_any_shape(target: Target, drawn: tuple[Case, Setup]) -> None:
    case, setup = drawn
    check(target, case, setup)


DECODE = Case("kvcache_decode", (1, 1, 1), (40, 1, 70), num_q_heads=8, num_kv_heads=2, page_size=16)
CHUNK = Case("kvcache_chunk", (6, 6), (40, 6), num_q_heads=4, num_kv_heads=2, page_size=7)


@every_target
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [DECODE, CHUNK], ids=str)
def test_layouts(target: Target, case: Case, layout: str) -> None:
    check(target, case, Setup(layout, case.seqlens_q[0]))
    check(target, case, Setup(layout, case.seqlens_q[0], rotary_dim=32))
    check(target, case, Setup(layout))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_head_dim(device: str, layout: str) -> None:
    case = dataclasses.replace(CHUNK, head_dim=20)
    check(Target("torch", device, "float16"), case, Setup(layout, 6, rotary_dim=10))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_without_keys(device: str, layout: str) -> None:
    """The result of an empty sequence is 0, and its log-sum-exp inf."""
    case = Case("kvcache_empty", (2, 2), (0, 9), page_size=4)
    check(Target("torch", device, "float16"), case, Setup(layout))


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_to_the_right_of_one_query(device: str) -> None:
    """It sits at the last key, whatever `causal` and the right bound say."""
    for right in (-1, 0, 5):
        case = dataclasses.replace(DECODE, causal=False, window_left=9, window_right=right, alibi="head")
        check(Target("torch", device, "bfloat16"), case, Setup(seqlen_new=1))


def tensors(device: str = "cpu", seqlen_q: int = 1) -> dict[str, Any]:
    """A right call, with new tokens and a rotary embedding; in a dense cache of 32 slots."""
    torch.manual_seed(2)
    dtype = torch.float32 if device == "cpu" else torch.float16
    shapes = {
        "q": (2, seqlen_q, 4, 16),
        "k_cache": (3, 32, 2, 16),
        "v_cache": (3, 32, 2, 16),
        "k": (2, seqlen_q, 2, 16),
        "v": (2, seqlen_q, 2, 16),
        "rotary_cos": (32, 8),
        "rotary_sin": (32, 8),
    }
    arguments: dict[str, Any] = {
        name: torch.randn(shape, dtype=dtype).to(device) for name, shape in shapes.items()
    }
    return {**arguments, "cache_seqlens": torch.tensor([4, 9], dtype=torch.int32, device=device)}


def run(arguments: dict[str, Any], function: Any = flash_attn_with_kvcache) -> tuple[Any, ...]:
    """Results and caches of a call, with caches of its own."""
    copies = {x: arguments[x].clone() for x in ("k_cache", "v_cache")}
    results = function(**{**arguments, **copies})
    return (*(results if isinstance(results, tuple) else (results,)), *copies.values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_equals_octavo(device: str, seqlen_q: int) -> None:
    """Bit for bit, with the same pages."""
    x = tensors(device, seqlen_q)
    table = torch.tensor([[2], [0]], dtype=torch.int32, device=device)
    lens = x["cache_seqlens"] + seqlen_q
    cu_seqlens = seqlen_q * torch.arange(3, dtype=torch.int32, device=device)
    packed = {name: x[name].flatten(0, 1) for name in ("q", "k", "v")}
    pages = [x[name].clone() for name in ("k_cache", "v_cache")]
    rotary = {name: x[name] for name in ("rotary_cos", "rotary_sin")} | {"rotary_interleaved": True}
    arrays = (packed["k"], packed["v"], *pages, table, lens)
    rotated = octavo.append_kv(*arrays, cu_seqlens=cu_seqlens, q=packed["q"], **rotary)
    queries = {} if seqlen_q == 1 else {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": seqlen_q}
    options: dict[str, Any] = {"softmax_scale": 0.3, "softcap": 2.0}
    expected = octavo.paged_attention(rotated, *pages, table, lens, window_left=8, **queries, **options)
    for where in ({"cache_batch_idx": table[:, 0]}, {"block_table": table}):
        out, *caches = run({**x, **where, "causal": True, "window_size": (8, -1), **options})
        assert torch.equal(out.flatten(0, 1), expected) and all(map(torch.equal, caches, pages))


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_as_a_number_or_none(device: str) -> None:
    x = tensors(device)
    del x["rotary_cos"], x["rotary_sin"]
    as_tensor = run({**x, "cache_seqlens": torch.tensor([7, 7], dtype=torch.int32, device=device)})
    assert all(map(torch.equal, run({**x, "cache_seqlens": 7}), as_tensor))
    whole = {name: x[name] for name in ("q", "k_cache", "v_cache")}
    everything = run({**whole, "cache_seqlens": 32})
    assert all(map(torch.equal, run(whole), everything))
    table = torch.tensor([[1, 0], [2, 1]], dtype=torch.int32, device=device)
    in_pages = run({**whole, "block_table": table, "cache_seqlens": 64})
    assert all(map(torch.equal, run({**whole, "block_table": table}), in_pages))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_new", [False, True])
def test_integers_of_any_strides(device: str, has_new: bool) -> None:
    x = tensors(device)
    if not has_new:
        x = {name: x[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens")}
    table = torch.tensor([[2, 1], [0, 1]], dtype=torch.int32, device=device)
    for where in ({"block_table": table}, {"cache_batch_idx": table[:, 0].contiguous()}):
        apart = {name: torch.stack([y, y], -1)[..., 0] for name, y in where.items()}
        lens = torch.stack([x["cache_seqlens"]] * 2, 1)[:, 0]
        expected, actual = run({**x, **where}), run({**x, **apart, "cache_seqlens": lens})
        assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cache_between_other_things(device: str) -> None:
    """Rows at any stride, as of one array of keys and values by layer."""
    x = tensors(device, 3)
    expected = run({**x, "causal": True})
    memory = torch.zeros(3, 32, 2, 2, 2, 16, device=device, dtype=x["q"].dtype)
    views = dict(zip(("k_cache", "v_cache"), memory[:, :, 1].unbind(2), strict=True))
    for name, view in views.items():
        view.copy_(x[name])
    out = flash_attn_with_kvcache(**{**x, **views, "causal": True})
    assert torch.equal(out, expected[0])
    assert torch.equal(views["k_cache"], expected[1]) and torch.equal(views["v_cache"], expected[2])
    assert not memory[:, :, 0].any()


def cache_step(leftpad: Any = None, **arguments: Any) -> Any:
    out, lse = flash_attn_with_kvcache(
        **arguments, cache_leftpad=leftpad, causal=True, return_softmax_lse=True
    )
    return out * 3, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(device: str, seqlen_q: int, backend: str) -> None:
    torch._dynamo.reset()
    x = tensors(device, seqlen_q)
    index = torch.tensor([2, 0], dtype=torch.int32, device=device)
    each: list[dict[str, Any]] = [{}, {"cache_batch_idx": index}, {"block_table": index[:, None]}]
    each += [{"cache_seqlens": 6}, {"leftpad": index}]
    for options in each:
        compiled = torch.compile(cache_step, fullgraph=True, backend=backend)
        expected, actual = (run({**x, **options}, function) for function in (cache_step, compiled))
        assert not torch.equal(expected[2], x["k_cache"])
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_nothing_waits_for_the_gpu(seqlen_q: int) -> None:
    x = {**tensors("cuda", seqlen_q), "leftpad": torch.tensor([1, 0], dtype=torch.int32, device="cuda")}
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache_step(**x)
        cache_step(**{**x, "cache_seqlens": 6})
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_cuda_graph(seqlen_q: int) -> None:
    """It follows lengths, rows and tokens."""
    x = tensors("cuda", seqlen_q)
    x |= {
        "cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32, device="cuda"),
        "leftpad": torch.tensor([1, 0], dtype=torch.int32, device="cuda"),
    }
    cache_step(**x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cache_step(**x)
    for step in range(3):
        x["cache_seqlens"].add_(step * seqlen_q)
        x["cache_batch_idx"].add_(step).remainder_(3)
        x["q"].mul_(1.1)
        before = {name: x[name].clone() for name in ("k_cache", "v_cache")}
        expected = cache_step(**{**x, **before})
        graph.replay()
        for ours, theirs in zip((*captured, x["k_cache"]), (*expected, before["k_cache"]), strict=True):
            torch.testing.assert_close(ours, theirs)


def int32(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "q": ({"q": torch.zeros(2, 4, 16)}, r"q must be \[batch, seqlen_q, .*\] = \[any.*\]; got \[2, 4, 16\]"),
    "head_dim": (
        {"k_cache": torch.zeros(3, 32, 2, 8)},
        r"k_cache must be \[batch_cache, .* = \[.*, 16\]; got",
    ),
    "v_cache": (
        {"v_cache": torch.zeros(3, 31, 2, 16)},
        r"v_cache must be .* = \[3, 32, 2, any\]; got \[3, 31",
    ),
    "rows": (
        {"k_cache": torch.zeros(1, 32, 2, 16), "v_cache": torch.zeros(1, 32, 2, 16)},
        r"k_cache must have",
    ),
    "k": (
        {"k": torch.zeros(2, 1, 4, 16)},
        r"k must be \[batch, seqlen_new, .* = \[2, any, 2, 16\]; got \[2, 1",
    ),
    "v": ({"v": torch.zeros(2, 2, 2, 16)}, r"v must be .* = \[2, 1, 2, 16\]; got \[2, 2, 2, 16\]"),
    "v alone": ({"k": None}, "k and v must be given together; got v alone"),
    "k alone": ({"v": None}, "k and v must be given together; got k alone"),
    "no lengths": ({"cache_seqlens": None}, "k needs cache_seqlens; got none"),
    "lengths": ({"cache_seqlens": int32(1, 2, 3)}, r"cache_seqlens must be \[batch\] = \[2\]; got \[3\]"),
    "index": ({"cache_batch_idx": int32(1)}, r"cache_batch_idx must be \[batch\] = \[2\]; got \[1\]"),
    "lengths and leftpad": (
        {"cache_seqlens": int32(5, 32), "cache_leftpad": int32(0, 3)},
        r"sequence 1 must end within the 32 slots of its row of k_cache; its padding and tokens are 33",
    ),
    "leftpad below 0": (
        {"cache_seqlens": int32(5, 9), "cache_leftpad": int32(0, -1)},
        r"cache_leftpad\[1\] must be from 0 to the sequence's length \(10\); got -1",
    ),
    "leftpad": ({"cache_leftpad": int32(1)}, r"cache_leftpad must be \[batch\] = \[2\]; got \[1\]"),
    "table": (
        {"block_table": int32(1, 0)},
        r"block_table must be \[batch, max_pages\] = \[2, any\]; got \[2\]",
    ),
    "index and table": (
        {"block_table": int32(1, 0)[:, None], "cache_batch_idx": int32(1, 0)},
        "cache_batch_idx belongs to a dense cache",
    ),
    "leftpad and table": (
        {"block_table": int32(1, 0)[:, None], "cache_leftpad": int32(1, 0)},
        "cache_leftpad belongs to a dense cache",
    ),
    "leftpad in a part of a cache": (
        {"k_cache": torch.zeros(3, 40, 2, 16)[:, :32], "cache_leftpad": int32(1, 0)},
        "cache_leftpad needs a cache without gaps between its rows; k_cache has 32 slots at a stride of 32, "
        "and rows at one of 1280",
    ),
    "cosines alone": (
        {"rotary_sin": None},
        "rotary_cos and rotary_sin must be given together; got rotary_cos alone",
    ),
    "sines alone": (
        {"rotary_cos": None},
        "rotary_cos and rotary_sin must be given together; got rotary_sin alone",
    ),
    "rotary without k": ({"k": None, "v": None}, "rotary_cos needs k and v; got none"),
    "rotary of other queries": (
        {"q": torch.zeros(2, 3, 4, 16)},
        "rotary_cos needs as many queries as new tokens; got 3 in q, 1 in k",
    ),
    "rotary of one position": (
        {"q": torch.zeros(2, 3, 4, 16), "k": torch.zeros(2, 3, 2, 16), "v": torch.zeros(2, 3, 2, 16)},
        "rotary_cos needs causal=True or a window .*; got 3 in q",
    ),
    "window of one number": ({"window_size": 4}, r"window_size must be \(left, right\); got 4"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_refusals(refusal: tuple[dict[str, Any], str]) -> None:
    """Before anything is written."""
    replaced, message = refusal
    arguments = {**tensors(), **replaced}
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    with pytest.raises(ValueError, match=f"^flash_attn_with_kvcache: {message}"):
        flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(arguments[name], x) for name, x in before.items())


@pytest.mark.parametrize("name", ["cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"])
def test_other_integers_are_refused(name: str) -> None:
    value = torch.tensor([[1], [0]]) if name == "block_table" else torch.tensor([1, 0])
    with pytest.raises(TypeError, match=f"flash_attn_with_kvcache: {name} must be int32; got int64"):
        flash_attn_with_kvcache(**{**tensors(), name: value})


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_gradients_are_refused(name: str) -> None:
    arguments = tensors()
    arguments[name].requires_grad_()
    message = f"flash_attn_with_kvcache: {name} requires grad, and this call has no backward"
    with pytest.raises(TypeError, match=message):
        flash_attn_with_kvcache(**arguments)
    with torch.no_grad():
        assert not flash_attn_with_kvcache(**arguments).requires_grad


QUERIES_OF_MORE_TOKENS: list[tuple[dict[str, Any], int]] = [
    ({"causal": True}, 8),
    ({"window_size": (3, 3)}, 8),
    ({"alibi_slopes": torch.ones(4)}, 8),
    ({"causal": True, "cache_leftpad": int32(2, 0)}, 6),
    ({"causal": True, "block_table": int32(1, 0)[:, None]}, 8),
]


@pytest.mark.parametrize(("options", "length"), QUERIES_OF_MORE_TOKENS)
def test_more_queries_than_tokens_are_refused_before_anything_is_written(
    options: dict[str, Any], length: int
) -> None:
    x = {**tensors(), "q": torch.zeros(2, 15, 4, 16), "rotary_cos": None, "rotary_sin": None}
    x |= {"cache_seqlens": 7, **options}
    before = {name: x[name].clone() for name in ("k_cache", "v_cache")}
    message = (
        rf"flash_attn_with_kvcache: sequence 0 must have as many tokens as queries \(15\), or none, under a "
        rf"causal mask, a window or ALiBi; with the new ones it has {length}$"
    )
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**x)
    assert all(torch.equal(x[name], y) for name, y in before.items())
    x |= {"causal": False, "window_size": (-1, -1), "alibi_slopes": None}
    flash_attn_with_kvcache(**x)  # every query sees all keys


def test_values_are_checked_on_the_cpu() -> None:
    """By the operators, in their words."""
    for replaced, message in (
        ({"cache_seqlens": 32}, r"append_kv: .*seq_lens\[0\]"),
        ({"cache_batch_idx": int32(0, 3)}, r"page_table\[1, 0\]"),
        ({"num_splits": 2000}, r"num_splits must lie in \[1, 1024\]; got 2000"),
        (
            {
                "q": torch.zeros(2, 15, 4, 16),
                "rotary_cos": None,
                "rotary_sin": None,
                "cache_seqlens": 8,
                "k": None,
                "v": None,
                "causal": True,
            },
            r"paged_attention: seq_lens\[0\] \(8\) counts the new tokens and must be .* at least .* \(15\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            flash_attn_with_kvcache(**{**tensors(), **replaced})
