"""What a run leaves behind and shows: the live line, `metrics.jsonl`, TensorBoard events.

`metrics.jsonl` has one object a step. On resume the lines after the resumed step are cut off first, so that no step
is missing and none stands twice.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from samestep.runtime.run import StepReport

_LINES = 40
"""About so many lasting lines a run prints, beside the live one."""


class _Numbers(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields.get("numbers", ""))


class Screen:
    """The progress of a run on the terminal: a live line where there is one, and lasting lines now and then."""

    def __init__(self, first_step: int, last_step: int) -> None:
        self._console = Console(file=sys.stdout, highlight=False, emoji=False, soft_wrap=True)
        self._every = max(1, (last_step - first_step) // _LINES)
        self._last = last_step
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(20),
            _Numbers(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task = self._progress.add_task("steps", total=last_step, completed=first_step)

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the live line meanwhile."""
        with self._progress:
            yield

    def show(self, report: StepReport) -> None:
        """Show one step."""
        numbers = (
            f"loss {report.loss:.4f}  norm {report.grad_norm:.3f}  lr {report.lr:.2e}  "
            f"{report.tokens_per_s:,.0f} tok/s  {report.memory_bytes / 2**20:,.0f} MiB"
        )
        self._progress.update(self._task, completed=report.step, numbers=numbers)
        if report.step % self._every == 0 or report.step == self._last:
            self.say(f"step {report.step:>6}/{self._last}  {numbers}")
        if report.note:
            self.say(f"step {report.step}: {'skipped, ' if report.skipped else ''}{report.note}")

    def say(self, text: str) -> None:
        """Print a lasting line."""
        self._console.print(text, markup=False)


class Metrics:
    """`metrics.jsonl` and TensorBoard events of a run folder."""

    def __init__(self, folder: Path, first_step: int) -> None:
        path = folder / "metrics.jsonl"
        _cut_after(path, first_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", first_step)

    def write(self, report: StepReport) -> None:
        """Write one step."""
        row = {key: value for key, value in dataclasses.asdict(report).items() if key not in ("stop",)}
        row = {key: value for key, value in row.items() if value not in ("", False) or key in ("loss",)}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board is not None:
            scalars = {
                "train/loss": report.loss,
                "train/grad_norm": report.grad_norm,
                "train/lr": report.lr,
                "perf/tokens_per_s": report.tokens_per_s,
                "perf/step_ms": report.step_s * 1e3,
                "memory/peak_bytes": report.memory_bytes,
            }
            for name, value in scalars.items():
                self._board.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _cut_after(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, and a last line that was never finished."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if row["step"] <= step:
            kept.append(line)
    draft = path.with_suffix(".draft")
    draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    draft.replace(path)


def _board(folder: Path, first_step: int) -> Any:
    """Open a TensorBoard writer, or return None where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=first_step + 1)
