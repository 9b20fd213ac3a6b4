"""Random numbers of a forward: functions of seed, step, module, call and sample, so equal to one device in every layout.

Each case is code that people write (autoencoders, diffusion, stochastic depth, masked images, noisy weights, sampled
choices), held in float64 to 1e-9 against one device: losses, norms, gradients and weights.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Gumbel, Normal

from samestep.building.loss import cross_entropy
from samestep.datasets import Batch
from samestep.errors import InputError, ModelError
from samestep.layout import Layout
from tests.code.vectors import JOB, VOCABULARY, WIDTH, Blocks, Net, Pairs, code, nets
from tests.laboratory import make_run, prove, prove_refused, source_of
from tests.pool import pool

SPLIT = ("dp=2", "dp=1 microbatch=4", "dp=2 zero=3 microbatch=2")


class Diffusion(Net):
    """A sample of a variational autoencoder; a random time and noise for each sample, of shapes that are written out."""

    def between(self, h: Tensor) -> Tensor:
        mean, log_variance = h.chunk(2, dim=-1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        h = torch.cat([latent, latent * mean], dim=-1)
        time = torch.randint(0, 10, (h.shape[0],), device=h.device)
        noise = torch.randn(h.shape[0], h.shape[1], device=h.device, dtype=h.dtype)
        keep = (1 - time.to(h.dtype) / 10)[:, None]
        return keep.sqrt() * h + (1 - keep).sqrt() * noise


class Paths(Net):
    """Paths dropped for whole samples, filled in place and by a floor; and parts that the order of noise chooses (masked autoencoders)."""

    def between(self, h: Tensor) -> Tensor:
        kept = h.new_empty((h.shape[0], 1)).bernoulli_(0.7).div_(0.7)
        h = h * kept + h * torch.rand((h.shape[0], 1), dtype=h.dtype, device=h.device).add(0.8).floor_()
        order = torch.rand(len(h), 8, device=h.device).argsort(dim=1)
        kept = torch.gather(h, 1, order[:, :4])
        return torch.cat([kept, torch.zeros_like(kept)], 1).gather(1, order.argsort(dim=1))


class NoisyWeights(Net):
    """Noise on a weight, one order of the features, and one number, the same for all samples of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 0.1))

    def between(self, h: Tensor) -> Tensor:
        h = h * (1 + self.scale * torch.randn_like(self.scale)) + 0.1 * torch.randn(8, dtype=h.dtype)
        return h[:, torch.randperm(8)] * torch.rand([], dtype=h.dtype)


class Choices(Net):
    """Choices with and without replacement, softened ones, and those of torch.distributions."""

    def between(self, h: Tensor) -> Tensor:
        chances = h.detach().softmax(-1)
        picks = torch.multinomial(chances, 2)
        again = torch.multinomial(chances, 3, replacement=True)
        soft = F.gumbel_softmax(h, tau=2.0)
        one = F.one_hot(Categorical(logits=h.detach()).sample(), 8).to(h.dtype)
        h = h * soft + h * one + Normal(h, torch.ones_like(h)).rsample() + Gumbel(h, 1.0).rsample()
        return h + F.pad(h.gather(1, picks), (0, 6)) + F.pad(h.gather(1, again), (0, 5))


class Distributions(Net):
    """Numbers that fill tensors in place, and slopes of a random rectifier."""

    def between(self, h: Tensor) -> Tensor:
        h = F.rrelu(h, training=self.training) + torch.normal(h.detach(), 0.1) + torch.normal(0.0, h.detach().abs())
        for fill in ("uniform_", "exponential_", "log_normal_", "cauchy_"):
            h = h + 0.01 * getattr(torch.empty_like(h), fill)()
        h = h + 0.01 * torch.empty_like(h).geometric_(0.5) + 0.01 * torch.empty_like(h).random_(0, 5)
        return h + torch.bernoulli(torch.full_like(h, 0.3)) + torch.randint_like(h, 3) + torch.rand_like(h)


class TwoViews(Net):
    """Two views of each sample side by side in one batch."""

    def between(self, h: Tensor) -> Tensor:
        both = torch.cat([h, 2 * h])
        both = both + torch.randn_like(both)
        return both[: len(h)] * both[len(h) :]


class OtherRows(Net):
    """Noise whose rows are not the samples of the rows that it is added to."""

    def between(self, h: Tensor) -> Tensor:
        noise = torch.randn(2 * h.shape[0], 4, dtype=h.dtype)
        return h + torch.cat([noise[: len(h)], noise[len(h) :]], 1)


class Seeded(Net):
    """The same numbers at every step: constants of the code."""

    def between(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return h + torch.randn(8, dtype=h.dtype)


def noisy_loss(outputs: Any, batch: Any) -> Any:
    return (outputs + torch.randn_like(outputs)).square().sum(), len(outputs)


class Even(Pairs):
    """Tokens of an even number."""

    def __init__(self, tokens: bool) -> None:
        super().__init__(tokens)
        self.ids = self.ids[:, :4]


class Seeding(Even):
    """Tokens some of which are replaced, by a generator that each sample seeds."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        sample = super().__getitem__(index)
        return sample | {"input_ids": torch.where(torch.rand(4) < 0.3, 0, sample["input_ids"])}


class Noisy(nn.Module):
    """A block with noise on the sequence and on its hidden neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        hidden = hidden + 0.3 * torch.randn_like(hidden)
        noise = torch.randn(x.shape[0], x.shape[1], 1, dtype=x.dtype, device=x.device)
        return x + self.down(hidden) + 0.1 * noise


class NoisyBlocks(Blocks):
    """Blocks that draw, around code of the model's own that draws."""

    block = Noisy

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x + 0.1 * torch.randn_like(x))
        return self.head(x)


