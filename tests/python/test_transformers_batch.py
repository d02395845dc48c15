"""octavo.transformers.generate_batch: models served from pages, against their own generate()."""

import functools
import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from octavo.serving import Sampling  # noqa: E402
from octavo.transformers import generate_batch, make_scheduler  # noqa: E402
from support.tiny_models import CONFIGS, FULL, SIZES, SLIDING, make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOWS = {
    "qwen2": [None, 5, 5],
    "mistral": [5, 5, 5],
    "gemma2": [5, None, 5],
    "gemma3": [5, None, 5],
    "gpt_oss": [5, None, 5],
    "llama4": [5, None, 5],
}


@pytest.fixture(params=CONFIGS)
def model(request):
    return make_model(request.param)


@pytest.fixture(scope="module")
def llama():
    return make_model("llama")


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 61, (length,), generator=generator).tolist() for length in (3, 21, 1, 12, 30)]


def generated(model, prompt, number, **options):
    ids = torch.tensor([prompt])
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=number, do_sample=False, **options
    )
    return text[:, len(prompt) :].tolist()


def test_greedy_text_is_that_of_generate(model, prompts):
    """On transformers' default implementation, sdpa or eager."""
    before = model.config._attn_implementation
    requests = generate_batch(model, prompts, max_new_tokens=16, page_size=4, max_batch=3, token_budget=16)
    assert model.config._attn_implementation == before != "octavo"
    texts = [request.tokens() for request in requests]
    assert texts == [generated(model, prompt, 16)[0] for prompt in prompts]
    assert len({token for text in texts for token in text}) > 12


@pytest.mark.parametrize("name", CONFIGS)
def test_windows_are_those_of_the_config(name):
    scheduler = make_scheduler(make_model(name), num_pages=8)
    windows = [None if group.window_left < 0 else group.window_left for group in scheduler.cache.page_groups]
    assert sorted(set(WINDOWS.get(name, [None])), key=str) == sorted(windows, key=str)
    assert scheduler.cache.num_layers == 3


def test_a_token_beyond_the_vocabulary_is_refused(llama):
    scheduler = make_scheduler(llama, num_pages=8)
    size = llama.config.vocab_size
    scheduler.submit([size - 1], max_tokens=1)
    with pytest.raises(ValueError, match=f"vocab_size.*{size}"):
        scheduler.submit([1, size], max_tokens=1)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_too_few_pages_change_nothing(name, prompts):
    model = make_model(name)
    requests = generate_batch(model, prompts, max_new_tokens=12, page_size=4, num_pages=11, num_host_pages=4)
    for prompt, request in zip(prompts, requests, strict=True):
        assert [request.tokens()] == generated(model, prompt, 12)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beams_are_those_of_generate(name, prompts, length_penalty):
    model = make_model(name)
    requests = generate_batch(
        model,
        prompts[:3],
        max_new_tokens=10,
        num_beams=4,
        num_samples=3,
        stop_tokens=[7, 9],
        length_penalty=length_penalty,
    )
    for prompt, request in zip(prompts, requests, strict=False):
        expected = generated(
            model,
            prompt,
            10,
            num_beams=4,
            num_return_sequences=3,
            eos_token_id=[7, 9],
            length_penalty=length_penalty,
        )
        assert len(expected) == 3
        for index, text in enumerate(expected):
            end = next((i + 1 for i, token in enumerate(text) if token in (7, 9)), 10)
            assert request.tokens(index) == text[:end]  # what follows is padding


def test_samples(llama, prompts):
    sampling = Sampling(1.0, top_p=0.9, seed=3)
    options = {"max_new_tokens": 6, "num_samples": 3, "sampling": sampling, "logprobs": True}
    together = generate_batch(llama, prompts, **options)
    alone = [generate_batch(llama, [prompts[0]], **options)[0], together[0]]
    for index in range(3):
        assert alone[0].tokens(index) == alone[1].tokens(index)
        text = [*prompts[0], *together[0].tokens(index)]
        with torch.no_grad():
            logprobs = llama(torch.tensor([text])).logits[0].log_softmax(-1)
        expected = [logprobs[i - 1, text[i]].item() for i in range(len(prompts[0]), len(text))]
        assert together[0].token_logprobs(index) == pytest.approx(expected, abs=1e-4)
    assert together[0].tokens(0) != together[0].tokens(1)


