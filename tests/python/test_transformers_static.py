"""Models of transformers with their attention on Octavo, over static caches."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import octavo.torch  # noqa: E402
import octavo.transformers  # noqa: E402
from octavo._transformers_mask import Mask  # noqa: E402
from support.tiny_models import CONFIGS, SIZES, WINDOW, disadvantages, make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

SERVED = [name for name in CONFIGS if name not in ("bloom", "llama4")]
NUM_WINDOWS = {"qwen2": 2, "mistral": 3, "gemma2": 2, "gemma3": 2, "gpt_oss": 2}
NUM_LAYERS = SIZES["num_hidden_layers"]
NEW = 12


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


@pytest.fixture
def calls(monkeypatch):
    """The calls of each operator. (Graphs would be compiled anew as the lists grow.)"""
    made = {"attention": [], "paged_attention": []}

    def record(name, operator):
        def call(*args, **options):
            made[name].append(options)
            return operator(*args, **options)

        return call

    for name in made:
        monkeypatch.setattr(octavo.torch, name, record(name, getattr(octavo.torch, name)))
    return made


def tokens(batch, length, seed=1):
    return torch.randint(
        2, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def padded(batch, length, counts):
    """Texts with this many tokens of padding before them, and their mask."""
    ids, mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row, count in enumerate(counts):
        mask[row, :count] = 0
    return ids * mask, mask


def generate(model, ids, mask, new=NEW, **options):
    options = {"cache_implementation": "static", "disable_compile": True, **options}
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **options)


PROMPTS = {
    "short": (4, ()),
    "long": (15, ()),
    "short, padded": (4, (0, 3, 1)),
    "long, padded": (15, (0, 13, 4)),
}


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("name", SERVED)
def test_greedy_texts_equal_eager(name, prompts, calls):
    """The texts follow prompts within a window and beyond it."""
    length, counts = PROMPTS[prompts]
    ids, mask = padded(3, length, counts)
    model = make_model(name, attn_implementation="eager")
    expected = generate(model, ids, mask)
    model.set_attn_implementation("octavo")
    assert torch.equal(generate(model, ids, mask), expected)
    # Layers with a window fill it first; then they are no longer than it.
    steps_in_window = max(0, WINDOW - length - 1)
    num_windows = NUM_WINDOWS.get(name, 0)
    num_paged = (NUM_LAYERS - num_windows) * (NEW - 1) + num_windows * steps_in_window
    assert len(calls["paged_attention"]) == num_paged
    assert len(calls["attention"]) == NUM_LAYERS * NEW - num_paged


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_texts_equal_sdpa(name, calls):
    ids, mask = padded(3, 9, (0, 2, 5))
    model = make_model(name, attn_implementation="sdpa")
    expected = generate(model, ids, mask)
    model.set_attn_implementation("octavo")
    assert torch.equal(generate(model, ids, mask), expected)
    assert calls["paged_attention"]


@pytest.mark.parametrize("kind", ["static", "dynamic", "training"])
def test_masks_follow_the_layers_to_other_devices(kind, monkeypatch):
    """The last layer is on PyTorch's meta device, to which accelerate takes its arguments, but for masks."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    model = make_model("llama", attn_implementation="octavo")
    for part in (model.model.layers[-1], model.model.norm, model.lm_head):
        hook = hooks.AlignDevicesHook(execution_device=torch.device("meta"))
        hooks.add_hook_to_module(part.to("meta"), hook)
    devices = {"attention": [], "paged_attention": []}

    def record(name, operator):
        def call(*args, **options):
            arrays = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
            devices[name].append({x.device.type for x in arrays})
            return operator(*args, **options)

        return call

    for name in devices:
        monkeypatch.setattr(octavo.torch, name, record(name, getattr(octavo.torch, name)))
    ids, mask = padded(3, 9, (0, 2, 5))
    if kind == "training":  # layers get the mask itself
        model(ids, attention_mask=mask, use_cache=False)
    else:
        static = transformers.StaticCache(config=model.config, max_cache_len=12)
        cache = static if kind == "static" else transformers.DynamicCache()
        with torch.no_grad():
            for begin, end in ((0, 8), (8, 9)):
                model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
    of_a_pass = [{"cpu"}] * (NUM_LAYERS - 1) + [{"meta"}]
    assert devices["attention"] == of_a_pass * (2 if kind == "dynamic" else 1)
    assert devices["paged_attention"] == of_a_pass * (kind == "static")


