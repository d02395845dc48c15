"""octavo.torch: the operators inside PyTorch's dispatcher and compilers."""

import inspect

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.library import opcheck  # noqa: E402

import octavo  # noqa: E402
import octavo.torch  # noqa: E402

OPERATORS = torch.ops.octavo
NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM = 6, 16, 2, 16
PAGE_TABLE = torch.tensor([[4, 1, -1], [0, 3, 5]], dtype=torch.int32)
SHARING_TABLE = torch.tensor([[4, 1, -1], [4, 3, 5]], dtype=torch.int32)
SEQ_LENS = torch.tensor([20, 41], dtype=torch.int32)
CU_SEQLENS = torch.tensor([0, 3, 8], dtype=torch.int32)
CHOSEN_PAGES = torch.tensor([[[0, 1], [1, -1]], [[0, 2], [1, 2]]], dtype=torch.int32)


def normal(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=generator).to(dtype)


def make_cache():
    """Views of one tensor, as many engines have them."""
    return normal(2, NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM).unbind()


def make_calls():
    """Every operator, with the arguments that change what it takes and returns."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    prefixes = torch.tensor([2, 0], dtype=torch.int32)
    tree = octavo.tree_mask(torch.tensor([-1, 0, 0, -1, 0, 1, 1, -1]))
    ranges = {
        "bidirectional_ranges": torch.tensor([[[0, 3], [4, 9]], [[1, 6], [0, 0]]], dtype=torch.int32),
        "window_left": 2,
        "ranges_keep_window_left": True,
    }
    dense = (normal(2, 5, 4, HEAD_DIM), *(normal(2, 9, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)))
    packed = (normal(8, 4, HEAD_DIM), *(normal(8, NUM_KV_HEADS, HEAD_DIM) for _ in range(2)))
    lengths = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS, "max_seqlen_q": 5, "max_seqlen_k": 5}
    cache = make_cache()
    one_each = (normal(2, 4, HEAD_DIM), *cache, PAGE_TABLE, SEQ_LENS)
    many_each = (normal(8, 4, HEAD_DIM), *cache, PAGE_TABLE, SEQ_LENS)
    sharing = (normal(2, 4, HEAD_DIM), *cache, SHARING_TABLE, SEQ_LENS)
    state = (normal(2, 4, HEAD_DIM), normal(2, 4))
    new = (normal(8, NUM_KV_HEADS, HEAD_DIM), normal(8, NUM_KV_HEADS, HEAD_DIM))
    copies = torch.tensor([[4, 2]], dtype=torch.int32)
    rotary = {"rotary_cos": normal(60, HEAD_DIM // 4), "rotary_sin": normal(60, HEAD_DIM // 4) + 1}
    queries = {"cu_seqlens": CU_SEQLENS, "q": normal(8, 4, HEAD_DIM)}
    masked = {"window_left": 7, "softcap": 5.0, "alibi_slopes": slopes, "prefix_lens": prefixes}
    symmetric = {"alibi_slopes": slopes, "alibi_symmetric": True}
    dropout = {"dropout_p": 0.25, "dropout_seed": 2**40, "dropout_offset": 8}

    def backward(arrays, options):
        """The arguments of attention_backward after this call of attention."""
        results = octavo.attention(*arrays, return_lse=True, **options)
        return normal(*arrays[0].shape) - 1, *arrays, *results

    latent = (normal(2, 4, 576), normal(6, PAGE_SIZE, 576), PAGE_TABLE, SEQ_LENS)
    return {
        "attention": [
            (dense, {}),
            (dense, {"causal": True, "return_lse": True, "softmax_scale": 0.3, "window_right": 2, **masked}),
            (packed, {"return_lse": True, **lengths}),
            (dense, {"out": torch.empty_like(dense[0])}),
            (dense, {"out": torch.empty_like(dense[0]), "return_lse": True}),
            (dense, dropout),
            (dense, {"causal": True, "window_left": 3, "sinks": slopes + 1, "return_lse": True}),
            (packed, {**symmetric, **lengths}),
            (dense, {"causal": True, "return_lse": True, **ranges}),
        ],
        "attention_backward": [
            (backward(dense, {}), {}),
            (
                backward(dense, {"causal": True, **masked}),
                {"dlse": normal(2, 5, 4), "causal": True, "return_dalibi": True, **masked},
            ),
            (backward(packed, {**lengths, **dropout}), {"deterministic": True, **lengths, **dropout}),
            (backward(dense, {"sinks": slopes}), {"sinks": slopes, "return_dsinks": True}),
            (backward(dense, symmetric), {"return_dalibi": True, **symmetric}),
            (backward(packed, {"causal": True, **lengths, **ranges}), {"causal": True, **lengths, **ranges}),
            (
                backward(packed, {**lengths, "alibi_slopes": slopes, "sinks": 2 * slopes}),
                {
                    "alibi_slopes": slopes,
                    "sinks": 2 * slopes,
                    "return_dalibi": True,
                    "return_dsinks": True,
                    **lengths,
                },
            ),
        ],
        "paged_attention": [
            (one_each, {}),
            (one_each, {"return_lse": True, "num_splits": 2, "k_scale": 0.5, "v_scale": 2.0, **masked}),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "max_seqlen_q": 5, "causal": False, "return_lse": True}),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "causal": False, "window_left": 3, "window_right": 1}),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "attention_chunk": 4}),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "return_lse": True, **ranges}),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "causal": False, **symmetric}),
            (one_each, {"out": torch.empty_like(one_each[0])}),
            (one_each, {"out": torch.empty_like(one_each[0]), "return_lse": True}),
            (sharing, {"shared_prefix_len": PAGE_SIZE, "return_lse": True}),
            (one_each, {"window_left": 7, "sinks": slopes + 1, "return_lse": True}),
            (
                many_each,
                {"cu_seqlens_q": CU_SEQLENS, "max_seqlen_q": 5, "tree_mask": tree, "return_lse": True},
            ),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "tree_mask": normal(8, 5) > 0}),
            (one_each, {"chosen_pages": CHOSEN_PAGES, "window_left": 30, "return_lse": True}),
            (many_each, {"cu_seqlens_q": CU_SEQLENS, "max_seqlen_q": 5, "chosen_pages": CHOSEN_PAGES[:, 0]}),
        ],
        "merge_states": [((*state, state[0] + 1, state[1] - 1), {})],
        "linear": [
            ((normal(3, 16), normal(6, 16)), {}),
            (
                (normal(3, 16), normal(6, 16), normal(6)),
                {"activation": "silu_gate", "residual": normal(3, 3), "static_weight": True},
            ),
            ((normal(3, 16), normal(6, 16)), {"out": torch.empty(3, 6), "activation": "gelu"}),
        ],
        "append_kv": [
            ((*(x[:2] for x in new), *make_cache(), PAGE_TABLE, SEQ_LENS), {}),
            ((*new, *make_cache(), PAGE_TABLE, SEQ_LENS), {"cu_seqlens": CU_SEQLENS, "k_scale": 2.0}),
            ((*new, *make_cache(), PAGE_TABLE, SEQ_LENS), {"cu_seqlens": CU_SEQLENS, **rotary}),
            ((*new, *make_cache(), PAGE_TABLE, SEQ_LENS), {**rotary, **queries}),
            (
                (*new, *make_cache(), PAGE_TABLE, SEQ_LENS),
                {**rotary, **queries, "rotary_interleaved": True, "q_out": torch.empty(8, 4, HEAD_DIM)},
            ),
        ],
        "copy_pages": [((*make_cache(), copies), {})],
        "latent_attention": [
            (latent, {"softmax_scale": 0.1}),
            (latent, {"softmax_scale": 0.1, "num_splits": 2, "return_lse": True}),
            (latent, {"softmax_scale": 0.1, "out": torch.empty(2, 4, 512)}),
            (latent, {"softmax_scale": 0.1, "out": torch.empty(2, 4, 512), "return_lse": True}),
        ],
        "rms_norm": [
            ((normal(2, 5, 64), normal(64)), {}),
            ((normal(2, 5, 64), normal(64)), {"eps": 0.01, "residual": normal(2, 5, 64) + 1}),
            ((normal(2, 5, 64), normal(64)), {"out": torch.empty(2, 5, 64)}),
            (
                (normal(2, 5, 64), normal(64)),
                {
                    "residual": normal(2, 5, 64) + 1,
                    "out": torch.empty(2, 5, 64),
                    "residual_out": torch.empty(2, 5, 64),
                },
            ),
        ],
        "copy_pages_to": [
            ((*make_cache(), copies), dict(zip(("to_k_pages", "to_v_pages"), make_cache(), strict=True)))
        ],
    }


CALLS = [
    pytest.param(name, args, kwargs, id=f"{name}-{index}")
    for name, calls in make_calls().items()
    for index, (args, kwargs) in enumerate(calls)
]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def place(device, args, kwargs):
    """The arguments on a device; on a GPU with float16 data, as its kernels want."""

    def move(x):
        if not isinstance(x, torch.Tensor):
            return x
        is_statistic = x.ndim <= 2 or x.shape[-1] == 4  # slopes, a log-sum-exp of four heads
        is_data = x.dtype == torch.float32 and not is_statistic
        return x.to(device, torch.float16 if is_data and device == "cuda" else x.dtype)

    return tuple(map(move, args)), {key: move(x) for key, x in kwargs.items()}


RESULT_OF_INPUT = {"append_kv": ("q",), "rms_norm": ("residual",)}
"""The inputs with which an operator has one more result."""


def operator_call(name, args, kwargs):
    """The operator that a call of octavo.torch's function ends in, and its arguments."""
    options = dict(kwargs)
    outs = [options.pop(result) for result in ("out", "residual_out", "q_out") if result in options]
    returned = [kind for kind in ("lse", "dalibi", "dsinks") if options.pop(f"return_{kind}", False)]
    returned += [given for given in RESULT_OF_INPUT.get(name, ()) if given in options]
    if "dsinks" in returned:  # whose operator is told whether slopes have a gradient, too
        args, returned = ("dalibi" in returned, *args), ["dsinks"]
    overload = "_".join(["out"] * bool(outs) + returned)
    operator = getattr(getattr(OPERATORS, name), overload or "default")
    if outs:
        names = [argument.name for argument in operator._schema.arguments]
        position = min(names.index(result) for result in ("out", "q_out") if result in names)
        args = (*args[:position], *outs, *args[position:])
    return operator, args, options


