"""Comparison of two steps (of runs, of layouts, or of a run and its simulation): their differences by size, with known causes."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from samestep import job_files as jobs
from samestep import wings
from samestep.errors import InputError, LayoutError
from samestep.hardware import Hardware, resolve_hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import catalog
from samestep.models.spec import ModelSpec
from samestep.output.text import align_columns, readable
from samestep.program import recorded
from samestep.program.update_rules import states_per_param
from samestep.wings.explain.explain import Explained, explain
from samestep.wings.explain.foreign_traces import ForeignSteps, explain_traces, is_foreign
from samestep.wings.plan.simulation.partition import row_label
from samestep.wings.plan.simulation.simulate import Prediction, predict

SIMULATION = "simulation"
"""The word that stands for the prediction of a run's own layout."""
_Key = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class OneSide:
    """A measured or predicted step, to hold against another one."""

    name: str
    step_s: float
    rows: Mapping[_Key, float]
    layout: str
    machine: str
    """The machine on which it was measured; empty where that is not known, or it is a prediction."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Every key of the job, as text."""
    predicted_for: str = ""
    """The hardware profile of a prediction; empty of what was measured."""
    place: str = ""
    """The folder or file that it was read from, or the layout that was predicted."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes of a rank's buffers in a step by axis, on average; empty where they are not known."""
    queued_s: float | None = None
    """Seconds of a step for which the rank that waits least wanted a processor and had none; None where that is not known."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between two steps."""

    verb: ClassVar[str] = "explain"

    one: OneSide
    other: OneSide
    causes: tuple[str, ...]
    alike: OneSide | None = None
    """The prediction for the layout of the measured side, if the other side is the prediction for another layout."""

    @property
    def rows(self) -> list[tuple[str, str | None, float, float]]:
        """Name, axis and both seconds of each part, the largest difference first."""
        keys = dict.fromkeys((*self.one.rows, *self.other.rows))
        rows = [
            (name, axis, self.one.rows.get((name, axis), 0.0), self.other.rows.get((name, axis), 0.0))
            for name, axis in keys
        ]
        return sorted(rows, key=lambda row: -abs(row[3] - row[2]))

    @property
    def verdict(self) -> str:
        """The seconds of both sides, in one line; predictions for both layouts, if one side is a prediction and there are both."""
        sides = self.one, self.other
        if self.alike is None:
            kinds = [("predicted", "measured")[not side.predicted_for] for side in sides]
            return _compared(sides, [f" ({kind})" if kinds[0] != kinds[1] else "" for kind in kinds])
        measured = next(side for side in sides if not side.predicted_for)
        first, second = (self.alike if side is measured else side for side in sides)
        return (
            f"predicted for {self.alike.predicted_for}: {_compared((first, second), ('', ''))}. {measured.name} was measured at "
            f"{measured.step_s * 1e3:,.4g} ms"
        )

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("page", self)

    def to_text(self) -> str:
        """Return the parts of both, the largest difference first, and the causes."""
        lines = [self.verdict]
        names = [
            f"{side.name} {'predicted' if side.predicted_for else 'measured'} ms" for side in (self.one, self.other)
        ]
        table = [("part", *names, "difference ms")]
        least_s = 1e-4 * max(self.one.step_s, self.other.step_s)
        for name, axis, first_s, second_s in self.rows:
            if max(first_s, second_s) >= least_s:
                cells = (f"{first_s * 1e3:,.3f}", f"{second_s * 1e3:,.3f}", f"{(second_s - first_s) * 1e3:+,.3f}")
                table.append((row_label(name, axis), *cells))
        return "\n".join([*lines, *(f"  why: {cause}" for cause in self.causes), "", align_columns(table)])

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "one": self.one.name,
            "other": self.other.name,
            "step_s": [self.one.step_s, self.other.step_s],
            "causes": list(self.causes),
            "differences": [
                {"name": name, "axis": axis, "one_s": first_s, "other_s": second_s, "difference_s": second_s - first_s}
                for name, axis, first_s, second_s in self.rows
            ],
        }


