"""Gradients as a loop is given them: of whole weights, so that code that compares or combines them is that of one device.

```
zero=0, zero=1    whole tensors, on every rank
tp                DTensors of the shape of the whole weight, where a rank has a part
zero=2, zero=3    DTensors, where a rank has rows
pp                those of all stages; what is changed in those of other stages changes nothing
```
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from samestep.runtime.assembly import Assembly
from samestep.runtime.ledger import outside_step
from samestep.runtime.processes.mesh import Mesh
from samestep.runtime.processes.messages import broadcast_from


class _Part(NamedTuple):
    """A gradient, or the part of one that `tp` leaves a rank."""

    local: Tensor
    dim: int
    """The dimension that `tp` cuts; -1 where it cuts none."""
    shape: list[int]
    """The shape of the whole weight."""


def of_whole_weights(held: Assembly, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a rank's gradients as those of whole weights, which share their memory, with those of other stages of a pipeline, in the
    order of the model's parameters: a loop may draw a number for each in turn.

    The rows of a fused weight, as one for queries, keys and values, are in the order of the ranks. Under zero=2 and zero=3 with `tp` a
    DTensor is of this rank's part of the weight, and a stage has its own gradients alone. Parts of unequal sizes, and those of
    experts, are plain tensors.

    Collective over `pp`, see [Note: collective calls].
    """
    parts = {name: _part_of(held, name, gradient) for name, gradient in gradients.items()}
    if held.parallel.program.step.layout.pp > 1 and all(type(part.local) is Tensor for part in parts.values()):
        parts = _of_all_stages(held, parts)
    over_tp = _mesh_of(held.parallel.mesh, "tp") if any(part.dim >= 0 for part in parts.values()) else None
    in_order = [name for name in dict.fromkeys(held.model.state_names.values()) if name in parts]
    return {
        name: part.local if over_tp is None or part.dim < 0 else _joined(part, over_tp)
        for name, part in ((name, parts[name]) for name in dict.fromkeys([*in_order, *parts]))
    }


def _part_of(held: Assembly, name: str, gradient: Tensor) -> _Part:
    placements = held.weights.placements
    cut, spec = placements.parts[name], placements.whole[name]
    if cut.shape == spec.shape or placements.holding(name).sharded_over != ("tp",) or type(gradient) is not Tensor:
        return _Part(gradient, -1, [*gradient.shape])
    dim = placements.part(name).dim
    is_even = cut.shape[dim] * held.parallel.mesh.size("tp") == spec.shape[dim]
    return _Part(gradient, dim if is_even else -1, [*spec.shape])


def _of_all_stages(held: Assembly, parts: Mapping[str, _Part]) -> dict[str, _Part]:
    """Return the gradients of all stages; those of this rank are the tensors that it was given."""
    mesh = held.parallel.mesh
    found: dict[str, _Part] = {}
    with outside_step():
        for stage in mesh.members("pp"):
            mine = {name: [part.local, part.dim, part.shape] for name, part in parts.items()}
            theirs = broadcast_from(stage, mine, mesh.groups["pp"], mesh.device)
            found |= {name: _Part(*part) for name, part in theirs.items()}
    return {**found, **parts}


def _joined(part: _Part, mesh: DeviceMesh) -> Tensor:
    from torch.distributed.tensor import DTensor, Shard  # noqa: PLC0415  # which takes a second to import

    from samestep.runtime.weights import whole_writes  # noqa: PLC0415

    whole_writes.allow()
    stride = torch.empty(part.shape, device="meta").stride()
    made: Tensor = DTensor.from_local(
        part.local, mesh, [Shard(part.dim)], run_check=False, shape=torch.Size(part.shape), stride=stride
    )
    return made


def _mesh_of(mesh: Mesh, axis: str) -> DeviceMesh:
    members = torch.tensor(mesh.members(axis))
    return DeviceMesh.from_group(mesh.groups[axis], mesh.device.type, mesh=members, mesh_dim_names=(axis,))
