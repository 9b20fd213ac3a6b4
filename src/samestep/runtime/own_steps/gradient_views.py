"""Gradients between the backward and the update of a loop: as it is given them, of whole weights, as it leaves them, and as they wait.

```
zero=0, zero=1    whole tensors, on every rank
tp                DTensors of the shape of the whole weight, those of weights that are not cut replicated
zero=2, zero=3    DTensors, where a rank has rows; with tp over both axes
pp                those of all stages; what is changed in those of other stages changes nothing
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from samestep.errors import ModelError
from samestep.runtime.assembly import Assembly
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.processes.messages import broadcast_from
from samestep.runtime.weights.pieces import NO_ROW
from samestep.runtime.weights.weight_store import WeightStore
from samestep.runtime.weights.weights_in_loops import WeightsInLoops
from samestep.state.writes import version_of


class _Part(NamedTuple):
    """A gradient, or the part of one that `tp` leaves a rank."""

    local: Tensor
    dim: int
    """The dimension that `tp` cuts; -1 where it cuts none."""
    shape: list[int]
    """The shape of the whole weight."""
    is_other: bool = False
    """Whether a rank has a part that no DTensor describes."""


def of_whole_weights(assembly: Assembly, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a rank's gradients as those of whole weights, which share their memory, with those of other stages of a pipeline, in the
    order of the model's parameters: a loop may draw a number for each in turn.

    The rows of a fused weight, as one for queries, keys and values, are in the order of the ranks. Under zero=2 and zero=3 a stage has its
    own gradients alone. Parts of unequal sizes, and those of experts, are what a rank has.

    Collective over `pp`, see [Note: collective calls].
    """
    parts = {name: _part_of(assembly, name, gradient) for name, gradient in gradients.items()}
    if assembly.parallel.program.step.layout.pp > 1 and all(type(part.local) is Tensor for part in parts.values()):
        parts = _of_all_stages(assembly, parts)
    is_cut = any(part.dim >= 0 for part in parts.values())
    over_tp = functools.cache(functools.partial(_mesh_over, assembly.parallel.mesh, "tp")) if is_cut else None
    in_order = [name for name in dict.fromkeys(assembly.model.state_names.values()) if name in parts]
    joined = {name: _joined(parts[name], over_tp) for name in dict.fromkeys([*in_order, *parts])}
    for name, gradient in joined.items():
        if type(gradient) is not Tensor:
            gradient.numpy = functools.partial(_refuse_numpy, name)  # type: ignore[method-assign]
    return joined


def _refuse_numpy(name: str, **_: Any) -> Any:
    raise ModelError(
        "weights-not-whole",
        f"the gradient of {name} is a DTensor, and a rank has a part of it; numpy takes whole tensors. Use .full_tensor().numpy(), called on "
        "every rank",
    )


def _part_of(assembly: Assembly, name: str, gradient: Tensor) -> _Part:
    placements = assembly.weights.placements
    cut, spec = placements.parts[name], placements.whole[name]
    if cut.shape == spec.shape or placements.holding(name).sharded_over != ("tp",):
        return _Part(gradient, -1, [*gradient.shape], cut.shape != spec.shape)
    dim = placements.part(name).dim
    is_even = cut.shape[dim] * assembly.parallel.mesh.size("tp") == spec.shape[dim]
    return _Part(gradient, dim if is_even else -1, [*spec.shape], not is_even)


def _of_all_stages(assembly: Assembly, parts: Mapping[str, _Part]) -> dict[str, _Part]:
    """Return the gradients of all stages; those of this rank are the tensors that it was given."""
    mesh = assembly.parallel.mesh
    received: dict[str, _Part] = {}
    with outside_step():
        for stage in mesh.members("pp"):
            sent = {name: [*part] for name, part in parts.items()}
            theirs = broadcast_from(stage, sent, mesh.groups["pp"], mesh.device)
            received |= {name: _Part(*part) for name, part in theirs.items()}
    return {**received, **parts}


