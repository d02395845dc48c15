"""The model of examples/train.py: how its tokens attend in training, and through pages when it writes."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

for package in ("rich", "tokenizers", "torch"):
    pytest.importorskip(package, reason=f"examples/train.py needs {package}")

import torch  # noqa: E402
from gpt.attention import Eager, Packed  # noqa: E402
from gpt.generation import generate  # noqa: E402

import octavo.torch  # noqa: E402
from octavo.serving import Sampling  # noqa: E402
from support.small_gpt import (  # noqa: E402
    ATTENTION,
    GPT,
    MODEL,
    Batch,
    Text,
    get_text,
    logits,
    make_model,
    mixed_batch,
    recompute,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def text() -> Text:
    return get_text()


@pytest.mark.parametrize("alibi", [False, True])
def test_octavo_attends_as_eager_does(text: Text, alibi: bool) -> None:
    model, batch = make_model(alibi=alibi), mixed_batch()
    results = {}
    for attention in ATTENTION:
        model.zero_grad()
        out = logits(model, batch, attention)
        torch.nn.functional.cross_entropy(out, batch.targets).backward()
        results[attention] = [out.detach(), *(p.grad.clone() for p in model.parameters())]
    for mine, theirs in zip(results["octavo"], results["eager"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("attention", ATTENTION)
def test_documents_do_not_see_each_other(text: Text, attention: str) -> None:
    model, batch = make_model(), mixed_batch()
    ends = batch.cu_seqlens.tolist()
    begin, end = next(
        (a, b) for a, b in pairwise(ends) if b % batch.context
    )  # another one follows in its row
    tokens = batch.tokens.clone()
    tokens[begin:end] = (tokens[begin:end] + 1) % MODEL.vocabulary
    before, after = logits(model, batch, attention), logits(model, replace(batch, tokens=tokens), attention)
    changed = (before - after).abs().amax(-1) > 1e-3
    assert changed[begin:end].all() and changed.sum() == end - begin
    tokens[: end - 1] = batch.tokens[: end - 1]  # the last token of the sequence alone
    changed = (before - logits(model, replace(batch, tokens=tokens), attention)).abs().amax(-1) > 1e-3
    assert changed.nonzero().tolist() == [[end - 1]]


def test_the_shape_is_that_of_gpt2(text: Text) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=512,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    reference = transformers.GPT2LMHeadModel(config).eval()
    names = {"wte": "embedding", "wpe": "positions", "ln_f": "norm", "h.": "blocks."}
    names |= {"ln_1": "attention_norm", "ln_2": "ffn_norm", "attn.c_attn": "qkv"}
    names |= {"attn.c_proj": "attention_out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    weights = {}
    for name, weight in reference.transformer.state_dict().items():
        for theirs, mine in names.items():
            name = name.replace(theirs, mine)
        weight.copy_(torch.randn_like(weight) / 3)
        is_transposed = weight.dim() == 2 and name.startswith("blocks")
        weights[name] = weight.T if is_transposed else weight
    model = GPT(MODEL)
    model.load_state_dict(weights)
    tokens = torch.from_numpy(text.training[0][:60])
    batch = Batch(tokens, tokens, torch.arange(60), torch.tensor([0, 60], dtype=torch.int32), 64)
    with torch.no_grad():
        torch.testing.assert_close(
            logits(model, batch, "octavo"), reference(tokens[None]).logits[0], rtol=1e-3, atol=1e-3
        )


def test_dropout_is_octavos(text: Text) -> None:
    batch = mixed_batch()
    q, k, v = torch.randn(3, 256, 2, 32)
    attend = Packed(batch)
    torch.manual_seed(3)
    first, second = (attend(0, q, k, v, dropout_p=0.3) for _ in range(2))
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    expected = octavo.torch.attention(
        q, k, v, causal=True, dropout_p=0.3, dropout_seed=seed, **attend.sequences
    )
    assert torch.equal(first, expected) and not torch.equal(first, second)
    many = torch.stack([Eager(batch)(0, q, k, v, dropout_p=0.3) for _ in range(300)])
    torch.testing.assert_close(many.mean(0), attend(0, q, k, v), rtol=0, atol=0.5)
    model = GPT(replace(MODEL, dropout=0.3)).train()
    outs = [logits(model, batch, "octavo") for _ in range(2)]
    assert not torch.equal(*outs)
    model.eval()
    assert torch.equal(*[logits(model, batch, "octavo") for _ in range(2)])


# Sampling


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("alibi", [False, True])
def test_sampling_through_pages_is_that_of_whole_sequences(text: Text, alibi: bool, page_size: int) -> None:
    model = make_model(alibi=alibi)
    prompts = [text.training[i][:length].tolist() for i, length in ((0, 1), (3, 30), (5, 16), (3, 30))]
    new = generate(model, prompts, 30, page_size=page_size)
    assert new == [recompute(model, prompt, 30) for prompt in prompts]
    assert len({tuple(tokens) for tokens in new}) == 3  # of three prompts
    assert all(len(set(tokens)) > 5 for tokens in new)


def test_texts_without_a_seed_are_others_each_time() -> None:
    model = make_model()
    of_calls = [generate(model, [[5], [5]], 30, sampling=Sampling(2.0)) for _ in range(2)]
    assert len({tuple(tokens) for texts in of_calls for tokens in texts}) == 4
    seeded = [generate(model, [[5], [5]], 30, sampling=Sampling(2.0, seed=3)) for _ in range(2)]
    assert seeded[0] == seeded[1] and seeded[0][0] != seeded[0][1]


def test_what_the_context_cannot_hold_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a prompt and its new tokens \(65\) exceed the model's context \(64\)"
    ):
        generate(make_model(), [[0] * 5, [0]], 60)
