"""`sample` and `evaluate` use what a run has trained: its validation loss, and its text, with a cache as without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import samestep
from samestep import cli
from samestep.errors import DataError, ModelError
from samestep.runtime.checkpoints.manifests import latest
from samestep.training.trained import StoredRun
from tests import small


def test_a_checkpoint_writes_and_is_evaluated_as_its_run_does(tmp_path, capfd):
    run = tmp_path / "run"
    sampling = {"train.sample_tokens": 12, "train.sample_temperature": 0.0, "train.evaluate_samples": 8}
    assert small.train("--layout", "tp=2", "--out", run, **sampling, train__prompt="the ") == 0
    trained = capfd.readouterr().out.partition("--- sample, after training\n")[2].partition("\n---\n")[0]
    assert trained.startswith("the ")
    found = samestep.evaluate(run)
    assert found.step == 6
    assert found.loss == pytest.approx(json.loads((run / "summary.json").read_text())["held_out_loss"], rel=1e-5)
    assert samestep.evaluate(latest(run / "checkpoints"), samples=3).samples == 3
    assert StoredRun.of(run / "checkpoints").checkpoint == latest(run / "checkpoints")  # as of a run's folder `best`
    capfd.readouterr()
    assert cli.main(["sample", str(run)]) == 0  # with a cache, which the run's own sample has not
    assert capfd.readouterr().out.rstrip("\n") == trained.rstrip("\n")
    assert (
        cli.main(["sample", str(run), "--chat", "Hello"]) == 0
    )  # bytes have no template: as conversations are written then
    asked = "<|user|>\nHello\n<|assistant|>\n"
    assert asked + capfd.readouterr().out.rstrip("\n") == samestep.sample(run, asked).rstrip("\n")
    once, again, other = (samestep.sample(run, "a", tokens=9, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    assert once == again != other
    with pytest.raises(ModelError, match=r"over the 64 positions. Use a smaller --tokens"):
        samestep.sample(run, tokens=100)
    assert cli.main(["evaluate", str(tmp_path / "nowhere")]) == 2


def test_what_is_no_text_or_holds_nothing_out_is_refused(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.bin"
    tokens.write_bytes(bytes(range(60)) * 20)
    words = {
        "model.source": "tests.models:plain",
        "data.source": f"tokens:{tokens}",
        "data.dtype": "uint8",
        "data.held_out": 0.0,
    }
    keys = [
        f"--set={key}={value}" for key, value in {**small.SMALL, **words}.items() if not key.startswith("model.config")
    ]
    assert small.main("train", *keys, "--steps", "1", "--ranks", "1", "--out", tmp_path / "run") == 0
    with pytest.raises(DataError, match="is not text, so there is no tokenizer"):
        samestep.sample(tmp_path / "run")
    with pytest.raises(DataError, match=r"Use data.held_out above 0 and --samples N"):
        samestep.evaluate(tmp_path / "run")


NANO = """
import torch
from torch import nn

class Nano(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


def test_a_model_may_give_the_logits_of_the_last_token_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nanoGPT does if it is given no labels: it returns a tuple, too."""
    (tmp_path / "nano_last.py").write_text(NANO)
    monkeypatch.syspath_prepend(tmp_path)
    words = {**small.SMALL, "model.source": "nano_last:Nano", "train.loss": "model"}
    keys = [f"--set={key}={value}" for key, value in words.items() if not key.startswith("model.config")]
    assert small.main("train", *keys, "--steps", "1", "--ranks", "1", "--out", tmp_path / "run") == 0
    assert len(samestep.sample(tmp_path / "run", "abc", tokens=9, temperature=0.0)) > 3
