"""octavo.transformers: what errors say of models and calls that are not served."""

import sys
import types

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

import octavo.transformers  # noqa: E402
from support.tiny_models import make_model  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def registered():
    octavo.transformers.register()


def tokens(length=9):
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_advice_is_an_attention_that_can_do_it():
    """sdpa returns no weights, and has neither softcap nor sinks."""
    llama, gemma2 = (make_model(name, attn_implementation="octavo") for name in ("llama", "gemma2"))
    hole = torch.ones_like(tokens())
    hole[0, 3:5] = 0
    advice = "use another attn_implementation, such as eager"
    with pytest.raises(ValueError, match=f"attention weights are never held, .*; {advice}"):
        llama(tokens(), output_attentions=True)
    with pytest.raises(ValueError, match=f"with a softcap, padding under a window .*; {advice}"):
        gemma2(tokens(), attention_mask=hole)
    with pytest.raises(ValueError, match=f"sinks is not supported; {advice}"):
        llama(tokens(), sinks=torch.zeros(4))
    llama.set_attn_implementation("eager")
    gemma2.set_attn_implementation("eager")
    assert llama(tokens(), output_attentions=True).attentions
    gemma2(tokens(), attention_mask=hole)


@torch.no_grad()
def test_a_mask_of_four_axes_that_the_model_makes():
    """The caller of LayoutLM has passed [batch, seqlen], or nothing."""
    config = transformers.LayoutLMConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96
    )
    model = transformers.AutoModel.from_config(config, attn_implementation="octavo").eval()
    message = (
        r"mask of shape \(2, 1, 1, 9\) is not supported: .* models that make such a mask of it themselves"
    )
    for mask in (None, torch.ones_like(tokens())):
        with pytest.raises(ValueError, match=message):
            model(tokens(), attention_mask=mask)


SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
# Models that choose a class of their attention by name; the rest of them calls AttentionInterface.
TABLES = {
    "Git": lambda: transformers.GitConfig(
        **SMALL, vocab_size=61, vision_config={**SMALL, "image_size": 32, "patch_size": 8}
    ),
    "Sam": lambda: transformers.SamConfig(
        vision_config={
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "mlp_dim": 96,
            "output_channels": 16,
            "image_size": 32,
            "patch_size": 8,
            "global_attn_indexes": [0],
        }
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_models_that_choose_a_class_by_name(name, tmp_path):
    kind = getattr(transformers, f"{name}Model")
    message = rf"octavo\.transformers: {name}\w+ chooses a class of its attention by name"
    with pytest.raises(ValueError, match=message):
        kind._from_config(TABLES[name](), attn_implementation="octavo")
    model = transformers.AutoModel.from_config(TABLES[name](), attn_implementation="eager")
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation("octavo")
    assert model.config._attn_implementation == "eager"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="octavo")


def test_parts_beside_such_a_class():
    """The images of GIT go through AttentionInterface."""
    vision = TABLES["Git"]().vision_config
    transformers.GitVisionModel._from_config(vision, attn_implementation="octavo")
    model = transformers.GitModel._from_config(TABLES["Git"](), attn_implementation="eager")
    model.set_attn_implementation({"vision_config": "octavo"})
    assert model.image_encoder.config._attn_implementation == "octavo"
    assert model.config._attn_implementation == "eager"


def test_other_errors_while_a_model_is_made():
    config = transformers.LlamaConfig(**SMALL, hidden_act="none of these")
    with pytest.raises(KeyError, match="none of these"):
        transformers.LlamaForCausalLM._from_config(config, attn_implementation="octavo")


def test_implementations_by_part():
    """A dict names parts; "" is the model itself."""
    bloom = make_model("bloom", attn_implementation="eager")
    message = "BloomForCausalLM does not call transformers' AttentionInterface"
    with pytest.raises(ValueError, match=message):
        bloom.set_attn_implementation({"": "octavo"})
    with pytest.raises(ValueError, match=message):
        type(bloom)._from_config(bloom.config, attn_implementation={"": "octavo"})
    bloom.set_attn_implementation({"": "eager"})
    llama = make_model("llama", attn_implementation="eager")
    llama.set_attn_implementation({"": "octavo"})
    assert llama.config._attn_implementation == "octavo"


@pytest.fixture
def notebook(monkeypatch):
    """A module without a source, as a notebook or the interpreter has it, in which classes are defined."""
    module = types.ModuleType("notebook_without_a_source")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.transformers = transformers

    def define(base):
        name = f"My{base.__name__}"
        exec(f"class {name}(transformers.{base.__name__}): pass", vars(module))
        return getattr(module, name)

    return define


@torch.no_grad()
def test_classes_of_a_notebook(notebook):
    """What the class that they derive from can have."""
    llama, bloom = (make_model(name, attn_implementation="eager") for name in ("llama", "bloom"))
    expected, kind = llama(tokens()).logits, notebook(type(llama))
    for first in ("octavo", "eager"):
        model = kind._from_config(llama.config, attn_implementation=first).eval()
        model.load_state_dict(llama.state_dict())
        model.set_attn_implementation("octavo")
        assert model.config._attn_implementation == "octavo"
        torch.testing.assert_close(model(tokens()).logits, expected, atol=2e-5, rtol=1e-4)
    kind, message = notebook(type(bloom)), "MyBloomForCausalLM does not call transformers' AttentionInterface"
    with pytest.raises(ValueError, match=message):
        kind._from_config(bloom.config, attn_implementation="octavo")
    with pytest.raises(ValueError, match=message):
        kind._from_config(bloom.config, attn_implementation="eager").set_attn_implementation("octavo")
