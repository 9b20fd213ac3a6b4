"""Predict the default job on this machine, run it, and print both side by side.

    python benchmarks/foresight_local.py [--hardware NAME|FILE] [--json FILE] [--markdown FILE] [--steps N]

First the machine is measured (`samestep measure`, about a minute; `--hardware` leaves it out). Then eight layouts of the
default job on up to two ranks are predicted from that profile, and run. Per layout:

    step        seconds, predicted and the median of the measured; the layouts take turns, so that what else the machine
                does hits all of them
    states      bytes of weights, gradients and optimizer of rank 0 between steps: exactly the predicted, or `NO`
    activations bytes that autograd keeps of rank 0 at most, weights left out

and over all of them Kendall's tau of the order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from foresight import as_lines, kendall
from torch.distributed.tensor import DTensor

from samestep import Job, Layout, hardware, load, measure
from samestep.datasets import batches
from samestep.errors import SamestepError
from samestep.memory import at_rest, states_per_param
from samestep.prediction import predict
from samestep.runtime import launch
from samestep.runtime.joining import Place
from samestep.runtime.run import Run
from samestep.training import Workload

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
ROUNDS = 2
JOB = Path(__file__).parent.parent / "jobs" / "default.toml"


@dataclass(frozen=True, slots=True)
class Measured:
    """What rank 0 saw."""

    step_s: tuple[float, ...]
    weights: int
    gradients: int
    optimizer: int
    activations: int


class _Kept:
    """A tensor that autograd keeps; counted by its storage as long as this lives."""

    def __init__(self, tensor: torch.Tensor, counter: Activations) -> None:
        self.tensor, self.counter = tensor, counter
        self.key = tensor.untyped_storage().data_ptr()
        counter.hold(self.key, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self.counter.free(self.key, self.tensor.untyped_storage().nbytes())


class Activations:
    """The most bytes that autograd has kept at one time, weights left out."""

    def __init__(self) -> None:
        self.most = self._now = 0
        self._count: Counter[int] = Counter()

    def hold(self, key: int, size: int) -> None:
        self._now += 0 if self._count[key] else size
        self._count[key] += 1
        self.most = max(self.most, self._now)

    def free(self, key: int, size: int) -> None:
        self._count[key] -= 1
        self._now -= 0 if self._count[key] else size

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Kept:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, torch.nn.Parameter) or isinstance(tensor, DTensor):
            return tensor
        return _Kept(tensor, self)

    @staticmethod
    def unpack(kept: torch.Tensor | _Kept) -> torch.Tensor:
        return kept.tensor if isinstance(kept, _Kept) else kept


def work(place: Place, workload: Workload, layout: Layout, steps: int) -> Measured:
    """Take one step that is not timed, `steps` that are, and one that is watched."""
    run = Run(workload.source, layout, workload.job, place)
    run.prepare(workload.example)
    counter, times = Activations(), []
    for batch in batches(workload.dataset, workload.job):
        if batch.step == steps + 1:
            with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
                run.step(batch)
            break
        times.append(run.step(batch).step_s)
    return Measured(tuple(times[1:]), *_held(run), counter.most)


def _held(run: Run) -> tuple[int, int, int]:
    """Bytes of the storages of weights and gradients, and of the optimizer's tensors."""
    params = [p._local_tensor if isinstance(p, DTensor) else p for p in run.model.parameters()]
    grads = [p.grad._local_tensor for p in run.model.parameters() if isinstance(p, DTensor) and p.grad is not None]
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
            layout = Layout.parse(words)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*share . core")
                one = launch.run_workers(work, (workload, layout, steps), ranks=layout.world_size)
            before = found[words].step_s if words in found else ()
            found[words] = Measured((*before, *one.step_s), one.weights, one.gradients, one.optimizer, one.activations)
    return found


HEAD = ("layout", "predicted ms", "measured ms", "error %", "states", "predicted act. B", "measured act. B", "error %")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, predict, run, print."""
    parser = argparse.ArgumentParser(description="predict the default job on this machine, and run it")
    parser.add_argument("--hardware", metavar="NAME|FILE", help="do not measure the machine")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed steps of each turn; default: 10")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for a document")
    words = parser.parse_args(arguments)
    try:
        if words.hardware:
            machine = hardware.load(words.hardware)
        else:
            with tempfile.TemporaryDirectory() as folder:
                machine = measure(Path(folder) / "this-machine.toml", ranks=2, device="cpu")
    except SamestepError as error:
        parser.error(str(error))
    job = load(JOB)
    model, states = Workload(job).spec, states_per_param(job)
    taken = measured(job, max(1, words.steps))
    lines, pairs, record = [], [], []
    for layout_words, found in taken.items():
        said = predict(model, job, Layout.parse(layout_words), machine, states)
        held = at_rest(said.programs[0], states)
        seen_s = statistics.median(found.step_s)
        exact = (held.weights, held.gradients, held.optimizer) == (found.weights, found.gradients, found.optimizer)
        kept = said.memory[0].activations
        pairs.append((said.step_s, seen_s))
        lines.append(
            (
                layout_words, said.step_s * 1e3, seen_s * 1e3, 100 * (said.step_s / seen_s - 1),
                "exact" if exact else "NO", kept, found.activations, 100 * (kept / found.activations - 1),
            )
        )  # fmt: skip
        record.append(
            {"layout": layout_words, "said": said.to_record(), "held": held.to_record(), "seen": asdict(found)}
        )
    print("\n".join(as_lines(HEAD, lines)))
    print(f"order: tau {kendall(pairs):.2f} over {len(pairs)} layouts, profile {machine.name}")
    if words.json:
        words.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if words.markdown:
        words.markdown.write_text("\n".join(as_lines(HEAD, lines, markdown=True)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
