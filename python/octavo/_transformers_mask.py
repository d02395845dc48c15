"""What the layers of a model of transformers get as their attention_mask."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo._transformers_packing import Packing
from octavo._transformers_refusals import refuse

# What reads a tensor's elements, and makes no other one of them.
_READING = {"__array__", "__bool__", "__contains__", "__dlpack__", "__float__", "__int__"}
_READING |= {"allclose", "equal", "is_nonzero", "item", "numpy", "tolist"}
# Python looks for operators in the class, and does not ask __getattr__.
_OPERATORS = ["getitem", "len", "array", "bool", "float", "int", "abs", "neg", "pos", "invert"]
_OPERATORS += ["lt", "le", "gt", "ge"]
_OPERATORS += [side + name for name in ("add", "sub", "mul", "truediv", "pow") for side in ("", "r")]
_OPERATORS += [side + name for name in ("and", "or", "xor", "matmul") for side in ("", "r")]


class MaskError(ValueError, AttributeError):
    """What says that a model computes with its mask.

    It is an AttributeError, too, so that hasattr() says no, and getattr() returns its default.
    """


def refuse_to_be_read() -> NoReturn:
    refuse("the model computes with its mask, of which Octavo makes no tensor", MaskError)


@dataclass(frozen=True, eq=False)
class Mask:
    """What a model's layers get as their attention_mask, made once a forward pass.

    A model that reads its mask itself, such as one that selects keys by it, finds no tensor here: it is
    refused whatever of a tensor it asks for.
    """

    causal: bool
    window_left: int = -1
    window_right: int = -1
    queries: Packing | None = None
    keys: Packing | None = None
    num_keys: int | None = None  # in front, of a static cache that holds slots without tokens behind them
    seq_lens: Tensor | None = None  # int32 [batch], likewise, where they are known on the device alone
    first_keys: Tensor | None = None  # int64 [batch]: slots before them hold padding
    attention_chunk: int = 0
    first_key: int = 0  # of those that some query sees: a chunk begins there
    ranges: Tensor | None = (
        None  # int32 [batch, n, 2]: keys that see each other both ways, such as an image's
    )
    ranges_keep_window_left: bool = False
    hidden: Tensor | None = None  # bool [batch, keys], where padding lies inside sequences
    kv_length: int | None = None  # keys that it was made for; None: any number

    _elsewhere: dict[torch.device, Mask] = field(default_factory=dict, compare=False, repr=False)

    def on(self, device: torch.device) -> Mask:
        """The same for a layer on this device, where a model lies on several. They share what is moved."""
        array = self.seq_lens if self.keys is None else self.keys.cu_seqlens
        for other in (self.ranges, self.hidden):
            array = other if array is None else array
        if array is None or array.device == device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = replace(
                self,
                queries=None if self.queries is None else self.queries.on(device),
                keys=None if self.keys is None else self.keys.on(device),
                seq_lens=None if self.seq_lens is None else self.seq_lens.to(device),
                first_keys=None if self.first_keys is None else self.first_keys.to(device),
                ranges=None if self.ranges is None else self.ranges.to(device),
                hidden=None if self.hidden is None else self.hidden.to(device),
                _elsewhere={},
            )
        return self._elsewhere[device]

    def __getattr__(self, _: str) -> NoReturn:
        refuse_to_be_read()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float)):
            refuse_to_be_read()
        return self is other

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        """PyTorch calls it for its own functions and for operators that have a tensor on their left."""
        refuse_to_be_read()

    @property
    def range_arguments(self) -> dict[str, Any]:
        if self.ranges is None:
            return {}
        keep = self.ranges_keep_window_left
        return {"bidirectional_ranges": self.ranges, "ranges_keep_window_left": keep}


def _refuse_operator(*_: Any) -> NoReturn:
    refuse_to_be_read()


for _name in _OPERATORS:
    setattr(Mask, f"__{_name}__", _refuse_operator)


class Carrier(Tensor):
    """A tensor that has a mask, and nothing in it: attributes and sizes are all that may be asked for.

    accelerate sends the keywords of layers to their devices, and generate() makes masks contiguous: copies
    would be without the mask.
    """

    octavo_mask: Mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Any = super().__torch_function__
        result = call(func, types, args, kwargs)
        parts = result if isinstance(result, (list, tuple)) else (result,)
        makes_tensors = any(isinstance(part, Tensor) for part in parts) and func.__name__ != "__get__"
        if makes_tensors or func.__name__ in _READING:
            refuse_to_be_read()
        return result

    def to(self, *_: Any, **__: Any) -> Carrier:
        return self

    def contiguous(self, *_: Any, **__: Any) -> Carrier:
        return self
