"""A forward that begins to do something else after some steps: equal to a plain loop, or rejected before the first update that would be wrong."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.errors import ModelError, SamestepError, UnprovenError
from samestep.layout import Layout
from tests.plain import assert_trained, train_plainly
from tests.pool import pool

B, STEPS, LATE = 8, 7, 5
"""Step 6 is between the steps that are watched: the first, second, fourth and eighth."""
JOB = samestep.Job(train={"global_batch": B, "steps": STEPS}, numerics={"precision": "float64"}, run={"device": "cpu"})
STEP = [0]
"""The step, counted from 0, as a loop's own flag knows it."""


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(B, 6, generator=generator, dtype=torch.float64).clamp(-2.0, 2.0)
    x[B - 1, 0] = 5.0 if step == LATE else 1.0
    return {"x": x, "y": torch.randint(4, (B,), generator=generator)}


class Later(nn.Module):
    """A forward that changes what `change` names, once `when` says so."""

    def __init__(self, when: str, change: str) -> None:
        super().__init__()
        self.first, self.last, self.when, self.change = nn.Linear(6, 8), nn.Linear(8, 4), when, change
        self.calls, self.is_late = 0, False
        self.register_buffer("counted", torch.zeros((), dtype=torch.long))

    def _begins(self, x: Tensor) -> bool:
        if self.when == "a counter":
            self.calls += self.training
            return self.calls > LATE
        if self.when == "a buffer":
            self.counted += self.training
            return int(self.counted) > LATE
        if self.when == "an outlier":
            return bool((x > 4.0).any())
        return self.is_late if self.when == "a flag of the loop" else STEP[0] >= LATE

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last((CHANGES if self._begins(x) else BEFORE).get(self.change, lambda h: h)(h))


class Attentive(nn.Module):
    """A block of causal attention between tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class LaterTokens(Later):
    """The same after each block of a causal model of tokens."""

    def __init__(self, when: str, change: str) -> None:
        super().__init__(when, change)
        self.first, self.last = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Attentive() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h, begins = self.first(x), self._begins(x)
        for block in self.blocks:
            h = CHANGES[self.change](block(h)) if begins and self.change != "of the last" else block(h)
        h = 0.5 * h if begins and self.change == "of the last" else h
        return self.last(h)


CHANGES = {
    "centred without a gradient": lambda h: h - h.detach().mean(0),
    "mixed": lambda h: 0.5 * (h + h.flip(0)),
    "of each": lambda h: h - h.mean(1, keepdim=True),
    "by element": lambda h: 0.5 * h.sin() + h,
    "of features, without a gradient": lambda h: h - h.detach().mean(-1, keepdim=True),
    "turned": lambda h: h + h.flip(-1),
    "counted": lambda h: h / h.shape[-1],
    "of tokens": lambda h: h - h.mean(1, keepdim=True),
    "the token before": lambda h: h + F.pad(h[:, :-1], (0, 0, 1, 0)),
}
BEFORE = {
    "shares of samples": lambda h: h.softmax(-1),
    "added up over samples": lambda h: h.cumsum(1),
    "another function": lambda h: h.tanh(),
    "shares instead": lambda h: h.tanh(),
}
"""What a forward does until then with as many operations; nothing if it is not here."""
CHANGES |= {
    "shares of samples": lambda h: h.softmax(0),
    "added up over samples": lambda h: h.cumsum(0),
    "another function": lambda h: h.softmax(0),
    "shares instead": lambda h: h.softmax(-1),
}
COUPLED = [
    ("dp=2", "a flag of the loop", "shares of samples"),
    ("dp=2 zero=3", "a counter", "added up over samples"),
    ("dp=1 microbatch=4", "a global", "another function"),
    ("dp=2", "an outlier", "mixed"),
    ("dp=2 zero=3", "a buffer", "centred without a gradient"),
]
PARTS = [
    ("tp=2", "a flag of the loop", "of features, without a gradient"),
    ("tp=2", "a global", "turned"),
    ("cp=2", "a counter", "of tokens"),
    ("cp=2", "a global", "the token before"),
    ("pp=2 microbatch=4", "a flag of the loop", "by element"),
    ("pp=2 microbatch=4", "a global", "counted"),
]
"""Layouts in which ranks have parts of what meets later, or what stands for the results of other stages."""
APART = [
    ("pp=2 microbatch=4", "a counter", "of the last"),
    ("cp=2", "a counter", "of features, without a gradient"),
    ("dp=1 microbatch=4", "a global", "shares instead"),
    ("dp=2 zero=3", "a counter", "of each"),
    ("tp=2", "a flag of the loop", "by element"),
]


def of_tokens(layout: str) -> bool:
    return layout[:2] in ("cp", "pp")


def built(when: str, change: str, layout: str = "") -> nn.Module:
    torch.manual_seed(3)
    return (LaterTokens if of_tokens(layout) else Later)(when, change).double()


def given_in(step: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return the inputs and labels of a step: tokens and those that follow under cp and pp."""
    tokens = torch.randint(12, (B, 9), generator=torch.Generator().manual_seed(step))
    return (tokens[:, :-1], tokens[:, 1:]) if of_tokens(layout) else (batch_of(step)["x"], batch_of(step)["y"])