def _joined(part: _Part, mesh_over: Callable[[DeviceMesh | None], DeviceMesh] | None) -> Tensor:
    """Return a gradient as a DTensor over `tp` and the axis on which ranks have its rows, if there is one."""
    if mesh_over is None or part.is_other:
        return part.local
    from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415  # which takes a second to import

    from samestep.runtime.weights.sharded import allow_whole_writes  # noqa: PLC0415

    allow_whole_writes()
    local: Any = part.local
    of_rows = isinstance(local, DTensor)
    mesh = mesh_over(local.device_mesh if of_rows else None)
    placements = [Replicate() if part.dim < 0 else Shard(part.dim), *(local.placements if of_rows else ())]
    tensor: Tensor = DTensor.from_local(
        local.to_local() if of_rows else local,
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(part.shape),
        stride=torch.empty(part.shape, device="meta").stride(),
    )
    return tensor


def _mesh_over(mesh: Mesh, axis: str, rows: DeviceMesh | None) -> DeviceMesh:
    """Return the ranks of an axis; for each of them those that have the rows of its part, if these are on several ranks."""
    kind, members = mesh.device.type, torch.tensor(mesh.members(axis))
    if rows is None:
        return DeviceMesh.from_group(mesh.groups[axis], kind, mesh=members, mesh_dim_names=(axis,))
    of_each = torch.tensor([mesh.ranks.group(rank, axis) for rank in rows.mesh.flatten().tolist()])
    names = rows.mesh_dim_names or tuple(f"rows_{dim}" for dim in range(rows.ndim))
    return DeviceMesh.from_group(
        [mesh.groups[axis], *rows.get_all_groups()],
        kind,
        mesh=of_each.T.reshape(len(members), *rows.mesh.shape),
        mesh_dim_names=(axis, *names),
    )


class _Left(NamedTuple):
    """A weight's gradient at one moment."""

    param: nn.Parameter
    gradient: Tensor | None
    version: int


class LeftGradients:
    """The gradients that stand in `param.grad` of a module while some wait for an update, which a loop may not change there.

    Between `run.backward` and `run.update` these are gradients of this rank's own samples, or of its part of a weight, and of a sum
    that no count has divided yet. A loop that reads `param.grad` is given those of `run.gradients()` in their place.
    """

    def __init__(self) -> None:
        self._left: dict[str, _Left] = {}
        self._in_loops: WeightsInLoops | None = None
        self._may_be_written = False

    def note(
        self, assembly: Assembly, gradients: Callable[[], Mapping[str, Tensor]], *, may_be_written: bool = False
    ) -> None:
        """Note what stands there now, in whose place a loop is given the `gradients` of whole weights; `may_be_written` of those that it
        was given already.
        """
        self._may_be_written, self._in_loops = may_be_written, assembly.weights.in_loops
        self._in_loops.wait(gradients)
        self._left = {
            name: _Left(param, param.grad, _version(param.grad))
            for name, param in assembly.model.module.named_parameters()
            if param.requires_grad
        }

    def forget(self) -> None:
        """Forget what was noted, where nothing waits."""
        self._left = {}
        if self._in_loops is not None:
            self._in_loops.wait(None)

    def refuse_changes(self, method: str) -> None:
        """Refuse that a loop has changed what stands there.

        Raises:
            ModelError: it has.
        """
        for name, (param, gradient, version) in self._left.items():
            is_replaced = param.grad is not gradient
            if is_replaced or (not self._may_be_written and _version(gradient) != version):
                raise ModelError(
                    "gradient-changed",
                    f"{name}.grad of run.model was {'replaced' if is_replaced else 'changed'} between run.backward and {method}, where a rank "
                    "has the gradient of its own samples, or a part of it. Use the same change in place of the tensors of run.gradients()"
                    ", or clip_norm in the job and run.zero_grad()",
                )


def _version(gradient: Tensor | None) -> int:
    """Return how often a gradient was written, of a sharded one as such or in this rank's part."""
    if gradient is None:
        return 0
    part = getattr(gradient, "_local_tensor", gradient)
    return version_of(gradient) + (version_of(part) if part is not gradient else 0)


