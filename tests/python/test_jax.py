"""octavo.jax: the operators inside JAX programs.

Mapped axes: test_jax_vmap.py. Gradients: test_jax_gradients.py.
"""

from __future__ import annotations

import inspect
import re
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import octavo  # noqa: E402
import octavo.jax  # noqa: E402
from support.jax_calls import (  # noqa: E402
    CALLS,
    HEAD_DIM,
    NUM_KV_HEADS,
    PAGE_TABLE,
    RUNTIME_ERRORS,
    SEQ_LENS,
    WRITTEN,
    assert_same,
    cache,
    make_calls,
    normal,
    results_of_octavo,
    run,
)


def targets(*dtypes):
    return [
        *(pytest.param(("cpu", dtype), id=f"cpu-{dtype}") for dtype in dtypes),
        *(
            pytest.param(("cuda", dtype), id=f"cuda-{dtype}", marks=pytest.mark.gpu)
            for dtype in dtypes
            if dtype != "float32"
        ),
    ]


@pytest.fixture(params=targets("float32", "float16", "bfloat16"))
def dtype(request):
    """The dtype of the arrays; the test runs on this device."""
    device, dtype = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield dtype


@pytest.fixture(params=targets("float32", "bfloat16"))
def one_dtype(request):
    """The same where one 16-bit type will do."""
    device, dtype = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield dtype


@pytest.mark.parametrize("call", CALLS)
def test_equals_octavo(call, dtype):
    """Bit for bit, alone and inside a program; what was given is as before."""
    name, arrays, options = make_calls(dtype)[call]
    expected = results_of_octavo(name, arrays, options)
    before = {key: np.array(x) for key, x in arrays.items()}
    assert_same(run(name, arrays, options), expected)
    assert_same(jax.jit(lambda arrays: run(name, arrays, options))(arrays), expected)
    assert all(np.array(x).tobytes() == before[key].tobytes() for key, x in arrays.items())


# Results are values and streams XLA's.
NOT_IN_JAX = ("stream", "dq", "dk", "dv", "residual_out", "q_out", "plan")
ONLY_IN_JAX = ("deterministic_backward",)  # what PyTorch has a switch for


def test_signatures_are_those_of_octavo():
    for name in octavo.jax.__all__:
        if inspect.isclass(getattr(octavo.jax, name)):
            continue  # KVCache, which has no pages in host memory there
        theirs = dict(inspect.signature(getattr(octavo, name)).parameters)
        ours = inspect.signature(getattr(octavo.jax, name)).parameters
        left_out = NOT_IN_JAX if name == "attention_backward" else ("out", *NOT_IN_JAX)
        expected = [(p.name, p.kind, p.default) for key, p in theirs.items() if key not in left_out]
        common = [(p.name, p.kind, p.default) for key, p in ours.items() if key not in ONLY_IN_JAX]
        assert common == expected
        documented = re.findall(r"^    (\w+): ", inspect.getdoc(getattr(octavo.jax, name)), re.MULTILINE)
        assert documented[: len(ours)] == list(ours)


# In place


@pytest.mark.parametrize("name", WRITTEN)
def test_a_donated_cache_is_written_in_place(name, one_dtype):
    arrays = next(arrays for called, arrays, _ in make_calls(one_dtype) if called == name)
    expected = results_of_octavo(name, arrays, {})
    given = {key: arrays[key] + 0 for key in WRITTEN[name]}
    addresses = [x.unsafe_buffer_pointer() for x in given.values()]

    @partial(jax.jit, donate_argnums=0)
    def write(written, rest):
        return run(name, {**rest, **written}, {})

    written = write(given, {key: x for key, x in arrays.items() if key not in given})
    assert_same(written, expected)
    assert [x.unsafe_buffer_pointer() for x in written] == addresses
    assert all(x.is_deleted() for x in given.values())


def test_one_array_for_keys_and_values():
    """XLA has to copy then: each result is an array of its own."""
    _, arrays, _ = make_calls()[8]
    k_pages, v_pages = octavo.jax.append_kv(**{**arrays, "v_pages": arrays["k_pages"]})
    expected = results_of_octavo("append_kv", {**arrays, "v_pages": arrays["k_pages"] + 0}, {})
    assert_same((k_pages, v_pages), expected)


