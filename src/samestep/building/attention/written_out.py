"""Attention that code writes out: its products, its softmax and what stands between them, found as they are called.

    scores = q @ k.transpose(-2, -1) / math.sqrt(d)        Scores: queries and keys, and no elements
    scores = scores.masked_fill(mask == 0, -inf)           noted
    weights = dropout(softmax(scores, -1))                 noted
    output = weights @ v                                   one attention, which `Formulas.attend` computes

A product of which `Formulas.begins` says that it has a row for each token in both operands returns `Scores`, which have the shape of
the product. What the code does with them is noted where it is part of the formula of `attention_spec.py`, in any spelling: products as
`@`, bmm, baddbmm or einsum, factors, caps, masks that are added or filled in, sinks, casts, moved and merged dimensions, a softmax that is
written out. For anything else the elements are computed as the code says, and it is no attention.

Legend: N samples, heads and other dimensions that queries and keys share, L queries, S keys, D features of a head; the normal order of
dimensions is [N..., L, S].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samestep.building.attention.attention_call import AttentionCall
from samestep.building.attention.product_labels import ProductLabels, labels_of
from samestep.building.attention.score_form import ScoreForm, WrittenCall
from samestep.building.attention.score_operations import added, noted
from samestep.building.attention.scores import Scores
from samestep.building.torch_seams import DisableTorchFunctionSubclass


class Formulas(ABC):
    """The attentions that the code of blocks writes out, while it runs."""

    def __init__(self, num_samples: int = 1) -> None:
        self.path = ""
        """Path of the block that was entered last."""
        self.count = 0
        """Number of products of two activations since then."""
        self.num_samples = num_samples
        self._is_off = False

    @property
    def is_within(self) -> bool:
        """Whether a part runs that computes all tokens, whose products are not counted."""
        return False

    @abstractmethod
    def begins(self, first: Tensor, second: Tensor) -> tuple[int, int] | None:
        """Return the dimensions of tokens of two factors, counted from the end, where their product may begin an attention."""

    @abstractmethod
    def attend(self, written: WrittenCall) -> Tensor | None:
        """Return the output of an attention [B, A, L, E]; None where it is none after all."""

    @abstractmethod
    def number_in(self, tensor: Tensor, hides: float) -> float | None:
        """Return the value of a tensor of one element; None where it is not known. At the place that it is for, `hides` hides a key."""

    @abstractmethod
    def reject(self, what: str) -> None:
        """Receive that the elements of scores are needed, by which function."""

    def noted(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function of scores as a form; None where it has none."""
        if name.strip("_") in _PRODUCTS:
            return _product(func, args, kwargs)
        return noted(name, func, args, kwargs)

    def enter(self, path: str) -> None:
        """Begin to count the products of a block."""
        self.path, self.count = path, 0

    def intercept(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the scores that a product begins; `NotImplemented` for anything else."""
        labels = None if self._is_off or self.is_within else labels_of(func, args, kwargs)
        if labels is None:
            return NotImplemented
        self.count += 1
        first, second = labels.operands
        if isinstance(first, Scores) or isinstance(second, Scores):
            return NotImplemented
        with DisableTorchFunctionSubclass():
            tokens = self.begins(first, second)
            form = None if tokens is None else _begun(labels, tokens, self.count)
        if form is None:
            return NotImplemented
        dtype = torch.promote_types(first.dtype, second.dtype)
        found = Scores.of(self, form, dtype, (func, args, kwargs))
        return found if labels.added is None else added(found, labels.added, 1.0, labels.added_times)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Intercept nothing inside."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before


def _begun(labels: ProductLabels, tokens: tuple[int, int], number: int) -> ScoreForm | None:
    """Return the scores of a product whose factors have a row for each token along some dimensions."""
    (first, second), (of_first, of_second), made = labels.operands, labels.inputs, labels.output
    row, column = of_first[tokens[0]], of_second[tokens[1]]
    contracted = [label for label in of_first if label not in made]
    if row in of_second or column in of_first or {row, column} - {*made}:
        return None
    if len(contracted) != 1 or [label for label in of_second if label not in made] != contracted:
        return None
    shared = [label for label in made if label not in (row, column)]
    query = _arranged(first, of_first, [*shared, row, *contracted])
    key = _arranged(second, of_second, [*shared, column, *contracted])
    places = {label: dim for dim, label in enumerate([*shared, row, column])}
    return ScoreForm(
        number=number, query=query, key=key, order=tuple(places[label] for label in made), scale=labels.times
    )


def _arranged(tensor: Tensor, labels: Sequence[str], wanted: Sequence[str]) -> Tensor:
    """Return a tensor with its dimensions in another order; those that it has not got have one element."""
    moved = tensor.permute([labels.index(label) for label in wanted if label in labels])
    return moved[tuple(slice(None) if label in labels else None for label in wanted)]


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the output of an attention, of its weights and values."""
    labels = labels_of(func, args, kwargs)
    if labels is None or labels.added is not None or labels.times != 1.0:
        return None
    is_first = isinstance(labels.operands[0], Scores)
    weights, value = labels.operands if is_first else labels.operands[::-1]
    if not isinstance(weights, Scores) or isinstance(value, Scores) or weights.rows:
        return None
    of_weights, of_value = labels.inputs if is_first else labels.inputs[::-1]
    form = weights.form
    if form.stage != "weights" or form.has_sink_column:
        return None
    normal = [of_weights[form.order.index(dim)] for dim in range(len(form.order))]
    *shared, row, column = normal
    features = [label for label in of_value if label not in of_weights]
    is_product = len(features) == 1 and column in of_value and row not in of_value
    if not is_product or sorted(labels.output) != sorted([*shared, row, *features]):
        return None
    arranged = _arranged(value, of_value, [*shared, column, *features])
    found = _attended(weights, arranged)
    if found is None:
        return None
    made = [*shared, row, *features]
    return found.permute([made.index(label) for label in labels.output])


def _attended(weights: Scores, value: Tensor) -> Tensor | None:
    """Return the output [N..., L, E] of an attention to values [N..., S, E]."""
    form, formulas = weights.form, weights.formulas
    shared = tuple(torch.broadcast_shapes(form.shared, value.shape[:-2]))
    total, num_samples = math.prod(shared), formulas.num_samples
    if value.shape[-2] != form.key.shape[-2] or not total or total % num_samples:
        return None
    heads = (num_samples, total // num_samples)

    def whole(tensor: Tensor) -> Tensor:
        return tensor.expand(*shared, *tensor.shape[-2:]).reshape(*heads, *tensor.shape[-2:])

    query, key, value = (whole(one) for one in (form.query, form.key, value))
    sinks = None
    if form.sinks is not None:
        sinks = form.sinks.expand(shared).reshape(heads)[0]
    masks = tuple(one._replace(tensor=_in_heads(one.tensor, shared, heads)) for one in form.masks)
    scale = form.scale * (form.cap if form.is_capped else 1.0)
    call = AttentionCall(
        query, key, value, None, form.dropout_p, scale=scale, softcap=form.cap if form.is_capped else None, sinks=sinks
    )
    output = formulas.attend(WrittenCall(form.number, call, masks, form.draw, form.drawn_shape))
    if output is None:
        return None
    output = output if form.after == 1.0 else output * form.after
    return output.reshape(*shared, *output.shape[-2:])


def _in_heads(mask: Tensor, shared: tuple[int, ...], heads: tuple[int, int]) -> Tensor:
    """Return a mask that is broadcast to [N..., L, S] as one that is broadcast to [B, A, L, S]."""
    if shared == heads:
        return mask
    if math.prod(mask.shape[:-2]) == 1:
        return mask.reshape(1, 1, *mask.shape[-2:])
    return mask.expand(*shared, *mask.shape[-2:]).reshape(*heads, *mask.shape[-2:])


_PRODUCTS = ("matmul", "bmm", "einsum", "baddbmm")
