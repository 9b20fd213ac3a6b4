"""Bytes that one rank holds: exactly between two steps, and at the worst op within one.

Bytes a parameter in mixed precision with Adam, N ranks on dp_shard (Rajbhandari et al. 2020, arXiv:1910.02054):

    zero   classic    held by this runtime
    0      16         18                    weight 2, float32 gradient 4, master 4, two states 8
    1      4 + 12/N   6 + 12/N              master and states cut
    2      2 + 14/N   2 + 16/N in the step  gradients too; the weights, 2, are freed after the step
    3      16/N       16/N                  weights too (the masters are the weights)

The classic table keeps gradients in half precision; this runtime adds them up in float32. With many ranks the classic
savings are 4x, 8x and N-fold.

Within a step three things come and go:

    activations   from a layer's forward to its backward; under recompute only what is kept, and all of it again from
                  the second forward on
    buffers       gathered units: under zero=2 all, to the end of the step; under zero=3 a unit and the one gathered
                  ahead of need, and those kept from forward to backward
    gradients     under zero=2 and 3 a unit's whole gradient, from its backward to its reduce_scatter
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from samestep.job import Job
from samestep.model import LayerSpec, ParamSpec
from samestep.program import BYTES_OF, SHARD_AXES, Kind, Program, Step, Unit, is_dealt

_STATES = {"adadelta": 2, "adafactor": 0, "adagrad": 1, "asgd": 1, "muon": 1, "rmsprop": 1, "rprop": 2, "sgd": 0}
_MORE_STATES = {"adam": ("amsgrad",), "adamw": ("amsgrad",), "rmsprop": ("momentum", "centered"), "sgd": ("momentum",)}
"""Options that add one each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    """States, and master weights where the model's own are in another dtype."""
    activations: int = 0
    buffers: int = 0
    """The model's registered buffers, and weights gathered from other ranks."""
    host: int = 0
    """Not on the device: what offload keeps in the host's memory, states and master weights. Of no part, and no total."""
    peak_at: str = "at rest"
    """Name of the op at which this much is held."""

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "buffers": self.buffers,
        }

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {**self.parts(), "host": self.host, "peak": self.total, "peak_at": self.peak_at}


def readable(size: float) -> str:
    """Write bytes in the unit that suits them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def classic_bytes_per_param(zero: int, num_shards: int) -> float:
    """Return the ZeRO paper's bytes a parameter: mixed precision, Adam."""
    return (16, 4 + 12 / num_shards, 2 + 14 / num_shards, 16 / num_shards)[zero]


def held_bytes_per_param(zero: int, num_shards: int) -> float:
    """Return this runtime's bytes a parameter: mixed precision, Adam; for zero=2 with the weights gathered."""
    return (18, 6 + 12 / num_shards, 2 + 16 / num_shards, 16 / num_shards)[zero]


def states_per_param(job: Job) -> int:
    """Return how many tensors of a matrix's own shape the optimizer keeps; 2, as Adam's, where nothing is known."""
    name = job.optimizer.name.lower()
    options = [option for option in _MORE_STATES.get(name, ()) if job.optimizer.options.get(option)]
    return _STATES.get(name, 2) + len(options)


def at_rest(program: Program, states_per_param: int = 2, rank: int = 0) -> MemoryUse:
    """Return what `rank` holds between two steps, to the byte.

    `states_per_param` are the optimizer's tensors of a weight's own shape: 2 for Adam, 1 for momentum, 0 for SGD.
    """
    step = program.step
    shard = rank // step.layout.tp % step.layout.num_shards
    if step.zero == 0:
        weights, gradients = _whole(program)
        updated = [(param.numel, step.working_dtype(param)) for param in _trainable(step)]
    elif step.zero == 1:
        weights, gradients = _in_buckets(program)
        updated = [
            (
                _chunk_numel(
                    bucket.numel, bucket.padded_numel // (step.layout.num_shards // bucket.ep), shard // bucket.ep
                ),
                bucket.dtype,
            )
            for bucket in program.buckets
        ]
    else:
        weights, gradients = _in_units(program)
        updated = [(_cut_numel(step, param, shard), step.master_dtype) for param in _trainable(step)]
    master, offload = BYTES_OF[step.master_dtype], step.layout.offload
    # What stands on the host has masters of its own there, whatever dtype the device has.
    kept = sum(
        numel * master * (states_per_param + (offload or working_dtype != step.master_dtype))
        for numel, working_dtype in updated
    )
    optimizer, host = (0, kept) if offload else (kept, 0)
    return MemoryUse(
        weights=weights, gradients=gradients, optimizer=optimizer, buffers=step.model.buffer_bytes, host=host
    )


