"""How a model of transformers reaches a step of octavo.KVCache, and what its layers need of a cache."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from octavo._kv_cache import KVCacheStep


class Layer(NamedTuple):
    """What a model asks of the attention of a layer."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    window_left: int
    attention_chunk: int
    dtype: torch.dtype
    device: torch.device


class Layers:
    """The layers of a model, in the order in which it calls them: collected in one ordinary forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.numbers: dict[torch.nn.Module, int] = {}
        self.all: list[Layer] = []

    def record(
        self,
        module: torch.nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window_left: int = -1,
        attention_chunk: int = 0,
        causal: bool = True,
    ) -> None:
        """Take down a layer's call: q, k and v are [batch, seqlen, heads, head_dim]."""
        if not causal:
            raise refusal(self._model, "its attention is not causal")
        if module in self.numbers:
            raise refusal(self._model, f"{type(module).__name__} attends twice in a forward pass")
        self.numbers[module] = len(self.all)
        heads = q.shape[2], k.shape[2], k.shape[3], v.shape[3]
        self.all.append(Layer(*heads, window_left, attention_chunk, k.dtype, k.device))

    def number(self, module: torch.nn.Module) -> int:
        """Return which layer of the cache a module has."""
        if module not in self.numbers:
            raise refusal(self._model, f"{type(module).__name__} attends in some forward passes only")
        return self.numbers[module]


class LayerStep:
    """A step of a cache, as it reaches the attention of each layer: the keyword octavo_step of a model."""

    def __init__(self, step: KVCacheStep, layers: Layers) -> None:
        self._step = step
        self._layers = layers
        self.num_calls = 0

    def attend(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **arguments: Any
    ) -> Tensor:
        """Return [1, T, num_q_heads, head_dim] of query, key and value [1, heads, T, head_dim]."""
        self.num_calls += 1
        q, k, v = (array[0].transpose(0, 1) for array in (query, key, value))
        number = self._layers.number(module)
        chunk = self._layers.all[number].attention_chunk
        out: Tensor = self._step.attend(number, q, k, v, attention_chunk=chunk, **arguments)[None]
        return out


def look_at_layers(model: Any, text: Tensor) -> tuple[Tensor, Layers]:
    """Have a model describe its layers, in an ordinary forward pass of a text; return its logits, too.

    Args:
        model: whose attention is Octavo's.
        text: int64 [1, seqlen].

    Raises:
        ValueError: the model cannot be served, and why.
    """
    layers = Layers(model)
    try:
        logits: Tensor = model(text, use_cache=False, octavo_step=layers).logits[0]
    except RefusalError:
        raise
    except ValueError as error:  # from Octavo's attention, or from the mask
        raise refusal(model, str(error)) from error
    if not layers.all:
        raise refusal(model, "it does not pass its keywords on to its attention")
    return logits, layers


class RefusalError(ValueError):
    """What says that a model cannot be served."""


def refusal(model: PreTrainedModel, why: str) -> RefusalError:
    return RefusalError(f"octavo.transformers: generate_batch cannot serve {type(model).__name__}: {why}")


# BLOOM, whose attention is its own


class BloomSteps:
    """BLOOM's attention on Octavo: its modules know of no AttentionInterface, so that theirs is replaced."""

    def __init__(self, model: Any) -> None:
        from transformers.models.bloom.modeling_bloom import BloomAttention

        self._modules: Any = [module for module in model.modules() if isinstance(module, BloomAttention)]
        self._step: LayerStep | Layers | None = None
        decoder = model.get_decoder()
        mask = torch.ones(1, 2, device=model.device)
        alibi = decoder.build_alibi_tensor(mask, decoder.num_heads, torch.float32)  # slope * position
        self._slopes: Tensor = alibi[:, 0, 1].contiguous()

    @contextlib.contextmanager
    def during(self, step: LayerStep | Layers) -> Iterator[None]:
        """Replace the attention for a forward pass, or look on at one."""
        self._step = step
        for module in self._modules:
            module.forward = functools.partial(self._attend, module)
        try:
            yield
        finally:
            for module in self._modules:
                del module.forward

    def _attend(
        self, module: Any, hidden_states: Tensor, residual: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        step = self._step
        if isinstance(step, LayerStep):
            scale = module.inv_norm_factor
            out = step.attend(module, query, key, value, softmax_scale=scale, alibi_slopes=self._slopes)
            return module.dense(out.flatten(2)) + residual, None
        assert step is not None
        step.record(module, *(array.transpose(1, 2) for array in (query, key, value)))
        result: tuple[Tensor, None] = type(module).forward(module, hidden_states, residual, *args, **options)
        return result