def test_eos_of_the_model_ends_a_text(llama, prompts):
    text = generated(llama, prompts[0], 12)[0]
    llama.generation_config.eos_token_id = [text[4], 60]
    try:
        (request,) = generate_batch(llama, prompts[:1], max_new_tokens=12)
    finally:
        llama.generation_config.eos_token_id = None
    assert request.tokens() == text[: text.index(text[4]) + 1]
    assert request.finish_reason() == "stop"


def test_prompts_share_what_they_begin_with(llama, prompts):
    scheduler = make_scheduler(llama, num_pages=64, page_size=4)
    for last in (5, 6):
        scheduler.submit([*prompts[4], last], max_tokens=4)
    assert len(list(scheduler.run())) == 8
    assert scheduler.stats().found_tokens == 28


def test_a_cache_of_codes(llama, prompts):
    requests = generate_batch(llama, prompts, max_new_tokens=4, dtype="int8")
    first = [request.tokens()[0] for request in requests]
    assert first == [generated(llama, prompt, 1)[0][0] for prompt in prompts]


def test_bfloat16(prompts):
    model = make_model("llama", dtype=torch.bfloat16)
    scheduler = make_scheduler(model, num_pages=8)
    assert scheduler.cache.layers[0].k_pages.dtype == torch.bfloat16
    requests = generate_batch(model, prompts, max_new_tokens=4)
    assert all(len(request.tokens()) == 4 for request in requests)


def test_only_the_rows_wanted_go_through_the_head(llama, prompts):
    """No logits of a prompt but the last."""
    rows = []
    handle = llama.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[:2]))
    scheduler = make_scheduler(llama, num_pages=64)
    rows.clear()
    for prompt in prompts:
        scheduler.submit(prompt, max_tokens=2)
    list(scheduler.run())
    handle.remove()
    assert rows == [(1, 5), (1, 5)]


def test_the_model_is_as_before(prompts):
    model = make_model("llama", attn_implementation="eager").train()
    generate_batch(model, prompts[:1], max_new_tokens=1)
    assert model.training
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="max_length"):
        generate_batch(model, prompts[:1], max_new_tokens=1000)
    assert model.training
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("training", [False, True])
def test_each_module_is_in_its_mode_again(training):
    model = make_model("llama").train(training)
    model.model.layers[1].train(not training)
    before = {name: module.training for name, module in model.named_modules()}
    generate_batch(model, [[1, 2, 3]], max_new_tokens=1)
    assert {name: module.training for name, module in model.named_modules()} == before


@pytest.mark.parametrize("sizes", [{}, {"num_pages": 8, "token_budget": 10**6}, {"num_pages": 8, "rows": 1}])
def test_a_scheduler_that_cannot_be_made_leaves_the_model_as_it_was(sizes):
    model = make_model("llama", attn_implementation="eager").train()
    with pytest.raises((ValueError, TypeError), match=r"num_pages|token_budget|rows"):
        make_scheduler(model, **sizes)
    assert model.config._attn_implementation == "eager"
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("sizes", [{"max_tokens": 5}, {"token_budget": 5}])
def test_a_batch_has_no_more_sequences_than_tokens(llama, prompts, sizes):
    assert make_scheduler(llama, num_pages=8, **sizes).cache.max_batch == 5
    requests = generate_batch(llama, [prompts[0]] * 7, max_new_tokens=3, **sizes)
    assert [request.tokens() for request in requests] == generated(llama, prompts[0], 3) * 7
    assert make_scheduler(llama, num_pages=8).cache.max_batch == 64


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            ["12"],
            "prompts[0] must be the tokens of a prompt, integers in a list or a tensor of one axis; got '12'",
        ),
        (
            [[1, 2], [1.9]],
            "prompts[1] must be the tokens of a prompt, integers in a list or a tensor of one axis",
        ),
        ([[1, 2], [1.9]], "got [1.9]"),
        ([torch.tensor([1.9])], "got tensor([1.9000])"),
        ([1, 2], "integers in a list or a tensor of one axis; got 1"),
    ],
)
def test_prompts_that_are_no_tokens_are_refused(llama, prompts, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        generate_batch(llama, prompts, max_new_tokens=2)


def test_no_prompts(llama):
    assert generate_batch(llama, [], max_new_tokens=3) == []


def test_tensors_are_prompts(llama, prompts):
    (request,) = generate_batch(llama, [torch.tensor(prompts[1])], max_new_tokens=3)
    assert [request.tokens()] == generated(llama, prompts[1], 3)


def test_a_text_longer_than_the_model_has_positions_for_is_refused(llama):
    with pytest.raises(ValueError, match=r"4 tokens and 125 new ones exceed max_length \(128\)"):
        generate_batch(llama, [[1, 2, 3, 4]], max_new_tokens=125)


# What cannot be served


def causal(config):
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def mamba():
    return causal(transformers.MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=1, state_size=4))


