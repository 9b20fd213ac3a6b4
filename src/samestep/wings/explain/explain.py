"""The verb `explain`: where the time of a run's recorded steps went, against the prediction, and what to try."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep import calls, hardware, wings
from samestep import job_files as jobs
from samestep.errors import LayoutError, RecordError
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec, from_json
from samestep.output.text import align_columns
from samestep.program import recorded
from samestep.program.recorded import RankRecord
from samestep.program.update_rules import states_per_param
from samestep.training import run_folder
from samestep.wings.explain.step_bytes import AxisBytes, StepMemory, bytes_of, flows_of, step_memory, traffic_line
from samestep.wings.explain.step_parts import Charge, MeasuredSteps, StepPart, measured_steps, parts_of
from samestep.wings.explain.step_verdict import StepVerdict, verdict_of
from samestep.wings.plan.other_numerics import savings
from samestep.wings.plan.search import plan
from samestep.wings.plan.simulation.simulate import Prediction, predict

MEASURE_FIRST = "nothing is predicted, since this machine has no measured profile: samestep measure writes it, and --hardware names another"
GAIN = 0.02
"""StepPart of a step from which on a layout is worth a try."""
_MOST_DEVICES = 64
"""Number of ranks above which no other layout is searched for: `samestep plan` does that."""


@dataclass(frozen=True, slots=True)
class Explained:
    """The time of a run's steps by its parts."""

    folder: Path
    found: MeasuredSteps
    predicted: Prediction | None
    verdict: StepVerdict
    missing: tuple[str, ...] = ()
    """What the records lack."""
    others: tuple[range, ...] = ()
    """The steps of the run's other records, such as those before it was resumed, the newest first."""

    @property
    def layout(self) -> str:
        """The layout of the run."""
        return self.found.records[min(self.found.records)].head.layout

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, from its begin to that of the next one."""
        return self.found.step_s

    @property
    def steps_s(self) -> tuple[float, ...]:
        """Seconds of each step on its slowest rank."""
        records = self.found.records.values()
        each = ([record.steps[number] for record in records] for number in self.found.steps)
        return tuple(max(step.until_ns - step.begin_ns for step in steps) / 1e9 for steps in each)

    @property
    def parts(self) -> tuple[StepPart, ...]:
        """The parts of the step of the rank that waits least; with `rest_s` they add up to the seconds of its step."""
        return parts_of(self.found, self.found.busiest, self.predicted)[0]

    @property
    def cpu_waits_s(self) -> float:
        """Seconds of the compute of that rank in which other programs had its CPU; 0 if the system does not count them."""
        rank, own_s = self.found.busiest, {part.name: part.measured_s for part in self.parts if part.axis is None}
        worked_s = sum(own_s.get(name, 0.0) for name in ("compute", "recompute", "optimizer"))
        without_s = max(0.0, worked_s - statistics.median(self.found.cpu_s[rank]))
        return min(without_s, self.found.queued_for(rank) or 0.0) * own_s.get("compute", 0.0) / (worked_s or 1.0)

    @property
    def rest_s(self) -> float:
        """Seconds of that step that nothing explains."""
        return parts_of(self.found, self.found.busiest, self.predicted)[1]

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        measured = self.found
        return {
            "run": str(self.folder),
            "layout": self.layout,
            "steps": list(measured.steps),
            "step_s": measured.lasted_s[measured.busiest],
            "predicted_step_s": None if self.predicted is None else self.predicted.step_s,
            "rank": measured.busiest,
            "parts": [part.to_record() for part in self.parts],
            "rest_s": self.rest_s,
            "bytes": [traffic.to_record() for traffic in self.bytes_of(measured.busiest)],
            "verdict": self.verdict.line,
            "reasons": list(self.verdict.reasons),
            "try": list(self.verdict.tries),
            "kind": self.verdict.kind,
            "ranks": [self._of_rank(rank) for rank in sorted(measured.records)],
            "waited_for": [
                {
                    "rank": charge.rank,
                    "doing": charge.doing,
                    "axis": charge.axis,
                    "seconds": charge.seconds,
                    "waits": charge.waiting,
                }
                for charge in measured.charges
            ],
            "hidden_s": {rank: dict(axes) for rank, axes in sorted(measured.hidden.items())},
            "clocks": [clock.to_line() for clock in measured.clocks.values() if clock.width_s],
            "missing": list(self.missing),
        }

    def _repr_html_(self) -> str | None:
        return wings.in_notebook("explained_page", self)

    def _of_rank(self, rank: int) -> dict[str, object]:
        parts, rest_s = parts_of(self.found, rank, self.predicted)
        head, memory = self.found.records[rank].head, self.memory_of(rank)
        return {
            "rank": rank,
            "host": head.host,
            "stage": head.stage,
            "step_s": self.found.lasted_s[rank],
            "parts": [part.to_record() for part in parts],
            "rest_s": rest_s,
            "bytes": [traffic.to_record() for traffic in self.bytes_of(rank)],
            "memory_bytes": None if memory is None else memory.peak_bytes,
            "memory": None if memory is None else memory.to_record(),
        }

    def model(self) -> ModelSpec | None:
        """Return the shape of the model, if the record has it."""
        return _model_in(self.folder)

    def bytes_of(self, rank: int) -> tuple[AxisBytes, ...]:
        """Return the bytes of the buffers that a rank sends in a step, by axis: those that its program lists, and those that torch was given."""
        return bytes_of(self.found.records, rank)

    def memory_of(self, rank: int) -> StepMemory | None:
        """Return the memory of a rank over the last step; None where it was not recorded."""
        said = None if self.predicted is None else self.predicted.memory
        return step_memory(self.found.records[rank], self.found.last.step, said)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a Chrome trace of the last step in two processes, measured and predicted, with a thread for each stream of each lane.

        Arrows go from the rank that entered a collective last to those that waited for it, and from each send to its receive.
        """
        measured = self.found.last.timeline.to_chrome_trace()
        measured["traceEvents"] += flows_of(self.found.last, measured["traceEvents"])
        events = _as_process(measured, "measured", 0)
        if self.predicted is not None:
            events += _as_process(self.predicted.timeline.to_chrome_trace(), "predicted", 1)
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def to_text(self) -> str:
        """Return the verdict, the parts of the step, and who was waited for."""
        lines = [f"verdict: {self.verdict.line}", *(f"  why: {reason}" for reason in self.verdict.reasons)]
        lines += [f"  try: {layout}" for layout in self.verdict.tries]
        lines += [self._why_unpredicted()] if self.predicted is None else []
        steps = self.found.steps
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, averaged"
        lines += ["", f'"{self.layout}", {which}; rank {self.found.busiest}, the slowest rank', self._table()]
        if self.cpu_waits_s > GAIN * self.step_s:
            lines.append(
                f"rank {self.found.busiest} waited for a CPU for {self.cpu_waits_s * 1e3:,.4g} ms of its compute"
            )
        lines += self._waited_for()
        hidden = self.found.hidden[self.found.busiest]
        if any(hidden.values()):
            each = ", ".join(f"{axis} {seconds * 1e3:.3g} ms" for axis, seconds in hidden.items() if seconds > 0)
            lines.append(f"communication while it computed, at most: {each}")
        if sent := self.bytes_of(self.found.busiest):
            lines.append(traffic_line(self.found.busiest, sent))
        if (memory := self._largest_memory()) is not None:
            lines += memory.to_lines()
        lines += [clock.to_line() for clock in self.found.clocks.values() if clock.width_s]
        lines += [f"missing: {text}" for text in self.missing]
        lines += [f"also recorded: --step {range_[0]}:{range_[-1]}" for range_ in self.others]
        return "\n".join(lines)

    def _largest_memory(self) -> StepMemory | None:
        """Return the memory of the rank that needs most; None where none was recorded."""
        memories = [memory for rank in self.found.records if (memory := self.memory_of(rank)) is not None]
        return max(memories, key=lambda peak: peak.peak_bytes, default=None)

    def _why_unpredicted(self) -> str:
        if hardware.own() is None and self.model() is not None:
            return MEASURE_FIRST
        return f"nothing is predicted, since {self.folder} has no {recorded.MODEL} and {recorded.JOB} of this version of samestep"

    def _waited_for(self) -> list[str]:
        """Return a line for each rank and axis on which others wait for more than a hundredth of the step."""
        together: dict[tuple[int, str | None], list[Charge]] = {}
        for charge in self.found.charges:
            together.setdefault((charge.rank, charge.axis), []).append(charge)
        lines = []
        for (rank, axis), charges in sorted(
            together.items(), key=lambda item: -sum(charge.seconds for charge in item[1])
        ):
            seconds, first = sum(charge.seconds for charge in charges), charges[0]
            if seconds >= 0.01 * self.step_s:
                where = f"over {axis}" if axis else "in the pipeline"
                most = f"{first.seconds * 1e3:,.3g} ms of it while it was at {first.doing}"
                lines.append(f"others wait for rank {rank} {where}: {seconds * 1e3:,.3g} ms, {most}")
        return lines[:5]

    def _table(self) -> str:
        rows = [("part", "measured ms", "of the step", "predicted ms", "difference ms")]
        step_s = self.found.lasted_s[self.found.busiest]
        rest = StepPart("rest", None, self.rest_s, None if self.predicted is None else 0.0)
        step_part = StepPart("step", None, step_s, None if self.predicted is None else self.predicted.step_s)
        for part in (*self.parts, rest, step_part):
            if max(part.measured_s, part.predicted_s or 0.0) < 1e-4 * step_s and part is not rest:
                continue
            said = ("", "")
            if part.predicted_s is not None:
                said = (f"{part.predicted_s * 1e3:,.3f}", f"{(part.measured_s - part.predicted_s) * 1e3:+,.3f}")
            rows.append((part.label, f"{part.measured_s * 1e3:,.3f}", f"{part.measured_s / step_s:.1%}", *said))
        return align_columns(rows)


