"""Replicas that are trained apart: every layout gives what one device for each replica computes, and both what a plain torch loop of
local SGD and DiLoCo does.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import loss_of
from samestep.building.model import call_model
from samestep.datasets import batches
from samestep.errors import CheckpointError, InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.axes import precision
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.ledger import Ledger
from samestep.runtime.run import Run
from samestep.strategies import program_of
from samestep.training.rank_part import Saver
from tests.laboratory import (
    TOLERANCE,
    Observed,
    assert_ledger,
    assert_same,
    follow,
    job_of,
    largest_error,
    make_run,
    observe,
    on_ranks,
    prepared_run,
    reference,
    resumed_losses,
    source_of,
    whole,
)
from tests.models import Tokens

MODEL = "wide_llama"
NIGHTLY = pytest.mark.nightly
ADAM = {"name": "adamw", "lr": 1e-2, "options": {"eps": 1e-3}}
"""AdamW that does not turn the noise of float64 into a part of a step."""
DILOCO: dict[str, float] = {}
LOCAL_SGD = {"outer_lr": 1.0, "outer_momentum": 0.0}


def apart(replicas: int = 2, every: int = 2, steps: int = 5, **tables: Any) -> Job:
    numerics = {"replicas": replicas, "exchange_every": every, **tables.pop("numerics", {})}
    optimizer = {"clip_norm": 0.5, **tables.pop("optimizer", {})}
    train = {"watch_every": 0, **tables.pop("train", {})}
    return job_of("float64", steps, numerics=numerics, optimizer=optimizer, train=train)


# -- against a plain torch loop --------------------------------------------------------------------


def plain_loop(job: Job, saved: int = 0, rolled: int = 0) -> tuple[list[float], dict[str, Tensor]]:
    """Train copies of the model apart with plain torch; return the losses and the outer weights.

    Behind step `rolled` all that is trained is put back to what it was behind step `saved`, an exchange since then too.
    """
    numerics, table = job.numerics, job.optimizer
    first = prepared_run(0, 1, MODEL, "dp=1", job_of("float64", 1))
    source = source_of(MODEL, Layout(), job)
    assert not isinstance(source.model, nn.Module)
    outer = source.model().double()
    outer.load_state_dict(first.state_dict())
    copies = [copy.deepcopy(outer) for _ in range(numerics.replicas)]
    kind: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[table.name]
    inner = [kind(one.parameters(), lr=table.lr, weight_decay=table.weight_decay, **table.options) for one in copies]
    is_nesterov = numerics.outer_momentum > 0
    moves = torch.optim.SGD(
        outer.parameters(), lr=numerics.outer_lr, momentum=numerics.outer_momentum, nesterov=is_nesterov
    )

    def exchange() -> None:
        for name, param in outer.named_parameters():
            mean = torch.stack([one.get_parameter(name).detach() for one in copies]).mean(0)
            param.grad = param.detach() - mean
        moves.step()
        for one in copies:
            one.load_state_dict(outer.state_dict())

    loss, losses, states, everything = loss_of(job), [], list[Any](), [*copies, outer, *inner, moves]
    for step, batch in enumerate(batches(Tokens(), job), 1):
        total, counted = 0.0, 0.0
        for index, indices in enumerate(batch.shares(0, 1, numerics.replicas)):
            samples = batch.samples(indices)
            with precision.RaiseIslands():
                loss_sum, count = loss(call_model(copies[index], samples), samples)
            inner[index].zero_grad()
            (loss_sum / count).backward()
            if table.clip_norm is not None:
                nn.utils.clip_grad_norm_(copies[index].parameters(), table.clip_norm)
            inner[index].step()
            total, counted = total + float(loss_sum.detach()), counted + float(count)
        losses.append(total / counted)
        is_last = step == job.train.steps
        if step % numerics.exchange_every == 0 or is_last:
            exchange()
        if step == saved:
            states = copy.deepcopy([part.state_dict() for part in everything])
        if step == rolled:
            for part, state in zip(everything, states, strict=True):
                part.load_state_dict(state)
            if is_last:
                exchange()
    return losses, {name: param.detach().flatten() for name, param in outer.named_parameters()}


@pytest.mark.parametrize(("outer", "optimizer"), [(DILOCO, ADAM), (LOCAL_SGD, {"clip_norm": None})])
def test_a_device_for_each_replica_does_what_a_plain_loop_does(
    outer: dict[str, float], optimizer: dict[str, Any]
) -> None:
    job = apart(replicas=4, every=2, steps=5, numerics=outer, optimizer=optimizer)
    losses, weights = plain_loop(job)
    ours = reference(MODEL, job)
    assert ours.losses == pytest.approx(losses, abs=TOLERANCE)
    error, name = largest_error(whole([ours.weights]), weights)
    assert error <= TOLERANCE, f"{name}: {error:.1e}"


# -- layouts ---------------------------------------------------------------------------------------

LAYOUTS = [
    pytest.param("dp=2 microbatch=2", marks=NIGHTLY),
    pytest.param("dp_replicate=2 dp_shard=2 zero=2 microbatch=1", marks=NIGHTLY),
    "dp_replicate=2 dp_shard=2 zero=3",
    "dp=2 tp=2",
    pytest.param("dp=2 tp=2 sequence_parallel", marks=NIGHTLY),
    pytest.param("dp=2 cp=2", marks=NIGHTLY),
    pytest.param("dp_replicate=2 dp_shard=2 zero=3 tp=2", marks=NIGHTLY),
]


@pytest.mark.parametrize("codec", ["none", pytest.param("int8", marks=NIGHTLY)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_the_replicas_of_whole_devices(layout: str, codec: str) -> None:
    job = apart(steps=3, numerics={"compression": codec}, optimizer=ADAM)
    ranks = on_ranks(layout, observe, MODEL, job, True)
    assert_ledger(ranks, layout)
    assert_losses_and_weights(ranks, reference(MODEL, job))


@pytest.mark.parametrize(
    ("replicas", "layout", "model", "codec"),
    [
        (4, "dp=4 microbatch=1", MODEL, "int8"),
        (4, "dp=4 microbatch=1", MODEL, "powersgd"),
        pytest.param(4, "dp=4 microbatch=1", MODEL, "bf16", marks=NIGHTLY),
        pytest.param(2, "dp_replicate=2 dp_shard=2 zero=3", "gpt2", "int8", marks=NIGHTLY),
        (2, "dp=2 pp=2 schedule=zero-bubble microbatch=1", "deep_tied", "none"),
    ],
)
def test_other_numbers_models_and_codecs(replicas: int, layout: str, model: str, codec: str) -> None:
    job = apart(replicas, steps=3, numerics={"compression": codec})
    ranks = on_ranks(layout, observe, model, job, True)
    assert_ledger(ranks, layout)
    assert_losses_and_weights(ranks, reference(model, job))


def assert_losses_and_weights(ranks: list[Observed], wanted: Observed) -> None:
    """Losses and norms of all steps are those of the reference, and so are the last averaged move and the weights behind it."""
    last = [dataclasses.replace(seen, gradients=seen.gradients[-1:]) for seen in (*ranks, wanted)]
    assert_same(last[:-1], last[-1], TOLERANCE)


# -- between two exchanges -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "codec"),
    [
        pytest.param("dp=2", "dp=2 pp=2 microbatch=1", "int8", marks=NIGHTLY),  # in the middle of an exchange
        ("dp=2", "dp=2 cp=2", "powersgd"),
        ("dp=2 tp=2", "dp_replicate=2 dp_shard=2 zero=3", "none"),
        pytest.param("dp_replicate=2 dp_shard=2 zero=1", "dp=2 tp=2", "int8", marks=NIGHTLY),
        pytest.param("dp=2 pp=2 microbatch=1", "dp=2 cp=2", "none", marks=NIGHTLY),
    ],
)
def test_a_run_resumes_between_two_exchanges_in_any_layout(before: str, after: str, codec: str, tmp_path: Path) -> None:
    job = apart(every=2, steps=6, numerics={"compression": codec}, optimizer=ADAM)
    first, rest = str(tmp_path / "first"), str(tmp_path / "rest")
    start = on_ranks(before, resumed_losses, MODEL, job, None, 3, first)[0]
    end = on_ranks(after, resumed_losses, MODEL, job, first, 6, rest)[0]
    assert start + end == pytest.approx(reference(MODEL, job).losses, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("dp_replicate=2 dp_shard=2 zero=1", "int8"),
        ("dp=2 pp=2 microbatch=1", "none"),
        pytest.param("dp_replicate=2 dp_shard=2 zero=3", "int8", marks=NIGHTLY),
        pytest.param("dp=2", "powersgd", marks=NIGHTLY),
    ],
)
def test_each_step_sends_what_its_program_lists(layout: str, codec: str) -> None:
    job = apart(every=3, steps=5, numerics={"compression": codec}, optimizer=ADAM)
    ranks = on_ranks(layout, _with_ledgers, MODEL, job)
    for seen, ledgers in ranks:
        assert seen.losses == pytest.approx(reference(MODEL, job).losses, abs=TOLERANCE)
        for step, (sent, listed) in enumerate(ledgers, 1):
            assert sent == listed, f"step {step}"
            exchanges = any(row.owner.startswith("bucket") for rows in sent.values() for row in rows)
            assert "dp_shard" in layout or exchanges == (step in (3, 5)), f"step {step}: the last one exchanges too"
    assert_losses_and_weights([seen for seen, _ in ranks], reference(MODEL, job))


Ledgers = list[tuple[dict[str, list[Any]], dict[str, list[Any]]]]


def _with_ledgers(rank: int, world: int, model: str, layout: str, job: Job) -> tuple[Observed, Ledgers]:
    """Take a job's steps, and note of each what was sent and what its program lists."""
    run, ledgers = make_run(rank, world, model, layout, job), Ledgers()
    recorded = [Ledger() for _ in range(job.train.steps)]

    def close(of: Run) -> None:
        recorded[of.steps_taken - 1].__exit__(None, None, None)
        program = of.held.program_behind(of.steps_taken)
        ledgers.append((recorded[of.steps_taken - 1].rows, program.ledger(group_of=of.assembly.parallel.mesh.group_of)))
        if of.steps_taken < job.train.steps:
            recorded[of.steps_taken].__enter__()

    recorded[0].__enter__()
    return follow(run, Tokens(), job, each=close), ledgers


