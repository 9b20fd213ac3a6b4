"""The `Program` of one optimizer step on one pipeline stage, and the ledger of its collectives.

[Note: one step, five readers]  `plan` prices a program, `simulate` plays it on a clock, `train` carries it out, `verify`
proves it, and `explain` compares its predicted times with measured ones. Because all read the same program, a prediction can be
checked: the collectives that torch recorded must equal those listed here. That comparison is the ledger.

A program is the list of tasks of one stage. A task (`ops.py`) points at a body, a list of ops (`ops.py`). The
strategies write the bodies and decide buckets and units (`buckets.py`) without torch; the runtime follows them and
decides nothing anew.

```
stage 0:  F.first ─ B.first ─ F.last ─ B.last ─ U             tasks
                                        │
          B.last = backward:layers.1, reduce:bucket.0, ...     a body: ops in the order in which they are issued
```
Ops of one stream run in order: compute is one stream, and each axis is another. An op also waits for the latest earlier
ops named in its `after`. Compute waits for every exposed op issued before it (`Op.is_exposed`), because those collectives
lie within a layer, whose compute is a single op. All other communication overlaps with compute: prefetched gathers,
reductions during backward, messages between stages.

Between two steps it has exchanges of replicas after an update, and weights that arrive while the next forwards run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import is_below
from samestep.program.buckets import Bucket
from samestep.program.holding import SHARDS, Owners
from samestep.program.ops import BYTES_OF, UPDATE_BODY, BodyKey, Op, OpKind, Ops, Task, is_forward, starts_step
from samestep.program.ranks import tie_of
from samestep.program.step import StepSpec
from samestep.program.units import Unit, make_units


class LedgerRow(NamedTuple):
    """One collective as the program predicts it or as torch recorded it: kind, dtype, bytes and owner."""

    kind: str
    dtype: str
    size_bytes: int
    owner: str


def ledger_key(group: str, row: LedgerRow) -> str:
    """Return the key of the ledger's list that a row belongs to: its group, or for a receive its group and owner.

    Each owner's receives have a list of their own, because they are posted early, as soon as a buffer is free.
    """
    return f"{group} recv {row.owner}" if row.kind == OpKind.RECV else group


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One step on one pipeline stage: its tasks, the bodies they point at, and the buckets and units of the runtime."""

    step: StepSpec
    bodies: Mapping[BodyKey, Ops]
    """Ops of each body, in order of issue."""
    tasks: tuple[Task, ...] = ()
    """Tasks in the order in which they run; the last one is the update."""
    buckets: tuple[Bucket, ...] = ()
    units: tuple[Unit, ...] = ()
    owners: tuple[Owners, ...] = ()
    """Who updates the weights that ZeRO shards and their optimizer needs whole."""
    chunks: tuple[range, ...] = ()
    """Layers of each virtual stage (chunk) of this rank; empty where one rank runs all layers."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks in a group of each axis that the program communicates over."""
    host_modules: tuple[HostModule, ...] = ()
    """Modules whose weights are copied to the device for each of their calls."""
    followed: tuple[FollowedWeights, ...] = ()
    """The weights that stages send each other after a step, since models on other stages follow them."""
    exchange: Ops = ()
    """Ops after some updates, with which independently trained replicas exchange their weights: codes or sums of moves, the outer step,
    and under zero=1 the weights, which are gathered once more."""

    def with_bodies(self, rewrite: Callable[[BodyKey, Ops], Ops], **changes: Any) -> Program:
        """Return the program with `rewrite` applied to each body, and other fields changed."""
        bodies = {key: rewrite(key, ops) for key, ops in self.bodies.items()}
        return replace(self, bodies=bodies, **changes)

    def with_update(self, rewrite: Callable[[Ops], Ops], **changes: Any) -> Program:
        """Return the program with `rewrite` applied to the body of the update, and other fields changed."""
        return replace(self, bodies={**self.bodies, UPDATE_BODY: rewrite(self.bodies[UPDATE_BODY])}, **changes)

    def ops(self) -> Iterator[tuple[Task, Op]]:
        """Yield every op of the step with its task, in the order of issue."""
        for task in self.tasks:
            for op in self.bodies[task.body]:
                yield task, op

    def ledger(self, group_of: Callable[[str], str] = str) -> dict[str, list[LedgerRow]]:
        """Return the predicted collectives of each group, in order of issue.

        Lists of different groups may interleave in any way. `group_of` returns the name of the group that serves an
        axis, since two axes over the same ranks share one group.
        """
        rows: dict[str, list[LedgerRow]] = {}
        for _, op in self.ops():
            if op.axis is not None:
                row = LedgerRow(str(op.kind), op.dtype, op.size_bytes, op.owner)
                rows.setdefault(ledger_key(group_of(op.axis), row), []).append(row)
        return rows


def with_exchange(program: Program) -> Program:
    """Return the program of a step after which replicas exchange their weights."""
    return program.with_update(lambda ops: (*ops, *program.exchange))


