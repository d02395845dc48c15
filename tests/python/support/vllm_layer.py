"""A layer of a model in vLLM: its cache, the batches that vLLM's runner makes for it, and what is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheLayout

from octavo._vllm_backend import OctavoBackend
from support import oracle

MAX_TOKENS, MAX_BATCH, MAX_BLOCKS = 96, 8, 12
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCALES = torch.tensor([0.3, 0.7])  # of keys and of values of fp8


def make_cache(layout: KVCacheLayout, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """[blocks, KV heads, block size, 2 * head size]: the second of two layers in this layout."""
    whole = (2, *shape)
    order = layout.stride_order
    memory = torch.full([whole[axis] for axis in order], 255 if dtype == torch.uint8 else torch.nan)
    memory = memory.to(dtype).to(device)
    return memory.permute([order.index(axis) for axis in range(len(whole))])[1]


@dataclass
class Batch:
    """What a step gives to the layer: tensors at the same addresses in every step, as for CUDA graphs."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    metadata: CommonAttentionMetadata


@dataclass
class Layer:
    """Sequences that grow step by step."""

    device: str
    dtype: str = "float32"
    layout: KVCacheLayout = KVCacheLayout.LBHNC
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 8
    kv_cache_dtype: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)  # of the implementation
    scales: Tensor = SCALES  # of keys, then of values; of fp8 also one for each KV head
    backend: type = OctavoBackend
    seed: int = 0
    reference_window: int | None = None  # of R-SWA
    has_images: bool = False  # whose tokens see each other in both directions
    windows_hold: bool = False  # in images, too
    ranks: int = 1  # of decode context parallelism, each with heads and a part of the tokens
    rank: int = 0
    interleave: int = 1  # tokens in a row on a rank

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.torch_dtype = getattr(torch, self.dtype)
        stored = torch.uint8 if self.kv_cache_dtype in FP8 else self.torch_dtype
        num_blocks = MAX_BATCH * MAX_BLOCKS
        shape = (num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size)
        self.kv_cache = make_cache(self.layout, shape, stored, self.device)
        with torch.device(self.device):
            self.impl = self.backend.get_impl_cls()(
                self.num_heads,
                self.head_size,
                self.head_size**-0.5,
                self.num_kv_heads,
                kv_cache_dtype=self.kv_cache_dtype,
                **{
                    name: x.to(self.device) if isinstance(x, Tensor) else x
                    for name, x in self.options.items()
                },
            )
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS),
            model_config=SimpleNamespace(rswa_window=self.reference_window, is_mm_prefix_lm=self.has_images),
            parallel_config=SimpleNamespace(cp_kv_cache_interleave_size=self.interleave),
        )
        spec = SimpleNamespace(dcp_sharded=True)
        self.builder = self.backend.get_builder_cls()(spec, ["layer"], config, torch.device(self.device))
        k_scale, v_scale = self.scales.to(self.device)
        self.attention = SimpleNamespace(
            _k_scale=k_scale, _v_scale=v_scale, mm_prefix_clamp_sliding_window=self.windows_hold
        )

        blocks = self.random.permutation(num_blocks).reshape(MAX_BATCH, MAX_BLOCKS)
        self.blocks = torch.from_numpy(blocks.astype(np.int32))
        kv = (0, self.num_kv_heads, self.head_size)
        self.stored = [(np.zeros(kv), np.zeros(kv)) for _ in range(MAX_BATCH)]

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.query = buffer(MAX_TOKENS, self.num_heads, self.head_size, dtype=self.torch_dtype)
        self.key = buffer(MAX_TOKENS, self.num_kv_heads, self.head_size, dtype=self.torch_dtype)
        self.value, self.output = torch.zeros_like(self.key), torch.zeros_like(self.query)
        self.query_start_loc, self.seq_lens = buffer(MAX_BATCH + 1), buffer(MAX_BATCH)
        self.block_table = buffer(MAX_BATCH, MAX_BLOCKS + 2)
        self.slot_mapping = buffer(MAX_TOKENS, dtype=torch.int64)
        self.is_causal = buffer(MAX_BATCH)  # int32, as vLLM's own

    def length(self, sequence: int) -> int:
        return len(self.stored[sequence][0])

    def batch(
        self,
        sequences: Sequence[int],
        counts: Sequence[int],
        *,
        padded_tokens: int = 0,
        padded_rows: int = 0,
        causal: bool | Sequence[bool] = True,
        reference_lens: Sequence[int] | None = None,
        images: dict[int, list[tuple[int, int]]] | None = None,
    ) -> Batch:
        """The next `counts` tokens of these sequences, random, and padding behind them."""
        num_rows, num_tokens = len(sequences) + padded_rows, sum(counts) + padded_tokens
        starts = np.cumsum([0, *counts])
        slots, lengths = np.full(MAX_TOKENS, -1), np.zeros(MAX_BATCH, int)
        self.block_table.fill_(2**30)  # a block that does not exist
        for tensor, ranks in ((self.query, self.ranks), (self.key, 1), (self.value, 1)):
            tokens, heads, head_size = tensor.shape
            numbers = self.random.standard_normal((tokens, ranks, heads, head_size))
            numbers = numbers[:, self.rank if ranks > 1 else 0]
            tensor.copy_(torch.from_numpy(oracle.round_to(numbers, self.dtype)))
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
            rows = slice(starts[row], starts[row] + count)
            new = [x[rows].double().cpu() for x in (self.key, self.value)]
            if self.kv_cache_dtype in FP8:
                code = FP8[self.kv_cache_dtype]
                scales = [s.view(-1, 1) for s in self.scales]  # [KV heads or 1, 1]
                new = [(x.float() * (1 / s)).to(code).double() * s for x, s in zip(new, scales, strict=True)]
            before = self.length(sequence)
            self.stored[sequence] = tuple(
                np.concatenate([old, x.numpy()]) for old, x in zip(self.stored[sequence], new, strict=True)
            )
            lengths[row] = before + count
            run, offset = np.divmod(np.arange(before, before + count), self.interleave)
            at = run // self.ranks * self.interleave + offset  # in this rank's part, if it is its own
            block = self.blocks[sequence].numpy()[at // self.block_size]
            slot = block * self.block_size + at % self.block_size
            slots[rows] = np.where(run % self.ranks == self.rank, slot, -1)
            held = -(-lengths[row] // self.block_size)
            self.block_table[row, :held] = self.blocks[sequence, :held].to(self.device)
        self.seq_lens.copy_(torch.from_numpy(lengths))
        self.slot_mapping.copy_(torch.from_numpy(slots))
        all_starts = np.full(MAX_BATCH + 1, starts[-1])
        all_starts[: len(starts)] = starts
        self.query_start_loc.copy_(torch.from_numpy(all_starts))
        self.output.fill_(torch.nan)
        if not isinstance(causal, bool):
            self.is_causal[: len(causal)] = torch.tensor(causal, dtype=torch.int32, device=self.device)
        return Batch(
            query=self.query[:num_tokens],
            key=self.key[:num_tokens],
            value=self.value[:num_tokens],
            output=self.output[:num_tokens],
            metadata=CommonAttentionMetadata(
                query_start_loc=self.query_start_loc[: num_rows + 1],
                query_start_loc_cpu=self.query_start_loc[: num_rows + 1].cpu(),
                seq_lens=self.seq_lens[:num_rows],
                num_reqs=num_rows,
                num_actual_tokens=num_tokens,
                max_query_len=max(counts),
                max_seq_len=int(lengths.max()),
                block_table_tensor=self.block_table[:num_rows],
                slot_mapping=self.slot_mapping[:num_tokens],
                causal=causal if isinstance(causal, bool) else self.is_causal[:num_rows],
                # vLLM's runner has them in host memory.
                rswa_prefix_lens=None if reference_lens is None else torch.tensor(reference_lens),
                mm_req_doc_ranges=images,
                seq_lens_cpu_upper_bound=torch.from_numpy(lengths[:num_rows].astype(np.int32)),
            ),
        )

    def captured(self, sequences: Sequence[int], counts: Sequence[int], **options: Any) -> Batch:
        """The same as a captured step has it: with all rows and tokens, most of them padding."""
        padding = {
            "padded_tokens": MAX_TOKENS - sum(counts),
            "padded_rows": MAX_BATCH - len(sequences),
        }
        batch = self.batch(sequences, counts, **padding, **options)
        batch.metadata.max_query_len = MAX_TOKENS
        return batch

    def run(self, batch: Batch, common_prefix_len: int = 0) -> None:
        """As vLLM does: metadata, then the cache, then attention."""
        metadata = self.builder.build(common_prefix_len, batch.metadata)
        self.run_layer(batch, metadata)

    def run_layer(self, batch: Batch, metadata: Any) -> None:
        slots = batch.metadata.slot_mapping
        self.impl.do_kv_cache_update(self.attention, batch.key, batch.value, self.kv_cache, slots)
        new = (batch.key, batch.value) if self.ranks > 1 else (None, None)
        out = self.impl.forward(self.attention, batch.query, *new, self.kv_cache, metadata, batch.output)
        assert out is batch.output

    def check(self, sequences: Sequence[int], counts: Sequence[int], batch: Batch, **masks: Any) -> None:
        """The output against the oracle's, with these masks; causal unless they say otherwise."""
        keys, values = (np.concatenate([self.stored[s][i] for s in sequences]) for i in range(2))
        scores = {"softcap": self.options.get("logits_soft_cap") or 0.0}
        if self.options.get("alibi_slopes"):
            scores["alibi_slopes"] = np.array(self.options["alibi_slopes"], np.float32)
            scores["alibi_symmetric"] = True
        if self.options.get("sinks") is not None:
            scores["sinks"] = self.options["sinks"].detach().double().cpu().numpy()
        reference = oracle.attention(
            batch.query[: sum(counts)].double().cpu().numpy(),
            keys,
            values,
            counts,
            [self.length(s) for s in sequences],
            dtype=self.dtype,
            **scores,
            **{"causal": True, "window_left": (self.options.get("sliding_window") or 0) - 1, **masks},
        )
        reference.check_out(batch.output[: sum(counts)].double().cpu().numpy())
