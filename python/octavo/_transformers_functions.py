"""Functions of indices, which transformers describes masks by: what they are, without calling them."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from torch import Tensor


def are_same(a: Any, b: Any) -> bool:
    """Whether two functions have the same code, and are closed over equal values, or the same tensors."""
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(are_same, a, b))
    if not (isinstance(a, FunctionType) and isinstance(b, FunctionType)):
        return type(a) is type(b) and isinstance(a, int) and a == b
    cells, others = ([cell.cell_contents for cell in x.__closure__ or ()] for x in (a, b))
    return a.__code__ is b.__code__ and are_same(tuple(cells), tuple(others))


def closure_of(function: Any) -> dict[str, Any]:
    """What a function is closed over, by name."""
    return dict(inspect.getclosurevars(function).nonlocals) if isinstance(function, FunctionType) else {}


def find_in_closures(function: Any, name: str) -> Any:
    """What some function, or one that it is closed over, calls by this name."""
    variables = closure_of(function)
    if name in variables:
        return variables[name]
    for value in variables.values():
        for inner in value if isinstance(value, tuple) else (value,):
            found = find_in_closures(inner, name)
            if found is not None:
                return found
    return None
