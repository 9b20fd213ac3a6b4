"""A weight that a step gives no gradient is left as it is, with its states and its step count, as in a plain torch loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.layout import Layout
from tests.laboratory import TOLERANCE, Observed, assert_ledger, follow
from tests.parity.unused_weights import OPTIMIZERS, Pairs, job, plain, run_of, taken, turns
from tests.plain import Trained, assert_trained
from tests.pool import pool, telling


def trained(
    rank: int, world: int, model: str, layout: str, kind: str, seed: int, optimizer: str, clip_norm: float | None
) -> Trained:
    """Return the losses of a run, and its weights in the end."""
    run = run_of(rank, world, model, layout, job(clip_norm=clip_norm), OPTIMIZERS[optimizer])
    losses = list(taken(run, turns(kind, seed)))
    return losses, run.state_dict(on_every_rank=True)


def on_ranks(layout: str, function: object, *args: object) -> list[Trained]:
    world = Layout(layout).world_size
    return pool(world).run(function, *args) if world > 1 else [function(0, 1, *args)]  # type: ignore[operator, arg-type]


LAYOUTS = {
    "switched": ["dp=1", "dp=1 microbatch=4", "dp=2", "dp=2 zero=1 microbatch=2", "dp=2 zero=3", "tp=2"],
    "asleep": ["dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=2 microbatch=1", "dp=2 zero=3"],
    "experts": ["dp=1 microbatch=2", "dp=2", "dp=2 zero=1 microbatch=1", "dp=4", "dp=2 zero=3"],
    "matched": ["dp=1", "dp=2", "dp=2 zero=1", "dp=2 zero=3", "tp=2"],
    "constant": ["dp=1 microbatch=1", "dp=2 microbatch=1", "dp=2 zero=1 microbatch=1", "dp=2 zero=3 microbatch=1"],
}
FROZEN = ["dp=1", "dp=2 zero=1", "dp=2 zero=2 microbatch=1 accumulate=full", "dp=2 zero=3", "tp=2", "pp=2 microbatch=3"]
CASES = [
    *((model, layout, "used") for model, layouts in LAYOUTS.items() for layout in layouts),
    *(("switched", layout, "frozen") for layout in FROZEN),
    ("switched", "dp=2", "both"),
]


DAILY = (
    ("switched", "dp=2 zero=1 microbatch=2", "used"),
    ("asleep", "dp=2 zero=3", "used"),
    ("experts", "dp=2 zero=3", "used"),
    ("matched", "dp=1", "used"),
    ("constant", "dp=2 microbatch=1", "used"),
    ("switched", "tp=2", "frozen"),
    ("switched", "pp=2 microbatch=3", "frozen"),
    ("switched", "dp=2", "both"),
)


@pytest.mark.parametrize(
    ("number", "model", "layout", "kind"),
    [
        pytest.param(number, *case, marks=() if case in DAILY else pytest.mark.nightly)
        for number, case in enumerate(CASES)
    ],
)
def test_what_a_step_does_not_use_is_left_as_a_plain_loop_leaves_it(
    number: int, model: str, layout: str, kind: str
) -> None:
    """The steps in which a weight is unused are drawn, another case has others."""
    optimizer = sorted(OPTIMIZERS)[number % len(OPTIMIZERS)]
    clip_norm = (None, 0.3)[number // 2 % 2]
    ranks = on_ranks(layout, trained, model, layout, kind, number, optimizer, clip_norm)
    assert_trained(ranks, plain(model, clip_norm, optimizer, kind, number), TOLERANCE, TOLERANCE)


def resumed(rank: int, world: int, layout: str, folder: Path, saves: bool) -> Trained:
    """Take the first three steps and save, or load and take the others."""
    run = run_of(rank, world, "experts", layout, job(train={"ema": 0.9}), OPTIMIZERS["adamw"])
    plan = turns("used", 5)
    if not saves:
        run.load(folder)
        losses = list(taken(run, plan, run.steps_taken))
        return losses, run.state_dict(on_every_rank=True)
    losses = [loss for _, loss in zip(range(3), taken(run, plan), strict=False)]
    run.save(folder)
    return losses, {}


def test_states_of_unused_weights_are_resumed_in_any_layout(tmp_path: Path) -> None:
    expected = plain("experts", None, "adamw", "used", 5)
    first = on_ranks("dp=2 zero=1", resumed, "dp=2 zero=1", tmp_path, True)[0][0]
    for layout in ("dp=1", "dp=2"):
        losses, weights = on_ranks(layout, resumed, layout, tmp_path, False)[0]
        assert_trained([([*first, *losses], weights)], expected, TOLERANCE, TOLERANCE)


def recorded(rank: int, world: int, layout: str) -> Observed:
    run = run_of(rank, world, "experts", layout, job(), OPTIMIZERS["momentum"])
    return follow(run, Pairs(), run.job, record=True)


@pytest.mark.parametrize("layout", ["dp=2 zero=1", pytest.param("dp=2 zero=3", marks=pytest.mark.nightly)])
def test_what_ranks_agree_on_is_in_the_program(layout: str) -> None:
    ranks = pool(2).run(recorded, layout)
    assert_ledger(ranks, layout)


@telling
def frozen_on_one(rank: int, world: int, layout: str) -> None:
    run = run_of(rank, world, "switched", layout, job(), OPTIMIZERS["adamw"])
    plan = turns("none", 0)
    for step, _ in enumerate(taken(run, plan)):
        if step == 1 and rank == 1:
            plan[2:] = turns("frozen", 1)[2:]


def test_a_weight_that_one_rank_has_frozen_is_named_on_every_rank() -> None:
    for found in pool(2).run(frozen_on_one, "dp=2"):
        assert "is frozen (requires_grad_(False)) on 1 of the 2 ranks" in found


@telling
def awake(rank: int, world: int, layout: str) -> None:
    run = run_of(rank, world, "asleep", layout, job(), OPTIMIZERS["adamw"])
    list(taken(run, turns("none", 0)))


def test_a_weight_that_comes_into_use_where_tp_cuts_it_is_named() -> None:
    for found in pool(2).run(awake, "tp=2"):
        assert "step 1: the loss depends on extra.weight, and did not when the model was traced" in found
        assert "Use tp=1" in found


@telling
def thawed(rank: int, world: int, layout: str, frozen: str) -> None:
    """Thaw what was frozen when the run was made."""
    run = run_of(rank, world, "switched", layout, job(), OPTIMIZERS["adamw"], frozen=frozen)
    list(taken(run, turns("none", 0)))


@pytest.mark.parametrize("layout", ["dp=1", "pp=2"])
def test_what_is_thawed_must_have_been_built_trainable(layout: str) -> None:
    for frozen, name in (("blocks.0.", "blocks.0.up.weight"), ("first.", "first.weight")):
        for found in on_ranks(layout, thawed, layout, frozen):
            assert f"{name} was frozen when the run was made" in str(found)
            assert "Build it trainable, and freeze it in run.model until then" in str(found)
