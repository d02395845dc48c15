"""How the functions of the operators get their parameters.

``_core.operator_arguments()`` describes each operator: the names, the order and the defaults of its arguments
(src/operators/schema.h). Python adds the types, which overloads share in a TypedDict, and the docstrings. The
functions that users see have each option as a keyword of its own, with its default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from octavo import _core

if TYPE_CHECKING:
    from octavo._types import Argument

_Function = TypeVar("_Function", bound=Callable[..., Any])

ARGUMENTS: dict[str, list[Argument]] = {
    operator: [argument for argument in arguments if argument["access"] != "result"]
    for operator, arguments in _core.operator_arguments().items()
}
"""Of each operator, those that are not results, in the order of its function in ``_core``."""


def native(options: type | None = None) -> Callable[[_Function], _Function]:
    """Turn the declaration of an operator into the function that calls its namesake in ``_core``."""

    def implement(declared: _Function) -> _Function:
        name = declared.__name__
        described = [argument["name"] for argument in ARGUMENTS[name]]

        def write_arguments(parameters: list[str]) -> str:
            return ", ".join([*described, *(x for x in parameters if x not in described)])

        return with_keywords(declared, options, getattr(_core, name), write_arguments)

    return implement


def with_keywords(
    declared: _Function,
    options: type | None,
    target: Callable[..., Any],
    write_arguments: Callable[[list[str]], str],
) -> _Function:
    """Make the function of a declaration whose ``**options`` stands for the keys of that TypedDict.

    The function calls the target, with the arguments that ``write_arguments`` makes of the parameters' names.
    It is compiled, as the methods of a dataclass are: to take ``**options`` and pass them on would cost
    0.3 us in a call with four of them.
    """
    name, code = declared.__name__, declared.__code__
    positional = code.co_varnames[: code.co_argcount]
    defaults, annotations = {}, {x: declared.__annotations__[x] for x in positional}
    if options is not None:
        for argument in ARGUMENTS[name][len(positional) :]:
            defaults[argument["name"]] = argument["default"]
            annotations[argument["name"]] = options.__annotations__[argument["name"]].__forward_arg__
    for x, default in (declared.__kwdefaults__ or {}).items():
        defaults[x], annotations[x] = default, declared.__annotations__[x]
    keywords = ", ".join(f"{x}={default!r}" for x, default in defaults.items())
    # On the lines of the declaration, for tracebacks and inspect.getsource.
    source = "\n" * (code.co_firstlineno - 2) + (
        f"def make(target):\n"
        f" def {name}({', '.join(positional)}, *, {keywords}):"
        f" return target({write_arguments(list(annotations))})\n"
        f" return {name}"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, code.co_filename, "exec"), declared.__globals__, namespace)
    function = namespace["make"](target)
    function.__module__, function.__qualname__ = declared.__module__, declared.__qualname__
    function.__doc__ = declared.__doc__
    function.__annotations__ = {**annotations, "return": declared.__annotations__["return"]}
    return cast("_Function", function)