def numpy_decode(steps, k_pages, v_pages, page_table, seq_lens, q, k, v):
    outs = []
    for i in range(steps):
        seq_lens = seq_lens + 1
        octavo.append_kv(k[i], v[i], k_pages, v_pages, page_table, seq_lens)
        outs.append(octavo.paged_attention(q[i], k_pages, v_pages, page_table, seq_lens))
    return np.stack(outs), k_pages, v_pages


def decode_inputs(steps, dtype):
    """A cache for `steps` more tokens, and the tokens."""
    k_pages, v_pages = (x + 0 for x in cache(dtype).values())  # XLA's own memory
    q = normal(steps, 2, 4, HEAD_DIM, dtype=dtype)
    k, v = (normal(steps, 2, NUM_KV_HEADS, HEAD_DIM, dtype=dtype, seed=seed) for seed in (1, 2))
    table = np.array([[4, 1, 2], [0, 3, 5]], np.int32)
    return k_pages, v_pages, jnp.asarray(table), jnp.asarray([15, 20], jnp.int32), q, k, v


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_decode_loop(loop, one_dtype):
    """A program that decodes by itself equals NumPy's loop, and moves no cache."""
    steps = 6
    inputs = decode_inputs(steps, one_dtype)

    def step(caches, page_table, seq_lens, q, k, v):
        caches = octavo.jax.append_kv(k, v, *caches, page_table, seq_lens)
        return caches, octavo.jax.paged_attention(q, *caches, page_table, seq_lens)

    @partial(jax.jit, donate_argnums=(0, 1))
    def with_scan(k_pages, v_pages, page_table, seq_lens, q, k, v):
        def body(carry, new):
            caches, lens = carry
            caches, out = step(caches, page_table, lens + 1, *new)
            return (caches, lens + 1), out

        (caches, _), outs = jax.lax.scan(body, ((k_pages, v_pages), seq_lens), (q, k, v))
        return outs, *caches

    @partial(jax.jit, donate_argnums=(0, 1))
    def with_while_loop(k_pages, v_pages, page_table, seq_lens, q, k, v):
        def body(state):
            i, caches, outs = state
            caches, out = step(caches, page_table, seq_lens + 1 + i, q[i], k[i], v[i])
            return i + 1, caches, outs.at[i].set(out)

        state = (jnp.int32(0), (k_pages, v_pages), jnp.zeros_like(q))
        _, caches, outs = jax.lax.while_loop(lambda state: state[0] < steps, body, state)
        return outs, *caches

    expected = numpy_decode(steps, *(np.array(x) for x in inputs))
    addresses = {x.unsafe_buffer_pointer() for x in inputs[:2]}
    program = {"scan": with_scan, "while_loop": with_while_loop}[loop].lower(*inputs).compile()
    outs, *caches = program(*inputs)
    for x, y in zip(caches, expected[1:], strict=True):
        assert np.array(x).tobytes() == y.tobytes()
    if one_dtype == "float32" or jax.__version_info__ >= (
        0,
        6,
    ):  # older XLA widens a loop's bfloat16 on the CPU
        shape = f"[{','.join(map(str, inputs[0].shape))}]"
        assert not [line for line in program.as_text().splitlines() if shape in line and " copy(" in line]
        assert {x.unsafe_buffer_pointer() for x in caches} == addresses
    tolerance = 2e-5 if one_dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        np.array(outs, np.float32), np.array(expected[0], np.float32), rtol=tolerance, atol=tolerance
    )


@pytest.mark.gpu
def test_replayed_programs():
    """XLA makes CUDA graphs of programs of several calls, and replays them: other lengths, other buffers."""

    def layers(caches, q, new, page_table, seq_lens):
        written = []
        for i, (k_pages, v_pages) in enumerate(caches):
            pages = octavo.jax.append_kv(new, new, k_pages, v_pages, page_table, seq_lens)
            options = {"num_splits": 2} if i == 1 else {"batch_invariant": i == 2}
            q = octavo.jax.paged_attention(q, *pages, page_table, seq_lens, **options)
            written.append(pages)
        return tuple(written), q

    program = jax.jit(layers, donate_argnums=0)
    with jax.default_device(jax.devices("cuda")[0]):
        caches = tuple(tuple(cache("bfloat16", seed).values()) for seed in range(6))
        expected = caches
        for step in range(12):
            q = normal(2, 4, HEAD_DIM, dtype="bfloat16", seed=step)
            new = normal(2, NUM_KV_HEADS, HEAD_DIM, dtype="bfloat16", seed=step)
            arrays = q, new, jnp.asarray(PAGE_TABLE), jnp.asarray(SEQ_LENS - step)
            expected, wanted = layers(expected, *arrays)
            if step % 5 == 0:
                caches = jax.tree.map(lambda x: x + 0, caches)
            caches, out = program(caches, *arrays)
            assert_same((out, *jax.tree.leaves(caches)), (wanted, *jax.tree.leaves(expected)))


