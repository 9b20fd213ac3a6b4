"""What one layout saves, every other one loads, to the bit: the ordered pairs out of twelve layouts, uneven ones among them.

Every rank that saves tells which elements of which whole tensor it holds, of weights, of the optimizer's state and of
buffers; every rank that loads is held against them. Layouts that save after another number of steps hold other values,
so that a load which leaves something as it was is found.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import samestep
from samestep.datasets import batches
from samestep.errors import CheckpointError
from samestep.job import Job
from samestep.layout import Layout
from samestep.proof import held_tensors
from samestep.proof.held_tensors import HeldTensor
from samestep.runtime.checkpoints import checkpoint, manifests
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import MODELS, Tokens

ROWS = Path(__file__).parents[2] / "benchmarks" / "rows" / "resharding.json"
"""What `benchmarks/resharding.py` has found."""

LAYOUTS = (
    "dp=1",
    "dp=3",
    "dp=2 zero=1",
    "dp=3 zero=2",
    "dp=4 zero=3",
    "dp_replicate=2 dp_shard=2 microbatch=2",
    "dp=2 zero=3 tp=2",
    "tp=2 pp=2 microbatch=4",
    "dp=2 pp=2 zero=1 microbatch=2",
    "cp=2 tp=2",
    "dp=2 ep=2 zero=1",
    "dp=2 pp=2 ep=2 zero=3 microbatch=2",
)
MODEL = "mixtral"
DAILY = {
    "dp=3 zero=2": ("dp=2 pp=2 ep=2 zero=3 microbatch=2", "dp=4 zero=3"),
    "tp=2 pp=2 microbatch=4": ("cp=2 tp=2", "dp=4 zero=3"),
}
"""In `make test`: of each layout that loads, those that have saved."""
Whole = dict[str, Tensor]


def _job() -> Job:
    adamw = {"name": "adamw", "lr": 1e-2, "options": {}, "weight_decay": 0.1, "clip_norm": 0.5}
    return job_of("float32", 4, optimizer=adamw, train={"watch_every": 0})


def held(run: Any) -> list[HeldTensor]:
    """Return what a rank holds of weights, of the optimizer's state and of buffers."""
    state = [HeldTensor(f"state of {one.name}", one.values, one.places) for one in held_tensors.held_state(run)]
    buffers = [HeldTensor(f"buffer {one.name}", one.values, one.places) for one in held_tensors.held_buffers(run)]
    return [*held_tensors.held_weights(run), *state, *buffers]


def saves(rank: int, world: int, model: str, layout: str, job: Job, folder: str, steps: int) -> list[HeldTensor]:
    run = make_run(rank, world, model, layout, job)
    for batch in itertools.islice(batches(Tokens(), job), steps):
        run.step(batch)
    checkpoint.save(run, Path(folder))
    return held(run)


def loads(
    rank: int, world: int, model: str, layout: str, job: Job, written: dict[str, tuple[str, Whole]]
) -> dict[str, str]:
    """Load each checkpoint into one run; return the first tensor that differs, or what went wrong, by who has written it."""
    run = make_run(rank, world, model, layout, job)
    run.prepare(next(batches(Tokens(), job)).samples([0]))
    found = {}
    for source, (folder, wanted) in written.items():
        checkpoint.load(run, Path(folder))
        found[source] = next((one.name for one in held(run) if not is_part(one, wanted.get(one.name))), "")
    return found


def is_part(one: HeldTensor, wanted: Tensor | None) -> bool:
    """Return whether a rank's part of a tensor holds the bits of the whole one."""
    if wanted is None:
        return False
    values, places = _real(one)
    return torch.equal(values.view(torch.int32), wanted[places].view(torch.int32))


def _real(one: HeldTensor) -> tuple[Tensor, Tensor]:
    """Return the elements of a part and their places, without padding."""
    places = torch.tensor([*one.places]) if isinstance(one.places, range) else one.places
    return one.values[places >= 0].float(), places[places >= 0]


