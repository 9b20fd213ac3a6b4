"""Batch norm over groups of samples: every layout gives the losses, gradients, weights and running statistics of a plain loop."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.building.loss import cross_entropy
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import InputError, JobError, LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.step import SampleGroups
from samestep.runtime.axes import batch_norm
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.run import Run
from tests.laboratory import (
    TOLERANCE,
    Observed,
    assert_ledger,
    assert_same,
    follow,
    in_loop,
    job_of,
    largest_error,
    perturbed,
    traced_run,
)
from tests.pool import pool

CLASSES = 5


class Images:
    """Samples (image, class) whose channels have other means and scales, in another order each epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        scale = torch.tensor([1.0, 3.0, 0.2]).view(1, 3, 1, 1)
        self.images = 2.0 * scale + scale * torch.randn(40, 3, 6, 6, generator=generator, dtype=torch.float64)
        self.classes = torch.randint(CLASSES, (40,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.classes[index]


class Residual(nn.Module):
    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), norm
        self.second, self.last = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)
        self.way, self.side = nn.Conv2d(width, width, 1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.second(torch.relu(self.norm(self.first(x)))))
        return torch.relu(y + self.side(self.way(x)))


class Bare(nn.Module):
    """Calls the function, with statistics of its own, on rows of several positions for each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.mix(x.flatten(2).transpose(1, 2)).flatten(0, 1)  # [N H W, C]
        rows = F.batch_norm(rows, self.mean, self.spread, self.scale, None, self.training, 0.3)
        return rows.view(x.shape[0], -1, x.shape[1]).transpose(1, 2).unflatten(2, x.shape[2:])


class Views(nn.Module):
    """Normalises two views of all samples together, which stand one behind the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.norm(torch.cat([x, x.flip(-1).tanh()])).chunk(2)
        return one - two.sin()


