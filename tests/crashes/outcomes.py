"""What came of one harm, and the sums of many by kind: rows that add up from one call of `make crashes` to the next."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECORD = Path(__file__).parents[2] / "benchmarks" / "rows" / "crashes.json"
"""The sums that `docs/checkpoints.md` shows."""


@dataclass(frozen=True)
class Outcome:
    """What came of one fault."""

    what: str
    noticed: bool
    """Whether the command or the load said what happened, or was itself what was killed."""
    recovered: bool
    steps_lost: int
    seconds: float
    """From the fault, or the start of the run that resumes, to the next step that is logged; of a load, its own."""
    wrong: bool
    """Whether a loss of the whole run is not that of an undisturbed one, or a bit that was loaded not the saved one."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is to be mended."""
        return self.noticed and self.recovered and not self.wrong


@dataclass
class Sums:
    """The outcomes of one kind."""

    injected: int = 0
    noticed: int = 0
    recovered: int = 0
    steps_lost: int = 0
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """What was not noticed, not recovered, or wrong: the seed, the number and what happened."""

    def add(self, one: Outcome, case: str) -> None:
        """Count one more outcome."""
        self.injected += 1
        self.noticed += one.noticed
        self.recovered += one.recovered
        self.steps_lost += one.steps_lost
        self.wrong += one.wrong
        self.seconds.append(float(f"{one.seconds:.2g}"))
        if not one.is_good:
            self.bad.append(f"{case}: {one.what}")

    def cells(self) -> list[str]:
        """Return what the table says of them."""
        took = sorted(self.seconds) or [0.0]
        median, p95 = took[len(took) // 2], took[int(len(took) * 0.95)]
        counts = (self.injected, self.noticed, self.recovered, self.steps_lost)
        return [*map(str, counts), f"{median:.2g}", f"{p95:.2g}", str(self.wrong)]


def read(record: Path) -> dict[str, Sums]:
    """Return the sums of a record by kind; none where there is no such file."""
    found = json.loads(record.read_text()) if record.exists() else {}
    return {kind: Sums(**sums) for kind, sums in found.items()}


def write(record: Path, known: dict[str, Sums]) -> None:
    """Write the sums, a line for each kind."""
    lines = (f"{json.dumps(kind)}: {json.dumps(asdict(sums))}" for kind, sums in known.items())
    record.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(known: dict[str, Sums]) -> str:
    """Return the sums of each kind and of all, as a table of Markdown."""
    whole = Sums()
    for sums in known.values():
        for one in ("injected", "noticed", "recovered", "steps_lost", "wrong"):
            setattr(whole, one, getattr(whole, one) + getattr(sums, one))
        whole.seconds += sums.seconds
    lines = ["| kind | injected | noticed | recovered | steps lost | seconds, median | p95 | wrong results |"]
    lines.append("| --- |" + " ---: |" * 7)
    lines += [f"| {kind} | " + " | ".join(sums.cells()) + " |" for kind, sums in {**known, "all": whole}.items()]
    return "\n".join(lines)