def _outer(rank: int, world: int, model: str, layout: str, job: Job) -> tuple[float, float, float, float]:
    """Held-out losses behind an exchange and one step later, of the run and of the weights it gives away, and the next loss."""
    run = prepared_run(rank, world, model, layout, job)
    stream = batches(Tokens(), job)
    held_out = next(iter(batches(Tokens(), job)))
    for _ in range(2):
        run.step(next(stream))
    before, given = run.evaluate(held_out)["loss"], norm_of(run.state_dict(on_every_rank=True))
    run.step(next(stream))
    after, given_after = run.evaluate(held_out)["loss"], norm_of(run.state_dict(on_every_rank=True))
    assert given == given_after
    return before, after, run.step(next(stream)).loss, given


def _started(rank: int, world: int, model: str, layout: str, job: Job) -> list[float]:
    """Losses of a run that begins with weights that are set, and the validation loss before its first step."""
    run = prepared_run(rank, world, model, layout, job)
    first = run.state_dict(on_every_rank=True)
    checkpoint.set_weights(run, lambda name: 0.5 * first[name] if name in first else None)
    held_out = run.evaluate(next(iter(batches(Tokens(), job))))["loss"]
    return [held_out, *(run.step(batch).loss for batch in batches(Tokens(), job))]


def test_every_replica_begins_with_weights_that_are_set() -> None:
    job = apart(every=2, steps=4)
    first, *others = on_ranks("dp=2", _started, MODEL, job)
    assert first[1] == pytest.approx(first[0], abs=TOLERANCE)
    for losses in (*others, *on_ranks("dp_replicate=2 dp_shard=2 zero=3", _started, MODEL, job)):
        assert losses == pytest.approx(first, abs=TOLERANCE)


