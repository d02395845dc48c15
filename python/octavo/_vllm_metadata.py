"""The batches of vLLM's attention backend OCTAVO: what its layers get of a step, and how it is made."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import envs
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

# Of a layer whose window also hides earlier tokens of a query's own image (Gemma 4); of others it does not.
WINDOWS_HOLD = "mm_prefix_clamp_sliding_window"


@dataclass(slots=True)
class OctavoMetadata(AttentionMetadata):
    """A batch, under vLLM's names: tensors of vLLM's own, which it fills anew for every step."""

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor  # int32 [batch + 1]
    seq_lens: Tensor  # int32 [batch]
    block_table: Tensor  # int32 [batch, max_blocks]
    slot_mapping: Tensor  # int64 [tokens]
    causal: bool
    is_causal: Tensor | None  # int32 or bool [batch], instead of `causal`
    prefix_lens: Tensor | None  # int32 [batch]: what sequences see that are not causal, where some are
    common_prefix_len: int
    # R-SWA: int32 [batch], the tokens of each prompt, which all later ones see beside their window.
    reference_lens: Tensor | None = None
    reference_window: int = 0
    # int32 [batch, n, 2]: [begin, end) of images whose tokens see each other in both directions.
    image_ranges: Tensor | None = None
    # DCP: int32 [batch], the tokens from before the step on this rank; None where no rank has any.
    context_lens: Tensor | None = None


class OctavoMetadataBuilder(AttentionMetadataBuilder[OctavoMetadata]):
    """There is nothing to plan: operators read lengths and blocks on the device."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._max_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        # Which kernel runs, and so the bits of a result, follows from the most queries of a sequence.
        self._max_query_len = self._max_tokens if envs.VLLM_BATCH_INVARIANT else None
        self._prefix_lens: Tensor | None = None  # at one address, for CUDA graphs
        model = vllm_config.model_config
        self._reference_window: int | None = None if model is None else model.rswa_window
        self._reference_lens: Tensor | None = None  # likewise
        # In vLLM's own backends, too, drafts of models with R-SWA get new metadata.
        self.supports_draft_decode_metadata_update = self._reference_window is None
        self._ranks, self._rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self._context_lens: Tensor | None = None  # likewise
        # What follows from the lengths would stay that of the step before.
        self.supports_draft_decode_metadata_update &= self._ranks == 1
        self._interleave: int = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._has_images: bool = model is not None and model.is_mm_prefix_lm
        self._captures = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs have no ranges of images: they serve steps in which ranges show nothing.

        That is sure of single tokens. A last key's query sees its image to the end, and all of it where the
        window is no shorter than the image. vLLM drops the ranges of longer images, unless its model has
        windows that hold in images, and then no other ones.
        """
        model = vllm_config.model_config
        if model is None or not model.is_mm_prefix_lm:
            return cls._cudagraph_support
        layers = vllm_config.compilation_config.static_forward_context.values()
        longest = model.get_sliding_window()
        keeps_longer = getattr(model.hf_text_config, WINDOWS_HOLD, False)
        keeps_longer |= any(getattr(layer, WINDOWS_HOLD, False) for layer in layers)
        for layer in layers:
            window = getattr(layer, "sliding_window", None)
            if window is None or getattr(layer, WINDOWS_HOLD, False):
                continue
            if keeps_longer or longest is None or window < longest:
                return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> OctavoMetadata:
        """Return what `build` does, with all that some replay needs.

        vLLM captures sequences without a past and without prompts (R-SWA), and its steps have both.
        """
        self._captures = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._captures = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OctavoMetadata:
        batch = common_attn_metadata
        is_causal = batch.causal if isinstance(batch.causal, Tensor) else None
        metadata = OctavoMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=self._max_query_len or batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=True if is_causal is not None else batch.causal,
            is_causal=is_causal,
            prefix_lens=None,
            common_prefix_len=common_prefix_len,
        )
        if is_causal is not None:
            if self._prefix_lens is None:
                self._prefix_lens = torch.empty(self._max_tokens, dtype=torch.int32, device=self.device)
            metadata.prefix_lens = self._prefix_lens[: len(is_causal)]
            self.update_draft_decode_metadata(metadata)
        lens = batch.rswa_prefix_lens
        if self._reference_window is not None and (lens is not None or self._captures):
            if self._reference_lens is None:
                self._reference_lens = torch.empty(self._max_tokens, dtype=torch.int32, device=self.device)
            metadata.reference_lens = self._reference_lens[: len(batch.seq_lens)].zero_()
            if lens is not None:  # vLLM's second runner has none of padding rows
                metadata.reference_lens[: len(lens)].copy_(lens[: len(batch.seq_lens)], non_blocking=True)
            metadata.reference_window = self._reference_window
        if self._has_images:
            ranges = _image_ranges(batch)
            if ranges is not None:
                staged = torch.from_numpy(ranges)
                if self.device.type == "cuda":
                    staged = staged.pin_memory()  # or the copy would wait
                metadata.image_ranges = staged.to(self.device, non_blocking=True)
        if self._ranks > 1:
            metadata.context_lens = self._lens_of_context(batch)
        return metadata

    def _lens_of_context(self, batch: CommonAttentionMetadata) -> Tensor | None:
        if self._context_lens is None:
            self._context_lens = torch.empty(self._max_tokens, dtype=torch.int32, device=self.device)
        before = batch.seq_lens - batch.query_start_loc.diff()
        lens = self._context_lens[: len(before)]
        # Also where none has a context: a graph that is replayed reads the lengths.
        lens.copy_(get_dcp_local_seq_lens(before, self._ranks, self._rank, self._interleave))
        # All ranks have to come to the same answer, since they talk to each other where there is a context.
        upper_bound, starts = batch.seq_lens_cpu_upper_bound, batch.query_start_loc_cpu
        if upper_bound is not None and not self._captures:
            num_new = starts[: batch.num_reqs + 1].diff()
            if not (upper_bound[: batch.num_reqs] > num_new).any():
                return None
        return lens

    def update_block_table(
        self, metadata: OctavoMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> OctavoMetadata:
        other = copy.copy(metadata)  # of a subclass of vLLM's, maybe, with more fields
        other.block_table, other.slot_mapping = blk_table, slot_mapping
        return other

    def update_draft_decode_metadata(self, metadata: OctavoMetadata) -> None:
        if metadata.is_causal is not None:  # all other tensors are vLLM's
            torch.mul(metadata.seq_lens, metadata.is_causal == 0, out=metadata.prefix_lens)


def _image_ranges(batch: CommonAttentionMetadata) -> NDArray[np.int32] | None:
    """[batch, n, 2]: [begin, end) of images that have queries in this step; None where none has.

    vLLM gives all images of a request in all of its steps, as positions of the first and the last token.
    Their order is not promised. Those of a single token are no ranges to vLLM either.
    """
    images = batch.mm_req_doc_ranges
    if not images or not any(images.values()):
        return None
    # Lengths are exact in prompts, which alone have images. Others may be too large here; their queries are
    # behind all images with either length.
    assert batch.seq_lens_cpu_upper_bound is not None, "octavo.vllm: images need seq_lens_cpu_upper_bound"
    ends, starts = batch.seq_lens_cpu_upper_bound.tolist(), batch.query_start_loc_cpu.tolist()
    found = {}
    for row, of_row in images.items():
        last = ends[row] - 1  # position of the last query
        first = last + 1 - (starts[row + 1] - starts[row])
        ranges = [(begin, end + 1) for begin, end in of_row if begin < end]
        ranges = [(begin, end) for begin, end in ranges if max(begin, first) <= min(end - 1, last)]
        if ranges:
            found[row] = sorted(ranges)
    if not found:
        return None
    bounds = np.zeros((len(batch.seq_lens), max(map(len, found.values())), 2), np.int32)
    for row, ranges in found.items():
        bounds[row, : len(ranges)] = ranges
    return bounds
