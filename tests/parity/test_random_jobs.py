"""Random jobs over random layouts, with two resumes into other layouts, are those of one device.

A seed draws a model (adapters and a frozen front among them), whether samples are packed documents, a job (compression, replicas,
exchanges, states in fewer bits, averages, optimizers and groups, odd batches) and a path: layout A takes steps 1 and 2, B goes on
with 3 and 4, one device with 5 and 6. Losses, norms, and every weight, state and buffer, and what codes have lost of gradients, are
held against six steps of one device. Layouts that a strategy refuses are drawn again.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep.datasets import batches
from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.proof.held_tensors import HeldTensor
from samestep.runtime.checkpoints import checkpoint, manifests
from samestep.runtime.optimizers.optimizer_source import check_optimizer
from samestep.runtime.run import Run
from samestep.strategies import program_of
from tests.covering import FEATURES
from tests.laboratory import job_of, make_run, on_ranks, source_of
from tests.models import PackedTokens, Tokens
from tests.parity.test_every_pair import held

LIMIT = 1e-8
STEPS, EACH = 6, 2
MODELS = (
    "deep_llama", "deep_tied", "deep_gpt2", "deep_llama_with_adapters", "deep_llama_behind_a_frozen_front",
    "deep_gpt2_behind_a_frozen_front",
)  # fmt: skip
DAILY, NIGHTLY = 2, 60
"""Numbers of paths."""


def job_drawn(draw: random.Random) -> Job:
    """Return a job at random; it may contradict itself.

    Raises:
        JobError: it does.
    """
    numerics: dict[str, Any] = {}
    if draw.random() < 0.7:
        numerics = {"compression": draw.choice(("none", "int8", "bf16", "powersgd")), "replicas": draw.choice((2, 4))}
        if numerics["compression"] == "none" or draw.random() < 0.4:
            numerics["exchange_every"] = draw.choice((2, 4))
    if draw.random() < 0.3:
        numerics["optimizer_states"] = "8bit"
    optimizer: dict[str, Any] = {
        "name": draw.choice(("adamw", "sgd", "adafactor", "rmsprop")),
        "lr": 1e-2,
        "options": {},
    }
    if draw.random() < 0.4:
        optimizer["groups"] = [{"match": ["*proj.weight", "*c_fc.weight"], "name": "muon", "lr": 0.02}]
    elif draw.random() < 0.5:
        optimizer["groups"] = [{"match": ["*norm*", "*ln_*"], "lr": 3e-3, "weight_decay": 0.0}]
    optimizer["clip_norm"] = draw.choice((None, 0.5))
    train = {"global_batch": draw.choice((4, 8, 12, 5, 7)), "watch_every": 0, "ema": draw.choice((None, 0.9))}
    return job_of("float64", STEPS, numerics=numerics, optimizer=optimizer, train=train)


def layout_drawn(draw: random.Random) -> Layout:
    """Return a layout of two or four ranks at random.

    Raises:
        LayoutError: its words contradict each other.
    """
    degrees = {name: draw.choice((1, 1, 2)) for name in ("dp_replicate", "dp_shard", "tp", "pp", "cp")}
    words = {name: draw.choice(FEATURES[name]) for name in ("zero", "microbatch", "recompute", "accumulate", "offload")}
    schedule = draw.choice(("1f1b", "gpipe", "zero-bubble")) if degrees["pp"] > 1 else "1f1b"
    return Layout(**degrees, **words, schedule=schedule, sequence_parallel=degrees["tp"] > 1 and draw.random() < 0.3)


def legal(model: str, dataset: type[Tokens], job: Job, draw: random.Random) -> str | None:
    """Return a drawn layout that no strategy refuses for a job; None if a hundred draws give none."""
    for _ in range(100):
        try:
            layout = layout_drawn(draw)
            if layout.world_size not in (2, 4):
                continue
            source = source_of(model, layout, job, dataset)
            assert source.prepared is not None
            program_of(check_optimizer(source.optimizer, source.prepared.spec, layout), job, layout)
        except InputError:
            continue
        return str(layout)
    return None


def goes_on(
    rank: int, world: int, model: str, layout: str, job: Job, dataset: type[Tokens], folder: str | None, until: int
) -> tuple[list[tuple[float, float]], list[Any]]:
    """Take the steps behind the newest checkpoint in `folder` up to `until`, and save; return losses, norms and what is held."""
    run = make_run(rank, world, model, layout, job, dataset)
    run.prepare(next(batches(dataset(), job)).samples([0]))
    if folder is not None and (known := manifests.list_checkpoints(Path(folder))):
        checkpoint.load(run, known[-1])
    reports = []
    for batch in batches(dataset(), job, first_step=run.steps_taken):
        report = run.step(batch)
        reports.append((report.loss, report.grad_norm))
        if run.steps_taken == until:
            break
    if folder is not None:
        checkpoint.save(run, Path(folder), keep=1)
    return reports, [*held(run), *lost(run)]


def lost(run: Run) -> list[HeldTensor]:
    """Return what codes have lost of gradients on ranks with whole weights, which make one contribution each; nothing on others."""
    if str(run.layout) != f"dp={run.job.numerics.replicas}":
        return []
    store = run.assembly.weights.store
    return [
        HeldTensor(f"lost {one.name} {one.key}", one.values.flatten(), range(one.start, one.start + one.values.numel()))
        for one in store.codes.residuals()
    ]


def whole_of(parts: list[HeldTensor]) -> dict[str, Tensor]:
    """Return the whole tensors of which ranks hold parts, in double precision."""
    found: dict[str, Tensor] = {}
    for part in parts:
        places = torch.tensor([*part.places]) if isinstance(part.places, range) else part.places
        values, places = part.values[places >= 0].double(), places[places >= 0]
        size = int(places.max()) + 1 if len(places) else 0
        known = found.setdefault(part.name, torch.zeros(size, dtype=torch.float64))
        if len(known) < size:
            known = found[part.name] = torch.cat([known, known.new_zeros(size - len(known))])
        known[places] = values
    return found


def without_noise(name: str, tensor: Tensor, job: Job) -> Tensor:
    """Return a tensor without the biases of keys, under Adafactor.

    A softmax does not change where all scores of a query do, so the gradient of such a bias is 0. What is computed is the rounding
    of its sums, about 1e-21 here, and Adafactor divides it by itself, or by 2e-16 where that is larger: one rounding becomes 1e-8
    in the weight. The other two thirds of the tensor, queries and values, are compared, and so is every other tensor, but for what
    a code has lost of this one: its scale is that of a block in which keys may stand.
    """
    if job.optimizer.name != "adafactor" or "attn.c_attn.bias" not in name or tensor.numel() % 3:
        return tensor  # a count of steps among them
    if name.startswith("lost"):
        return tensor.new_zeros(1)
    queries, _, values = tensor.chunk(3)
    return torch.cat([queries, values])


def take(seed: int, folder: Path) -> str:
    """Walk the path of a seed, and return it as text; empty where the draw has none.

    Raises:
        AssertionError: it differs from one device.
    """
    draw = random.Random(seed)
    model, dataset = draw.choice(MODELS), draw.choice((Tokens, PackedTokens))
    try:
        job = job_drawn(draw)
        source_of(model, Layout(), job, dataset)
        alone = f"dp={job.numerics.replicas}"
        known = on_ranks(alone, goes_on, model, job, dataset, None, STEPS)
    except InputError:
        return ""
    path = [legal(model, dataset, job, draw), legal(model, dataset, job, draw), alone]
    text = f"seed {seed}, {model} on {dataset.__name__}: {job.numerics.model_dump(exclude_defaults=True)} {job.optimizer.name}: {path}"
    if None in path:
        return ""
    found: list[tuple[float, float]] = []
    whole: dict[str, Tensor] = {}
    for number, layout in enumerate(path, 1):
        ranks = on_ranks(str(layout), goes_on, model, job, dataset, str(folder), number * EACH)
        found += ranks[0][0]
        whole = whole_of([part for rank in ranks for part in rank[1]])
    wanted = whole_of([part for rank in known for part in rank[1]])
    for one, other in zip(found, known[0][0], strict=True):
        assert one == pytest.approx(other, rel=LIMIT), text
    assert whole.keys() == wanted.keys(), text
    for name, tensor in whole.items():
        given, right = (without_noise(name, one, job) for one in (tensor, wanted[name]))
        apart = float((given - right).abs().max()) if given.numel() else 0.0
        assert apart <= LIMIT * max(1e-3, float(right.abs().max())), (text, name, apart)
    shutil.rmtree(folder)
    return text


def first_paths(begin: int, count: int, folder: Path) -> list[str]:
    """Walk that many paths, of the seeds from `begin` on that have one."""
    found: list[str] = []
    seed = begin
    while len(found) < count:
        if text := take(seed, folder / str(seed)):
            found.append(text)
        seed += 1
    return found


def test_random_jobs_go_on_in_random_layouts(tmp_path: Path) -> None:
    assert len(first_paths(0, DAILY, tmp_path)) == DAILY


@pytest.mark.nightly
@pytest.mark.time_limit(3000)
def test_many_more_random_jobs_do(tmp_path: Path) -> None:
    assert len(first_paths(1000, NIGHTLY, tmp_path)) == NIGHTLY
