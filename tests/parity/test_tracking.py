"""A loop of one's own has the loggers of `samestep train`: files, functions of a report, held-out means that end it in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.errors import InputError, JobError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.optimizers.optimizer_source import optimizer_source
from samestep.runtime.recording import step_recorder
from samestep.runtime.recording.sums import StepSums
from samestep.runtime.run import Run
from samestep.training import evaluations
from tests.laboratory import run_from
from tests.parity.test_between_steps import Net, Points, everywhere, loss, measure

JOB = Job(
    train={"global_batch": 4, "steps": 8, "watch_every": 0}, run={"device": "cpu"}, numerics={"precision": "float64"}
)
WORDS = ("progress", "metrics.jsonl", "tensorboard")


def run_of(rank: int, world: int, layout: str, lr: float = 0.01, job: Job = JOB) -> Run:
    source = Source(Net, loss, optimizer_source(lambda params: torch.optim.SGD(params, lr=lr), None))
    return run_from(source, layout, job, rank, world)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def stopped_early(
    rank: int, world: int, layout: str, folder: str
) -> tuple[list[int], list[float], list[dict[str, float]]]:
    """Steps that a loop takes whose weights stay as they are, and what a function and the loop are given."""
    run, seen = run_of(rank, world, layout, lr=0.0), list[int]()
    held_out = samestep.EarlyStopping(Points(), every=2, patience=1, keep_best=True, metrics=measure)
    with samestep.track(run, *WORDS, lambda report: seen.append(report.step), held_out, folder=folder) as tracking:
        reports = [run.step(batch) for batch in samestep.batches(Points(), JOB)]
        tracking(reports[-1])  # which it has received
    assert tracking.is_over
    assert [report.stop for report in reports] == [False, False, False, True]
    return seen, [report.loss for report in reports], [dict(report.held_out) for report in reports]


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3", "pp=2 microbatch=2"])
def test_a_loop_of_ones_own_is_tracked_and_ends_in_time(layout: str, tmp_path: Path) -> None:
    found = everywhere(layout, stopped_early, str(tmp_path))
    assert found[0][0] == [1, 2, 3, 4]
    assert all(not seen for seen, *_ in found[1:])
    for _, losses, held_out in found:
        assert losses == pytest.approx([row["loss"] for row in rows(tmp_path)], rel=1e-12)
        assert [*map(bool, held_out)] == [False, True, False, True]
        assert list(held_out[1]) == ["held_out", "held_out/largest", "held_out/positive"]
    assert rows(tmp_path)[1]["held_out"] == pytest.approx(found[0][2][1], rel=1e-12)
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["step-000002"]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert all(row["time"]["step"] <= row["step"] and row["time"]["forward_s"] > 0 for row in rows(tmp_path)[1:])
    axes = {"dp=1": (), "dp=2 zero=3": ("dp_shard", "world"), "pp=2 microbatch=2": ("pp", "world")}[layout]
    for name in ("forward", "backward", "update", *(f"wait_{axis}" for axis in axes)):
        assert f"time/{name}_ms".encode() in events.read_bytes()


def whole(step: int) -> Any:
    return next(samestep.batches(Points(), JOB, first_step=step)).samples(range(4))


def taken_again(rank: int, world: int, layout: str, folder: str, form: str) -> list[int]:
    """The steps that a loop takes which its held-out means have ended, each time that it is started; at last with more patience."""
    taken = []
    for patience in (1, 1, 2):
        run = run_of(rank, world, layout, lr=0.0)
        if taken:
            run.load(folder)
        samestep.track(run, samestep.EarlyStopping(Points(), every=2, patience=patience), folder=folder)
        first = run.steps_taken
        for batch in (
            samestep.batches(Points(), JOB, first_step=first) if "stream" in form else map(whole, range(first, 8))
        ):
            run.backward(batch) if "parts" in form else None
            if (run.update() if "parts" in form else run.step(batch)).stop:
                break
        taken.append(run.steps_taken)
        run.save(folder)
    return taken


@pytest.mark.parametrize(
    ("layout", "form"),
    [("dp=2", "steps of a stream"), ("dp=2", "parts of a stream"), ("dp=2", "steps"), ("dp=2", "parts")],
)
def test_a_loop_that_ended_early_stays_ended(layout: str, form: str, tmp_path: Path) -> None:
    found = everywhere(layout, taken_again, str(tmp_path), form)
    assert found == [[4, 4, 6]] * Layout(layout).world_size


def heedless(rank: int, world: int, layout: str, folder: str) -> list[bool]:
    """Whether the report of each step has held-out means, of a loop over values that goes on behind its end."""
    run = run_of(rank, world, layout, lr=0.0)
    samestep.track(run, "metrics.jsonl", samestep.EarlyStopping(Points(), every=1, patience=1), folder=folder)
    return [bool(run.step(whole(step)).held_out) for step in range(6)]


@pytest.mark.parametrize("layout", ["dp=2", "tp=2", "pp=2 microbatch=2"])
def test_a_loop_that_goes_on_behind_its_end_is_evaluated_no_more_on_any_rank(layout: str, tmp_path: Path) -> None:
    assert everywhere(layout, heedless, str(tmp_path)) == [[True, True, False, False, False, False]] * 2


def with_typo(outputs: Any, batch: Any) -> Any:
    return {"first": (outputs["scores"].sum(), len(batch["x"]))}


def with_other_key(outputs: Any, batch: Any) -> Any:
    return {"first": (torch.as_tensor(batch["labelz"]).sum(), 4)}


def without_count(outputs: Any, batch: Any) -> Any:
    return {"first": torch.ones(())}


def mistaken(rank: int, world: int, layout: str) -> list[tuple[str, int]]:
    found = []
    for function in (with_typo, with_other_key, without_count):
        run = run_of(rank, world, layout)
        samestep.track(run, samestep.EarlyStopping(Points(), every=1000, metrics=function))
        with pytest.raises(JobError) as refused:
            run.step(next(iter(samestep.batches(Points(), JOB))))
        found.append((str(refused.value), run.steps_taken))
    return found


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_a_measure_that_fails_is_refused_before_the_first_step(layout: str) -> None:
    for found in everywhere(layout, mistaken):
        assert [steps for _, steps in found] == [0, 0, 0]
        names = "with_typo", "with_other_key", "without_count"
        assert all(f"the measure {name}" in text for name, (text, _) in zip(names, found, strict=True))


def test_values_of_a_batch_are_one_set(tmp_path: Path) -> None:
    run = run_of(0, 1, "dp=1")
    samestep.track(run, samestep.EarlyStopping(whole(0), every=1, metrics=measure), folder=tmp_path)
    assert [*run.step(whole(1)).held_out] == ["held_out", "held_out/largest", "held_out/positive"]


def slow(rank: int, world: int, layout: str, folder: str) -> None:
    """Steps of a loop whose last rank, as a recorder sees it, works longer than the others."""
    job = Job(train={"global_batch": 4, "steps": 45, "watch_every": 0}, run={"device": "cpu"})
    run = run_of(rank, world, layout, job=job)
    samestep.track(run, "metrics.jsonl", folder=folder)
    own_s = 300.0 if rank == world - 1 else 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_recorder, "sums_of", lambda step, axes: StepSums(step.step, {"cpu_s": own_s}))
        for batch in samestep.batches(Points(), job):
            run.step(batch)


def test_a_slow_rank_is_named_once_in_a_loop_of_ones_own(tmp_path: Path) -> None:
    everywhere("dp=2", slow, str(tmp_path))
    named = [row["straggler"] for row in rows(tmp_path) if "straggler" in row]
    assert [one["rank"] for one in named] == [1]


def judged(rank: int, world: int, layout: str, folder: str) -> list[float]:
    """Means of a measure of which the largest is the best, over a run that resumes after a step that it has dropped."""
    run = run_of(rank, world, layout)
    held_out = samestep.EarlyStopping(
        {"all": Points(), "few": torch.utils.data.Subset(Points(), range(3))},
        every=2, metrics=measure, monitor="few/largest", mode="max", keep_best=True,
    )  # fmt: skip
    samestep.track(run, "metrics.jsonl", held_out, folder=folder)
    found = []
    for batch in samestep.batches(Points(), JOB):
        report = run.step(batch)
        if report.step == 4:
            run.save(Path(folder) / "checkpoints")
        found += [report.held_out["few/largest"]] if report.held_out else []
    again = run_of(rank, world, layout)
    again.load(Path(folder) / "checkpoints")
    samestep.track(again, "metrics.jsonl", held_out, folder=folder)
    for batch in samestep.batches(Points(), JOB, first_step=again.steps_taken):
        again.step(batch)
    return found


@pytest.mark.parametrize("layout", ["dp=1", "dp=2"])
def test_a_resumed_loop_continues_its_files(layout: str, tmp_path: Path) -> None:
    for means in everywhere(layout, judged, str(tmp_path)):
        assert [row["step"] for row in rows(tmp_path)] == list(range(1, 9))
        lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [2, 4, 6, 8]
        assert [line["mean"] for line in lines] == pytest.approx(means, rel=1e-9)
        best = max(range(4), key=lambda index: means[index])
        assert [path.name for path in (tmp_path / "best").iterdir()] == [f"step-{2 * best + 2:06d}"]


def in_parts(rank: int, world: int, layout: str, folder: str) -> tuple[list[Any], list[Any], list[float]]:
    """What loggers are given of steps with two backwards and two updates, what the loop is given, and means that it takes itself."""
    given = {"first": _sgd_of("0"), "rest": _sgd_of("")}
    source = Source(Net, loss, optimizer_source(given, None))
    run, seen = run_from(source, layout, JOB, rank, world), list[Any]()
    held_out = samestep.EarlyStopping(Points(), every=2, patience=2, monitor="held_out", mode="max")
    samestep.track(
        run, "metrics.jsonl", lambda one: seen.append((one.step, one.loss, *one.terms)), held_out, folder=folder
    )
    losses, means = [], []
    for batch in samestep.batches(Points(), JOB):
        run.backward(batch, _size, into="first")
        run.update("first")
        run.backward(batch, into="rest")
        losses.append((batch.step + 1, run.update("rest").loss, "size"))
        means += [] if batch.step % 2 == 0 else [run.evaluate(Points())["loss"]]
    return seen, losses, means


def _size(outputs: Any, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
    return {"size": (outputs["logits"].square().sum(), outputs["logits"].numel())}


def _sgd_of(word: str) -> Any:
    """Return the optimizer of the weights that have a word in their names and "0" not, unless it is the word."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for name, one in named if ("0" in name) == (word == "0")], lr=0.01)

    return optimizer


