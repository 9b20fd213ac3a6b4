"""The verb `verify`: proven layouts, refused ones, what it writes; a model too large; a user's own module."""

from __future__ import annotations

import json
import runpy
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.building.named_tensors import copy_module
from samestep.errors import InputError, LayoutError
from samestep.job import Job
from samestep.proof import verify
from samestep.proof.observation import _hook
from tests.covering import daily
from tests.laboratory import job_of
from tests.models import MODELS, Tokens
from tests.proof.faults import FAULTS, prove
from tests.proof.odd_code import Lars
from tests.small import main, settings

LAYOUTS = [
    ("plain", "dp=2 microbatch=2"),
    ("plain_with_dropout", "dp=2 zero=2 microbatch=1"),
    ("gpt2", "dp=2 zero=3 recompute=full"),
    ("qwen3", "dp=2 tp=2"),
    ("deep_tied", "dp=1 pp=2 microbatch=2"),
    ("qwen3_moe", "dp=2 ep=2 zero=1"),
    ("mixtral_balanced", "dp=2 ep=2"),
]


@pytest.mark.parametrize(
    ("own_precision", "model", "layout"),
    daily((own_precision, *case) for own_precision in (False, True) for case in LAYOUTS),
)
def test_a_clean_layout_raises_no_alarm(model, layout, own_precision):
    verdict = prove(model, layout, own_precision=own_precision)
    assert verdict.proven, verdict.to_text()


@pytest.mark.parametrize(("model", "layout"), [("deep_tied", "dp=2 loss_chunk=3"), ("gpt2", "tp=2 loss_chunk=5")])
def test_logits_that_are_nowhere_whole_are_proven(model, layout):
    verdict = prove(model, layout)
    assert verdict.proven, verdict.to_text()


def test_a_module_that_models_share_holds_no_run_by_its_hooks() -> None:
    class Observer:
        seen = ""

        def note(self, path: str, *_: Any) -> None:
            self.seen = path

    observer, shared = Observer(), nn.GELU()
    shared.register_forward_hook(_hook(observer.note, "act"))
    shared(torch.ones(1))
    assert observer.seen == "act"
    gone = weakref.ref(observer)
    del observer
    assert gone() is None
    assert copy_module(shared)(torch.ones(1)) > 0


def test_experts_in_bf16_are_compared_by_the_choices_of_one_device():
    verdict = prove("qwen3_moe", "dp=2 ep=2", own_precision=True, numerics={"precision": "bf16"})
    assert verdict.proven, verdict.to_text()
    (forward,) = (check for check in verdict.checks if check.what == "forward in bf16")
    assert forward.allowance < 1.0  # a token that another expert gets differs by as much as it is


def test_there_are_more_than_fifty_faults():
    assert len(FAULTS) > 50
    assert len({fault.cause for fault in FAULTS.values()}) >= 15


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (("--set", "layout.dp=2"), "dp=2"),
        (("--set", "layout.dp=2", "--set", "layout.zero=3"), "dp=2 zero=3"),
        (("--set", "layout.tp=2", "--layout", "dp=2"), "dp=2"),
        ((), "verify compares a layout with one device, and the job has none. Use --layout"),
        (("--devices", "2"), "verify tries one layout"),
        (("--all", "--devices", "2", "--layout", "dp=2"), "verify tries one layout"),
    ],
)
def test_the_layout_of_the_job_is_proven_by_default(words, layout, monkeypatch, capsys):
    class AskedError(InputError):
        pass

    def ask(job, where, *_):
        raise AskedError("asked", f"layout {where!s}")

    monkeypatch.setattr(verify, "_subject", ask)
    assert main("verify", *settings(), *words) == 2
    assert layout in capsys.readouterr().err


def test_the_command_proves_a_layout_and_writes_the_verdict(tmp_path, capsys):
    file = tmp_path / "verdict.json"
    assert main("verify", *settings(), "--layout", "dp=2", "--json", file) == 0
    said = capsys.readouterr().out
    assert "proven: the same result" in said
    assert "gradients in float32" in said
    verdict = json.loads(file.read_text())
    assert verdict["proven"] is True
    assert verdict["cause"] is None
    assert {check["what"] for check in verdict["checks"]} >= {"start", "data", "forward", "gradients", "checkpoint"}
    assert all(check["compared"] > 0 for check in verdict["checks"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layout", "dp=2 tq=2"], "unknown layout option 'tq'"),
        (["--layout", "tp=3"], "tp=3"),
        (["--layout", "dp=2", "--steps", "1"], "Use steps=2 or more"),
        ([], "--all --devices 4"),
        (["--all"], "--all --devices 4"),
        (["--layout", "dp=2", "--json", "/nowhere/verdict.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_tried_exits_with_2(words, said, capsys):
    assert main("verify", *settings(), *words) == 2
    assert said in capsys.readouterr().err


def test_a_planted_bug_is_found_and_its_mending_proven(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["planted_bug.py"])
    example = SimpleNamespace(**runpy.run_path("examples/planted_bug.py"))
    assert example.main() == 1
    said = capsys.readouterr().out
    assert "it is the mean of the means of the micro-batches" in said
    monkeypatch.setattr("sys.argv", ["planted_bug.py", "--mended"])
    assert example.main() == 0


def test_an_optimizer_that_updates_weights_whole_is_proven():
    verdict = samestep.verify(job_of(), layout="dp=1 tp=2", model=MODELS["qwen3"], optimizer=Lars, dataset=Tokens())
    assert verdict.proven, verdict.to_text()


def test_an_optimizer_that_couples_weights_is_refused_as_in_a_run():
    class Coupled(Lars):
        def step(self, closure=None):
            total = sum(weight.grad.norm() for group in self.param_groups for weight in group["params"])
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data.sub_(weight.grad / total)

    with pytest.raises(LayoutError, match="Use zero=0"):
        samestep.verify(job_of(), layout="dp=2 zero=1", model=MODELS["plain"], optimizer=Coupled, dataset=Tokens())


def test_an_instance_and_its_optimizer_are_proven():
    import torch

    model = MODELS["plain"]()
    verdict = samestep.verify(
        job_of("float64"),
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        dataset=Tokens(),
        layout="dp=2 zero=1",
    )
    assert verdict.proven, verdict.to_text()
    assert verdict.job == "Plain"


def test_a_model_too_large_is_proven_with_fewer_layers(monkeypatch):
    config = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 6}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    job = job_of("float64", model={"source": "hf:llama", "config": config})
    monkeypatch.setattr(verify, "_free_bytes", lambda device: 4_000_000)
    job = job.model_copy(update={"data": Job(data={"sequence_length": 16}).data})
    verdict = samestep.verify(job, layout="pp=2 microbatch=4", dataset=None)
    assert verdict.proven, verdict.to_text()
    assert any("of 6 layers, at full width" in note for note in verdict.notes), verdict.notes
