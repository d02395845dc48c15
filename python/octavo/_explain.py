"""Which kernel a call would run, and why not another one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo import _core
from octavo._attention import attention, merge_states
from octavo._attention_backward import attention_backward
from octavo._latent_attention import latent_attention
from octavo._linear import linear
from octavo._misuse import refuse_call
from octavo._paged_attention import append_kv, copy_pages, paged_attention
from octavo._rms_norm import rms_norm

_OPERATORS = {
    function.__name__: function
    for function in (
        attention,
        paged_attention,
        append_kv,
        copy_pages,
        merge_states,
        attention_backward,
        linear,
        rms_norm,
        latent_attention,
    )
}


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` returns; ``str()`` of it is a line, and one for each entry of ``why_not``."""

    kernel: str
    """The kernel, as ``build_info()["instances"]`` names it; "none" for a call without queries."""
    summary: str
    """How it cuts the work."""
    file: str
    """The source file of the kernel, from the root of the repository; empty where there is no kernel."""
    plan: Mapping[str, bool | int | str]
    """What was decided, by name."""
    why_not: Mapping[str, str]
    """For each other kernel of the operator the reason why it does not run."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def explain(operator: str, /, *args: object, device: str | None = None, **kwargs: object) -> Explanation:
    """Which kernel a call would run, how it would cut the work, and why no other kernel runs.

    Nothing runs, and no GPU is needed: ``device`` may name one. With ``OCTAVO_PRINT_KERNELS=1`` in the
    environment every call prints to stderr what it launches, in lines like the first of its explanation, but
    those that have been printed before.

    Args:
        operator: "attention", "paged_attention", "append_kv", "copy_pages", "merge_states",
            "attention_backward", "linear", "rms_norm" or "latent_attention".
        *args: the arguments of the call. Strides and addresses of arrays count, since kernels differ in what
            they need of them. An array may also be anything that has a shape and a dtype alone, such as a
            tensor of torch's device meta or a jax.ShapeDtypeStruct: it counts as contiguous, unless it has
            the strides of a tensor.
        device: "cpu"; a GPU by its product or its architecture, such as "h200" or "sm_90"; or "cuda:0", a GPU
            of this machine. Default: the device of the arrays.
        **kwargs: the keywords of the call.

    Returns:
        The explanation.

    Raises:
        ValueError, TypeError, RuntimeError: as the call would, but values of arrays are only looked at where
            no device is named; and for an unknown operator or device.
    """
    if operator not in _OPERATORS:
        raise ValueError(f"explain: operator must be one of {', '.join(_OPERATORS)}; got {operator!r}")
    if not isinstance(device, (str, type(None))):
        raise TypeError(f"explain: device must be a str or None; got {type(device).__name__}")
    signature = inspect.signature(_OPERATORS[operator])
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        given = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
        refuse_call(inspect.unwrap(_OPERATORS[operator]), given)
        raise TypeError(f"{operator}: {error}") from None
    arguments.pop("stream", None)
    return Explanation(**_core.explain(operator, dict(arguments), device or ""))
