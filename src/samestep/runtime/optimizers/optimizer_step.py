"""The optimizer's part of a step: the pieces a rank updates, the optimizer over them, loss scaling and clipping.

However a layout cuts the weights, a rank updates a list of `Piece`s: runs of one parameter's elements as plain tensors
in master precision. Optimizers that treat every element by itself (SGD, Adam, ...) give the one-device update on any
pieces. `update_rule.py` reads from an optimizer's operations whether it does.

Between two updates a piece may be held in less than master precision asks for (`split_masters.py`). It is then updated
with some others, a chunk of all pieces, so that the wider values of few pieces exist at a time:

    for each chunk: join its masters, lend its gradients, optimizer.step() over its pieces alone, split its masters
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.building.optimizer import OptimizerSource, class_names, members_of
from samestep.errors import InputError, ModelError
from samestep.job_tables import NumericsTable
from samestep.program.step import update_chunks
from samestep.runtime import host_copies
from samestep.runtime.optimizers.group_rates import GroupRates
from samestep.runtime.optimizers.loss_scale import LARGEST_SUM, LossScale
from samestep.runtime.optimizers.one_process import alone
from samestep.runtime.optimizers.optimizer_source import (
    ALONE,
    WholeWeights,
    build_over,
    check_step,
    given_instances,
    member_of_weight,
)
from samestep.runtime.optimizers.optimizers_by_name import ALL, UpdatedPart, step_members
from samestep.runtime.optimizers.packed_states import StatePacking
from samestep.runtime.optimizers.update_rule import TRIED, has_hooks, is_torchs_own
from samestep.runtime.optimizers.used_weights import Unused
from samestep.runtime.weights.pieces import LiveWeights, Piece, WeightAverages
from samestep.runtime.weights.split_masters import SplitMasters
from samestep.state.fingerprints import optimizer_digests
from samestep.state.reachable import optimizers_with_states


@dataclass(slots=True)
class Updater:
    """The optimizer over this rank's pieces."""

    pieces: list[Piece]
    optimizer: Optimizer | None
    """None on a rank without pieces, as the last ones of more ranks than rows."""
    loss_scale: LossScale
    rates: GroupRates
    """The learning rates of its groups."""
    whole: WholeWeights = ALONE
    couples_weights: bool = False
    """Whether the update of a weight is known to depend on which other weights the optimizer holds."""
    factor: float = 1.0
    """What the gradients of the last update were multiplied by: the division by the count, and the clipping."""
    _sent: list[Tensor] | None = None
    """The gradients of this step, multiplied, on their way to where the pieces are."""
    first_digests: dict[str, int] = field(default_factory=dict)
    """Digests of the optimizer's options and attributes before its first step."""
    live: LiveWeights = field(default_factory=lambda: LiveWeights([]))
    """The weights that the forward reads."""
    chunks: list[list[Piece]] = field(default_factory=list)
    """Pieces that are updated together; empty where all are, as they are held."""
    packing: StatePacking | None = None
    """How states are held between two updates; None where they are as the optimizer computes with them."""
    step_index: int = 0
    """The step of the next update, counted from 0."""
    unused: Unused = frozenset()
    """Names of the weights that the step gave no gradient: the next update leaves them, and their states, as they are."""
    averages: WeightAverages | None = None
    """Moving averages of the pieces; None where the job keeps none."""
    with_states: list[Any] = field(default_factory=list)
    """The optimizer, and those in it that keep states of their own."""
    evaluating: frozenset[int] = frozenset()
    """The members of the optimizer whose step evaluates the loss again."""
    member_of_weight: Mapping[str, int] = field(default_factory=dict)
    """The index of the member that holds each weight of the whole model, where the user gave several optimizers."""

    @classmethod
    def over(
        cls,
        pieces: list[Piece],
        source: OptimizerSource,
        numerics: NumericsTable,
        whole: WholeWeights = ALONE,
        *,
        couples_weights: bool = False,
        evaluating: frozenset[int] = frozenset(),
        splits_masters: bool = False,
        packing: StatePacking | None = None,
        averages: WeightAverages | None = None,
        follows_schedule: bool = False,
    ) -> Updater:
        """Build the optimizer over `pieces` of the `whole` weights; `splits_masters` holds masters in two halves.

        Raises:
            ModelError: the optimizer's `step` needs a closure, it holds none of the weights, or it `follows_schedule` and has no
                learning rate.
        """
        for piece in pieces:
            piece.value.requires_grad_(True)
            piece.value.__dict__.update(whole.attributes.get(piece.name, {}))
        # In front: the optimizer in use is the last one that a function makes.
        holders = member_of_weight(source, whole)
        optimizer = build_over(source, [(piece.name, piece.value) for piece in pieces], whole)
        if optimizer is not None:
            check_step(optimizer)
        scaled = numerics.precision == "fp16"
        scale = LossScale(numerics.loss_scale, numerics.loss_scale_growth_steps) if scaled else LossScale()
        if optimizer is not None and follows_schedule and any("lr" not in group for group in optimizer.param_groups):
            raise ModelError(
                f"a group of {type(optimizer).__name__} has no learning rate `lr`, which the job's schedule sets: "
                'schedule.name = "constant" without warm-up works'
            )
        rates = GroupRates(optimizer, given_instances(source, optimizer))
        made = cls(
            pieces,
            optimizer,
            scale,
            rates,
            whole=whole,
            couples_weights=couples_weights,
        )
        made.packing, made.averages, made.member_of_weight = packing, averages, holders
        made.evaluating = evaluating
        if optimizer is not None:
            made.with_states = [optimizer] if is_torchs_own(optimizer) else optimizers_with_states(optimizer)
        if evaluating and scaled:
            raise ModelError(
                f"{class_names(optimizer) if optimizer else 'the optimizer'} evaluates the loss again in its step, where gradients under "
                'a loss scale may overflow: numerics.precision = "bf16" works'
            )
        made.chunks = _chunks(pieces, optimizer, splits_masters=splits_masters, packs_states=packing is not None)
        made.live = LiveWeights(pieces)
        made.first_digests = optimizer_digests(optimizer) if optimizer else {}
        return made

    def set_lr(self, factor: float | Mapping[int, float]) -> None:
        """Set the learning rates as `GroupRates.set` does."""
        self.rates.set(factor)

    @property
    def can_hold_back(self) -> bool:
        """Whether the device can leave an update out by a number that the host has not read, as torch's fused kernels do.

        Other optimizers, and hooks on one, would see gradients that are not finite.
        """
        optimizer = self.optimizer
        return optimizer is None or (
            type(optimizer).__module__.startswith("torch.optim.")
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and "step" not in vars(optimizer)
            and not has_hooks(optimizer)
            and all(piece.value.device.type == "cuda" for piece in self.pieces)
        )

    def is_apart(self, device: torch.device) -> bool:
        """Whether the optimizer works on the host, while gradients are made on this device, a GPU."""
        return device.type == "cuda" and any(piece.value.device.type == "cpu" for piece in self.pieces)

    @torch.no_grad()
    def send_unless(self, held_back: Tensor, factor: Tensor) -> None:
        """Multiply the gradients by `factor` and send them to the host for `step`; by 1 where `held_back` is 1.

        The host waits for neither number. They are there once it has read a number that it asks for later.
        """
        gradients = [piece.gradient() for piece in self.pieces]
        torch._foreach_mul_(gradients, torch.where(held_back > 0, 1.0, factor))
        self._sent = host_copies.send_to_values(gradients, [piece.value for piece in self.pieces])

    @torch.no_grad()
    def step(self, factor: float, *, was_held_back: bool = False, part: UpdatedPart = ALL) -> None:
        """Multiply the gradients by `factor`, unless they were when they were sent, and update the pieces of a part."""
        self.factor = factor
        sent, self._sent = self._sent, None
        pieces = self.pieces_of(part)
        if self.optimizer is None or not pieces:
            return
        gradients = [piece.gradient() for piece in pieces] if sent is None else sent
        if factor != 1.0 and (sent is None or was_held_back):
            torch._foreach_mul_(gradients, factor)
        self._update(gradients, part=part)

    @torch.no_grad()
    def call(self, part: UpdatedPart, method: str, args: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Any, bool]:
        """Let the members of a part run a method over their pieces, which have their gradients; return what the last one returns, and
        whether it has dropped a gradient.
        """
        pieces = self.pieces_of(part)
        if self.optimizer is None or not pieces:
            return None, False
        gradients = host_copies.beside([piece.gradient() for piece in pieces], [piece.value for piece in pieces])
        of_piece = {id(piece): gradient for piece, gradient in zip(pieces, gradients, strict=True)}
        result = None
        with _use_masters(pieces), self._unpacked(pieces), self._lent(pieces, of_piece):
            with alone(type(self.optimizer).__name__):
                for index, member in enumerate(members_of(self.optimizer)):
                    if part.members is None or index in part.members:
                        result = getattr(member, method)(*args, **given)
            dropped = any(piece.value.grad is None for piece in pieces if piece.name not in self.unused)
        return result, dropped

    def pieces_of(self, part: UpdatedPart) -> list[Piece]:
        """Return the pieces of the members of a part."""
        if part.members is None:
            return self.pieces
        return [piece for piece in self.pieces if self.member_of_weight[piece.name] in part.members]

    def forget_sent(self) -> None:
        """Drop gradients that were sent for a step that is skipped."""
        self._sent = None

    @torch.no_grad()
    def step_unless(self, held_back: Tensor, factor: Tensor) -> None:
        """Multiply the gradients by `factor` and update the pieces; change neither where `held_back` is 1.

        The host waits for neither number, which `can_hold_back` must allow.
        """
        if self.optimizer is None:
            return
        gradients = [piece.gradient() for piece in self.pieces]
        scaling: Any = self.optimizer
        scaling.found_inf = held_back
        if all(gradient.dtype == torch.float32 for gradient in gradients):
            scaling.grad_scale = (1.0 / factor).float()  # the kernel divides by it, in float32
        else:
            torch._foreach_mul_(gradients, torch.where(held_back > 0, 1.0, factor))
        try:
            self._update(gradients, held_back)
        finally:
            scaling.__dict__.pop("grad_scale", None)
            del scaling.found_inf

    def _update(self, gradients: list[Tensor], held_back: Tensor | None = None, part: UpdatedPart = ALL) -> None:
        """Lend the gradients to the pieces, let the optimizer update them, chunk by chunk, and average them.

        The device changes nothing where `held_back` is 1.
        """
        assert self.optimizer is not None
        pieces = self.pieces_of(part)
        gradients = host_copies.beside(gradients, [piece.value for piece in pieces])
        of_piece = {id(piece): gradient for piece, gradient in zip(pieces, gradients, strict=True)}
        for together in self._together():
            chunk = [piece for piece in together if id(piece) in of_piece]
            if not chunk:
                continue
            is_all = len(chunk) == len(self.pieces)
            with _use_masters(chunk), self._unpacked(chunk), _holding_only(self.optimizer, None if is_all else chunk):
                try:
                    with self._lent(chunk, of_piece), alone(type(self.optimizer).__name__):
                        if part.closure is not None:
                            part.closure.begin()
                        step_members(self.optimizer, part)
                except TRIED as error:  # of the user's own code, such as an assertion that a closure is given
                    if self.step_index or isinstance(
                        error, InputError | torch.OutOfMemoryError | torch.AcceleratorError
                    ):
                        raise
                    name, words = type(self.optimizer).__name__, str(error).partition("\n")[0]
                    raise ModelError(
                        f"the first step of {name} fails: {type(error).__name__}: {words}; it is called with the options of "
                        "run.update, and with a closure where it needs one: another optimizer works, such as adamw"
                    ) from error
                if self.averages is not None:
                    self.averages.update(chunk, held_back)
        for given in self.rates.given.values():
            given._opt_called = True  # type: ignore[attr-defined]  # what a scheduler over the instance asks for

    @contextmanager
    def _lent(self, chunk: list[Piece], of_piece: Mapping[int, Tensor]) -> Iterator[None]:
        """Let the values of some pieces have their gradients inside, unless the step gave them none."""
        lent = [piece.value for piece in chunk if piece.value.grad is None]
        for piece in chunk:
            gradient = of_piece[id(piece)]
            if piece.name in self.unused:
                piece.value.grad = None
            elif piece.value.grad is not gradient:
                has_shape = gradient.shape == piece.value.shape
                piece.value.grad = gradient if has_shape else gradient.view_as(piece.value)
        try:
            yield
        finally:
            for value in lent:  # a gradient that was lent would stay allocated beside that of the next step
                value.grad = None

    def _together(self) -> list[list[Piece]]:
        """Return the pieces by what is updated together.

        Torch's fused SGD takes momenta of all weights or of none, so weights that are used for the first time come by themselves.
        """
        chunks, optimizer = self.chunks or [self.pieces], self.optimizer
        assert optimizer is not None
        descending = [member for member in members_of(optimizer) if isinstance(member, torch.optim.SGD)]
        if not any(group["fused"] for member in descending for group in member.param_groups):
            return chunks
        begun = {
            id(piece)
            for piece in self.pieces
            if optimizer.state.get(piece.value, {}).get("momentum_buffer") is not None or piece.name in self.unused
        }
        parts = [
            [piece for piece in chunk if (id(piece) in begun) is has_begun]
            for chunk in chunks
            for has_begun in (True, False)
        ]
        return [part for part in parts if part]

    @contextmanager
    def _unpacked(self, chunk: list[Piece]) -> Iterator[None]:
        """Let the optimizer have wide states for the pieces of a chunk inside, and pack them behind it."""
        if self.packing is None or self.optimizer is None:
            yield
            return
        stated = [piece for piece in chunk if piece.name not in self.unused]
        for piece in stated:
            if piece.value in self.optimizer.state:
                self.packing.widen(piece, self.optimizer.state[piece.value])
        try:
            yield
        finally:
            for piece in stated:
                if piece.value in self.optimizer.state:
                    self.packing.pack(piece, self.optimizer.state[piece.value], self.step_index)

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """Return the optimizer's state of a piece, with its tensors as the optimizer computes with them."""
        state = self.optimizer.state.get(piece.value, {}) if self.optimizer is not None else {}
        return dict(state) if self.packing is None else self.packing.wide(piece, state)

    @torch.no_grad()
    def overflow(self, device: torch.device, names: Set[str] | None = None) -> Tensor:
        """Return infinity if a gradient of this rank, of these weights or any, under the loss scale exceeds float16; else 0 (float64 []).

        Whether float16 overflows on the way depends on how many samples a micro-batch adds up; their sum over the whole
        step does not. So the sum alone decides whether a step is skipped, and all layouts decide alike.
        """
        none = torch.zeros((), dtype=torch.float64, device=device)
        if self.loss_scale.scale <= 1.0:
            return none
        mine = [piece for piece in self.pieces if names is None or piece.name in names]
        gradients = [gradient for piece in mine if (gradient := piece.gradient()).numel()]
        if not gradients:
            return none
        largest = torch.stack(torch._foreach_norm(gradients, math.inf)).max()
        return torch.where(largest > LARGEST_SUM, math.inf, 0.0).double()

    def publish(self) -> None:
        """Copy updated values to the tensors that the forward reads."""
        self.live.publish()

    def reread(self) -> None:
        """Take over what was written into the weights since `publish`; called before an update and before a save."""
        self.live.reread()

    def was_written(self, device: torch.device) -> Tensor:
        """Return 1 if a weight was written since `publish`, else 0 (float64 []), which the host need not wait for."""
        return self.live.was_written(device)