def whole_of(parts: list[HeldTensor]) -> Whole:
    """Return the whole tensors of which ranks hold parts."""
    found: Whole = {}
    for part in parts:
        values, places = _real(part)
        size = int(places.max()) + 1 if len(places) else 0
        known = found.setdefault(part.name, torch.full((size,), torch.nan))
        if len(known) < size:
            known = found[part.name] = torch.cat([known, torch.full((size - len(known),), torch.nan)])
        known[places] = values
    assert not any(one.isnan().any() for one in found.values()), "no rank holds some of the elements"
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, Whole]]:
    """A function of a layout that returns what it has written; each writes once."""
    folder = tmp_path_factory.mktemp("saved")
    return functools.cache(lambda layout: written_by(layout, folder))


def written_by(layout: str, folder: Path) -> tuple[str, Whole]:
    """Train in a layout and save below a folder; return the checkpoint and what it must hold."""
    number = LAYOUTS.index(layout)
    ranks = on_ranks(layout, saves, MODEL, _job(), str(folder / str(number)), 1 + number % 3)
    made = next((folder / str(number)).glob("step-*"))
    assert_written_once(made)
    return str(made), whole_of([part for parts in ranks for part in parts])


def assert_written_once(folder: Path) -> None:
    """The values of each weight are in a checkpoint once."""
    manifest = manifests.read_manifest(folder)
    stored = [load_file(folder / part["file"]) for part in manifest["parts"]]
    num_written = sum(value.numel() for part in stored for name, value in part.items() if name.startswith("value/"))
    assert num_written == sum(math.prod(shape) for shape in manifest["shapes"].values())


def loaded_by(layout: str, written: dict[str, tuple[str, Whole]]) -> dict[str, str]:
    """Load what the other layouts have saved; return the first tensor that differs on any rank, by who has saved it."""
    others = {before: one for before, one in written.items() if before != layout}
    ranks = on_ranks(layout, loads, MODEL, _job(), others)
    return {before: next(filter(None, (found[before] for found in ranks)), "") for before in others}


@pytest.mark.parametrize(("after", "before"), DAILY.items())
def test_a_layout_loads_what_others_saved(after: str, before: tuple[str, ...], written: Any) -> None:
    assert loaded_by(after, {layout: written(layout) for layout in before}) == dict.fromkeys(before, "")


@pytest.mark.nightly
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_layout_loads_what_every_other_saved(after: str, written: Any) -> None:
    found = loaded_by(after, {layout: written(layout) for layout in LAYOUTS})
    assert found == {before: "" for before in LAYOUTS if before != after}


def test_the_pairs_span_every_axis_and_uneven_numbers_of_ranks() -> None:
    layouts = [Layout(one) for one in LAYOUTS]
    assert len({str(one) for one in layouts}) == 12
    for degree in ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard"):
        assert {getattr(one, degree) > 1 for one in layouts} == {True, False}, degree
    assert {one.world_size for one in layouts} == {1, 2, 3, 4}
    assert {one.zero for one in layouts} == {0, 1, 2, 3}


def test_the_table_in_the_docs_holds_every_pair() -> None:
    found = json.loads(ROWS.read_text())
    assert found == {after: {before: "" for before in LAYOUTS if before != after} for after in LAYOUTS}


def test_a_changed_bit_is_found() -> None:
    part = HeldTensor("w", torch.tensor([1.0, -0.0]), torch.tensor([2, -1]))
    assert is_part(part, torch.tensor([0.0, 0.0, 1.0]))
    assert not is_part(part, torch.tensor([0.0, 0.0, 1.0 + 2**-23]))


# -- a loop of the user's own ----------------------------------------------------------------------

NIGHTLY = pytest.mark.nightly


def _job_of_loop() -> Job:
    # The gradient of a bias of keys is rounding alone, which Adam divides by itself but for eps.
    return job_of("float64", 4, optimizer={"name": "adamw", "options": {"eps": 1e-5}})


