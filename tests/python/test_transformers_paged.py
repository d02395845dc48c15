"""Octavo in transformers' own continuous batching, against generate() and its other attentions."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import octavo  # noqa: E402
import octavo.transformers  # noqa: E402
from octavo import _transformers_paged  # noqa: E402
from support.tiny_models import CONFIGS, SIZES, disadvantages, make_model  # noqa: E402

if not _transformers_paged.IS_KNOWN:
    pytest.skip("the cache of this transformers is not known", allow_module_level=True)

from transformers.generation.continuous_batching import initialization, model_runner  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SERVED = [name for name in CONFIGS if name not in ("bloom", "gpt_oss", "llama4", "deepseek_v3")]
NEW = 14
NUM_LAYERS = SIZES["num_hidden_layers"]


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of each operator: their memory of keys, and the keywords."""
    made = {"append_kv": [], "paged_attention": [], "attention": []}

    def record(name, operator, place):
        def call(*args, **options):
            made[name].append((args[place].untyped_storage().data_ptr(), options))
            return operator(*args, **options)

        return call

    for name, place in (("append_kv", 2), ("paged_attention", 1), ("attention", 1)):
        monkeypatch.setattr(octavo, name, record(name, getattr(octavo, name), place))
    return made


@pytest.fixture(scope="module")
def prompts():
    """Prompts of several lengths, two of which begin as another one does."""
    random = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, 61, (n,), generator=random).tolist() for n in (3, 11, 1, 25, 40, 18)]
    return [*texts, [*texts[3], 5, 6, 7], [*texts[3], 9]]


def generate(model, prompts, *, new=NEW, num_return_sequences=1, manager=False, **sizes):
    """What generate_batch makes, in batches of at most 24 tokens, so that prompts come in parts."""
    sizes = {"page_size": 4, "num_blocks": 96, "max_batch_tokens": 24, **sizes}
    if model.device.type == "cpu":  # otherwise transformers follows the GPU, where the machine has one
        sizes = {"use_async_batching": False, "use_cuda_graph": False, **sizes}
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=new,
            **({"do_sample": True, "top_k": 1} if num_return_sequences > 1 else {"do_sample": False}),
            eos_token_id=-1,
            pad_token_id=0,
            num_return_sequences=num_return_sequences,
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        persistent_manager=manager,
    )
    assert not [output.error for output in outputs.values() if output.error]
    return [output.generated_tokens for output in outputs.values()]


