"""A step of which every label is masked makes no update, alike in every layout, and the run goes on."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep import Job
from samestep.datasets import Batch, batches
from samestep.errors import DataError
from tests import small
from tests.laboratory import cuts_of, job_of, make_run, on_ranks, whole
from tests.models import MODELS, Tokens
from tests.plain import Trained, train_plainly

STEPS, MASKED = 4, (0, 2)
"""Steps, and the indices of those of which every label is masked; the first one is what a run is prepared from."""


def job(**tables: Any) -> Job:
    tables = {"train": {"watch_every": 1}, **tables}
    return job_of("float64", STEPS, schedule={"warmup_steps": 4}, **tables)


class Masked(Tokens):
    def __init__(self, masked: tuple[int, ...] = MASKED) -> None:
        super().__init__(length=200)
        every = list(batches(self, job()))
        for step in masked:
            self.labels[every[step].indices] = -100


def take(rank: int, world: int, model: str, layout: str, given: Job) -> tuple[list[Any], list[Any], Any]:
    """Take all steps; return what each reports, the runs of the weights, and how these are cut."""
    run = make_run(rank, world, model, layout, given, Masked)
    reports = [run.step(batch) for batch in batches(Masked(), given)]
    seen = [(one.skipped, one.loss, one.tokens, one.lr, one.note) for one in reports]
    return seen, [(p.name, p.start, p.stop, p.master().cpu().clone()) for p in run.updater.pieces], cuts_of(run)


@functools.cache
def plain() -> Trained:
    """Losses and weights of a plain loop that passes over the steps that count nothing; the rate goes on with their numbers."""
    run = make_run(0, 1, "plain", "dp=1", job(), Masked)
    run.prepare(next(batches(Masked(), job())).samples([0]))
    model = MODELS["plain"]().double()
    model.load_state_dict(run.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def of_batch(batch: Batch) -> Tensor:
        samples: Any = batch.samples(batch.indices)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (batch.step + 1) / STEPS
        return F.cross_entropy(model(samples["input_ids"]).flatten(0, 1), samples["labels"].flatten())

    counting = (batch for batch in batches(Masked(), job()) if batch.step not in MASKED)
    return train_plainly(model, counting, of_batch, optimizer)


@pytest.mark.parametrize(
    "layout", ["dp=2 zero=3 microbatch=2", "pp=2 microbatch=4", pytest.param("tp=2", marks=pytest.mark.nightly)]
)
def test_a_step_that_counts_nothing_makes_no_update_in_any_layout(layout: str) -> None:
    assert_skipped(on_ranks(layout, take, "plain", job()))


def test_a_device_that_runs_ahead_holds_the_update_back() -> None:
    ahead = job(train={"watch_every": 0})  # a watched step waits
    assert_skipped(on_ranks("dp=2 zero=1", take, "plain", ahead, device="cuda"))


def assert_skipped(ranks: list[Any]) -> None:
    losses, weights = plain()
    for reports, *_ in ranks:
        assert [skipped for skipped, *_ in reports] == [step in MASKED for step in range(STEPS)]
        assert [tokens == 0 for _, _, tokens, *_ in reports] == [step in MASKED for step in range(STEPS)]
        assert [lr for *_, lr, _ in reports] == pytest.approx([0.025, 0.05, 0.075, 0.1])
        assert all(math.isnan(loss) and "all are masked" in note for skipped, loss, _, _, note in reports if skipped)
        assert [one[1] for one in reports if not one[0]] == pytest.approx(losses, abs=1e-9)
    cuts, indices = zip(*(one[-1] for one in ranks), strict=True)
    found = whole([one[1] for one in ranks], cuts[0], [*indices])
    assert found.keys() == weights.keys()
    assert max(float((found[name].view_as(one) - one).abs().max()) for name, one in weights.items()) <= 1e-9


def test_a_replica_whose_part_counts_nothing_makes_no_update_alone() -> None:
    """Its step is followed by no exchange, so the weights of the second replica stay, and those of the first one move."""
    given = job(numerics={"replicas": 2, "exchange_every": 3})
    first, second = on_ranks("dp=2", take_half, "plain", given)
    assert first[0] == second[0]
    assert first[1] > 0.0
    assert second[1] == 0.0
    for ranks in on_ranks("dp_replicate=2 dp_shard=2 zero=3", take_half, "plain", given):
        assert ranks[0] == pytest.approx(first[0], abs=1e-9)


class HalfMasked(Tokens):
    """The second half of the samples of a step, which is the part of the second of two replicas, counts nothing."""

    def __init__(self) -> None:
        super().__init__(length=200)
        self.labels[list(batches(self, job()))[1].indices[4:]] = -100


def take_half(rank: int, world: int, model: str, layout: str, given: Job) -> tuple[list[float], float]:
    """Take all steps; return their losses, and how far the weights of this rank have moved in the step that is half masked."""
    run, moved = make_run(rank, world, model, layout, given, HalfMasked), 0.0
    losses = []
    for batch in batches(HalfMasked(), given):
        before = [p.master().clone() for p in run.updater.pieces] if batch.step == 1 else []
        losses.append(run.step(batch).loss)
        if batch.step == 1:
            pieces = zip(run.updater.pieces, before, strict=True)
            moved = sum(float((piece.master() - old).abs().sum()) for piece, old in pieces)
    return losses, moved


def test_a_run_in_which_nothing_counts_ends_after_max_skipped() -> None:
    given = job(numerics={"max_skipped": 2})
    run = make_run(0, 1, "plain", "dp=1", given, Masked)
    every = list(batches(Masked((0, 1, 2, 3)), given))
    assert [run.step(batch).skipped for batch in every[:2]] == [True, True]
    with pytest.raises(DataError, match=r"step 3: no label of its batch counts.*the 2 steps before were skipped too"):
        run.step(every[2])


def masked() -> Masked:
    return Masked()


def test_the_command_says_it_once_and_marks_the_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = job(numerics={"on_nonfinite": "stop"}).model_dump()
    table["model"]["source"], table["data"]["source"] = "tests.models:plain", f"{__name__}:masked"
    table["data"]["held_out"] = 0.0
    table["train"] |= {"evaluate_samples": 0, "sample_tokens": 0}
    path = tmp_path / "job.toml"
    path.write_text(Job(**table).to_toml())
    assert small.main("train", path, "--ranks", "1", "--out", tmp_path / "run") == 0
    assert capfd.readouterr().out.count("all are masked") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("skipped", False) for row in rows] == [step in MASKED for step in range(STEPS)]
    assert [row["loss"] is None for row in rows] == [step in MASKED for step in range(STEPS)]
