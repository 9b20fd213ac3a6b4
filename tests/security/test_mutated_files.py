"""Manifests, configurations and indices that somebody has changed and signed again: read as before, or refused in one line.

Nothing runs, nothing is written besides what was asked for, and a wrong result is never given: what is exported equals the
undamaged checkpoint, unless the change is one of the job's numbers, which the checkpoint cannot know better.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from samestep.errors import SamestepError
from samestep.models import weight_files
from samestep.runtime.checkpoints import manifests
from samestep.training.trained import export
from tests import small
from tests.damage import mutated
from tests.odd_inputs import built

COUNT = pytest.mark.parametrize(
    ("seed", "count"), [(0, 150), pytest.param(1, 2000, marks=pytest.mark.nightly)], ids=["some", "many"]
)


def _refused(work: Callable[[], Any]) -> str | None:
    """Return the refusal of some work; None where it is done."""
    try:
        work()
    except SamestepError as error:
        return str(error) or "an error without a text"
    return None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small run."""
    folder = tmp_path_factory.mktemp("run")
    assert small.train("--ranks", "1", "--steps", "1", "--out", folder / "run", **{"train.steps": 2}) == 0
    return folder / "run"


@COUNT
def test_a_mutated_manifest_gives_the_same_weights_or_a_line(run: Path, seed: int, count: int, tmp_path: Path) -> None:
    found = manifests.latest(run / "checkpoints")
    assert found is not None
    manifest = json.loads((found / "manifest.json").read_text())
    del manifest["digest"]
    export(found, tmp_path / "right", form="dcp")
    right = _tensors(tmp_path / "right")
    checkpoint, draw, refused = tmp_path / "checkpoints" / found.name, random.Random(seed), 0
    shutil.copytree(found, checkpoint)
    for _ in range(count):
        changed, done = mutated(manifest, draw)
        path = checkpoint / "manifest.json"
        path.write_text(json.dumps({"digest": manifests._digest(changed), **changed}))
        said = _refused(lambda: export(checkpoint, tmp_path / "out", form="dcp"))
        if said is not None:
            refused += 1
            assert "\n" not in said or "job" in done, done
        else:
            theirs = _tensors(tmp_path / "out")
            same = theirs.keys() == right.keys() and all(torch.equal(theirs[name], right[name]) for name in right)
            assert same or "'job'" in done, done
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoints", "right"], done
    assert refused > count // 4


def _tensors(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader

    from samestep.runtime.checkpoints import torch_checkpoint

    names = [name.removeprefix("model.") for name in FileSystemReader(folder).read_metadata().state_dict_metadata]
    return {name: one.read() for name, one in torch_checkpoint.entries(folder, names).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model, in two files with an index."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=32, max_position_embeddings=32)
    transformers.LlamaForCausalLM(config).save_pretrained(path, max_shard_size="8KB")
    assert (path / weight_files.INDEX).exists()
    return path


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # torch's, of a size that became 0
@pytest.mark.parametrize("name", [weight_files.CONFIG, weight_files.INDEX])
@COUNT
def test_a_mutated_folder_is_built_or_refused(name: str, folder: Path, seed: int, count: int, tmp_path: Path) -> None:
    copied, draw = tmp_path / "tiny", random.Random(seed)
    shutil.copytree(folder, copied)
    before = sorted(copied.iterdir())
    fields = json.loads((folder / name).read_text())
    for _ in range(count):
        changed, done = mutated(fields, draw)
        (copied / name).write_text(json.dumps(changed))
        said = _refused(lambda: built(copied))
        assert said is None or "\n" not in said, done
        assert sorted(copied.iterdir()) == before