class Net(nn.Module):
    """Every kind of batch norm; blocks of residuals with a branch."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, width, 3, padding=1, bias=False))
        self.blocks = nn.ModuleList(
            [
                Residual(width, nn.BatchNorm2d(width, momentum=None)),
                Residual(width, nn.SyncBatchNorm(width, momentum=0.4)),
                Residual(width, nn.BatchNorm2d(width, track_running_stats=False)),
                Bare(width),
                Views(width),
            ]
        )
        self.cube = nn.BatchNorm3d(width)
        self.frozen = nn.BatchNorm2d(width)
        self.flat, self.head = nn.BatchNorm1d(width), nn.Linear(width, CLASSES)
        self.frozen.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        x = self.frozen(self.cube(x.unsqueeze(2)).squeeze(2))
        return self.head(self.flat(torch.tanh(x).mean((2, 3))))


def batch_norm_job(coupled: int | None = None, batch: int = 8, **tables: Any) -> Job:
    numerics = {} if coupled is None else {"batch_norm_group": coupled}
    train = {"global_batch": batch, "watch_every": 0, **tables.pop("train", {})}
    return job_of("float64", 3, train=train, numerics={**numerics, **tables.pop("numerics", {})}, **tables)


def run_of(rank: int, world: int, layout: str, job: Job, build: Any = Net) -> Run:
    source = Source(perturbed(build), cross_entropy, optimizer_of(job), str(build))
    return traced_run(f"batch norm {build}", source, Images(), layout, job, rank, world)


Buffers = dict[str, Tensor]


def observe(rank: int, world: int, layout: str, job: Job) -> tuple[Observed, Buffers, float]:
    run = run_of(rank, world, layout, job)
    seen = follow(run, Images(), job, record=True)
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    chunks = run.program.chunks
    here = {path for chunk in chunks for index in chunk for path in run.program.step.model.layers[index].called}
    mine = {name: one for name, one in buffers.items() if not chunks or any(name.startswith(f"{p}.") for p in here)}
    held_out = next(batches(Images(), batch_norm_job(batch=24)))
    return seen, mine, run.evaluate(held_out)["loss"]


@functools.cache
def plain_loop(coupled: int, batch: int = 8) -> tuple[list[float], dict[str, Tensor], Buffers, float]:
    """Return losses, weights and buffers of a plain loop over groups, and its validation loss."""
    job = batch_norm_job(batch=batch)
    run = run_of(0, 1, "dp=1", job)
    run.prepare(next(batches(Images(), job)).samples([0]))
    model = Net().double()
    model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.forward = functools.partial(nn.BatchNorm2d.forward, module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in batches(Images(), job):
        images, classes = step.samples(step.indices)
        parts = zip(images.split(coupled), classes.split(coupled), strict=True)
        loss = sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in parts) / batch
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    held_out_batch = next(batches(Images(), batch_norm_job(batch=24)))
    images, classes = held_out_batch.samples(held_out_batch.indices)
    model.eval()
    with torch.no_grad():
        parts = zip(images.split(coupled), classes.split(coupled), strict=True)
        held_out = float(sum(F.cross_entropy(model(x), y, reduction="sum") for x, y in parts))
    weights = {name: param.detach().flatten() for name, param in model.named_parameters()}
    return losses, weights, buffers, held_out / 24.0


def prove(layout: str, coupled: int | None = None, batch: int = 8, **tables: Any) -> None:
    job, world = batch_norm_job(coupled, batch, **tables), Layout(layout).world_size
    run_of(0, 1, "dp=1", job)
    run_of(0, world, layout, job)
    found = pool(world).run(observe, layout, job) if world > 1 else [observe(0, 1, layout, job)]
    losses, weights, buffers, held_out = plain_loop(coupled or batch, batch)
    ranks = [seen for seen, _, _ in found]
    assert ranks[0].losses == pytest.approx(losses, rel=1e-9)
    reference, _, _ = _one_device(coupled, batch)
    assert_same(ranks, reference, TOLERANCE)
    assert_ledger(ranks, layout)
    met = set()
    for _, of_rank, evaluated in found:
        met |= of_rank.keys()
        assert evaluated == pytest.approx(held_out, rel=1e-9)
        for name, buffer in of_rank.items():
            assert torch.allclose(buffer, buffers[name], rtol=1e-9, atol=1e-12), (layout, name, buffer, buffers[name])
            same = [other[name] for _, other, _ in found if name in other]
            assert all(torch.equal(buffer, other) for other in same), f"{name} differs between ranks"
    assert met == buffers.keys()
    error, name = largest_error(weights, {n: t.flatten() for n, _, _, t in reference.weights})
    assert error <= TOLERANCE, f"{name} of one device: {error:.1e}"


@functools.cache
def _one_device(coupled: int | None, batch: int) -> tuple[Observed, Buffers, float]:
    return observe(0, 1, "dp=1", batch_norm_job(coupled, batch))


EVERY = pytest.mark.nightly


@pytest.mark.parametrize(
    ("layout", "coupled", "batch"),
    [
        pytest.param("dp=1 recompute=full", 2, 8, marks=EVERY),
        pytest.param("dp=2 zero=1", None, 8, marks=EVERY),
        ("dp=2 zero=2 recompute=full", None, 8),
        ("dp=2 microbatch=2 recompute=selective", 4, 8),
        ("pp=2 microbatch=2", 2, 8),
        pytest.param("pp=2 dp=2 microbatch=1", 2, 8, marks=EVERY),  # one sample a rank, which torch refuses by itself
        ("dp=3", None, 2),  # a place without samples
        ("dp=2 zero=3 pp=2 microbatch=2 recompute=full", 4, 8),
        pytest.param("dp=2", None, 8, marks=EVERY),
        pytest.param("dp=2", 2, 8, marks=EVERY),
        pytest.param("dp=2 zero=3", None, 8, marks=EVERY),
        pytest.param("dp=2 zero=1 microbatch=1", 2, 8, marks=EVERY),
        pytest.param("dp=4", 4, 12, marks=EVERY),
        pytest.param("dp=4", None, 6, marks=EVERY),
        pytest.param("pp=2", None, 8, marks=EVERY),
        pytest.param("pp=2 microbatch=2 schedule=zero-bubble", 2, 8, marks=EVERY),
        pytest.param("pp=2 microbatch=2 schedule=interleaved virtual_stages=2", 2, 8, marks=EVERY),
        pytest.param("dp=2 pp=2 microbatch=2", 4, 8, marks=EVERY),
        pytest.param("dp_replicate=2 dp_shard=2", None, 8, marks=EVERY),
    ],
)
def test_layouts_compute_what_a_plain_loop_computes(layout: str, coupled: int | None, batch: int) -> None:
    prove(layout, coupled, batch)


@pytest.mark.usefixtures("ranks_inherit_the_compiler")
@pytest.mark.parametrize(
    ("layout", "coupled", "part"),
    [
        ("dp=2 zero=1", None, "blocks"),
        *(
            pytest.param(*case, marks=EVERY)
            for case in [
                ("dp=2 zero=2 recompute=full", None, "blocks"),
                ("dp=2 microbatch=2 recompute=selective", 4, "blocks"),
                ("dp=1 microbatch=2", 2, "blocks"),
                ("dp=4", None, "blocks"),
                ("dp=2 zero=3 pp=2 microbatch=2 recompute=full", 4, "blocks"),
                ("dp=2 zero=1", None, "model"),
            ]
        ),
    ],
)
def test_norms_stay_outside_of_graphs(layout: str, coupled: int | None, part: str) -> None:
    prove(layout, coupled, run={"compile": part, "compile_backend": "aot_eager"})


def refused(layout: str, job: Job, build: Any = Net) -> None:
    run_of(0, Layout(layout).world_size, layout, job, build).prepare(next(batches(Images(), job)).samples([0]))


@pytest.mark.parametrize(
    ("layout", "coupled", "words"),
    [
        ("dp=1 microbatch=4", None, r"the statistics of 8.*a micro-batch has 4 .*Use .*microbatch=8"),
        ("dp=2 microbatch=2", None, r"on 2 data ranks.*Use .*microbatch=4, or numerics.batch_norm_group = 4"),
        ("dp=2 microbatch=1", 4, r"a micro-batch has 2 .*Use .*microbatch=2.*batch_norm_group = 2"),
        ("pp=2 microbatch=1", 4, r"a micro-batch has 1 .*Use .*microbatch=4"),
    ],
)
def test_micro_batches_that_divide_groups_are_refused_with_those_that_work(
    layout: str, coupled: int | None, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        refused(layout, batch_norm_job(coupled))


def test_what_batch_norm_cannot_be_in_is_refused_by_name() -> None:
    with pytest.raises(
        JobError, match=r"batch_norm_group = 3 does not divide.*global_batch = 8.*Set .*batch_norm_group = 2"
    ):
        batch_norm_job(3)
    with pytest.raises(ModelError, match=r"one value per channel.*Set .*batch_norm_group = 2 or more"):
        observe(0, 1, "dp=1", batch_norm_job(1))


class OfParts(nn.Module):
    """Ghost batch norm: of parts of the samples, by `split` or `chunk`; `split` is 0 for the plain one that `batch_norm_group` makes it."""

    def __init__(self, split: int) -> None:
        super().__init__()
        self.norm, self.head, self.split = nn.BatchNorm1d(3), nn.Linear(3, CLASSES), split

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean((2, 3))
        parts = x.split(self.split) if self.split > 0 else x.chunk(-self.split)
        return self.head(torch.cat([self.norm(part) for part in parts]))


@pytest.mark.parametrize(
    ("split", "words"), [(4, "batch_norm_group = 4"), (6, "with numerics.batch_norm_group, takes"), (-2, "norm")]
)
def test_statistics_of_parts_of_a_batch_are_refused_by_name(split: int, words: str) -> None:
    """With 8 samples on two ranks, each calls the norm as often as one device would for its own four."""
    batch = 16 if split == 6 else 8
    with pytest.raises(InputError, match=words):
        refused("dp=2", batch_norm_job(batch=batch), functools.partial(OfParts, split))


def test_rows_of_a_call_are_the_samples_of_the_rank() -> None:
    groups = SampleGroups.of(8, 8, 2, 1)
    part = batch_norm._MicrobatchPart.of(groups, 0, 0)
    assert part.is_one_group
    assert part.rows(torch.zeros(12, 3), "norm", 1)[0][1].shape == (12, 3)
    with pytest.raises(
        ModelError, match=r"norm takes statistics .* of 6 rows, and the samples in them .*batch_norm_group"
    ):
        part.rows(torch.zeros(6, 3), "norm", 1)


class Spare(nn.Module):
    """Has a norm that the forward does not call, until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.head, self.is_called = nn.BatchNorm1d(3), nn.Linear(3, CLASSES), False

    def forward(self, images: Tensor) -> Tensor:
        x = images.mean((2, 3))
        return self.head(self.spare(x) if self.is_called else x)