def norm_of(tensors: dict[str, Tensor]) -> float:
    return sum(float(one.double().square().sum()) for one in tensors.values())


@pytest.mark.parametrize("layout", ["dp=2", "dp_replicate=2 dp_shard=2 zero=1"])
def test_what_is_evaluated_and_given_away_are_the_outer_weights(layout: str) -> None:
    job = apart(every=2, steps=6)
    wanted = reference(MODEL, job).losses[3]
    for before, after, loss, _ in on_ranks(layout, _outer, MODEL, job):
        assert before == after
        assert loss == pytest.approx(wanted, abs=TOLERANCE)  # and the replicas go on from their own


@pytest.mark.parametrize("layout", ["dp=2 microbatch=2", pytest.param("dp=2 tp=2", marks=NIGHTLY)])
def test_steps_are_watched(layout: str) -> None:
    job = apart(every=3, steps=5, train={"watch_every": 2})
    ranks = on_ranks(layout, observe, MODEL, job)
    for seen in ranks:
        assert seen.losses == pytest.approx(reference(MODEL, apart(every=3, steps=5)).losses, abs=TOLERANCE)


def _rounded(rank: int, world: int, model: str, layout: str, job: Job) -> list[tuple[bool, float]]:
    run = make_run(rank, world, model, layout, job)
    return [(report.skipped, report.loss) for batch in batches(Tokens(), job) for report in [run.step(batch)]]