def generate_one_by_one(model, prompts):
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        texts.append(model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("name", SERVED)
def test_texts_are_those_of_generate(name, prompts, calls):
    model = make_model(name)
    expected = generate_one_by_one(model, prompts)
    model.set_attn_implementation("octavo")
    assert generate(model, prompts) == expected
    assert model.config._attn_implementation == "octavo"

    num_passes, rest = divmod(len(calls["append_kv"]), NUM_LAYERS)
    assert num_passes >= NEW and rest == 0
    assert len(calls["paged_attention"]) + len(calls["attention"]) == len(calls["append_kv"])
    caches = {memory for memory, _ in calls["append_kv"] + calls["paged_attention"]}
    assert len(caches) == 1  # of all layers: nothing was copied
    types = _transformers_paged.their_cache.group_layers_by_attn_type(model.config)
    num_full = len(types.get("full_attention", ()))
    # Only the first batch has nothing to read; layers of windows copy where prompts go on, too.
    num_of_full = num_full * (num_passes - 1)
    num_of_windows = len(calls["paged_attention"]) - num_of_full
    assert num_of_windows >= (NUM_LAYERS - num_full) * (NEW // 2)
    assert num_of_windows > 0 or num_full == NUM_LAYERS


def test_texts_are_those_of_their_sdpa(prompts):
    model = make_model("qwen3", attn_implementation="sdpa")
    expected = generate(model, prompts, auto_switch_to_flash=False)
    model.set_attn_implementation("octavo")
    assert generate(model, prompts) == expected


def test_samples_share_a_prompt(prompts):
    """Forks, whose last pages are copied."""
    model = make_model("llama")
    expected = [text for text in generate_one_by_one(model, prompts[:4]) for _ in range(3)]
    model.set_attn_implementation("octavo")
    assert generate(model, prompts[:4], num_return_sequences=3) == expected


def test_few_pages(prompts):
    """Requests that give way are computed again."""
    model = make_model("gemma3")
    expected = generate_one_by_one(model, prompts)
    model.set_attn_implementation("octavo")
    assert generate(model, prompts, num_blocks=18) == expected


def test_a_manager_that_stays(prompts):
    model = make_model("llama", attn_implementation="octavo")
    expected = generate(model, prompts)
    try:
        assert generate(model, prompts, manager=True) == expected
        assert model.config._attn_implementation == "octavo"
        assert generate(model, prompts[3:], manager=True) == expected[3:]
    finally:
        model.destroy_cached_continuous_batching_manager()


@pytest.fixture
def padded(monkeypatch):
    """Batches padded as they are for CUDA graphs."""
    init = model_runner.ModelRunner.__init__

    def pad(self, *args, **options):
        init(self, *args, **options)
        self.pad_inputs = True

    monkeypatch.setattr(model_runner.ModelRunner, "__init__", pad)
    monkeypatch.setattr(model_runner.ModelRunner, "warmup", lambda self, model: None)


@pytest.mark.usefixtures("padded")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_padded_batches(name, prompts, calls):
    model = make_model(name)
    expected = generate_one_by_one(model, prompts)
    model.set_attn_implementation("octavo")
    assert generate(model, prompts, q_padding_interval_size=7, kv_padding_interval_size=50) == expected
    assert all(bool((options["slot_mapping"] >= -1).all()) for _, options in calls["append_kv"])
    assert any(bool((options["slot_mapping"] == -1).any()) for _, options in calls["append_kv"])


@pytest.mark.parametrize("padding", [False, True])
def test_block_tables(padding, prompts, calls, monkeypatch, request):
    """As transformers hands them over on a GPU, where every request of a batch decodes."""
    if padding:
        request.getfixturevalue("padded")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    model = make_model("qwen3")
    expected = generate_one_by_one(model, prompts)
    model.set_attn_implementation("octavo")
    assert generate(model, prompts, max_blocks_per_request=16) == expected
    num_by_table = sum("slot_mapping" not in options for _, options in calls["append_kv"])
    assert NUM_LAYERS * NEW // 2 < num_by_table < len(calls["append_kv"])


def test_compiled(prompts, calls):
    """Attention itself stays outside of the graphs."""
    model = make_model("llama")
    expected = [text[:3] for text in generate_one_by_one(model, prompts[:2])]
    model.set_attn_implementation("octavo")
    compiled = transformers.CompileConfig(backend="eager", mode=None, dynamic=True)
    assert generate(model, prompts[:2], new=3, varlen_compile_config=compiled) == expected
    assert calls["paged_attention"]


def test_tables_are_made_once_a_pass(prompts, calls):
    model = make_model("llama", attn_implementation="octavo")
    generate(model, prompts)
    slots = [options["slot_mapping"] for _, options in calls["append_kv"]]
    for begin in range(0, len(slots), NUM_LAYERS):
        assert all(x is slots[begin] for x in slots[begin : begin + NUM_LAYERS])
    assert len({id(x) for x in slots}) >= NEW
    repeated = _transformers_paged._Cache()
    repeated.enter(0, slots)
    repeated.groups[0] = None
    repeated.enter(1, slots)
    assert repeated.groups
    repeated.enter(0, slots)  # as a CUDA graph is captured
    assert not repeated.groups


def gpt_oss():
    config = transformers.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=6)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="octavo").eval()


def other_windows():
    """A model whose layers have windows that its config does not tell of."""
    model = make_model("mistral", attn_implementation="octavo")
    model.config.layer_types = ["full_attention"] * NUM_LAYERS
    return model


