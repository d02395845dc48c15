"""softmax_phi in PyTorch's and JAX's programs, with their gradients, and in C."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import octavo
from support.c_library import Library, OctavoError

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
PHI = np.array([0.5, -20.0, 3.0, 9.0], np.float32)  # of one head among its scores, of others far from them
PLACES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def normal(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng([*shape]).standard_normal(shape).astype(np.float32)


def dense() -> dict[str, NDArray[Any]]:
    return {
        "q": 4 * normal(2, 5, HEADS, HEAD_DIM),
        "k": normal(2, 9, KV_HEADS, HEAD_DIM),
        "v": normal(2, 9, KV_HEADS, HEAD_DIM) + 1,
    }


def paged() -> dict[str, NDArray[Any]]:
    return {
        "q": 4 * normal(2, HEADS, HEAD_DIM),
        "k_pages": normal(6, 8, KV_HEADS, HEAD_DIM),
        "v_pages": normal(6, 8, KV_HEADS, HEAD_DIM) + 1,
        "page_table": np.array([[3, 0, 5], [2, 4, 1]], np.int32),
        "seq_lens": np.array([21, 9], np.int32),
    }


CALLS = [("attention", dense), ("paged_attention", paged)]
every_call = pytest.mark.parametrize(("name", "make"), CALLS, ids=[name for name, _ in CALLS])


def differs(a: Any, b: Any) -> bool:
    return np.asarray(a, np.float64).tobytes() != np.asarray(b, np.float64).tobytes()


def test_phi_changes_roundings() -> None:
    """What the other tests of this file rely on: a phi that got lost on its way would not go unseen."""
    for name, make in CALLS:
        function, arrays = getattr(octavo, name), make()
        plain = function(**arrays)
        for phi in (0.5, PHI):
            assert differs(function(**arrays, softmax_phi=phi), plain)
            np.testing.assert_allclose(function(**arrays, softmax_phi=phi), plain, rtol=2e-5, atol=2e-6)


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        import octavo.torch  # noqa: F401

        return torch

    @staticmethod
    def place(torch: Any, device: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        dtype = torch.float16 if device == "cuda" else torch.float32
        tensors = {name: torch.tensor(x, device=device) for name, x in arrays.items()}
        return {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}

    @every_call
    @pytest.mark.parametrize("device", PLACES)
    def test_eager_and_compiled(self, torch: Any, name: str, make: Any, device: str) -> None:
        arrays = self.place(torch, device, make())
        function = getattr(octavo.torch, name)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for phi in (0.5, torch.tensor(PHI, device=device)):
            expected = getattr(octavo, name)(**arrays, softmax_phi=phi, return_lse=True)
            out = torch.empty_like(arrays["q"])
            for results in (
                function(**arrays, softmax_phi=phi, return_lse=True),
                function(**arrays, softmax_phi=phi, return_lse=True, out=out),
                compiled(**arrays, softmax_phi=phi, return_lse=True),
            ):
                for x, y in zip(results, expected, strict=True):
                    assert torch.equal(x, y)

    @every_call
    @pytest.mark.parametrize("device", PLACES)
    def test_opcheck(self, torch: Any, name: str, make: Any, device: str) -> None:
        arrays = self.place(torch, device, make())
        operator = getattr(torch.ops.octavo, name).default
        phi = torch.tensor(PHI, device=device)
        torch.library.opcheck(operator, tuple(arrays.values()), {"softmax_phi_array": phi})
        torch.library.opcheck(operator, tuple(arrays.values()), {"softmax_phi": 0.5})

    @pytest.mark.parametrize("device", PLACES)
    def test_gradients(self, torch: Any, device: str) -> None:
        """Those of the call without, but for the rounding of its results."""
        arrays = self.place(torch, device, dense())

        def gradients(**options: Any) -> list[Any]:
            inputs = {name: x.clone().requires_grad_() for name, x in arrays.items()}
            out, lse = octavo.torch.attention(**inputs, causal=True, return_lse=True, **options)
            (out.square().sum() + lse.sum()).backward()
            return [x.grad for x in inputs.values()]

        expected = gradients()
        tolerance = 1e-3 if device == "cpu" else 2e-2
        for phi in (0.5, torch.tensor(PHI, device=device)):
            for x, y in zip(gradients(softmax_phi=phi), expected, strict=True):
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)

    def test_errors(self, torch: Any) -> None:
        arrays = self.place(torch, "cpu", dense())
        with pytest.raises(ValueError, match="attention: softmax_phi must be finite in float32; got inf"):
            octavo.torch.attention(**arrays, softmax_phi=float("inf"))
        with pytest.raises(TypeError, match="attention: softmax_phi must be a float; got str"):
            octavo.torch.attention(**arrays, softmax_phi="high")


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self) -> Any:
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        import octavo.jax  # noqa: F401

        return jax

    @staticmethod
    def place(jax: Any, device: str, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        dtype = "float16" if device == "cuda" else "float32"
        placed = {name: x.astype(dtype) if x.dtype == np.float32 else x for name, x in arrays.items()}
        return {name: jax.device_put(x, jax.devices(device)[0]) for name, x in placed.items()}

    @every_call
    @pytest.mark.parametrize("device", PLACES)
    def test_inside_a_program(self, jax: Any, name: str, make: Any, device: str) -> None:
        arrays, function = self.place(jax, device, make()), getattr(octavo.jax, name)
        phi = jax.device_put(PHI, jax.devices(device)[0])
        expected = getattr(octavo, name)(**arrays, softmax_phi=phi)
        traced = jax.jit(lambda arrays, phi: function(**arrays, softmax_phi=phi))
        assert not differs(traced(arrays, phi), expected)
        constant = jax.jit(lambda arrays: function(**arrays, softmax_phi=0.5))
        assert not differs(constant(arrays), getattr(octavo, name)(**arrays, softmax_phi=0.5))

    @pytest.mark.parametrize("device", PLACES)
    def test_gradients(self, jax: Any, device: str) -> None:
        arrays = self.place(jax, device, dense())

        def loss(arrays: Any, phi: Any) -> Any:
            out, lse = octavo.jax.attention(**arrays, causal=True, softmax_phi=phi, return_lse=True)
            return (out.astype("float32") ** 2).sum() + lse.sum()

        expected = jax.grad(loss)(arrays, None)
        tolerance = 1e-3 if device == "cpu" else 2e-2
        phi = jax.device_put(PHI, jax.devices(device)[0])
        of_number = jax.jit(jax.grad(lambda arrays: loss(arrays, 0.5)))(arrays)
        of_array, of_phi = jax.jit(jax.grad(loss, argnums=(0, 1)))(arrays, phi)
        assert (np.asarray(of_phi) == 0.0).all()
        for gradients in (of_number, of_array):
            for name, gradient in gradients.items():
                np.testing.assert_allclose(
                    np.asarray(gradient, np.float64),
                    np.asarray(expected[name], np.float64),
                    rtol=tolerance,
                    atol=tolerance,
                )

    @every_call
    def test_vmap(self, jax: Any, name: str, make: Any) -> None:
        """Shared by all elements of the axis, or of each."""
        arrays, function = self.place(jax, "cpu", make()), getattr(octavo.jax, name)
        queries = np.stack([np.asarray(arrays["q"]), np.asarray(arrays["q"]) / 2])
        phis = np.stack([PHI, PHI[::-1]])

        def call(q: Any, phi: Any) -> Any:
            return function(**{**arrays, "q": q}, softmax_phi=phi)

        shared = jax.vmap(call, in_axes=(0, None))(queries, PHI)
        of_each = jax.vmap(call)(queries, phis)
        for i, q in enumerate(queries):
            np.testing.assert_allclose(shared[i], call(q, PHI), rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(of_each[i], call(q, phis[i]), rtol=2e-5, atol=2e-6)

    def test_errors(self, jax: Any) -> None:
        arrays = self.place(jax, "cpu", dense())
        with pytest.raises(ValueError, match="attention: softmax_phi must be finite in float32; got nan"):
            octavo.jax.attention(**arrays, softmax_phi=float("nan"))
        with pytest.raises(ValueError, match=r"num_q_heads of softmax_phi \(3\) must equal that of q \(4\)"):
            jax.jit(lambda phi: octavo.jax.attention(**arrays, softmax_phi=phi))(PHI[:3])


@every_call
def test_c(name: str, make: Any) -> None:
    library, arrays = Library(), make()
    out = np.full_like(arrays["q"], np.nan)
    for given in ({"softmax_phi": 0.5}, {"softmax_phi_array": PHI}):
        getattr(library, name)(out=out, **arrays, **given)
        (phi,) = given.values()
        np.testing.assert_array_equal(out, getattr(octavo, name)(**arrays, softmax_phi=phi))
    getattr(library, name)(out=out, **arrays, softmax_phi=np.nan)
    np.testing.assert_array_equal(out, getattr(octavo, name)(**arrays))
    with pytest.raises(OctavoError, match=f"{name}: softmax_phi must be a number or an array"):
        getattr(library, name)(out=out, **arrays, softmax_phi=0.5, softmax_phi_array=PHI)
    with pytest.raises(OctavoError, match=f"{name}: softmax_phi must be finite in float32; got 1e\\+39"):
        getattr(library, name)(out=out, **arrays, softmax_phi=1e39)