def test_a_norm_is_judged_in_the_steps_that_call_it() -> None:
    """Where it is not called it counts for nothing; a step that begins to call it ends before its update."""
    job = batch_norm_job()
    whole = [run_of(0, 1, layout, job, Spare) for layout in ("dp=1", "dp=1 microbatch=2")]
    stream = list(batches(Images(), job))
    one, parts = ([run.step(batch).loss for batch in stream[:2]] for run in whole)
    assert parts == pytest.approx(one, rel=1e-12)
    before = whole[1].model.head.weight.clone()
    whole[1].model.is_called = True
    with pytest.raises(
        InputError, match=r"spare takes statistics of samples \(batch norm\), and the forward did not call"
    ):
        whole[1].step(stream[2])
    assert torch.equal(before, whole[1].model.head.weight)


def resumed(rank: int, world: int, layout: str, folder: str, job: Job) -> tuple[Observed, Buffers]:
    run = run_of(rank, world, layout, job)
    run.prepare(next(batches(Images(), job)).samples([0]))
    checkpoint.load(run, manifests.list_checkpoints(Path(folder))[-1])
    seen = Observed()
    for batch in batches(Images(), job, first_step=run.steps_taken):
        seen.losses.append(run.step(batch).loss)
    return seen, {name: buffer.clone() for name, buffer in run.model.named_buffers()}


