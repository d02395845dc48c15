"""Gradients of octavo.torch.attention; test_torch_gradients.py has the derivatives that there are not."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import distributed  # noqa: E402
from torch.func import functional_call, grad, jacrev, vjp, vmap  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import octavo  # noqa: E402
import octavo.torch  # noqa: E402
from support import eager  # noqa: E402

HEAD_DIM = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CU_SEQLENS_Q = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
CU_SEQLENS_K = torch.tensor([0, 2, 5, 9], dtype=torch.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "dense": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "slopes": {"alibi_slopes": SLOPES, "window_left": 3, "window_right": 2},
    "symmetric slopes": {"alibi_slopes": SLOPES, "alibi_symmetric": True},
    "chunks": {"causal": True, "attention_chunk": 3},
    "ranges": {
        "causal": True,
        "window_left": 1,
        "bidirectional_ranges": torch.tensor([[[0, 3], [4, 7]], [[5, 9], [0, 0]]], dtype=torch.int32),
    },
    "slopes of each": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES]), "causal": True},
    "prefix": {"prefix_lens": torch.tensor([4, 0], dtype=torch.int32), "causal": True, "softcap": 2.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 2**40, "dropout_offset": 24},
    "packed": {"cu_seqlens_q": CU_SEQLENS_Q, "cu_seqlens_k": CU_SEQLENS_K, "max_seqlen_q": 5},
    "sinks": {"sinks": SINKS, "causal": True, "window_left": 3},
    "packed everything": {
        "cu_seqlens_q": CU_SEQLENS_Q,
        "cu_seqlens_k": CU_SEQLENS_K,
        "alibi_slopes": SLOPES,
        "prefix_lens": torch.tensor([1, 0, 2], dtype=torch.int32),
        "causal": True,
        "softcap": 3.0,
        "dropout_p": 0.5,
        "dropout_seed": 7,
        "sinks": SINKS,
    },
}


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def place(device: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """q, k and v for these options, and the options; on a GPU in float16, as its kernels want."""
    lead = () if "cu_seqlens_q" in options else (2,)
    num_q, num_k = (8, 9) if not lead else (5, 9)
    dtype = torch.float32 if device == "cpu" else torch.float16
    shapes = [(*lead, num_q, 4), (*lead, num_k, 2), (*lead, num_k, 2)]
    qkv = [normal(*shape, HEAD_DIM, seed=i).to(device, dtype) for i, shape in enumerate(shapes)]
    moved = {
        name: x.to(device, copy=True) if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    return qkv, moved


def assert_close(actual: Any, expected: Any, dtype: Any = None) -> None:
    """Within what q, k and v of `dtype` allow; those of slopes are float32 whatever q is."""
    tolerance = 2e-5 if (dtype or actual.dtype) == torch.float32 else 4e-3
    torch.testing.assert_close(
        actual.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance * 5
    )


def differentiated(arrays: list[Any], options: dict[str, Any]) -> list[Any]:
    return [*arrays, *(options[name] for name in ("alibi_slopes", "sinks") if name in options)]


def gradients(function: Any, arrays: list[Any], options: dict[str, Any], return_lse: bool) -> list[Any]:
    """Those of a sum of results with random weights, with respect to q, k, v, slopes and sinks, if any."""
    arrays = [x.clone().requires_grad_() for x in arrays]
    options = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            options[name] = options[name].clone().requires_grad_()
    out, *lse = (
        function(*arrays, **options, return_lse=True) if return_lse else (function(*arrays, **options),)
    )
    loss = (out * normal(*out.shape, seed=8).to(out)).sum()
    if lse:  # of those that see something
        loss = loss + (lse[0] * normal(*lse[0].shape, seed=9).to(lse[0]))[lse[0] > -1e20].sum()
    loss.backward()
    return [x.grad for x in differentiated(arrays, options)]


def reference(*arrays: Any, return_lse: bool = False, **options: Any) -> Any:
    options.pop("max_seqlen_q", None)
    out, lse = eager.attention(*arrays, **options)
    return (out, lse) if return_lse else out


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_equals_eager_attention(options: dict[str, Any], return_lse: bool, device: str) -> None:
    arrays, options = place(device, options)
    expected = gradients(reference, arrays, options, return_lse)
    for actual, wanted in zip(
        gradients(octavo.torch.attention, arrays, options, return_lse), expected, strict=True
    ):
        assert_close(actual, wanted, arrays[0].dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "backend"), [("dense", "inductor"), ("dropout", "aot_eager"), ("packed everything", "aot_eager")]
)
def test_compiled(name: str, backend: str, device: str) -> None:
    torch._dynamo.reset()
    arrays, options = place(device, OPTIONS[name])
    compiled = torch.compile(octavo.torch.attention, fullgraph=True, backend=backend)
    for return_lse in (False, True):
        expected = gradients(octavo.torch.attention, arrays, options, return_lse)
        for x, y in zip(gradients(compiled, arrays, options, return_lse), expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overload", ["default", "lse"])
@pytest.mark.parametrize("name", ["slopes", "dropout", "packed", "sinks"])
def test_opcheck(name: str, overload: str, device: str) -> None:
    arrays, options = place(device, OPTIONS[name])
    for x in differentiated(arrays, options):
        x.requires_grad_()
    opcheck(getattr(torch.ops.octavo.attention, overload), tuple(arrays), options)


class Calls(TorchDispatchMode):
    """The calls of attention_backward, by the names of their arguments; without defaults at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "octavo::attention_backward":
            names = [argument.name for argument in func._schema.arguments]
            self.made.append({"overload": func._overloadname, **dict(zip(names, args, strict=False))})
        return func(*args, **(kwargs or {}))