def during_step(program: Program, states_per_param: int = 2, rank: int = 0) -> MemoryUse:
    """Return what `rank` holds at the op of the step at which it holds most."""
    rest = at_rest(program, states_per_param, rank)
    most = _most(program)
    return replace(
        rest,
        gradients=rest.gradients + most.gradients,
        activations=most.activations,
        buffers=rest.buffers + most.buffers,
        peak_at=most.op,
    )


def _trainable(step: Step) -> Iterator[ParamSpec]:
    return (param for param in step.model.params if param.trainable)


def _weight_bytes(step: Step, trainable: bool) -> int:
    """Bytes of the weights as they stand in the module, uncut."""
    params = (param for param in step.model.params if param.trainable or not trainable)
    return sum(param.numel * BYTES_OF[step.working_dtype(param)] for param in params)


def _whole(program: Program) -> tuple[int, int]:
    """Weights and gradients of zero=0: padded where they lie in buckets."""
    step = program.step
    weights = _weight_bytes(step, trainable=False)
    numel = sum(b.padded_numel for b in program.buckets) or sum(param.numel for param in _trainable(step))
    return weights, numel * BYTES_OF[step.master_dtype]


def _in_buckets(program: Program) -> tuple[int, int]:
    """Weights and gradients of zero=1: whole, padded; frozen weights lie in no bucket."""
    step = program.step
    frozen = _weight_bytes(step, trainable=False) - _weight_bytes(step, trainable=True)
    weights = frozen + sum(b.padded_numel * BYTES_OF[b.dtype] for b in program.buckets)
    return weights, sum(b.padded_numel for b in program.buckets) * BYTES_OF[step.master_dtype]


