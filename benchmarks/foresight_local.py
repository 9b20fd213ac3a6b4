"""Predict the default job on this machine, run it, and print both side by side.

    python benchmarks/foresight_local.py [--hardware NAME|FILE] [--json FILE] [--markdown FILE] [--steps N]

First the machine is measured (`samestep measure`, a minute or two; `--hardware` leaves it out). Then eight layouts of the
default job on up to two ranks are predicted from that profile, and run. Per layout:

    step        seconds, predicted and the median of the measured; the layouts take turns, so that what else the machine
                does hits all of them
    states      bytes of weights, gradients and optimizer of rank 0 between steps: exactly the predicted, or `NO`
    in the step bytes of all tensors that rank 0 has alive at most in a step (`live.py`), beyond those between steps:
                activations, logits, what a backward works on and what is sent

and over all of them Kendall's tau of the order, and how many of the pairs that differ by more than a tenth are in order.

    python benchmarks/foresight_local.py --device cuda [--rows FILE] [--sizes NAME ...]

Where a GPU is at hand, Llamas of several sizes, micro-batches and recompute policies run on it alone. Beside the table of
predicted and measured, step time and peak memory become rows that `foresight.py` reads: `results/single-gpu.csv`.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import single_gpu
import torch
from foresight import as_lines, kendall
from live import Live
from torch.distributed.tensor import DTensor

from samestep import Job, Layout, benchmark_hardware, hardware, load
from samestep.datasets import batches
from samestep.errors import InputError
from samestep.memory.memory_use import at_rest
from samestep.program.update_rules import states_per_param
from samestep.runtime.processes import workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.workload import Workload
from samestep.wings.plan.simulation.simulate import predict

LAYOUTS = (
    "dp=1",
    "dp=2",
    "dp=2 microbatch=4",
    "dp=2 zero=1",
    "dp=2 zero=2",
    "dp=2 zero=3",
    "dp=1 tp=2",
    "dp=1 pp=2 microbatch=8",
)
ROUNDS = 4
JOB = Path(__file__).parent.parent / "jobs" / "default.toml"
ROWS = Path(__file__).parent / "results" / "single-gpu.csv"
SAMPLE = Path(__file__).parent / "rows" / "sample.csv"


@dataclass(frozen=True, slots=True)
class Measured:
    """What rank 0 saw."""

    step_s: tuple[float, ...]
    weights: int
    gradients: int
    optimizer: int
    in_step: int
    """Bytes of all tensors at most, beyond those between steps."""


def work(place: RankInfo, workload: Workload, layout: Layout, steps: int) -> Measured:
    """Take one step that is not timed, `steps` that are, and one that is watched."""
    run = Run(workload.source, layout, workload.job, place)
    run.prepare(workload.example)
    live, times = Live(), []
    rest = 0
    for batch in batches(workload.dataset, workload.job):
        if batch.step == steps + 1:
            rest = live.count_all()
            with live.watching():
                run.step(batch)
            break
        times.append(run.step(batch).step_s)
    return Measured(tuple(times[1:]), *_held(run), live.most - rest)


def _held(run: Run) -> tuple[int, int, int]:
    """Bytes of the storages of weights and gradients, and of the optimizer's tensors."""
    params = [p._local_tensor if isinstance(p, DTensor) else p for p in run.model.parameters()]
    grads = [p.grad._local_tensor for p in run.model.parameters() if isinstance(p.grad, DTensor)]
    grads += [piece.gradient() for piece in run.updater.pieces]
    states = sum(
        value.numel() * value.element_size()
        for piece in run.updater.pieces
        for value in run.updater.optimizer.state[piece.value].values()
        if value.shape == piece.value.shape
    )
    states += sum(p.value.numel() * p.value.element_size() for p in run.updater.pieces if p.target is not None)
    return _storages(params), _storages(grads), states


def _storages(tensors: Sequence[torch.Tensor]) -> int:
    held = (t.untyped_storage() for t in tensors if not t.is_meta)  # weights of other stages stay on meta
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def measured(job: Job, steps: int) -> dict[str, Measured]:
    """Run every layout in turns; times of all turns together."""
    workload = Workload(job)
    found: dict[str, Measured] = {}
    for _ in range(ROUNDS):
        for words in LAYOUTS:
            layout = Layout(words)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*share . core")
                one = workers.run_workers(work, (workload, layout, steps), ranks=layout.world_size)
            before = found[words].step_s if words in found else ()
            found[words] = Measured((*before, *one.step_s), one.weights, one.gradients, one.optimizer, one.in_step)
    return found