def backward_call(loss: Any) -> dict[str, Any]:
    with Calls() as calls:
        loss.backward()
    (call,) = calls.made
    return call


def test_what_autograd_hands_in() -> None:
    """Expanded, transposed, or nothing at all."""
    (q, k, v), _ = place("cpu", {})
    q.requires_grad_()
    out, lse = octavo.torch.attention(q, k, v, return_lse=True)
    call = backward_call(out.sum())
    assert call["dout"].is_contiguous() and call.get("dlse") is None
    assert_close(q.grad, torch.autograd.grad(reference(q, k, v).sum(), q)[0])

    weights = normal(2, 5, HEAD_DIM, 4)
    call = backward_call((octavo.torch.attention(q, k, v).transpose(2, 3) * weights).sum())
    assert call["dout"].stride(-1) == 1 and call.get("dlse") is None

    q.grad = None
    _, lse = octavo.torch.attention(q, k, v, return_lse=True)
    assert not backward_call(lse.sum())["dout"].any()
    assert_close(q.grad, torch.autograd.grad(reference(q, k, v, return_lse=True)[1].sum(), q)[0])


def test_only_what_is_needed() -> None:
    (q, k, v), _ = place("cpu", {})
    slopes = SLOPES.clone()
    v.requires_grad_()
    call = backward_call(octavo.torch.attention(q, k, v, alibi_slopes=slopes).sum())
    assert call["overload"] == "default" and v.grad is not None and q.grad is None and slopes.grad is None
    slopes.requires_grad_()
    call = backward_call(octavo.torch.attention(q, k, v.detach(), alibi_slopes=slopes).sum())
    assert call["overload"] == "dalibi" and slopes.grad is not None
    sinks = SINKS.clone().requires_grad_()
    call = backward_call(octavo.torch.attention(q, k, v.detach(), alibi_slopes=SLOPES, sinks=sinks).sum())
    assert (call["overload"], call["of_slopes"]) == ("dsinks", False) and sinks.grad is not None
    call = backward_call(octavo.torch.attention(q, k, v.detach(), alibi_slopes=slopes, sinks=sinks).sum())
    assert (call["overload"], call["of_slopes"]) == ("dsinks", True)
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert not octavo.torch.attention(q, k, v).requires_grad
    assert not octavo.torch.attention(q, k, v.detach()).requires_grad


