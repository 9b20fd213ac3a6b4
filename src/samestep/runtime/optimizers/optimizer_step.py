"""The optimizer's part of a step: the pieces a rank updates, the optimizer over them, loss scaling and clipping.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision. Optimizers that treat every element by itself (SGD, Adam, ...) give the one-device update on any
pieces. `update_rule.py` reads from an optimizer's operations whether it does.

```
gradients * factor ─► for each chunk: lend them to the values, optimizer.step(), average ─► publish
  offload.py                update_chunks.py                       moving_averages.py       live_weights.py
```
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.job_tables import NumericsTable
from samestep.runtime import host_copies
from samestep.runtime.contexts import AtEnd
from samestep.runtime.optimizers.closures import check_scale
from samestep.runtime.optimizers.group_rates import GroupRates
from samestep.runtime.optimizers.loss_scale import LossScale
from samestep.runtime.optimizers.offload import Offload
from samestep.runtime.optimizers.one_process import alone
from samestep.runtime.optimizers.optimizer_source import build_over, check_step, given_instances
from samestep.runtime.optimizers.optimizers_by_name import ALL, UpdatedPart, step_members
from samestep.runtime.optimizers.packed_states import StatePacking
from samestep.runtime.optimizers.update_chunks import Chunks, chunks_of, chunks_with, holding_only
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.optimizers.used_weights import Unused
from samestep.runtime.optimizers.whole_optimizer import WholeOptimizer
from samestep.runtime.weights.gradient_codes import GradientCodes
from samestep.runtime.weights.live_weights import UpdatedInPlace, live_weights
from samestep.runtime.weights.moving_averages import WeightAverages
from samestep.runtime.weights.pieces import Piece, gradients_of
from samestep.state.fingerprints import optimizer_digests
from samestep.state.step_code import optimizers_with_states

_NO_CODES = GradientCodes()
_NOTHING = nullcontext()


@dataclass(slots=True)
class Updater:
    """The optimizer over this rank's pieces."""

    pieces: list[Piece]
    optimizer: Optimizer | None
    """None on a rank without pieces, as the last ones of more ranks than rows."""
    loss_scale: LossScale
    rates: GroupRates
    """The learning rates of its groups."""
    live: UpdatedInPlace
    """The weights that the forward reads."""
    chunks: Chunks
    """The pieces that are updated together, and how they are held between two updates."""
    offload: Offload
    """The way of gradients to values that are on the host."""
    packing: StatePacking | None
    """How states are held between two updates; None where they are as the optimizer computes with them."""
    averages: WeightAverages | None
    """Moving averages of the pieces; None where the job keeps none."""
    whole: WholeOptimizer
    """What is known of it over the whole weights."""
    with_states: list[Any]
    """The optimizer, and those in it that keep states of their own."""
    first_digests: dict[str, int] = field(default_factory=dict)
    """Digests of the optimizer's options and attributes before its first step."""
    factor: float = 1.0
    """What the gradients of the last update were multiplied by: the division by the count, and the clipping."""
    step_index: int = 0
    """The step of the next update, counted from 0."""
    unused: Unused = frozenset()
    """Names of the weights that the step gave no gradient: the next update leaves them, and their states, as they are."""

    @classmethod
    def over(
        cls,
        pieces: list[Piece],
        whole: WholeOptimizer,
        numerics: NumericsTable,
        *,
        codes: GradientCodes = _NO_CODES,
        splits_masters: bool = False,
        packing: StatePacking | None = None,
        averages: WeightAverages | None = None,
        follows_schedule: bool = False,
    ) -> Updater:
        """Build the optimizer over `pieces` of the weights of the `whole` one; `splits_masters` holds masters in two halves.

        Raises:
            ModelError: the optimizer's `step` needs a closure, it holds none of the weights, or it `follows_schedule` and has no
                learning rate.
        """
        for piece in pieces:
            piece.value.requires_grad_(True)
            piece.value.__dict__.update(whole.weights.attributes.get(piece.name, {}))
        optimizer = build_over(whole.source, [(piece.name, piece.value) for piece in pieces], whole.weights)
        loss_scale = LossScale.of(numerics, codes)
        rates = GroupRates(optimizer, given_instances(whole.source, optimizer))
        with_states: list[Any] = []
        if optimizer is not None:
            check_step(optimizer)
            rates.check(follows_schedule=follows_schedule)
            with_states = [optimizer] if is_torchs_own(optimizer) else optimizers_with_states(optimizer)
        check_scale(loss_scale, whole.evaluating, optimizer)
        return cls(
            pieces=pieces,
            optimizer=optimizer,
            loss_scale=loss_scale,
            rates=rates,
            chunks=chunks_of(pieces, optimizer, packing, splits_masters=splits_masters),
            live=live_weights(pieces),  # after the chunks: to split masters writes their targets
            offload=Offload([piece.value for piece in pieces]),
            packing=packing,
            averages=averages,
            whole=whole,
            with_states=with_states,
            first_digests=optimizer_digests(optimizer) if optimizer else {},
        )

    def set_lr(self, factor: float | Mapping[int, float]) -> None:
        """Set the learning rates as `GroupRates.set` does."""
        self.rates.set(factor)

    def pieces_of(self, part: UpdatedPart) -> list[Piece]:
        """Return the pieces of the members of a part."""
        if part.members is None:
            return self.pieces
        return [piece for piece in self.pieces if self.whole.member_of_weight[piece.name] in part.members]

    def step(self, factor: float, *, were_sent: bool = False, part: UpdatedPart = ALL) -> None:
        """Multiply the gradients by `factor`, unless they `were_sent` multiplied, and update the pieces of a part."""
        self.factor = factor
        sent, pieces = self.offload.take(), self.pieces_of(part)
        if self.optimizer is None or not pieces:
            return
        with torch.set_grad_enabled(False):
            gradients = gradients_of(pieces) if sent is None else sent
            if factor != 1.0 and not were_sent:
                torch._foreach_mul_(gradients, _as_tensor(factor, gradients[0]))
            self.update(gradients, part=part)

    def update(self, gradients: list[Tensor], held_back: Tensor | None = None, part: UpdatedPart = ALL) -> None:
        """Lend the gradients to the pieces, let the optimizer update them, chunk by chunk, and average them.

        The device changes nothing where `held_back` is 1.
        """
        assert self.optimizer is not None
        pieces = self.pieces_of(part)
        there = host_copies.beside(gradients, [piece.value for piece in pieces])
        for chunk, mine in chunks_with(pieces, there, self.chunks, self.optimizer, self.pieces, self.unused):
            is_all = len(chunk) == len(self.pieces)
            with self.widened(chunk), holding_only(self.optimizer, None if is_all else chunk):
                with self.lent(chunk, mine), alone(type(self.optimizer).__name__):
                    step_members(self.optimizer, part, is_first=not self.step_index)
                if self.averages is not None:
                    self.averages.update(chunk, held_back)
        for given in self.rates.given.values():
            given._opt_called = True  # type: ignore[attr-defined]  # what a scheduler over the instance asks for

    def widened(self, pieces: Sequence[Piece]) -> AbstractContextManager[None]:
        """Return the context in which pieces and their states are as the optimizer computes with them."""
        assert self.optimizer is not None
        return self.chunks.widened(self.optimizer, pieces, self.unused, self.step_index)

    def lent(self, chunk: list[Piece], given: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Let the values of some pieces have the gradients that are given for them, unless the step gave them none, until the end of
        the context; a window of a buffer, which is the gradient in every step, they keep.
        """
        lent: list[Tensor] = []
        if not self.unused and all(map(operator.is_, [piece.value.grad for piece in chunk], given)):
            return _NOTHING  # they are where autograd has put them, or the last update has
        for piece, gradient in zip(chunk, given, strict=True):
            value = piece.value
            before = value.grad
            if before is None and gradient is not piece.window:
                lent.append(value)
            if piece.name in self.unused:
                value.grad = None
            elif before is not gradient:
                value.grad = gradient if gradient.shape == value.shape else gradient.view_as(value)
        return AtEnd(functools.partial(_drop_gradients, lent))  # which would stay allocated in the next step

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """Return the optimizer's state of a piece, with its tensors as the optimizer computes with them."""
        state = self.optimizer.state.get(piece.value, {}) if self.optimizer is not None else {}
        return dict(state) if self.packing is None else self.packing.wide(piece, state)

    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads."""
        self.live.publish()


def _as_tensor(factor: float, gradient: Tensor) -> Any:
    """Return a factor on gradients: on a CPU as a tensor, since a number becomes one for each gradient; a GPU takes the number."""
    return factor if gradient.is_cuda else torch.tensor(factor, dtype=gradient.dtype, device=gradient.device)


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor on the gradients that limits their global norm to `limit`, by torch's rule."""
    if limit is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))


def _drop_gradients(values: list[Tensor]) -> None:
    for value in values:
        value.grad = None
