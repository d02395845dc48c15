"""octavo.flash_attn in training: gradients, arrays that hold several, deterministic passes, dropout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import octavo.torch  # noqa: E402
from octavo._torch_dropout import draw_seed  # noqa: E402
from octavo.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from support import calls, problems  # noqa: E402
from support.case import Case  # noqa: E402
from support.cases import SYMMETRIC  # noqa: E402
from support.targets import Target  # noqa: E402
from test_flash_attn import DEVICES, every_target, lengths_of, scores_of, small  # noqa: E402
from test_torch_autograd import backward_call  # noqa: E402

PACKINGS = [flash_attn_kvpacked_func, flash_attn_qkvpacked_func]
VARLEN_PACKINGS = [flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", [*PACKINGS, *VARLEN_PACKINGS])
def test_stacked_arrays(function: Any, device: str) -> None:
    """Results and gradients are those of the arrays one by one."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.float16
    x = torch.randn(10, 3, 4, 16, device=device, dtype=dtype)
    slopes = torch.rand(4, device=device)
    options = (0.0, 0.3, True, (4, -1), 5.0, slopes, True, True)
    cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32, device=device)
    lengths: tuple[Any, ...] = (cu_seqlens, cu_seqlens, 7, 7)
    if function in PACKINGS:
        x, lengths = x.unflatten(0, (2, 5)), ()
    apart = [part.clone().requires_grad_() for part in x.unbind(-3)]
    whole = flash_attn_func if function in PACKINGS else flash_attn_varlen_func
    expected = whole(*apart, *lengths, *options)
    if "qkvpacked" in function.__name__:
        given_arrays = [x.clone().requires_grad_()]
        lengths = lengths[::2]
    else:
        given_arrays = [x.select(-3, 0).clone().requires_grad_(), x.narrow(-3, 1, 2).clone().requires_grad_()]
    actual = function(*given_arrays, *lengths, *options)
    assert all(map(torch.equal, actual, expected))
    weights = torch.randn_like(actual[0])
    for out, *_ in (actual, expected):
        (out * weights).sum().backward()
    gradients = [y.grad if y.ndim == apart[0].ndim + 1 else y.grad.unsqueeze(-3) for y in given_arrays]
    torch.testing.assert_close(torch.cat(gradients, -3), torch.stack([y.grad for y in apart], -3))


GRADIENT_CASES = (
    Case("gradients_plain", (33, 33), (47, 47), num_kv_heads=2, causal=False),
    Case("gradients_causal", (30,), (20,), num_q_heads=6, num_kv_heads=2, softmax_scale=0.2),
    Case("gradients_window", (40, 40), (70, 70), window_left=9, window_right=4, causal=False, softcap=3.0),
    Case("gradients_alibi", (17, 17), (40, 40), num_kv_heads=1, alibi="batch"),
    replace(SYMMETRIC, name="gradients_alibi_both_ways"),
    Case("gradients_head_dim_20", (12, 12), (15, 15), num_kv_heads=2, head_dim=20, window_left=5),
)
RAGGED_CASES = (
    Case("gradients_ragged", (9, 0, 31), (20, 4, 17), num_kv_heads=2, alibi="head"),
    Case("gradients_head_dim_12", (3, 8), (11, 2), num_kv_heads=2, head_dim=12, causal=False),
)


@every_target
@pytest.mark.parametrize("case", [*GRADIENT_CASES, *RAGGED_CASES], ids=str)
def test_gradients(target: Target, case: Case) -> None:
    """Also those that come through the log-sum-exp, and those of slopes."""
    inputs = problems.make_inputs(case, target.dtype)
    dout_dlse = problems.make_output_gradients(case, target.dtype)
    packed = (inputs.q, inputs.k, inputs.v, dout_dlse.dout)
    scores = scores_of(target, case, inputs)
    dlse = target.library.float32(dout_dlse.dlse)
    if case in GRADIENT_CASES:
        *arrays, dout = (target.array(calls.dense(case, x)) for x in packed)
        lengths, function, dlse = {}, flash_attn_func, dlse.unflatten(0, (case.batch, -1))
    else:
        *arrays, dout = (target.array(x) for x in packed)
        lengths, function = lengths_of(target, case, inputs), flash_attn_varlen_func
    differentiated = [*arrays, *([scores["alibi_slopes"]] if case.alibi else [])]
    for x in differentiated:
        x.requires_grad_()
    out, lse, _ = function(*arrays, **lengths, **scores, return_attn_probs=True)
    torch.autograd.backward((out, lse), (dout, dlse.transpose(-1, -2)))
    reference = problems.make_backward_reference(case, inputs, dout_dlse, target.dtype)
    reference.check(*(target.library.to_float64(x.grad) for x in differentiated))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic(deterministic: bool, device: str) -> None:
    """The backward pass is told, eager and compiled."""
    arrays = small(device, requires_grad=True)
    out = flash_attn_func(*arrays, causal=True, deterministic=deterministic)
    assert torch.equal(out, flash_attn_func(*arrays, causal=True))
    assert backward_call(out.sum()).get("deterministic", False) == deterministic

    def run(*arrays: Any) -> Any:
        return flash_attn_func(*arrays, causal=True, deterministic=deterministic)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert backward_call(compiled(*arrays).sum()).get("deterministic", False) == deterministic


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_the_deterministic_operator(device: str) -> None:
    arrays = small(device, requires_grad=True)
    opcheck(torch.ops.octavo.attention.deterministic, (True, *arrays), {"causal": True})