@pytest.mark.parametrize("name", SERVED)
@torch.no_grad()
def test_slots_without_tokens_are_not_read(name, calls):
    """Whatever they hold. Steps of one token and of several."""
    ids = tokens(2, 16)
    model = make_model(name, attn_implementation="eager")
    expected = model(ids, use_cache=False).logits
    model.set_attn_implementation("octavo")
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    begin = 0
    for count in (3, 1, 1, 4, 1, 5, 1):
        logits = model(ids[:, begin : begin + count], past_key_values=cache).logits
        torch.testing.assert_close(logits, expected[:, begin : begin + count], atol=2e-5, rtol=1e-4)
        begin += count
        for layer in cache.layers:
            for array in (layer.keys, layer.values):
                array[:, :, min(begin, array.shape[2]) :] = torch.nan
    assert calls["paged_attention"]


@pytest.mark.parametrize(("name", "length"), [("llama", 12), ("mistral", 9)])
@torch.no_grad()
def test_compiles_in_one_graph(name, length):
    """A step of a model that the caller compiles; where there are no windows one graph serves all lengths."""
    torch._dynamo.reset()
    ids = tokens(2, 12)
    model = make_model(name, attn_implementation="octavo")
    expected = model(ids, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=14)

    def run(ids):
        return model(ids, past_key_values=cache).logits

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    torch.testing.assert_close(run(ids[:, :4]), expected[:, :4], atol=2e-5, rtol=1e-4)
    for begin in range(4, length):
        logits = compiled(ids[:, begin : begin + 1])
        torch.testing.assert_close(logits, expected[:, begin : begin + 1], atol=2e-5, rtol=1e-4)
    # transformers counts the tokens of a window in Python, which compiles every step anew with sdpa, too.
    assert counter.frame_count == 1 if name == "llama" else counter.frame_count > 1


@pytest.mark.parametrize("counts", [(), (0, 3, 1)])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_compiles(name, counts):
    """As it does by itself on a GPU: its masks are made outside of the graph."""
    torch._dynamo.reset()
    ids, mask = padded(3, 4, counts)
    model = make_model(name, attn_implementation="eager")
    expected = generate(model, ids, mask, new=5)
    model.set_attn_implementation("octavo")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    steps = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    steps._compile_all_devices = True
    actual = generate(model, ids, mask, new=5, disable_compile=False, compile_config=steps)
    assert torch.equal(actual, expected)
    assert graphs and all("octavo" in str(graph.graph) for graph in graphs)
    if name == "llama":
        assert len(graphs) == 1


@torch.no_grad()
def test_a_mask_of_the_callers():
    """Functions of the indices are compared, in a compiled step when it runs."""
    torch._dynamo.reset()
    model = make_model("mistral", attn_implementation="octavo")
    ids = tokens(1, 8)
    cache = transformers.StaticCache(config=model.config, max_cache_len=14)
    model(ids[:, :4], past_key_values=cache)

    def mask_of(and_mask_function):
        return transformers.masking_utils.create_sliding_window_causal_mask(
            model.config, torch.empty(1, 1, 0), None, cache, and_mask_function=and_mask_function
        )

    def is_even(batch, head, query, key):
        return key % 2 == 0

    def anything(batch, head, query, key):
        return key >= 0

    assert int(mask_of(anything).octavo_mask.seq_lens) == 5
    with pytest.raises(ValueError, match="this mask is neither causal"):
        mask_of(is_even)


@torch.no_grad()
def test_mask_keeps_its_chunks_on_another_device():
    """What the mask of a model that lies on several devices says does not depend on the layer."""
    mask = Mask(True, seq_lens=torch.tensor([5, 3], dtype=torch.int32), attention_chunk=4, first_key=2)
    moved = mask.on(torch.device("meta"))
    assert moved.seq_lens.device.type == "meta"
    assert (moved.causal, moved.attention_chunk, moved.first_key) == (True, 4, 2)
    assert mask.on(torch.device("meta")) is moved
    assert mask.on(torch.device("cpu")) is mask