def saved(rank: int, world: int, layout: str, folder: str, job: Job) -> None:
    run = run_of(rank, world, layout, job)
    for batch in batches(Images(), job):
        run.step(batch)
        if batch.step == 1:
            break
    checkpoint.save(run, Path(folder), keep=1)


def test_a_resume_in_another_layout_continues_the_running_statistics(tmp_path: Path) -> None:
    job = batch_norm_job(4)
    pool(2).run(saved, "dp=2 zero=1 microbatch=2", str(tmp_path), job)
    losses, _, buffers, _ = plain_loop(4)
    for seen, held in pool(2).run(resumed, "dp=2 zero=3", str(tmp_path), job):
        assert seen.losses == pytest.approx(losses[2:], rel=1e-9)
        assert all(torch.allclose(held[name], buffers[name], rtol=1e-9, atol=1e-12) for name in buffers)


class OfModules(Net):
    """Without calls of the function, which torch itself does not run in bfloat16 beside float32 statistics."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[3]


def half(rank: int, world: int, layout: str, job: Job) -> tuple[list[float], Buffers, list[str]]:
    run = run_of(rank, world, layout, job, OfModules)
    reports = [run.step(batch) for batch in batches(Images(), job)]
    return [one.loss for one in reports], dict(run.model.named_buffers()), [one.note for one in reports]


def test_in_bf16_statistics_are_those_of_float32() -> None:
    """The watch repeats micro-batches and compares ranks in every step; running statistics are equal to the bit."""
    job = batch_norm_job(numerics={"precision": "bf16"}, train={"watch_every": 1})
    alone, _, _ = half(0, 1, "dp=1", job)
    first, second = pool(2).run(half, "dp=2 zero=1", job)
    assert first[0] == second[0] == pytest.approx(alone, rel=2e-2)
    assert all(torch.equal(one, second[1][name]) for name, one in first[1].items())
    assert {one.dtype for one in first[1].values()} == {torch.float32, torch.int64}
    assert not any(first[2])


class Reading(nn.Module):
    """Reads running statistics and the counter in the forward that updates them, and computes the weights of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.scaled = nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        del self.scaled.weight
        self.scaled.logarithm = nn.Parameter(torch.zeros(3))
        self.scaled.register_forward_pre_hook(lambda norm, args: setattr(norm, "weight", norm.logarithm.exp()))
        self.scaled.register_forward_hook(lambda norm, args, x: delattr(norm, "weight"))
        self.last.register_forward_hook(lambda norm, args, x: x * norm.num_batches_tracked + norm.running_var)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.scaled(images.mean((2, 3)))
        y = self.last(self.first(x)) + (x - self.first.running_mean).square()
        self.first.eval()
        y = y + self.first(x.tanh())
        self.first.train()
        return self.head(y)


def reading(rank: int, world: int, layout: str, job: Job) -> tuple[Observed, Buffers]:
    run = run_of(rank, world, layout, job, Reading)
    return follow(run, Images(), job), dict(run.model.named_buffers())


def test_running_statistics_that_a_forward_reads_are_those_that_its_norms_have_just_kept() -> None:
    job = batch_norm_job()
    expected, kept = reading(0, 1, "dp=1", job)
    found = pool(2).run(reading, "dp=2", job)
    assert_same([seen for seen, _ in found], expected, TOLERANCE)
    for _, buffers in found:
        assert all(torch.allclose(one, kept[name], rtol=1e-9, atol=1e-12) for name, one in buffers.items())


@pytest.mark.parametrize(
    ("affine", "precision", "dtype"), [(True, "bf16", torch.float64), (False, "float32", torch.bfloat16)]
)
def test_a_model_in_another_dtype_keeps_statistics_in_float32(affine: bool, precision: str, dtype: torch.dtype) -> None:
    """In that of the model they would be refused by torch, or stay what they were at first."""
    points = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    job = samestep.Job(train={"global_batch": 8, "steps": 2}, numerics={"precision": precision}, run={"device": "cpu"})

    def kept(made_in: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU(), nn.Linear(8, 2)).to(made_in)
        run = samestep.parallelize(
            model, "cross_entropy", lambda params: torch.optim.SGD(params, lr=0.1), job=in_loop(job)
        )
        for x in points.split(8):
            run.step((x, (x.sum(1) > 0).long()))
        statistics = torch.cat([run.model[1].running_mean, run.model[1].running_var])
        assert statistics.dtype is torch.float32
        return statistics

    torch.testing.assert_close(kept(dtype), kept(torch.float32), rtol=2e-2, atol=2e-3)
