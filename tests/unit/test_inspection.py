"""`samestep inspect`: the tables say what the trace has shown, and why the rest cannot be cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep import cli
from samestep.job import Job
from samestep.training import inspection
from tests.folders import SIZES

LLAMA = {"source": "hf:llama", "config": {**SIZES, "vocab_size": 260, "num_hidden_layers": 3}}
DATA = {"sequence_length": 8}


def counting() -> nn.Module:
    return Counting()


class Counting(nn.Module):
    """A model of digits that mixes samples by batch norm, and keeps a count of its calls that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.last(self.norm(self.first(images.flatten(1)))) * (1 + 0 * self.calls)
        return logits


def test_cuts_boundaries_and_words_of_a_family() -> None:
    found = samestep.inspect(Job(model=LLAMA, data=DATA)).to_record()
    weights = {row["weight"]: row for row in found["params"]}
    assert weights["model.layers.*.self_attn.q_proj.weight"] == {
        "weight": "model.layers.*.self_attn.q_proj.weight", "shape": [16, 16], "number": 3,
        "tp": "by columns: dimension 0 in up to 4 parts",
    }  # fmt: skip
    assert weights["model.layers.*.self_attn.k_proj.weight"]["tp"].endswith("2 parts, shared by ranks beyond that")
    assert weights["model.layers.*.mlp.down_proj.weight"]["tp"].startswith("by rows, outputs summed: dimension 1")
    assert weights["model.norm.weight"]["tp"] == "replicated: applied to full activations"
    last = found["layers"][-2]
    assert (last["layers"], last["stage"]) == ("model.layers.1 ... 2", f"{8 * 16} elements")
    words = {row["word"]: row["reason"] for row in found["words"]}
    assert not words["zero=3"]
    assert "has no experts" in words["ep"]


def test_what_couples_samples_and_is_kept_is_named() -> None:
    job = Job(model={"source": f"{__name__}:counting"}, data={"source": "digits"}, train={"global_batch": 4})
    found = samestep.inspect(job)
    stages = [(row["layers"], row["stage"]) for row in found.to_record()["layers"]]
    assert stages == [("first", ""), ("norm", "16 elements"), ("last", "16 elements")]
    text = found.to_text()
    assert "3 calls of modules" in text
    assert "samples: coupled by the statistics of 1 module alone (numerics.batch_norm_group), as norm" in text
    assert 'kept by the forward: calls (buffer); a layout that keeps it otherwise needs run.allow = ["state"]' in text


def test_the_command_writes_the_tables_of_a_preset(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    assert cli.main(["inspect", "--set", "model.source=preset:mixtral-8x7b", "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert "replicated over tp: ep distributes its 8 experts" in {row["tp"] for row in written["params"]}
    assert written["experts"][0].startswith("experts: 32 modules of 8 (")
    assert "under tp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("[0][0]", "argument 1"),
        ("[0][2]", "argument 3"),
        ("[1]['position_embeddings'][0]", "position_embeddings[0]"),
        ("x", "x"),
    ],
)
def test_arguments_of_blocks_are_named_for_readers(place: str, said: str) -> None:
    assert inspection._argument(place) == said