def _as_process(trace: dict[str, Any], name: str, pid: int) -> list[dict[str, Any]]:
    """Return the events of a trace as those of one process: the streams of all lanes are its threads, named by lane and stream."""
    events = trace["traceEvents"]
    lanes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = [event for event in events if event["name"] == "thread_name"]
    numbers = {(event["pid"], event["tid"]): number for number, event in enumerate(threads)}
    process: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}]
    for event in events:
        if event["name"] == "process_name":
            continue
        moved = {**event, "pid": pid, "tid": numbers[event["pid"], event["tid"]]}
        if event["name"] == "thread_name":
            moved["args"] = {"name": f"{lanes[event['pid']]} {event['args']['name']}"}
        process.append(moved)
    return process


@calls.checked
def explain(
    run: str | Path | None = None, *, step: int | str | None = None, hardware: Hardware | str | Path | None = None
) -> Explained:
    """Return the time of a run's recorded steps by category.

    Args:
        run: a run folder, or a folder of records (`run.record`); by default the newest run below runs/.
        step: one step, or several such as "101:104"; by default all recorded steps except the first.
        hardware: the profile for the prediction; by default the profile of this machine, if it has been measured.

    Raises:
        RecordError: there is no record, a file is damaged, or the step is not in it.
        InputError: the profile has mistakes, or `step` names no steps.
    """
    asked = recorded.asked_steps(step)
    folder, records, others = read_run(run_folder.newest("to explain") if run is None else Path(run), asked)
    wanted = _steps_of(records, folder, asked, others)
    measured = measured_steps(records, wanted)
    said = _predicted(folder, records, hardware)
    predicted = said[0] if said else None
    parts, _ = parts_of(measured, measured.busiest, predicted)
    tries = _tries(*said) if said else []
    return Explained(
        folder, measured, predicted, verdict_of(measured, parts, tries), (*measured.missing, *_cut_off(records)), others
    )