def test_every_operator_is_called():
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("octavo::")]
    called = {operator_call(*call.values)[0]._name for call in CALLS}
    called.add("octavo::attention.deterministic")  # by test_flash_attn_training.py
    assert sorted(names) == sorted(called)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_opcheck(name, args, kwargs, device):
    """Torch's own checks: the schema tells what is written, shapes and dtypes are those of the results, and
    the graph that a compiler makes computes the same."""
    opcheck(*operator_call(name, *place(device, args, kwargs)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_equals_octavo(name, args, kwargs, device):
    """Eager and compiled, results and what was written, bit for bit."""
    name = name.removesuffix("_to")
    args, kwargs = place(device, args, kwargs)

    def results(function):
        torch._dynamo.reset()
        ours = [x.clone() for x in args]
        options = {key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in kwargs.items()}
        returned = function(*ours, **options)
        returned = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
        return [*returned, *ours, *(x for x in options.values() if isinstance(x, torch.Tensor))]

    expected = results(getattr(octavo, name))
    operator = getattr(octavo.torch, name)
    for function in (operator, torch.compile(operator, fullgraph=True)):
        for x, y in zip(results(function), expected, strict=True):
            assert x.dtype == y.dtype and x.stride() == y.stride() and torch.equal(x, y)


def test_signatures_are_those_of_octavo():
    for name in octavo.torch.__all__:
        theirs, ours = getattr(octavo, name), getattr(octavo.torch, name)
        assert inspect.signature(ours) == inspect.signature(theirs) and ours.__doc__ == theirs.__doc__


def decode_step(q, k, v, cache, page_table, seq_lens):
    """Writes through views of the cache, then reads them: a compiler must keep the order."""
    k_pages, v_pages = cache.unbind()
    octavo.torch.append_kv(k * 2, v, k_pages, v_pages, page_table, seq_lens)
    a, lse_a = octavo.torch.paged_attention(q + 1, k_pages, v_pages, page_table, seq_lens, return_lse=True)
    b, lse_b = octavo.torch.paged_attention(q, k_pages, v_pages, page_table, seq_lens, return_lse=True)
    return octavo.torch.merge_states(a, lse_a, b, lse_b)[0] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiled_decode(dtype):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(decode_step, fullgraph=True, backend=counter)
    for batch in (2, 3, 4, 5):
        cache = torch.stack(make_cache()).to(dtype)
        table = torch.arange(batch, dtype=torch.int32)[:, None]
        lens = torch.arange(3, 3 + batch, dtype=torch.int32)
        arrays = [normal(batch, heads, HEAD_DIM, dtype=dtype) for heads in (4, NUM_KV_HEADS, NUM_KV_HEADS)]
        caches = cache.clone(), cache.clone()
        expected = decode_step(*arrays, caches[0], table, lens)
        actual = compiled(*arrays, caches[1], table, lens)
        assert not torch.equal(caches[0], cache)
        assert torch.equal(caches[0], caches[1])
        # Arithmetic fused around the operators may round 16-bit values less often.
        torch.testing.assert_close(actual, expected)
    assert counter.frame_count == 2  # the batch is dynamic from the second on


@pytest.mark.gpu
def test_cuda_graphs_of_a_compiled_step():
    """The compiled step is one CUDA graph, and follows lengths and pages as they change."""
    torch._dynamo.reset()

    def step(q, k_pages, v_pages, page_table, seq_lens):
        return octavo.torch.paged_attention(q + 1, k_pages, v_pages, page_table, seq_lens) * 2

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    pages = [x.half().cuda() for x in make_cache()]
    for repeat in range(5):
        q = normal(2, 4, HEAD_DIM, dtype=torch.float16).cuda() + repeat
        table, lens = PAGE_TABLE.roll(repeat, 0).cuda(), (SEQ_LENS.roll(repeat, 0) - repeat).cuda()
        actual = compiled(q, *pages, table, lens)
        torch.testing.assert_close(actual, step(q, *pages, table, lens), rtol=2e-3, atol=2e-3)


VIEWS_OF_RESULTS = {
    "flatten": lambda out, lse: out.flatten(2),
    "select": lambda out, lse: out[0],
    "transposed lse": lambda out, lse: lse.transpose(1, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("view", VIEWS_OF_RESULTS.values(), ids=VIEWS_OF_RESULTS)
def test_cuda_graphs_take_back_what_is_still_in_use(view):
    """A view of a result is alive when the next call of the compiled function reuses its memory."""
    torch._dynamo.reset()

    def step(q, k, v):
        return view(*octavo.torch.attention(q, k, v, return_lse=True))

    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    args, _ = place("cuda", *make_calls()["attention"][0])
    kept = None
    for repeat in range(5):
        args = (args[0] + repeat, *args[1:])
        kept = compiled(*args)
        torch.testing.assert_close(kept, step(*args), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_results_are_in_memory_of_torch(name, args, kwargs, device):
    """Its allocator's, as it can give that back, resize it, or let a CUDA graph take it over."""
    operator, args, options = operator_call(name, *place(device, args, kwargs))
    returned = operator(*args, **options)
    if returned is None:
        return  # the results lie where the call says
    with torch.inference_mode():
        also = operator(*args, **options)
    for result in (returned, also):
        for x in result if isinstance(result, tuple) else (result,):
            assert x.untyped_storage().resizable() and x.is_contiguous()


def test_compiled_rotary_in_place():
    """Queries and keys are views of one projection."""
    torch._dynamo.reset()
    projection, (k_pages, v_pages) = normal(2, 8, HEAD_DIM), make_cache()
    cos, sin = normal(60, HEAD_DIM // 2), normal(60, HEAD_DIM // 2) + 1

    def step(projection, k_pages, v_pages):
        q, k, v = (projection * 2).split([4, NUM_KV_HEADS, NUM_KV_HEADS], dim=1)
        arrays = (k, v, k_pages, v_pages, PAGE_TABLE, SEQ_LENS)
        rotated = octavo.torch.append_kv(*arrays, rotary_cos=cos, rotary_sin=sin, q=q, q_out=q)
        out = octavo.torch.paged_attention(rotated, k_pages, v_pages, PAGE_TABLE, SEQ_LENS)
        return out, octavo.torch.append_kv(*arrays, rotary_cos=cos, rotary_sin=sin, q=rotated) * 3

    caches = (k_pages.clone(), v_pages.clone())
    expected = step(projection, k_pages, v_pages)
    actual = torch.compile(step, fullgraph=True)(projection, *caches)
    for ours, theirs in zip((*actual, *caches), (*expected, k_pages, v_pages), strict=True):
        torch.testing.assert_close(ours, theirs)


def pre_norm(x, residual, weight):
    """What a layer does, over its inputs or beside them."""
    x = x * 2
    a = octavo.torch.rms_norm(x, weight, 1e-5, residual, out=x, residual_out=residual)
    b = octavo.torch.rms_norm(a[0] + 1, weight, 1e-5, a[1], residual_out=a[1])
    c = octavo.torch.rms_norm(b[0] + 1, weight, 1e-5, b[1], out=a[0])
    return octavo.torch.rms_norm(c[1], weight), *c


def test_compiled_norms_in_place():
    torch._dynamo.reset()
    weight, (x, residual) = normal(64), normal(2, 5, 64)
    y, h = residual.clone(), residual.clone()
    expected, actual = pre_norm(x, y, weight), torch.compile(pre_norm, fullgraph=True)(x, h, weight)
    assert torch.equal(y, h) and not torch.equal(y, residual)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    sum_of_three = 2 * x + residual
    torch.testing.assert_close(y, sum_of_three + 1 + octavo.rms_norm(sum_of_three, weight, 1e-5))


def test_results_are_contiguous():
    """Whatever the layout of q is."""
    q = normal(2, 4, 5, HEAD_DIM).transpose(1, 2)
    one = q[:, :1]  # strides mean nothing along its second axis
    k = normal(2, 9, NUM_KV_HEADS, HEAD_DIM)
    for x in (q, one, q[::2], q[:0]):
        out = octavo.torch.attention(x, k[: len(x)], k[: len(x)])
        assert out.stride() == torch.empty(out.shape).stride()
        assert torch.equal(out, octavo.attention(x, k[: len(x)], k[: len(x)]))


def test_exports():
    class Decode(torch.nn.Module):
        def forward(self, q, k_pages, v_pages, page_table, seq_lens):
            return octavo.torch.paged_attention(q, k_pages, v_pages, page_table, seq_lens, softcap=3.0)

    args = (normal(2, 4, HEAD_DIM), *make_cache(), PAGE_TABLE, SEQ_LENS)
    exported = torch.export.export(Decode(), args).module()
    assert torch.equal(exported(*args), octavo.paged_attention(*args, softcap=3.0))


def test_fake_tensors_run_nothing():
    """No data, shapes of any size: what a compiler sees."""
    with FakeTensorMode():
        q = torch.empty(1 << 40, 8, 128, dtype=torch.bfloat16)
        pages = torch.empty(1 << 30, 16, 2, 128, dtype=torch.bfloat16)
        table = torch.empty(1 << 40, 4096, dtype=torch.int32)
        lens = torch.empty(1 << 40, dtype=torch.int32)
        out, lse = octavo.torch.paged_attention(q, pages, pages, table, lens, return_lse=True)
        assert out.shape == q.shape and out.dtype == torch.bfloat16 and out.is_contiguous()
        assert lse.shape == q.shape[:-1] and lse.dtype == torch.float32
        assert octavo.torch.paged_attention(q, pages, pages, table, lens, out=out) is out
        merged, lse = octavo.torch.merge_states(out, lse, out, lse)
        assert merged.dtype == torch.bfloat16 and lse.dtype == torch.float32
        dense = torch.empty(2, 1 << 35, 8, 64, dtype=torch.float16).transpose(1, 2)
        assert octavo.torch.attention(dense, dense, dense).stride() == torch.empty(dense.shape).stride()


def test_gradients_are_refused():
    q, *rest = make_calls()["paged_attention"][0][0]
    weight = torch.ones((), requires_grad=True)

    def model(q, *rest):
        return octavo.torch.paged_attention(q * weight, *rest)

    compiled = torch.compile(model, fullgraph=True)
    message = r"paged_attention: q requires grad, and this call has no backward; use q\.detach"
    with pytest.raises(TypeError, match=message):
        model(q, *rest)
    with pytest.raises(Exception, match=message):
        compiled(q, *rest)
    with torch.no_grad():
        assert torch.equal(model(q, *rest), compiled(q, *rest))

    pages = make_cache()
    new = normal(2, NUM_KV_HEADS, HEAD_DIM).requires_grad_()
    before = [x.clone() for x in pages]
    with pytest.raises(TypeError, match="append_kv: v requires grad, and this call has no backward"):
        octavo.torch.append_kv(new.detach(), new, *pages, PAGE_TABLE, SEQ_LENS)
    assert all(map(torch.equal, pages, before))


@pytest.mark.parametrize(("name", "args", "kwargs"), CALLS)
def test_autograd_learns_what_was_written(name, args, kwargs):
    operator, args, options = operator_call(name, args, kwargs)
    names = [
        argument.name for argument in operator._schema.arguments if argument.is_out or argument.alias_info
    ]
    if not names:
        pytest.skip("writes to nothing")
    written = next((kwargs[key] for key in ("out", "to_k_pages") if key in kwargs), None)
    if written is None:
        written = args[0 if name == "copy_pages" else 2]
    weight = torch.ones((), requires_grad=True)
    loss = (written * weight).sum()
    operator(*args, **options)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_may_be_q():
    args, _ = make_calls()["paged_attention"][0]
    expected = octavo.paged_attention(*args)

    def step(q, *args):
        octavo.torch.paged_attention(q, *args, out=q)

    for function in (step, torch.compile(step, fullgraph=True)):
        q = args[0].clone()
        function(q, *args[1:])
        assert torch.equal(q, expected)


def test_errors_are_those_of_octavo():
    q, *rest = make_calls()["paged_attention"][0][0]
    message = r"paged_attention: num_q_heads \(3\) must be a multiple of num_kv_heads \(2\)"
    for function in (octavo.torch.paged_attention, torch.compile(octavo.torch.paged_attention)):
        with pytest.raises(ValueError, match=message):
            function(q[:, :3].contiguous(), *rest)
    with pytest.raises(ValueError, match=r"copy_pages: stream must be None in octavo\.torch"):
        octavo.torch.copy_pages(*make_cache(), torch.empty(0, 2, dtype=torch.int32), stream=7)


@pytest.mark.parametrize("name", octavo.torch.__all__)
def test_octavos_own_functions_under_a_compiler(name):
    """They break the graph; where it must not break, the error names what does not."""
    args, options = make_calls()[name][0]

    def run(*args):
        return getattr(octavo, name)(*args, **options)

    torch._dynamo.reset()
    torch.compile(run, backend="eager")(*args)
    torch._dynamo.reset()
    if "reason" not in inspect.signature(torch.compiler.disable).parameters:
        pytest.skip("this PyTorch gives no reasons")
    message = rf"octavo\.torch\.{name} takes the same arguments"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(run, backend="eager", fullgraph=True)(*args)
