"""Gradients of octavo.jax.attention, under JAX's transformations; derivatives that there are not."""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import octavo  # noqa: E402
import octavo.jax  # noqa: E402
from support.jax_calls import CALLS, HEAD_DIM, NAMES, assert_same, make_calls, normal, run  # noqa: E402
from support.programs import run as run_program  # noqa: E402

ATTENTION_CALLS = [pytest.param(i, id=str(i)) for i, name in enumerate(NAMES) if name == "attention"]
OTHER_CALLS = [call for call in CALLS if NAMES[call.values[0]] != "attention"]
DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "sinks")
SLOPES = jnp.array([0.5, 0.25, 0.125, 0.0625], jnp.float32)


@pytest.fixture(
    params=[
        pytest.param(("cpu", "float32"), id="cpu"),
        pytest.param(("cuda", "bfloat16"), id="cuda", marks=pytest.mark.gpu),
    ]
)
def dtype(request):
    """The dtype of the arrays; the test runs on this device."""
    device, dtype = request.param
    with jax.default_device(jax.devices(device)[0]):
        yield dtype


def split(arrays):
    """What has gradients, and the other arrays."""
    floats = {key: x for key, x in arrays.items() if key in DIFFERENTIABLE}
    return floats, {key: x for key, x in arrays.items() if key not in floats}


def weights_like(results):
    return [normal(*x.shape, seed=7 + i).astype(x.dtype) for i, x in enumerate(results)]


def gradients_of_octavo(arrays, options):
    """Gradients of a sum of results with these weights, by the operator that computes them."""
    names = [name for name in DIFFERENTIABLE if name in arrays]
    options = dict(options)
    return_lse = options.pop("return_lse", False)
    results = octavo.attention(**arrays, **options, return_lse=True)
    dout, dlse = weights_like(results)
    gradients = octavo.attention_backward(
        dout,
        arrays["q"],
        arrays["k"],
        arrays["v"],
        *results,
        dlse=dlse if return_lse else None,
        return_dalibi="alibi_slopes" in arrays,
        return_dsinks="sinks" in arrays,
        **{key: x for key, x in arrays.items() if key not in ("q", "k", "v")},
        **options,
    )
    return dict(zip(names, gradients, strict=True))


def weighted_sum(results):
    return sum((x * weight).sum() for x, weight in zip(results, weights_like(results), strict=True))


@pytest.mark.parametrize("call", ATTENTION_CALLS)
def test_equal_octavo(call, dtype):
    """Bit for bit, alone and inside a program."""
    _, arrays, options = make_calls(dtype)[call]
    floats, rest = split(arrays)
    expected = gradients_of_octavo(arrays, options)

    def loss(floats):
        return weighted_sum(run("attention", {**floats, **rest}, options))

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        actual = gradient(floats)
        assert_same([actual[name] for name in expected], list(expected.values()))


