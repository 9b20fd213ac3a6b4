"""One published row, forecast from its configuration alone: its programs, the clock, the memory model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from cells import Row, SkippedError
from published import Case, case_of
from published_recompute import repeated

from samestep.errors import InputError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory import memory_use
from samestep.models.spec import ModelSpec
from samestep.program.holding import REPLICATE, SHARDS
from samestep.program.ops import BYTES_OF, COPIES, UPDATE_BODY, BodyKey, Op, OpKind, Ops
from samestep.program.program import Program
from samestep.program.step import StepSpec
from samestep.strategies import ProgramBuilder
from samestep.strategies.expert import SAME
from samestep.wings.plan.simulation import clock, cost, reserved_memory
from samestep.wings.plan.simulation.accuracy import class_of

UNREADABLE = (SkippedError, InputError, ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""What a row that makes no sense may end in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row, predicted or skipped. Times in seconds, memory in bytes; zero where there is none."""

    id: str
    source: str
    machine: str = ""
    reason: str = ""
    """Why it was skipped."""
    group: tuple[str, ...] = ()
    layout: str = ""
    predicted_s: float = 0.0
    measured_s: float = 0.0
    predicted_bytes: int = 0
    measured_bytes: float = 0.0
    fits: bool = True
    """Predicted: with what no tensor can have."""
    out_of_memory: bool = False
    kind: str = ""
    """Class of the machine (`class_of`)."""
    devices: int = 0
    spread: float = 0.0
    """Part of a step by which the source says that its results vary."""


def programs_for(case: Case, recompute: str) -> tuple[Program, ...]:
    """Write the step of a case on each stage.

    Raises:
        InputError: the layout is refused.
    """
    numerics: dict[str, object] = {"precision": case.precision, "deterministic": case.deterministic}
    numerics |= {"optimizer_states": "8bit"} if case.packs_states else {}
    job = Job(train={"global_batch": case.global_batch}, numerics=numerics)
    layout = Layout(**{**case.words, "recompute": recompute})
    programs = _builder_of(case, job, min(case.machine.devices_per_node, layout.world_size)).programs(layout)

    case = replace(case, hides_exchanges=case.hides_exchanges and programs[0].step.num_microbatches > 1)
    known: dict[int, Op] = {}  # bodies and stages share ops, and still do

    def rewrite(_: BodyKey, ops: Ops) -> Ops:
        for op in ops:
            if id(op) not in known:
                known[id(op)] = _in_its_numerics(op, case)
        return tuple(known[id(op)] for op in ops)

    if (
        case.products
        or case.chunks > 1
        or case.sent_rows < 1
        or case.reduces_narrow
        or case.hides_exchanges
        or case.waits_for_sums
    ):
        programs = tuple(program.with_bodies(rewrite) for program in programs)
    if case.adds_apart:
        programs = tuple(_adding_apart(program, case) for program in programs)
    if not case.updates:
        programs = tuple(program.with_bodies(_without_update) for program in programs)
    if case.repeats_half and recompute == "selective":
        programs = tuple(_repeating_half(program, case) for program in programs)
    if case.compiles:  # what is repeated and kept is the library's, and not what our graphs repeat
        programs = tuple(replace(program, step=program.step.but(fuses=case.compiles)) for program in programs)
    if case.is_lean or case.is_narrow:
        programs = tuple(replace(program, step=_without_masters(program.step)) for program in programs)
    return programs


_BUILDERS: dict[tuple[object, ...], ProgramBuilder] = {}
"""Builders of the latest models, by the model's identity, the numerics and the ranks of a node."""
_MOST_BUILDERS = 16


def _builder_of(case: Case, job: Job, per_node: int) -> ProgramBuilder:
    """Return the builder of a case's programs, which shares what it can with those of cases before."""
    key = id(case.model), case.precision, case.deterministic, case.packs_states, per_node
    if key not in _BUILDERS:
        while len(_BUILDERS) >= _MOST_BUILDERS:
            del _BUILDERS[next(iter(_BUILDERS))]
        _BUILDERS[key] = ProgramBuilder(
            case.model, job, per_node
        )  # which keeps the model, so that no other one has its identity
    return _BUILDERS[key].of_batch(job)


