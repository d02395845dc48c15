"""octavo.transformers: tokens of images that see each other both ways (Gemma 3, PaliGemma)."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import octavo.torch  # noqa: E402
import octavo.transformers  # noqa: E402

if not hasattr(transformers.masking_utils, "blockwise_overlay"):
    pytest.skip("this transformers describes the tokens of images in another way", allow_module_level=True)

IMAGE = 60  # the token in whose place the embeddings of an image go
TEXT = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.3,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 4,
}
IMAGES = [(2, 11), (14, 23)]  # of 9 tokens each


def make_gemma3(window=6):
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **TEXT, sliding_window=window, layer_types=["sliding_attention", "full_attention"]
        ),
        vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=9,
        image_token_index=IMAGE,
        boi_token_index=58,
        eoi_token_index=59,
        initializer_range=0.3,
    )
    return transformers.Gemma3ForConditionalGeneration(config).eval()


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The calls of Octavo's operators."""
    made = []

    def counting(operator):
        def count(*args, **kwargs):
            made.append(kwargs)
            return operator(*args, **kwargs)

        return count

    for name in ("attention", "paged_attention"):
        monkeypatch.setattr(octavo.torch, name, counting(getattr(octavo.torch, name)))
    return made


def inputs(batch=1, length=27, padding=0):
    """Texts with two images each; those after the first are padded on the left."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 58, (batch, length), generator=random)
    for begin, end in IMAGES:
        ids[:, begin:end] = IMAGE
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        ids[row] = ids[row].roll(padding * row)
        ids[row, : padding * row] = 0
        mask[row, : padding * row] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.randn(2 * batch, 3, 24, 24, generator=random),
    }


def both(model, run):
    """What `run` gives with eager attention and with Octavo's."""
    results = []
    for name in ("eager", "octavo"):
        model.set_attn_implementation({"text_config": name, "vision_config": "eager", "": name})
        results.append(run())
    return results


@pytest.mark.parametrize("window", [4, 6, 100])
@torch.no_grad()
def test_logits_equal_eager(window, calls):
    """In windows shorter than an image, too, which hold inside it."""
    model, given = make_gemma3(window), inputs()
    expected, actual = both(model, lambda: model(**given, use_cache=False).logits)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert len(calls) == 2
    for call in calls:
        assert call["bidirectional_ranges"].tolist() == [[list(image) for image in IMAGES]]
    assert sorted(call["ranges_keep_window_left"] for call in calls) == [False, True]
    causal = model(**{**given, "token_type_ids": None}, use_cache=False).logits
    assert not torch.allclose(causal, expected, atol=1e-2)


@torch.no_grad()
def test_padded_logits_equal_eager(calls):
    model, given = make_gemma3(100), inputs(batch=3, padding=2)
    expected, actual = both(
        model, lambda: model(**given, use_cache=False).logits[given["attention_mask"] == 1]
    )
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert all(call["bidirectional_ranges"][1].tolist() == [[2, 11], [14, 23]] for call in calls)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_text_equals_eager(cache, calls):
    model, given = make_gemma3(), inputs(batch=2, padding=2)
    kind = {} if cache == "dynamic" else {"cache_implementation": "static"}

    def run():
        return model.generate(**given, max_new_tokens=12, do_sample=False, **kind)

    expected, actual = both(model, run)
    assert torch.equal(actual, expected)
    assert sum("bidirectional_ranges" in call for call in calls) == 2  # those of the prompt


def test_training():
    model, given = make_gemma3(), inputs(batch=2, padding=2)
    labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
    labels[1, 2] = -100  # which is for padding to predict

    def run():
        model.zero_grad()
        loss = model(**given, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.detach(), model.model.language_model.layers[0].self_attn.q_proj.weight.grad.clone()

    model.train()
    for expected, actual in zip(*both(model, run), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_blocks_that_outweigh_windows(calls):
    """As in PaliGemma 2: the tokens of the prefix see all of it, whatever the window."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**TEXT, sliding_window=4, query_pre_attn_scalar=9)
    model = transformers.Gemma2ForCausalLM(config).eval()
    ids = inputs()["input_ids"]
    blocks = torch.where(torch.arange(27) < 20, 0, -1)[None]
    create = transformers.masking_utils

    def run():
        embeds = model.model.embed_tokens(ids)
        arguments = (model.config, embeds, None, None)
        masks = {
            "full_attention": create.create_causal_mask(*arguments, block_sequence_ids=blocks),
            "sliding_attention": create.create_sliding_window_causal_mask(
                *arguments, block_sequence_ids=blocks
            ),
        }
        return model(ids, attention_mask=masks, use_cache=False).logits

    expected, actual = both(model, run)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    assert [call["bidirectional_ranges"].tolist() for call in calls] == [[[[0, 20]]]] * 2
    blocks[0, 5] = -1
    with pytest.raises(
        ValueError, match="a block of tokens that see each other both ways has to lie in one piece"
    ):
        run()