def test_a_step_of_one_replica_that_overflows_is_skipped_by_all() -> None:
    job = apart(every=2, steps=12, numerics={"precision": "fp16", "loss_scale": 2.0**28})
    for steps in on_ranks("dp=2", _rounded, MODEL, job):
        assert 0 < sum(skipped for skipped, _ in steps) < 12
        assert all(skipped or loss < 5.0 for skipped, loss in steps)


@pytest.mark.parametrize("every", [1, 2])
def test_what_only_exchanges_read_makes_no_other_job_without_them(every: int, tmp_path: Path) -> None:
    before, now = (apart(2, every, numerics={"outer_momentum": value, "compression": "int8"}) for value in (0.9, 0.5))
    manifest = {"job": before.model_dump(mode="json"), "step": 3, "folder": ""}
    if every == 1:
        assert manifests.check_job(manifest, now, tmp_path) == ()
        return
    with pytest.raises(CheckpointError, match=r"another numerics\.outer_momentum"):
        manifests.check_job(manifest, now, tmp_path)


# -- what is sent, and what is refused -------------------------------------------------------------


def test_nothing_but_scalars_is_sent_between_replicas_until_they_exchange() -> None:
    job = apart(every=3, steps=2)
    program = program_of(source_of(MODEL, Layout("dp=2"), job).prepared.spec, job, Layout("dp=2"))  # type: ignore[union-attr]
    assert {op.owner for _, op in program.ops() if op.axis} == {"scalars"}


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("dp=2 zero=1", "dp_replicate=2 dp_shard=2"),
        ("dp=4", r"each data rank makes one contribution, and 'dp=4' has 4. Use dp=2, or numerics.replicas = 4"),
        ("dp=2 offload", "offload"),
        ("tp=2", r"each data rank makes one contribution, and 'dp=1 tp=2' has 1. Use dp=2"),
    ],
)
def test_what_is_refused(layout: str, why: str) -> None:
    job = apart()
    spec = source_of(MODEL, Layout(f"tp={Layout(layout).tp}"), job).prepared.spec  # type: ignore[union-attr]
    with pytest.raises(InputError, match=why):
        program_of(spec, job, Layout(layout))


@pytest.mark.parametrize(
    ("numerics", "ema"),
    [({}, None), ({"replicas": 3}, None), ({"replicas": 2, "optimizer_states": "8bit"}, None), ({"replicas": 2}, 0.9)],
)
def test_a_job_that_does_not_fit_itself_says_what_works(numerics: dict[str, object], ema: float | None) -> None:
    with pytest.raises(InputError, match=r"\. (Use|Set) "):
        Job(train={"global_batch": 8, "ema": ema}, numerics={"exchange_every": 2, **numerics})


# -- back to a checkpoint --------------------------------------------------------------------------


def _rolled_back(
    rank: int, world: int, model: str, layout: str, job: Job, saved: int, rolled: int, folder: str
) -> tuple[list[float], Any]:
    """Take steps, save behind one of them, and go back to it behind a later one; return the losses and the outer weights."""
    run = prepared_run(rank, world, model, layout, job)
    saver = Saver(run, Path(folder), lambda text: None)
    losses = []
    for batch in batches(Tokens(), job):
        losses.append(run.step(batch).loss)
        if run.steps_taken == saved:
            saver.save(is_last=True)
        if run.steps_taken == rolled:
            saver.roll_back(rolled)
    return losses, run.state_dict(on_every_rank=True)


@pytest.mark.parametrize(
    ("saved", "rolled", "layout"),
    [
        (4, 7, "dp=2"),  # an exchange is left out
        (7, 9, "dp_replicate=2 dp_shard=2 zero=1"),  # after the last step there is one
    ],
)
def test_going_back_leaves_exchanges_out_except_that_of_the_last_step(
    saved: int, rolled: int, layout: str, tmp_path: Path
) -> None:
    job = apart(every=3, steps=9, optimizer={"options": {"momentum": 0.9}})
    wanted, outer = plain_loop(job, saved, rolled)
    for losses, weights in on_ranks(layout, _rolled_back, MODEL, job, saved, rolled, str(tmp_path)):
        assert losses == pytest.approx(wanted, abs=TOLERANCE)
        for name, value in outer.items():
            assert torch.allclose(weights[name].flatten(), value, rtol=0, atol=TOLERANCE), name