def _compared(sides: Sequence[OneSide], kinds: Sequence[str]) -> str:
    (first, second), (first_kind, second_kind) = sides, kinds
    more = second.step_s - first.step_s
    return (
        f"{second.name}{second_kind} takes {second.step_s * 1e3:,.4g} ms per step, {first.name}{first_kind} {first.step_s * 1e3:,.4g} ms: "
        f"{abs(more) / first.step_s:.0%} {'longer' if more > 0 else 'shorter'}"
    )


def differences(one: str, other: str, hardware: Hardware | str | Path | None = None) -> Differences:
    """Return what differs between two steps.

    Each is a run folder, a folder of traces, a layout, the JSON file of a prediction (`samestep simulate --json FILE`), or `simulation`:
    the prediction of the other's layout. A layout is predicted for the job of the other side's run, or for the default job where both
    are layouts.

    Raises:
        InputError: a word is none of these, both are one step, or a record is damaged.
    """
    words = (one, other)
    if words == (SIMULATION, SIMULATION):
        raise InputError(
            "command-options", "explain simulation simulation: one of the two must be a run folder or a layout"
        )
    run = next((Path(word) for word in words if Path(word).is_dir() and not is_foreign(Path(word))), None)
    measured = None if run is None else explain(run, hardware=hardware)
    sides = [_side(word, words, measured, hardware) for word in words]
    if sides[0].place == sides[1].place:
        raise InputError(
            "command-options",
            f"explain {one} {other}: both are the same step. Use two runs, two layouts, or a run and a layout",
        )
    others = {side.layout for side in sides if side.predicted_for and side.place == side.layout}
    is_mixed = measured is not None and len(others) == 1 and SIMULATION not in words and measured.layout not in others
    alike = _side(measured.layout, words, measured, hardware) if measured is not None and is_mixed else None
    return Differences(sides[0], sides[1], tuple(_causes(*sides)), alike)


def _side(
    word: str, words: tuple[str, str], measured: Explained | None, hardware: Hardware | str | Path | None
) -> OneSide:
    if (saved := _saved(Path(word))) is not None:
        return saved
    if is_foreign(Path(word)):
        return _of_traces(explain_traces(Path(word)), Path(word))
    if Path(word).is_dir():
        return _of_run(explain(word, hardware=hardware), Path(word))
    job, model = _job_of(measured)
    layout = word
    if word == SIMULATION:
        layout = measured.layout if measured else next(source for source in words if source != SIMULATION)
    if "=" not in layout or Path(layout).exists():
        raise InputError(
            "record-missing",
            f"{layout!r} is neither a run folder nor a layout. Use the folder of a run or of traces, a layout such as dp=2, or the JSON file of "
            f"a simulation; {SIMULATION} is the prediction of a run's own layout",
        )
    try:
        where = Layout(layout)
    except LayoutError as error:
        raise InputError("record-missing", f"{word!r} is neither a run folder nor a layout: {error}") from None
    step = predict(model or catalog.model_spec(job), job, where, resolve_hardware(hardware), states_per_param(job))
    return _of_prediction(step, job, word if word == SIMULATION else str(where))


def _saved(path: Path) -> OneSide | None:
    """Return the prediction in a JSON file that `samestep simulate` has written; None of any other file."""
    try:
        with path.open("rb") as file:
            if b'"layout"' not in file.read(1000):
                return None
        record = json.loads(path.read_bytes())
        record = record.get("result", record)
        rows = {(row["name"], row["axis"]): float(row["seconds"]) for row in record["parts"]}
        layout, machine, step_s = str(record["layout"]), str(record["hardware"]), float(record["step_s"])
        keys = _keys(record.get("job", {}))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return OneSide(str(path), step_s, rows, layout, "", keys, machine, str(path.resolve()))


def _of_traces(foreign_steps: ForeignSteps, folder: Path) -> OneSide:
    rows = {(row.name, row.axis): row.seconds for row in foreign_steps.rows if row.stage == foreign_steps.busiest}
    return OneSide(str(folder), sum(rows.values()), rows, "", "", place=str(folder.resolve()))


