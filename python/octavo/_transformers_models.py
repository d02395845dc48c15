"""Which models of transformers have attention that Octavo can replace: the others refuse it by name."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from octavo._transformers_refusals import refuse


def let_models_refuse(names: set[str]) -> None:
    """Have the models without AttentionInterface refuse the names under which Octavo is registered.

    transformers takes a registered name for any model. Those that do not know it fail while they are built
    or run, each in its own way; ``set_attn_implementation`` logs a line and leaves them as they are.
    """
    get_correct = PreTrainedModel.get_correct_attn_implementation
    set_implementation = PreTrainedModel.set_attn_implementation

    @functools.wraps(get_correct)  # transformers calls it while a model, or a part of one, is made
    def get_correct_or_refuse(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        if requested in names:
            kind = _class_with_source(type(self))
            module = sys.modules.get(kind.__module__)
            if not (kind._can_set_attn_implementation() or hasattr(module, "ALL_ATTENTION_FUNCTIONS")):
                _refuse_without_interface(type(self))
        return get_correct(self, requested, *args, **kwargs)

    @functools.wraps(set_implementation)
    def set_or_refuse(self: PreTrainedModel, requested: Any, *args: Any, **kwargs: Any) -> None:
        wanted = _implementations(self.config, requested)
        for part in self.modules():
            if not isinstance(part, PreTrainedModel):
                continue
            if wanted.get(id(part.config), wanted[id(self.config)]) not in names:
                continue
            # transformers asks the part's own class, which then has the answer of the one with a source.
            kind = _class_with_source(type(part))
            if not (kind._can_set_attn_implementation() and part._can_set_attn_implementation()):
                _refuse_without_interface(type(part))
            if any(map(_is_of_a_table, {type(module) for module in _own_modules(part)})):
                _refuse_table(type(part))
        set_implementation(self, requested, *args, **kwargs)

    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = get_correct_or_refuse
    models.set_attn_implementation = set_or_refuse
    for name in ("_from_config", "from_pretrained"):
        setattr(models, name, _refusing_tables(getattr(models, name).__func__, names))


def _refuse_without_interface(kind: type) -> NoReturn:
    refuse(
        f"{kind.__name__} does not call transformers' AttentionInterface, so that its attention cannot be "
        "replaced"
    )


def _refuse_table(kind: type) -> NoReturn:
    refuse(f"{kind.__name__} chooses a class of its attention by name, so that it cannot be replaced")


def _class_with_source(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class whose source transformers can look through: for one in a notebook, what it derives from."""
    for base in kind.__mro__:
        if issubclass(base, PreTrainedModel) and base is not PreTrainedModel:
            try:
                inspect.getsource(sys.modules[base.__module__])
            except (KeyError, OSError, TypeError):
                continue
            return base
    return kind


def _implementations(config: Any, requested: Any) -> dict[int, Any]:
    """What a request, which may be a dict by the names of parts, says of each config, by its id."""
    own = requested.get("", config._attn_implementation) if isinstance(requested, dict) else requested
    found = {id(config): own}
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            of_part = requested.get(name, part._attn_implementation) if isinstance(requested, dict) else own
            found |= _implementations(part, of_part)
    return found


def _own_modules(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those of a model without those of models in it, which have configs of their own."""
    for child in model.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from _own_modules(child)


def _is_of_a_table(kind: type) -> bool:
    """Whether a module's class is in a table from which its model chose by name (SAM, GIT)."""
    variables = getattr(sys.modules.get(kind.__module__), "__dict__", {})
    tables = (table for name, table in variables.items() if name.endswith("ATTENTION_CLASSES"))
    return any(kind in table.values() for table in tables if isinstance(table, dict))


def _refusing_tables(make: Any, names: set[str]) -> Any:
    """A class method that makes models, which are refused where they look for Octavo's name in a table."""

    @functools.wraps(make)
    def make_or_refuse(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        try:
            return make(cls, *args, **kwargs)
        except KeyError as error:
            if error.args and error.args[0] in names:
                _refuse_table(cls)
            raise

    return classmethod(make_or_refuse)