def _adding_apart(program: Program, case: Case) -> Program:
    """Let the gradients of each micro-batch be added to what is there in 16 bits, and that to the sums in float32."""
    step, machine = program.step, case.machine
    flops_a_byte = (
        machine.flops_per_s[step.compute_dtype]
        * machine.sustained
        / machine.memory_bytes_per_s
        / machine.memory_efficiency
    )

    def added(op: Op) -> Ops:
        if op.kind is not OpKind.BACKWARD or op.layer is None:
            return (op,)
        weights = sum(
            p.inner * p.columns * p.count for p in step.model.layers[op.layer].products if p.factors == "weight"
        )
        flops = round(weights * ADDED_APART_BYTES * flops_a_byte)
        return op, Op(kind=OpKind.BACKWARD, owner=f"{op.owner} sums", dtype=step.compute_dtype, flops=flops)

    return program.with_bodies(lambda _, body: tuple(one for op in body for one in added(op)))


ADDED_APART_BYTES = 10
"""Bytes that DeepSpeed's BF16_Optimizer moves for the gradient of a weight besides a kernel that adds it to the float32 sum: it makes a float32
copy (read 2, write 4), and adds that (read 4 and 4, write 4), of which such a kernel moves 8 (deepspeed/runtime/bf16_optimizer.py)."""


def _without_update(_: BodyKey, ops: Ops) -> Ops:
    return tuple(op for op in ops if op.kind is not OpKind.UPDATE)


def _repeating_half(program: Program, case: Case) -> Program:
    """Let products run again with what is recomputed, at what products reach."""
    step = program.step

    def again(op: Op) -> Ops:
        if op.kind is not OpKind.RECOMPUTE or op.layer is None:
            return (op,)
        dtype = step.compute_dtype if op.layer in case.wide_layers else case.products or step.compute_dtype
        reached = case.machine.efficiency.get(dtype, 1.0) * cost.REACHED
        flops = sum(product.flops for product in repeated(step.model.layers[op.layer])) * step.microbatch_samples
        return op, Op(kind=OpKind.RECOMPUTE, owner=f"{op.owner} products", dtype=dtype, flops=round(flops / reached))

    return program.with_bodies(lambda _, body: tuple(one for op in body for one in again(op)))


class _PlainStep(StepSpec):
    """A step whose weights, gradients and states are all of the compute dtype."""

    @property
    def master_dtype(self) -> str:
        return self.compute_dtype


def _without_masters(step: StepSpec) -> StepSpec:
    return _PlainStep(**{one.name: getattr(step, one.name) for one in fields(step)})


