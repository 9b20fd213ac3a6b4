"""Delays of known size in real runs, and where `explain` finds them: which row moved, by how much, and who is charged.

    the row of the delay      moves by what the delay took, within 10 %, on the ranks where it is planted
    the others                wait longer by it, within 10 %, and the wait is charged to that rank and to what it was doing
    every other row           moves by less than 5 % of a step without the delay
    the verdict               is of the right kind; a delay in one step of nine is no straggler

Steps with and without a delay alternate in one run (`planted_delays.py`), and medians over the steps are compared. The noise that
stands with a row is the standard error of such a difference, from how far steps of one kind are from each other.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import planted_delays
from planted_delays import Delay, Plan

import samestep
from samestep import job_files as jobs
from samestep.job import Job
from samestep.program.recorded import RankRecord
from samestep.wings.explain.explain import read_run
from samestep.wings.explain.step_parts import measured_steps, parts_of
from samestep.wings.explain.step_verdict import verdict_of
from samestep.wings.plan.simulation.partition import BUBBLE, IMBALANCE, WAIT

NEAR = 0.1
"""Part of a delay by which its row may move more or less."""
ELSEWHERE = 0.05
"""Part of a step by which any other row may move."""
WAITING = (WAIT, BUBBLE, IMBALANCE)
CODE = (
    "model.source=planted_delays:llama",
    "model.config={}",
    "data.source=planted_delays:texts",
    f"data.held_out={planted_delays.HELD_OUT}",
    "train.loss=planted_delays:loss",
    "optimizer.name=planted_delays:LateAdamW",
    "train.sample_tokens=0",
    "train.watch_every=0",
    "train.global_batch=96",
    "checkpoint.every=0",
)
"""The default job with code that can be late, and with as many samples as make a step of about 100 ms on two cores."""

Rows = dict[int, dict[tuple[str, str | None], float]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A delay, and what `explain` has to say of it."""

    name: str
    delay: Delay
    row: str
    """The row that it belongs to, on the ranks where it is planted."""
    cause: str = ""
    """What others say that the late rank was doing; empty where all ranks are late alike."""
    kinds: Sequence[str]
    """Verdicts on the steps with it that are right."""
    moves_all: bool = False
    """Whether the row moves on every rank, since the others take part in what is slow on one."""
    once_too: bool = False
    """Whether its first step is also looked at alone, among those without it."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Delays that come one after the other in one run."""

    layout: str
    cases: Sequence[Case]
    settings: Sequence[str] = ()