def _job_of(measured: Explained | None) -> tuple[Job, ModelSpec | None]:
    if measured is None:
        return jobs.default([]), None
    job_file = measured.folder / recorded.JOB
    if not job_file.is_file():
        return jobs.default([]), None
    return jobs.load(job_file), measured.model()


def _of_run(explained: Explained, folder: Path) -> OneSide:
    """Return the step of a run as one side of a comparison."""
    records, rank = explained.found.records, explained.found.busiest
    head = records[rank].head
    rows = {(part.name, part.axis): part.measured_s for part in explained.parts} | {("rest", None): explained.rest_s}
    job_file = explained.folder / recorded.JOB
    keys = _keys(jobs.load(job_file).model_dump(mode="json")) if job_file.is_file() else {}
    machine = f"{head.device} of {', '.join(sorted({record.head.host for record in records.values()}))}"
    sent = Counter[str]()
    for of_rank in records:
        sent.update({axis.axis: axis.predicted for axis in explained.bytes_of(of_rank)})
    queued = [seconds for seconds in explained.found.queued_s[rank] if seconds is not None]
    return OneSide(
        str(folder),
        explained.found.lasted_s[rank],
        rows,
        explained.layout,
        machine,
        keys,
        place=str(explained.folder.resolve()),
        sent={axis: size // len(records) for axis, size in sent.items()},
        queued_s=statistics.median(queued) if queued else None,
    )


def _of_prediction(prediction: Prediction, job: Job, name: str) -> OneSide:
    rows = {(row.name, row.axis): row.seconds for row in prediction.parts}
    sent = Counter[str]()
    for program in prediction.programs:
        for _, op in program.ops():
            sent.update({op.axis: op.size_bytes} if op.axis else {})
    return OneSide(
        name,
        prediction.step_s,
        rows,
        str(prediction.layout),
        "",
        _keys(job.model_dump(mode="json")),
        prediction.hardware.name,
        str(prediction.layout),
        {axis: size // len(prediction.programs) for axis, size in sent.items()},
    )


def _keys(tables: Mapping[str, object]) -> dict[str, str]:
    return {
        f"{table}.{key}": str(value)
        for table, row in tables.items()
        if isinstance(row, dict)
        for key, value in row.items()
    }


def _causes(one_side: OneSide, other: OneSide) -> list[str]:
    causes = []
    first_words, second_words = {*one_side.layout.split()}, {*other.layout.split()}
    if first_words != second_words and first_words and second_words:
        causes.append(
            f"other layout options: {' '.join(sorted(first_words - second_words)) or 'none'} and {' '.join(sorted(second_words - first_words)) or 'none'}"
        )
    if bool(one_side.predicted_for) != bool(other.predicted_for):
        causes.append(f"one is measured, the other predicted for {one_side.predicted_for or other.predicted_for}")
    if one_side.machine and other.machine and one_side.machine != other.machine:
        causes.append(f"another machine: {one_side.machine} and {other.machine}")
    changed = [
        key
        for key in one_side.keys
        if key in other.keys and one_side.keys[key] != other.keys[key] and key not in _NO_CAUSE
    ]
    causes += [f"{key}: {one_side.keys[key][:60]} and {other.keys[key][:60]}" for key in changed[:5]]
    if one_side.sent != other.sent and one_side.sent and other.sent:
        causes.append(f"buffers of a rank in a step: {_in_bytes(one_side.sent)} and {_in_bytes(other.sent)}")
    waits = {"data": [side.rows.get(("data", None), 0.0) for side in (one_side, other)]}
    if one_side.queued_s is not None and other.queued_s is not None:
        waits["a CPU that other programs used"] = [one_side.queued_s, other.queued_s]
    for what, (first, second) in waits.items():
        if abs(second - first) > 0.05 * max(one_side.step_s, other.step_s):
            causes.append(f"waits for {what}: {first * 1e3:.3g} ms and {second * 1e3:.3g} ms")
    return causes


def _in_bytes(sent: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {readable(size)}" for axis, size in sent.items())


_NO_CAUSE = ("train.record", "train.steps", "run.folder", "job.layout", "layout")
