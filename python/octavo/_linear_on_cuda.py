"""``linear`` on a GPU where the arrays' own library is the faster one, or Octavo has no kernel.

src/cuda/linear/plan.cpp decides which calls these are. The arguments were checked before, and ``stream`` is
an address. PyTorch and CuPy round to the dtype of ``x`` at every step, JAX at the end; where PyTorch can
write to ``out``, it adds a residual alone in one step with the product.
"""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from octavo._cuda_streams import on_stream
from octavo._rms_norm import rms_norm


def linear(
    x: Any,
    w: Any,
    bias: Any,
    activation: str | None,
    residual: Any,
    norm_weight: Any,
    norm_eps: float,
    out: Any,
    stream: int | None,
) -> Any:
    """Compute it with the library of ``x``, and write it to ``out`` if there is one."""
    if norm_weight is not None and x.shape[-1] > 0:
        rows = rms_norm(x.reshape(-1, x.shape[-1]), norm_weight, norm_eps, stream=stream)
        x = rows.reshape(x.shape)
    library = type(x).__module__.partition(".")[0]
    if library in ("jax", "jaxlib"):
        if stream is not None:
            raise ValueError("linear: stream must be None for JAX arrays on a GPU, for which JAX picks it")
        import jax.numpy as jnp

        w, bias, residual = (
            jnp.from_dlpack(array) if hasattr(array, "__dlpack__") else array for array in (w, bias, residual)
        )
        return _program_of_jax()(x, w, bias, activation, residual)
    if library not in ("torch", "cupy"):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise TypeError(f"linear: x must be an array of PyTorch, CuPy or JAX on a GPU; got {kind}")
    compute = by_torch if library == "torch" else by_cupy
    with on_stream(library, x, stream):
        return compute(x, w, bias, activation, residual, out)


def by_torch(x: Any, w: Any, bias: Any, activation: str | None, residual: Any, out: Any = None) -> Any:
    import torch

    with torch.autocast(x.device.type, enabled=False):  # the result has the dtype of x, as Octavo's kernels'
        return _by_torch(x, w, bias, activation, residual, out)


def _by_torch(x: Any, w: Any, bias: Any, activation: str | None, residual: Any, out: Any) -> Any:
    import torch
    from torch.nn import functional
    from torch.utils.dlpack import from_dlpack

    def own(array: Any) -> Any:
        return array if array is None or isinstance(array, torch.Tensor) else from_dlpack(array)

    w, bias, residual, result = own(w), own(bias), own(residual), own(out)
    # The last operator writes to out, where it can: a copy would take as long as a small product.
    rows = _rows(result) if activation is None and (bias is None or residual is None) else None
    if rows is not None:
        x = x.reshape(len(rows), x.shape[-1])
        if bias is None and residual is None:
            torch.mm(x, w.T, out=rows)
        else:
            torch.addmm(bias if residual is None else residual.reshape(rows.shape), x, w.T, out=rows)
        return out
    sums = functional.linear(x, w, bias)
    if activation == "silu":
        sums = functional.silu(sums)
    elif activation == "gelu":
        sums = functional.gelu(sums)
    elif activation == "silu_gate":
        gate, up = sums.chunk(2, dim=-1)
        sums = torch.mul(functional.silu(gate), up, out=result if residual is None else None)
    if residual is not None:
        sums = torch.add(sums, residual, out=result)
    if out is None:
        return sums
    if sums is not result:
        result.copy_(sums)
    return out


def _rows(array: Any) -> Any:
    """The same memory as [rows, columns]; None where there is none, or no strides express that."""
    if array is None:
        return None
    try:
        return array.view(-1, array.shape[-1])
    except RuntimeError:
        return None


def by_cupy(x: Any, w: Any, bias: Any, activation: str | None, residual: Any, out: Any = None) -> Any:
    cupy = import_module("cupy")

    def own(array: Any) -> Any:
        return array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)

    def silu(sums: Any) -> Any:
        numbers = sums.astype(cupy.float32)  # in float16 exp(-sums) would pass the largest number
        return (numbers / (1 + cupy.exp(-numbers))).astype(sums.dtype)

    def gelu(sums: Any) -> Any:
        numbers = sums.astype(cupy.float32)
        erf = import_module("cupyx.scipy.special").erf(numbers * 0.5**0.5)
        return (numbers * (1 + erf) / 2).astype(sums.dtype)

    if x.dtype.kind == "f":
        result = cupy.matmul(x, own(w).T)
    else:  # bfloat16, of which CuPy takes no products
        result = cupy.matmul(x.astype(cupy.float32), own(w).astype(cupy.float32).T).astype(x.dtype)
    if bias is not None:
        result += own(bias)
    if activation == "silu":
        result = silu(result)
    elif activation == "gelu":
        result = gelu(result)
    elif activation == "silu_gate":
        gate, up = cupy.split(result, 2, axis=-1)
        result = silu(gate) * up
    if residual is not None:
        result += own(residual)
    if out is None:
        return result
    own(out)[...] = result
    return out


def by_jax(
    x: Any,
    w: Any,
    bias: Any,
    activation: str | None,
    residual: Any,
    norm_weight: Any = None,
    norm_eps: float = 1e-6,
) -> Any:
    """The product of JAX's own arrays, also while JAX traces a program."""
    import jax
    import jax.numpy as jnp

    # Neither ranks nor dtypes are promoted here: a program may forbid either.
    def beside(array: Any, vector: Any) -> Any:
        return jnp.broadcast_to(vector.astype(jnp.float32), array.shape)

    if norm_weight is not None:
        numbers = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(numbers), axis=-1, keepdims=True)
        x = (numbers * jax.lax.rsqrt(mean + norm_eps) * beside(numbers, norm_weight)).astype(x.dtype)
    result = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    if bias is not None:
        result += beside(result, bias)
    if activation == "silu":
        result = jax.nn.silu(result)
    elif activation == "gelu":
        result = jax.nn.gelu(result, approximate=False)
    elif activation == "silu_gate":
        gate, up = jnp.split(result, 2, axis=-1)
        result = jax.nn.silu(gate) * up
    if residual is not None:
        result += residual.astype(jnp.float32)
    return result.astype(x.dtype)


@functools.cache
def _program_of_jax() -> Any:
    """One program, as it would be inside of ``jax.jit``."""
    import jax

    return jax.jit(by_jax, static_argnames="activation")