@pytest.mark.parametrize("layout", ["dp=1", "dp=2 zero=3"])
def test_a_step_in_parts_is_one_report_once_all_its_parts_are_taken(layout: str, tmp_path: Path) -> None:
    found = everywhere(layout, in_parts, str(tmp_path))
    seen, losses, means = found[0]
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert seen == losses == [(row["step"], row["loss"], "size") for row in rows(tmp_path)]
    assert [line["loss"] for line in lines] == pytest.approx(means, rel=1e-12)
    assert len(means) == 3  # the loss falls, and the largest mean is the first: patience ends the loop after two more
    assert all(one[1:] == (losses, means) for one in found)


@pytest.mark.parametrize(
    ("loggers", "says"),
    [
        (["progres"], "'progres' must be one of progress, metrics.jsonl, .* .did you mean 'progress'"),
        (["no_such_module:keep"], "no_such_module"),
        (["wandb"], "wandb is not installed here. Use pip install wandb"),
        (
            [3],
            'was given a int as a logger. Use words such as "progress", functions of a report and a samestep.EarlyStopping',
        ),
        ([["progress"]], r"was given a list as a logger. .*, one after another: samestep.track\(run, first, second\)"),
        ([samestep.EarlyStopping(Points()), samestep.EarlyStopping(Points())], "Use one with a dict of data sets"),
        (
            [samestep.EarlyStopping(Points(), monitor="accuracy")],
            r"monitor='accuracy'\) must be one of the means held_out",
        ),
        (
            [samestep.EarlyStopping({"a": Points()}, monitor="b/largest", metrics=measure)],
            r"must be one of the means a, and .* NAME/METRIC",
        ),
        (
            [samestep.EarlyStopping({"a": Points(), "b": Points()}, monitor="largest", metrics=measure)],
            "must be one of the means a, b, and",
        ),
    ],
)
def test_what_is_no_receiver_is_refused(loggers: list[Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        samestep.track(run_of(0, 1, "dp=1"), *loggers)


def test_a_mean_that_is_not_taken_does_not_decide(tmp_path: Path) -> None:
    run = run_of(0, 1, "dp=1")
    samestep.track(
        run, samestep.EarlyStopping(Points(), every=1, monitor="held_out/acuracy", metrics=measure), folder=tmp_path
    )
    with pytest.raises(
        JobError,
        match=r"monitor='held_out/acuracy'\) must be one of the means held_out, held_out/largest, held_out/positive",
    ):
        run.step(next(samestep.batches(Points(), JOB)))
    assert run.steps_taken == 0
    with pytest.raises(JobError, match=r"every=100 evaluates after each 100th step"):
        samestep.EarlyStopping(Points(), every=0)


def test_the_log_names_the_mean_that_decides(tmp_path: Path) -> None:
    run = run_of(0, 1, "dp=1")
    held_out = samestep.EarlyStopping(Points(), every=1, monitor="largest", metrics=measure, patience=9)
    samestep.track(run, held_out, folder=tmp_path)
    steps = samestep.batches(Points(), JOB)
    reports = [run.step(next(steps)) for _ in range(2)]
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [row["monitor"] for row in rows] == ["held_out/largest"] * 2
    assert [row["mean"] for row in rows] == [report.held_out["held_out/largest"] for report in reports]
    assert "loss" not in rows[0]
    assert [row.loss for row in evaluations.read(tmp_path, 2)] == [row["mean"] for row in rows]


def test_autocast_around_a_step_is_refused_and_within_a_forward_it_is_not() -> None:
    class Cast(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x).float()

    run = samestep.parallelize(Cast(2, 2), "cross_entropy", torch.optim.SGD, layout="")
    batch = torch.ones(4, 2), torch.arange(4) % 2
    run.step(batch)
    says = r"run.step within torch.autocast, .* numerics.precision = .float32. of the job"
    with pytest.raises(ModelError, match=says), torch.autocast("cpu", torch.bfloat16):
        run.step(batch)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        run.step(batch)


def test_a_function_that_fails_is_named(tmp_path: Path) -> None:
    def broken(report: Any) -> None:
        raise KeyError("speed")

    run = run_of(0, 1, "dp=1")
    samestep.track(run, broken, folder=tmp_path)
    with pytest.raises(JobError, match=r"^step 1: the logger .*broken fails: KeyError: 'speed'"):
        run.step(next(samestep.batches(Points(), JOB)))