def test_a_donated_cache_is_copied_to_in_place(one_dtype):
    """From one with another number of pages, which stays as it is."""
    k_pages, v_pages = cache(one_dtype).values()
    to = {name: x[:4] + 0 for name, x in cache(one_dtype, seed=5).items()}
    copies = jnp.array([[4, 2], [0, 3]], jnp.int32)
    before = [np.array(x) for x in (k_pages, v_pages)]
    expected = [x.at[copies[:, 1]].set(y[copies[:, 0]]) for x, y in zip(to.values(), before, strict=True)]
    addresses = [x.unsafe_buffer_pointer() for x in to.values()]

    @partial(jax.jit, donate_argnums=0)
    def copy(to, k_pages, v_pages):
        to = {f"to_{name}": x for name, x in to.items()}
        return octavo.jax.copy_pages(k_pages, v_pages, copies, **to)

    copied = copy(to, k_pages, v_pages)
    assert_same(copied, expected)
    assert [x.unsafe_buffer_pointer() for x in copied] == addresses
    assert [np.array(x).tobytes() for x in (k_pages, v_pages)] == [x.tobytes() for x in before]


# What is refused


def test_other_caches_that_do_not_fit():
    pages, copies = cache(), jnp.array([[4, 2]], jnp.int32)
    with pytest.raises(ValueError, match=r"copy_pages: to_k_pages and to_v_pages must be given together"):
        octavo.jax.copy_pages(**pages, copies=copies, to_k_pages=pages["k_pages"])
    with pytest.raises(ValueError, match=r"copy_pages: to_k_scales belong to another cache"):
        octavo.jax.copy_pages(**pages, copies=copies, to_k_scales=jnp.ones((NUM_KV_HEADS,)))
    smaller = {f"to_{name}": x[:2] for name, x in pages.items()}
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = {name: np.array(x) for name, x in {**pages, **smaller, "copies": copies}.items()}
        message = r"copy_pages: copies\[0, 1\] must lie in \[0, num_pages = 2\)"
        with pytest.raises(RUNTIME_ERRORS, match=message):
            jax.block_until_ready(octavo.jax.copy_pages(**arrays))


def test_wrong_shapes_and_numbers_are_found_by_the_trace():
    q, k, v = (make_calls()[0][1][name] for name in "qkv")
    attention = octavo.jax.attention
    errors = [
        (
            lambda: attention(q[:, :, :3], k, v),
            ValueError,
            r"num_q_heads \(3\) must be a multiple of num_kv_heads",
        ),
        (
            lambda: attention(q, k, v[:1]),
            ValueError,
            r"v must have the shape of k \[2, 9, 2, 16\], but for head_dim; got \[1, 9",
        ),
        (lambda: attention(q, k, v, window_left=-2), ValueError, r"window_left must be -1 .* got -2"),
        (
            lambda: attention(q, k, v, softmax_scale=np.nan),
            ValueError,
            "softmax_scale must be finite in float32; got nan",
        ),
        (lambda: attention(q, k, v, window_left=1 << 70), ValueError, "window_left must fit in 64 bits"),
        (lambda: attention(q, k.astype("float16"), v), TypeError, "k must be float32 like q; got float16"),
        (
            lambda: attention(q.astype("int8"), k, v),
            TypeError,
            "q must be float32, float16 or bfloat16; got int8",
        ),
        (
            lambda: attention(q, k, v, dropout_p=1.0, dropout_seed=1),
            ValueError,
            r"dropout_p must lie in \[0, 1 - 2\^-17\); got 1",
        ),
        (lambda: attention(q, k, v, dropout_p=0.1), ValueError, r"dropout_p \(0.1\) needs a dropout_seed"),
        (lambda: attention(q, k, v, causal=1), TypeError, "causal must be a bool; got int"),
        (lambda: attention(q, k, v, softcap="1"), TypeError, "softcap must be a float; got str"),
        (lambda: attention(q, k, v, window_left=0.5), TypeError, "window_left must be a int; got float"),
        (lambda: attention(q[(None,) * 3], k, v), ValueError, "q must have at most 6 axes; got 7"),
    ]
    for call, kind, message in errors:
        for traced in (call, lambda call=call: jax.eval_shape(call)):
            with pytest.raises(kind, match=f"attention: {message}"):
                traced()