def reference(q, k, v, alibi_slopes=None):
    """Attention of dense arrays, without masks, in JAX's own operators."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    if alibi_slopes is not None:
        num_q, num_k = scores.shape[2:]
        distances = jnp.arange(num_k - num_q, num_k)[:, None] - jnp.arange(num_k)
        scores -= alibi_slopes[:, None, None] * distances
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), v)


def dense(seed=0):
    return (
        *(normal(2, num, heads, HEAD_DIM, seed=seed + i) for i, (num, heads) in enumerate(SHAPES)),
        SLOPES,
    )


SHAPES = ((5, 4), (9, 2), (9, 2))


def attend(q, k, v, slopes):
    return octavo.jax.attention(q, k, v, alibi_slopes=slopes)


def loss_of(attention):
    return lambda *arrays: weighted_sum((attention(*arrays),))


def assert_close(actual, expected):
    def compare(x, y):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=5e-5)

    jax.tree.map(compare, actual, expected)


ALL = (0, 1, 2, 3)
TRANSFORMED = {
    "grad": lambda attention: jax.grad(loss_of(attention), ALL),
    "value_and_grad": lambda attention: jax.jit(jax.value_and_grad(loss_of(attention), ALL)),
    "vjp": lambda attention: lambda *arrays: jax.vjp(attention, *arrays)[1](arrays[0]),
    "some": lambda attention: jax.grad(loss_of(attention), (1,)),
    "jacrev": lambda attention: jax.jacrev(lambda *arrays: attention(*arrays)[:, :2, 0, :3], 3),
    "linear transpose": lambda attention: (
        lambda q, k, v, slopes: jax.linear_transpose(
            jax.linearize(lambda v: attention(q, k, v, slopes), v)[1], v
        )(q)
    ),
    "checkpoint": lambda attention: jax.jit(jax.grad(jax.checkpoint(loss_of(attention)), ALL)),
    "scan": lambda attention: jax.grad(scanned(attention), ALL),
    "checkpointed scan": lambda attention: jax.jit(jax.grad(scanned(jax.checkpoint(attention)), ALL)),
    "cond": lambda attention: jax.grad(
        lambda *arrays: jax.lax.cond(arrays[0].sum() > 1e9, lambda *_: 0.0, loss_of(attention), *arrays), ALL
    ),
}


def scanned(attention):
    """Layers that share keys, values and slopes."""

    def loss(q, k, v, slopes):
        def layer(x, scale):
            return attention(x, scale * k, v, slopes), x.sum()

        x, sums = jax.lax.scan(layer, q, jnp.array([1.0, 0.5, 2.0]))
        return x.sum() + sums.sum()

    return loss


@pytest.mark.parametrize("transform", TRANSFORMED)
def test_transformations(transform):
    arrays = dense()
    assert_close(TRANSFORMED[transform](attend)(*arrays), TRANSFORMED[transform](reference)(*arrays))


@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (0, None, None, None), (None, 1, 0, None), (None, None, None, 0)]
)
def test_vmap(axes):
    """The gradient of what is mapped, and mapped gradients."""
    each = [(*dense(seed=10 * i)[:3], (i + 1) * SLOPES) for i in range(3)]
    arrays = [
        xs[0] if axis is None else jnp.stack(xs, axis)
        for axis, xs in zip(axes, zip(*each, strict=True), strict=True)
    ]

    def mapped(attention):
        return jax.vmap(jax.grad(loss_of(attention), ALL), axes)

    def of_mapped(attention):
        return jax.grad(lambda *arrays: jax.vmap(loss_of(attention), axes)(*arrays).sum(), ALL)

    for transformed in (mapped, of_mapped):
        assert_close(jax.jit(transformed(attend))(*arrays), jax.jit(transformed(reference))(*arrays))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.4, "dropout_seed": 3}], ids=["plain", "dropout"])
def test_vmap_of_packed_arrays(options):
    offsets = jnp.array([[0, 3, 8], [0, 8, 8]], jnp.int32)
    q, k, v = (normal(2, 8, heads, HEAD_DIM, seed=i) for i, heads in enumerate((4, 2, 2)))

    def loss(q, k, v, offsets):
        results = octavo.jax.attention(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, return_lse=True, causal=True, **options
        )
        return weighted_sum(results)

    gradient = jax.grad(loss, (0, 1, 2))
    mapped = jax.vmap(gradient)(q, k, v, offsets)
    for i in range(2):
        assert_close([x[i] for x in mapped], list(gradient(q[i], k[i], v[i], offsets[i])))


def test_shard_map():
    """Gradients of shards, and those of what all devices share, which are sums."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("JAX before 0.6")
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shard, shared = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
    specs = (shard, shard, shard, shared)
    arrays = dense()

    def inside(attention):
        def loss(*arrays):
            return jax.lax.psum(attention(*arrays).sum(), "x")

        return jax.shard_map(jax.grad(loss, ALL), mesh=mesh, in_specs=specs, out_specs=specs)

    def around(attention):
        return jax.grad(loss_of(jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=shard)), ALL)

    for transformed in (inside, around):
        assert_close(jax.jit(transformed(attend))(*arrays), jax.jit(transformed(reference))(*arrays))


