"""Masters in two halves are the float32 masters, to the bit: at the edges, while training, and in checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.datasets import batches
from samestep.job import Job
from samestep.program.step import StepSpec
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.weights.pieces import SplitMasters
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


def halved(masters: Tensor) -> tuple[Tensor, SplitMasters]:
    weight = masters.bfloat16()
    return weight, SplitMasters([weight], [masters])


def number(pattern: int) -> int:
    """A pattern of 32 bits as a signed number."""
    return pattern - 2**32 if pattern >= 2**31 else pattern


EDGES = [0x0, 0x80000000, 0x1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x80008000, 0x80018000, 0x7F7F8000, 0x7F7FFFFF]
EDGES += [0x7F7E8000, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x00800000, 0x807F8000]


@given(st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(EDGES), min_size=1, max_size=600))
def test_both_halves_give_the_master_back(patterns: list[int]) -> None:
    masters = torch.tensor([*map(number, patterns)], dtype=torch.int32).view(torch.float32)
    weight, split = halved(masters)
    is_number = ~masters.isnan()
    assert torch.equal(weight[is_number], masters.bfloat16()[is_number])
    for _ in range(2):  # as they were given, and as an update that changes nothing leaves them
        found = split.of(0)
        assert torch.equal(bits(found)[is_number], bits(masters)[is_number])
        assert found[~is_number].isnan().all()
        with split.joined() as (window,):
            assert torch.equal(bits(window)[is_number], bits(masters)[is_number])
    assert torch.equal(weight[is_number], masters.bfloat16()[is_number])


@pytest.mark.parametrize("upper", [0x3F81, 0x0000, 0x7F7F, 0x807F])
def test_every_lower_half_of_a_number(upper: int) -> None:
    masters = torch.arange(2**16, dtype=torch.int32).add_(number(upper << 16)).view(torch.float32)
    weight, split = halved(masters.clone())
    with split.joined() as (window,):
        assert torch.equal(bits(window), bits(masters))
    assert torch.equal(bits(split.of(0)), bits(masters))
    assert torch.equal(weight, masters.bfloat16())


def test_any_number_of_halfway_masters() -> None:
    masters = torch.full((5000,), 0x3F808000, dtype=torch.int32).view(torch.float32)
    _, split = halved(masters)
    with split.joined() as (window,):
        window.mul_(2.0)
    assert torch.equal(split.of(0), 2 * masters)


def test_weights_of_one_group_keep_apart() -> None:
    masters = [torch.randn(3, 5), torch.full((7,), 1.00390625), torch.zeros(0), torch.randn(300), torch.tensor(1.1)]
    weights = [master.bfloat16() for master in masters]
    split = SplitMasters(weights, masters)
    split.set(0, torch.full((3, 5), 1.00390625))
    split.set(3, -masters[3])
    assert torch.equal(split.of(0), torch.full((15,), 1.00390625))
    assert torch.equal(split.of(1), masters[1])
    assert torch.equal(split.of(3), -masters[3])
    assert torch.equal(split.of(4), masters[4].view(1))
    with split.joined() as windows:
        assert [window.shape for window in windows] == [master.shape for master in masters]
    assert torch.equal(weights[3], (-masters[3]).bfloat16())


# -- in a run --------------------------------------------------------------------------------------


JOB = job_of("bf16", 3, optimizer={"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "options": {}})
Masters = list[tuple[str, int, Tensor]]
"""Name and first element of each piece, and its master."""


def trained(
    rank: int, world: int, model: str, layout: str, job: Job, splits: bool, read: str = "", written: str = ""
) -> tuple[list[float], Masters]:
    """Train with masters in two halves or whole, from a checkpoint or to one; return losses and masters."""
    with pytest.MonkeyPatch.context() as patch:
        if not splits:
            patch.setattr(StepSpec, "splits_masters", False)
        run = make_run(rank, world, model, layout, job)
        run.prepare(next(batches(Tokens(), job)).samples([0]))
        if read:
            checkpoint.load(run, manifests.list_checkpoints(Path(read))[-1])
        losses = []
        for batch in batches(Tokens(), job, first_step=run.steps_taken):
            losses.append(run.step(batch).loss)
            if written and run.steps_taken == 2:
                checkpoint.save(run, Path(written), 1)
    assert any(piece.split for piece in run.updater.pieces) == splits
    return losses, [(p.name, p.start, p.master().clone()) for p in run.updater.pieces]


def assert_equal(ours: tuple[list[float], Masters], theirs: tuple[list[float], Masters]) -> None:
    assert ours[0] == theirs[0]
    for (name, start, found), (_, expected_start, expected) in zip(ours[1], theirs[1], strict=True):
        assert start == expected_start
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("layout", "model"), [("dp=2 zero=1", "gpt2"), ("tp=2", "gpt2_even"), ("pp=2 microbatch=4", "deep_tied")]
)
def test_training_is_that_of_whole_masters_to_the_bit(layout: str, model: str) -> None:
    halves, wholes = (on_ranks(layout, trained, model, JOB, splits) for splits in (True, False))
    for ours, theirs in zip(halves, wholes, strict=True):
        assert_equal(ours, theirs)


def test_checkpoints_hold_the_masters_that_whole_ones_would(tmp_path: Path) -> None:
    on_ranks("dp=2 zero=1", trained, "gpt2", JOB, True, "", str(tmp_path))
    resumed, whole = (trained(0, 1, "gpt2", "dp=1", JOB, splits, read=str(tmp_path)) for splits in (True, False))
    assert_equal(resumed, whole)
    (again,) = {tuple(losses) for losses, _ in on_ranks("dp=2 zero=1", trained, "gpt2", JOB, True, str(tmp_path))}
    assert list(again) == pytest.approx(resumed[0], rel=1e-2)


def test_what_is_written_into_weights_reaches_their_masters() -> None:
    """Unwritten elements keep their masters to the bit; of written ones zeros are exact, and all are in later writes."""
    run = make_run(0, 1, "gpt2", "dp=1", JOB)
    steps = batches(Tokens(), JOB)
    run.step(next(steps))
    before = {piece.name: piece.master().clone() for piece in run.updater.pieces}
    one, other, *_ = [piece.name for piece in run.updater.pieces if piece.split and piece.value.dim() == 2]
    for value in (0.0, 0.3, -0.7):
        with torch.no_grad():
            run.model.get_parameter(one)[:3].fill_(value)
        piece = next(piece for piece in run.updater.pieces if piece.name == one)
        limit = 2.0**-9 * abs(value) if value == 0.3 and piece.split else 0.0
        written = torch.full_like(piece.master()[:3], value).bfloat16().float()
        assert (piece.master()[:3] - written).abs().max() <= limit
        assert torch.equal(piece.master()[3:], before[one][3:])
        assert torch.equal(run.model.get_parameter(one), piece.master().bfloat16())
    for piece in run.updater.pieces:
        assert piece.name == one or torch.equal(piece.master(), before[piece.name]), piece.name
    run.step(next(steps))
    masters = {piece.name: piece.master() for piece in run.updater.pieces}
    assert not torch.equal(masters[other], before[other])
    for name in (one, other):
        assert torch.equal(run.model.get_parameter(name), masters[name].bfloat16())
    assert [piece.name for piece in run.updater.pieces if piece.target is not None and not piece.split] == [one]