optimizer = functools.partial(torch.optim.SGD, lr=0.1)


def learned(rank: int, world: int, layout: str, when: str, change: str) -> tuple[list[float], dict[str, Tensor], str]:
    """Take the steps; return the losses before an error, the weights, and the error."""
    model = built(when, change, layout)
    run = samestep.parallelize(model, "cross_entropy", optimizer(model.parameters()), layout=layout, job=JOB)
    losses: list[float] = []
    for STEP[0] in range(STEPS):
        model.is_late = STEP[0] >= LATE
        x, y = given_in(STEP[0], layout)
        try:
            losses.append(run.step({"x": x, "labels": y}).loss)
        except UnprovenError as error:
            return losses, {}, str(error)
    return losses, run.state_dict(on_every_rank=True), ""


def plain(when: str, change: str, layout: str) -> Any:
    model = built(when, change, layout)

    def of_step(step: int) -> Tensor:
        STEP[0], (x, y) = step, given_in(step, layout)
        model.is_late = step >= LATE
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return train_plainly(model, range(STEPS), of_step, optimizer(model.parameters()))


@pytest.mark.parametrize(("layout", "when", "change"), COUPLED)
def test_samples_that_meet_later_are_rejected_before_an_update(layout: str, when: str, change: str) -> None:
    for losses, _, error in pool(Layout(layout).world_size).run(learned, layout, when, change):
        assert f"step {LATE + 1}, " in error
        assert "samples influence each other" in error
        assert losses == pytest.approx(plain(when, change, layout)[0][:LATE], rel=1e-9)


@pytest.mark.parametrize(("layout", "when", "change"), PARTS)
def test_parts_that_meet_later_are_rejected_before_an_update(layout: str, when: str, change: str) -> None:
    for losses, _, error in pool(Layout(layout).world_size).run(learned, layout, when, change):
        what = {"tp": "a part of the features", "cp": "a part of the tokens", "pp": "stand-ins of these"}[layout[:2]]
        assert f"step {LATE + 1}: the forward now runs" in error
        assert f"a rank has {what}" in error
        assert losses == pytest.approx(plain(when, change, layout)[0][:LATE], rel=1e-9)


@pytest.mark.parametrize(("layout", "when", "change"), APART)
def test_samples_that_stay_apart_are_those_of_a_plain_loop(layout: str, when: str, change: str) -> None:
    ranks = pool(Layout(layout).world_size).run(learned, layout, when, change)
    assert not any(error for *_, error in ranks)
    assert_trained(ranks, plain(when, change, layout), 1e-9, 1e-12)


class Rerun(LaterTokens):
    """Runs a block twice or not at all, from the second step on."""

    def __init__(self, block: int, times: int) -> None:
        super().__init__("a counter", "of each")
        self.times = {block: times}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        h = self.first(x)
        for number, block in enumerate(self.blocks):
            for _ in range(self.times.get(number, 1) if self.calls > 1 else 1):
                h = block(h)
        return self.last(h)