ON_TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
import octavo.jax

def loss(attention):
    return lambda q, k, slopes: (attention(q, k, slopes) ** 2).sum()

def attend(q, k, slopes):
    return octavo.jax.attention(q, k, k, alibi_slopes=slopes, causal=True)

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
shard, shared = jax.sharding.PartitionSpec("x"), jax.sharding.PartitionSpec()
sharded = jax.shard_map(attend, mesh=mesh, in_specs=(shard, shared, shared), out_specs=shard)
k, *q = jax.random.normal(jax.random.key(0), (3, 2, 6, 2, 16))
arrays = jnp.concatenate(q), k, jnp.array([0.5, 0.25])
def twice(q, k, slopes):
    return attend(q, jnp.concatenate([k, k]), slopes)
actual = jax.jit(jax.grad(loss(sharded), (0, 1, 2)))(*arrays)
expected = jax.grad(loss(twice), (0, 1, 2))(*arrays)
for x, y in zip(actual, expected, strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="JAX before 0.6")
def test_sums_over_two_devices(monkeypatch, tmp_path):
    """Keys and slopes that both devices share."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "program.py").write_text(ON_TWO_DEVICES)
    run_program(sys.executable, tmp_path / "program.py")


def test_through_the_log_sum_exp():
    q, k, v, _ = dense()

    def lse_of(q, k):
        return octavo.jax.attention(q, k, v, return_lse=True)[1]

    def expected(q, k):
        scores = jnp.einsum("bihd,bjhd->bihj", q, jnp.repeat(k, 2, axis=2)) / HEAD_DIM**0.5
        return jax.nn.logsumexp(scores, axis=-1)

    def loss(function):
        return lambda q, k: (function(q, k) ** 2).sum()

    assert_close(jax.grad(loss(lse_of), (0, 1))(q, k), jax.grad(loss(expected), (0, 1))(q, k))


def reference_with_sinks(q, k, v, sinks):
    """Attention of dense arrays, without masks, in JAX's own operators: out and lse."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    lse = jax.nn.logsumexp(jnp.concatenate([scores, column], -1), axis=-1, keepdims=True)
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse), v), lse[..., 0].swapaxes(1, 2)


def attend_with_sinks(q, k, v, sinks):
    return octavo.jax.attention(q, k, v, sinks=sinks, return_lse=True)


@pytest.mark.parametrize("axes", [None, (0, 0, 0, 0), (0, None, None, None), (None, None, None, 0)])
def test_sinks(axes):
    """Their gradient, alone, mapped, and of what is mapped."""
    arrays = [*dense()[:3], jnp.array([0.5, -1.0, 2.0, 0.0], jnp.float32)]
    if axes is not None:
        arrays = [
            x if axis is None else jnp.stack([x, 0.5 * x, x - 1])
            for x, axis in zip(arrays, axes, strict=True)
        ]

    def mapped(function):
        return function if axes is None else jax.vmap(function, axes)

    def loss(attention):
        return lambda *arrays: weighted_sum(attention(*arrays))

    for outer in (
        lambda attention: jax.grad(loss(mapped(attention)), ALL),
        lambda attention: mapped(jax.grad(loss(attention), ALL)),
    ):
        actual, expected = (jax.jit(outer(f))(*arrays) for f in (attend_with_sinks, reference_with_sinks))
        assert_close(actual, expected)


def test_sinks_that_are_constants():
    q, k, v, sinks = dense()
    traced = jax.make_jaxpr(jax.grad(lambda *x: attend_with_sinks(*x)[0].sum()))(q, k, v, sinks)
    assert "dsinks" in str(traced)
    closed_over = jax.make_jaxpr(jax.grad(lambda q: attend_with_sinks(q, k, v, np.array(sinks))[0].sum()))(q)
    assert "octavo_attention_backward" in str(closed_over) and "dsinks" not in str(closed_over)