class TestDropout:
    P = 0.3

    @pytest.mark.parametrize("device", DEVICES)
    def test_seeds_are_of_torch(self, device: str) -> None:
        arrays = small(device)
        torch.manual_seed(7)
        seed = int(torch.randint(2**63 - 1, ()))
        torch.manual_seed(7)
        out, other = (flash_attn_func(*arrays, self.P, causal=True) for _ in range(2))
        expected = octavo.attention(*arrays, dropout_p=self.P, dropout_seed=seed, causal=True)
        assert torch.equal(out, expected) and not torch.equal(out, other)

    @pytest.mark.parametrize("device", DEVICES)
    def test_statistics(self, device: str) -> None:
        """Values that are unit vectors show the weights, which are all equal before dropout."""
        n = 64
        dtype = torch.float32 if device == "cpu" else torch.float16
        q = torch.zeros(8, 50, 4, n, device=device, dtype=dtype)
        v = torch.eye(n, device=device, dtype=dtype)[None, :, None].repeat(8, 1, 4, 1)
        torch.manual_seed(0)
        weights = flash_attn_func(q, torch.zeros_like(v), v, self.P)
        kept = weights != 0
        assert weights[kept].float().mean().item() == pytest.approx(1 / (n * (1 - self.P)), rel=1e-3)
        share, deviation = kept.float().mean().item(), (self.P * (1 - self.P) / kept.numel()) ** 0.5
        assert abs(share - (1 - self.P)) < 5 * deviation

    @pytest.mark.parametrize("deterministic", [False, True])
    def test_gradients_drop_the_same_weights(self, deterministic: bool) -> None:
        n = 16
        v = torch.eye(n)[None, :, None].repeat(2, 1, 3, 1).requires_grad_()
        q, k = torch.randn(2, 2, n, 3, n).unbind()
        weights = flash_attn_func(q, k, v, self.P, deterministic=deterministic)  # [batch, query, head, key]
        weights.sum().backward()
        assert (weights == 0).any()
        dropped = weights.detach().sum(1).transpose(1, 2)[..., None].expand_as(v)
        torch.testing.assert_close(v.grad, dropped)

    def test_checkpoints_draw_again(self) -> None:
        def run(*arrays: Any) -> Any:
            return flash_attn_func(*arrays, self.P)

        gradients = []
        for call in (run, lambda *arrays: checkpoint(run, *arrays, use_reentrant=False)):
            arrays = small(requires_grad=True)
            torch.manual_seed(3)
            call(*arrays).square().sum().backward()
            gradients.append([x.grad for x in arrays])
        assert all(map(torch.equal, *gradients))

    def test_goes_with_softcap_and_packed_arrays(self) -> None:
        arrays = [x.flatten(0, 1) for x in small()]
        cu_seqlens = torch.tensor([0, 4, 18], dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        torch.manual_seed(7)
        seed = int(torch.randint(2**63 - 1, ()))
        torch.manual_seed(7)
        out = flash_attn_varlen_func(*arrays, cu_seqlens, cu_seqlens, 14, 14, self.P, softcap=2.0)
        dropout = {"dropout_p": self.P, "dropout_seed": seed}
        assert torch.equal(out, octavo.attention(*arrays, softcap=2.0, **lengths, **dropout))

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("fullgraph", [False, True])
    def test_compiled(self, fullgraph: bool, device: str) -> None:
        """A seed breaks the graph where scalars may not stay inside."""

        def run(*arrays: Any) -> Any:
            return flash_attn_func(*arrays, self.P, deterministic=True) * 2

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(run, fullgraph=fullgraph, backend=counter)
        for seed in (7, 8, 9):
            results = []
            for function in (run, compiled):
                arrays = small(device, requires_grad=True)
                torch.manual_seed(seed)
                with torch._dynamo.config.patch(capture_scalar_outputs=fullgraph):
                    out = function(*arrays)
                out.sum().backward()
                results.append((out, *(x.grad for x in arrays)))
            assert all(map(torch.equal, *results))
        assert (counter.frame_count == 1) == fullgraph

    def test_draws_nothing_while_a_graph_is_captured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also for octavo.transformers; but on the CPU, which no graph captures."""
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(
            ValueError, match="transformers: dropout must be 0 while a CUDA graph is captured"
        ):
            draw_seed("octavo.transformers", torch.device("cuda"))
        assert draw_seed("octavo.transformers", torch.device("cpu")) >= 0

    @pytest.mark.gpu
    def test_is_refused_in_a_captured_graph(self) -> None:
        arrays = small("cuda")
        message = "flash_attn_func: dropout must be 0 while a CUDA graph is captured"
        with pytest.raises(ValueError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
            flash_attn_func(*arrays, self.P)