def test_compiled_autograd() -> None:
    """A backward pass that PyTorch compiles, of an eager forward pass."""
    torch.manual_seed(0)
    x = torch.randn(2, 7, 3, 4, 16, requires_grad=True)

    def loss() -> torch.Tensor:
        return octavo.torch.attention(*x.unbind(2), causal=True).square().sum()

    (expected,) = torch.autograd.grad(loss(), x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda loss: loss.backward(), backend="eager")(loss())
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_deterministic_algorithms(is_compiled: bool) -> None:
    """As they are switched when the backward pass runs; in compiled code, when its forward pass does."""
    (q, k, v), _ = place("cpu", {})
    q.requires_grad_()
    torch._dynamo.reset()
    attention = octavo.torch.attention
    if is_compiled:
        attention = torch.compile(attention, fullgraph=True, backend="aot_eager")
    try:
        for switch in (True, False):
            torch.use_deterministic_algorithms(switch and is_compiled)
            out = attention(q, k, v)
            torch.use_deterministic_algorithms(switch)
            assert backward_call(out.sum()).get("deterministic", False) == switch
    finally:
        torch.use_deterministic_algorithms(False)


def test_twice() -> None:
    """The first derivative is there, and the second is refused when it is asked for."""
    (q, k, v), _ = place("cpu", {})
    q.requires_grad_()
    message = "attention_backward: its results cannot be differentiated; attention has no second derivatives"
    loss = octavo.torch.attention(q, k, v).sum()
    (once,) = torch.autograd.grad(loss, q, create_graph=True)
    (expected,) = torch.autograd.grad(octavo.torch.attention(q, k, v).sum(), q)
    assert torch.equal(once, expected)
    with pytest.raises(TypeError, match=message):
        (once * q).sum().backward()
    with pytest.raises(TypeError, match=message):
        grad(lambda q: grad(lambda q: octavo.torch.attention(q, k, v).sum())(q).sum())(q)
    out, lse = octavo.attention(q.detach(), k, v, return_lse=True)
    dq, _, _ = octavo.torch.attention_backward(torch.ones_like(out), q, k, v, out, lse)
    assert torch.equal(dq, expected)
    with pytest.raises(TypeError, match=message):
        dq.sum().backward()


def test_what_was_saved_may_not_change() -> None:
    (q, k, v), options = place("cpu", OPTIONS["packed"])
    q.requires_grad_()
    for changed in (k, options["cu_seqlens_k"].clone()):
        given = {**options, "cu_seqlens_k": changed} if changed is not k else options
        out = octavo.torch.attention(q, k, v, **given)
        changed += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


# Dynamo does not trace the reentrant one.
@pytest.mark.parametrize(("use_reentrant", "is_compiled"), [(False, False), (True, False), (False, True)])
def test_checkpoint(use_reentrant: bool, is_compiled: bool) -> None:
    torch._dynamo.reset()
    arrays, options = place("cpu", OPTIONS["dropout"])

    def run(q: Any, k: Any, v: Any) -> Any:
        return octavo.torch.attention(q * 2, k, v.sin(), **options)

    def recomputed(*arrays: Any) -> Any:
        return checkpoint(run, *arrays, use_reentrant=use_reentrant)

    if is_compiled:
        recomputed = torch.compile(recomputed, fullgraph=True, backend="aot_eager")
    for x, y in zip(gradients(recomputed, arrays, {}, False), gradients(run, arrays, {}, False), strict=True):
        assert torch.equal(x, y)


