"""Moving averages of weights: of all that a run trains (`train.ema`), and of a model that another model of the run follows.

`WeightAverages` keeps an exponential moving average for each piece that a rank updates:

    average = weights                                      after the first update
    average = decay * average + (1 - decay) * weights      after every later one

A step that is skipped updates neither. That is the rule of torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)` and
`use_buffers=False`: the model that is evaluated has averages for its trained weights, and its buffers as they are. An average has the
dtype of the master and is divided like it, so averaging sends nothing. Models along a training path average to one with a lower
loss (Polyak and Juditsky 1992, doi:10.1137/0330046).

`ModelAverages` is for teachers and target networks. After each step t, with w the weights of a trained model and m those of the
one that follows it, which is frozen,

    m = d m + (1 - d) w          d a number, or a function of the step, counted from 0

Both models have the same weights by name, and a layout cuts them alike, so that each rank averages the parts that it holds and sends
nothing (Tarvainen and Valpola 2017, arXiv:1703.01780; He et al. 2020, arXiv:1911.05722). Of a pipeline, the stage that has w sends it
to the stage that has m, where these are two (`program/program.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep.errors import LayoutError
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.program import FollowedWeights, Program
from samestep.runtime.ledger import owned
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.weights.pieces import Piece

Decay = float | Callable[[int], float]
Following = Mapping[str, tuple[str, Decay]]
"""The model that each one follows by name, and the decay."""


@dataclass(frozen=True, slots=True)
class ModelAverages:
    """The models of a run that follow others."""

    following: Following = field(default_factory=dict)

    def check(self, layout: Layout, job: Job) -> None:
        """Refuse a layout or a precision in which the models cannot be averaged where they are.

        Raises:
            LayoutError: it is one.
        """
        name = next(iter(self.following), "")
        if not name:
            return
        if layout.pp > 1 and layout.ep > 1:
            raise LayoutError(
                "ema-layout",
                f"ema: {name} follows a model that is split over stages or ranks of experts (pp={layout.pp} ep={layout.ep}). Use "
                "pp=1, or ep=1",
            )
        if job.numerics.precision not in ("float32", "float64"):
            raise LayoutError(
                "ema-follows",
                f"ema: {name} is frozen, so it has no master weights, and {job.numerics.precision} would round its updates away. Set "
                'numerics.precision = "float32"',
            )
        if job.numerics.exchange_every > 1:
            raise LayoutError(
                "diloco-unsupported",
                f"ema: {name} follows a model that is trained apart. Set numerics.exchange_every = 1",
            )

    @torch.no_grad()
    def follow(
        self, module: nn.Module, program: Program, mesh: Mesh, step: int, updated: Collection[str] | None = None
    ) -> None:
        """Move each model that follows another towards it, after a step counted from 0.

        `updated` are the names of the weights that an update was of, where a step has several; only a model that follows one of them
        moves. None stands for all.

        Collective over the stages that send each other weights, see [Note: collective calls].

        Raises:
            LayoutError: a rank holds other parts of the two.
        """
        names = {param.name for param in program.step.model.params}  # the stage has others on the meta device
        parts = {name: _own_part(param) for name, param in module.named_parameters() if name in names}
        moved = {
            name: share
            for name, (source, decay) in self.following.items()
            if updated is None or any(followed.startswith(f"{source}.") for followed in updated)
            for share in [1.0 - (decay(step) if callable(decay) else decay)]
        }
        if not moved:
            return
        sent = {
            name: part for followed in program.followed for name, part in self._exchange(followed, parts, program, mesh)
        }
        for name, average in parts.items():
            prefix, _, rest = name.partition(".")
            if prefix not in moved:
                continue
            source = f"{self.following[prefix][0]}.{rest}"
            weight = sent.get(name, parts.get(source))
            if weight is None or average.shape != weight.shape:
                shape = [] if weight is None else list(weight.shape)
                raise LayoutError(
                    "ema-layout", f"ema: a rank holds {list(average.shape)} of {name} and {shape} of {source}. Use tp=1"
                )
            average.lerp_(weight.to(average.device), moved[prefix])  # the average may be on the host

    def _exchange(
        self, sent: FollowedWeights, tensors: Mapping[str, Tensor], program: Program, mesh: Mesh
    ) -> Iterator[tuple[str, Tensor]]:
        """Send or receive the weights that one stage has and weights on another one follow; yield what this stage receives."""
        stage = program.step.stage
        if stage not in (sent.source, sent.target):
            return
        buffer = torch.zeros(sent.numel, dtype=next(iter(tensors.values())).dtype, device=mesh.device)
        places = list(zip(sent.members, buffer.split([numel for _, numel in sent.members]), strict=True))
        for (name, _), place in places if stage == sent.source else ():
            prefix, _, rest = name.partition(".")
            weight = tensors[f"{self.following[prefix][0]}.{rest}"]
            place[: weight.numel()] = weight.flatten()
        with owned(sent.owner):
            source = mesh.members(sent.axis)[sent.source > sent.target]
            dist.broadcast(buffer, source, group=mesh.groups[sent.axis])
        for (name, _), place in places if stage == sent.target else ():
            if tensors[name].numel() <= place.numel():
                yield name, place[: tensors[name].numel()].view(tensors[name].shape)


def _own_part(param: Tensor) -> Tensor:
    """Return the elements of a weight that this rank has."""
    return param.to_local() if isinstance(param, DTensor) else param


class WeightAverages:
    """The averages of the pieces that a rank updates."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._of: dict[int, Tensor] = {}

    def of(self, piece: Piece) -> Tensor | None:
        """Return the average of a piece, of the shape of its value; None before the first update."""
        return self._of.get(id(piece))

    def set(self, piece: Piece, values: Tensor | None) -> None:
        """Set the average of a piece; None removes it."""
        if values is None:
            self._of.pop(id(piece), None)
            return
        self._of[id(piece)] = values.to(piece.value.device, piece.value.dtype, copy=True).view(piece.value.shape)

    @torch.no_grad()
    def update(self, pieces: Sequence[Piece], held_back: Tensor | None = None) -> None:
        """Update the averages of pieces whose `value` has just been updated; none of them where `held_back` is 1."""
        known = [piece for piece in pieces if id(piece) in self._of]
        for piece in pieces if len(known) < len(pieces) else ():
            assert held_back is None, "the CPU waits for the first update"
            self.set(piece, piece.value.detach())
        if not known:
            return
        averages, values = [self._of[id(piece)] for piece in known], [piece.value.detach() for piece in known]
        if held_back is None:
            torch._foreach_lerp_(averages, values, 1.0 - self.decay)
        else:
            weight = torch.where(held_back > 0, 0.0, 1.0 - self.decay).to(values[0].dtype)
            torch._foreach_lerp_(averages, values, [weight] * len(values))
