"""Scores without elements: a tensor of the shape of a product of queries and keys, which knows what code has done to it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep.building.attention.form_functions import OF_FORM
from samestep.building.attention.score_form import DropLater, ScoreForm, WrittenCall
from samestep.building.torch_seams import DisableTorchFunctionSubclass, disable_current_modes
from samestep.trees import tree_leaves, tree_map_only


class FindsForms(Protocol):
    """The interface by which scores report the functions that code calls with them; `written_out.Formulas` implements it."""

    num_samples: int

    def attend(self, written: WrittenCall) -> Tensor | None:
        """Return the output of an attention [B, A, L, E]; None where it is none after all."""
        ...

    def noted(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function as a form; None where it has none."""
        ...

    def reject(self, what: str) -> None:
        """Receive that the elements of scores are needed, by which function."""
        ...

    def number_in(self, tensor: Tensor, hides: float) -> float | None:
        """Return the value of a tensor of one element; None where it is not known. At the place that it is for, `hides` hides a key."""
        ...

    def off(self) -> AbstractContextManager[None]:
        """Intercept nothing inside."""
        ...


def has_scores(args: Sequence[Any]) -> bool:
    """Return whether an argument is scores without elements."""
    return any(isinstance(one, Scores) for one in args)


class Scores(Tensor):
    """Scores, weights or sums over keys of an attention without elements: shape, dtype and device alone."""

    form: ScoreForm
    formulas: FindsForms
    made: tuple[Any, tuple[Any, ...], dict[str, Any]]
    """The call that the code made."""
    rows: str
    """max, sum or lse, of what has a number for each query; empty for scores."""
    elements: Tensor | None

    @classmethod
    def of(cls, formulas: FindsForms, form: ScoreForm, dtype: torch.dtype, made: Any, rows: str = "") -> Scores:
        """Return scores of a form, computed by a call."""
        shape = list(form.shape)
        if rows:
            shape[form.order.index(len(shape) - 1)] = 1
        with DisableTorchFunctionSubclass(), disable_current_modes(), torch.no_grad():
            found = torch.empty((), dtype=dtype, device=form.query.device).expand(shape).as_subclass(cls)
        found.form, found.formulas, found.made, found.rows, found.elements = form, formulas, made, rows, None
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD:
            return args[0].requires_gradient
        if func in OF_FORM:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name.startswith("new_") or name.endswith("_like"):
            given = [one for one in args[1:] if isinstance(one, Scores)]
            if not given:
                with DisableTorchFunctionSubclass():
                    return func(
                        torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs
                    )
        scores = next(one for one in tree_leaves((args, kwargs)) if isinstance(one, Scores))
        found = scores.formulas.noted(name, func, args, kwargs)
        if found is None:
            scores.formulas.reject(name)
            return func(*_as_written(args), **_as_written(kwargs))
        if isinstance(found, Scores) and _writes(name) and isinstance(args[0], Scores):
            return args[0].become(found, func, args, kwargs)
        return found

    def become(self, found: Scores, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Scores:
        """Take the form of other scores, as what was written in place does."""
        with DisableTorchFunctionSubclass():
            before = Scores.of(self.formulas, self.form, self.dtype, self.made, self.rows)
        self.form, self.made = found.form, (_out_of_place(func), (before, *args[1:]), kwargs)
        return self

    def dropped(self, p: float, draw: DropLater | None, made: Any) -> Scores | None:
        """Return the weights of which a dropout drops some; None where they are none yet."""
        form = self.form
        if self.rows or form.stage != "weights" or form.dropout_p or form.has_sink_column or not form.is_normal:
            return None
        found = replace(form, dropout_p=p, draw=draw, drawn_shape=form.shape[:-2])
        return Scores.of(self.formulas, found, self.dtype, made)

    @property
    def requires_gradient(self) -> bool:
        """Whether the elements would take a gradient."""
        masks = [one.tensor for one in self.form.masks]
        given = [self.form.query, self.form.key, *masks, *([] if self.form.sinks is None else [self.form.sinks])]
        return torch.is_grad_enabled() and any(one.requires_grad for one in given)

    def dropped_by(self, p: float, draw: DropLater) -> Scores:
        """Return the weights of which a mask drops some, where a rank has its part of an attention that a trace has found."""
        found = self.dropped(p, draw, (self.formulas.reject, ("dropout",), {}))
        if found is None:
            self.formulas.reject("dropout")
        assert found is not None, "what is no part of the formula is refused"
        return found

    def as_written(self) -> Tensor:
        """Return the elements, computed as the code says."""
        if self.elements is None:
            func, args, kwargs = self.made
            self.elements = func(*_as_written(args), **_as_written(kwargs))
        return self.elements


def _as_written(given: Any) -> Any:
    leaf = next((one for one in tree_leaves(given) if isinstance(one, Scores)), None)
    if leaf is None:
        return given
    with leaf.formulas.off():
        return tree_map_only(Scores, Scores.as_written, given)


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _out_of_place(func: Any) -> Any:
    @functools.wraps(func)
    def call(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return func(first.clone(), *args, **kwargs)

    return call


def _writes(name: str) -> bool:
    return name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