class Layer(torch.nn.Module):
    """Causal attention with learnt slopes."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(4 * HEAD_DIM, 8 * HEAD_DIM)
        self.slopes = torch.nn.Parameter(SLOPES.clone())
        self.attention = attention

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (8, HEAD_DIM)).split([4, 2, 2], -2)
        return x + self.attention(q, k, v, alibi_slopes=self.slopes, causal=True).flatten(-2).type_as(x)


def train(layer: Any, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        loss = layer(normal(2, 7, 4 * HEAD_DIM, seed=step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training() -> None:
    expected = train(Layer(reference))
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    assert train(Layer(octavo.torch.attention)) == pytest.approx(expected, rel=1e-5)
    torch._dynamo.reset()
    assert train(torch.compile(Layer(octavo.torch.attention), fullgraph=True)) == pytest.approx(
        expected, rel=1e-5
    )


@pytest.fixture
def one_process() -> Any:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel() -> None:
    expected = train(Layer(octavo.torch.attention))
    assert train(DistributedDataParallel(Layer(octavo.torch.attention))) == expected


@pytest.mark.usefixtures("one_process")
def test_fully_sharded() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch shards modules in another way")
    layer = Layer(octavo.torch.attention)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    assert train(fsdp.fully_shard(layer, mesh=mesh)) == train(Layer(octavo.torch.attention))


def test_autocast() -> None:
    """It leaves the operators as they are: they compute in the dtype that they are given."""
    seen = []

    def attention(q: Any, *args: Any, **options: Any) -> Any:
        seen.append(q.dtype)
        return octavo.torch.attention(q, *args, **options)

    layer, x = Layer(attention), normal(2, 7, 4 * HEAD_DIM)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
    assert seen == [torch.bfloat16]
    actual = layer.qkv.weight.grad.clone()
    layer.zero_grad()
    layer(x).sum().backward()
    torch.testing.assert_close(actual, layer.qkv.weight.grad, rtol=0.05, atol=0.3)


def test_transforms_of_torch_func() -> None:
    arrays, _ = place("cpu", {})
    weights = normal(2, 5, 4, HEAD_DIM, seed=8)
    expected = gradients(octavo.torch.attention, arrays, {}, False)

    def loss(*arrays: Any) -> Any:
        return (octavo.torch.attention(*arrays) * weights).sum()

    layer = Layer(octavo.torch.attention)
    parameters, x = dict(layer.named_parameters()), normal(2, 7, 4 * HEAD_DIM)
    of_parameters = grad(lambda parameters: functional_call(layer, parameters, x).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(of_parameters[name], parameter.grad)
    of_loss = grad(loss, argnums=(0, 1, 2))
    compiled = torch.compile(of_loss, fullgraph=True, backend="aot_eager")
    for actual in (of_loss(*arrays), compiled(*arrays), vjp(octavo.torch.attention, *arrays)[1](weights)):
        assert all(map(torch.equal, actual, expected))
    q, k, v = arrays
    jacobian = jacrev(lambda k: octavo.torch.attention(q[:1, :1, :, :8], k[:1, ..., :8], v[:1, ..., :8]))(k)
    wanted = jacrev(lambda k: reference(q[:1, :1, :, :8], k[:1, ..., :8], v[:1, ..., :8]).float())(k)
    assert_close(jacobian, wanted)


def test_gradients_in_and_of_vmap() -> None:
    (q, k, v), _ = place("cpu", {})
    batch = torch.stack([q, q + 1, 2 * q])
    each = torch.stack([grad(lambda x: octavo.torch.attention(x, k, v).square().sum())(x) for x in batch])
    inside = vmap(grad(lambda x: octavo.torch.attention(x, k, v).square().sum()))(batch)
    around = grad(lambda batch: vmap(lambda x: octavo.torch.attention(x, k, v))(batch).square().sum())(batch)
    assert torch.equal(inside, each) and torch.equal(around, each)


def test_subclasses() -> None:
    (q, k, v), _ = place("cpu", {})
    expected = gradients(octavo.torch.attention, [q, k, v], {}, False)
    two = TwoTensor(v.clone(), v.clone()).requires_grad_()
    weights = normal(2, 5, 4, HEAD_DIM, seed=8)
    (octavo.torch.attention(q, k, two) * weights).sum().backward()
    assert torch.equal(two.grad.a, expected[2]) and torch.equal(two.grad.b, expected[2])


@pytest.mark.parametrize("name", ["octavo.attention", "octavo.torch.attention"])
def test_direct_calls_and_those_with_out_are_refused(name: str) -> None:
    (q, k, v), _ = place("cpu", {})
    function: Any = octavo.attention
    if name == "octavo.torch.attention":
        function = functools.partial(octavo.torch.attention, out=torch.empty_like(q))
    message = (
        r"attention: k requires grad, and this call has no backward; use octavo\.torch\.attention without "
        r"out, k\.detach\(\) or torch\.no_grad\(\)$"
    )
    with pytest.raises(TypeError, match=message):
        function(q, k.requires_grad_(), v)


def test_layers_that_share_keys() -> None:
    """Their gradients add up."""
    (q, k, v), _ = place("cpu", {})
    k.requires_grad_()

    def layers(attention: Any) -> Any:
        return attention(attention(q, k, v, causal=True).to(q), k, v).square().sum()

    (actual,) = torch.autograd.grad(layers(octavo.torch.attention), k)
    (expected,) = torch.autograd.grad(layers(reference), k)
    assert_close(actual, expected)