@pytest.mark.parametrize("name", ["llama", "mistral"])
@torch.no_grad()
def test_padding_inside_a_sequence(name):
    """Steps behind a prompt that was padded on the right."""
    ids, mask = padded(2, 8, ())
    mask[1, 5:] = 0
    model = make_model(name, attn_implementation="eager")
    results = []
    for implementation in ("eager", "octavo"):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=14)
        seen = mask
        logits = [model(ids, attention_mask=seen, past_key_values=cache).logits[mask == 1]]
        for step in range(3):
            seen = torch.cat((seen, torch.ones(2, 1, dtype=torch.long)), 1)
            logits.append(
                model(ids[:, step : step + 1], attention_mask=seen, past_key_values=cache).logits[:, 0]
            )
        results.append(torch.cat(logits))
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_row_without_tokens():
    """Such as one that fills a batch up; with a softcap no key can be hidden."""
    ids, mask = padded(2, 8, (0, 8))
    model = make_model("gemma2", attn_implementation="octavo")
    expected = model(ids[:1], use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=14)
    model(ids[:, :5], attention_mask=mask[:, :5], past_key_values=cache)
    for begin, end in ((5, 6), (6, 8)):
        logits = model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits
        torch.testing.assert_close(logits[:1], expected[:, begin:end], atol=2e-5, rtol=1e-4)
        assert torch.isfinite(logits).all()


def test_what_cannot_be_mapped_is_refused():
    ids, mask = padded(2, 8, ())
    mask[1, 6:] = 0
    model = make_model("llama", attn_implementation="octavo")
    cache = transformers.StaticCache(config=model.config, max_cache_len=14)
    model(ids, attention_mask=mask, past_key_values=cache)  # a prompt may have padding anywhere
    mask = torch.cat((mask, torch.ones(2, 1, dtype=torch.long)), 1)
    with torch.no_grad():
        model(ids[:, :1], attention_mask=mask, past_key_values=cache)  # and so a step behind it
    gpt2 = make_model("gpt2", attn_implementation="octavo").train()
    gpt2.config.attn_pdrop = 0.5
    cache = transformers.StaticCache(config=gpt2.config, max_cache_len=14)
    gpt2(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="dropout is not supported with a static cache"):
        gpt2(ids[:, :1], past_key_values=cache)
    llama4 = make_model("llama4", attn_implementation="octavo")
    cache = transformers.StaticCache(config=llama4.config, max_cache_len=14)
    llama4(ids, past_key_values=cache)  # a prompt is one of a growing cache
    with pytest.raises(
        ValueError, match="this mask is neither causal, nor a causal sliding window, nor full"
    ):
        llama4(ids[:, :1], past_key_values=cache)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [(), (0, 13, 4)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_generate_on_a_gpu(name, counts):
    """Compiled, with CUDA graphs, as generate() does by itself: greedy, but for rounding to 16 bits."""
    torch._dynamo.reset()
    ids, mask = padded(3, 15, counts)
    model = make_model(name, dtype=torch.bfloat16, attn_implementation="octavo").cuda()
    texts = generate(model, ids.cuda(), mask.cuda(), disable_compile=False)[:, 15:].tolist()
    for row, text in enumerate(texts):
        prompt = ids[row][mask[row] == 1].tolist()
        assert disadvantages(model, prompt, text).max() < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_captured_step_follows_the_lengths(name):
    model = make_model(name, dtype=torch.float16, attn_implementation="octavo").cuda()
    ids = tokens(2, 16).cuda()
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    expected = model(ids, use_cache=False).logits.float()
    model(ids[:, :6], past_key_values=cache)
    token, stream = ids[:, 6:7].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(token, past_key_values=cache)  # token 6
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(token, past_key_values=cache).logits  # captured, not run
    for position in range(7, 16):
        token.copy_(ids[:, position : position + 1])
        graph.replay()
        error = (logits[:, 0].float() - expected[:, position]).abs().max() / expected.abs().max()
        assert error < 0.02
