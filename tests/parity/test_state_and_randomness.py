"""What a forward keeps, what draws random numbers, and what checkpoints itself: equal to one device, or refused.

Each case of user's code is run in some layouts; those that compute what one device does must be equal in float64 to
1e-9 (losses, norms, gradients, weights), and the others end in an `UnprovenError` that names what works.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep.errors import LayoutError, UnprovenError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests import traced
from tests.laboratory import TOLERANCE, Observed, assert_same, follow, job_of, perturbed
from tests.pool import pool

WIDTH, VOCABULARY, LENGTH = 6, 11, 5


class Pairs:
    """Features and classes of samples, and how often each was read."""

    def __init__(self, tokens: bool) -> None:
        draw = torch.Generator().manual_seed(7)
        self.x, self.y = torch.randn(24, WIDTH, generator=draw, dtype=torch.float64), torch.arange(24) % 3
        self.ids, self.tokens = torch.randint(0, VOCABULARY, (24, LENGTH), generator=draw), tokens

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return (
            {"input_ids": self.ids[index], "labels": self.ids[index]} if self.tokens else (self.x[index], self.y[index])
        )


class Net(nn.Module):
    """Two linear layers around what a case does to the features between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.between(self.up(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class Blocks(nn.Module):
    """Tokens through blocks of a case's class."""

    block: type[nn.Module]

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


# -- random numbers --------------------------------------------------------------------------------


class LateDropout(Net):
    """A probability that is raised after the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def between(self, h: Tensor) -> Tensor:
        return self.drop(h)


class LateRate(Net):
    """The same with a number of the module's own."""

    drop_rate = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.0

    def between(self, h: Tensor) -> Tensor:
        return F.dropout(h, self.drop_rate, self.training)


def raised(run: Run) -> None:
    for module in run.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if isinstance(module, LateRate):
            module.drop_rate = 0.3


class OwnGenerator(Net):
    """Noise that is no random number: a function of the features."""

    def between(self, h: Tensor) -> Tensor:
        noise = torch.sin(h.detach() * 1e4)
        return h + 0.1 * noise


class Reseeded(Net):
    """A constant that is drawn in the first forward, and puts the generator back."""

    def __init__(self) -> None:
        super().__init__()
        self.basis: np.ndarray | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.basis is None:
            self.basis = np.random.default_rng(3).standard_normal((8, 8))
        return h @ torch.from_numpy(self.basis).to(h)


class Aten(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.ops.aten.dropout(h, 0.3, self.training)


def _drop(h: Tensor) -> Tensor:
    return F.dropout(h, 0.3, True)


class Scripted(Net):
    """Dropout in a scripted function, which no function mode sees."""

    def between(self, h: Tensor) -> Tensor:
        return _SCRIPTED(h)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # of one class or another, by version
    _SCRIPTED = torch.jit.script(_drop)


class NumpyNoise(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * float(np.random.uniform(0.5, 1.5))


class PythonNoise(Net):
    def between(self, h: Tensor) -> Tensor:
        return h if random.random() < 0.5 else 2 * h


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0.1 * torch.empty_like(grad).normal_()


class BackwardNoise(Net):
    def between(self, h: Tensor) -> Tensor:
        return NoisyGradient.apply(h)


class NoiseAfterWarmUp(Net):
    """Noise in later steps alone, as exploration has it."""

    scale = 0.0

    def between(self, h: Tensor) -> Tensor:
        return h + self.scale * torch.randn_like(h) if self.scale else h


def noisy(run: Run) -> None:
    run.model.scale = 0.1


class MultipleOf624(Net):
    """So many numbers that the generator's position is what it was."""

    def between(self, h: Tensor) -> Tensor:
        random.getrandbits(32 * 624)
        return h


def noisy_loss(outputs: Any, batch: Any) -> Any:
    total, count = loss(outputs, batch)
    return total * (1 + 0.1 * np.random.rand()), count


class NoisySGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(0.01 * torch.randn_like(param))
        return super().step()


class Augmented(Pairs):
    """Features with noise that is drawn when they are read."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(WIDTH, dtype=x.dtype), y


class SometimesFlipped(Pairs):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return (x.flip(0) if random.random() < 0.5 else x), y


class SeededByIndex(Pairs):
    """Noise as a function of the index: from its own generator, and from the process's, which it seeds."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        random.seed(index)
        noise = np.random.default_rng(index).standard_normal(WIDTH)
        return x + 0.1 * torch.from_numpy(noise) * random.random(), y


class TokensSeededByIndex(Pairs):
    """Tokens of which some are replaced, drawn by the process's generators after these are seeded by the index."""

    def __getitem__(self, index: int) -> Any:
        random.seed(index)
        np.random.seed(index)
        sample = super().__getitem__(index)
        replaced = torch.from_numpy(np.random.rand(LENGTH) < 0.3)
        return {**sample, "input_ids": sample["input_ids"].masked_fill(replaced, random.randrange(VOCABULARY))}


# -- state -----------------------------------------------------------------------------------------


class OwnMean(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def between(self, h: Tensor) -> Tensor:
        self.mean.lerp_(h.detach().mean(0), 0.5)
        return h - self.mean


class OwnMeanByData(OwnMean):
    """The same through `.data`, which leaves no version."""

    def between(self, h: Tensor) -> Tensor:
        self.mean.data.mul_(0.5).add_(h.detach().mean(0), alpha=0.5)
        return h - self.mean


class ReplacedMean(OwnMean):
    """The same by replacing the buffer."""

    def between(self, h: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        return h - self.mean


class EvaluationMean(OwnMean):
    """A statistic for evaluation, which training does not read."""

    def between(self, h: Tensor) -> Tensor:
        if not self.training:
            return h - self.mean
        self.mean.lerp_(h.detach().mean(0), 0.5)
        return h


class Queue(Net):
    """The features of earlier steps in a list of tensors (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque(maxlen=2)

    def between(self, h: Tensor) -> Tensor:
        past = sum((kept.mean(0) for kept in self.queue), torch.zeros(8, dtype=h.dtype, device=h.device))
        self.queue.append(h.detach())
        return h + past


class DataInit(Net):
    """A scale that the first batch sets (ActNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 1 / h.detach().std()
        return h * self.scale


class Memory(Net):
    """A vector quantiser's code that follows the features by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 8))

    def between(self, h: Tensor) -> Tensor:
        nearest = torch.cdist(h.detach(), self.codes).argmin(-1)
        found = self.codes[nearest]
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.1 * (h.detach() - found))
        return h + (found - h).detach()


class SamplesSeen(Net):
    """A number of samples by which features are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def between(self, h: Tensor) -> Tensor:
        self.seen += len(h)
        return h * (1 + 0.01 * self.seen)


class Calls(Net):
    """Annealing by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.k = 0

    def between(self, h: Tensor) -> Tensor:
        self.k += 1
        return h * (1 + 0.1 * self.k)


class CallsInDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"steps": {"taken": 0}}

    def between(self, h: Tensor) -> Tensor:
        self.config["steps"]["taken"] += 1
        return h * (1 + 0.1 * self.config["steps"]["taken"])


class CallsOfTheClass(Net):
    calls = 0

    def between(self, h: Tensor) -> Tensor:
        type(self).calls += 1
        return h * (1 + 0.1 * self.calls)


class CountingBuffer(Net):
    """A number of calls in a buffer, by which features are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(()))

    def between(self, h: Tensor) -> Tensor:
        self.k += 1
        return h * (1 + 0.1 * self.k)


def spectral() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, 8)), nn.Tanh(), nn.Linear(8, 3))


class Embedded(nn.Module):
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH, **self.options), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embed(input_ids))


class MaxNorm(Embedded):
    options = {"max_norm": 0.5}  # noqa: RUF012


class ByFrequency(Embedded):
    options = {"scale_grad_by_freq": True}  # noqa: RUF012


class ForcedNorm(Net):
    """A weight that each forward normalises (EDM2)."""

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.copy_(F.normalize(self.down.weight, dim=1))
        return h


KEPT: list[Any] = []
"""What code keeps outside of its modules."""
NOISE = np.random.default_rng(5)
TABLES: dict[Any, Tensor] = {}


class CallsInGlobal(Net):
    def between(self, h: Tensor) -> Tensor:
        KEPT.append(1)
        return h * (1 + 0.1 * len(KEPT))


class CallsInDefault(Net):
    def between(self, h: Tensor, calls: dict[str, int] = {"n": 0}) -> Tensor:  # noqa: B006
        calls["n"] += 1
        return h * (1 + 0.1 * calls["n"])


def counting_in_closure() -> nn.Module:
    calls = 0

    def count(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output * (1 + 0.1 * calls)

    net = Net()
    net.up.register_forward_hook(count)
    return net


class QueueInGlobal(Net):
    def between(self, h: Tensor) -> Tensor:
        past = KEPT[-1].mean(0) if KEPT else 0.0
        KEPT.append(h.detach())
        return h + past


class Curriculum(Net):
    """Another forward from the fourth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def between(self, h: Tensor) -> Tensor:
        self.step += 1
        return h * 2 if self.step > 3 else h


class DataOfWeight(Net):
    """A weight that each forward gives another storage."""

    def between(self, h: Tensor) -> Tensor:
        self.up.weight.data = self.up.weight.data * 0.9
        return h


class Late(Net):
    """Code that acts once `is_late` is set."""

    is_late = False

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self.extra = nn.Linear(8, 8)

    def between(self, h: Tensor) -> Tensor:
        return self.odd(h) if self.is_late else h

    def odd(self, h: Tensor) -> Tensor:
        return h + self.extra(h)


class LateWrite(Late):
    def odd(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.down.weight.mul_(0.9)
        return h


class LateWriteOfData(Late):
    def odd(self, h: Tensor) -> Tensor:
        self.down.weight.data.mul_(0.9)
        return h


class Written(nn.Linear):
    """A linear layer that writes into its own weight in the forward, once it is late."""

    is_late = False

    def forward(self, h: Tensor) -> Tensor:
        if self.is_late:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(h)


class LateWriteOfItsOwn(Late):
    def __init__(self) -> None:
        super().__init__()
        self.down = Written(8, 3)

    def odd(self, h: Tensor) -> Tensor:
        self.down.is_late = True
        return h


class LateForkedNoise(Late):
    """Noise that leaves the generator where it was."""

    def odd(self, h: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(random.SystemRandom().randrange(2**31))
            return h + 0.1 * torch.randn_like(h)


class LateOwnNoise(Late):
    def odd(self, h: Tensor) -> Tensor:
        return h + torch.as_tensor(NOISE.normal(size=h.shape), dtype=h.dtype)


def late(run: Run) -> None:
    run.model.is_late = True


class PaddedWords(Pairs):
    """Sequences of one to five tokens, padded with 0 to the longest that is read with them; no word is 0."""

    def read(self, indices: Any) -> Any:
        lengths = torch.as_tensor(indices) % LENGTH + 1
        rows = self.ids[torch.as_tensor(indices)].clamp_min(1)[:, : int(lengths.max()) if len(lengths) else 1]
        is_word = torch.arange(rows.shape[1]) < lengths[:, None]
        return {"input_ids": rows * is_word, "labels": rows.masked_fill(~is_word, -100)}


def loss_of_words(outputs: Any, batch: Any) -> Any:
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum"), (labels != -100).sum()


class MeanOverPadding(Blocks):
    block = nn.Identity

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(torch.tanh(x + x.mean(1, keepdim=True)))


class MeanOverWords(MeanOverPadding):
    def forward(self, input_ids: Tensor) -> Tensor:
        x, is_word = self.embed(input_ids), (input_ids != 0)[..., None]
        return self.head(torch.tanh(x + (x * is_word).sum(1, keepdim=True) / is_word.sum(1, keepdim=True)))


class OneBuffer(Pairs):
    """Samples that are all views of one buffer."""

    def __init__(self, tokens: bool) -> None:
        super().__init__(tokens)
        self.buffer = torch.zeros(WIDTH, dtype=torch.float64)

    def __getitem__(self, index: int) -> Any:
        return self.buffer.copy_(self.x[index]), self.y[index]


# Legal in every layout: what is written is a cache, or read by nobody.


class Rotary(Net):
    """Tables that the first forward makes, as attribute and as buffer, for the length it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.by_size: dict[int, Tensor] = {}

    def between(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(h.shape[-1], device=h.device, dtype=h.dtype).cos()
            self.register_buffer("scale", torch.full((8,), 0.5, device=h.device, dtype=h.dtype), persistent=False)
        size = h.shape[-1]
        if size not in self.by_size:
            self.by_size[size] = torch.tril(torch.ones(size, size, device=h.device, dtype=h.dtype))
        return (h * self.table) @ self.by_size[size] * self.scale


@functools.lru_cache
def table_of(size: int) -> Tensor:
    return torch.arange(size).cos()


class CachesOutside(Net):
    """Tables in a global and in a cache of a function, and numbers of calls that are only looked at by others."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def between(self, h: Tensor) -> Tensor:
        type(self).calls += 1
        self.steps += 1
        key = (h.shape[-1], h.device, h.dtype)
        if key not in TABLES:
            TABLES[key] = torch.arange(h.shape[-1], device=h.device, dtype=h.dtype).sin()
        return h * TABLES[key] + table_of(h.shape[-1]).to(h)


class StochasticDepth(Net):
    """A mask with a row for each sample, drawn from ones."""

    def between(self, h: Tensor) -> Tensor:
        return h + h.tanh() * F.dropout(torch.ones(len(h), 1, dtype=h.dtype, device=h.device), 0.4, self.training)


class FilledBuffer(Net):
    """A buffer that the first forward fills in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(8))
        self.is_filled = False

    def between(self, h: Tensor) -> Tensor:
        if not self.is_filled:
            self.table.copy_(torch.arange(8).cos())
            self.is_filled = True
        return h * self.table


class Noting(Net):
    """The last activations, for who wants to look at them; and a sum that the forward itself uses."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None
        self.notes: dict[str, Any] = {}

    def between(self, h: Tensor) -> Tensor:
        self.last = h.detach()
        self.notes["shape"], self.notes["mean"] = tuple(h.shape), h.detach().mean()
        self.extra = h.square()
        return h + 0.1 * self.extra


class CountingAlone(Net):
    """A count of calls in a buffer that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def between(self, h: Tensor) -> Tensor:
        self.num_calls += 1
        return h


class Scratch(Net):
    """A buffer that each forward overwrites before it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("room", torch.zeros(8, 8))

    def between(self, h: Tensor) -> Tensor:
        self.room.zero_()
        self.room += torch.eye(8, device=h.device, dtype=h.dtype) * 0.5
        return h @ self.room


def old_weight_norm() -> nn.Module:
    """A hook sets the weight, a plain attribute, before each forward."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        first = nn.utils.weight_norm(nn.Linear(WIDTH, 8))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))


# -- checkpoints of the model's own ----------------------------------------------------------------


class Inner(nn.Module):
    """A block that checkpoints its own function, with dropout in it."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.drop(torch.tanh(self.mix(x))))


class ReentrantInner(Inner):
    reentrant = True


class Dropping(Inner):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class InFloat32(Inner):
    """An island of float32, which a step in float64 raises."""

    def inner(self, x: Tensor) -> Tensor:
        return self.drop(self.mix(x).float().tanh()).to(x.dtype)


class OwnInner(Blocks):
    block = Inner


class OwnReentrant(Blocks):
    block = ReentrantInner


class OwnInFloat32(Blocks):
    block = InFloat32


class OwnBlocks(Blocks):
    """Whole blocks under checkpoints."""

    block = Dropping

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class OwnBlocksReentrant(OwnBlocks):
    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda given: block(given), x, use_reentrant=True)


class OwnHead(OwnBlocks):
    """The head under a checkpoint, and the blocks not."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return checkpoint(self.head, x, use_reentrant=False)


class FrozenStart(OwnBlocksReentrant):
    """Nothing before the first block is trained, so torch trains nothing in it either."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


class Uncheckpointed(Blocks):
    block = Dropping


# -- the runs --------------------------------------------------------------------------------------


def loss(outputs: Any, batch: Any) -> Any:
    labels = batch["labels"] if isinstance(batch, dict) else batch[1]
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum"), labels.numel()


def sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([tensor for _, tensor in named], lr=0.3, momentum=0.9)


def noisy_sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return NoisySGD([tensor for _, tensor in named], lr=0.3)


JOB = job_of(steps=3)


def data_of(build: Any) -> Pairs:
    return Pairs(tokens=isinstance(build, type) and issubclass(build, (Blocks, Embedded)))


def source(build: Callable[[], nn.Module], layout: Layout, dataset: Any, **given: Any) -> Source:
    made = Source(perturbed(build), given.get("loss", loss), given.get("optimizer", sgd), build.__name__)
    key = (build, dataset.tokens, given.get("loss", loss))
    example = dataset.ids[:1], dataset.ids[:1]
    example = {"input_ids": example[0], "labels": example[1]} if dataset.tokens else (dataset.x[:1], dataset.y[:1])
    prepared = traced.prepared(key, made, JOB, example, layout)
    return Source(made.model, made.loss, made.optimizer, made.name, prepared)


def train(
    rank: int, world: int, build: Any, layout: str, dataset: Any, each: Any, job: Job, given: dict[str, Any]
) -> tuple[Observed, list[str]]:
    """Take the steps of a case; every rank seeds the process's generators otherwise, as ranks of torchrun may."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    where = Layout.parse(layout)
    place = RankInfo(rank, rank, world, world, torch.device("cpu"))
    run = Run(source(build, where, dataset, **given), where, job, place)
    if each is not None:
        step, run.step = run.step, lambda batch: (step(batch), each(run))[0]
    seen = follow(run, dataset, job)
    return seen, run._stepper.refusals.remarks


def in_layout(
    build: Any, layout: str, dataset: Any = None, each: Any = None, job: Job = JOB, **given: Any
) -> tuple[list[Observed], list[str]]:
    dataset = dataset or data_of(build)
    where = Layout.parse(layout)
    source(build, where, dataset, **given)
    args = (build, layout, dataset, each, job, given)
    found = [train(0, 1, *args)] if where.world_size == 1 else pool(where.world_size).run(train, *args)
    return [seen for seen, _ in found], found[0][1]


def assert_equal(build: Any, *layouts: str, reference: Any = None, **given: Any) -> None:
    expected, _ = in_layout(reference or build, "dp=1", **given)
    for layout in layouts:
        assert_same(in_layout(build, layout, **given)[0], expected[0], TOLERANCE)


def assert_refused(words: str, waiver: str, build: Any, *layouts: str, **given: Any) -> None:
    for layout in layouts:
        with pytest.raises(UnprovenError, match=words) as refusal:
            in_layout(build, layout, **given)
        assert refusal.value.waiver == waiver


CASES = [
    *(LateDropout, LateRate, OwnGenerator, Reseeded, Aten, Scripted, NumpyNoise, PythonNoise, BackwardNoise),
    *(NoiseAfterWarmUp, MultipleOf624, OwnMean, OwnMeanByData, ReplacedMean, EvaluationMean, Queue, DataInit, Memory),
    *(
        SamplesSeen,
        Calls,
        CallsInDict,
        CountingBuffer,
        spectral,
        MaxNorm,
        ByFrequency,
        ForcedNorm,
        Rotary,
        FilledBuffer,
    ),
    *(
        Noting,
        CountingAlone,
        Scratch,
        Net,
        OwnInner,
        OwnReentrant,
        OwnInFloat32,
        OwnBlocks,
        OwnBlocksReentrant,
        OwnHead,
    ),
    *(FrozenStart, Uncheckpointed, CallsInGlobal, CallsInDefault, counting_in_closure, QueueInGlobal, Curriculum),
    *(DataOfWeight, Late, LateWrite, LateWriteOfData, LateForkedNoise, LateOwnNoise, MeanOverPadding, MeanOverWords),
    *(CachesOutside, StochasticDepth),
]


@pytest.fixture(scope="module", autouse=True)
def _traced_first() -> None:
    """Trace every case before ranks are forked, which inherit the traces: a pool is forked anew after each new one."""
    for build in CASES:
        source(build, Layout(), data_of(build))
    for other in (noisy_loss, mean):
        source(Net, Layout(), data_of(Net), loss=other)


DATA = ("dp=2", "dp=1 microbatch=2")


@pytest.mark.parametrize("build", [LateDropout, LateRate])
def test_dropout_that_is_raised_later_is_equal(build: type[Net]) -> None:
    assert_equal(build, *DATA, each=raised)


@pytest.mark.parametrize(
    "build",
    [OwnGenerator, Reseeded, Rotary, FilledBuffer, Noting, CountingAlone, Scratch, Net, CachesOutside, StochasticDepth],
)
def test_what_is_no_state_and_draws_nothing_is_equal(build: type[Net]) -> None:
    assert_equal(build, *DATA, "dp=2 zero=3 microbatch=1")


@pytest.mark.parametrize("build", [spectral, CountingBuffer, Calls, CallsInDict, ForcedNorm])
def test_state_that_does_not_depend_on_the_samples_is_equal_in_replicas(build: Any) -> None:
    assert_equal(build, "dp=2", "dp=2 zero=1")
    assert_refused("runs it several times a step", "state", build, "dp=1 microbatch=2")


@pytest.mark.parametrize(
    ("name", "build"),
    [("KEPT", CallsInGlobal), ("calls", CallsInDefault), ("calls around", counting_in_closure), ("step", Curriculum)],
)
def test_state_outside_of_the_modules_is_equal_in_replicas_and_named_elsewhere(name: str, build: Any) -> None:
    kept = list(KEPT)
    assert_equal(build, "dp=2", each=None) if build is Curriculum else None
    assert_refused(f"keeps .*{name}.* runs it several times a step", "state", build, "dp=1 microbatch=2")
    assert kept == KEPT, "a trace puts back what it changed"


def test_a_queue_outside_of_the_modules_runs_on_one_device_alone() -> None:
    assert_refused("KEPT .* computed from its samples", "state", QueueInGlobal, *DATA)


def test_a_weight_that_the_forward_gives_another_storage_is_kept_or_refused() -> None:
    assert_equal(DataOfWeight, "dp=2", "dp=2 zero=1")
    assert_refused("up.weight", "state", DataOfWeight, "dp=2 zero=3", "dp=1 microbatch=2")


@pytest.mark.parametrize("build", [LateWrite, LateWriteOfData])
def test_weights_that_are_written_later_while_they_are_not_gathered_are_kept(build: type[Net]) -> None:
    assert_equal(build, "dp=2", "dp=2 zero=3", each=late)
    assert_refused("step 2.*: the forward writes into weights", "state", build, "dp=1 microbatch=2", each=late)


def test_weights_that_are_written_later_while_they_are_gathered_are_named() -> None:
    assert_equal(LateWriteOfItsOwn, "dp=2", each=late)
    words = "step 2: the forward writes into the weight down.weight"
    assert_refused(words, "state", LateWriteOfItsOwn, "dp=2 zero=3", each=late)


def test_a_weight_that_comes_into_use_later_is_trained() -> None:
    assert_equal(Late, "dp=2", "dp=2 zero=1", "dp=2 zero=2", "dp=2 zero=3", each=late)


def test_padding_that_counts_is_refused_and_masked_padding_is_equal() -> None:
    given = {"dataset": PaddedWords(True), "loss": loss_of_words}
    assert_refused("different sizes, and padded", "samples", MeanOverPadding, "dp=2", "dp=1 microbatch=1", **given)
    assert_equal(MeanOverWords, "dp=2", "dp=2 zero=3", "dp=1 microbatch=1", **given)


class ByNumber(Net):
    """The number of samples in a micro-batch is a number of the forward."""

    def between(self, h: Tensor) -> Tensor:
        return h / len(h)


def test_the_number_of_samples_is_refused_where_the_batch_is_split_whatever_is_watched() -> None:
    for job in (JOB, job_of(steps=3, train={"watch_every": 0})):
        assert_refused("step 1, .*samples influence each other", "samples", ByNumber, *DATA, job=job)
        in_layout(ByNumber, "dp=1", job=job)


@pytest.mark.parametrize("build", [OwnMean, OwnMeanByData, ReplacedMean, DataInit])
def test_statistics_of_the_batch_run_on_one_device_alone(build: type[Net]) -> None:
    """Samples influence each other through them in the same step already; allowing that leaves the state."""
    in_layout(build, "dp=1")
    with pytest.raises(LayoutError, match="lets the samples of a batch influence each other"):
        in_layout(build, "dp=2")
    assert_refused("computed from its samples", "state", build, *DATA, job=allowing("samples"))


@pytest.mark.parametrize("build", [EvaluationMean, Queue, Memory, SamplesSeen, MaxNorm])
def test_state_that_depends_on_the_samples_runs_on_one_device_alone(build: Any) -> None:
    in_layout(build, "dp=1")
    assert_refused("computed from its samples", "state", build, *DATA)


def test_counts_of_tokens_are_refused_where_the_batch_is_split() -> None:
    in_layout(ByFrequency, "dp=1")
    assert_refused("embed: scale_grad_by_freq", "state", ByFrequency, *DATA)


def test_a_weight_that_the_forward_writes_is_refused_where_it_is_a_copy() -> None:
    assert_refused("down.weight", "state", ForcedNorm, "dp=2 zero=2", "dp=2 zero=3")


def test_a_refusal_of_state_can_be_waived() -> None:
    _, remarks = in_layout(EvaluationMean, "dp=2", job=allowing("state"))
    assert any("mean" in remark for remark in remarks)


def allowing(word: str) -> Job:
    return job_of(steps=3, run={"allow": (word,)})


@pytest.mark.parametrize(
    ("words", "build"),
    [
        ("the forward draws .* torch", Aten),
        ("the forward draws .* torch", Scripted),
        ("the forward draws .* numpy", NumpyNoise),
        ("the forward draws .* Python", PythonNoise),
        ("the forward draws .* Python", MultipleOf624),
    ],
)
def test_random_numbers_that_no_function_mode_sees_are_refused(words: str, build: type[Net]) -> None:
    assert_refused(f"step 1: .*{words}", "random", build, "dp=1", "dp=2")


def test_noise_of_a_backward_is_refused() -> None:
    assert_refused("step 1: .*the backward draws .* torch", "random", BackwardNoise, "dp=1")
    with pytest.raises(LayoutError, match=r"by the gradient of NoisyGradient.*run\.allow = \[\"samples\"\]"):
        in_layout(BackwardNoise, "dp=2")


def test_noise_after_warm_up_is_refused_at_its_step() -> None:
    assert_refused("step 2: .*the forward draws", "random", NoiseAfterWarmUp, "dp=1", "dp=2", each=noisy)


def test_noise_of_other_generators_is_found_in_the_second_step() -> None:
    assert_refused("step 2.*: two forwards of it differ", "random", LateForkedNoise, "dp=2", each=late)
    assert_refused("step 2: .*draws .* the generator NOISE of", "random", LateOwnNoise, "dp=1", each=late)


def test_a_loss_that_draws_is_refused() -> None:
    assert_refused("the loss draws", "random", Net, "dp=1", "dp=2", loss=noisy_loss)


def test_an_optimizer_that_draws_is_named_on_one_device_and_refused_elsewhere() -> None:
    _, remarks = in_layout(Net, "dp=1", optimizer=noisy_sgd)
    assert any("the optimizer draws" in remark for remark in remarks)
    with pytest.raises(LayoutError, match="NoisySGD draws random numbers"):
        in_layout(Net, "dp=2", optimizer=noisy_sgd)


def test_random_numbers_can_be_allowed() -> None:
    _, remarks = in_layout(NoiseAfterWarmUp, "dp=1", each=noisy, job=allowing("random"))
    assert any("draws random numbers" in remark for remark in remarks)


@pytest.mark.parametrize("dataset", [Augmented, SometimesFlipped])
def test_a_data_set_that_draws_is_refused(dataset: type[Pairs]) -> None:
    assert_refused("of the data set is another one", "data", Net, "dp=1", "dp=2", dataset=dataset(False))


def test_samples_that_share_a_buffer_are_refused_where_the_batch_is_split() -> None:
    assert_refused("another one when it is read alone", "data", Net, *DATA, dataset=OneBuffer(False))
    in_layout(Net, "dp=1", dataset=OneBuffer(False))


def test_a_data_set_that_draws_by_the_index_is_equal() -> None:
    assert_equal(Net, *DATA, dataset=SeededByIndex(False))
    assert_equal(Uncheckpointed, "dp=1 pp=2 microbatch=2", dataset=TokensSeededByIndex(True))


def mean(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs, batch[1]), 1


def test_a_mean_is_refused_where_the_batch_is_split_and_named_where_not() -> None:
    assert_refused("the loss is no sum over the samples", "loss", Net, *DATA, loss=mean)
    _, remarks = in_layout(Net, "dp=1", loss=mean)
    assert any("the loss is no sum over the samples" in remark for remark in remarks)
    _, remarks = in_layout(Net, "dp=2", loss=mean, job=allowing("loss"))
    assert any("the loss is no sum over the samples" in remark for remark in remarks)


@pytest.mark.parametrize("build", [OwnInner, OwnReentrant, OwnBlocks, OwnBlocksReentrant, OwnHead])
def test_a_model_that_checkpoints_itself_is_equal(build: type[Blocks]) -> None:
    assert_equal(build, "dp=2", "dp=1 microbatch=2", "dp=2 zero=3", "dp=2 recompute=full", reference=Uncheckpointed)


@pytest.mark.parametrize("build", [OwnInner, OwnReentrant, OwnBlocks, OwnBlocksReentrant, OwnHead])
def test_a_model_that_checkpoints_itself_is_equal_in_a_pipeline(build: type[Blocks]) -> None:
    assert_equal(build, "dp=1 pp=2 microbatch=4", reference=Uncheckpointed)


def test_reentrant_checkpoints_train_nothing_without_a_gradient() -> None:
    expected = in_layout(FrozenStart, "dp=1")[0][0]
    held = {name: tensor for name, _, _, tensor in expected.gradients[0]}
    assert not held["blocks.0.mix.weight"].any(), "no gradient reaches it"
    assert held["head.weight"].any()
    assert_equal(FrozenStart, "dp=2")


def test_an_island_of_float32_is_raised_in_the_recomputation_too() -> None:
    assert_equal(OwnInFloat32, "dp=2")


def test_blocks_that_a_model_checkpoints_are_taken_as_recompute() -> None:
    _, remarks = in_layout(OwnBlocks, "dp=2")
    assert any("recompute=full" in remark for remark in remarks)
    assert not in_layout(OwnInner, "dp=2")[1]


def clamped(run: Run) -> None:
    with torch.no_grad():
        for param in run.model.parameters():
            param.clamp_(-0.1, 0.1)


def clamped_by_data(run: Run) -> None:
    for param in run.model.parameters():
        param.data.clamp_(-0.1, 0.1)


def clamped_elsewhere(run: Run) -> None:
    for param in run.model.parameters():
        param.data = param.data.clamp(-0.1, 0.1)


@pytest.mark.parametrize("each", [clamped, clamped_by_data, clamped_elsewhere])
def test_weights_that_a_user_writes_are_kept(each: Any) -> None:
    layouts = ["dp=1 offload", "dp=2 zero=1", "dp=2 zero=1 offload"]
    assert_equal(Net, *layouts, *(["dp=2 zero=3 offload"] if each is not clamped_elsewhere else []), each=each)
