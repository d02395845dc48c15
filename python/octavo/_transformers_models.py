"""Which models of transformers have attention that Octavo can replace: the others refuse it by name."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any, NoReturn

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
        set_implementation(self, requested, *args, **kwargs)

    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = get_correct_or_refuse
    models.set_attn_implementation = set_or_refuse


def _refuse_without_interface(kind: type) -> NoReturn:
    refuse(
        f"{kind.__name__} does not call transformers' AttentionInterface, so that its attention cannot be "
        "replaced"
    )


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