def _loop(
    rank: int, world: int, model: str, layout: str, job: Job, folder: str, until: int, everywhere: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """The loop of the documentation: continue where there is a checkpoint, take steps, save; return losses and the whole."""
    run = make_run(rank, world, model, layout, job)
    if (found := samestep.latest(folder)) is not None:
        run.load(found)
    losses = []
    for batch in samestep.batches(Tokens(), job, first_step=run.steps_taken):
        if batch.step >= until:
            break
        losses.append(run.step(batch).loss)
    run.save(folder)
    return losses, run.state_dict(on_every_rank=everywhere)


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [
        ("deep_tied", "tp=2 pp=2 microbatch=2", "dp=2 zero=3"),
        ("mixtral", "dp=2 ep=2 zero=1", "tp=2"),
        pytest.param("gpt2", "dp=2 zero=3", "pp=2 microbatch=2", marks=NIGHTLY),
        pytest.param("qwen3", "tp=2", "dp_replicate=2 dp_shard=2", marks=NIGHTLY),
    ],
)
def test_a_loop_that_saves_and_loads_is_the_one_that_did_not_stop(
    model: str, first: str, second: str, tmp_path: Path
) -> None:
    job = _job_of_loop()
    start = on_ranks(first, _loop, model, job, str(tmp_path / "cut"), 2, True)
    assert_written_once(tmp_path / "cut" / "step-000002")
    end = on_ranks(second, _loop, model, job, str(tmp_path / "cut"), 4, False)
    (losses, expected) = on_ranks("dp=1", _loop, model, job, str(tmp_path / "whole"), 4, False)[0]
    assert start[0][0] + end[0][0] == pytest.approx(losses, rel=1e-9)
    assert all(_differ_by_nothing(held, start[0][1]) for _, held in start), "every rank holds the whole, if asked to"
    assert all(not held for _, held in end[1:]), "else rank 0 does"
    found = end[0][1]
    assert [*found] == [*expected], "the names of a plain module, in its order"
    for name, value in found.items():
        assert torch.allclose(value, expected[name], rtol=1e-9, atol=1e-12), name
    MODELS[model]().to(torch.float64).load_state_dict(found, strict=True)


def _reading(rank: int, world: int, model: str, layout: str, job: Job, reads: bool) -> list[float]:
    """A loop that looks at whole weights between a backward and the update."""
    run, losses = make_run(rank, world, model, layout, job), []
    for batch in samestep.batches(Tokens(), job):
        losses.append(run.backward(batch).loss)
        if reads:
            with run.gathered() as whole:
                assert sum(float(param.detach().norm()) for param in whole.parameters()) > 0
        run.update()
    return losses


@pytest.mark.parametrize("layout", ["dp=2 zero=3", pytest.param("tp=2", marks=NIGHTLY)])
def test_weights_that_are_only_read_leave_the_gradients_that_wait(layout: str) -> None:
    found = [on_ranks(layout, _reading, "plain", _job_of_loop(), reads)[0] for reads in (True, False)]
    assert found[0] == found[1]


def _differ_by_nothing(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_folder_of_checkpoints_means_its_newest_and_an_empty_one_is_refused(tmp_path: Path) -> None:
    job = _job_of_loop()
    _loop(0, 1, "plain", "dp=1", job, str(tmp_path), 2, False)
    run = make_run(0, 1, "plain", "dp=1", job)
    run.load(tmp_path)
    assert run.steps_taken == 2
    run.prepare(_example(job))
    again = make_run(0, 1, "plain", "dp=1", job)
    again.prepare(_example(job))
    again.load(tmp_path / "step-000002")
    assert _differ_by_nothing(run.state_dict(), again.state_dict())
    with pytest.raises(CheckpointError, match=r"nowhere holds no checkpoint. Use a folder that run\.save was given"):
        run.load(tmp_path / "nowhere")
    assert samestep.latest(tmp_path / "nowhere") is None


def _example(job: Job) -> Any:
    return next(batches(Tokens(), job)).samples([0])
