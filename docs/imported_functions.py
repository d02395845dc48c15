"""For the reference pages: the operators as they are once they are imported.

mkdocstrings reads the sources, which say ``**options`` where ``octavo._operators`` makes a keyword of each,
with its default and its documentation. So Octavo must be installed, and JAX for ``octavo.jax``; the extra
``docs`` has it. Private functions, which no page shows, are left alone.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import griffe

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


class ImportedFunctions(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        kinds = {parameter.name: parameter.kind for parameter in func.parameters}
        has_options = kinds.get("options") is griffe.ParameterKind.var_keyword
        if not has_options or not func.docstring or func.name.startswith("_"):
            return
        if func.path.startswith("octavo._torch"):  # no page shows these modules, which need PyTorch
            return
        function = griffe.dynamic_import(func.path)
        signature = inspect.signature(function)

        def expression(annotation: str) -> griffe.Expr | str | None:
            return griffe.safe_get_annotation(ast.parse(annotation, mode="eval").body, parent=func.parent)

        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    annotation=expression(parameter.annotation),
                    kind=KINDS[parameter.kind],
                    default=None if parameter.default is parameter.empty else repr(parameter.default),
                )
                for parameter in signature.parameters.values()
            )
        )
        func.returns = expression(signature.return_annotation)
        func.docstring.value = inspect.getdoc(function)
