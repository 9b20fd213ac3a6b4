"""The numbers of each step, on the terminal, in `metrics.jsonl`, and in trackers such as TensorBoard; and its FLOPs.

`metrics.jsonl` has one JSON object for each logged step; a number that is not finite is written as null, since JSON has
no word for it. When a run resumes, the lines after the resumed step are removed first, so that every step has at most
one line. Every step is logged, or those that `run.log_every` divides, the first and the last; a step with a note, or
after which validation losses are taken (`train.evaluate_every`), always is.

TFLOP/s, and the fraction of the device's peak (MFU), follow from the floating-point operations of a step:

    FLOPs of a step = samples x sum over layers (forward + backward - 3 x those that attention masks)

The forward counts 2 for each multiplication and addition of a matrix product; the backward twice that, or once where
the weight is not trained; recompute is not counted (Chowdhery et al. 2022, arXiv:2204.02311). The positions that a
causal attention masks are half of its products, and of packed documents more. The kernel skips them, so they are not
counted, in the forward or in the backward. A count that includes them, as in many published tables, gives a higher MFU
for the same step.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from samestep import hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.output.durable_files import LastingStream, write_whole
from samestep.program.ops import COMPUTE_DTYPE, TF32
from samestep.runtime.guards.unusual_steps import MASKED
from samestep.runtime.recording.sums import StepSums
from samestep.runtime.step_report import StepReport
from samestep.training.trackers import Tracker


@dataclass(frozen=True, slots=True)
class Speed:
    """The FLOPs of one step over all devices, and the peak of one device."""

    flops: int
    devices: int
    peak_flops_per_s: float | None
    """The peak FLOP/s of one device; None where neither a measured profile nor a data sheet gives it."""

    def tflops_per_device(self, step_s: float) -> float:
        """Return the FLOP/s of one device in units of 10^12, from the seconds of a step."""
        return self.flops / step_s / self.devices / 1e12 if step_s else 0.0

    def mfu(self, step_s: float) -> float | None:
        """Return the fraction of the device's peak that a step reaches (model FLOPs utilisation); None without a peak.

        None too where a step is faster than the peak: a profile that was measured on a busy machine is too low.
        """
        share = self.tflops_per_device(step_s) * 1e12 / self.peak_flops_per_s if self.peak_flops_per_s else None
        return None if share is None or share > 1 else share


def speed_of(model: ModelSpec, job: Job, layout: Layout, device: torch.device) -> Speed:
    """Return the FLOPs of a job's step, and the peak of `device` in the job's precision where it is known."""
    return Speed(model.sample_flops * job.train.global_batch, layout.world_size, _peak(job, device))


def _peak(job: Job, device: torch.device) -> float | None:
    """Return the FLOP/s of a device by its data sheet, or, on a CPU, as `measure` has measured them."""
    is_gpu = device.type == "cuda"
    machine = hardware.of_device(torch.cuda.get_device_name(device)) if is_gpu else hardware.own()
    if machine is None:
        return None
    dtype = COMPUTE_DTYPE[job.numerics.precision]
    rates = machine.flops_per_s
    return rates.get(TF32 if dtype == "float32" and job.numerics.tf32 else dtype, rates.get(dtype))


FILE = "metrics.jsonl"
_LINES = 40
"""The approximate number of step lines that a run prints, besides the live line."""


WORTH_A_WORD = 0.05
"""The least share of a step spent waiting for data that its line names."""


class _Numbers(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields.get("numbers", ""))


class Screen:
    """A run's progress on standard output: a live line where it is a terminal, and a permanent line every few steps."""

    def __init__(
        self,
        first_step: int,
        last_step: int,
        speed: Speed | None = None,
        log_every: int | None = None,
        counted: str = "tok",
    ) -> None:
        """Print about `_LINES` steps unless `log_every` says how often; `counted` names the items that the loss
        counts."""
        if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
            reconfigure(errors="replace")  # a sample holds any character, a terminal may not
        stream: Any = LastingStream(sys.stdout)
        # A forked worker cannot send to the notebook of its parent, which copies the text of this worker's standard output.
        in_cell = None if type(sys.stdout).__module__.startswith("ipykernel.") else False
        self._console = Console(file=stream, highlight=False, emoji=False, soft_wrap=True, force_jupyter=in_cell)
        self._every = log_every or max(1, (last_step - first_step) // _LINES)
        self._speed, self._counted = speed, counted
        self._first, self._last = first_step + 1, last_step
        self._said_masked = False
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(20),
            _Numbers(),
            TimeRemainingColumn(),
        )
        is_live = self._console.is_terminal and not os.environ.get("CI")
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not is_live)
        self._task = self._progress.add_task("steps", total=last_step, completed=first_step)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the live line while the body of the `with` statement runs."""
        with self._progress:
            yield

    def show(self, report: StepReport) -> None:
        """Update the live line with one step, and print a permanent line where one is due."""
        numbers = (
            f"loss {report.loss:.4f}  {_format_named(report)}norm {report.grad_norm:.3f}  lr {report.lr:.2e}  "
            f"{report.tokens_per_s:,.0f} {self._counted}/s  {_rate(self._speed, report)}{report.memory_bytes / 2**20:,.0f} MiB"
            f"{_format_reserved(report)}{_format_wait(report)}"
        )
        self._progress.update(self._task, completed=report.step, numbers=numbers)
        if report.step % self._every == 0 or report.step in (self._first, self._last) or report.stop:
            self.say(f"step {report.step:>6}/{self._last}  {numbers}")
        if report.note and not (self._said_masked and report.note == MASKED):
            self.say(f"step {report.step}: {'skipped, ' if report.skipped else ''}{report.note}")
            self._said_masked |= report.note == MASKED
        for remark in report.remarks:
            self.say(f"step {report.step}: {remark}")

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._console.print(text, markup=False)


def _format_named(report: StepReport) -> str:
    """Return the terms and values of the loss as a part of a line."""
    named = [*report.terms.items(), *report.values.items()]
    return "".join(f"{name} {value:.4f}  " for name, value in named)


def _rate(speed: Speed | None, report: StepReport) -> str:
    """Return the FLOP/s of a device and, where its peak is known, the fraction of it, as a part of a line."""
    if speed is None:
        return ""
    rate, share = speed.tflops_per_device(report.step_s), speed.mfu(report.step_s)
    text = f"{rate:,.1f} TFLOP/s" if rate >= 1 else f"{rate * 1e3:,.1f} GFLOP/s"
    return f"{text}  " if share is None else f"{text} ({share:.1%})  "


def _format_reserved(report: StepReport) -> str:
    """Return the memory that the allocator reserves beyond what it has allocated, as a part of a line."""
    return "" if report.reserved_bytes is None else f" ({report.reserved_bytes / 2**20:,.0f} reserved)"


def _format_wait(report: StepReport) -> str:
    """Return the share of a step that waited for data, as text; empty where it is small."""
    share = report.data_wait_s / report.step_s if report.step_s else 0.0
    return f"  {share:.0%} waiting for data" if share >= WORTH_A_WORD else ""


def scalars_of(report: StepReport, speed: Speed | None) -> dict[str, float]:
    """Return the numbers of one step under their names in trackers."""
    scalars = {
        "train/loss": report.loss,
        "train/grad_norm": report.grad_norm,
        "train/lr": report.lr,
        "perf/tokens_per_s": report.tokens_per_s,
        "perf/step_ms": report.step_s * 1e3,
        "perf/data_wait_ms": report.data_wait_s * 1e3,
        "memory/peak_bytes": report.memory_bytes,
        **{f"terms/{name}": loss for name, loss in report.terms.items()},
        **{f"values/{name}": value for name, value in report.values.items()},
        **{f"held_out/{name}": loss for name, loss in report.held_out.items()},
    }
    if report.reserved_bytes is not None:
        scalars["memory/reserved_bytes"] = report.reserved_bytes
    if speed is not None:
        scalars["perf/tflops_per_device"] = speed.tflops_per_device(report.step_s)
        if (share := speed.mfu(report.step_s)) is not None:
            scalars["perf/mfu"] = share
    return scalars


class Metrics:
    """The file `metrics.jsonl` of a run folder, and the trackers that get the same steps; without a folder these alone."""

    def __init__(
        self,
        folder: Path | None,
        first_step: int,
        trackers: Sequence[Tracker] = (),
        speed: Speed | None = None,
        log_every: int | None = None,
    ) -> None:
        self.last_loss = None if folder is None else _cut_after(folder / FILE, first_step)
        """The loss of the last step in the file; None where there is none, or where it was not finite."""
        self._file: io.FileIO | None = None if folder is None else (folder / FILE).open("ab", buffering=0)
        if self._file is not None:
            weakref.finalize(self, self._file.close)  # a loop may end without close
        self._pending = b""
        """Lines that did not fit on the disk."""
        self.straggler: dict[str, Any] = {}
        """A slow rank that the next line names."""
        self._first, self._every, self._speed, self._trackers = first_step + 1, log_every or 1, speed, trackers

    def write(self, report: StepReport, is_last: bool = False, sums: StepSums | None = None) -> None:
        """Append one step, unless `log_every` leaves it out; `sums` are of the newest step whose times are known."""
        is_due = is_last or report.step == self._first or report.step % self._every == 0
        if not is_due and not report.note and not report.held_out and not self.straggler:
            return
        row: dict[str, Any] = {
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens": report.tokens,
            "step_s": report.step_s,
            "tokens_per_s": report.tokens_per_s,
            "data_wait_s": report.data_wait_s,
            "memory_bytes": report.memory_bytes,
        }
        if report.reserved_bytes is not None:
            row["reserved_bytes"] = report.reserved_bytes
        scalars = scalars_of(report, self._speed) | (sums.scalars() if sums else {})
        row |= {name: scalars[f"perf/{name}"] for name in ("tflops_per_device", "mfu") if f"perf/{name}" in scalars}
        row = _finite(row)
        for key in ("terms", "values", "held_out"):
            if named := getattr(report, key):
                row[key] = _finite(named)
        if sums is not None and sums.step:
            row["time"] = _finite(sums.to_record())
        if self.straggler:
            row["straggler"], self.straggler = self.straggler, {}
        if report.skipped:
            row["skipped"] = True
        if report.note:
            row["note"] = report.note
        self._append(json.dumps(row, allow_nan=False) + "\n")
        self.last_loss = row["loss"]
        for tracker in self._trackers:
            tracker.add(report, scalars)

    def _append(self, lines: str) -> None:
        """Append whole lines; those that do not fit on the disk are kept, and appended when it has room."""
        if self._file is None:
            return
        self._pending += lines.encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            written = 0
            while written < len(self._pending):
                written += self._file.write(self._pending[written:])
        except OSError as error:
            if self._pending == lines.encode():
                warnings.warn(f"{self._file.name} cannot be written: {error.strerror}; its lines wait", stacklevel=3)
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            return
        self._pending = b""

    def sync(self) -> None:
        """Return once every line is on disk, or the disk refuses it."""
        self._append("")
        with contextlib.suppress(OSError):
            if self._file is not None:
                os.fsync(self._file.fileno())
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        """Close the file, and end the entries of the trackers."""
        self._append("")
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _finite(numbers: Mapping[str, float]) -> dict[str, Any]:
    """Return the numbers, of which those that are not finite are None."""
    return {key: value if math.isfinite(value) else None for key, value in numbers.items()}


def last_step(path: Path) -> int:
    """Return the last step in a log; 0 where there is none."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    for line in reversed(lines):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return int(json.loads(line)["step"])
    return 0


def _cut_after(path: Path, step: int) -> float | None:
    """Remove the lines after `step` and an incomplete last line; return the last loss that remains."""
    if not path.exists():
        return None
    lines: list[str] = []
    loss = None
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            is_kept = row["step"] <= step
        except (ValueError, TypeError, KeyError):
            break
        if is_kept:
            lines.append(line)
            loss = row.get("loss")
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return loss