def read_run(run: Path, asked: range | None = None) -> tuple[Path, dict[int, RankRecord], tuple[range, ...]]:
    """Return the folder of a record of a run, the records of its ranks, and the steps of the run's other records.

    It is the newest record that has one of the steps that are asked for, or the one that is named. One of its files stands for all of
    its window, and a window that a resumed run has recorded again in another layout is that of the newest file, where all of its ranks
    are there.

    Raises:
        RecordError: there is none, or a file is damaged.
    """
    folder, paths = _paths_of(run)
    windows = {recorded.window_of(path): path.name.partition(".")[0] for path in reversed(paths)}
    several = [*windows][:1] if run.is_file() else [*windows]
    chosen = next(
        (range_ for range_ in several if asked and range_[0] <= asked[-1] and asked[0] <= range_[-1]), several[0]
    )
    window = windows[chosen]
    others = tuple(window for window in windows if window != chosen)
    rank_records = [recorded.read_record(path) for path in paths if path.name.startswith(f"{window}.")]
    newest = rank_records[-1].head
    same = [record for record in rank_records if record.head.layout == newest.layout]
    if len(same) < newest.world_size:
        same = rank_records
    if len(words := {record.head.layout for record in same}) > 1:
        raise RecordError(
            "record-ranks",
            f"{folder} has records of several layouts: {', '.join(sorted(words))}. Use a folder of one run",
        )
    records: dict[int, RankRecord] = {}
    for record in same:
        if record.head.rank in records:
            raise RecordError(
                "record-ranks",
                f"{record.path} and {records[record.head.rank].path} are both of rank {record.head.rank}",
            )
        records[record.head.rank] = record
    return folder, dict(sorted(records.items())), others


