"""The only place where the goldens touch the product: a rename there changes a line here, and no golden file.

What is written is behaviour in words of its own: ops, sizes, seconds. Bodies are numbered by their content, so that how
the product names or shares them changes nothing.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from samestep import Job, Layout, hardware
from samestep.errors import LayoutError
from samestep.memory import memory_use
from samestep.models.presets import preset, resnet
from samestep.models.spec import ModelSpec
from samestep.program.ops import Op
from samestep.program.program import Program
from samestep.strategies import programs_of
from samestep.wings.plan.simulation import clock

_SMALL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 96}
_EXPERTS = {**_SMALL, "intermediate": 40, "kv_heads": 2, "experts": 8}
MODELS: dict[str, Callable[[], ModelSpec]] = {
    "llama": lambda: preset("llama3-8b", 16, {**_SMALL, "intermediate": 80, "kv_heads": 2}),
    "gpt2-tied": lambda: preset("gpt2", 16, {**_SMALL, "positions": 16}),
    "llama-tied": lambda: preset("llama3.2-1b", 16, {**_SMALL, "intermediate": 80, "kv_heads": 2}),
    "dropping": lambda: preset("bert-large", 16, {**_SMALL, "positions": 16}),
    "mixtral": lambda: preset("mixtral-8x7b", 16, _EXPERTS),
    "shared-experts": lambda: preset(
        "deepseek-v2-lite", 16,
        {**_EXPERTS, "kv_heads": 0, "head_dim": 8, "latent_rank": 12, "rotary_dim": 4, "expert_intermediate": 24},
    ),
    "wide-llama": lambda: preset("llama3-8b", 256, {**_SMALL, "hidden": 1024, "heads": 8, "intermediate": 2816}),
    "gpt2": lambda: preset("gpt2"),
    "mixtral-8x7b": lambda: preset("mixtral-8x7b"),
    "llama3-8b": lambda: preset("llama3-8b"),
    "resnet50": lambda: resnet("resnet50"),
}  # fmt: skip
"""Four blocks each, but for the presets as published at the end; none of them needs torch."""


class Case(NamedTuple):
    """A golden program: what is computed, where, and how much of it is written."""

    model: str
    layout: str
    global_batch: int = 16
    numerics: dict[str, Any] = {}  # noqa: RUF012 - never changed
    ranks_per_node: int | None = None
    machine: str = "h100x8"
    is_whole: bool = True
    """Every op is written, not counts and a digest alone."""

    @property
    def title(self) -> str:
        """What tells this case from the others."""
        words = [f"{key}={value}" for key, value in self.numerics.items()]
        words += [f"ranks_per_node={self.ranks_per_node}"] if self.ranks_per_node else []
        words += [self.machine] if self.machine != "h100x8" else []
        return " ".join(["##", self.model, f'"{self.layout}"', f"batch={self.global_batch}", *words])


def text_of(case: Case) -> str:
    """Write what the strategies, the clock and the memory model make of a case, or why it is refused."""
    job = Job(train={"global_batch": case.global_batch}, numerics={"precision": "bf16", **case.numerics})
    layout = Layout(case.layout)
    try:
        programs = programs_of(MODELS[case.model](), job, layout, case.ranks_per_node)
    except LayoutError as error:
        return f"refused: {error}"
    timeline = clock.play(programs, hardware.load(case.machine))
    lines = [f"step {timeline.step_s * 1e6:.4f} us"]
    known: dict[str, int] = {}
    for stage, program in enumerate(programs):
        lines.append(f"# stage {stage} of {layout.pp}")
        lines += _of_stage(program, layout, known, case.is_whole)
    return "\n".join(lines)


def expanded_text_of(model: ModelSpec, layout: str) -> str:
    """Write every op of a step, one after the other, for a layout of one stage."""
    job = Job(train={"global_batch": 32}, numerics={"precision": "bf16"})
    (program,) = programs_of(model, job, Layout(layout))
    timeline, use = clock.play([program], hardware.load("h100x8")), memory_use.during_step(program)
    lines = [f"## {program.step.layout}: step {timeline.step_s * 1e6:.4f} us, peak {use.total} B at {use.peak_at}"]
    for task, op in program.ops():
        detail = f"{op.size_bytes} B {op.dtype} {op.axis}" if op.axis else f"{op.flops} FLOPs"
        lines.append(f"{task.body}[{task.microbatch}] {op.name} {detail} <- {' '.join(op.after)}")
    return "\n".join(lines) + "\n"


def _of_stage(program: Program, layout: Layout, known: dict[str, int], is_whole: bool) -> Iterator[str]:
    """Write one stage; bodies that were written before, by another stage of the case, are only named."""
    for states in (2, 1):
        use = memory_use.during_step(program, states)
        parts = ", ".join(f"{name} {size}" for name, size in use.parts().items() if size)
        yield f"peak, {states} states: {use.total} B at {use.peak_at}: {parts}"
    yield f"at start: {memory_use.during_init(program).total} B"
    yield f"at rest: {' '.join(str(memory_use.at_rest(program, 2, rank).total) for rank in (0, layout.world_size - 1))} B"
    yield f"axes: {' '.join(f'{axis}={ranks}' for axis, ranks in sorted(program.axes.items()))}"
    yield f"chunks: {' '.join(f'{part.start}-{part.stop - 1}' for part in program.chunks)}"
    geometry = [*_buckets(program), *_units(program)]
    yield from geometry if is_whole else [f"geometry: {len(geometry)} buckets and units, {_digest(geometry)}"]
    yield from _counts(program)
    tasks, written = [], []
    for task in program.tasks:
        body = "\n".join(map(_op, program.bodies[task.body]))
        if body not in known:
            known[body] = len(known)
            written.append(f"body {known[body]}:\n{body}")
        tasks.append(f"{task.kind}{task.microbatch}{f'.{task.chunk}' if task.chunk else ''}={known[body]}")
    yield f"tasks: {' '.join(tasks)}"
    yield from written if is_whole else [f"bodies: {len(written)} new ones, {_digest(written)}"]


def _op(op: Op) -> str:
    size = f"{op.size_bytes} B {op.dtype} {op.axis}" if op.axis else f"{op.flops} FLOPs {op.size_bytes} B {op.dtype}"
    layer = "" if op.layer is None else f" @{op.layer}"
    return f"{op.name}{layer} {size}{' implied' if op.implied else ''} <- {' '.join(op.after)}".rstrip()


def _buckets(program: Program) -> Iterator[str]:
    for bucket in program.buckets:
        holding, ep = bucket.holding, program.step.layout.ep if bucket.holding.is_expert_sharded else 1
        marks = ["tied"] * bool(holding.tied_over) + ["partial"] * bool(holding.partial_over)
        axis = "dp_expert" if ep > 1 else "dp_shard"
        yield " ".join([
            f"{bucket.name}: {bucket.padded_numel} of {bucket.dtype} over {axis}, replicas={holding.num_copies}",
            f"ep={ep}", *marks, *(f"{part.name}@{part.offset}+{part.numel}" for part in bucket.members),
        ])  # fmt: skip


def _units(program: Program) -> Iterator[str]:
    for unit in program.units:
        marks = {
            "kept": unit.keep_after_forward, "gathered-again": unit.gather_in_backward, "spans-calls": unit.is_called_again,
            "ends-early": unit.input_takes_gradient,
        }  # fmt: skip
        yield " ".join([
            f"{unit.name}: {unit.padded_numel} of {unit.dtype}, gradients {unit.padded_grad_numel}, over {unit.shard_axis}",
            f"ep={program.step.layout.num_shards // unit.num_shards} layers {unit.first_layer}-{unit.last_layer} called {unit.called[0]}-{unit.called[1]}",
            f"ahead={unit.prefetch}", *(mark for mark, is_set in marks.items() if is_set), *unit.params,
            f"in {' '.join(unit.modules)}",
        ])  # fmt: skip


def _counts(program: Program) -> Iterator[str]:
    """Count ops of each kind and what is sent over each axis, and name the lists of the ledger."""
    count, size = Counter[str](), Counter[str]()
    for _, op in program.ops():
        key = f"{op.kind} {op.axis} {op.dtype}" if op.axis else str(op.kind)
        count[key] += 1
        size[key] += op.size_bytes if op.axis else op.flops
    yield f"ops: {'; '.join(f'{count[key]} {key} {size[key]}' for key in sorted(count))}"
    yield f"ledger: {'; '.join(f'{key}: {len(rows)}' for key, rows in sorted(program.ledger().items()))}"


def _digest(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