@pytest.mark.parametrize("name", ["attention", "paged_attention"])
@pytest.mark.parametrize("keyword", ["window", "out", "stream"])
def test_keywords_that_there_are_not(name, keyword):
    arrays = next(arrays for called, arrays, _ in make_calls() if called == name)
    with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected keyword argument '{keyword}'"):
        getattr(octavo.jax, name)(**arrays, **{keyword: None})


def test_traced_numbers_are_refused():
    q, k, v = (make_calls()[0][1][name] for name in "qkv")
    with pytest.raises(TypeError, match="softmax_scale is part of the program and must be a Python float"):
        jax.jit(lambda scale: octavo.jax.attention(q, k, v, softmax_scale=scale))(0.5)
    half = octavo.jax.attention(
        q, k, v, softmax_scale=np.float32(0.5), causal=np.True_, window_left=np.int64(3)
    )
    assert_same([half], [octavo.attention(q, k, v, softmax_scale=0.5, causal=True, window_left=3)])


def test_wrong_values_are_found_when_the_program_runs():
    """On the CPU, and nothing is written."""
    _, arrays, _ = make_calls()[8]
    bad = {**arrays, "page_table": arrays["page_table"] + 2}
    with pytest.raises(
        RUNTIME_ERRORS, match=r"append_kv: page_table\[0, 0\] must lie in \[0, num_pages = 6\)"
    ):
        jax.block_until_ready(octavo.jax.append_kv(**bad))
    _, arrays, _ = make_calls()[3]
    with pytest.raises(RUNTIME_ERRORS, match=r"attention: max_seqlen_q \(4\) must be at least every length"):
        jax.block_until_ready(octavo.jax.attention(**arrays, max_seqlen_q=4))


def test_the_message_survives_a_program_that_waits_for_another():
    """XLA calls it an internal error there, of its dispatch."""

    @jax.jit
    def slow(x):
        for _ in range(6):
            x = x @ x / 512
        return x

    _, arrays, _ = make_calls()[8]
    append = jax.jit(octavo.jax.append_kv, donate_argnames=("k_pages", "v_pages"))
    for _ in range(5):
        late = slow(jnp.ones((512, 512)))[0, 0].astype(jnp.int32)
        donated = {name: arrays[name] + 0 for name in ("k_pages", "v_pages")}
        with pytest.raises(
            RUNTIME_ERRORS, match=r"append_kv: page_table\[0, 0\] must lie in \[0, num_pages = 6"
        ):
            jax.block_until_ready(
                append(**{**arrays, **donated, "page_table": arrays["page_table"] + 1 + late})
            )


NO_KERNEL = "attention: no CUDA kernel for float32, head_dim 16; there are some for bfloat16 and float16"


@pytest.mark.parametrize("call", [0, 6])
def test_a_dtype_without_a_kernel_is_refused_when_a_program_is_lowered_for_gpus(call):
    """Not where it is lowered for the CPU, nor where there is a kernel."""
    name, arrays, options = make_calls("float32")[call]
    program = jax.jit(lambda arrays: run(name, arrays, options)).trace(arrays)
    program.lower(lowering_platforms=("cpu",))
    with pytest.raises(TypeError, match=NO_KERNEL):
        program.lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("call", [0, 6])
def test_a_dtype_without_a_kernel_runs_on_the_cpu_without_jit(call):
    name, arrays, options = make_calls("float32")[call]
    with jax.disable_jit():
        results = run(name, arrays, options)
    for x, y in zip(results, run(name, arrays, options), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("call", "dtype"), [(0, "bfloat16"), (6, "float16"), (8, "float32"), (11, "float32")]
)
def test_what_has_a_kernel_is_lowered_for_gpus(call, dtype):
    name, arrays, options = make_calls(dtype)[call]
    program = jax.jit(lambda arrays: run(name, arrays, options)).trace(arrays)
    assert f"octavo_{name}" in program.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
