"""The classes of vLLM's attention backend OCTAVO, which vLLM imports once the backend was chosen."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from octavo import append_kv, attention, build_info, paged_attention
from octavo._vllm_context_parallel import exchange_parts, merge_parts
from octavo._vllm_metadata import WINDOWS_HOLD, OctavoMetadata, OctavoMetadataBuilder

# What vLLM's caches of uint8 hold, by the name of the cache's dtype.
_KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
_MAX_HEAD_SIZE = 512
_MAX_HEAD_SIZE_OF_CODES = 256  # on a GPU
# Most of it goes by positions, and the tokens in a rank's cache have gaps between them.
_NOT_BESIDE_DCP = {
    "has_sliding_window": "sliding window",
    "use_batch_invariant": "batch invariance",
    "use_mm_prefix": "spans of images",
    "use_non_causal": "non-causal attention",
    "use_rswa": "R-SWA",
}
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)  # which have no cache


class OctavoBackend(AttentionBackend):
    """What vLLM asks of a backend before it takes it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_KV_DTYPES]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True  # forward() does not look at keys and values, but under DCP

    @staticmethod
    def get_name() -> str:
        return "OCTAVO"

    @staticmethod
    def get_impl_cls() -> type[OctavoImpl]:
        return OctavoImpl

    @staticmethod
    def get_builder_cls() -> type[OctavoMetadataBuilder]:
        return OctavoMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(8)]  # others work, too, but the kernel for prompts is slower there

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        others = [layout for layout in KVCacheLayout if layout != KVCacheLayout.LBHNC]
        return (KVCacheLayout.LBHNC, *others)  # heads before slots is what kernels read fastest

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= _MAX_HEAD_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return capability is None or capability >= DeviceCapability(8, 0)  # None: the CPU

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        reasons: list[str] = super().validate_configuration(**asked)
        if asked.get("use_batch_invariant") and asked["attn_type"] in _ENCODERS:
            reasons.append(f"batch invariance of {asked['attn_type']} attention not supported")
        if asked.get("use_rswa") and asked.get("use_non_causal"):
            reasons.append("R-SWA beside non-causal attention not supported")
        if asked.get("use_mm_prefix"):
            if asked["attn_type"] != AttentionType.DECODER:
                reasons.append(f"spans of images in {asked['attn_type']} attention not supported")
            if asked.get("use_rswa"):
                reasons.append("spans of images beside R-SWA not supported")
            if asked.get("use_batch_invariant"):
                # On a GPU another kernel serves a batch with spans, also its sequences that have none.
                reasons.append("batch invariance beside spans of images not supported")
        if asked.get("use_dcp"):
            if asked["attn_type"] == AttentionType.ENCODER_DECODER:
                reasons.append("DCP in encoder_decoder attention not supported")
            for other, name in _NOT_BESIDE_DCP.items():
                if asked.get(other):
                    reasons.append(f"{name} beside DCP not supported")
        stored = getattr(torch, str(asked["kv_cache_dtype"]), asked["dtype"])  # of "auto" and codes: any
        if stored != asked["dtype"]:
            reasons.append(f"kv_cache_dtype {stored} beside dtype {asked['dtype']} not supported")
        if asked["device_capability"] is not None:
            if asked["kv_cache_dtype"] in _KV_DTYPES and asked["head_size"] > _MAX_HEAD_SIZE_OF_CODES:
                reasons.append(f"head_size {asked['head_size']} over codes not supported on a GPU")
            if asked["dtype"] == torch.float32:
                reasons.append("float32 not supported on a GPU")
            if build_info()["why_cpu_only"]:
                reasons.append(build_info()["why_cpu_only"])
        return reasons


