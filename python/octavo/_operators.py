"""How the functions of the operators get their parameters.

``_core.operator_arguments()`` describes each operator: the names, the order and the defaults of its arguments
(src/operators/schema.h). Python adds the types, which overloads share in a TypedDict, and the docstrings. The
functions that users see have each option as a keyword of its own, with its default, and answer calls that do
not fit (``_misuse``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from octavo import _core
from octavo._misuse import MISSING, refuse_call

if TYPE_CHECKING:
    from octavo._types import Argument

_Function = TypeVar("_Function", bound=Callable[..., Any])

ARGUMENTS: dict[str, list[Argument]] = {
    operator: [argument for argument in arguments if argument["access"] != "result"]
    for operator, arguments in _core.operator_arguments().items()
}
"""Each operator's arguments but for results, in the order of its function in ``_core``."""


def native(options: type | None = None) -> Callable[[_Function], _Function]:
    """Turn the declaration of an operator into the function that calls its namesake in ``_core``."""

    def implement(declared: _Function) -> _Function:
        name = declared.__name__
        described = ARGUMENTS.get(name, ())  # or else as declared
        # An array in place of a number comes as that number, for which there is one parameter.
        values = {x["name"]: "None" if "in_place_of" in x else x["name"] for x in described}

        def write_arguments(parameters: list[str]) -> str:
            return ", ".join([*values.values(), *(x for x in parameters if x not in values)])

        function = with_keywords(declared, options, getattr(_core, name), write_arguments)
        if name in ARGUMENTS:
            # What torch.compiler.disable() sets, without importing torch: otherwise Dynamo's error speaks of
            # nanobind's class alone.
            function.__dict__["_torchdynamo_disable"] = True
            function.__dict__["_torchdynamo_disable_msg"] = (
                f"torch.compile cannot trace octavo.{name}; octavo.torch.{name} takes the same arguments"
            )
        return function

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
    0.3 us in a call with four of them. It does take ``*excess`` and ``**unknown``, at 0.02 us each, so that
    refuse_call() can say what was meant. inspect.signature() shows the function that it "wraps", which has
    the parameters alone.
    """
    name, code = declared.__name__, declared.__code__
    positional = code.co_varnames[: code.co_argcount]
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    optional = declared.__defaults__ or ()
    defaults = dict(zip(positional[len(positional) - len(optional) :], optional, strict=True))
    annotations = {x: declared.__annotations__[x] for x in positional}
    if options is not None:
        for argument in ARGUMENTS[name][len(positional) :]:
            if "in_place_of" in argument:
                continue
            defaults[argument["name"]] = argument["default"]
            annotations[argument["name"]] = options.__annotations__[argument["name"]].__forward_arg__
    own = declared.__defaults__ or ()
    defaults |= dict(zip(positional[len(positional) - len(own) :], own, strict=True))
    defaults |= declared.__kwdefaults__ or {}
    annotations |= {x: declared.__annotations__[x] for x in keywords}
    required = [x for x in annotations if x not in defaults]

    def write_parameters(default: str, between: str) -> str:
        """With this default for those that are required, and this between positional ones and keywords."""
        written = [f"{x}={defaults[x]!r}" if x in defaults else x + default for x in annotations]
        if between != "*" or len(written) > len(positional):
            written.insert(len(positional), between)
        return ", ".join(written)

    # The call is on the first line of the declaration, for tracebacks.
    source = "\n" * (code.co_firstlineno - 6) + (
        f"def make(target, missing, refuse):\n"
        f" def shown({write_parameters('', '*')}): pass\n"
        f" def {name}({write_parameters('=missing', '*excess')}, **unknown):\n"
        f"  try:\n"
        f"   if unknown or excess: raise TypeError\n"
        f"   return target({write_arguments(list(annotations))})\n"
        f"  except TypeError:\n"
        f"   refuse(shown, {{{', '.join(f'{x!r}: {x}' for x in required)}, **unknown}}, excess)\n"
        f"   raise\n"
        f" return {name}, shown"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, code.co_filename, "exec"), declared.__globals__, namespace)
    function, shown = namespace["make"](target, MISSING, refuse_call)
    function.__wrapped__ = shown
    shown.__code__ = shown.__code__.replace(co_firstlineno=code.co_firstlineno)  # for inspect.getsource
    for each in (function, shown):
        each.__module__, each.__doc__ = declared.__module__, declared.__doc__
        each.__name__, each.__qualname__ = name, declared.__qualname__
        each.__annotations__ = {**annotations, "return": declared.__annotations__["return"]}
    return cast("_Function", function)
