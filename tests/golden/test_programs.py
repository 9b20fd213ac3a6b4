"""Golden programs: what a change of the strategies, the clock or the memory model does to known cases.

A change here is either meant, and then `python -m tests.golden.test_programs` writes the file anew and the difference
is read in review; or it is not, and the test has caught it.
"""

from __future__ import annotations

import json
from pathlib import Path

from samestep import Job, Layout, clock, hardware, memory
from samestep.model import ModelSpec
from samestep.strategies import program_of

FOLDER = Path(__file__).parent
LAYOUTS = [
    "dp=1 microbatch=8",
    "dp=2",
    "dp=4 microbatch=4 recompute=full",
    "dp=4 reduce=root",
    "dp=4 zero=1",
    "dp=4 zero=2 microbatch=4",
    "dp=4 zero=3 microbatch=4 accumulate=full",
    "dp=4 zero=3 recompute=selective",
    "dp_replicate=2 dp_shard=2",
    "tp=2 recompute=full",
    "tp=2 sequence_parallel recompute=full",
    "dp=2 tp=2 zero=3 sequence_parallel microbatch=4",
]


def predicted() -> str:
    """Write out every op of each layout, and what the clock and the memory model make of it."""
    model = ModelSpec.from_json((FOLDER / "llama.json").read_text())
    machine = hardware.load("h100x8")
    lines = []
    for text in LAYOUTS:
        job = Job(train={"global_batch": 32}, numerics={"precision": "bf16"})
        program = program_of(model, job, Layout.parse(text))
        timeline, use = clock.play([program], machine), memory.during_step(program)
        lines.append(
            f"## {program.step.layout}: step {timeline.step_s * 1e6:.4f} us, peak {use.total} B at {use.peak_at}"
        )
        for task, op in program.ops():
            detail = f"{op.size_bytes} B {op.dtype} {op.axis}" if op.axis else f"{op.flops} FLOPs"
            lines.append(f"{task.body}[{task.microbatch}] {op.name} {detail} <- {' '.join(op.after)}")
    return "\n".join(lines) + "\n"


def test_predictions_are_what_they_were() -> None:
    assert predicted() == (FOLDER / "programs.txt").read_text()


def write() -> None:
    """Trace the default job's model, and write both files."""
    from samestep import catalog
    from samestep import job as jobs

    spec = catalog.model_spec(jobs.load(FOLDER.parents[1] / "jobs" / "default.toml"))
    (FOLDER / "llama.json").write_text(json.dumps(json.loads(spec.to_json()), indent=1) + "\n")
    (FOLDER / "programs.txt").write_text(predicted())


if __name__ == "__main__":
    write()