def test_a_dtype_without_a_kernel_is_refused_on_gpus():
    with jax.default_device(jax.devices("cuda")[0]):
        arrays = {name: x.astype("float32") for name, x in make_calls("bfloat16")[0][1].items()}
        with pytest.raises(TypeError, match=NO_KERNEL):
            octavo.jax.attention(**arrays)


def test_empty_arrays():
    out = octavo.jax.paged_attention(
        normal(0, 4, HEAD_DIM), *cache().values(), jnp.zeros((0, 3), jnp.int32), jnp.zeros(0, jnp.int32)
    )
    assert out.shape == (0, 4, HEAD_DIM)
    pages = cache()
    assert_same(octavo.jax.copy_pages(**pages, copies=np.zeros((0, 2), np.int32)), tuple(pages.values()))


def test_results_vary_inside_shard_map():
    """Who differentiates around a result learns that it differs from device to device; so does a scan."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX before 0.6")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    q = jnp.ones((1, 3, 2, 16))

    def attend(q):
        return octavo.jax.attention(q, q, q)

    with pytest.raises(ValueError, match=r"(?i)replicat|vma|var"):
        jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec())(q)

    def loop(pages, tokens):
        table, lens = jnp.array([[0, 1]], jnp.int32), jnp.array([1], jnp.int32)

        def step(pages, token):
            return octavo.jax.append_kv(token, token, *pages, table, lens), token

        return jax.lax.scan(step, (pages, pages), tokens)[0][0]

    pages, tokens = jnp.zeros((2, 4, 1, 16)), jnp.ones((3, 1, 1, 16))
    heads = jax.sharding.PartitionSpec(None, None, "x")
    written = jax.shard_map(loop, mesh=mesh, in_specs=(heads, heads), out_specs=heads)(pages, tokens)
    assert (written[0, 0] == 1).all()


@pytest.mark.parametrize("rows", [2, 600])  # of 600 in 16 bits, a GPU's library computes the product
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("split", ["x", "w", "K"])
def test_linear_inside_shard_map(split, dtype, rows):
    """Its program has a branch for GPUs, which has to vary over the same axes of the mesh."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX before 0.6")
    cpu, axis_types = jax.devices("cpu")[:1], (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), ("m",), axis_types=axis_types, devices=cpu)
    whole, by_rows, by_columns = (jax.sharding.PartitionSpec(*axes) for axes in ((), ("m",), (None, "m")))
    in_specs, out_spec = {
        "x": ((by_rows, whole), by_rows),
        "w": ((whole, by_rows), by_columns),
        "K": ((by_columns, by_columns), whole),
    }[split]

    def layer(x, w):
        out = octavo.jax.linear(x, w)
        return jax.lax.psum(out, "m") if split == "K" else out

    x, w = jax.device_put((normal(rows, 32, dtype=dtype), normal(24, 32, dtype=dtype, seed=1)), cpu[0])
    out = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=in_specs, out_specs=out_spec))(x, w)
    assert_same([out], [octavo.jax.linear(x, w)])
    if split != "K":
        with pytest.raises(ValueError, match=r"(?i)replicat|vma|var"):
            jax.shard_map(layer, mesh=mesh, in_specs=in_specs, out_specs=whole)(x, w)


def test_none_is_no_mask():
    q = jnp.ones((1, 3, 2, 16))
    with pytest.raises(TypeError, match="attention: causal must be a bool; got NoneType"):
        octavo.jax.attention(q, q, q, causal=None)


def test_symbolic_shapes_are_refused():
    export = pytest.importorskip("jax.export")
    (batch,) = export.symbolic_shape("batch")
    shape = jax.ShapeDtypeStruct((batch, 3, 2, 16), jnp.float32)
    with pytest.raises(TypeError, match=r"attention: \w+ must have a known shape; got"):
        export.export(jax.jit(octavo.jax.attention))(shape, shape, shape)


def test_none_in_place_of_an_array() -> None:
    x = jnp.zeros((1, 2, 2, 8))
    with pytest.raises(TypeError, match=r"^attention: q must be an array; got None$"):
        octavo.jax.attention(None, x, x)
    with pytest.raises(TypeError, match=r"^linear: w must be an array; got None$"):
        octavo.jax.linear(x, None)
