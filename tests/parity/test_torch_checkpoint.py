"""Checkpoints of torch.distributed.checkpoint: what is exported torch reads, a run starts from them, and no pickle runs anything."""

from __future__ import annotations

import io
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import samestep
from samestep.building.model import blueprint_of
from samestep.errors import CheckpointError
from samestep.runtime.checkpoints import torch_checkpoint
from samestep.training.first_weights import FirstWeights
from tests import audit
from tests.parity.test_frozen import run_of
from tests.parity.test_init_from import OLD, losses_from, new_job
from tests.pool import pool


@pytest.fixture(scope="module")
def exported(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samestep.export(old, tmp_path_factory.mktemp("exported") / "out", form="dcp").folder


@pytest.fixture(scope="module")
def theirs(exported: Path) -> dict[str, Tensor]:
    """What torch itself reads of it."""
    held = {name: torch.empty_like(one, device="cpu") for name, one in blueprint_of(OLD).module.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": held}, checkpoint_id=exported, no_dist=True)
    return held


def test_torch_reads_what_is_exported_and_a_run_starts_from_it(
    theirs: dict[str, Tensor], old: Path, exported: Path, tmp_path: Path
) -> None:
    job = new_job()
    ours = samestep.export(old, tmp_path / "plain").folder
    run_of(0, 1, "tp=2", job)
    found = [FirstWeights.of(path, job) for path in (exported, ours, old)]
    read = torch_checkpoint.entries(exported, theirs)
    assert read.keys() == theirs.keys()
    assert all(torch.equal(one.read(), theirs[name]) for name, one in read.items())
    losses = [
        pool(2).run(losses_from, "tp=2", job, first, tmp_path / str(number)) for number, first in enumerate(found)
    ]
    assert losses[0] == losses[1] == losses[2]


def saves_sharded(rank: int, world: int, folder: Path) -> None:
    """Save the state dict of a sharded model, with an optimizer's beside it, as torch's tutorials do."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights, "optim": states, "step": 3}, checkpoint_id=folder)
        whole = {name: one.full_tensor() for name, one in weights.items()}
    if rank == 0:
        torch.save(whole, folder / "whole.pt")


def test_shards_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    pool(2).run(saves_sharded, tmp_path)
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    with audit.watched() as seen:
        found = torch_checkpoint.entries(tmp_path, whole)
        read = {name: one.read() for name, one in found.items()}
    assert seen == []
    assert read.keys() == whole.keys()
    assert max(len(one.chunks) for one in found.values()) == 2
    assert all(torch.equal(one, whole[name]) for name, one in read.items())


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        ({"model": {"w": torch.ones(2), "extra": 3}}, "holds model.extra, which is not a tensor"),
        ({"model": {"v": torch.ones(2)}}, "holds another model's weights: it lacks w"),
        ({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, "holds the weights of this model in a and b"),
    ],
)
def test_what_does_not_fit_is_refused(state: dict[str, Any], refusal: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=refusal):
        torch_checkpoint.entries(saved(tmp_path / "saved", state), ["w"])


@pytest.mark.parametrize(
    "state",
    [
        {"w": torch.ones(2)},
        {"model": {"module.w": torch.ones(2)}},
        {"model": {"w": torch.ones(2)}, "ema": {"w": torch.ones(2)}},
    ],
)
def test_names_are_those_of_the_model_itself(state: dict[str, Any], tmp_path: Path) -> None:
    assert [*torch_checkpoint.entries(saved(tmp_path / "saved", state), ["w"])] == ["w"]


class _Runs:
    """What runs when a pickle is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def test_metadata_that_names_a_function_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    folder, marker = saved(tmp_path / "saved", {"w": torch.ones(2)}), tmp_path / "RAN"
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(marker)))
    with (
        audit.watched() as seen,
        pytest.raises(CheckpointError, match=r"it names .*, which is not a class of metadata"),
    ):
        torch_checkpoint.entries(folder, ["w"])
    assert seen == []
    assert not marker.exists()


def test_a_chunk_that_names_a_function_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    folder, marker = saved(tmp_path / "saved", {"w": torch.ones(2)}), tmp_path / "RAN"
    entry = torch_checkpoint.entries(folder, ["w"])["w"]
    stream = io.BytesIO()
    torch.save(_Runs(marker), stream)
    (chunk,) = entry.chunks
    content = stream.getvalue()
    chunk.path.write_bytes(bytes(chunk.start_bytes) + content + bytes(max(0, chunk.size_bytes - len(content))))
    with audit.watched() as seen, pytest.raises(CheckpointError, match="is damaged where w begins"):
        entry.read()
    assert seen == []
    assert not marker.exists()


def test_damaged_metadata_is_refused_in_one_line(tmp_path: Path) -> None:
    folder, drawn = saved(tmp_path / "saved", {"w": torch.ones(2, 3), "step": 3}), random.Random(0)
    content = (folder / ".metadata").read_bytes()
    refusals = []
    for _ in range(200):
        bad = bytearray(content)
        bad[drawn.randrange(len(bad))] ^= 1 << drawn.randrange(8)
        (folder / ".metadata").write_bytes(bad if drawn.random() < 0.7 else bad[: drawn.randrange(len(bad))])
        try:
            found = torch_checkpoint.entries(folder, ["w"])["w"]
            assert found.shape != (2, 3) or torch.equal(found.read(), torch.ones(2, 3))
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > 60
    assert not [one for one in refusals if "\n" in one]


def test_chunks_must_lie_in_the_folder_and_cover_a_tensor_once(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", {"w": torch.ones(2)})
    content = (folder / ".metadata").read_bytes()
    (tmp_path / "__0_1.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / ".metadata").write_bytes(content.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0f../__0_1.distcp"))
    with pytest.raises(CheckpointError, match=r"names ../__0_1.distcp, which is not a file in its folder"):
        torch_checkpoint.entries(folder, ["w"])
    part = torch_checkpoint.TorchChunk(folder, 0, 1, (0,), (2,))
    assert torch_checkpoint._cover([part], (2,))
    assert not torch_checkpoint._cover([part], (3,))
    assert not torch_checkpoint._cover([part, part], (4,))
