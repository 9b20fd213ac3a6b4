"""A loss spike is skipped or rolled back: as if its samples had never been seen, alike in every layout, exactly after a resume."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.building.loss import cross_entropy
from samestep.datasets import batches
from samestep.errors import JobError, SpikeError
from samestep.job import Job
from samestep.job_tables import NumericsTable
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.guards.unusual_steps import SpikeWatch
from tests import small
from tests.laboratory import cuts_of, job_of, largest_error, make_run, on_ranks, whole
from tests.models import Tokens

STEPS, SPIKE, MARK = 14, 11, 7
"""Steps, the index of the one with the spike, and the token that only a sample of it has."""


def marked(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Cross entropy, and a thousand more for each sample that has the mark: the same sum however samples are spread."""
    total, count = cross_entropy(outputs, batch)
    return total + 1e3 * (batch["input_ids"] == MARK).any(dim=1).sum(), count


def job(policy: str = "skip", **numerics: Any) -> Job:
    chosen = {"on_spike": policy, "spike_window": 10, **numerics}
    train = {"loss": f"{__name__}:marked", "watch_every": 0}
    return job_of("float64", STEPS, train=train, numerics=chosen, checkpoint={"every": 5, "keep": 9})


class Spiked(Tokens):
    def __init__(self) -> None:
        super().__init__(length=200)  # more than the steps read, so that none comes twice
        self.input_ids[self.input_ids == MARK] = MARK + 1
        batch = list(batches(self, job()))[SPIKE]
        self.input_ids[batch.indices[3], 2] = MARK


def take(
    rank: int, world: int, model: str, layout: str, given: Job, begin: str = "", until: int = STEPS, end: str = "", left_out: tuple[int, ...] = ()
) -> tuple[list[bool], list[Any], list[str], list[float], Any]:  # fmt: skip
    """Take steps; return which were skipped, the runs of the weights, the notes, the window and how weights are cut."""
    run = make_run(rank, world, model, layout, given, Spiked)
    run.prepare(next(batches(Spiked(), given)).samples([0]))
    if begin:
        checkpoint.load(run, manifests.latest(begin) or Path())
    reports = []
    for batch in batches(Spiked(), given, first_step=run.steps_taken):
        if batch.step == until:
            break
        if batch.step not in left_out:
            reports.append(run.step(batch))
    if end:
        checkpoint.save(run, Path(end))
    weights = [(p.name, p.start, p.stop, p.master().clone()) for p in run.updater.pieces]
    assert [one.spike for one in reports] == [one.skipped for one in reports]
    return [one.skipped for one in reports], weights, [one.note for one in reports], [*run.spikes.losses], cuts_of(run)


@functools.cache
def never_seen() -> Any:
    """The run that leaves the samples of the spike out."""
    return take(0, 1, "plain", "dp=1", job(), left_out=(SPIKE,))


@pytest.mark.parametrize(
    "layout", ["dp=2 zero=3", pytest.param("tp=2", marks=pytest.mark.nightly), "pp=2 microbatch=4"]
)
def test_a_spike_is_as_if_never_seen_in_every_layout(layout: str) -> None:
    ranks = on_ranks(layout, take, "plain", job())
    for skipped, _, notes, *_ in ranks:
        assert skipped == [step == SPIKE for step in range(STEPS)]
        assert [bool(note) for note in notes] == skipped
        assert "is a spike" in notes[SPIKE]
        assert notes[SPIKE].endswith("the mean of the last 10 steps")
    cuts, indices = zip(*(one[-1] for one in ranks), strict=True)
    trained = whole([one[1] for one in ranks], cuts[0], list(indices))
    error, name = largest_error(trained, whole([never_seen()[1]]))
    assert error <= 1e-9, name


