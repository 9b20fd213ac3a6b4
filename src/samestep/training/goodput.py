"""Goodput: the part of a run's time in which it took steps that count, and what the rest went to.

    goodput = seconds of steps that counted / seconds from the first start to the last step

The times of a run are those of rank 0, and are written with each checkpoint: the steps after it are lost where the run is started again
from it, so the time since then counts as lost to the restart, with the pause and the start. A pause between a run that ended in order and its
resume is nobody's loss, and is left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Spent = Literal["start", "steps", "skipped", "saves", "evaluations", "restarts"]
"""What time is spent on: what comes between the preparation of a process and its first step, steps that counted, and so on."""
FILE = "goodput.jsonl"


@dataclass(slots=True)
class Goodput:
    """The seconds of a run by what they were spent on, with those of its processes before this one."""

    path: Path
    clock: Callable[[], float] = time.time
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(get_args(Spent), 0.0))
    _last: float = 0.0
    """When the time was last given to something."""
    _before: dict[str, float] = field(default_factory=dict)
    """The seconds of the processes before this one, and of the way to it."""
    _saved_steps_s: float = 0.0
    """Seconds of steps up to the last checkpoint."""

    @classmethod
    def of(cls, folder: Path, first: int, clock: Callable[[], float] = time.time) -> Goodput:
        """Return the times of a run that goes on after step `first`, from its folder; of a new run all are 0."""
        found = cls(folder / FILE, clock, _last=clock())
        if first == 0:
            found.path.unlink(missing_ok=True)
        every = _rows(found.path)
        if rows := [row for row in every if row["step"] <= first]:
            found.seconds |= rows[-1]["seconds"]
            found._saved_steps_s = found.seconds["steps"]
            if not rows[-1]["ended"] or rows[-1]["step"] != max(row["step"] for row in every):
                found.seconds["restarts"] += max(0.0, found._last - rows[-1]["unix_s"])
        found._before = dict(found.seconds)
        return found

    def give(self, to: Spent) -> None:
        """Give the time since the last call to one kind of work."""
        now = self.clock()
        self.seconds[to] += max(0.0, now - self._last)
        self._last = now

    @contextmanager
    def spend(self, to: Spent) -> Iterator[None]:
        """Give the time of the body of the `with` statement to one kind of work, and that before it to steps."""
        self.give("steps")
        try:
            yield
        finally:
            self.give(to)

    def forget(self) -> None:
        """Forget what was given to anything by this process, which has taken no step."""
        self.seconds = dict(self._before)

    def roll_back(self) -> None:
        """Count the steps since the last checkpoint as skipped: the run has gone back to it."""
        self.seconds["skipped"] += self.seconds["steps"] - self._saved_steps_s
        self.seconds["steps"] = self._saved_steps_s

    def save(self, step: int, *, ended: bool = False) -> None:
        """Write the times up to a checkpoint of a step, or up to the run's end in order."""
        self._saved_steps_s = self.seconds["steps"]
        row = {"step": step, "unix_s": self._last, "seconds": self.seconds, "ended": ended}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def fraction(self) -> float:
        """The part of all seconds in steps that counted; 1 before any."""
        total_s = sum(self.seconds.values())
        return self.seconds["steps"] / total_s if total_s else 1.0

    def to_line(self) -> str:
        """Return what a person reads of it, one line."""
        others = {name: value for name, value in self.seconds.items() if name != "steps" and value >= 0.05}
        rest = ", ".join(f"{name} {value:,.1f} s" for name, value in sorted(others.items(), key=lambda one: -one[1]))
        total_s = sum(self.seconds.values())
        text = f"goodput {self.fraction:.1%}: {self.seconds['steps']:,.1f} of {total_s:,.1f} s in steps that counted"
        return f"{text}; {rest}" if rest else text


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that are whole; a line that a crash has cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
