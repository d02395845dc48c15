"""octavo.jax in programs that forbid JAX to promote ranks or dtypes, with and without arrays of 64 bits."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")

import jax.numpy as jnp  # noqa: E402

import octavo  # noqa: E402
import octavo.jax  # noqa: E402
from octavo import _linear_on_cuda  # noqa: E402
from support.jax_calls import CALLS, HEAD_DIM, make_calls, normal, run  # noqa: E402


@contextlib.contextmanager
def strictly(has_64_bits: bool) -> Any:
    x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
    with x64(has_64_bits), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=[False, True], ids=["32", "64"])
def has_64_bits(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("call", CALLS)
def test_every_call_and_its_vmap(call: int, has_64_bits: bool) -> None:
    name, arrays, options = make_calls()[call]
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)

    def results(arrays: Any) -> Any:
        return run(name, arrays, options)

    wanted = [jax.eval_shape(f, x) for f, x in ((results, arrays), (jax.vmap(results), stacked))]
    with strictly(has_64_bits):
        assert [jax.eval_shape(results, arrays), jax.eval_shape(jax.vmap(results), stacked)] == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "silu_gate"])
def test_products_of_jax(activation: str | None, dtype: str, has_64_bits: bool) -> None:
    """With which a program multiplies on a GPU."""
    width = 3 if activation == "silu_gate" else 6
    shapes = {"x": (2, 4, HEAD_DIM), "w": (6, HEAD_DIM), "bias": (6,), "residual": (2, 4, width)}
    arrays = {name: normal(*shape, dtype=dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    arrays["norm_weight"] = normal(HEAD_DIM)
    wanted = octavo.linear(**arrays, activation=activation)
    with strictly(has_64_bits):
        out = _linear_on_cuda.by_jax(**arrays, activation=activation)
        octavo.jax.linear(**arrays, activation=activation)
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        out.astype("float32"), wanted.astype("float32"), rtol=tolerance, atol=tolerance
    )


def test_masks_of_trees(has_64_bits: bool) -> None:
    parents = jnp.array([[-1, 0, 0, 1, -1], [-1, 0, 1, 2, 0]], jnp.int32)
    words = octavo.tree_mask(parents)
    bools = jnp.array([[j <= i for j in range(5)] for i in range(5)])
    packed = octavo.pack_tree_mask(bools)
    arrays: Any = {
        "q": normal(5, 4, HEAD_DIM),
        "k_pages": normal(3, 4, 2, HEAD_DIM),
        "v_pages": normal(3, 4, 2, HEAD_DIM, seed=1),
        "page_table": jnp.array([[2, 0]], jnp.int32),
        "seq_lens": jnp.array([7], jnp.int32),
        "cu_seqlens_q": jnp.array([0, 5], jnp.int32),
    }
    wanted = octavo.jax.paged_attention(**arrays, tree_mask=packed)
    with strictly(has_64_bits):
        np.testing.assert_array_equal(octavo.tree_mask(parents), words)
        np.testing.assert_array_equal(octavo.pack_tree_mask(bools), packed)
        np.testing.assert_array_equal(octavo.jax.paged_attention(**arrays, tree_mask=bools), wanted)
