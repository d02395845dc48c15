"""The ways to generate that bench_transformers.py compares, each in a process of its own."""

from __future__ import annotations

import functools
import gc
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

Texts = list[list[int]]
Prompts = list[tuple[list[int], int]]  # tokens, and how many new ones there are to be

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    # SmolLM2-135M, and the 1B of Llama 3.2, without the scaling of its rotary embedding.
    "smollm2-random": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    },
}
MODELS = ("smollm2", *SHAPES)
WITHOUT_GRAPHS = "octavo_without_graphs"  # a way of its own on a GPU alone
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """What all contestants have in common."""

    model: str
    device: str
    threads: int
    page_size: int
    slots: int  # tokens for which a cache of pages has room
    token_budget: int  # tokens in a batch
    seed: int


def load_model(setting: Setting) -> Any:
    """A model of transformers; float32 on the CPU, bfloat16 on a GPU."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(setting.seed)
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    if setting.model == "smollm2":
        from octavo.serving.smollm.weights import find_gguf

        path = find_gguf()
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(str(path.parent), gguf_file=path.name, dtype=dtype).to(setting.device)
    else:
        config = transformers.LlamaConfig(**SHAPES[setting.model])
        if setting.model == "tiny":
            config.initializer_range = 0.3  # so that tokens are not equally likely
        with torch.device(setting.device):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.eval()


# Each of them: from a model and a setting, what generates.
Generate = Callable[[Prompts], Texts]


def octavo_generate_batch(model: Any, setting: Setting, cuda_graphs: bool | None = None) -> Generate:
    """octavo.transformers.generate_batch is this loop, with one number of new tokens for all."""
    from octavo.transformers import make_scheduler

    scheduler = make_scheduler(
        model,
        num_pages=setting.slots // setting.page_size,
        page_size=setting.page_size,
        max_tokens=setting.token_budget,
        stop_tokens=(),
        prefix_cache=False,
        cuda_graphs=cuda_graphs,
    )

    def generate(prompts: Prompts) -> Texts:
        requests = [scheduler.submit(prompt, max_tokens=count) for prompt, count in prompts]
        for _ in scheduler.run():
            pass
        return [request.tokens() for request in requests]

    return generate


def _their_generate_batch(name: str) -> Callable[[Any, Setting], Generate]:
    """Continuous batching of transformers: what model.generate_batch does, likewise."""

    def contestant(model: Any, setting: Setting) -> Generate:
        import transformers

        import octavo.transformers

        octavo.transformers.register()
        model.set_attn_implementation(name)
        options: dict[str, Any] = {
            "generation_config": transformers.GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            "continuous_batching_config": transformers.ContinuousBatchingConfig(
                page_size=setting.page_size,
                num_blocks=setting.slots // setting.page_size,
                max_batch_tokens=setting.token_budget,
                allow_block_sharing=False,
                auto_switch_to_flash=False,
            ),
            "persistent_manager": True,  # with its CUDA graphs
        }

        def generate(prompts: Prompts) -> Texts:
            with model.continuous_batching_context_manager(**options) as manager:
                names = [manager.add_request(prompt, max_new_tokens=count) for prompt, count in prompts]
                found: dict[str, list[int]] = {}
                while len(found) < len(names):
                    result = manager.get_result(timeout=1)
                    if result is not None and result.is_finished():
                        if result.error:
                            raise RuntimeError(result.error)
                        found[result.request_id] = result.generated_tokens
                    elif result is None and not manager.is_running():
                        raise RuntimeError("the manager of transformers stopped")
            return [found[name] for name in names]

        return generate

    return contestant


def padded_generate(model: Any, setting: Setting) -> Generate:
    """One padded batch of all prompts, as long as the longest text takes."""
    import torch

    model.set_attn_implementation("sdpa")

    def generate(prompts: Prompts) -> Texts:
        longest = max(len(prompt) for prompt, _ in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in prompts])
        out = model.generate(
            ids.to(setting.device),
            attention_mask=mask.to(setting.device),
            do_sample=False,
            max_new_tokens=max(count for _, count in prompts),
        )[:, longest:].tolist()
        return [text[:count] for text, (_, count) in zip(out, prompts, strict=True)]

    return generate


CONTESTANTS: dict[str, Callable[[Any, Setting], Generate]] = {
    "octavo": octavo_generate_batch,
    WITHOUT_GRAPHS: functools.partial(octavo_generate_batch, cuda_graphs=False),
    "transformers_octavo": _their_generate_batch("octavo"),
    "transformers_sdpa": _their_generate_batch("sdpa"),
    "padded_sdpa": padded_generate,
}


class Memory:
    """The peak of a process, in MiB: of its resident set on the CPU, of torch's allocations on a GPU."""

    def __init__(self, device: str) -> None:
        self._on_cpu = device == "cpu"

    def reset(self) -> None:
        """Forget what loading the model took."""
        gc.collect()
        if self._on_cpu:
            Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
        else:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        if not self._on_cpu:
            import torch

            return torch.cuda.max_memory_allocated() / MIB
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024


def largest_gap(model: Any, setting: Setting, prompts: Prompts, texts: Texts) -> float:
    """How much less likely any token of the texts is than the likeliest there, to the largest logit.

    Zero for texts that are greedy to the last bit. The model is asked with torch's attention.
    """
    import torch

    model.set_attn_implementation("sdpa")
    gap = 0.0
    with torch.no_grad():
        for (prompt, count), text in zip(prompts, texts, strict=True):
            if len(text) != count:
                return float("inf")
            ids = torch.tensor([[*prompt, *text]], device=setting.device)
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(text, device=setting.device)[:, None])[:, 0]
            gap = max(gap, float(((logits.amax(1) - chosen) / logits.abs().amax(1)).max()))
    return gap


def serve(pipe: Connection, name: str, setting: Setting) -> None:
    """What the process of a contestant does: as the pipe says, until it is closed."""
    import torch

    import octavo

    torch.set_num_threads(setting.threads)
    octavo.set_num_threads(setting.threads)
    model = load_model(setting)
    memory = Memory(setting.device)
    memory.reset()
    loaded = memory.peak()
    generate = CONTESTANTS[name](model, setting)
    pipe.send(loaded)
    while True:
        try:
            order, *values = pipe.recv()
        except EOFError:
            return
        if order == "generate":
            before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            texts = generate(*values)
            seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            pipe.send((texts, seconds, cpu, memory.peak()))
        else:
            pipe.send(largest_gap(model, setting, *values))
