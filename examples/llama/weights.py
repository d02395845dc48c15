"""The weights of a Llama, stacked as one launch reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .config import Config


@dataclass(frozen=True)
class Layer:
    """Matrices are [out_features, in_features], as in torch.nn.Linear."""

    attention_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [qkv_size, hidden_size]: of all query heads, then of keys, then of values
    attention_out: Tensor  # [hidden_size, num_q_heads * head_dim]
    ffn_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * ffn_size, hidden_size]
    down: Tensor  # [hidden_size, ffn_size]


@dataclass(frozen=True)
class Weights:
    config: Config
    embedding: Tensor  # [vocabulary, hidden_size]
    layers: tuple[Layer, ...]
    norm: Tensor  # [hidden_size]
    head: Tensor  # [vocabulary, hidden_size]
    rotary_frequencies: Tensor  # float32 [head_dim / 2]: radians a position

    @classmethod
    def random(cls, config: Config, seed: int, dtype: torch.dtype, device: str, std: float = 0.02) -> Weights:
        """Normal numbers, drawn on the device: the same for the same seed on devices of the same kind."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int, mean: float = 0.0) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_(mean, std, generator=generator)

        hidden, heads = config.hidden_size, config.num_q_heads * config.head_dim
        layers = tuple(
            Layer(
                attention_norm=draw(hidden, mean=1.0),
                qkv=draw(config.qkv_size, hidden),
                attention_out=draw(hidden, heads),
                ffn_norm=draw(hidden, mean=1.0),
                gate_up=draw(2 * config.ffn_size, hidden),
                down=draw(hidden, config.ffn_size),
            )
            for _ in range(config.num_layers)
        )
        embedding, head = draw(config.vocabulary, hidden), draw(config.vocabulary, hidden)
        pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequencies = config.rope_theta ** -(pairs / config.head_dim)
        return cls(config, embedding, layers, draw(hidden, mean=1.0), head, frequencies)

    @classmethod
    def from_transformers(cls, model: Any) -> Weights:
        """Those of a transformers.LlamaForCausalLM, in its dtype and on its device."""
        theirs = model.config
        unknown = [name for name in model.state_dict() if name.endswith(".bias")]
        if theirs.model_type != "llama" or theirs.hidden_act != "silu" or unknown:
            raise ValueError(
                f"from_transformers: model must be a Llama with SiLU and without biases; got a "
                f"{theirs.model_type} with {theirs.hidden_act} and {len(unknown)} biases"
            )
        rotary = model.model.rotary_emb
        if rotary.rope_type not in ("default", "linear", "llama3"):
            raise ValueError(
                "from_transformers: the rotary embedding must be default, linear or llama3, whose "
                f"frequencies do not change with the length; got {rotary.rope_type}"
            )
        config = Config(
            num_layers=theirs.num_hidden_layers,
            hidden_size=theirs.hidden_size,
            ffn_size=theirs.intermediate_size,
            num_q_heads=theirs.num_attention_heads,
            num_kv_heads=theirs.num_key_value_heads,
            head_dim=theirs.head_dim,
            vocabulary=theirs.vocab_size,
            rope_theta=theirs.rope_parameters["rope_theta"],
            rms_norm_eps=theirs.rms_norm_eps,
        )
        tensors: Mapping[str, Tensor] = model.state_dict()

        def stacked(prefix: str, *names: str) -> Tensor:
            parts = [tensors[f"{prefix}.{name}.weight"] for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        layers = tuple(
            Layer(
                attention_norm=stacked(prefix, "input_layernorm"),
                qkv=stacked(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj"),
                attention_out=stacked(f"{prefix}.self_attn", "o_proj"),
                ffn_norm=stacked(prefix, "post_attention_layernorm"),
                gate_up=stacked(f"{prefix}.mlp", "gate_proj", "up_proj"),
                down=stacked(f"{prefix}.mlp", "down_proj"),
            )
            for prefix in (f"model.layers.{i}" for i in range(config.num_layers))
        )
        return cls(
            config,
            tensors["model.embed_tokens.weight"],
            layers,
            tensors["model.norm.weight"],
            tensors["lm_head.weight"],
            rotary.inv_freq.float(),
        )