def _chunks(
    pieces: list[Piece], optimizer: Optimizer | None, *, splits_masters: bool, packs_states: bool
) -> list[list[Piece]]:
    """Split the masters of bfloat16 weights, and return the pieces by the chunks in which they are updated.

    Some pieces can be updated before others by the rules of torch's own optimizers alone.
    """
    if optimizer is None or not (splits_masters or packs_states or any(piece.split for piece in pieces)):
        return []
    if not is_torchs_own(optimizer):  # over pieces that are split already, for another optimizer
        return [pieces]
    chunks = [[pieces[i] for i in indices] for indices in update_chunks([piece.value.numel() for piece in pieces])]
    for chunk in chunks if splits_masters else []:
        halved = [piece for piece in chunk if _can_split(piece)]
        weights = [piece.target for piece in halved if piece.target is not None]
        if weights:
            assert all(piece.value.shape == weight.shape for piece, weight in zip(halved, weights, strict=True))
            masters = SplitMasters(weights, [piece.master() for piece in halved])
            for index, piece in enumerate(halved):
                piece.split = masters, index
                piece.value.data = masters.absent[index]
    return chunks


def _can_split(piece: Piece) -> bool:
    target, value = piece.target, piece.value
    return (
        target is not None
        and piece.split is None
        and target.device == value.device
        and (target.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    )


@contextmanager
def _use_masters(chunk: list[Piece]) -> Iterator[None]:
    """Let the pieces of a chunk have their master values inside."""
    groups = {id(piece.split[0]): piece.split[0] for piece in chunk if piece.split is not None}
    split = [(piece, *piece.split) for piece in chunk if piece.split is not None]
    with ExitStack() as stack:
        windows = {key: stack.enter_context(masters.joined()) for key, masters in groups.items()}
        try:
            for piece, masters, index in split:
                piece.value.data = windows[id(masters)][index]
            yield
        finally:
            for piece, masters, index in split:
                piece.value.data = masters.absent[index]


@contextmanager
def _holding_only(optimizer: Optimizer, chunk: list[Piece] | None) -> Iterator[None]:
    """Let an optimizer hold the pieces of a chunk alone inside; None lets it hold what it does."""
    if chunk is None:
        yield
        return
    mine = {id(piece.value) for piece in chunk}
    held = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, held, strict=True):
        group["params"] = [param for param in params if id(param) in mine]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, held, strict=True):
            group["params"] = params


def clip_factor(norm: float, limit: float | None) -> float:
    """Return the factor on the gradients that limits their global norm to `limit` (torch's own rule)."""
    if limit is None or not math.isfinite(norm):
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
