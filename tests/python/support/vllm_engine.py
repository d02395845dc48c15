"""Runs small random models in vLLM for CPUs, and prints what they generate: JSON, on the last line.

    python vllm_engine.py FOLDER octavo|stock SCENARIO...

With `octavo`, vLLM runs on octavo.vllm, and `calls` counts the calls of its operators.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, in which calls are counted
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import transformers
from tokenizers import Tokenizer, models

VOCABULARY = 199
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **TOKENS,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough for attention to matter
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **LLAMA, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(**TOKENS, hidden_size=128, n_layer=2, n_head=4, initializer_range=0.15)
    ),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(
            **{name: x for name, x in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
        )
    ),
}
PROMPT_LENGTHS = (5, 100, 17, 64, 33)  # of which some take several chunks
ENGINE = {
    "block_size": 32,
    "disable_log_stats": False,  # so that preemptions are counted
    "dtype": "float32",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "skip_tokenizer_init": True,
}
SCENARIOS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "gemma2": ("gemma2", {}),
    "bloom": ("bloom", {}),
    "fp8": ("llama", {"kv_cache_dtype": "fp8"}),
    "preemption": ("llama", {"num_gpu_blocks_override": 9, "enable_prefix_caching": False}),
    "beams": ("llama", {"skip_tokenizer_init": False}),  # vLLM asks the tokenizer where a beam ends
    "encoder": (
        "bert",
        {
            "runner": "pooling",
            "skip_tokenizer_init": False,
            "enable_prefix_caching": False,
            "max_num_batched_tokens": 256,
        },
    ),
    "small blocks": ("llama", {"block_size": 8, "num_gpu_blocks_override": 256}),
}


def prompts() -> list[list[int]]:
    return [[(7 * i + 3 * j) % 190 + 3 for j in range(n)] for i, n in enumerate(PROMPT_LENGTHS)]


def generate(llm: Any) -> dict[str, Any]:
    """Twice, the second time from the prefix cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts()]
    tokens, logprobs, cached = [], [], []
    for _ in range(2):
        for output in llm.generate(requests, sampling, use_tqdm=False):
            [sample] = output.outputs
            tokens.append(list(sample.token_ids))
            logprobs.append(
                [step[t].logprob for t, step in zip(sample.token_ids, sample.logprobs, strict=True)]
            )
            cached.append(output.num_cached_tokens)
    return {"tokens": tokens, "logprobs": logprobs, "cached": cached}


def search(llm: Any) -> dict[str, Any]:
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts()[:3]], params)
    beams = [beam for output in found for beam in output.sequences]
    return {"tokens": [b.tokens for b in beams], "logprobs": [[b.cum_logprob] for b in beams]}


def embed(llm: Any) -> dict[str, Any]:
    """Vectors of the prompts, in the place of log-probabilities."""
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts()], use_tqdm=False)
    return {"tokens": [], "logprobs": [output.outputs.embedding for output in outputs]}


def save_model(name: str, path: Path) -> None:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(path)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(path)


def run(folder: Path, scenario: str) -> dict[str, Any]:
    from vllm import LLM

    name, options = SCENARIOS[scenario]
    path = folder / name
    if not path.exists():
        save_model(name, path)
    llm = LLM(str(path), **ENGINE | options)
    result = {"beams": search, "encoder": embed}.get(scenario, generate)(llm)
    result["preemptions"] = sum(x.value for x in llm.get_metrics() if x.name == "vllm:num_preemptions")
    del llm
    gc.collect()
    return result


def main() -> None:
    folder, backend, *scenarios = sys.argv[1:]
    calls = {"append_kv": 0, "paged_attention": 0, "attention": 0}
    if backend == "octavo":
        import octavo.vllm

        octavo.vllm.use_on_cpu()
        from octavo import _vllm_backend

        def count(name: str) -> None:
            operator = getattr(_vllm_backend, name)

            def call(*args: Any, **keywords: Any) -> Any:
                calls[name] += 1
                return operator(*args, **keywords)

            setattr(_vllm_backend, name, call)

        for name in calls:
            count(name)
    results = {}
    for scenario in scenarios:
        before = dict(calls)
        results[scenario] = run(Path(folder), scenario)
        results[scenario]["calls"] = {name: calls[name] - before[name] for name in calls}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