def _in_units(program: Program) -> tuple[int, int]:
    """Weights and gradients of zero=2 and 3: the rank's part of each unit, padded."""
    step = program.step
    parts = {unit.name: step.layout.num_shards // unit.ep for unit in program.units}
    weights = sum(unit.padded_numel // parts[unit.name] for unit in program.units)
    gradients = sum(unit.padded_grad_numel // parts[unit.name] for unit in program.units)
    return weights * BYTES_OF[step.master_dtype], gradients * BYTES_OF[step.master_dtype]


def _chunk_numel(numel: int, chunk: int, shard: int) -> int:
    """Elements without padding in chunk number `shard` of a flat buffer."""
    return min(max(numel - shard * chunk, 0), chunk)


def _cut_numel(step: Step, param: ParamSpec, shard: int) -> int:
    """Elements without padding that FSDP2 gives shard number `shard`: dim 0 in equal chunks, the last ones short."""
    ep = step.layout.ep if is_dealt(step, param) else 1
    num_shards, shard = step.layout.num_shards // ep, shard // ep
    rows = param.shape[0] if param.shape else 1
    if rows == 0:
        return 0
    return _chunk_numel(rows, -(-rows // num_shards), shard) * (param.numel // rows)


class _Moment(NamedTuple):
    """What is held at an op beyond what is held at rest."""

    op: str
    gradients: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.buffers


class _Held(NamedTuple):
    """Units that are gathered, those of them to be freed once the gather issued ahead has come, and whole gradients."""

    gathered: frozenset[tuple[str, int]] = frozenset()
    leaving: frozenset[str] = frozenset()
    gradients: frozenset[tuple[str, int]] = frozenset()


def _most(program: Program) -> _Moment:
    """Return the op of the step at which most is held; tasks that find the same and do the same are followed once."""
    walk = _Walk(program)
    known: dict[tuple[str, _Held], tuple[_Moment, int, _Held]] = {}
    most: _Moment | None = None
    held, activations = _Held(), 0
    for task in program.stages[0]:
        key = (task.body, held)
        if key not in known:
            known[key] = walk.follow(*key)
        worst, more, held = known[key]
        here = worst._replace(activations=worst.activations + activations)
        most = here if most is None or here.total > most.total else most
        activations += more
    assert most is not None, "a program without tasks"
    return most


class _Walk:
    """Follows activations, gathered units and whole gradients through bodies of a program."""

    def __init__(self, program: Program) -> None:
        self.program, self.step = program, program.step
        # What is dealt to all ranks is cut no further: nobody gathers it, and its gradient is the rank's own.
        cut = tuple(unit for unit in program.units if unit.ep < self.step.layout.num_shards)
        self.starting, self.ending = _by_layer(cut, "first_layer"), _by_layer(cut, "last_layer")
        self.names = {unit.name for unit in program.units}
        self.saved = [saved_bytes(self.step, layer) for layer in self.step.model.layers]

    def follow(self, body: str, held: _Held) -> tuple[_Moment, int, _Held]:
        """Return the worst moment of a body, the activations that it adds to those before it, and what it leaves."""
        step = self.step
        gathered, leaving, gradients = dict(held.gathered), set(held.leaving), dict(held.gradients)
        activations, buffers, whole_gradients = 0, sum(gathered.values()), sum(gradients.values())
        worst = _Moment("", 0, 0, -1)
        frees = Kind.WEIGHT if step.splits_backward else Kind.BACKWARD
        for op in self.program.bodies[body]:
            if op.axis is not None and (op.axis not in SHARD_AXES or op.owner not in self.names):
                continue  # holds nothing of its own
            kept, whole = self.saved[op.layer] if op.layer is not None else (0, 0)
            if op.axis is None:
                buffers -= _drop(gathered, leaving)
            elif op.kind is Kind.ALL_GATHER:
                buffers += op.size_bytes - gathered.get(op.owner, 0)
                gathered[op.owner] = op.size_bytes
                leaving.discard(op.owner)
            if op.kind is Kind.BACKWARD:
                for unit in self.starting.get(op.layer, ()):
                    gradients[unit.name] = unit.padded_grad_numel * BYTES_OF[step.master_dtype]
                whole_gradients = sum(gradients.values())
            activations += kept if op.kind is Kind.FORWARD else whole - kept if op.kind is Kind.RECOMPUTE else 0
            if not worst.op or whole_gradients + activations + buffers > worst.total:
                worst = _Moment(op.name, whole_gradients, activations, buffers)
            if op.kind is Kind.FORWARD:
                leaving |= {unit.name for unit in self.ending.get(op.layer, ()) if not unit.keep_after_forward}
            elif op.kind is frees:
                activations -= whole
                if step.zero == 3:
                    buffers -= _drop(gathered, {unit.name for unit in self.starting.get(op.layer, ())})
            elif op.kind is Kind.REDUCE_SCATTER:
                whole_gradients -= gradients.pop(op.owner, 0)
        left = _Held(frozenset(gathered.items()), frozenset(leaving), frozenset(gradients.items()))
        return worst, activations, left


def saved_bytes(step: Step, layer: LayerSpec) -> tuple[int, int]:
    """Activations of a micro-batch that the layer keeps after its forward, and that its backward reads.

    The loss stands behind the last layer, and works in master precision.
    """
    one = step.microbatch_samples * BYTES_OF[step.compute_dtype]
    whole = layer.saved_elements
    recompute = step.layout.recompute if layer.is_block else "none"
    kept = {"none": whole, "selective": layer.saved_selective_elements, "full": layer.input_elements}[recompute]
    loss = layer.loss_elements * step.microbatch_samples * BYTES_OF[step.master_dtype]
    return kept * one + loss, max(kept, whole) * one + loss


def _by_layer(units: tuple[Unit, ...], field: str) -> dict[int | None, list[Unit]]:
    found: dict[int | None, list[Unit]] = {}
    for unit in units:
        found.setdefault(getattr(unit, field), []).append(unit)
    return found


def _drop(gathered: dict[str, int], names: set[str]) -> int:
    """Free the units of these names, and forget the names; return the bytes."""
    freed = sum(gathered.pop(name, 0) for name in names)
    names.clear()
    return freed
