"""block_mask in PyTorch's and JAX's programs, with their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support.oracle import expand_blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RANDOM = np.random.default_rng(5)
N, M, HEADS, DIM = 150, 210, 4, 16
MASKS = RANDOM.random((2, HEADS, 3, 4)) < 0.5
MASKS[0, 1, 1] = False  # queries that see nothing
ARRAYS = [RANDOM.standard_normal((2, n, h, DIM)).astype(np.float32) for n, h in ((N, HEADS), (M, 2), (M, 2))]
WEIGHTS = RANDOM.standard_normal((2, N, HEADS, DIM)).astype(np.float32)


def seen(mask: Any) -> Any:
    """[batch or 1, HEADS, N, M], under a causal mask too."""
    masks = mask if mask.ndim == 4 else mask[None]
    causal = np.arange(M - N, M)[:, None] >= np.arange(M)
    return np.stack([expand_blocks(x, 64, N, M) for x in masks]) & causal


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", [MASKS, MASKS[0], MASKS[1, :1]], ids=["batch", "heads", "all"])
def test_torch(mask: Any, compiled: bool, device: str) -> None:
    torch = pytest.importorskip("torch")
    import octavo.torch

    dtype = torch.float32 if device == "cpu" else torch.float16
    torch._dynamo.reset()
    attention = octavo.torch.attention
    if compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")

    def gradients(attend: Any) -> list[Any]:
        arrays = [torch.tensor(x, device=device, dtype=dtype, requires_grad=True) for x in ARRAYS]
        out = attend(*arrays)
        (out * torch.tensor(WEIGHTS, device=device, dtype=dtype)).sum().backward()
        return [out.detach(), *(x.grad for x in arrays)]

    def reference(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (
            x.transpose(1, 2).float() for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
        )
        see = torch.tensor(seen(mask), device=device)
        scores = (q @ k.transpose(2, 3) * DIM**-0.5).masked_fill(~see, -1e30)
        weights = torch.softmax(scores, -1) * see.any(-1, keepdim=True)
        return (weights @ v).transpose(1, 2)

    blocks = torch.tensor(mask, device=device)
    found = gradients(lambda *x: attention(*x, causal=True, block_mask=blocks, block_size=64))
    tolerance = 2e-5 if device == "cpu" else 1e-2
    for x, wanted in zip(found, gradients(reference), strict=True):
        torch.testing.assert_close(x.float(), wanted.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("axis", [None, 0])
def test_jax(axis: int | None) -> None:
    """jit of vmap of grad, over a mask for all or one each."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import octavo.jax

    def loss(mask: Any, q: Any, k: Any, v: Any) -> Any:
        return (octavo.jax.attention(q, k, v, causal=True, block_mask=mask, block_size=64) * WEIGHTS).sum()

    def reference(see: Any, q: Any, k: Any, v: Any) -> Any:
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, jnp.repeat(k, 2, 2)) * DIM**-0.5
        weights = jax.nn.softmax(jnp.where(see, scores, -1e30), -1) * see.any(-1, keepdims=True)
        return (jnp.einsum("bhnm,bmhd->bnhd", weights, jnp.repeat(v, 2, 2)) * WEIGHTS).sum()

    def mapped(function: Any, masks: Any) -> Any:
        gradient = jax.vmap(jax.grad(function, (1, 2, 3)), (axis, 0, 0, 0))
        return jax.jit(gradient)(masks if axis == 0 else masks[0], *arrays)

    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jnp.stack([x, -2 * x]) for x in ARRAYS]
        for masks in (MASKS, np.stack([MASKS, ~MASKS])):  # [heads, ...], or with a batch axis, for each
            found = mapped(loss, jnp.asarray(masks))
            expected = mapped(reference, np.stack([seen(mask) for mask in masks]))
            for x, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(x, wanted, rtol=2e-4, atol=2e-4)