def wide_heads():
    config = transformers.LlamaConfig(**{**SIZES, "head_dim": 520})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="octavo").eval()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            gpt_oss,
            "generate_batch cannot serve GptOssForCausalLM: transformers gives it only kernels-community",
        ),
        (
            other_windows,
            "MistralForCausalLM: layer 0 has a sliding window of 6, and a cache for full_attention",
        ),
        (wide_heads, "LlamaForCausalLM: .*head_dim .520. must be"),
        (
            lambda: make_model("deepseek_v3", attn_implementation="octavo"),
            r"DeepseekV3ForCausalLM: its values have another head dim \(16\) than its keys \(24\)",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_request(make, message):
    model = make()
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    assert model.config._attn_implementation == "octavo"


@pytest.mark.parametrize(
    ("name", "what"), [("block_indices", r"sparse attention \(block_indices\)"), ("s_aux", "s_aux")]
)
def test_keywords_that_would_change_the_result_are_refused(name, what):
    attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["octavo_paged_flash_2"]
    array = torch.zeros(1, 2, 3, 16)
    of_batch = {"cache": object(), "read_index": [], "write_index": [], "cu_seq_lens_q": array}
    of_batch |= {"cu_seq_lens_k": {}, "max_length_k": {}}
    with pytest.raises(ValueError, match=f"octavo.transformers: {what} is not supported"):
        attend(torch.nn.Identity(), array, array, array, None, **of_batch, **{name: array})


def test_bloom_is_refused_by_name():
    model = make_model("bloom")
    with pytest.raises(ValueError, match="BloomForCausalLM does not call transformers' AttentionInterface"):
        model.set_attn_implementation("octavo")


def test_the_name_of_continuous_batching_elsewhere(prompts):
    """It may be given, and is refused elsewhere."""
    model = make_model("llama")
    expected = generate_one_by_one(model, prompts)
    model.set_attn_implementation("octavo_paged_flash_2")
    assert generate(model, prompts) == expected
    assert model.config._attn_implementation == "octavo_paged_flash_2"
    with pytest.raises(
        ValueError, match="'octavo_paged_flash_2' is for continuous batching only; use 'octavo'"
    ):
        model(torch.tensor([[1, 2, 3]]))


def test_other_attentions_are_left_alone(prompts, calls):
    model = make_model("llama", attn_implementation="eager")
    generate(model, prompts[:2], auto_switch_to_flash=False)
    assert not any(calls.values())
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="flex_attention is not supported for continuous batching"):
        generate(model, prompts[:2], auto_switch_to_flash=False)


def test_a_version_whose_cache_is_not_known(monkeypatch):
    monkeypatch.setattr(_transformers_paged, "IS_KNOWN", False)
    model = make_model("llama", attn_implementation="octavo")
    with pytest.raises(
        ValueError, match=r"with the caches of versions 5\.23 and 5\.24, and this one's is another"
    ):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gemma2", "gpt2"])
def test_on_a_gpu(name, graphs, prompts, calls):
    """Greedy texts, but for what rounding to 16 bits does; of full attention by block tables, too."""
    model = make_model(name, dtype=torch.bfloat16, attn_implementation="octavo").cuda()
    texts = generate(model, prompts, use_cuda_graph=graphs, max_blocks_per_request=32)
    # With graphs, prompts and single tokens share a layer of windows, which then copies what it reads.
    assert calls["append_kv"] and calls["attention" if graphs and name == "mistral" else "paged_attention"]
    if name in ("llama", "gpt2"):
        assert any("slot_mapping" not in options for _, options in calls["append_kv"])
    for prompt, text in zip(prompts, texts, strict=True):
        assert len(text) == NEW
        assert disadvantages(model, prompt, text).max() < 0.05


@pytest.mark.gpu
def test_as_transformers_chooses_on_a_gpu(prompts, calls):
    """Pages of its default size, CUDA graphs and two batches at once."""
    model = make_model("llama", dtype=torch.float16, attn_implementation="octavo").cuda()
    texts = generate(model, prompts, page_size=256, num_blocks=32, max_batch_tokens=256)
    for prompt, text in zip(prompts, texts, strict=True):
        assert disadvantages(model, prompt, text).max() < 0.02
    assert calls["append_kv"]
