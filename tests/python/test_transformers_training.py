"""Training of transformers' models with their attention on Octavo."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import octavo.torch  # noqa: E402
import octavo.transformers  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2_SIZES, **NO_DROPOUT),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=2, sliding_window=6
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(
        **SIZES,
        intermediate_size_mlp=96,
        num_local_experts=2,
        num_experts_per_tok=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=6,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


def make(config, attention="octavo"):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).train()


def with_dropout(num_layers=2):
    """A model with dropout of attention alone."""
    return make(
        transformers.GPT2Config(**{**GPT2_SIZES, **NO_DROPOUT, "attn_pdrop": 0.2, "n_layer": num_layers})
    )


def tokens(batch=3, length=13):
    return torch.randint(2, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def gradients(model, mask=None, run=None):
    """Those of the loss, by the names of the parameters; tokens are predicted from tokens, not padding."""
    model.zero_grad()
    labels = tokens()
    if mask is not None:
        labels[:, 1:].masked_fill_(mask[:, 1:] * mask[:, :-1] == 0, -100)
    loss = (model if run is None else run)(tokens(), attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: x.grad.clone() for name, x in model.named_parameters()}}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_equal_eager(name, padding):
    mask = torch.ones(3, 13, dtype=torch.long)
    for row, count in enumerate([0, 4, 9] if padding != "none" else []):
        mask[row, slice(0, count) if padding == "left" else slice(13 - count, 13)] = 0
    model = make(CONFIGS[name]())
    actual = gradients(model, mask)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(actual, gradients(model, mask), rtol=2e-3, atol=2e-5)
    sinks = [gradient for parameter, gradient in actual.items() if parameter.endswith("sinks")]
    assert len(sinks) == 2 * (name == "gpt_oss") and all(bool((x != 0).all()) for x in sinks)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_gradients_under_autocast(name):
    """Weights of float32, products of 16 bits, queries and keys that rotary embeddings leave in float32."""
    model = make(CONFIGS[name](), "eager")

    def run(*args, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return model(*args, **options)

    exact, expected = gradients(model), gradients(model, run=run)
    model.set_attn_implementation("octavo")
    actual = gradients(model, run=run)
    for parameter, gradient in exact.items():
        error, of_eager = ((x[parameter] - gradient).norm() for x in (actual, expected))
        assert error <= 2 * of_eager + 0.01 * gradient.norm(), parameter


@pytest.mark.gpu
def test_gradients_equal_eager_on_a_gpu():
    model = make(CONFIGS["llama"]()).to("cuda", torch.bfloat16)
    loss = {}
    for attention in ("octavo", "eager"):
        model.set_attn_implementation(attention)
        model.zero_grad()
        ids = tokens().cuda()
        model(ids, labels=ids, use_cache=False).loss.backward()
        loss[attention] = torch.cat([x.grad.flatten().float() for x in model.parameters()])
    assert torch.nn.functional.cosine_similarity(loss["octavo"], loss["eager"], dim=0) > 0.99


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)


def test_dropout_follows_the_seed_of_torch(monkeypatch):
    """The same weights are dropped after the same seed, others in the next step and in another layer."""
    seeds = []
    attention = octavo.torch.attention

    def note(*args, **kwargs):
        assert kwargs["dropout_p"] == 0.2
        seeds.append(kwargs["dropout_seed"])
        return attention(*args, **kwargs)

    monkeypatch.setattr(octavo.torch, "attention", note)
    model = with_dropout()
    runs = []
    for seed in (5, None, 5):
        if seed is not None:
            torch.manual_seed(seed)
        runs.append(gradients(model))
    assert_equal(runs[2], runs[0])
    assert runs[1]["loss"] != runs[0]["loss"]
    assert seeds[:2] == seeds[4:] and len(set(seeds)) == 4
    model.eval()
    monkeypatch.setattr(octavo.torch, "attention", attention)
    without = gradients(model)
    assert without["loss"] != runs[0]["loss"]
    assert_equal(gradients(model), without)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_layer_drops_the_same_weights(use_reentrant):
    model = with_dropout()
    torch.manual_seed(5)
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(5)
    assert_equal(gradients(model), expected)


def test_compiles():
    """Dropout and masks break the graph; what is computed is the same."""
    model = with_dropout(num_layers=1)
    torch.manual_seed(5)
    expected = gradients(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    torch.manual_seed(5)
    torch.testing.assert_close(gradients(model, run=compiled), expected, rtol=2e-3, atol=2e-5)


def test_compiles_in_one_graph():
    """With a cache, and without dropout."""
    model, ids = make(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})), tokens()
    torch._dynamo.reset()

    def loss(ids):
        cache = transformers.DynamicCache(config=model.config)
        return model(ids, past_key_values=cache).logits.square().mean()

    results = []
    for run in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(ids).backward()
        results.append([x.grad.clone() for x in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=2e-3, atol=2e-5)


def test_a_model_learns():
    model = with_dropout()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = model(tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
