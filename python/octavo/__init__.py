"""Paged attention for every array library.

One native library behind NumPy, PyTorch, JAX and CuPy: arrays come in through DLPack without a copy, and
results come out as arrays of the caller's own framework.
"""

from octavo._attention import attention, merge_states
from octavo._attention_backward import attention_backward
from octavo._cache import PagedCache, empty_cache
from octavo._cmake import get_cmake_dir
from octavo._core import (
    InvalidSequence,
    OutOfPages,
    PageAllocator,
    PageGroup,
    StepArrays,
    __version__,
    build_info,
    get_num_threads,
    set_num_threads,
)
from octavo._explain import Explanation, explain
from octavo._kv_cache import KVCache, KVCacheStep
from octavo._latent_attention import latent_attention
from octavo._linear import linear
from octavo._linear_plan import LinearPlan, linear_plan
from octavo._linear_table import LinearTable, LinearTableRow, LinearTableSource, linear_table
from octavo._paged_attention import append_kv, check_page_table, copy_pages, paged_attention
from octavo._rms_norm import rms_norm
from octavo._softmax_phi import calibrate_softmax_phi
from octavo._tree_mask import pack_tree_mask, tree_mask
from octavo._tune_linear import tune_linear

__all__ = [
    "Explanation",
    "InvalidSequence",
    "KVCache",
    "KVCacheStep",
    "LinearPlan",
    "LinearTable",
    "LinearTableRow",
    "LinearTableSource",
    "OutOfPages",
    "PageAllocator",
    "PageGroup",
    "PagedCache",
    "StepArrays",
    "__version__",
    "append_kv",
    "attention",
    "attention_backward",
    "build_info",
    "calibrate_softmax_phi",
    "check_page_table",
    "copy_pages",
    "empty_cache",
    "explain",
    "get_cmake_dir",
    "get_num_threads",
    "latent_attention",
    "linear",
    "linear_plan",
    "linear_table",
    "merge_states",
    "pack_tree_mask",
    "paged_attention",
    "rms_norm",
    "set_num_threads",
    "tree_mask",
    "tune_linear",
]