def _in_its_numerics(op: Op, case: Case) -> Op:
    if op.axis is None and op.flops and case.products:
        return op if op.layer in case.wide_layers else op.but(dtype=case.products)
    if op.axis == "ep" and op.kind is OpKind.ALL_TO_ALL:
        return op.but(size_bytes=round(op.size_bytes * case.sent_rows), is_exposed=not case.hides_exchanges)
    if op.kind in _SUMS and op.axis not in (None, "tp"):
        narrow = 2 if case.reduces_narrow and op.dtype == "float32" else 1
        waits = case.waits_for_sums and op.axis in (REPLICATE, SHARDS, SAME)
        return op.but(size_bytes=op.size_bytes // narrow, is_exposed=op.is_exposed or waits)
    return op.but(size_bytes=op.size_bytes // case.chunks) if op.axis == "tp" else op


_SUMS = (OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE)
"""Kinds of ops that add up gradients of replicas."""


def _choices(case: Case) -> list[tuple[str, Case]]:
    """Return the ways to recompute and the cases with a micro-batch that the row leaves open, the least work first."""
    recomputes = [case.recompute] if case.recompute else ["none", "selective", "full"]
    sized = [
        replace(case, words={**case.words, "microbatch": size}) if size else case for size in case.microbatches or (0,)
    ]
    return [(recomputes[0], tried) for tried in sized] + [(recompute, sized[-1]) for recompute in recomputes[1:]]


def written(case: Case) -> tuple[tuple[Program, ...], TimedStep]:
    """Write the step of a case, and those that the clock plays; of a long one shorter ones alone, which hold as much: once a pipeline is
    full, what is held repeats itself as well."""
    choices = _choices(case)
    if len(choices) > 1 or case.is_lean:
        programs = chosen_programs(case)
        return programs, timed(case, programs)
    recompute, said = choices[0]
    layout = Layout(**{**said.words, "recompute": recompute})
    samples = -(-case.global_batch // layout.dp)
    if short := _from_shorter(said, layout, -(-samples // (layout.microbatch or samples))):
        return short.longer, short
    key = (*_written_of(said, layout), said.global_batch)
    if key not in _WHOLE:
        programs = chosen_programs(case)
        _WHOLE[key] = programs, TimedStep(programs)
    return _WHOLE[key]


_WHOLE: dict[tuple[object, ...], tuple[tuple[Program, ...], TimedStep]] = {}
"""Steps of cases that leave nothing open, and what is played of them: those of machines with as many devices a node are the same."""


def chosen_programs(case: Case) -> tuple[Program, ...]:
    """Write the step with the row's recompute and micro-batch; what it does not name, as is least work and fits."""
    choices = _choices(case)
    programs: tuple[Program, ...] = ()
    for recompute, tried in choices:
        programs = programs_for(tried, recompute)
        if len(choices) == 1 or _fits(case, _peak(case, programs) * (RAN if not case.recompute else 1 / FILLED)):
            return programs
    # Some other way was found as well: by one device the host's memory, by many the least memory.
    return programs if programs[0].step.layout.world_size > 1 or not case.is_lean else programs_for(case, choices[0][0])


@dataclass(frozen=True, slots=True)
class TimedStep:
    """The programs of a step that a clock plays; of a long one those of two shorter ones, from which its time follows."""

    programs: tuple[Program, ...]
    longer: tuple[Program, ...] = ()
    more: float = 0.0
    """How many times the difference of the two comes on top of the longer one."""

    scores: dict[tuple[bool, str], tuple[clock.Score, ...]] = field(default_factory=dict, compare=False)
    """What is played at the speeds of several machines, by whether they overlap communication, and their library."""
    known: dict[Hardware, tuple[float, ...]] = field(default_factory=dict, compare=False)
    """Seconds of what is played, by machine."""

    def step_s(self, machine: Hardware) -> float:
        """Return the predicted seconds of the whole step."""
        if machine not in self.known:
            self.known[machine] = tuple(score.step_s(machine) for score in self._scores(machine))
        short_s, *longer_s = self.known[machine]
        return longer_s[0] + self.more * (longer_s[0] - short_s) if longer_s else short_s

    def _scores(self, machine: Hardware) -> tuple[clock.Score, ...]:
        key = machine.overlap, machine.library
        if key not in self.scores:
            steps = [programs for programs in (self.programs, self.longer) if programs]
            self.scores[key] = tuple(clock.Score(programs, machine) for programs in steps)
        return self.scores[key]


PARTS = ("compute", "within layers", "between stages", "between replicas", "update", "host")
"""Parts of a step: communication of tp, cp and ep is within layers; copies between host and device are the host's."""


def busy_parts(step: TimedStep, machine: Hardware) -> list[float]:
    """Return for how much of a step each of its `PARTS` is busy on the first stage, alone on its queue: parts overlap, and stages wait."""
    short, *longer = (_busy_s(programs[0], machine) for programs in (step.programs, step.longer) if programs)
    step_s = step.step_s(machine)
    if not longer:
        return [short[part] / step_s for part in PARTS]
    return [(longer[0][part] + step.more * (longer[0][part] - short[part])) / step_s for part in PARTS]


def _busy_s(program: Program, machine: Hardware) -> dict[str, float]:
    times, busy_s = Counter(task.body for task in program.tasks), defaultdict[str, float](float)
    for body, ops in program.bodies.items():
        for op in ops if times[body] else ():
            busy_s[_part_of(op)] += times[body] * cost.seconds(op, program, machine)
    return busy_s


def _part_of(op: Op) -> str:
    if op.axis is not None:
        return {"tp": PARTS[1], "cp": PARTS[1], "ep": PARTS[1], "pp": PARTS[2]}.get(op.axis, PARTS[3])
    return PARTS[4] if op.kind is OpKind.UPDATE else PARTS[5] if op.kind in COPIES else PARTS[0]


def timed(case: Case, programs: tuple[Program, ...]) -> TimedStep:
    """Return what the clock plays of a case: once a pipeline is full, each further round of micro-batches takes as long as the last.

    Of a lean run on several devices the host updates what does not fit on them.
    """
    layout, step = programs[0].step.layout, programs[0].step
    if case.is_lean and layout.world_size > 1 and len(programs) == 1:
        if not _fits(case, memory_use.during_step(programs[0], case.states_per_param).total / FILLED):
            programs = (replace(programs[0], step=step.but(layout=layout.but(offload=True))),)
        return TimedStep(programs)
    return _from_shorter(case, layout, step.num_microbatches) or TimedStep(programs)


def _from_shorter(case: Case, layout: Layout, count: int) -> TimedStep | None:
    """Return the two shorter steps from which the time of one of so many micro-batches follows; None of one that is short itself."""
    short = FULL_ROUNDS * max(layout.pp, LEAST_ROUND)
    long = short + max(layout.pp, LEAST_ROUND)
    each = layout.dp * (layout.microbatch or 0)
    if count < 2 * long or not each or case.global_batch % each:
        return None
    key = (*_written_of(case, layout), short)
    if key not in _SHORTER:  # whatever the global batch is
        words = {**case.words, "microbatch": layout.microbatch or 0}
        first, second = (
            programs_for(replace(case, words=words, global_batch=each * number), layout.recompute)
            for number in (short, long)
        )
        _SHORTER[key] = TimedStep(first, second)
    return replace(_SHORTER[key], more=(count - long) / (long - short))


_SHORTER: dict[tuple[object, ...], TimedStep] = {}
"""The two shorter steps by what is written of a case; cases that differ in their global batch alone share them, and what was played."""


def _written_of(case: Case, layout: Layout | None = None) -> tuple[object, ...]:
    """Return what the programs of a layout depend on, but for the global batch; without a layout, which may be chosen, the machine too."""
    machine: object = case.machine
    if layout is not None and not case.repeats_half:
        machine = min(case.machine.devices_per_node, layout.world_size)
    return (
        _ModelKey(case.model), machine, case.sent_rows, case.hides_exchanges, case.waits_for_sums, case.chunks, case.reduces_narrow,
        case.precision, case.products, case.wide_layers,
        case.deterministic, case.repeats_half, case.is_lean, case.is_narrow, case.packs_states, case.compiles, case.offloads,
        case.updates, case.adds_apart, layout,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _ModelKey:
    """A model as a key, by its identity: comparing models of hundreds of layers would take longer than what is found by them."""

    model: ModelSpec

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ModelKey) and self.model is other.model


FULL_ROUNDS, LEAST_ROUND = 2, 2
"""Rounds of micro-batches, each as many as there are stages or this number, after which all rounds are alike."""
RAN = 0.95
"""Part of the predicted memory that a run may well have needed: where a row says nothing of recompute, its run took place with none if this
much fits. Predictions of memory are off by 6 % in the middle of all rows."""
FILLED = 0.95
"""Part of the memory that is filled by choice: nobody plans to the last byte."""
WORKSPACE_BYTES = 128 * 2**20
"""What libraries of products and attention hold of a GPU's memory for themselves, allocated like any tensor."""


def _peak(case: Case, programs: Sequence[Program]) -> int:
    """Bytes of the fullest stage, which may be an inner one; or of the one that was measured."""
    stages = programs if case.stage is None else (programs[case.stage],)
    held = max(_held(case, program) for program in map(_shortened, stages))
    if case.updates_lists:
        held = max(held, *(_updating(case, program) for program in stages))
    return held + WORKSPACE_BYTES * (case.machine.num_units > 0)


def _counted(case: Case, programs: Sequence[Program]) -> int:
    """Bytes of the peak as the row counts them: what the allocator takes grows up to all that the device has, where tensors have less."""
    held = _peak(case, programs)
    if not case.is_reserved or not _fits(case, held):
        return held
    workspace = WORKSPACE_BYTES * (case.machine.num_units > 0)
    taken = max(reserved_memory.reserved_bytes(one, case.states_per_param).reserved for one in programs) + workspace
    return min(max(held, taken), case.machine.memory_bytes - case.machine.reserved_bytes)


def _held(case: Case, program: Program) -> int:
    """Bytes of one stage. Of a lean run, what does not fit is left out.

    One device leaves the states in pages of the host, then uses gradients up in the backward; several leave all that they
    hold between steps on the host.
    """
    if not case.is_lean:
        held = memory_use.during_step(program, case.states_per_param)
        return held.total - (held.weights + held.gradients + held.optimizer) * case.offloads
    tasks = program.tasks
    twice = replace(program, tasks=(*(task for task in tasks if task.body != UPDATE_BODY), *tasks))
    held = memory_use.during_step(twice, case.states_per_param)  # so that gradients are there beside activations
    rest = memory_use.at_rest(program, case.states_per_param)
    shed = (
        (0, rest.total) if program.step.layout.world_size > 1 else (0, rest.optimizer, rest.optimizer + rest.gradients)
    )
    tried = [held.total - part for part in shed]
    return next((size for size in tried if _fits(case, size / FILLED)), tried[-1])


def _updating(case: Case, program: Program) -> int:
    """Bytes of an update of lists of tensors: all that is held between steps, and the square roots of all second moments."""
    step = program.step
    moments = step.updated_numel[0] * BYTES_OF[step.master_dtype] // step.layout.num_shards
    rest = memory_use.at_rest(program, case.states_per_param)
    return rest.total + moments


def _shortened(program: Program) -> Program:
    """Leave out the middle of a long step: what is held repeats itself, if each chunk has as many tasks of every kind left out."""
    layout, tasks = program.step.layout, program.tasks
    most, chunks = 4 * layout.pp * layout.virtual_stages + 4, range(layout.virtual_stages)
    kinds = {task.kind for task in tasks if task.body != UPDATE_BODY}
    for last in range(len(tasks) - most, max(len(tasks) - 2 * most, most), -1):
        counts = Counter((task.chunk, task.kind) for task in tasks[most:last])
        if all(len({counts[chunk, kind] for kind in kinds}) == 1 for chunk in chunks):
            return replace(program, tasks=(*tasks[:most], *tasks[last:]))
    return program


def _fits(case: Case, peak: float) -> bool:
    return peak + case.machine.reserved_bytes <= case.machine.memory_bytes


_KNOWN: dict[tuple[object, ...], tuple[str, TimedStep, int]] = {}
"""Layout, what the clock plays, and bytes of configurations that were predicted: many rows of a source have the same."""


def known(case: Case) -> tuple[str, TimedStep, int]:
    """Return the layout of a case, what the clock plays of it, and its predicted bytes: zero where none were measured."""
    key = (
        *_written_of(case), *case.words.items(), case.recompute, case.microbatches, case.global_batch, case.stage,
        case.is_reserved, case.states_per_param, case.updates_lists, bool(case.memory_bytes or case.out_of_memory),
    )  # fmt: skip
    if key not in _KNOWN:
        programs, step = written(case)
        held = _counted(case, programs) if case.memory_bytes or case.out_of_memory else 0
        _KNOWN[key] = str(programs[0].step.layout), step, held
    return _KNOWN[key]


def predict(row: Row) -> Outcome:
    """Predict one row."""
    source = row.get("source") or row["file"]
    try:
        case = case_of(row)
        layout, step, held = known(case)
        predicted_s = step.step_s(case.machine) if case.step_s else 0.0
    except (SkippedError, InputError) as error:
        return Outcome(id=row.get("id") or "", source=source, reason=str(error).partition("\n")[0])
    except UNREADABLE as error:
        return Outcome(id=row.get("id") or "", source=source, reason=f"cannot be read: {type(error).__name__}: {error}")
    return Outcome(
        id=case.id,
        source=source,
        machine=case.machine.name,
        group=case.group,
        layout=layout,
        predicted_s=predicted_s,
        measured_s=case.step_s or 0.0,
        predicted_bytes=held,
        measured_bytes=case.memory_bytes or 0.0,
        fits=_fits(case, held),
        out_of_memory=case.out_of_memory,
        kind=class_of(case.machine, devices := Layout(layout).world_size),
        devices=devices,
        spread=case.spread,
        reason="" if case.step_s or held else "nothing was measured",
    )


def rounded(value: float) -> float:
    """Round for a table."""
    return round(value, 3)