def amid_steps(program: Program) -> Program:
    """Return the program as it runs between other steps.

    The weights that zero=1 gathers after the update of the step before arrive while the first forwards run, each layer's
    before its forward begins.
    """
    names = {f"{OpKind.ALL_GATHER}:{bucket.name}" for bucket in program.buckets}

    def is_late(op: Op) -> bool:
        return op.name in names and f"{OpKind.UPDATE}:optimizer" in op.after

    late = [op for op in program.bodies[UPDATE_BODY] if is_late(op)]
    if not late or program.step.sharing.trains_apart:
        return program
    params = {param.name: param for param in program.step.model.params}
    readers: dict[int, list[str]] = {}
    for bucket in program.buckets:
        members = [params[member.name] for member in bucket.members]
        for layer in {layer for member in members for layer in (member.layer, *(use.layer for use in member.uses))}:
            readers.setdefault(layer, []).append(f"{OpKind.ALL_GATHER}:{bucket.name}")
    gathered = {op.name for op in late}

    def rewrite(key: BodyKey, ops: Ops) -> Ops:
        if key == UPDATE_BODY:
            return tuple(op for op in ops if not is_late(op))
        if is_forward(key) and starts_step(key):
            ops = tuple(
                op.but(after=(*op.after, *(name for name in readers.get(op.layer, ()) if name in gathered)))
                if op.kind is OpKind.FORWARD and op.layer is not None
                else op
                for op in ops
            )
        return (*(op.but(after=()) for op in late), *ops) if key == program.tasks[0].body else ops

    return program.with_bodies(rewrite)


@dataclass(frozen=True, slots=True)
class FollowedWeights:
    """The weights that one stage sends to another one after each step.

    A teacher or target network m of a trained model w moves after each step,

        m = d m + (1 - d) w

    and its layers run where the pipeline has them, which need not be the stages of w. All weights of stage i that weights of stage j
    follow are one buffer, which stage i broadcasts to stage j after the update. Under zero=2 and zero=3 it holds the shards of a data rank,
    each of the size of the largest, so that data ranks need not know each other's.
    """

    source: int
    """Stage of the trained weights."""
    target: int
    """Stage of the weights that follow them."""
    members: tuple[tuple[str, int], ...]
    """Name of each weight that follows, and the number of elements of its place in the buffer."""

    @property
    def axis(self) -> str:
        """The axis of the two stages."""
        return tie_of(sorted((self.source, self.target)))

    @property
    def owner(self) -> str:
        """The name of the buffer in the program."""
        return f"followed.{self.source}.{self.target}"

    @property
    def numel(self) -> int:
        """Number of elements of the buffer."""
        return sum(numel for _, numel in self.members)


def weights_sent(
    params: Iterable[ParamSpec], stages_of: Mapping[str, tuple[int, ...]], layout: Layout
) -> tuple[FollowedWeights, ...]:
    """Return the weights that stages send each other, in the order in which they do; `params` are those of all stages."""
    sent: dict[tuple[int, int], list[tuple[str, int]]] = {}
    shards = layout.num_shards if layout.zero >= 2 else 1
    for param in params:
        sources = stages_of.get(param.follows, ())
        for target in stages_of[param.name] if sources else ():
            if target not in sources:
                numel = -(-param.rows // shards) * param.row_numel
                sent.setdefault((sources[0], target), []).append((param.name, numel))
    return tuple(FollowedWeights(source, target, tuple(members)) for (source, target), members in sorted(sent.items()))


def send_followed(followed: Iterable[FollowedWeights], stage: int, dtype: str) -> Iterator[Op]:
    """Yield the broadcasts in which a stage takes part."""
    for sent in followed:
        if stage in (sent.source, sent.target):
            op = Op(
                kind=OpKind.BROADCAST,
                owner=sent.owner,
                axis=sent.axis,
                dtype=dtype,
                after=(f"{OpKind.UPDATE}:optimizer",),
            )
            yield op.sized(sent.numel)


@dataclass(frozen=True, slots=True)
class HostModule:
    """A module whose weights are copied to the device for each of its calls.

    A reference, a teacher or a reward model is read in a part of a step only. `model.offload`, or `offload=` of `parallelize`, names it:
    the host then holds its weights, and each call of one of its modules copies the weights of that module to the device and frees them
    when it returns. A backward through a call, which frozen weights have where the input takes a gradient, copies them once more.

    ```
    forward    copy blocks.0 ─ F ─ free ─ copy blocks.1 ─ F ─ free ...
    ```
    Under zero=2 and 3 the host holds a rank's shard of each unit, which is copied for each gather. Weights that the model's own code reads
    outside of a module's call stay on the device; so do weights of a unit that has others, and of the head whose logits the loss makes.
    """

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
        params_here = [params[name] for name in unit.params]
        if unit.modules == ("",) or unit.is_read_by_loss or not all(is_named(step, param) for param in params_here):
            continue
        for path in unit.modules:
            own_params = [p for p in params_here if any(is_below(name, path) for name in (p.name, *p.aliases))]
            goes_back = any(param.takes_gradient for param in own_params)
            yield HostModule(path, tuple(param.name for param in own_params), unit.name, goes_back)


def units_on_host(units: Sequence[Unit], modules: Sequence[HostModule]) -> list[Unit]:
    """Return the units of zero=2 and 3 whose shards are on the host."""
    names = {module.unit for module in modules}
    return [unit for unit in units if unit.name in names]


def shard_bytes(step: StepSpec, unit: Unit) -> int:
    """Return the bytes of a rank's shard of a unit, in master precision."""
    return (unit.padded_numel * BYTES_OF[step.master_dtype] + unit.padded_packed_bytes) // unit.num_shards


def host_bytes(step: StepSpec, units: Sequence[Unit], modules: Sequence[HostModule]) -> int:
    """Return the bytes of a rank's weights that are on the host."""
    if units:
        return sum(shard_bytes(step, unit) for unit in units_on_host(units, modules))
    names = {name for module in modules for name in module.params}
    return sum(step.weight_bytes(param) for param in step.model.params if param.name in names)