def _paths_of(run: Path) -> tuple[Path, list[Path]]:
    """Return the folder of a run's records, and the files in it, the newest last; of a record that is named, it is the last."""
    folder = run.parent if run.is_file() else run / recorded.FOLDER if (run / recorded.FOLDER).is_dir() else run
    paths = sorted(recorded.paths_in(folder), key=lambda path: (path == run, path.stat().st_mtime))
    if paths and (run.is_dir() or paths[-1] == run):
        return folder, paths
    if run.is_dir() and (runs := sorted(path.parent for path in run.glob(f"*/{recorded.FOLDER}"))):
        several = ", ".join(path.name for path in runs[:5]) + ", ..." * (len(runs) > 5)
        raise RecordError("record-missing", f"{run} is a folder of runs ({several}). Use samestep explain {runs[-1]}")
    if not run.exists():
        raise RecordError(
            "record-missing",
            f"{run} does not exist. Use the folder of a run that has recorded steps, or a folder of traces",
        )
    raise RecordError(
        "record-missing",
        f"{run} has no recorded steps, and no traces: samestep train --record 5 records some, or --set train.record=100:104",
    )


def _cut_off(records: Mapping[int, RankRecord]) -> list[str]:
    """Return which ranks have recorded fewer steps than others, as those of a run that was killed."""
    last = max((max(record.steps, default=0) for record in records.values()), default=0)
    short = {
        rank: max(record.steps, default=0) for rank, record in records.items() if max(record.steps, default=0) < last
    }
    return [f"steps {step + 1} to {last} of rank {rank}: its record ends before" for rank, step in short.items()]


def _steps_of(
    records: Mapping[int, RankRecord], folder: Path, asked: range | None, others: tuple[range, ...]
) -> list[int]:
    """Return the steps that are asked for and that every rank has recorded; by default all but the first of the window."""
    common = sorted(set.intersection(*({*record.steps} for record in records.values())))
    if not common:
        raise RecordError("record-steps", f"{folder}: there is no step that every rank has recorded whole")
    if asked is None:
        return common[1:] or common
    numbers = [number for number in common if number in asked]
    if not numbers:
        windows = ", ".join(f"{range_[0]} to {range_[-1]}" for range_ in (*others[::-1], common))
        named = f"{asked[0]}" if len(asked) == 1 else f"{asked[0]}:{asked[-1]}"
        raise RecordError("record-steps", f"{folder} has no step {named}: steps {windows} are recorded")
    return numbers


_Said = tuple[Prediction, ModelSpec, Job, Hardware]


def _predicted(folder: Path, records: Mapping[int, RankRecord], given: Hardware | str | Path | None) -> _Said | None:
    """Return the prediction of the run's step and its inputs; None without a profile of this machine."""
    if given is None and hardware.own() is None:
        return None
    machine = hardware.resolve_hardware(given)
    model, job_file = _model_in(folder), folder / recorded.JOB
    if model is None or not job_file.is_file():
        return None
    job = jobs.load(job_file)
    layout = Layout(records[min(records)].head.layout)
    return predict(model, job, layout, machine, states_per_param(job)), model, job, machine


def _model_in(folder: Path) -> ModelSpec | None:
    """Return the shape of the model that was recorded; None where the file is missing, damaged or of another version."""
    path = folder / recorded.MODEL
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return None


def _tries(said: Prediction, model: ModelSpec, job: Job, machine: Hardware) -> list[str]:
    """Return what is predicted to be faster, as words of a command with the gain: layouts, and numerics that may change results."""
    tries: list[tuple[float, str]] = []
    if said.devices <= _MOST_DEVICES:
        try:
            best = plan(model, job, machine, said.devices, top=2, states_per_param=states_per_param(job)).best
        except LayoutError:
            best = ()
        gains = ((1 - prediction.step_s / said.step_s, prediction.layout) for prediction in best)
        tries += [(gain, f'--layout "{layout}": {gain:.0%} less, predicted') for gain, layout in gains if gain > GAIN]
    for saving in savings(said, model, job, machine, states_per_param(job)):
        gain = 1 - saving.step_s / said.step_s
        tries.append((gain, f"--set {saving.change}: {gain:.0%} less, predicted; it may change results"))
    return [text for _, text in sorted(tries, key=lambda pair: -pair[0])[:3]]
