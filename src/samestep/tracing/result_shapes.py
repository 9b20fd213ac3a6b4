"""Operations on meta tensors, whose results' shapes are found once: a model repeats its blocks, and is run several times.

Torch finds out the shapes of most results in Python, which is most of what an operation on the meta device costs. They
follow from shapes, strides and dtypes of what is given, and from its other arguments. They are remembered where the
results are tensors that share no storage with anything; views and operations that write are run as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LIMIT = 2**16
_META = torch.device("meta")
_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
_forms: dict[Hashable, tuple[_Form, ...] | None] = {}
"""Shape, strides and dtype of each result of a call; None if the call must be run."""


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on meta tensors, or return what it would."""
    # Modes further out must see the operation itself.
    is_last = not torch._C._len_torch_dispatch_stack() and torch._C._functorch.maybe_current_level() is None
    call = _described_call(func, args, kwargs) if is_last else None
    if call is None:
        return func(*args, **kwargs)
    if forms := _forms.get(call):
        made = tuple(torch.empty_strided(shape, strides, dtype=dtype, device=_META) for shape, strides, dtype in forms)
        return made[0] if len(func._schema.returns) == 1 else made
    outcome = func(*args, **kwargs)
    if call not in _forms:
        if len(_forms) == _LIMIT:
            _forms.clear()
        given = [part for value in (*args, *kwargs.values()) for part in _flat(value)]
        results = outcome if isinstance(outcome, tuple) else (outcome,)
        _forms[call] = None
        if _are_apart(results, given):
            _forms[call] = tuple((one.shape, one.stride(), one.dtype) for one in results)
    return outcome


def _described_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return all that the shapes of the results follow from; None if there may be more."""
    schema = func._schema
    if schema.is_mutable or any(one.alias_info or str(one.type) != "Tensor" for one in schema.returns):
        return None
    if torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags:
        return None
    values = (*args, *kwargs.values())
    described = tuple(_described(value) for value in values)
    if None in described or not any(isinstance(part, Tensor) for value in values for part in _flat(value)):
        return None
    return func, len(args), tuple(kwargs), torch.get_default_dtype(), described


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        is_plain = type(value) in (Tensor, nn.Parameter) and value.is_meta and value.layout is torch.strided
        if not is_plain or not value.dim() or value.dtype.is_complex or value.is_neg():
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        parts = tuple(_described(item) for item in value)
        return None if None in parts else parts
    return (type(value), value) if isinstance(value, _VALUES) else None


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _are_apart(results: Sequence[Any], given: Sequence[Any]) -> bool:
    """Return whether each result is a plain tensor that fills a storage of its own."""
    if not all(type(one) is Tensor and one.is_meta and one.layout is torch.strided for one in results):
        return False
    storages = [one.untyped_storage() for one in (*results, *(one for one in given if isinstance(one, Tensor)))]
    addresses = [storage._cdata for storage in storages]
    return all(
        addresses.count(address) == 1 and storage.nbytes() == _extent(one) * one.element_size()
        for one, address, storage in zip(results, addresses, storages, strict=False)
    )


def _extent(tensor: Tensor) -> int:
    """Return the elements from the first of a storage to the last of a tensor."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps))
