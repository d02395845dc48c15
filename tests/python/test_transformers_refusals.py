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