class WaitingGradients:
    """The gradients of one rank that no update has used yet, by weight, from the backwards of a loop: they add up as means.

    A backward leaves the gradients of its sum in the store; the factor that makes them those of a mean is known once the ranks have
    added up its count. The next backward needs the store, so what waits there moves to copies first. Where each rank has whole
    gradients (`WeightStore.can_wait`) they are this rank's own until the first `gradients` or `update`, when their sum is reduced once:

        backward 1 ─► store: g1, factor 1/c1
        backward 2 ─► copies: g1/c1         store: g2, factor 1/c2
        reduce     ─► store: g1/c1 + g2/c2, factor 1, summed over the ranks
        gradients  ─► the same, with what was reduced before and waits still
        update     ─► what it has updated waits no more; the rest does

    So one backward in front of each update, the usual case, makes no copy.
    """

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self.names: frozenset[str] = frozenset()
        """The weights of the whole model to which a backward gave a gradient that waits."""
        self.factor = 1.0
        """What the gradients in the store are multiplied by, to be those of a mean."""
        self._fresh: frozenset[str] = frozenset()
        """Those of the weights whose gradients of the last backward wait in the store."""
        self._own: dict[str, Tensor] = {}
        """This rank's own gradients of earlier backwards, which are not reduced, by weight."""
        self._owned: frozenset[str] = frozenset()
        """The weights of the whole model whose gradients of earlier backwards are not reduced: the same on all ranks, of which those
        of one stage may add theirs to those of another."""
        self._kept: dict[int, Tensor] = {}
        """Copies of what waits reduced from earlier backwards, by the index of the store's piece."""
        self._is_reduced = True
        """Whether what waits in the store is reduced."""
        self._is_as_left = False
        """Whether the store has what the last backward has left, for all weights that it was for."""

    @torch.no_grad()
    def make_room(self) -> None:
        """Copy what waits in the store, which the next backward needs."""
        if self._is_reduced:
            for index, piece in enumerate(self._store.reduced):
                if piece.name in self._fresh:
                    self._kept[index] = self._sum(self._kept.get(index), piece.gradient())
        else:
            self._owned |= self._fresh
            for name, gradient in self._store.unreduced().items():
                if name in self._fresh:
                    self._own[name] = self._sum(self._own.get(name), gradient)
        self._fresh, self.factor, self._is_as_left, self._is_reduced = frozenset(), 1.0, False, True

    def _sum(self, tensor: Tensor | None, gradient: Tensor) -> Tensor:
        return gradient * self.factor if tensor is None else tensor.add_(gradient, alpha=self.factor)

    def add(self, names: Set[str], factor: float, *, is_reduced: bool) -> None:
        """Let the gradients of these weights wait, which a backward has left in the store, reduced or not."""
        self._fresh, self.factor, self._is_as_left, self._is_reduced = frozenset(names), factor, True, is_reduced
        self.names |= names

    def are_one_backward(self, names: Set[str]) -> bool:
        """Return whether what waits of these weights is what one backward has left, which was for no others."""
        return self._is_as_left and not self._kept and not self._owned and self._fresh == names

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce what backwards have left and is not reduced yet, if there is any.

        Collective over the data axes, see [Note: collective calls].
        """
        if self._owned:
            for name, gradient in self._store.unreduced().items():
                if name in self._fresh:
                    gradient.mul_(self.factor)
                else:
                    gradient.fill_(NO_ROW)
                if name in self._own:
                    gradient.add_(self._own[name])
            self._fresh, self.factor, self._is_as_left = self._fresh | self._owned, 1.0, False
            self._own, self._owned, self._is_reduced = {}, frozenset(), False
        if not self._is_reduced and self._fresh:
            self._store.finish_gradients(delivers=False, names=self._fresh)
        self._is_reduced = True

    @torch.no_grad()
    def add_up(self) -> None:
        """Let the store have all that waits, reduced, as gradients of means.

        Collective over the data axes, see [Note: collective calls].
        """
        self.reduce()
        for index, piece in enumerate(self._store.reduced):
            gradient = piece.gradient()
            if piece.name in self._fresh:
                gradient.mul_(self.factor)
            else:
                gradient.fill_(NO_ROW)
            if index in self._kept:
                gradient.add_(self._kept.pop(index))
        self._fresh, self.factor, self._is_as_left = self.names, 1.0, False

    def drop(self, names: Set[str]) -> None:
        """Let the gradients of these weights wait no more."""
        self._is_as_left &= not self._fresh & names
        self.names -= names
        self._fresh -= names
        self._owned -= names
        self._own = {name: gradient for name, gradient in self._own.items() if name not in names}
        for index, piece in enumerate(self._store.reduced):
            if piece.name in names:
                self._kept.pop(index, None)