def rerun(place: Any, block: int, times: int) -> None:
    torch.manual_seed(3)
    run = samestep.parallelize(
        Rerun(block, times).double(), "cross_entropy", optimizer, layout="pp=2 microbatch=4", job=JOB
    )
    for step in range(3):
        x, y = given_in(step, "pp")
        run.step({"x": x, "labels": y})


@pytest.mark.parametrize(("block", "times"), [(0, 2), (0, 0)])
def test_a_block_at_a_boundary_of_stages_that_runs_otherwise_later_is_named(block: int, times: int) -> None:
    words = f"runs blocks.{block} twice" if times else f"skipped blocks.{block}"
    with pytest.raises(ModelError, match=f"the forward {words}, where a stage of the pipeline receives or sends"):
        samestep.launch(rerun, (block, times), ranks=2, device="cpu")  # which ends where one rank fails


class Counted(nn.Module):
    """Counts its calls behind the layer at which the second stage begins, and scales what follows after a few."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls, self.few = 0, calls

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        self.calls += 1
        return self.last(h * 1.1 if self.calls > self.few else h)


def squares(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def count_calls(place: Any, layout: str, calls: int) -> None:
    torch.manual_seed(3)
    run = samestep.parallelize(Counted(calls).double(), squares, optimizer, layout=layout, job=JOB)
    for step in range(4):
        run.step({"x": torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))})


@pytest.mark.parametrize(("layout", "calls"), [("pp=2", 2), ("pp=2 microbatch=4", 3)])
def test_a_part_of_the_samples_that_a_stage_does_not_take_leaves_no_message_behind(layout: str, calls: int) -> None:
    """Stages fail once they have passed on what others wait for, and would wait for what was let go."""
    with pytest.raises(SamestepError, match=r"and the traced forward ran .* at this point"):
        samestep.launch(count_calls, (layout, calls), ranks=2, device="cpu")


class InChunks(nn.Module):
    """A wide layer over chunks of four tokens each; the last chunk is padded, and a flag mixes features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = (
            nn.Embedding(12, 8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Linear(8, 12),
        )
        self.is_late = False

    def _wide(self, h: Tensor) -> Tensor:
        h = self.up(h).relu()
        return self.down(F.pad(h.softmax(-1) if self.is_late else h, (0, 0, 0, -h.shape[1] % 4)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + torch.cat([self._wide(part)[:, : part.shape[1]] for part in h.split(4, dim=1)], 1))


LENGTHS = [4, 8, 6, 9, 8, 3, 10]


def learned_lengths(rank: int, world: int, layout: str, late: int) -> tuple[list[float], dict[str, Tensor], str]:
    """Take steps of sequences of other lengths each, in which the flag is set from step `late` on."""
    torch.manual_seed(3)
    model, losses = InChunks().double(), []
    run = samestep.parallelize(model, "cross_entropy", optimizer(model.parameters()), layout=layout, job=JOB)
    for step, length in enumerate(LENGTHS):
        model.is_late = step >= late
        try:
            losses.append(run.step({"x": (tokens := tokens_of(length)), "labels": tokens}).loss)
        except UnprovenError as error:
            return losses, {}, str(error)
    return losses, run.state_dict(on_every_rank=True), ""


def tokens_of(length: int) -> Tensor:
    return torch.randint(12, (B, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("layout", ["tp=2", "dp=2 zero=3"])
def test_other_lengths_take_more_or_fewer_turns_of_a_loop(layout: str) -> None:
    def of_step(step: int) -> Tensor:
        tokens = tokens_of(LENGTHS[step])
        return F.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())

    torch.manual_seed(3)
    model = InChunks().double()
    expected = train_plainly(model, range(STEPS), of_step, optimizer(model.parameters()))
    ranks = pool(2).run(learned_lengths, layout, STEPS)
    assert not any(error for *_, error in ranks)
    assert_trained(ranks, expected, 1e-9, 1e-12)


def test_features_that_meet_later_are_rejected_in_samples_of_another_length() -> None:
    for losses, _, error in pool(2).run(learned_lengths, "tp=2", LATE):
        assert f"step {LATE + 1}: the forward now runs" in error
        assert len(losses) == LATE