def test_slopes_that_are_constants():
    """Their gradient is not computed, whoever differentiated such a call before with respect to them."""
    q, k, v, slopes = dense()

    def program(slopes, argnums):
        return str(jax.make_jaxpr(jax.grad(loss_of(attend), argnums))(q, k, v, slopes))

    assert "dalibi_slopes" in program(slopes, 3)
    closed_over = jax.make_jaxpr(jax.grad(lambda q: loss_of(attend)(q, k, v, np.array(slopes))))(q)
    assert "octavo_attention_backward" in str(closed_over) and "dalibi_slopes" not in str(closed_over)


def test_what_is_differentiated_changes():
    """A traced call does not remember with respect to what, or which of its results a loss used."""
    arrays = dense()

    def both(*arrays):
        return octavo.jax.attention(*arrays[:3], alibi_slopes=arrays[3], return_lse=True)

    def weighted(which):
        return lambda *arrays: sum((both(*arrays)[i] ** 2).sum() for i in which)

    def gradients(which):
        return [jax.jit(jax.grad(weighted(which), argnum))(*arrays) for argnum in ALL]

    of_out, of_lse, of_both, again = (gradients(which) for which in ((0,), (1,), (0, 1), (0,)))
    assert_close([x + y for x, y in zip(of_out, of_lse, strict=True)], of_both)
    assert_same(again, of_out)
    assert all(np.abs(x).max() > 0.01 for i, x in enumerate((*of_out, *of_both)) if i != 2)


def test_integers_have_gradients_of_no_numbers():
    _, arrays, options = make_calls()[4]
    floats, rest = split(arrays)

    def loss(rest):
        return weighted_sum(run("attention", {**floats, **rest}, options))

    gradients = jax.grad(loss, allow_int=True)(rest)
    assert {x.dtype for x in gradients.values()} == {jax.dtypes.float0}
    assert set(gradients) == {"cu_seqlens_q", "cu_seqlens_k", "prefix_lens"}


def test_deterministic_backward():
    q, k, v, _ = dense()

    def loss(q, **options):
        return octavo.jax.attention(q, k, v, **options).sum()

    for options, expected in (({}, "False"), ({"deterministic_backward": True}, "True")):
        gradient = jax.grad(partial(loss, **options))
        assert f"('deterministic', np.{expected}_)" in str(jax.make_jaxpr(gradient)(q)).replace("numpy", "np")
    with pytest.raises(TypeError, match="attention: deterministic_backward must be a bool; got int"):
        loss(q, deterministic_backward=1)


def test_forward_mode_is_refused():
    arrays = dense()
    for call in (
        lambda: jax.jvp(attend, arrays, arrays),
        lambda: jax.jacfwd(attend)(*arrays),
        lambda: jax.jit(jax.hessian(loss_of(attend)))(*arrays),
    ):
        with pytest.raises(TypeError, match="can't apply forward-mode"):
            call()


def test_second_derivatives_are_refused():
    arrays = dense()

    def of_gradient(*arrays):
        return jax.grad(loss_of(attend))(*arrays).sum()

    message = (
        "attention cannot be differentiated twice: attention_backward has no derivatives; "
        r"use jax\.lax\.stop_gradient on its arguments"
    )
    for again in (jax.grad(of_gradient, ALL), jax.jit(jax.grad(of_gradient, 1))):
        with pytest.raises(TypeError, match=message):
            again(*arrays)


@pytest.mark.parametrize("call", OTHER_CALLS)
def test_other_operators_are_refused(call):
    name, arrays, options = make_calls()[call]
    floats = {key: x for key, x in arrays.items() if x.dtype == jnp.float32}
    rest = {key: x for key, x in arrays.items() if key not in floats}

    def loss(floats, weight):
        return weight * sum(x.sum() for x in run(name, {**floats, **rest}, options))

    message = f"{name} has no derivatives.*jax.lax.stop_gradient"
    for grad in (jax.grad(loss), jax.jit(jax.grad(loss))):
        with pytest.raises(TypeError, match=message):
            grad(floats, 1.0)
    assert np.isfinite(jax.grad(loss, argnums=1)(jax.lax.stop_gradient(floats), 1.0))
