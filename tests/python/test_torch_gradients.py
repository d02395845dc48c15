"""Derivatives that octavo.torch does not have. Whoever asks for one gets an error, never zeros.

test_torch_autograd.py has those that there are.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import octavo  # noqa: E402
import octavo.torch  # noqa: E402

X = torch.linspace(-1, 1, 2 * 3 * 2 * 8).reshape(2, 3, 2, 8)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
LENGTHS = torch.tensor([3, 3], dtype=torch.int32)
COPIES = torch.tensor([[0, 1]], dtype=torch.int32)


def append(k: Any) -> Any:
    octavo.torch.append_kv(k[:, 0], X[:, 0], X.clone(), X.clone(), TABLE, LENGTHS)
    return k


def copy(k_pages: Any) -> Any:
    octavo.torch.copy_pages(k_pages, X.clone(), COPIES)
    return k_pages


def copy_to(k_pages: Any) -> Any:
    octavo.torch.copy_pages(k_pages, X, COPIES, to_k_pages=X.clone(), to_v_pages=X.clone())
    return k_pages


def write_attention(q: Any) -> Any:
    out = torch.zeros_like(X)
    octavo.torch.attention(q, X, X, out=out)
    return out


# From the argument that is differentiated to what depends on it, with the names of operator and argument.
Functions: TypeAlias = dict[str, tuple[Callable[[Any], Any], str]]
DIFFERENTIABLE: Functions = {
    "attention": (lambda q: octavo.torch.attention(q, X, X, causal=True), "attention: q"),
    "attention k": (lambda k: octavo.torch.attention(X, k, X), "attention: k"),
    "attention lse": (lambda v: octavo.torch.attention(X, X, v, return_lse=True)[0], "attention: v"),
    "slopes": (
        lambda x: octavo.torch.attention(X, X, X, alibi_slopes=x[0, 0, :, 0].contiguous()),
        "attention: alibi_slopes",
    ),
}
OTHERS: Functions = {
    "attention out": (write_attention, "attention: q"),
    "paged_attention": (
        lambda q: octavo.torch.paged_attention(q[:, 0], X, X, TABLE, LENGTHS),
        "paged_attention: q",
    ),
    "merge_states": (
        lambda x: octavo.torch.merge_states(X, x[..., 0], X, X[..., 0])[0],
        "merge_states: lse_a",
    ),
    "linear": (lambda x: octavo.torch.linear(x, X[0, 0]), "linear: x"),
    "linear bias": (lambda x: octavo.torch.linear(X, X[0, 0], x[0, 0, :, 0].contiguous()), "linear: bias"),
    "append_kv": (append, "append_kv: k"),
    "rms_norm": (lambda x: octavo.torch.rms_norm(x, X[0, 0, 0]), "rms_norm: x"),
    "rms_norm residual": (
        lambda x: octavo.torch.rms_norm(X, X[0, 0, 0], residual=x)[0],
        "rms_norm: residual",
    ),
    "copy_pages": (copy, "copy_pages: k_pages"),
    "copy_pages to": (copy_to, "copy_pages: k_pages"),
}


def total(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(x).sum()


REVERSE: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "grad": lambda f, x: grad(total(f))(x),
    "vjp": lambda f, x: vjp(f, x),
    "jacrev": lambda f, x: jacrev(f)(x),
    "hessian": lambda f, x: hessian(total(f))(x),
    "grad of grad": lambda f, x: grad(lambda y: grad(total(f))(y).sum())(x),
    "functional_call": lambda f, x: grad(lambda w: functional_call(Scaled(f), {"w": w}, x).sum())(X.sum()),
    "autograd.functional": lambda f, x: torch.autograd.functional.vjp(f, x, f(x)),
    "backward": lambda f, x: f(x.requires_grad_()).sum().backward(),
    "checkpoint": lambda f, x: checkpoint(f, x.requires_grad_(), use_reentrant=False),
    # Runs without gradients at first, and again with them in the backward pass.
    "reentrant checkpoint": lambda f, x: (
        checkpoint(f, x.requires_grad_() * 1, use_reentrant=True).sum().backward()
    ),
}
FORWARD: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "jvp": lambda f, x: jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jacfwd(f)(x),
    "dual_level": lambda f, x: with_tangent(f, x),
}


class Scaled(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.w = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: Any) -> Any:
        return self.function(x * self.w)


def with_tangent(function: Callable[[Any], Any], x: Any) -> Any:
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.parametrize("transform", REVERSE)
def test_derivatives_are_refused(transform: str, function: str) -> None:
    call, names = OTHERS[function]
    with pytest.raises(TypeError, match=f"{names} requires grad, and this call has no backward"):
        REVERSE[transform](call, X.clone())


@pytest.mark.parametrize("function", {**DIFFERENTIABLE, **OTHERS})
@pytest.mark.parametrize("transform", FORWARD)
def test_forward_derivatives_are_refused(transform: str, function: str) -> None:
    call, names = {**DIFFERENTIABLE, **OTHERS}[function]
    for requires_grad in (False, function in DIFFERENTIABLE):
        with pytest.raises(TypeError, match=f"{names} has a tangent"):
            FORWARD[transform](call, X.clone().requires_grad_(requires_grad))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_second_derivatives_are_refused(function: str) -> None:
    call, _ = DIFFERENTIABLE[function]

    def squared(x: Any) -> Any:
        return call(x).square().sum()

    with pytest.raises(TypeError, match=r"attention_backward: \w+ has a tangent"):
        hessian(squared)(X)
    for twice in (grad(lambda x: grad(squared)(x).sum()), jacrev(grad(squared))):
        with pytest.raises(TypeError, match="attention_backward: its results cannot be differentiated"):
            twice(X)


@pytest.mark.parametrize("transform", ["grad", "functional_call", "backward", "reentrant checkpoint"])
def test_derivatives_of_attention_backward_are_refused(transform: str) -> None:
    def call(dout: Any) -> Any:
        return octavo.torch.attention_backward(dout, X, X, X, X, X[..., 0])[0]

    with pytest.raises(TypeError, match="attention_backward: its results cannot be differentiated"):
        REVERSE[transform](call, X.clone())


def test_derivatives_of_and_in_vmap_are_refused() -> None:
    call, names = OTHERS["merge_states"]
    batch = X.expand(3, *X.shape).contiguous()
    for transform in (
        lambda: vmap(grad(total(call)))(batch),
        lambda: grad(lambda x: vmap(call)(x).sum())(batch),
        lambda: vmap(vmap(grad(total(call))))(batch[None]),
        lambda: vjp(vmap(call), batch),
    ):
        with pytest.raises(TypeError, match=f"{names} requires grad, and this call has no backward"):
            transform()
    with pytest.raises(TypeError, match=f"{names} has a tangent"):
        jvp(vmap(call), (batch,), (batch,))


@pytest.mark.parametrize(
    ("transform", "function"),
    [
        ("jvp", "attention"),
        *itertools.product(
            ["grad", "vjp", "jvp", "backward", "checkpoint"], ["paged_attention", "merge_states", "append_kv"]
        ),
    ],
)
def test_derivatives_are_refused_when_compiled(transform: str, function: str) -> None:
    torch._dynamo.reset()
    call, names = {**DIFFERENTIABLE, **OTHERS}[function]
    differentiate = {**REVERSE, **FORWARD}[transform]
    why = "has a tangent" if transform == "jvp" else "requires grad, and this call has no backward"
    if transform in ("backward", "checkpoint"):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=f"{names} {why}"):
            differentiate(compiled, X.clone())
    else:
        compiled = torch.compile(lambda x: differentiate(call, x), fullgraph=True, backend="aot_eager")
        with pytest.raises(Exception, match=f"{names} {why}"):
            compiled(X.clone())


def test_derivatives_of_subclasses_are_refused() -> None:
    """A subclass that wraps tensors may want gradients where those do not."""
    two = TwoTensor(X.clone(), X.clone())
    lse = X[..., 0].contiguous()
    expected, _ = octavo.merge_states(X, lse, X, lse)
    assert torch.equal(octavo.torch.merge_states(two, lse, X, lse)[0].b, expected)
    two.requires_grad_()
    with pytest.raises(TypeError, match="merge_states: out_b requires grad, and this call has no backward"):
        octavo.torch.merge_states(X, lse, two, lse)
    with torch.no_grad():
        assert torch.equal(octavo.torch.merge_states(two, lse, X, lse)[0].a, expected)


def test_transforms_of_other_arguments_work() -> None:
    """The operator's own arguments are constants, or detached: gradients go around it, without a warning."""
    plain = octavo.attention(X, X, X)

    def without_grad(x: Any) -> Any:
        with torch.no_grad():
            result = octavo.torch.attention(x, x, x)
        return (result * x).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constant = grad(lambda x: (octavo.torch.attention(X, X, X) * x).sum())(X)
        detached = grad(lambda x: (octavo.torch.attention(*(x.detach(),) * 3) * x).sum())(X)
        switched_off = grad(without_grad)(X)
    assert torch.equal(constant, plain) and torch.equal(detached, plain) and torch.equal(switched_off, plain)
    _, tangent = jvp(lambda x: octavo.torch.attention(X, X, X) * x, (X,), (torch.ones_like(X),))
    assert torch.equal(tangent, plain)


def test_vmap() -> None:
    batch = torch.stack([X, X.flip(1), X + 1])
    expected = torch.stack([octavo.attention(x, X, x) for x in batch])
    for function in (
        vmap(lambda x: octavo.torch.attention(x, X, x)),
        torch.compile(vmap(lambda x: octavo.torch.attention(x, X, x)), fullgraph=True, backend="aot_eager"),
    ):
        assert torch.equal(function(batch), expected)
    _, lse = vmap(lambda x: octavo.torch.attention(x, X, x, return_lse=True))(batch)
    assert torch.equal(lse, torch.stack([octavo.attention(x, X, x, return_lse=True)[1] for x in batch]))


def test_tangents_are_refused_without_the_dispatcher() -> None:
    with pytest.raises(TypeError, match="attention: k has a tangent"):
        with_tangent(lambda k: octavo.attention(X, k, X), X)
    assert torch.equal(with_tangent(lambda _: octavo.attention(X, X, X), X), octavo.attention(X, X, X))
