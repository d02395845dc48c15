"""octavo.transformers: sequences packed into rows: position_ids that begin anew, in training too."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import octavo.torch  # noqa: E402
import octavo.transformers  # noqa: E402
from octavo import _transformers_descriptions  # noqa: E402
from test_transformers import CONFIGS, SIZES, tokens  # noqa: E402

LENGTHS = [7, 1, 12, 4]
NAMES = ["llama", "mistral", "gemma2", "llama4_text"]  # gpt-oss does not tell its masks of position_ids


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of Octavo's operator."""
    made = []
    attention = octavo.torch.attention

    def count(*args, **kwargs):
        made.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(octavo.torch, "attention", count)
    return made


def make_model(name, implementation):
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.initializer_range = 0.3
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def packed(lengths):
    """input_ids and position_ids, [1, sum(lengths)]."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return tokens(1, sum(lengths)), positions


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_equal_those_of_each_sequence_alone(name, calls):
    ids, positions = packed(LENGTHS)
    model = make_model(name, "octavo").eval()
    actual = model(ids, position_ids=positions, use_cache=False).logits
    offsets = [call["cu_seqlens_q"].tolist() for call in calls]
    assert len(offsets) == SIZES["num_hidden_layers"] and [0, 7, 8, 20, 24] in offsets
    model.set_attn_implementation("eager")
    alone = [model(part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    torch.testing.assert_close(actual, torch.cat(alone, 1), atol=2e-5, rtol=1e-4)
    theirs = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, theirs, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_rows_with_packings_of_their_own(calls):
    """One of which is not packed, and positions that do not begin at 0."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7, 8, 2, 3, 0, 1]])
    ids, model = tokens(3, 8), make_model("mistral", "octavo").eval()
    actual = model(ids, position_ids=positions, use_cache=False).logits
    assert calls[0]["cu_seqlens_k"].tolist() == [0, 3, 8, 16, 20, 22, 24]
    model.set_attn_implementation("sdpa")
    theirs = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(actual, theirs, atol=2e-5, rtol=1e-4)


def test_the_mask_is_not_compared_element_by_element(monkeypatch):
    """That of transformers is known by its functions; a mask of all tokens is never made."""
    monkeypatch.setattr(_transformers_descriptions, "require_causal", None)
    ids, positions = packed(LENGTHS)
    for name in ("llama", "mistral"):
        make_model(name, "octavo").eval()(ids, position_ids=positions, use_cache=False)


def test_the_collator_and_training(calls):
    """Three steps with DataCollatorWithFlattening, with the keywords for FlashAttention and without them."""
    examples = [{"input_ids": tokens(1, n)[0].tolist()} for n in LENGTHS]
    for keywords in ({}, {"return_flash_attn_kwargs": True}):
        collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **keywords)
        losses = {}
        for implementation in ("octavo", "eager"):
            model = make_model("llama", implementation).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses[implementation] = []
            for _ in range(3):
                loss = model(**collator(examples), use_cache=False).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[implementation].append(loss.item())
        torch.testing.assert_close(losses["octavo"], losses["eager"], atol=1e-4, rtol=1e-4)
    assert all("cu_seqlens_q" in call for call in calls)


def test_gradient_checkpointing():
    ids, positions = packed(LENGTHS)
    gradients = []
    for checkpoints in (False, True):
        model = make_model("mistral", "octavo").train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_keywords_of_flash_attention_alone(calls):
    """cu_seq_lens_q and its like say where sequences begin, though no position_ids do."""
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    module = make_model("llama", "octavo").model.layers[0].self_attn.eval()
    q, k, v = torch.randn(3, 1, 4, sum(LENGTHS), 16, generator=torch.Generator().manual_seed(3)).unbind()
    keywords = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    attend = transformers.AttentionInterface()["octavo"]
    out, _ = attend(module, q, k[:, :2], v[:, :2], None, scaling=0.25, is_causal=True, **keywords)
    parts = [x.split(LENGTHS, dim=2) for x in (q, k[:, :2], v[:, :2])]
    alone = [
        attend(module, *part, None, scaling=0.25, is_causal=True)[0] for part in zip(*parts, strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(alone, 1))
    assert calls[0]["max_seqlen_q"] == 12
    with pytest.raises(ValueError, match="cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"):
        attend(module, q, k[:, :2], v[:, :2], None, cu_seq_lens_q=offsets)


@torch.no_grad()
def test_compiles():
    """Where sequences begin has to be looked at, which breaks the graph."""
    torch._dynamo.reset()
    model = make_model("mistral", "octavo").eval()
    compiled = torch.compile(model, backend="aot_eager")
    for lengths in (LENGTHS, [3, 9, 2], [17]):  # the second has lengths that are no constants
        ids, positions = packed(lengths)
        expected = model(ids, position_ids=positions, use_cache=False).logits
        actual = compiled(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_other_masks_over_packed_sequences_are_refused():
    ids, positions = packed(LENGTHS)
    model = make_model("llama", "octavo").eval()
    create = transformers.masking_utils.create_causal_mask
    embeddings = model.model.embed_tokens(ids)

    def sees_even(batch, head, query, key):
        return key % 2 == 0

    with pytest.raises(ValueError, match="this mask is neither causal"):
        create(model.config, embeddings, None, None, positions, and_mask_function=sees_even)
