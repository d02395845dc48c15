"""The types in the signatures of Octavo's functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

if TYPE_CHECKING:  # NumPy itself is imported by the first call that makes one of its arrays
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import NotRequired


class SupportsDLPack(Protocol):
    """An array: anything that lends its memory through DLPack.

    torch.Tensor, jax.Array, cupy.ndarray, numpy.ndarray, ... Octavo also calls __dlpack_device__, and passes
    keywords to __dlpack__; this names only what every library's type stubs have.
    """

    def __dlpack__(self) -> object: ...


Array = TypeVar("Array", bound=SupportsDLPack)
"""The framework of the call's first array, which is that of its results."""

NumPyArray = TypeVar("NumPyArray", bound="NDArray[Any]")
"""The same where it is NumPy, whose arrays have their dtype in their type: a log-sum-exp has another one."""

Integers: TypeAlias = (
    SupportsDLPack | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]
)
"""Page numbers, lengths or offsets. A list or a tuple, of no other sequence, only with arrays on the CPU."""


class SupportsCudaStream(Protocol):
    """A stream of cuda.core, or of whatever else follows its protocol."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """torch.cuda.Stream."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """cupy.cuda.Stream."""

    @property
    def ptr(self) -> int: ...


Stream: TypeAlias = int | SupportsCudaStream | TorchStream | CupyStream
"""A CUDA stream: its address (cudaStream_t), or an object that has it."""


class AttentionScalars(TypedDict, total=False):
    """What ``attention`` takes by keyword, but for arrays; in ``octavo`` and in ``octavo.jax``."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    alibi_symmetric: bool
    ranges_keep_window_left: bool
    block_size: int
    dropout_p: float
    dropout_seed: int | None
    dropout_offset: int


class _AttentionArrays(AttentionScalars, total=False):
    """The same with arrays, as ``attention_backward`` takes them too."""

    cu_seqlens_q: Integers | None
    cu_seqlens_k: Integers | None
    alibi_slopes: SupportsDLPack | None
    prefix_lens: Integers | None
    bidirectional_ranges: Integers | None
    block_mask: SupportsDLPack | None
    sinks: SupportsDLPack | None


class AttentionOptions(_AttentionArrays, total=False):
    """What ``octavo.attention`` takes by keyword, whatever it returns."""

    softmax_phi: float | SupportsDLPack | None


class AttentionBackwardScalars(AttentionScalars, total=False):
    """What ``attention_backward`` takes by keyword, but for arrays; in ``octavo`` and in ``octavo.jax``."""

    deterministic: bool


class AttentionBackwardOptions(_AttentionArrays, total=False):
    """What ``octavo.attention_backward`` takes by keyword, whatever it returns."""

    dlse: SupportsDLPack | None
    deterministic: bool


class PagedAttentionScalars(TypedDict, total=False):
    """What ``paged_attention`` takes by keyword, but for arrays; in ``octavo`` and in ``octavo.jax``."""

    max_seqlen_q: int | None
    softmax_scale: float | None
    causal: bool
    window_left: int
    window_right: int
    attention_chunk: int
    softcap: float
    alibi_symmetric: bool
    ranges_keep_window_left: bool
    kv_dtype: str | None
    rotate_keys: bool
    num_splits: int | None
    batch_invariant: bool
    shared_prefix_len: int
    static_past: bool


class PagedAttentionOptions(PagedAttentionScalars, total=False):
    """What ``octavo.paged_attention`` takes by keyword, whatever it returns."""

    cu_seqlens_q: Integers | None
    alibi_slopes: SupportsDLPack | None
    prefix_lens: Integers | None
    bidirectional_ranges: Integers | None
    k_scale: float | SupportsDLPack | None
    v_scale: float | SupportsDLPack | None
    k_scales: SupportsDLPack | None
    v_scales: SupportsDLPack | None
    k_channel_offset: SupportsDLPack | None
    k_channel_scale: SupportsDLPack | None
    sinks: SupportsDLPack | None
    softmax_phi: float | SupportsDLPack | None
    tree_mask: SupportsDLPack | None
    chosen_pages: Integers | None


class LatentAttentionScalars(TypedDict, total=False):
    """What ``latent_attention`` takes by keyword, but for arrays; in ``octavo`` and in ``octavo.jax``."""

    v_dim: int
    max_seqlen_q: int | None
    softmax_scale: float | None
    causal: bool
    kv_scale: float | None
    num_splits: int | None


class LatentAttentionOptions(LatentAttentionScalars, total=False):
    """What ``octavo.latent_attention`` takes by keyword, whatever it returns."""

    cu_seqlens_q: Integers | None


class Argument(TypedDict):
    """One argument in the description of an operator (src/operators/schema.h)."""

    name: str
    type: Literal["array", "bool", "int", "float", "str"]
    access: Literal["read", "write", "result"]  # what the operator does to an array
    required: bool
    default: bool | int | float | None  # None: not given, or chosen by the operator
    in_place_of: NotRequired[str]  # an array: the number for which Python may have it


class BuildInfo(TypedDict):
    """What this build holds."""

    version: str
    cuda_version: str  # "13.0"; empty without CUDA
    why_cpu_only: str  # and how to get CUDA; empty with CUDA
    architectures: list[str]  # "sm_80", "sm_90a", "compute_80"
    instances: list[str]  # the CUDA kernels compiled
    compiler: str


class CpuInfo(TypedDict):
    """What the CPU offers, and what is used of it."""

    isa: str  # in use: "baseline", "avx2", "avx512" or "avx512_bf16"
    features: list[str]
    num_threads: int


class GpuInfo(TypedDict):
    """One GPU that the driver shows."""

    index: int
    name: str
    compute_major: int
    compute_minor: int
    num_sms: int
    memory_bytes: int


class CacheEvent(TypedDict):
    """A page that became findable in the prefix cache of a PageAllocator, or no longer is."""

    kind: Literal["stored", "evicted"]
    page: int
    key: int  # 128 bits: hash of the page's tokens and all before them
    parent_key: int  # of the page before it, or of the namespace
    tokens: NDArray[np.int32]