HEAD = ("layout", "predicted ms", "measured ms", "error %", "states", "predicted in step B", "measured B", "error %", "of peak %")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, predict, run, print."""
    parser = argparse.ArgumentParser(description="predict runs on this machine, and run them")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument("--hardware", metavar="NAME|FILE", help="do not measure the machine")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="timed steps of each turn; default: 6")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures; of CPUs")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for a document")
    parser.add_argument(
        "--rows", type=Path, default=ROWS, metavar="FILE", help="of a GPU; default: results/single-gpu.csv"
    )
    parser.add_argument("--sizes", nargs="+", choices=single_gpu.SIZES, default=list(single_gpu.SIZES), help="of a GPU")
    words = parser.parse_args(arguments)
    words.steps = max(1, words.steps)
    if words.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu works")
    on_gpu = words.device != "cpu" and torch.cuda.is_available()
    try:
        if words.hardware:
            machine = hardware.load(words.hardware)
        else:
            with tempfile.TemporaryDirectory() as folder:
                ranks, device = (1, "cuda") if on_gpu else (2, "cpu")
                machine = benchmark_hardware(out=Path(folder) / "this-machine.toml", ranks=ranks, device=device)
    except InputError as error:
        parser.error(str(error))
    head, lines = _on_a_gpu(words, machine) if on_gpu else _on_cpus(words, machine)
    print("\n".join(as_lines(head, lines)))
    if words.markdown:
        words.markdown.write_text("\n".join(as_lines(head, lines, markdown=True)) + "\n", encoding="utf-8")
    return 0


Table = tuple[Sequence[str], Sequence[Sequence[object]]]


def _on_a_gpu(words: argparse.Namespace, machine: hardware.Hardware) -> Table:
    """Run Llamas on one GPU, and write them as rows."""
    seen = single_gpu.measured(single_gpu.settings(words.sizes), words.steps, "cuda")
    with SAMPLE.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file))
    single_gpu.write_rows(words.rows, columns, seen, torch.cuda.get_device_name())
    print(f"{len(seen)} rows: {words.rows}")
    return single_gpu.HEAD, single_gpu.compared(seen, machine)


def _on_cpus(words: argparse.Namespace, machine: hardware.Hardware) -> Table:
    """Run the layouts of the default job."""
    job = load(JOB)
    model, states = Workload(job).spec, states_per_param(job)
    lines: list[Sequence[object]] = []
    pairs, record = [], []
    for layout_words, found in measured(job, words.steps).items():
        said = predict(model, job, Layout(layout_words), machine, states)
        held = at_rest(said.programs[0], states)
        seen_s = statistics.median(found.step_s)
        exact = (held.weights, held.gradients, held.optimizer) == (found.weights, found.gradients, found.optimizer)
        in_step = said.memory[0].total - said.memory[0].overhead - held.total
        pairs.append((said.step_s, seen_s))
        lines.append(
            (
                layout_words, said.step_s * 1e3, seen_s * 1e3, 100 * (said.step_s / seen_s - 1),
                "exact" if exact else "NO", in_step, found.in_step, 100 * (in_step / found.in_step - 1),
                100 * ((in_step + held.total) / (found.in_step + held.total) - 1),
            )
        )  # fmt: skip
        record.append(
            {"layout": layout_words, "said": said.to_record(), "held": held.to_record(), "seen": asdict(found)}
        )
    apart = _apart(pairs)
    print(
        f"order: tau {kendall(pairs):.2f} over {len(pairs)} layouts; of {len(apart)} pairs of them more than a tenth apart "
        f"{sum(apart)} are in the right order; profile {machine.name}"
    )
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return HEAD, lines


def _apart(pairs: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether two layouts are in the right order, of all whose measured times differ by more than a tenth."""
    return [
        (one[0] < other[0]) == (one[1] < other[1])
        for one, other in itertools.combinations(pairs, 2)
        if abs(one[1] - other[1]) > 0.1 * min(one[1], other[1])
    ]


if __name__ == "__main__":
    sys.exit(main())