def t5():
    sizes = {"vocab_size": 61, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 32}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).eval()


def mpt():
    return causal(transformers.MptConfig(vocab_size=61, d_model=32, n_layers=1, n_heads=2, max_seq_len=32))


def falcon():
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return causal(transformers.FalconConfig(**sizes))


def headless():
    return transformers.LlamaModel(CONFIGS["llama"]()).eval()


def bidirectional():
    config = CONFIGS["gemma3"]()
    config.use_bidirectional_attention = True
    return causal(config)


def llama4():
    sizes = {**SIZES, "intermediate_size_mlp": 32, "num_local_experts": 2, "attention_chunk_size": 8}
    return causal(transformers.Llama4TextConfig(**sizes))


def phi3():
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1e4,
    }
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    return causal(transformers.Phi3Config(**sizes, rope_parameters=rope))


def bert():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes))


def dynamic():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    return causal(transformers.LlamaConfig(**SIZES, rope_parameters=rope))


def dynamic_of_a_layer_type():
    rope = {
        FULL: {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    }
    return causal(
        transformers.Gemma3TextConfig(**SIZES, layer_types=[SLIDING, FULL, SLIDING], rope_parameters=rope)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mamba, r"MambaForCausalLM: its layers have other memory than keys and values"),
        (t5, r"T5ForConditionalGeneration: it has an encoder"),
        (mpt, "MptForCausalLM: it takes no position_ids"),
        (falcon, "FalconForCausalLM does not call transformers' AttentionInterface"),
        (headless, r"LlamaModel: it has no head that gives logits"),
        (bidirectional, r"Gemma3ForCausalLM: .* this mask is neither causal"),
        (bert, "BertForMaskedLM: its attention is not causal"),
        (phi3, r"Phi3ForCausalLM: its rotary embedding depends .* \(rope_type 'longrope'\)"),
        (dynamic, r"LlamaForCausalLM: its rotary embedding depends .* \(rope_type 'dynamic'\)"),
        (dynamic_of_a_layer_type, r"Gemma3ForCausalLM: its rotary embedding .* \(rope_type 'dynamic'\)"),
        (llama4, r"Llama4ForCausalLM: it scales queries by positions that it counts itself"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(make, message):
    model = make().train()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message) as refused:
        generate_batch(model, [[1, 2, 3]], max_new_tokens=2)
    assert str(refused.value).count("cannot serve") <= 1
    assert model.config._attn_implementation == before
    assert model.training


def test_a_model_that_mixes_tokens_outside_of_its_attention_is_refused():
    model = make_model("llama")

    class Shift(torch.nn.Module):
        def forward(self, hidden):
            return hidden + hidden.roll(1, dims=1)

    model.model.norm = Shift()
    with pytest.raises(ValueError, match="LlamaForCausalLM: in a batch of two texts its logits are others"):
        generate_batch(model, [[1, 2, 3]], max_new_tokens=2)


def test_a_model_that_keeps_its_keywords_is_refused():
    model = make_model("llama")
    forward = model.model.forward
    model.model.forward = lambda *args, octavo_step=None, **options: forward(*args, **options)
    with pytest.raises(
        ValueError, match="LlamaForCausalLM: it does not pass its keywords on to its attention"
    ):
        generate_batch(model, [[1, 2, 3]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "has no argument do_sample; sizes are num_pages, memory, "),
        ({"windows": [None]}, "has no argument windows; sizes are"),
    ],
)
def test_an_argument_that_there_is_not(llama, options, message):
    for call in (make_scheduler, functools.partial(generate_batch, prompts=[[1]], max_new_tokens=1)):
        with pytest.raises(
            TypeError, match=rf"^octavo\.transformers: (make_scheduler|generate_batch) {message}"
        ):
            call(llama, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "gpt2"}, TypeError, r"octavo\.transformers: model must be .*; got 'gpt2'"),
        ({"max_new_tokens": -3}, ValueError, r"generate_batch: max_new_tokens \(-3\) must be at least 1"),
        ({"max_new_tokens": 1.5}, TypeError, "generate_batch: max_new_tokens must be an int; got float"),
        ({"num_samples": 0}, ValueError, r"generate_batch: num_samples \(0\) must be at least 1"),
        ({"num_beams": "two"}, TypeError, "generate_batch: num_beams must be an int; got str"),
        ({"page_size": 0}, ValueError, r"generate_batch: page_size \(0\) must be at least 1"),
        ({"page_size": None}, TypeError, "generate_batch: page_size must be an int; got NoneType"),
        ({"max_batch": None}, TypeError, "generate_batch: max_batch must be an int; got NoneType"),
        ({"max_tokens": "a"}, TypeError, "generate_batch: max_tokens must be an int; got str"),
        ({"token_budget": "x"}, TypeError, "generate_batch: token_budget must be an int; got str"),
        ({"token_budget": -1}, ValueError, r"generate_batch: token_budget \(-1\) must be at least 1"),
        (
            {"sampling": {}},
            TypeError,
            "generate_batch: sampling must be an octavo.serving.Sampling; got dict",
        ),
    ],
)
def test_arguments_of_another_kind(llama, options, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        generate_batch(**{"model": llama, "prompts": [[1, 2]], "max_new_tokens": 2, **options})


# Generation configs

CHANGES = {  # what a text is not, and values with which it is as it was
    "repetition_penalty": (1.5, (1.0, None)),
    "encoder_repetition_penalty": (1.5, (1.0, None)),
    "no_repeat_ngram_size": (2, (0, None)),
    "encoder_no_repeat_ngram_size": (2, (0, None)),
    "min_length": (9, (0, None)),
    "min_new_tokens": (5, (0, None)),
    "suppress_tokens": ([3, 4], (None,)),
    "begin_suppress_tokens": ([8], (None,)),
    "bad_words_ids": ([[9]], (None,)),
    "sequence_bias": ({(9,): -5.0}, (None,)),
    "forced_bos_token_id": (0, (None,)),
    "forced_eos_token_id": (0, (None,)),
    "exponential_decay_length_penalty": ((2, 1.5), (None,)),
    "guidance_scale": (1.5, (1.0, 1, None)),
    "watermarking_config": (transformers.WatermarkingConfig(), (None,)),
    "stop_strings": ("x", (None,)),
    "temperature": (None, (0.5,)),  # which is for sampling
    "top_p": (None, (0.5,)),
}


@pytest.fixture
def configured(llama):
    before = llama.generation_config
    llama.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    yield llama
    llama.generation_config = before


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_generation_config_does_to_logits_is_refused(configured, prompts, name):
    value, neutral = CHANGES[name]
    for other in neutral:
        setattr(configured.generation_config, name, other)
        (request,) = generate_batch(configured, prompts[:1], max_new_tokens=9)
        assert [request.tokens()] == generated(configured, prompts[0], 9)
    if value is None:
        return
    setattr(configured.generation_config, name, value)
    message = (
        f"LlamaForCausalLM: its generation_config has {name}={value!r:.60}, which is not supported; set "
        f"model.generation_config.{name} = {neutral[0]}, or"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        generate_batch(configured, prompts[:1], max_new_tokens=9)
    with pytest.raises(ValueError, match=re.escape(message)):
        make_scheduler(configured, num_pages=8)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom"])
def test_on_a_gpu(name, prompts):
    model = make_model(name, dtype=torch.bfloat16).cuda()
    requests = generate_batch(model, prompts, max_new_tokens=4)
    for prompt, request in zip(prompts, requests, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt], device="cuda")).logits[0, -1].float()
        # The first token is the model's own, or as likely as rounding can tell.
        assert logits.max() - logits[request.tokens()[0]] < 0.05 * logits.abs().max()