class OctavoImpl(AttentionImpl[OctavoMetadata]):
    """The attention of a layer."""

    can_return_lse_for_decode = True  # to itself: vLLM asks for it before it takes a backend under DCP
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ):
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        reasons = OctavoBackend.validate_configuration(  # which the CPU's platform does not call
            head_size=head_size,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=kv_cache_dtype,
            block_size=None,
            use_mla=False,
            has_sink=sinks is not None,
            use_sparse=False,
            use_mm_prefix=model is not None and model.is_mm_prefix_lm,
            use_per_head_quant_scales=False,  # which are served
            device_capability=None,
            attn_type=attn_type,
            has_sliding_window=sliding_window is not None,
            use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
            use_rswa=model is not None and model.rswa_window is not None,
            use_dcp=self.dcp_world_size > 1,
        )
        if self.dcp_world_size > 1 and alibi_slopes is not None and attn_type not in _ENCODERS:
            reasons.append("ALiBi beside DCP not supported")
        if reasons:
            raise ValueError(f"octavo.vllm: {', '.join(reasons)}")
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._kv_dtype = _KV_DTYPES.get(kv_cache_dtype)
        self._is_encoder = attn_type in _ENCODERS
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        self._softcap = logits_soft_cap or 0.0
        self._slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self._given_sinks = sinks  # whose numbers are loaded later
        self._sinks = None if sinks is None else sinks.detach().to(torch.float32)
        self._batch_invariant = envs.VLLM_BATCH_INVARIANT
        self._may_share_prefix = sliding_window is None and alibi_slopes is None and not self._batch_invariant

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take over the sinks; in place, since CUDA graphs have their address."""
        if self._sinks is not None and self._given_sinks is not None:
            self._sinks.copy_(self._given_sinks.detach())

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values; vLLM does not call it for a layer that has the cache of another one.

        Args:
            layer: vLLM's layer, which has the scales of fp8.
            key: [tokens or more, num_kv_heads, head_size].
            value: like key.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], in any layout.
            slot_mapping: int64 [tokens]: ``block * block_size + slot`` of each token, or -1 to leave it out.
        """
        if self._is_encoder:
            return
        num_tokens = len(slot_mapping)
        if len(key) != num_tokens:
            key, value = key[:num_tokens], value[:num_tokens]
        k_pages, v_pages = kv_cache.transpose(1, 2).chunk(2, -1)
        append_kv(key, value, k_pages, v_pages, slot_mapping=slot_mapping, **self._codes(layer))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: OctavoMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend to the cache, which has the batch's own keys and values already; in encoders to these.

        Args:
            layer: vLLM's layer, which has the scales of fp8.
            query: [tokens or more, num_heads, head_size].
            key: [tokens or more, num_kv_heads, head_size] in encoders and under DCP; elsewhere not looked at,
                as value.
            value: likewise.
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], in any layout; not of encoders.
            attn_metadata: of the batch; None while vLLM measures memory, and then the output is 0.
            output: like query, written; rows past the batch's tokens are left as they are, or under DCP
                become 0.
            output_scale: None: there is no output of codes.
            output_block_scale: likewise.

        Returns:
            output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("octavo.vllm: output of codes is not supported")
        if attn_metadata is None:
            return output.fill_(0)
        batch = attn_metadata
        if self._is_encoder:
            assert key is not None and value is not None
            attention(query, key, value, out=output, **self._of_new_tokens(batch, causal=False))
        elif self.dcp_world_size > 1:
            if key is None or value is None:
                raise NotImplementedError("octavo.vllm: DCP without keys and values is not supported")
            self._attend_across_ranks(layer, query, key, value, kv_cache, batch, output)
        elif batch.reference_lens is not None:
            self._attend_to_references(layer, query, kv_cache, batch, batch.reference_lens, output)
        elif self._window_left >= 0 and batch.prefix_lens is not None:
            # Each sequence has a window of its own kind: both, and of each row the one that is its own.
            both = output, torch.empty_like(output)
            for causal, out in zip((True, False), both, strict=True):
                self._attend(layer, query, kv_cache, batch, out, causal=causal)
            ends = batch.query_start_loc[1:]
            _, sees_all = _of_rows(batch.prefix_lens > 0, ends, len(output))
            _choose(sees_all, both[1], output)
        else:
            self._attend(
                layer, query, kv_cache, batch, output, causal=batch.causal, prefix_lens=batch.prefix_lens
            )
        return output

    def _of_new_tokens(self, batch: OctavoMetadata, *, causal: bool) -> dict[str, Any]:
        """Options of attention to each sequence's own keys of this step, without the cache."""
        return {
            "cu_seqlens_q": batch.query_start_loc,
            "cu_seqlens_k": batch.query_start_loc,
            "max_seqlen_q": batch.max_query_len,
            "max_seqlen_k": batch.max_query_len,
            "softmax_scale": self.scale,
            "causal": causal,
            "window_left": self._window_left,
            "window_right": self._window_left,
            "softcap": self._softcap,
            "alibi_slopes": self._slopes,
            "alibi_symmetric": self._slopes is not None,
            "sinks": self._sinks,
        }

    def _attend_across_ranks(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        batch: OctavoMetadata,
        output: Tensor,
    ) -> None:
        """DCP: to the new tokens here, to those before them where they lie. Sinks join the first part."""
        options = self._of_new_tokens(batch, causal=batch.causal)
        if batch.context_lens is None:
            attention(query, key, value, out=output, **options)
            return
        new_tokens = attention(query, key, value, return_lse=True, **options)
        group = get_dcp_group()
        queries = group.all_gather(query.contiguous(), dim=1)
        k_pages, v_pages = kv_cache.transpose(1, 2).chunk(2, -1)
        context = paged_attention(
            queries,
            k_pages,
            v_pages,
            batch.block_table,
            batch.context_lens,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=self.scale,
            causal=False,
            softcap=self._softcap,
            return_lse=True,
            **self._codes(layer),
        )
        output.copy_(merge_parts([new_tokens, *exchange_parts(group, *context)]))

    def _attend_to_references(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        batch: OctavoMetadata,
        reference_lens: Tensor,
        output: Tensor,
    ) -> None:
        """R-SWA: a token sees the prompt's tokens and a window, of both those before it.

        A prompt's own tokens thus see all before them, and have a result of their own, since prefix_lens lets
        them see the prompt to its end. No key lies behind a sequence's last token: single tokens need none.
        """
        window_left = batch.reference_window - 1
        self._attend(
            layer, query, kv_cache, batch, output, prefix_lens=reference_lens, window_left=window_left
        )
        if batch.max_query_len == 1:
            return
        of_prompts = torch.empty_like(output)
        self._attend(layer, query, kv_cache, batch, of_prompts, window_left=-1)
        ends = batch.query_start_loc[1:]
        rows, end_of_prompt = _of_rows(reference_lens - batch.seq_lens + ends, ends, len(output))
        _choose(rows < end_of_prompt, of_prompts, output)

    def _attend(
        self,
        layer: Any,
        query: Tensor,
        kv_cache: Tensor,
        batch: OctavoMetadata,
        out: Tensor,
        *,
        causal: bool = True,
        prefix_lens: Tensor | None = None,
        window_left: int | None = None,  # by default the layer's own
    ) -> None:
        k_pages, v_pages = kv_cache.transpose(1, 2).chunk(2, -1)
        window = self._window_left if window_left is None else window_left
        ranges = batch.image_ranges
        may_share_prefix = self._may_share_prefix and window < 0 and ranges is None
        paged_attention(  # which leaves rows past query_start_loc[-1] alone
            query,
            k_pages,
            v_pages,
            batch.block_table,
            batch.seq_lens,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            softmax_scale=self.scale,
            causal=causal,
            window_left=window,
            window_right=window,
            softcap=self._softcap,
            alibi_slopes=self._slopes,
            alibi_symmetric=self._slopes is not None,  # as FLASH_ATTN; causal or not
            sinks=self._sinks,
            prefix_lens=prefix_lens,
            bidirectional_ranges=ranges,
            ranges_keep_window_left=ranges is not None and getattr(layer, WINDOWS_HOLD, False),
            batch_invariant=self._batch_invariant,
            shared_prefix_len=batch.common_prefix_len if may_share_prefix else 0,
            out=out,
            **self._codes(layer),
        )

    def _codes(self, layer: Any) -> dict[str, Any]:
        """What a cache of codes needs besides; the scales are read on the device, at a graph's replay too."""
        if self._kv_dtype is None:
            return {}
        return {
            "kv_dtype": self._kv_dtype,
            "k_scale": layer._k_scale.view(-1),  # one, or one for each KV head
            "v_scale": layer._v_scale.view(-1),
        }


def _of_rows(numbers: Tensor, ends: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The rows of packed tokens, and of each the number of its sequence; 0 past the last of `ends`."""
    rows = torch.arange(num_rows, dtype=ends.dtype, device=ends.device)
    return rows, torch.nn.functional.pad(numbers, (0, 1))[torch.searchsorted(ends, rows, right=True)]


def _choose(rows: Tensor, theirs: Tensor, out: Tensor) -> None:
    """Give these rows of `out` the numbers that `theirs` has."""
    out.copy_(torch.where(rows.view(-1, *[1] * (out.ndim - 1)), theirs, out))