class SequenceFirst(Blocks):
    """torch's own transformer, which has the tokens in dimension 0 and the samples in dimension 1, with dropout."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.both = nn.Transformer(WIDTH, 2, 1, 1, 8, dropout=0.2)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).transpose(0, 1)
        return self.head(self.both(x, x.roll(1, 0)).transpose(0, 1))


class Recurrent(Blocks):
    """Recurrent layers with dropout between them."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(2 * WIDTH, VOCABULARY)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, bidirectional=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(input_ids).transpose(0, 1))[0].transpose(0, 1))


NETS = nets(
    # Numbers drawn where dropout is drawn too, and in evaluation without it.
    Behind=lambda net, h: F.dropout(h, 0.3, net.training) + 0.1 * torch.randn_like(h),
    Mixup=lambda _, h: h + 0.3 * h[torch.randperm(len(h))],  # each sample mixed with another one of the batch
    Counted=lambda _, h: h * torch.poisson(h.detach().abs()),
    OwnGenerator=lambda _, h: h + torch.randn(h.shape, generator=torch.Generator().manual_seed(1), dtype=h.dtype),
    Mixed=lambda _, h: Beta(0.4, 0.4).sample((len(h), 1)).to(h) * h,  # a share for each sample, as mixup draws it
)
ON_AXES = (
    "pp=2 microbatch=4", "pp=2 microbatch=2 schedule=zero-bubble", "tp=2", "cp=2", "dp=2 zero=3 recompute=full microbatch=2",
)  # fmt: skip
EQUAL = [Diffusion, Paths, NoisyWeights, Choices, Distributions, NETS["Behind"], TwoViews]


EVEN = code(NoisyBlocks, "of even sequences", data=functools.partial(Even, tokens=True), loss=cross_entropy)
SEEDING = code(NoisyBlocks, "of samples that seed", data=functools.partial(Seeding, tokens=True), loss=cross_entropy)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("model", [code(build, "that draws") for build in (*EQUAL, SequenceFirst, Recurrent)])
def test_numbers_are_those_of_one_device(model: str, layout: str) -> None:
    prove(layout, model)


@pytest.mark.parametrize(
    ("layout", "model"), [(layout, SEEDING if layout == "pp=2 microbatch=4" else EVEN) for layout in ON_AXES]
)
def test_blocks_draw_the_same_on_every_axis(layout: str, model: str) -> None:
    """A pipeline's stage reads samples inside a forward: a data set that seeds the generator of the process disturbs no numbers."""
    prove(layout, model)


def test_numbers_of_hidden_neurons_are_cut_as_they_are() -> None:
    """Nothing is gathered for them."""
    prepared = source_of(code(NoisyBlocks, "that draws"), Layout("tp=2"), JOB).prepared
    assert prepared is not None
    assert prepared.analysis.gathered == {}


@pytest.mark.parametrize(
    ("model", "words", "layout"),
    [
        (code(build, "that draws"), words, "dp=2")
        for build, words in [
            (NETS["Mixup"], "influence each other|dimension 0 must|an order of samples"),
            (OtherRows, "samples influence each other"),
            (NETS["OwnGenerator"], "randn draws from a generator of its own"),
            (Seeded, "randn: the forward seeds the generator itself, .*Make constants in __init__, as a buffer"),
            (NETS["Counted"], "poisson: its random numbers would differ between layouts"),
            (
                NETS["Mixed"],
                "a beta or Dirichlet distribution: its random numbers would differ between layouts. Use .* data set draws",
            ),
        ]
    ],
)
def test_what_would_differ_is_refused_by_name(model: str, words: str, layout: str) -> None:
    prove_refused(layout, model, words, InputError)


def test_a_loss_that_draws_is_refused_with_what_works() -> None:
    words = r"random numbers in the loss. Use numbers that the model's forward draws and returns"
    prove_refused("dp=1", code(Net, "with torch's noise in the loss", loss=noisy_loss), words, ModelError)


def evaluated(rank: int, world: int, layout: str) -> list[float]:
    """Return the loss of held-out samples, twice, of code that draws in evaluation too."""
    torch.manual_seed(rank)
    run = make_run(rank, world, code(NETS["Behind"], "that draws"), layout, JOB)
    held_out = Batch(0, np.arange(16, 24), Pairs(tokens=False))
    return [run.evaluate(held_out)["loss"] for _ in range(2)]


@pytest.mark.parametrize("layout", ["dp=2", "dp=2 zero=3"])
def test_evaluation_draws_the_same_each_time_and_in_every_layout(layout: str) -> None:
    (first, again), (other, _) = pool(2).run(evaluated, layout)
    assert first == again == other
    assert first == pytest.approx(evaluated(0, 1, "dp=1")[0], rel=1e-12)
