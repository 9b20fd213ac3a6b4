"""The proof of replicas that are trained apart: one device, a layout and a plain torch loop agree, or the proof says where not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from samestep.building.loss import mse
from samestep.job import Job
from samestep.proof.verdict import Cause
from samestep.proof.verify import verify
from samestep.wings.slow_links.local_replicas import LocalReplica
from tests import traced
from tests.parity.unused_weights import OPTIMIZERS, WIDTH, Experts, Pairs

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture(autouse=True)
def _one_trace() -> Iterator[None]:
    with traced.families_once():
        yield


class Shifted(nn.Module):
    """One row of a trained table for all samples, which each replica trains apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.table = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Embedding(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x) + self.table(torch.zeros(1, dtype=torch.long, device=x.device)))


def job(codec: str, **exchanges: float) -> Job:
    return Job(
        model={"source": "hf:llama", "config": {**CONFIG, "num_key_value_heads": 2, "max_position_embeddings": 64}},
        data={"sequence_length": 16},
        train={"global_batch": 8, "evaluate_samples": 0},
        optimizer={"clip_norm": 0.5},
        numerics={"replicas": 2, "exchange_every": 2, "compression": codec, **exchanges},
        run={"device": "cpu"},
    )


@pytest.mark.parametrize(
    ("layout", "codec", "every"),
    [("dp_replicate=2 dp_shard=2 zero=3", "int8", 2), ("dp=2", "powersgd", 2), ("dp=2 zero=1", "powersgd", 1)],
)
def test_a_layout_is_proven(layout: str, codec: str, every: int) -> None:
    verdict = verify(job(codec, exchange_every=every), layout=layout, precision="float64")
    assert verdict.proven, verdict.to_text()
    assert "plain torch" in {check.what for check in verdict.checks}


@pytest.mark.parametrize("model", [Shifted, Experts])
def test_outputs_without_a_row_for_each_sample_are_those_of_their_replica(model: type[nn.Module]) -> None:
    """A forward of a replica has other outputs for all samples than that of another, and other rows that values pick."""
    small = Job(
        train={"global_batch": 8, "evaluate_samples": 0, "seed": 1},
        numerics={"replicas": 2, "exchange_every": 2},
        run={"device": "cpu"},
    )
    verdict = verify(
        small, layout="dp=2", model=model, loss=mse, optimizer=OPTIMIZERS["adamw"], dataset=Pairs(), precision="float64"
    )
    assert verdict.proven, verdict.to_text()


def test_an_outer_step_that_is_not_the_paper_s_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device and the layout err alike, so that only the plain loop tells."""
    whole = LocalReplica.exchange

    def without_momentum(self: LocalReplica, step: int) -> None:
        torch._foreach_zero_(self.momentum)
        whole(self, step)

    monkeypatch.setattr(LocalReplica, "exchange", without_momentum)
    verdict = verify(job("none"), layout="dp=2", precision="float64")
    assert verdict.cause is Cause.PLAIN, verdict.to_text()
    assert "step 3" in verdict.explanation


def test_replicas_that_go_on_from_elsewhere_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LocalReplica.exchange

    def off(self: LocalReplica, step: int) -> None:
        whole(self, step)
        if self.place.world_size == 4 and self.index == 1 and self.has_exchanged:
            self.pieces[0].value.data *= 1.001

    monkeypatch.setattr(LocalReplica, "exchange", off)
    verdict = verify(job("none"), layout="dp=2 tp=2", precision="float64")
    assert verdict.cause is Cause.REPLICAS, verdict.to_text()
    assert "of replica 1" in verdict.explanation
