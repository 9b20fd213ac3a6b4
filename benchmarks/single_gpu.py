"""Llamas on one GPU: several sizes, micro-batches and recompute policies, as rows that `foresight.py` reads.

Each setting is a job of its own: two micro-batches a step, so that gradients are added up, in bf16, AdamW. One worker runs
them all, one after the other, and gives the memory back in between. `metric_memory_gib` is what torch's allocator had given
away at most; what it had taken from the driver stands in the notes. A setting that runs out of memory is a row too.
"""

from __future__ import annotations

import csv
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from live import Live
from step_times import Losses, timed

from samestep import Job, Layout
from samestep.datasets import batches
from samestep.hardware import Hardware
from samestep.models.spec import ModelSpec
from samestep.program.update_rules import states_per_param
from samestep.runtime.processes import workers
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.runtime.step_observer import StepBatch
from samestep.training.out_of_memory import is_shortage
from samestep.training.workload import Workload
from samestep.wings.plan.simulation.simulate import predict

SEQUENCE = 2048
VOCAB = 32000
MICROBATCHES = (1, 4, 16)
RECOMPUTES = ("none", "selective", "full")
GROUPS = 3
"""Groups into which the timed steps are divided."""


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama."""

    layers: int
    hidden: int
    heads: int
    intermediate: int


SIZES = {
    "llama-125m": Size(12, 768, 12, 2048),
    "llama-350m": Size(24, 1024, 16, 2816),
    "llama-1b": Size(22, 2048, 32, 5632),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs."""

    size: str
    microbatch: int
    recompute: str

    @property
    def layout(self) -> Layout:
        """One rank."""
        return Layout(f"dp=1 microbatch={self.microbatch} recompute={self.recompute}")

    def job(self, sequence: int = SEQUENCE) -> Job:
        """Two micro-batches of it."""
        one = SIZES[self.size]
        config = {
            "vocab_size": VOCAB,
            "hidden_size": one.hidden,
            "intermediate_size": one.intermediate,
            "num_hidden_layers": one.layers,
            "num_attention_heads": one.heads,
            "num_key_value_heads": one.heads,
            "max_position_embeddings": sequence,
        }
        return Job(
            model={"source": "hf:llama", "config": config},
            data={"sequence_length": sequence, "held_out": 0.0},
            train={"global_batch": 2 * self.microbatch, "watch_every": 0},  # no timed step does a part of itself again
            optimizer={"name": "adamw"},
            numerics={"precision": "bf16"},
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """What was measured; of a setting that ran out of memory nothing."""

    setting: Setting
    spec: ModelSpec
    step_s: float = 0.0
    allocated_bytes: int = 0
    reserved_bytes: int = 0


def settings(sizes: Sequence[str]) -> tuple[Setting, ...]:
    """List what runs of these sizes."""
    return tuple(Setting(*one) for one in product(sizes, MICROBATCHES, RECOMPUTES))


def measured(chosen: Sequence[Setting], steps: int, device: str, sequence: int = SEQUENCE) -> list[Seen]:
    """Run settings on one device, one after the other."""
    return workers.run_workers(_work, (tuple(chosen), steps, sequence), ranks=1, device=device)


def _work(place: RankInfo, chosen: Sequence[Setting], steps: int, sequence: int) -> list[Seen]:
    return [run(place, setting, steps, sequence) for setting in chosen]


def run(place: RankInfo, setting: Setting, steps: int, sequence: int) -> Seen:
    """Run one setting on a rank; one that runs out of memory is no error."""
    workload = Workload(setting.job(sequence))
    try:
        seen = _steps(place, setting, workload, steps)
    except Exception as error:
        if not is_shortage(error):
            raise
        seen = Seen(setting, workload.spec)
    empty(place.device)
    return seen


def empty(device: torch.device) -> None:
    """Give the memory of what ran last back to a device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _steps(place: RankInfo, setting: Setting, workload: Workload, steps: int) -> Seen:
    on_gpu = place.device.type == "cuda"
    before = 0 if on_gpu else Live().count_all()  # a worker on CPUs begins as a copy of this process, with its tensors
    run = Run(workload.source, setting.layout, workload.job, place)
    run.prepare(workload.example)
    stream = batches(workload.dataset, workload.job)
    found = timed(place.device, _losses(run, stream), GROUPS, max(1, steps // GROUPS))
    most, reserved = found.allocated_bytes, found.reserved_bytes
    if not on_gpu:  # no allocator tells: one more step is watched
        live = Live()
        live.count_all()
        with live.watching():
            run.step(next(stream))
        most = reserved = live.most - before
    return Seen(setting, workload.spec, found.step_s, most, reserved)


def _losses(run: Run, stream: Iterator[StepBatch]) -> Losses:
    for batch in stream:
        report = run.step(batch)
        yield lambda report=report: report.loss


HEAD = ("size", "micro-batch", "recompute", "predicted ms", "measured ms", "error %", "predicted GiB", "GiB", "error %", "reserved GiB")  # fmt: skip


def compared(seen: Sequence[Seen], machine: Hardware, sequence: int = SEQUENCE) -> list[tuple[object, ...]]:
    """Return the lines of the table: predicted beside measured."""
    lines: list[tuple[object, ...]] = []
    for one in seen:
        setting = one.setting
        job = setting.job(sequence)
        said = predict(one.spec, job, setting.layout, machine, states_per_param(job))
        tensors = said.peak.total - said.peak.overhead
        head = (setting.size, setting.microbatch, setting.recompute, said.step_s * 1e3)
        if not one.step_s:
            fits = "fits, as predicted" if said.fits else "does not fit, as said"
            lines.append((*head, "out of memory", fits, tensors / 2**30, "-", "-", "-"))
            continue
        lines.append(
            (
                *head, one.step_s * 1e3, 100 * (said.step_s / one.step_s - 1), tensors / 2**30,
                one.allocated_bytes / 2**30, 100 * (tensors / one.allocated_bytes - 1), one.reserved_bytes / 2**30,
            )
        )  # fmt: skip
    return lines


def write_rows(path: Path, columns: Sequence[str], seen: Sequence[Seen], gpu: str, sequence: int = SEQUENCE) -> None:
    """Write what was measured in the columns of published rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for number, one in enumerate(seen, 1):
            writer.writerow(_row(number, one, gpu, sequence))


def _row(number: int, one: Seen, gpu: str, sequence: int) -> dict[str, object]:
    setting, size = one.setting, SIZES[one.setting.size]
    tokens = 2 * setting.microbatch * sequence
    row: dict[str, object] = {
        "id": f"single-{number:04d}", "source": "samestep on one GPU", "url_or_repo_path": "benchmarks/single_gpu.py",
        "model": f"Llama {setting.size}", "n_params": one.spec.num_params, "n_layers": size.layers,
        "hidden": size.hidden, "heads": size.heads, "kv_heads": size.heads, "ffn": size.intermediate, "vocab": VOCAB,
        "seq_len": sequence, "gpu": gpu, "n_gpus": 1, "gpus_per_node": 1, "precision": "BF16", "tp": 1, "pp": 1,
        "micro_batch": setting.microbatch, "global_batch": 2 * setting.microbatch, "recompute": setting.recompute,
        "notes": f"torch {torch.__version__}; OOM",
    }  # fmt: skip
    if one.step_s:
        row |= {
            "metric_step_time_s": f"{one.step_s:.6g}",
            "metric_tokens_per_s_per_gpu": f"{tokens / one.step_s:.6g}",
            "metric_memory_gib": f"{one.allocated_bytes / 2**30:.6g}",
            "notes": f"torch {torch.__version__}; memory is what was allocated at most, "
            f"{one.reserved_bytes / 2**30:.4g} GiB reserved; median step",
        }
    return row
