"""`verify` on models that a naive comparison misjudges: no false alarm, the right cause, the precision that was proven."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.proof.verdict import Cause, Verdict
from tests.laboratory import job_of
from tests.models import LENGTH, MODELS, Plain, Tokens
from tests.proof.faults import prove
from tests.small import main, settings


class Masked(Plain):
    """Buffers of every kind, and masks that hold the lowest number of a dtype, as eager attentions have them."""

    def __init__(self) -> None:
        super().__init__()
        square = torch.ones(LENGTH, LENGTH)
        self.register_buffer("causal", square.tril().bool())
        self.register_buffer("infinite", (square * -torch.inf).triu(1))
        self.register_buffer("lowest", (square * torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("undefined", torch.full((3,), torch.nan))
        self.register_buffer("turns", torch.polar(torch.ones(LENGTH), torch.arange(float(LENGTH))))
        self.register_buffer("counts", torch.arange(5))
        self.blocks = nn.ModuleList(MaskedBlock(block) for block in self.blocks)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        lowest = torch.zeros(len(x), LENGTH, LENGTH, dtype=x.dtype).masked_fill(~self.causal, torch.finfo(x.dtype).min)
        infinite = self.infinite.to(x.dtype).expand(len(x), -1, -1)
        for block in self.blocks:
            x = block(x, lowest, infinite, self.turns.expand(len(x), -1))
        return self.head(self.norm(x))


class MaskedBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, lowest: Tensor, infinite: Tensor, turns: Tensor) -> Tensor:
        scores = (x @ x.transpose(1, 2) + lowest + infinite).softmax(-1)
        return self.block(x + 0.1 * scores @ x + 0.01 * turns.real.to(x.dtype)[:, :, None])


class Named(Plain):
    """A model that looks its classes up by their names, as transformers does for the outputs that it records."""

    def forward(self, input_ids: Tensor) -> Tensor:
        assert str(type(self)) == str(Named)
        assert all(str(type(block)) == f"<class '{Plain.__module__}.Block'>" for block in self.blocks)
        return super().forward(input_ids)


class Centered(Plain):
    """It subtracts the mean of the batch."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x - x.mean(0, keepdim=True)))


class Narrow(Plain):
    """It has no float64: it fails where its values are double, in words of its own."""

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.scale.dtype == torch.float64 and not self.scale.is_meta:
            raise ValueError("numbers of 64 bits are more than this model was made for")
        return super().forward(input_ids)


MODELS.update({"masked": Masked, "named": Named, "centered": Centered})


def test_masks_and_buffers_of_every_kind_raise_no_alarm() -> None:
    verdict = prove("masked", "dp=2 zero=3 microbatch=2")
    assert verdict.proven, verdict.to_text()


def test_sharded_modules_keep_the_names_of_their_classes() -> None:
    verdict = prove("named", "dp=2 zero=3")
    assert verdict.proven, verdict.to_text()


def _verified(**given: Any) -> Verdict:
    return samestep.verify(
        job_of("float32", 2, train={"watch_every": 100}), layout="dp=2", dataset=Tokens(), **{"model": Plain, **given}
    )


def _rooted(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(outputs.flatten(0, 1), batch["input_ids"].flatten(), reduction="sum")
    return total * math.sqrt(len(outputs)), torch.tensor(batch["labels"].numel())


def test_a_loss_that_is_no_sum_over_samples_is_no_mean_of_means() -> None:
    allowed = {"run": {"allow": ["loss"]}}
    verdict = samestep.verify(
        job_of("float64", 2, train={"watch_every": 100}, **allowed),
        layout="dp=2",
        dataset=Tokens(),
        model=Plain,
        loss=_rooted,
    )
    assert verdict.cause is Cause.COUPLED
    assert "the loss is not a sum over samples: on one device too the batch has the loss" in verdict.explanation


def test_a_model_that_mixes_samples_is_called_that() -> None:
    allowed = {"run": {"allow": ["samples"]}}
    verdict = samestep.verify(
        job_of("float64", 2, train={"watch_every": 100}, **allowed), layout="dp=2", dataset=Tokens(), model=Centered
    )
    assert verdict.cause is Cause.COUPLED
    assert "first norm in step 1" in verdict.explanation


def test_a_model_without_float64_is_proven_in_its_own_precision_and_says_so() -> None:
    verdict = _verified(model=Narrow)
    assert verdict.proven, verdict.to_text()
    assert verdict.precision == "float32"
    assert "numbers of 64 bits are more than this model was made for" in verdict.notes[0]
    assert "proven in float32 alone, up to rounding: the same result" in verdict.to_text()


def test_a_model_that_fails_in_every_precision_is_no_question_of_precision() -> None:
    class Broken(Plain):
        def forward(self, input_ids: Tensor) -> Tensor:
            if not self.scale.is_meta:
                raise ValueError("this model was not made to run")
            return super().forward(input_ids)

    with pytest.raises(samestep.SamestepError, match="this model was not made to run"):
        _verified(model=Broken)


def test_what_trains_on_gpus_is_proven_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*settings(run__device="cuda", model__config__num_hidden_layers=1), "--layout", "dp=2", "--steps", "2"]
    assert main("verify", *words, "--precision", "float64", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "note: run on cpu" in said
    assert "proven: the same result" in said


class Waves(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Points in a random order, with the heights of a wave: one number a sample, and some are near zero."""

    points = torch.rand(256, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], torch.sin(6 * self.points[index])


def test_one_number_a_sample_may_be_as_far_off_as_rounding_moves_any_of_them() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.mse_loss(outputs, batch[1], reduction="sum"), len(outputs)

    job = samestep.Job(
        train={"global_batch": 64, "steps": 3, "seed": 0}, optimizer={"lr": 3e-3}, run={"device": "cpu", "threads": 1}
    )
    verdict = samestep.verify(job, layout="dp=2 zero=3", dataset=Waves(), model=build, loss=loss)
    assert verdict.proven, verdict.to_text()
    assert any("float32" in check.what for check in verdict.checks)
    assert all(check.passed for check in verdict.checks)
