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

from samestep.datasets import batches
from samestep.job import Job
from samestep.layout import Layout
from samestep.proof import held_tensors
from samestep.proof.held_tensors import HeldTensor
from samestep.runtime.checkpoints import checkpoint, manifests
from tests.laboratory import job_of, make_run, on_ranks
from tests.models import Tokens

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
