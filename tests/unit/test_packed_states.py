"""States that are held in fewer bits: what rounding and quantising do to numbers, the same in every layout and checkpoint."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.datasets import batches
from samestep.errors import JobError, LayoutError
from samestep.job import Job
from samestep.job_files import load
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.program.update_rules import block_of, states_per_param
from samestep.proof import held_tensors, observation
from samestep.proof.held_tensors import HeldTensor
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.optimizers.packed_states import _codes, _numbers, quantise
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.out_of_memory import held_bytes
from samestep.training.workload import Workload
from tests.pool import pool
from tests.traced import families_once

JOB = Path(__file__).parents[2] / "jobs" / "default.toml"
CPU = torch.device("cpu")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)

# -- 8 bits ----------------------------------------------------------------------------------------


def restored(values: Tensor, block: int, *, is_positive: bool) -> Tensor:
    codes, scales = quantise(values, block, is_positive=is_positive)
    return (_numbers(is_positive, CPU)[codes.int()].view(-1, block) * scales[:, None]).flatten()


def test_the_numbers_are_those_of_the_published_implementation() -> None:
    signed, positive = (_numbers(kind, CPU) for kind in (False, True))
    assert len(signed) == len(positive) == 256
    assert signed.unique().numel() == positive.unique().numel() == 256
    # those of create_dynamic_map in bitsandbytes
    assert signed[[0, 1, 127, 128, 254, 255]].tolist() == pytest.approx(
        [-0.99296875, -0.97890625, 0.0, 5.5e-07, 0.99296875, 1.0], rel=1e-6
    )
    assert positive[[0, 1, 2, 254, 255]].tolist() == pytest.approx(
        [0.0, 3.25e-07, 7.75e-07, 0.996484375, 1.0], rel=1e-6
    )


@given(st.lists(FLOATS, min_size=1, max_size=6), st.sampled_from([16, 64, 256]), st.booleans(), st.integers(0, 99))
def test_quantising_keeps_extremes_and_zeros_and_comes_near(sizes, block, is_positive, seed):
    drawn = torch.randn(len(sizes), block, generator=torch.Generator().manual_seed(seed))
    values = (drawn * torch.tensor(sizes)[:, None].clamp(-1e30, 1e30)).flatten()
    values[::3] = 0.0
    values = values.abs() if is_positive else values
    found = restored(values, block, is_positive=is_positive)
    rows, got = values.view(-1, block), found.view(-1, block)
    largest = rows.abs().max(dim=1, keepdim=True)
    assert torch.equal(got.gather(1, largest.indices), rows.gather(1, largest.indices))
    assert torch.equal(found == 0, (found == 0) | (values == 0))
    assert (found[values == 0] == 0).all()
    gaps = _numbers(is_positive, CPU).diff().max() / 2
    assert ((rows - got).abs() <= largest.values * gaps * 1.001).all()
    assert torch.equal(restored(found, block, is_positive=is_positive), found)  # as it is packed again


@pytest.mark.parametrize("is_positive", [False, True])
def test_codes_are_those_of_the_nearest_numbers(is_positive: bool) -> None:
    """Of what lies at and on both sides of each edge between two codes, of the numbers themselves, and of what lies between."""
    numbers = _numbers(is_positive, CPU)
    edges = (numbers[1:] + numbers[:-1]) / 2
    ends = torch.tensor([-torch.inf, torch.inf])
    beside = [torch.nextafter(edges, end.expand_as(edges)) for end in ends]
    between = torch.rand(2**16, generator=torch.Generator().manual_seed(0)) ** 4
    values = torch.cat([edges, *beside, numbers, between, between * (1 if is_positive else -1), torch.zeros(1)])
    assert torch.equal(_codes(values, is_positive).long(), torch.bucketize(values, edges))


def test_an_outlier_spoils_its_own_block_alone() -> None:
    values = torch.full((512,), 1e-3)
    values[7] = -1e6
    found = restored(values, 256, is_positive=False)
    assert found[7] == -1e6
    assert (found[:256] == 0).sum() == 255
    assert torch.equal(found[256:], values[256:])


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_is_not_hidden(odd: float) -> None:
    values = torch.linspace(-1.0, 1.0, 64)
    values[40] = odd
    found = restored(values, 32, is_positive=False)
    assert not found[40].isfinite()
    assert found[:32].isfinite().all()


def test_blocks_divide_rows_and_leave_room_for_cuts() -> None:
    shapes = [(4096, 4096), (50257, 768), (10, 64), (3, 5), (7,), (), (8, 64, 48), (16, 3, 3, 3), (0, 64), (64, 0)]
    assert [block_of(shape) for shape in shapes] == [256, 64, 16, 0, 0, 0, 256, 0, 16, 0]


# -- the same in every layout ----------------------------------------------------------------------

WORDS = (
    "model.config.num_hidden_layers=2", "model.config.intermediate_size=192", "train.steps=3", "schedule.warmup_steps=1",
    "train.global_batch=4", "data.sequence_length=16", "train.watch_every=2", "numerics.optimizer_states=8bit",
)  # fmt: skip


def job_with(*more: str) -> Job:
    return load(JOB, (*WORDS, *more))


def opened(rank: int, world: int, layout: str, job: Job) -> Run:
    with families_once():
        workload = Workload(job)
    run = Run(workload.source, Layout(layout), job, RankInfo(rank, rank, world, world, CPU))
    run.prepare(workload.example)
    return run


def gradients_of(run: Run, steps: int) -> list[dict[str, Tensor]]:
    found = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        params = run.assembly.model.spec.params
        found.append({p.name: torch.randn(p.shape, generator=generator) * 10.0 ** (step - 2) for p in params})
    return found


def fed(rank: int, world: int, layout: str, job: Job, folder: str, reads: bool = False) -> list[HeldTensor]:
    """Feed equal gradients to the optimizer, or read a checkpoint; return the weights and states of a rank."""
    run = opened(rank, world, layout, job)
    if reads:
        checkpoint.load(run, manifests.list_checkpoints(Path(folder))[-1])
    else:
        run.assembly.weights.store.begin_step()
        for _ in observation.feed(run, gradients_of(run, 3)):
            pass
        checkpoint.save(run, Path(folder) / layout, keep=1)
    return held_tensors.held_weights(run) + held_tensors.held_state(run)


def of_ranks(layout: str, job: Job, folder: Path, reads: bool = False) -> dict[str, Tensor]:
    """Return weights and states of all ranks of a layout, in coordinates of the whole."""
    ranks, found = Layout(layout).world_size, {}
    seen = (
        pool(ranks).run(fed, layout, job, str(folder), reads)
        if ranks > 1
        else [fed(0, 1, layout, job, str(folder), reads)]
    )
    for one in (one for mine in seen for one in mine):
        places = torch.as_tensor(one.places if isinstance(one.places, Tensor) else [*one.places])
        whole = found.setdefault(one.name, torch.full((64 * 256,), torch.nan))
        whole[places[places >= 0]] = one.values.float()[places >= 0]
    return found


@pytest.mark.parametrize(
    "layouts",
    [["tp=2", "dp=2 zero=3"], pytest.param(["dp=2 zero=1", "dp=2 zero=2 offload"], marks=pytest.mark.nightly)],
)
def test_equal_gradients_give_equal_weights_and_states(layouts: list[str], tmp_path: Path) -> None:
    """To the bit, and so are those that one device reads from a layout's checkpoint, or a layout from one device's."""
    job = job_with()
    alone = of_ranks("dp=1", job, tmp_path)  # whose trace the ranks inherit
    for layout in layouts:
        assert_equal(of_ranks(layout, job, tmp_path), alone, layout)
        assert_equal(of_ranks("dp=1", job, tmp_path / layout, True), alone, f"{layout}, read on one device")
        assert_equal(of_ranks(layout, job, tmp_path / "dp=1", True), alone, f"dp=1, read in {layout}")


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert found.keys() == expected.keys(), where
    for name, values in expected.items():
        assert torch.equal(found[name].nan_to_num(7.0), values.nan_to_num(7.0)), f"{where}: {name}"


def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path: Path) -> None:
    job = job_with("numerics.precision=bf16")
    dataset = Workload(job).dataset
    whole, first, second = (opened(0, 1, "dp=1 microbatch=2", job) for _ in range(3))
    losses = [whole.step(batch).loss for batch in batches(dataset, job)]
    first.step(next(batches(dataset, job)))
    checkpoint.save(first, tmp_path, keep=1)
    checkpoint.load(second, manifests.list_checkpoints(tmp_path)[-1])
    assert [second.step(batch).loss for batch in batches(dataset, job, first_step=1)] == losses[1:]
    for ours, theirs in zip(second.updater.pieces, whole.updater.pieces, strict=True):
        assert torch.equal(ours.master(), theirs.master())


@pytest.mark.parametrize("name", ["adamw", "rmsprop"])
def test_states_are_held_in_as_many_bytes_as_the_program_says(name: str) -> None:
    options = {"adamw": "{}", "rmsprop": "{momentum=0.5}"}[name]
    job = job_with(f"optimizer.name={name}", f"optimizer.options={options}", "numerics.precision=bf16")
    run = opened(0, 1, "dp=1", job)
    run.step(next(batches(Workload(job).dataset, job)))
    said = at_rest(run.program, states_per_param(job))
    assert held_bytes(run)["optimizer"] == pytest.approx(said.optimizer, rel=0.01)
    numel = run.assembly.model.spec.num_params
    assert said.optimizer <= (2 + states_per_param(job) * 1.26) * numel * 1.01


def test_a_cut_within_a_block_is_refused_with_what_works() -> None:
    job = job_with("model.config.intermediate_size=176")
    with pytest.raises(LayoutError, match=r"tp=2 cuts .*down_proj.weight within blocks of 16 .*. Use tp=1"):
        opened(0, 1, "tp=2", job)


def test_the_states_of_an_optimizer_of_ones_own_are_not_packed() -> None:
    job = job_with()
    with families_once():
        workload = Workload(job)
    source = replace(workload.source, optimizer=lambda named: Own([tensor for _, tensor in named], lr=0.1))
    with pytest.raises(
        JobError, match=r'optimizer_states = "8bit" holds states of torch\'s own .*Set .*optimizer_states = "float32"'
    ):
        Run(source, Layout(), job, RankInfo(0, 0, 1, 1, CPU)).prepare(workload.example)


class Own(torch.optim.SGD):
    """A rule of a user's own."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
