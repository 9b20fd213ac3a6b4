"""The optimizer's part of a step: the pieces a rank updates, the optimizer over them, loss scaling and clipping.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision. Optimizers that treat every element by itself (SGD, Adam, ...) give the one-device update on any
pieces. `update_rule.py` finds whether it does.

```
gradients * factor ─► for each chunk: lend them to the values, optimizer.step(), average ─► publish
  `Offload`                packed_states.py                       moving_averages.py       pieces.py
```
Under `offload` a GPU computes gradients, and the host holds masters and states and updates them:

```
gradient, on the device ─► pinned memory ─► optimizer.step() over values on the host ─► target, on the device
                 send          `host_copies.py`                                 `pieces.py`
```
A store makes such pieces (`host_copies.master_on_host`). Their gradients are sent before the host has decided on the step,
multiplied by what follows from its sums, so that the host waits for both at once.

The job's schedule sets the learning rates of the optimizer's groups, as a function of the step; whoever sets one from outside keeps it.
If a loop makes updates of its own, each optimizer counts these instead: a group then has the option `num_updates`, which a checkpoint
holds as it does any option that has changed.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import members_of
from samestep.errors import ModelError
from samestep.job_tables import NumericsTable
from samestep.runtime import host_copies
from samestep.runtime.contexts import AtEnd
from samestep.runtime.optimizers.loss_scale import LossScale
from samestep.runtime.optimizers.optimizer_source import build_over, check_step, take_instances
from samestep.runtime.optimizers.optimizers_by_name import ALL, UpdatedPart, for_loops, members_in, step_members
from samestep.runtime.optimizers.packed_states import StatePacking, UpdateChunks, chunks_of
from samestep.runtime.optimizers.skeletons import alone
from samestep.runtime.optimizers.update_rule import is_torchs_own
from samestep.runtime.optimizers.update_trial import fails_on_empty, without_empty_groups
from samestep.runtime.optimizers.used_weights import Unused
from samestep.runtime.optimizers.whole_optimizer import WholeOptimizer, check_scale
from samestep.runtime.weights.gradient_codes import GradientCodes
from samestep.runtime.weights.moving_averages import WeightAverages
from samestep.runtime.weights.pieces import LiveWeights, Piece, gradients_of, sparse_of_rows
from samestep.state.fingerprints import optimizer_digests
from samestep.state.step_code import StepCode, optimizers_with_states, rows_in_group

_NO_CODES = GradientCodes()
_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(slots=True)
class Updater:
    """The optimizer over this rank's pieces."""

    pieces: list[Piece]
    optimizer: Optimizer | None
    """None on a rank without pieces, as the last ones of more ranks than rows."""
    steps: list[tuple[Optimizer, Callable[..., Any]]]
    """Its members, each with its `step` as it was before a loop had it."""
    in_loop: Optimizer | None
    """The optimizer as the loop has it, on which its schedulers act: the instance that it gave, if it did."""
    loss_scale: LossScale
    rates: GroupRates
    """The learning rates of its groups."""
    live: LiveWeights
    """The weights that the forward reads."""
    chunks: UpdateChunks | None
    """The pieces that are updated together, and how they are held between two updates; None where all are, as the optimizer computes with
    them."""
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
    surroundings: AbstractContextManager[None]
    """The context of a step by code that is not torch's, which finds no other ranks."""
    fragile: list[Any]
    """The optimizers whose step is not given groups without weights, since their code fails on one."""
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
        whole_optimizer: WholeOptimizer,
        numerics: NumericsTable,
        *,
        codes: GradientCodes = _NO_CODES,
        splits_masters: bool = False,
        packing: StatePacking | None = None,
        averages: WeightAverages | None = None,
        follows_schedule: bool = False,
        takes_instances: bool = False,
    ) -> Updater:
        """Build the optimizer over `pieces` of the weights of `whole_optimizer`; `splits_masters` holds masters in two halves, and
        `takes_instances` lets instances that the user gave be what the loop sees of it.

        Raises:
            ModelError: the optimizer's `step` needs a closure, it holds none of the weights, or it `follows_schedule` and has no
                learning rate.
        """
        for piece in pieces:
            piece.value.requires_grad_(True)
            piece.value.__dict__.update(whole_optimizer.weights.attributes.get(piece.name, {}))
        optimizer = build_over(
            whole_optimizer.source, [(piece.name, piece.value) for piece in pieces], whole_optimizer.weights
        )
        loss_scale = LossScale.of(numerics, codes)
        rates = GroupRates(optimizer)
        with_states, fragile, steps = list[Any](), list[Any](), list[Any]()
        in_loop, surroundings = optimizer, _NOTHING
        if optimizer is not None:
            steps = [(member, member.step) for member in members_of(optimizer)]
            check_step(optimizer)
            rates.check(follows_schedule=follows_schedule)
            with_states = [optimizer]
            if not is_torchs_own(optimizer):
                with_states, surroundings = optimizers_with_states(optimizer), alone(type(optimizer).__name__)
                code = None if all(g["params"] for g in optimizer.param_groups) else StepCode(optimizer)
                fragile = code.optimizers if code is not None and fails_on_empty(code) else []
            in_loop = take_instances(whole_optimizer.source, optimizer) if takes_instances else for_loops(optimizer)
        check_scale(loss_scale, whole_optimizer.evaluating, optimizer)
        return cls(
            pieces=pieces,
            optimizer=optimizer,
            steps=steps,
            in_loop=in_loop,
            loss_scale=loss_scale,
            rates=rates,
            chunks=chunks_of(pieces, optimizer, packing, splits_masters=splits_masters),
            live=LiveWeights(pieces),  # after the chunks: to split masters writes their targets
            offload=Offload([piece.value for piece in pieces]),
            packing=packing,
            averages=averages,
            whole=whole_optimizer,
            with_states=with_states,
            surroundings=surroundings,
            fragile=fragile,
            first_digests=optimizer_digests(optimizer) if optimizer else {},
        )

    def pieces_of(self, part: UpdatedPart) -> list[Piece]:
        """Return the pieces of the members of a part."""
        if part.members is None:
            return self.pieces
        return [piece for piece in self.pieces if self.whole.member_of_weight[piece.name] in part.members]

    def step(self, factor: float, *, were_sent: bool = False, part: UpdatedPart = ALL) -> None:
        """Multiply the gradients by `factor`, unless they `were_sent` multiplied, and update the pieces of a part."""
        self.factor = factor
        pieces = self.pieces_of(part)
        sent, self.offload.sent = self.offload.sent, None
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
        chunks = self.chunks
        together = chunks.of(pieces, there, self.optimizer, self.unused) if chunks is not None else [(pieces, there)]
        self.rates.is_updating = True  # a closure runs a backward, and its guards, within an update
        try:
            for chunk, chunk_gradients in together:
                narrowed = _NOTHING if chunks is None else chunks.held(self.optimizer, chunk, self.unused)
                without = without_empty_groups(self.fragile) if self.fragile else _NOTHING
                with narrowed:
                    with self.lent(chunk, chunk_gradients), self.surroundings, without:
                        step_members(self.optimizer, self.steps, part, is_first=not self.step_index)
                    if self.averages is not None:
                        self.averages.update(chunk, held_back)
        finally:
            self.rates.is_updating = False

    @torch.no_grad()
    def call(self, part: UpdatedPart, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, bool]:
        """Let the members of a part run a method over their pieces, which have their gradients; return what the last one returns, and
        whether it has dropped a gradient.
        """
        pieces = self.pieces_of(part)
        if self.optimizer is None or not pieces:
            return None, False
        gradients = host_copies.beside(gradients_of(pieces), [piece.value for piece in pieces])
        result = None
        widened = _NOTHING if self.chunks is None else self.chunks.widened(self.optimizer, pieces, self.unused)
        with widened, self.lent(pieces, gradients):
            with self.surroundings:
                for member in members_in(self.optimizer, part):
                    result = getattr(member, method)(*args, **kwargs)
            dropped = any(piece.value.grad is None for piece in pieces if piece.name not in self.unused)
        return result, dropped

    def lent(self, chunk: list[Piece], tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Let the values of some pieces have the gradients that are given for them, unless the step gave them none, until the end of
        the context; a window of a buffer, which is the gradient in every step, they keep.
        """
        lent: list[Tensor] = []
        by_rows = self.whole.by_rows
        if not (self.unused or by_rows) and all(map(operator.is_, [piece.value.grad for piece in chunk], tensors)):
            return _NOTHING  # they are where autograd has put them, or the last update has
        for piece, gradient in zip(chunk, tensors, strict=True):
            value = piece.value
            grad = value.grad
            if grad is None and gradient is not piece.window:
                lent.append(value)
            if piece.name in self.unused:
                value.grad = None
            elif grad is not gradient:
                value.grad = gradient if gradient.shape == value.shape else gradient.view_as(value)
            if piece.name in by_rows and value.grad is not None:
                value.grad = sparse_of_rows(value.grad)
        return AtEnd(functools.partial(_drop_gradients, lent))  # which would stay allocated in the next step

    def forget_states(self) -> None:
        """Drop the states of all pieces, as before others are set."""
        if self.optimizer is not None:
            for piece in self.pieces:
                self.optimizer.state.pop(piece.value, None)

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """Return the optimizer's state of a piece, with its tensors as the optimizer computes with them."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state.get(piece.value, {})
        if rows := rows_in_group(self.optimizer, piece.value):
            is_row = {key: isinstance(row, Tensor) and row.dim() == piece.value.dim() for key, row in rows.items()}
            return {key: row[None] if is_row[key] else row for key, row in rows.items()}  # of a group of that weight
        return dict(state) if self.packing is None else self.packing.wide(piece, state)


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


@dataclass(slots=True)
class Offload:
    """The transfer of gradients to values that are on the host; nothing is sent to values on the device of the gradients."""

    values: Sequence[Tensor]
    """The master values of a rank's pieces."""
    sent: list[Tensor] | None = None
    """The gradients that were sent for this step; None if none were."""

    def is_apart(self, device: torch.device) -> bool:
        """Return whether the optimizer works on the host, while this device, a GPU, computes the gradients."""
        return device.type == "cuda" and any(value.device.type == "cpu" for value in self.values)

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of a step, which are there once the host has read a number that it asks for later."""
        self.sent = host_copies.send_to_values(gradients, self.values)

    def forget(self) -> None:
        """Drop gradients that were sent for a step that is skipped."""
        self.sent = None


_NUM_UPDATES = "num_updates"


class GroupRates:
    """The learning rates of an optimizer's groups: those of the job's schedule, unless a loop or a scheduler of its own sets them."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer
        self.first = _rates_of(optimizer)
        """The learning rate of each group, before the job's schedule."""
        self._set = list(self.first)
        self._from_outside = set[int]()
        """The groups whose rate a loop or a scheduler has set, in this process or before a resume."""
        self._members = members_of(optimizer) if optimizer is not None else ()
        kinds = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        self._hooks = [vars(member)[kind] for member in self._members for kind in kinds if kind in vars(member)]
        self._at_start: tuple[int, int, list[int], list[int]] | None = None
        """The numbers of groups, of hooks and of the parameters in each group, and the identities of these, as they were first."""
        self.is_updating = False
        self.refusal()

    def check(self, *, follows_schedule: bool) -> None:
        """Refuse groups without a learning rate where the rates are to follow a schedule.

        Raises:
            ModelError: there is such a group.
        """
        if follows_schedule and self.optimizer is not None and any("lr" not in g for g in self.optimizer.param_groups):
            raise ModelError(
                "optimizer-groups",
                f"a group of {type(self.optimizer).__name__} has no learning rate `lr`, which the job's schedule sets. Set "
                'schedule.name = "constant" without warm-up',
            )

    def factors(self, schedule: Callable[[int], float], step: int) -> float | dict[int, float]:
        """Return the factor of a schedule in a step, for each group separately where a loop has called updates of some of them."""
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        if not any(_NUM_UPDATES in group for group in groups):  # no loop has called `update` itself
            return schedule(step)
        return {index: schedule(group.get(_NUM_UPDATES, step)) for index, group in enumerate(groups)}

    def count(self, step: int, part: UpdatedPart) -> None:
        """Count an update of a part; before the first one that the loop calls, each part has as many as there were steps."""
        for index, member in enumerate(members_of(self.optimizer) if self.optimizer is not None else ()):
            for group in member.param_groups:
                group.setdefault(_NUM_UPDATES, step)
                group[_NUM_UPDATES] += int(part.members is None or index in part.members)

    def first_with(self, factor: float | Mapping[int, float], part: UpdatedPart) -> float:
        """Return the learning rate of the first group of a part with a factor; not a number where there is no group."""
        index = 0
        for number, member in enumerate(members_of(self.optimizer) if self.optimizer is not None else ()):
            if part.members is None or number in part.members:
                return self.first[index] * (factor[index] if isinstance(factor, Mapping) else factor)
            index += len(member.param_groups)
        return math.nan

    def set(self, factor: float | Mapping[int, float]) -> None:
        """Set each group's learning rate to `factor` times its base rate; one that was set from outside meanwhile is kept.

        Raises:
            ModelError: the job's schedule and another hand both change the learning rate.
        """
        if self.optimizer is None:
            return
        changed = self._changed()
        factors = dict.fromkeys(range(len(self.first)), factor) if isinstance(factor, int | float) else factor
        if changed and any(value != 1.0 for value in factors.values()):
            raise ModelError(
                "learning-rate-set-twice",
                f"the learning rate of group {min(changed)} was set to {changed[min(changed)]:g} from outside, and the job's "
                'schedule sets it too: schedule.name = "constant" without warm-up leaves it to you',
            )
        self._from_outside.update(changed)
        for index, rate in changed.items():
            self.first[index] = rate
        for index, (group, first) in enumerate(zip(self.optimizer.param_groups, self.first, strict=False)):
            if "lr" not in group:
                continue
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(first * factors[index])
            else:
                group["lr"] = first * factors[index]
        self._set = _rates_of(self.optimizer)

    def from_outside(self) -> dict[int, dict[str, Any]]:
        """Return what a checkpoint holds of the groups whose rates were changed from outside: these, before the job's schedule."""
        changed_options = dict[int, dict[str, Any]]()
        for index, rate in ({index: self.first[index] for index in self._from_outside} | self._changed()).items():
            group = self.optimizer.param_groups[index] if self.optimizer is not None else {}
            changed_options[index] = {**{key: group[key] for key in ("initial_lr",) if key in group}, "lr": rate}
        return changed_options

    def resume(self, index: int, options: Mapping[str, Any]) -> None:
        """Set options of a group to those of a checkpoint."""
        assert self.optimizer is not None
        set_options(self.optimizer.param_groups[index], options)
        if "lr" in options:
            self.first[index] = self._set[index] = options["lr"]
            self._from_outside.add(index)

    def _changed(self) -> dict[int, float]:
        """Return the rates that were set from outside since the last step, by group."""
        both = enumerate(zip(_rates_of(self.optimizer), self._set, strict=False))
        return {index: now for index, (now, rate_before) in both if now != rate_before}

    def refusal(self) -> str:
        """Return what a loop has done to the optimizer that a layout cannot follow; empty if nothing. It is asked in every step."""
        groups = [*chain.from_iterable(map(_GROUPS_OF, self._members))]
        params = [*map(_PARAMS_OF, groups)]
        present = len(groups), sum(map(len, self._hooks)), [*map(len, params)], [*map(id, chain.from_iterable(params))]
        first = self._at_start = self._at_start or present
        if present == first or self.is_updating:
            return ""
        what = f"the {' and '.join(type(member).__name__ for member in self._members)} of the run"
        if present[0] != first[0]:
            return (
                f"{what} has {present[0]} groups, and had {first[0]} when the run was made. Use groups of all weights from the start, some with "
                "lr = 0"
            )
        if present[1] != first[1]:
            return f"{what} was given step hooks, which see this rank's part. Register them in a function of the parameters"
        return f"{what} was given other parameters in a group. Set lr = 0 and requires_grad_(False) in run.model"


_GROUPS_OF, _PARAMS_OF = operator.attrgetter("param_groups"), operator.itemgetter("params")


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set options of a group; a rate that is a tensor stays one."""
    for key, value in options.items():
        present, group[key] = group.get(key), value
        if isinstance(present, Tensor):
            group[key] = value.to(present.device) if isinstance(value, Tensor) else present.fill_(value)


def _rates_of(optimizer: Optimizer | None) -> list[float]:
    """Return the learning rate of each group; 0 for one without."""
    return [float(group.get("lr", 0.0)) for group in optimizer.param_groups] if optimizer is not None else []
