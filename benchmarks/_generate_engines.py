"""Octavo and its peers behind one face: each takes the sequences of a problem one token further at a step."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import _examples_path  # noqa: F401
import torch
from _generate_reference import Problem
from _report import OCTAVO
from llama.decoding import DecodeStep
from llama.model import Llama
from llama.weights import Weights
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import octavo

PAGE_SIZE = 16


class Engine(ABC):
    """Its weights are those of the problem, not copies; its cache is its own.

    A step takes `tokens`, int64 [batch], to the likeliest next ones, which it leaves in their place.
    """

    name: ClassVar[str]
    peer: ClassVar[bool] = True
    compiles: ClassVar[bool] = False  # with torch.compile

    tokens: Tensor
    logits: Tensor  # [batch, vocabulary], of the last step

    @classmethod
    def usable(cls, device: torch.device) -> type[Engine]:
        """The class itself. Raises ImportError where a package is missing that the engine needs."""
        if cls.compiles and device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise ImportError("torch.compile needs Triton on a GPU, which is not installed")
        return cls

    @abstractmethod
    def __init__(self, problem: Problem) -> None:
        """Everything that need not be done at every step."""

    @abstractmethod
    def step(self) -> None: ...


class Octavo(Engine):
    """examples/llama: six operators a layer, and a step one CUDA graph. Pages lie anywhere in the cache."""

    name = OCTAVO
    peer = False
    promises: ClassVar[dict[str, bool]] = {}

    def __init__(self, problem: Problem) -> None:
        case, device = problem.case, problem.device
        model = Llama(problem.weights, case.capacity, **self.promises)
        pages_of_one = -(-case.capacity // PAGE_SIZE)
        caches = model.empty_caches(case.batch * pages_of_one, PAGE_SIZE)
        generator = torch.Generator(device).manual_seed(problem.seed)
        pages = torch.randperm(case.batch * pages_of_one, generator=generator, device=device)
        page_table = pages.to(torch.int32).view(case.batch, pages_of_one)
        seq_lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=device)
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.context
        for cache, (k, v) in zip(caches, problem.contexts(), strict=True):
            arrays = {"page_table": page_table, "seq_lens": seq_lens, "cu_seqlens": starts}
            octavo.append_kv(k.flatten(0, 1), v.flatten(0, 1), **arrays, **cache.arguments)
        self.tokens = problem.tokens[:, 0].clone()
        self._step = DecodeStep(model, caches, page_table, seq_lens, self.tokens)

    def step(self) -> None:
        self._step()
        self.logits = self._step.logits


class StaticWeightOctavo(Octavo):
    """Weights may be read before the launch in front has ended."""

    name = "octavo_static_weight"
    promises: ClassVar[dict[str, bool]] = {"static_weight": True}


class StaticOctavo(Octavo):
    """And so may keys and values of earlier tokens."""

    name = "octavo_static"
    promises: ClassVar[dict[str, bool]] = {"static_weight": True, "static_past": True}


def _transformers_model(weights: Weights, attention: str) -> Any:
    """A LlamaForCausalLM whose parameters are views of these weights."""
    import transformers

    config = weights.config
    theirs = transformers.LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_q_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=1 << 17,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=False,
        attn_implementation=attention,
        dtype=weights.embedding.dtype,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(theirs)
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    num_q, num_kv = (n * config.head_dim for n in (config.num_q_heads, config.num_kv_heads))
    for i, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split((num_q, num_kv, num_kv))
        gate, up = layer.gate_up.chunk(2)
        matrices = {
            "input_layernorm": layer.attention_norm,
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention_out,
            "post_attention_layernorm": layer.ffn_norm,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down,
        }
        state |= {f"model.layers.{i}.{name}.weight": x for name, x in matrices.items()}
    model.load_state_dict(state, assign=True)
    rotary = model.model.rotary_emb  # whose buffers are in no state
    model.model.rotary_emb = type(rotary)(config=theirs).to(weights.embedding.device)
    return model.eval()


class TransformersEager(Engine):
    """Hugging Face transformers as it is without options, but for the attention."""

    name = "hf_eager"
    attention: ClassVar[str] = "eager"

    @classmethod
    def usable(cls, device: torch.device) -> type[Engine]:
        if importlib.util.find_spec("transformers") is None:
            raise ImportError("the package transformers is not installed")
        return super().usable(device)

    def __init__(self, problem: Problem) -> None:
        self._model = _transformers_model(problem.weights, self.attention)
        self._cache = self._empty_cache(problem)
        for i, (k, v) in enumerate(problem.contexts()):
            self._cache.update(k.transpose(1, 2), v.transpose(1, 2), i)
        self.tokens = problem.tokens[:, 0].clone()
        self._forward = self._make_forward()

    def _empty_cache(self, problem: Problem) -> Any:  # noqa: ARG002
        import transformers

        return transformers.DynamicCache(config=self._model.config)

    def _compute(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the likeliest tokens."""
        results = self._model(input_ids=tokens[:, None], past_key_values=self._cache, use_cache=True)
        logits = results.logits[:, -1]
        return logits, logits.argmax(-1)

    def _make_forward(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return self._compute

    def step(self) -> None:
        self.logits, chosen = self._forward(self.tokens)
        self.tokens.copy_(chosen)


class TransformersSdpa(TransformersEager):
    """With PyTorch's scaled_dot_product_attention.

    It may not choose cuDNN's kernel, for which a new plan is made at each length of the cache: with four
    layers of Llama-2-7B on an H200, a step took 39.6 ms with it and 3.5 ms without (PyTorch 2.11).
    """

    name = "hf_sdpa"
    attention = "sdpa"

    def _compute(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return super()._compute(tokens)


class TransformersStatic(TransformersEager):
    """With a static cache, and compiled as its documentation recommends."""

    name = "hf_static"
    attention = "sdpa"
    compiles = True

    def _empty_cache(self, problem: Problem) -> Any:
        import transformers

        return transformers.StaticCache(config=self._model.config, max_cache_len=problem.case.capacity)

    def _make_forward(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        return torch.compile(self._compute, mode="reduce-overhead")

    def step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        super().step()