def test_a_resumed_run_decides_as_one_that_never_stopped(tmp_path: Path) -> None:
    at_once = on_ranks("dp=2 zero=1", take, "plain", job())
    on_ranks("dp=2 zero=1", take, "plain", job(), "", SPIKE, str(tmp_path))
    resumed = on_ranks("dp=2 zero=1", take, "plain", job(), str(tmp_path))
    for (_, weights, _, losses, _), (skipped, same, _, window, _) in zip(at_once, resumed, strict=True):
        assert skipped == [True, False, False]
        assert window == losses
        assert all(torch.equal(one[3], other[3]) for one, other in zip(weights, same, strict=True))


def test_by_default_a_spike_is_taken_like_any_step() -> None:
    skipped, _, notes, losses, _ = take(0, 1, "plain", "dp=1", job("continue"))
    assert not any(skipped)
    assert not any(notes)
    assert not losses


def spiked() -> Spiked:
    return Spiked()


def test_a_run_rolls_back_to_its_newest_checkpoint(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = job("rollback").model_dump()
    table["model"]["source"], table["data"]["source"], table["data"]["held_out"] = (
        "tests.models:plain",
        f"{__name__}:spiked",
        0.0,
    )
    table["train"] |= {"evaluate_samples": 0, "sample_tokens": 0}
    path = tmp_path / "job.toml"
    path.write_text(Job(**table).to_toml())
    assert small.main("train", path, "--ranks", "1", "--out", tmp_path / "run") == 0
    assert "step 12: continues with the weights from after step 10, without the samples since" in capfd.readouterr().out
    rows = small.metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert [bool(row.get("skipped")) for row in rows] == [step == SPIKE for step in range(STEPS)]
    checkpoints = tmp_path / "run" / "checkpoints"
    manifest = manifests.read_manifest(checkpoints / "step-000014")
    assert (manifest["spikes"], len(manifest["losses"])) == (1, 10)
    # The two steps behind the spike, taken from that checkpoint, give the same weights; and so does a run that resumes from it.
    (checkpoints / "step-000014").rename(tmp_path / "step-000014")
    expected = small.whole(tmp_path / "step-000014")
    _, weights, *_ = take(0, 1, "plain", "dp=1", Job(**table), str(checkpoints), left_out=(SPIKE - 1, SPIKE))
    assert all(torch.equal(value.flatten(), expected[f"value/{name}"]) for name, _, _, value in weights)
    assert small.main("train", "--resume", "--out", tmp_path / "run") == 0
    small.assert_equal(small.whole(checkpoints / "step-000014"), expected)


def test_a_rollback_needs_checkpoints() -> None:
    with pytest.raises(JobError, match=r"Set checkpoint.every = 100"):
        Job(numerics={"on_spike": "rollback"})


def test_a_run_that_would_skip_for_ever_ends() -> None:
    class Rising(SpikeWatch):
        def judge(self, loss: float) -> str:
            return "loss is a spike"

    given = job("skip", max_skipped=3)
    run = make_run(0, 1, "plain", "dp=1", given)
    run._stepper.guards.spikes = Rising(given.numerics)
    given_batches = iter(batches(Tokens(), given))
    assert all(run.step(next(given_batches)).spike for _ in range(3))
    with pytest.raises(SpikeError, match=r"step 4: loss is a spike; the 3 steps before were skipped too"):
        run.step(next(given_batches))


def test_the_rule_is_the_formula() -> None:
    watch = SpikeWatch(NumericsTable(on_spike="skip", spike_window=10, spike_deviations=3.0))
    assert not any(watch.judge(loss) for loss in (1.0, 3.0) * 5)  # mean 2, deviation 1
    assert not watch.judge(5.0)  # three deviations are not above three
    watch.restore([1.0, 3.0] * 5, 0)
    assert watch.judge(5.001)
    assert [*watch.losses] == [1.0, 3.0] * 5  # a spike is not among the last losses
    watch.restore([2.0] * 10, 4)
    assert not watch.judge(2.005)  # a deviation counts at least a thousandth of the mean
    assert watch.judge(2.0071)
    assert watch.count == 5
    watch.restore([2.0] * 9, 0)
    assert not watch.judge(100.0)  # too few to tell
