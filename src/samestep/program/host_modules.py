"""Frozen weights that are in the host's memory between their uses: which ones, and which calls copy them to the device.

A reference, a teacher or a reward model is read in a part of a step only. `model.offload`, or `offload=` of `parallelize`, names it:
the host then holds its weights, and each call of one of its modules copies the weights of that module to the device and frees them
when it returns. A backward through a call, which frozen weights have where the input takes a gradient, copies them once more.

```
forward    copy blocks.0 ─ F ─ free ─ copy blocks.1 ─ F ─ free ...
```
Under zero=2 and 3 the host holds a rank's shard of each unit, which is copied for each gather. What the model's own code reads, no
call of a module shows, and so these weights stay on the device; so do those of a unit that has others, and of the head whose logits the
loss makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samestep.models.param_spec import ParamSpec
from samestep.models.spec import is_below
from samestep.program.holding import SHARDS
from samestep.program.ops import BYTES_OF
from samestep.program.step import StepSpec
from samestep.program.units import Unit, make_units


@dataclass(frozen=True, slots=True)
class HostModule:
    """A module whose weights are copied to the device for each of its calls."""

    path: str
    params: tuple[str, ...]
    """Names of its weights."""
    unit: str
    """Name of the unit of zero=2 and 3 that has them."""
    goes_back: bool
    """Whether a backward reads the weights."""


def is_named(step: StepSpec, param: ParamSpec) -> bool:
    """Return whether all names of a weight are below modules that `model.offload` names."""
    return all(any(is_below(name, root) for root in step.offload) for name in (param.name, *param.aliases))


def host_modules(step: StepSpec, units: Sequence[Unit], chunks: tuple[range, ...]) -> Iterator[HostModule]:
    """Yield the modules of a rank whose weights are on the host; without units they are those that units would have."""
    params = {param.name: param for param in step.model.params}
    for unit in units or make_units(step.hold(lambda _, held: held.zero_sharded(SHARDS, 1)), chunks):
        mine = [params[name] for name in unit.params]
        if unit.modules == ("",) or unit.is_read_by_loss or not all(is_named(step, param) for param in mine):
            continue
        for path in unit.modules:
            own = [one for one in mine if any(is_below(name, path) for name in (one.name, *one.aliases))]
            goes_back = any(param.takes_gradient for param in own)
            yield HostModule(path, tuple(param.name for param in own), unit.name, goes_back)


def units_on_host(units: Sequence[Unit], modules: Sequence[HostModule]) -> list[Unit]:
    """Return the units of zero=2 and 3 whose shards are on the host."""
    names = {one.unit for one in modules}
    return [unit for unit in units if unit.name in names]


def shard_bytes(step: StepSpec, unit: Unit) -> int:
    """Return the bytes of a rank's shard of a unit, in master precision."""
    return (unit.padded_numel * BYTES_OF[step.master_dtype] + unit.padded_packed_bytes) // unit.num_shards


def host_bytes(step: StepSpec, units: Sequence[Unit], modules: Sequence[HostModule]) -> int:
    """Return the bytes of a rank's weights that are on the host."""
    if units:
        return sum(shard_bytes(step, unit) for unit in units_on_host(units, modules))
    names = {name for one in modules for name in one.params}
    return sum(step.weight_bytes(param) for param in step.model.params if param.name in names)