_LAST = "model.layers.3"
_FORWARD, _BACKWARD = f"forward:{_LAST}", f"backward:{_LAST}"
_SLOW_DATA = {"place": "data", "how": "sleep", "seconds": 0.3, "half": 10, "pairs": 2}
STRAGGLER = ("straggler",)
SCENARIOS = (
    Scenario(
        layout="dp=2",
        settings=('run.report=["planted_delays:receive"]',),
        cases=(
            Case(name="200 ms of busy work in a block", delay=Delay(place="block", ranks=(1,)), row="compute", cause=_FORWARD, kinds=STRAGGLER, once_too=True),
            Case(name="sleep in a hook of the backward", delay=Delay(place="backward", how="sleep", ranks=(1,)), row="compute", cause=_BACKWARD, kinds=("host",)),
            Case(name="busy work in the loss", delay=Delay(place="loss", ranks=(0,)), row="compute", cause="forward:between layers", kinds=STRAGGLER),
            Case(name="busy work in the optimizer's rule", delay=Delay(place="optimizer", ranks=(1,)), row="optimizer", cause="update:optimizer", kinds=STRAGGLER),
            Case(name="new pages in a block", delay=Delay(place="block", how="pages", ranks=(0,)), row="compute", cause=_FORWARD, kinds=STRAGGLER),
            Case(name="a long garbage collection", delay=Delay(place="block", how="garbage", ranks=(0,)), row="host", cause="host:gc", kinds=("host", *STRAGGLER)),
            Case(name="50 MB more in a collective", delay=Delay(place="collective", how="send", ranks=(0, 1)), row="transfer", kinds=("link", "compute")),
            Case(name="slow data on all ranks", delay=Delay(ranks=(0, 1), **_SLOW_DATA), row="data", kinds=("input",)),
            Case(name="slow data on one rank", delay=Delay(ranks=(1,), **_SLOW_DATA), row="data", cause="data:data", kinds=("input",)),
            Case(name="a slow logger of reports", delay=Delay(place="receiver", how="sleep"), row="host", cause="host:between steps", kinds=("host",)),
            Case(name="another program on a rank's core", delay=Delay(place="core", ranks=(1,)), row="compute", kinds=("load",)),
        ),
    ),
    Scenario(
        layout="dp=2",
        settings=("train.evaluate_every=2", "train.evaluate_samples=32", "checkpoint.every=2", "checkpoint.background=false"),
        cases=(
            Case(name="slow evaluation", delay=Delay(place="held out", how="sleep", ranks=(0, 1)), row="host", kinds=("host",)),
            Case(name="slow writes of a checkpoint", delay=Delay(place="write", how="sleep", seconds=0.05), row="checkpoint", kinds=("checkpoint",), moves_all=True),
        ),
    ),
    Scenario(
        layout="tp=2",
        cases=(Case(name="busy work in a block", delay=Delay(place="block", ranks=(1,), pairs=24), row="compute", cause=_FORWARD, kinds=STRAGGLER),),
    ),
    Scenario(
        layout="pp=2 microbatch=24 schedule=1f1b",
        cases=(
            Case(name="an unbalanced stage", delay=Delay(place="block", seconds=0.05, ranks=(1,)), row="compute", cause=_FORWARD, kinds=("imbalance",)),
            Case(name="sleep in a hook of the backward", delay=Delay(place="backward", how="sleep", seconds=0.05, ranks=(1,)), row="compute", cause=_BACKWARD, kinds=("imbalance", "host")),
        ),
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """What `explain` says of a delay; seconds are those of medians."""

    name: str
    layout: str
    step_s: float
    planted_step_s: float
    row: str
    truth_s: float
    """What the delay took."""
    moved_s: float
    """By how much its row moved on the ranks with the delay, the mean."""
    waits_s: float | None
    """By how much the others wait longer; None where there are none."""
    other: tuple[str, float, float]
    """The row that moved most besides, by how much, and the noise of that."""
    charge: tuple[int, str, float] | None
    """The rank for which others waited most, what it was doing, and the seconds of a step."""
    kind: str
    verdict: str
    faults: Sequence[str]
    """What is not as it should be: `row`, `waits`, `elsewhere`, `cause`, `verdict`."""


def job_of(plan: Plan, settings: Sequence[str]) -> Job:
    """Return the job of a run with these delays; every step but the first and the last is recorded."""
    ends = (f"train.steps={plan.num_steps}", f"train.record=2:{plan.num_steps - 1}")
    return jobs.default([*CODE, *settings, *ends])


def delays(only: str = "") -> Iterator[Found]:
    """Run every scenario, or the delays with a word in their name or layout, and yield what was found of each."""
    for scenario in SCENARIOS:
        cases = [case for case in scenario.cases if only in f"{case.name}, {scenario.layout}"]
        if not cases:
            continue
        with tempfile.TemporaryDirectory() as name:
            plan = Plan([case.delay for case in cases], name)
            records = _trained(scenario, plan, Path(name) / "run")
            for index, case in enumerate(cases):
                on, off = (plan.steps_of(index, planted=planted) for planted in (True, False))
                yield _found(case, scenario.layout, records, Path(name), on, off, on)
                if case.once_too:
                    yield _found(case, scenario.layout, records, Path(name), on[:1], off, off + on[:1])


def _trained(scenario: Scenario, plan: Plan, out: Path) -> dict[int, RankRecord]:
    planted_delays.begin(plan)
    ranks = samestep.Layout(scenario.layout).world_size
    with planted_delays.companions(), planted_delays.slow_system(), planted_delays.quietly():
        samestep.train(job_of(plan, scenario.settings), layout=scenario.layout, ranks=ranks, out=out)
    return read_run(out)[1]


def medians(records: Mapping[int, RankRecord], steps: Sequence[int]) -> tuple[Rows, Rows, float]:
    """Return the median of each row on each rank, the standard error of that, and the median of the seconds of a step."""
    each = [measured_steps(records, [number]) for number in steps]
    keys = {key for one in each for rows in one.rows.values() for key in rows}
    seen = {rank: {key: [one.rows[rank].get(key, 0.0) for one in each] for key in keys} for rank in records}
    middle, error = (
        {rank: {key: of(values) for key, values in rows.items()} for rank, rows in seen.items()}
        for of in (statistics.median, error_of_median)
    )
    return middle, error, statistics.median(one.step_s for one in each)


def error_of_median(values: Sequence[float]) -> float:
    """Return the standard error of a median, from the median distance to it: of normal values 1.4826 of that is one deviation."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return deviation * math.sqrt(math.pi / 2 / len(values))


def _found(
    case: Case,
    layout: str,
    records: Mapping[int, RankRecord],
    folder: Path,
    on: Sequence[int],
    off: Sequence[int],
    judged: Sequence[int],
) -> Found:
    """Hold the rows of the steps with a delay against those of the steps without, and take the verdict on some of them."""
    (after, error, planted_s), (before, error_before, step_s) = medians(records, on), medians(records, off)
    moved = {
        rank: {key: seconds - before[rank].get(key, 0.0) for key, seconds in rows.items()}
        for rank, rows in after.items()
    }
    if len(on) == 1:  # it is as far off as one of the others, and not as their median
        alone = math.sqrt(len(off) * 2 / math.pi)
        error = {rank: {key: alone * each for key, each in rows.items()} for rank, rows in error_before.items()}
    truth_s = _truth_s(case, records, folder, on, off)
    if case.row == "data":  # a step goes by while the next samples are read
        truth_s -= step_s
    late = [*records] if case.moves_all else [*case.delay.ranks]
    # Of ranks that all wait for samples the first to have them waits for the last one's.
    own = (case.row, *WAITING) if case.row == "data" and len(late) > 1 else (case.row,)
    mine = [sum(seconds for (name, _), seconds in moved[rank].items() if name in own) for rank in late]
    waits = [
        sum(seconds for (name, _), seconds in moved[rank].items() if name in WAITING)
        for rank in records
        if rank not in late
    ]
    others = [("", 0.0, 0.0)]
    for rank, rows in moved.items():
        mean = own if rank in late else WAITING
        others += [
            (
                f"{name} {axis or ''}".strip() + f" of rank {rank}",
                seconds,
                math.hypot(*(found[rank].get((name, axis), 0.0) for found in (error, error_before))),
            )
            for (name, axis), seconds in rows.items()
            if name not in mean
        ]
    whole = measured_steps(records, judged)
    verdict = verdict_of(whole, parts_of(whole, whole.busiest, None)[0])
    first = next(iter(whole.charges), None)
    found = {
        "truth_s": truth_s,
        "moved_s": statistics.fmean(mine),
        "waits_s": statistics.fmean(waits) if waits else None,
        "other": max(others, key=lambda one: abs(one[1])),
        "charge": None if first is None else (first.rank, first.doing, first.seconds),
        "kind": verdict.kind,
    }
    once = len(judged) > len(on)
    name = f"{case.name}, in one step of {len(judged)}" if once else case.name
    rest = {"step_s": step_s, "planted_step_s": planted_s, "row": case.row, "verdict": verdict.line}
    faults = [*_faults(case, step_s, once=once, **found)]
    return Found(name=name, layout=layout, faults=faults, **rest, **found)


def _truth_s(
    case: Case, records: Mapping[int, RankRecord], folder: Path, on: Sequence[int], off: Sequence[int]
) -> float:
    """Return what a delay took, as the place says; of a shared core, by how much longer the system let the rank wait for it."""
    ranks = case.delay.ranks
    if case.delay.place == "core":
        queued = [[records[rank].steps[step].queued_ns or 0 for rank in ranks for step in steps] for steps in (on, off)]
        return (statistics.median(queued[0]) - statistics.median(queued[1])) / 1e9
    took = [planted_delays.took_s(folder, rank) for rank in ranks]
    with_it, without = (
        statistics.median(seconds.get(step, 0.0) for seconds in took for step in steps) for steps in (on, off)
    )
    return with_it - without  # a collective takes its time without the delay too


def _faults(
    case: Case,
    step_s: float,
    *,
    once: bool,
    truth_s: float,
    moved_s: float,
    waits_s: float | None,
    other: tuple[str, float, float],
    charge: tuple[int, str, float] | None,
    kind: str,
) -> Iterator[str]:
    if case.delay.place == "core":  # all that the rank does takes longer
        if kind not in case.kinds:
            yield "verdict"
        return
    if abs(moved_s - truth_s) > NEAR * truth_s:
        yield "row"
    if waits_s is not None and abs(waits_s - truth_s) > NEAR * truth_s:
        yield "waits"
    if abs(other[1]) > ELSEWHERE * step_s:
        yield "elsewhere"
    if case.cause and (charge is None or charge[0] not in case.delay.ranks or charge[1] != case.cause):
        yield "cause"
    if kind in ("straggler", "link") if once else kind not in case.kinds:
        yield "verdict"
