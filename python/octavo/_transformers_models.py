"""Which models of transformers have attention that Octavo can replace: the others refuse it by name."""

from __future__ import annotations

import functools
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

    def refuse_model(model: PreTrainedModel) -> NoReturn:
        refuse(
            f"{type(model).__name__} does not call transformers' AttentionInterface, so that its attention "
            "cannot be replaced"
        )

    @functools.wraps(get_correct)  # transformers calls it while a model, or a part of one, is made
    def get_correct_or_refuse(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        if requested in names and not (
            self._can_set_attn_implementation()
            or hasattr(sys.modules.get(type(self).__module__), "ALL_ATTENTION_FUNCTIONS")
        ):
            refuse_model(self)
        return get_correct(self, requested, *args, **kwargs)

    @functools.wraps(set_implementation)
    def set_or_refuse(self: PreTrainedModel, requested: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(requested, str) and requested in names:
            for part in self.modules():
                if isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation():
                    refuse_model(part)
        set_implementation(self, requested, *args, **kwargs)

    models: Any = PreTrainedModel
    models.get_correct_attn_implementation = get_correct_or_refuse
    models.set_attn_implementation = set_or_refuse
