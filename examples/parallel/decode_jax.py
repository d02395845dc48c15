"""One step of decoding over several devices with jax.shard_map, checked against one device.

    python examples/parallel/decode_jax.py

Tensor parallel: each device has some heads of every token. Context parallel: each device has some tokens of
every sequence, for contexts that do not fit one. XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two
devices of a CPU.
"""

from __future__ import annotations

import functools
import sys

import numpy as np
from problem import Step, make_step

try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P
except ModuleNotFoundError:
    sys.exit("decode_jax.py: JAX is not installed; get it with pip install jax, or jax[cuda12] for GPUs")

import octavo.jax

try:
    from jax import shard_map  # since 0.6
except ImportError:
    from jax.experimental.shard_map import shard_map

RANKS = "ranks"  # the mesh's only axis

Arrays = dict[str, jax.Array]


def arrays_of(step: Step, dtype: str) -> Arrays:
    arrays = {name: jnp.asarray(array) for name, array in vars(step).items()}
    return {name: x.astype(dtype) if x.dtype == jnp.float32 else x for name, x in arrays.items()}


def tensor_parallel(step: Step, mesh: Mesh, dtype: str) -> jax.Array:
    heads, cache, whole = P(None, RANKS), P(None, None, RANKS), P()
    specs = {"q": heads, "k": heads, "v": heads, "k_pages": cache, "v_pages": cache, "w_out": P(RANKS)}

    def decode(mine: Arrays) -> jax.Array:
        where = mine["page_table"], mine["seq_lens"]
        cache = octavo.jax.append_kv(mine["k"], mine["v"], mine["k_pages"], mine["v_pages"], *where)
        out = octavo.jax.paged_attention(mine["q"], *cache, *where)
        return jax.lax.psum(jnp.einsum("bhd,hdn->bn", out, mine["w_out"]), RANKS)

    arrays = arrays_of(step, dtype)
    in_specs = ({name: specs.get(name, whole) for name in arrays},)
    return jax.jit(shard_map(decode, mesh=mesh, in_specs=in_specs, out_specs=whole))(arrays)


def context_parallel(step: Step, mesh: Mesh, dtype: str) -> jax.Array:
    arrays = arrays_of(step, dtype)
    parts = [arrays_of(step.pages_of(rank, mesh.size), dtype) for rank in range(mesh.size)]
    own = ("k_pages", "v_pages", "page_table", "seq_lens", "lens_to_append")
    arrays |= {name: jnp.concatenate([part[name] for part in parts]) for name in own}

    def decode(mine: Arrays) -> jax.Array:
        cache = octavo.jax.append_kv(
            *(mine[name] for name in ("k", "v", "k_pages", "v_pages", "page_table", "lens_to_append"))
        )
        state = octavo.jax.paged_attention(
            mine["q"], *cache, mine["page_table"], mine["seq_lens"], return_lse=True
        )
        outs, lses = jax.lax.all_gather(state, RANKS)
        out, _ = functools.reduce(lambda a, b: octavo.jax.merge_states(*a, *b), zip(outs, lses, strict=True))
        return jnp.einsum("bhd,hdn->bn", out, mine["w_out"])[None]

    in_specs = ({name: P(RANKS) if name in own else P() for name in arrays},)
    results = jax.jit(shard_map(decode, mesh=mesh, in_specs=in_specs, out_specs=P(RANKS)))(arrays)
    assert (results == results[0]).all()  # on every device the same
    return results[0]


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), (RANKS,))
    dtype = "float32" if jax.devices()[0].platform == "cpu" else "float16"
    step = make_step(mesh.size)
    expected = step.on_one_device()
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for decode in (tensor_parallel, context_parallel):
        result = np.array(decode(step, mesh, dtype), np.float32)
        np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)
        error = np.abs(result - expected).max()
        print(f"{decode.__name__}: {mesh.size} x {jax.devices()[0].platform}, differs by {error:.1e} at most")


if __name__ == "__main__":
    main()
