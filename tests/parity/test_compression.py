"""Compressed gradients: every layout computes what one device for each of `numerics.replicas` computes, code by code.

In float64 sums differ by 1e-16 between layouts, far less than a quantisation step, so that nearly every code is the same
and the limit is that of uncompressed layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

from samestep.datasets import batches
from samestep.job import Job
from samestep.optimizer_tables import OptimizerTable
from samestep.program.codecs import CodedPart, Matrix
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.wings.slow_links.powersgd import FactoredExchange
from tests.covering import daily
from tests.laboratory import (
    TOLERANCE,
    assert_ledger,
    assert_same,
    job_of,
    make_run,
    observe,
    on_ranks,
    reference,
    resumed_losses,
)
from tests.models import Tokens
from tests.pool import pool

MODEL = "wide_llama"
NIGHTLY = pytest.mark.nightly


def compressed(codec: str = "int8", replicas: int = 2, precision: str = "float64", steps: int = 3) -> Job:
    numerics = {"compression": codec, "replicas": replicas}
    return job_of(precision, steps, numerics=numerics, optimizer={"clip_norm": 0.5}, train={"watch_every": 0})


MORE = [  # codec, replicas, layout, model
    ("int8", 4, "dp=4 zero=1 microbatch=1", MODEL),
    ("bf16", 4, "dp=4 zero=1", MODEL),
    ("powersgd", 4, "dp=4 zero=1 microbatch=1", MODEL),
    ("powersgd", 2, "dp=2 pp=2 microbatch=1", "deep_tied"),
    ("powersgd", 2, "dp=2 cp=2", MODEL),
    pytest.param("powersgd", 2, "dp=2 zero=1", "gpt2", marks=NIGHTLY),
    pytest.param("powersgd", 2, "dp=2 pp=2 schedule=zero-bubble microbatch=1", MODEL, marks=NIGHTLY),
    ("int8", 2, "dp_replicate=2 dp_shard=2 ep=2 zero=3", "mixtral"),
    ("int8", 2, "dp_replicate=2 dp_shard=2 zero=3 recompute=full", "gpt2"),
    ("int8", 2, "dp=2 pp=2 schedule=zero-bubble microbatch=1", MODEL),
]
SCATTERED = [  # the units of zero=2 and 3 over all data ranks
    ("int8", 2, "dp=2 zero=3 microbatch=1 accumulate=full", MODEL),
    ("int8", 4, "dp=4 zero=2", "plain"),
    pytest.param("bf16", 4, "dp=4 zero=2", MODEL, marks=NIGHTLY),
    pytest.param("int8", 2, "dp=2 zero=3 tp=2", MODEL, marks=NIGHTLY),
    pytest.param("bf16", 2, "dp=2 zero=3", "mixtral", marks=NIGHTLY),
]
LAYOUTS = [
    "dp=2 microbatch=2",
    "dp=2 zero=1",
    "dp_replicate=2 dp_shard=2 zero=1",
    "dp_replicate=2 dp_shard=2 zero=2 microbatch=1",
    "dp_replicate=2 dp_shard=2 zero=3",
    "dp=2 tp=2",
    "dp=2 tp=2 sequence_parallel",
    "dp=2 pp=2 microbatch=1",
    "dp=2 cp=2",
    "dp_replicate=2 dp_shard=2 zero=3 tp=2",
]


def test_it_rounds() -> None:
    plain, coded = (reference(MODEL, job).losses for job in (compressed("none", 1), compressed()))
    apart = [abs(a - b) for a, b in zip(plain, coded, strict=True)]
    assert apart[0] < 1e-12
    assert 1e-7 < apart[2] < 1e-2


@pytest.mark.parametrize("layout", daily(LAYOUTS))
def test_a_layout_gives_the_codes_of_whole_devices(layout: str) -> None:
    job = compressed()
    ranks = on_ranks(layout, observe, MODEL, job, True)
    assert_ledger(ranks, layout)
    assert_same(ranks, reference(MODEL, job), TOLERANCE)


@pytest.mark.parametrize(("codec", "replicas", "layout", "model"), [*daily(MORE, beside_products=True), *SCATTERED])
def test_other_codecs_numbers_and_models(codec: str, replicas: int, layout: str, model: str) -> None:
    job = compressed(codec, replicas, steps=2)
    ranks = on_ranks(layout, observe, model, job, True)
    assert_ledger(ranks, layout)
    assert_same(ranks, reference(model, job), TOLERANCE)


@pytest.mark.parametrize(
    ("codec", "replicas", "before", "after", "model"),
    [
        ("int8", 2, "dp=2", "dp_replicate=2 dp_shard=2 zero=3", MODEL),
        ("int8", 4, "dp=4 zero=3", "dp=4 zero=1", "plain"),  # rows that four ranks do not divide
        pytest.param("int8", 2, "dp=2 zero=3 tp=2", "dp=2", MODEL, marks=NIGHTLY),
        ("powersgd", 4, "dp=4", "dp=4 zero=1", MODEL),
        pytest.param("powersgd", 2, "dp=2 pp=2 microbatch=1", "dp=2", MODEL, marks=NIGHTLY),
        pytest.param("int8", 2, "dp_replicate=2 dp_shard=2 zero=3", "dp=2 cp=2", MODEL, marks=NIGHTLY),
    ],
)
def test_what_codes_have_lost_is_in_a_checkpoint_for_any_layout(
    codec: str, replicas: int, before: str, after: str, model: str, tmp_path: Path
) -> None:
    job = compressed(codec, replicas, steps=4)
    first, rest = str(tmp_path / "first"), str(tmp_path / "rest")
    start = on_ranks(before, resumed_losses, model, job, None, 2, first)[0]
    end = on_ranks(after, resumed_losses, model, job, first, 4, rest)[0]
    wanted = reference(model, job)
    assert start + end == pytest.approx(wanted.losses, abs=TOLERANCE)
    for part in manifests.read_manifest(manifests.list_checkpoints(tmp_path / "rest")[-1])["parts"]:
        assert any(name.startswith("lost/") for name in part["tensors"])


def test_matrices_that_ranks_update_whole_are_factored_where_they_lie() -> None:
    layout = "dp=2 zero=1"
    job = compressed("powersgd", steps=2)
    muon = {"match": ["*.q_proj.weight", "*.gate_proj.weight", "*.down_proj.weight"], "name": "Muon", "lr": 0.02}
    job = job.model_copy(update={"optimizer": OptimizerTable(name="sgd", lr=0.1, groups=[muon])})
    ranks = on_ranks(layout, observe, MODEL, job, True)
    assert_ledger(ranks, layout)
    assert_same(ranks, reference(MODEL, job), TOLERANCE)


def _scaled(rank: int, world: int, model: str, layout: str, job: Job) -> list[tuple[bool, bool, float]]:
    """Return of each step whether it was skipped, whether what is fed back is finite then, and the loss."""
    run = make_run(rank, world, model, layout, job)
    found = []
    for batch in batches(Tokens(), job):
        report = run.step(batch)
        store = run.assembly.weights.store
        fed = [kept.values.isfinite().all() for kept in (*store.codes.residuals(), *store.codes.directions())]
        found.append((report.skipped, all(fed), report.loss))
    return found


def _directions(rank: int, world: int, model: str, layout: str, job: Job, folder: str) -> bool:
    """Return whether a run that has read a checkpoint projects along other directions than one that begins."""
    run = make_run(rank, world, model, layout, job)
    run.prepare(next(iter(batches(Tokens(), job))).samples([0]))
    first = {name: values.clone() for name, values in run.assembly.weights.store.codes.directions()}
    checkpoint.load(run, manifests.list_checkpoints(Path(folder))[-1])
    apart = [not torch.equal(first[name], values) for name, values in run.assembly.weights.store.codes.directions()]
    run.assembly.weights.store.codes.scale(0.0)
    again = dict(run.assembly.weights.store.codes.directions())
    assert all(torch.equal(first[name], again[name]) for name in first)
    return bool(apart) and all(apart)


def test_directions_are_in_a_checkpoint_once(tmp_path: Path) -> None:
    job = compressed("powersgd", steps=2)
    on_ranks("dp=2", resumed_losses, MODEL, job, None, 2, str(tmp_path))
    parts = manifests.read_manifest(manifests.list_checkpoints(tmp_path)[-1])["parts"]
    written = [name for part in parts for name in part["tensors"] if name.startswith("directions/")]
    assert len(written) == len({*written}) > 5
    assert all(on_ranks("dp=2 zero=1", _directions, MODEL, job, str(tmp_path)))


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("dp=2", "int8"),
        ("dp=2 zero=1", "powersgd"),
        pytest.param("dp_replicate=2 dp_shard=2 zero=3", "int8", marks=NIGHTLY),
        pytest.param("dp=2 zero=3", "int8", marks=NIGHTLY),
    ],
)
def test_a_step_that_is_not_finite_leaves_nothing_behind_in_what_is_fed_back(layout: str, codec: str) -> None:
    job = compressed(codec, precision="fp16", steps=12)
    job = job.model_copy(update={"numerics": job.numerics.model_copy(update={"loss_scale": 2.0**28})})
    ranks = on_ranks(layout, _scaled, MODEL, job)
    assert 0 < sum(skipped for skipped, _, _ in ranks[0]) < 12
    for skipped, is_finite, loss in ranks[0]:
        assert is_finite
        assert skipped or loss < 5.0


# -- torch's own hook ------------------------------------------------------------------------------

ROWS, COLUMNS, RANK, PLAIN, STEPS = 24, 18, 3, 5, 6


class Bucket:
    """What the hook asks of a bucket of DistributedDataParallel."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> Sequence[Tensor]:
        matrix, plain = self._buffer.split([ROWS * COLUMNS, PLAIN])
        return [matrix.view(ROWS, COLUMNS), plain]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def decoded(rank: int, world: int) -> tuple[list[Tensor], list[Tensor]]:
    """Take steps of the hook and of an exchange on this rank's gradients; return the sums that each decodes."""
    state = powersgd.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1, random_seed=7
    )
    state.iter = 2
    part = CodedPart(ROWS * COLUMNS + PLAIN, 1, (Matrix("weight", 0, ROWS, COLUMNS, RANK),))
    like = torch.empty(0, dtype=torch.float64)
    exchange = FactoredExchange(part, dist.group.WORLD, like, gathers=True)
    (directions,) = exchange.directions()
    generator = torch.Generator().manual_seed(int(np.random.RandomState(7).randint(1_000_000_000)))  # as the hook draws
    directions.values.copy_(torch.randn(COLUMNS, RANK, generator=generator, dtype=torch.float64).T)
    theirs, ours = [], []
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        gradient = torch.randn(part.numel, generator=draw, dtype=torch.float64)
        theirs.append(world * powersgd.powerSGD_hook(state, Bucket(gradient.clone())).wait().clone())
        for _ in range(2):
            exchange.send([gradient]).wait()
        exchange.finish([gradient])
        ours.append(gradient)
    return theirs, ours


def test_torch_s_hook_decodes_the_same() -> None:
    for theirs, ours in pool(2).run(decoded):
        assert len(ours) == STEPS
        for hook, exchange in zip(theirs, ours, strict=True):
            assert torch.allclose(hook, exchange, rtol=0, atol=1e-10)
