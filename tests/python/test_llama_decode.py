"""examples/llama_decode.py: Llama on Octavo's operators, beside the one of transformers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.append(str(EXAMPLES))

from llama import model as llama_model  # noqa: E402
from llama.config import CONFIGS  # noqa: E402
from llama.decoding import DecodeStep, Generation, captured  # noqa: E402
from llama.model import Llama  # noqa: E402
from llama.weights import Weights  # noqa: E402

TINY = CONFIGS["tiny"]
PROMPTS = ([5, 17, 3, 99, 250, 4, 4], [7], [42] * 20)  # which end inside, at the start and behind a page

pytestmark = pytest.mark.usefixtures("one_torch_thread", "seeded_torch", "without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


def random_weights(dtype: Any = torch.float32, device: str = "cpu") -> Weights:
    # Tenfold: scores of single tokens then stand out, so that a wrong position or page is seen.
    return Weights.random(TINY, 0, dtype, device, std=0.2)


def model_of_transformers(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=TINY.vocabulary,
        hidden_size=TINY.hidden_size,
        intermediate_size=TINY.ffn_size,
        num_hidden_layers=TINY.num_layers,
        num_attention_heads=TINY.num_q_heads,
        num_key_value_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        attn_implementation="eager",
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_logits_are_those_of_transformers(rope: dict[str, Any], static: bool) -> None:
    """Each step's logits, after each prompt: transformers sees all tokens at once, and has no cache."""
    theirs = model_of_transformers(rope_parameters=rope)
    weights = Weights.from_transformers(theirs)
    model = Llama(weights, max_positions=64, static_weight=static, static_past=static)
    generation = Generation(model, PROMPTS, num_new_tokens=20, page_size=4)
    step = generation.step
    found = []
    step_once = step._step

    def record() -> None:
        step_once()
        found.append(step.logits.clone())

    step._step = record
    tokens = generation.run()
    assert tokens.shape == (len(PROMPTS), 20) and len(found) == 19
    for b, prompt in enumerate(PROMPTS):
        whole = torch.tensor([*prompt, *tokens[b].tolist()])
        exact = theirs(whole[None]).logits[0, len(prompt) - 1 : -1]
        assert exact.argmax(-1).tolist() == tokens[b].tolist()
        for logits, row in zip(found, exact[1:], strict=True):
            torch.testing.assert_close(logits[b], row, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def test_weights_are_those_of_the_seed() -> None:
    one, same, other = (Weights.random(TINY, seed, torch.bfloat16, "cpu") for seed in (3, 3, 4))
    assert torch.equal(one.head, same.head) and torch.equal(one.layers[1].down, same.layers[1].down)
    assert not torch.equal(one.head, other.head)
    assert not torch.equal(one.layers[0].qkv, one.layers[1].qkv)
    assert one.head.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert one.norm.float().mean().item() == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("name", "billions"), [("llama-2-7b", 6.738), ("llama-3-8b", 8.030)], ids=["2-7b", "3-8b"]
)
def test_sizes_of_the_models(name: str, billions: float) -> None:
    """As their model cards have them."""
    config = CONFIGS[name]
    assert config.elements / 1e9 == pytest.approx(billions, abs=5e-4)
    assert config.elements - config.elements_of_a_step == config.vocabulary * config.hidden_size


def test_elements_are_those_of_the_tensors() -> None:
    weights = random_weights()
    layers = [x for layer in weights.layers for x in vars(layer).values()]
    ends = [weights.norm, weights.head]
    assert TINY.elements_of_layers == sum(x.numel() for x in layers)
    assert TINY.elements_of_a_step == sum(x.numel() for x in [*layers, *ends])
    assert TINY.elements == TINY.elements_of_a_step + weights.embedding.numel()
    caches = Llama(weights, 1).empty_caches(1, 1)
    assert 4 * TINY.elements_of_a_token == sum(cache.bytes_per_token for cache in caches)


def test_a_layer_is_six_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Llama(random_weights(), 64, static_weight=True, static_past=True)
    step = Generation(model, PROMPTS, num_new_tokens=3).step
    calls: list[tuple[str, dict[str, Any]]] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            function = getattr(octavo, name)

            def call(*args: Any, **options: Any) -> Any:
                calls.append((name, options))
                return function(*args, **options)

            return call

    octavo = llama_model.octavo
    monkeypatch.setattr(llama_model, "octavo", Counting())
    step()
    layer = ["linear", "append_kv", "paged_attention", "linear", "linear", "linear"]
    assert [name for name, _ in calls] == [*layer * TINY.num_layers, "linear"]
    products = [options for name, options in calls if name == "linear"]
    assert all(options["static_weight"] for options in products)
    assert all(options["static_past"] for name, options in calls if name == "paged_attention")
    normalising = [options["norm_weight"] is not None for options in products]
    assert normalising == [*[True, False, True, False] * TINY.num_layers, True]


def test_refuses_models_that_it_would_compute_wrongly() -> None:
    biased = model_of_transformers(attention_bias=True)
    with pytest.raises(ValueError, match=r"must be a Llama with SiLU and without biases; .* and 8 biases"):
        Weights.from_transformers(biased)
    with pytest.raises(ValueError, match="with gelu and 0 biases"):
        Weights.from_transformers(model_of_transformers(hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ValueError, match=r"must be default, linear or llama3, .*; got dynamic"):
        Weights.from_transformers(model_of_transformers(rope_parameters=dynamic))


def test_script() -> None:
    command = [sys.executable, str(EXAMPLES / "llama_decode.py"), "--device", "cpu"]
    options = ["--batch", "2", "--context", "9", "--steps", "5", "--layers", "1"]
    shown = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    first, prefill, speed, *rows = shown.splitlines()
    assert first == "tiny, 1 layers, bfloat16, cpu, static weights"
    assert prefill.startswith("2 prompts of 9 tokens") and speed.endswith(" tokens/s")
    assert [len(row.split()) for row in rows] == [5, 5]


@pytest.mark.gpu
def test_captured_steps_are_those_of_the_host() -> None:
    """A graph reads tokens, lengths and pages anew at each replay, and leaves the state as it found it."""
    weights = random_weights(torch.bfloat16, "cuda")
    model = Llama(weights, 128, static_weight=True, static_past=True)
    generation = Generation(model, PROMPTS, num_new_tokens=40)
    step = generation.step
    assert isinstance(step, DecodeStep)
    assert step.seq_lens.tolist() == [len(prompt) for prompt in PROMPTS]
    found = generation.run()
    assert step.seq_lens.tolist() == [len(prompt) + 39 for prompt in PROMPTS]
    host = Generation(model, PROMPTS, num_new_tokens=40)
    host.step._step = host.step._run
    assert torch.equal(found, host.run())


@pytest.mark.gpu
def test_capture_keeps_the_state() -> None:
    counter, log = torch.zeros(1, device="cuda"), torch.zeros(8, device="cuda")

    def step() -> None:
        log.index_add_(0, counter.long(), torch.ones(1, device="cuda"))
        counter.add_(1)

    replay = captured(step, [counter, log])
    assert counter.item() == 0 and not log.any()
    for _ in itertools.repeat(None, 3):
        replay()
    assert counter.item() == 3 and log.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
