"""What a forward keeps, writes or reads of its batch, and what a loop writes into weights: equal to one device, or refused."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from collections import deque
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.runtime.run import Run
from tests.code.rows import Equal, Remarked, equal, refused, unproven
from tests.code.vectors import LENGTH, WIDTH, Blocks, Embedded, Net, Pairs, allowing, code, nets
from tests.laboratory import job_of


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


class SpectralBlock(nn.Module):
    """A block with both spectral norms, and annealed by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.down = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=2)
        self.calls = {"taken": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["taken"] += 1
        return x + self.down(torch.tanh(self.up(x))) / self.calls["taken"]


class SpectralBlocks(Blocks):
    block = SpectralBlock


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


class CountingHook:
    """A hook that is an object, and acts by the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1 + 0.1 * self.calls

    def before(self, module: nn.Module, args: Any) -> Any:
        return tuple(one * self.factor() for one in args)

    def __call__(self, module: nn.Module, args: Any, output: Tensor | None = None) -> Any:
        return self.before(module, args) if output is None else output * self.factor()


def counting_before() -> nn.Module:
    net = Net()
    net.up.register_forward_pre_hook(CountingHook())
    return net


def counting_in_method() -> nn.Module:
    net = Net()
    net.up.register_forward_pre_hook(CountingHook().before)
    return net


TALLY = types.SimpleNamespace(calls=0)
RECENT: deque[int] = deque()
SCORES: dict[str, int] = {}


def note(recent: deque[int]) -> float:
    recent.append(len(recent))
    return 1 + 0.1 * len(recent)


class Scored:
    """An object without attributes of its own, whose method counts in a variable of the file."""

    def factor(self) -> float:
        SCORES["n"] = SCORES.get("n", 0) + 1
        return 1 + 0.1 * SCORES["n"]


class CallsInNamespace(Net):
    def between(self, h: Tensor) -> Tensor:
        TALLY.calls += 1
        return h * (1 + 0.1 * TALLY.calls)


class CallsOfObject(Net):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [{"scored": Scored()}]

    def between(self, h: Tensor) -> Tensor:
        return h * self.parts[0]["scored"].factor()


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0


class CallsInSlots(Net):
    def __init__(self) -> None:
        super().__init__()
        self.tally = Slotted()

    def between(self, h: Tensor) -> Tensor:
        self.tally.calls += 1
        return h * (1 + 0.1 * self.tally.calls)


class CallsInFunction(Net):
    def between(self, h: Tensor) -> Tensor:
        note.calls = getattr(note, "calls", 0) + 1  # type: ignore[attr-defined]
        return h * (1 + 0.1 * note.calls)  # type: ignore[attr-defined]


def counting_in_argument() -> nn.Module:
    def count(calls: list[int], module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        return output * (1 + 0.1 * calls[0])

    net = Net()
    net.up.register_forward_hook(functools.partial(count, [0]))
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


def mean(outputs: Any, batch: Any) -> Any:
    return F.cross_entropy(outputs, batch[1]), 1


NETS = nets(
    # The number of calls in a deque that a function in front of the class is given, in the order of the calls.
    CallsOfHelper=lambda _, h: h * note(RECENT),
    # The number of samples in a micro-batch is a number of the forward.
    ByNumber=lambda _, h: h / len(h),
    # A mask with a row for each sample, drawn from ones.
    StochasticDepth=lambda net, h: h + h.tanh() * F.dropout(h.new_ones(len(h), 1), 0.4, net.training),
)
_LATE = {
    build: code(build, "later", each=late)
    for build in (Late, LateWrite, LateWriteOfData, LateWriteOfItsOwn, LateForkedNoise, LateOwnNoise)
}
_WORDS: dict[str, Any] = {"data": functools.partial(PaddedWords, True), "loss": loss_of_words}
_MEAN_OF_WORDS, _MEAN_OF_PADDING = code(MeanOverWords, **_WORDS), code(MeanOverPadding, **_WORDS)
_BY_NUMBER = [
    code(NETS["ByNumber"]),
    code(NETS["ByNumber"], "unwatched", job=job_of(steps=3, train={"watch_every": 0})),
]
_ONE_BUFFER = code(Net, "of one buffer", data=functools.partial(OneBuffer, tokens=False))
_MEAN = code(Net, "with a mean as the loss", loss=mean)
STATELESS = (Rotary, FilledBuffer, Noting, CountingAlone, Scratch, CachesOutside, NETS["StochasticDepth"])
RESTORED = (SpectralBlocks, CountingBuffer, Calls)
"""State of modules that does not depend on the samples, which is put back for each micro-batch."""
STATISTICS = (OwnMean, OwnMeanByData, ReplacedMean, DataInit)
OF_SAMPLES = (EvaluationMean, Queue, SamplesSeen, MaxNorm)
OUTSIDE = {
    CallsInGlobal: "KEPT",
    CallsInDefault: "calls",
    counting_in_closure: "calls around",
    CallsInNamespace: "TALLY",
    NETS["CallsOfHelper"]: "RECENT",
    CallsOfObject: "SCORES",
    CallsInSlots: "tally",
    CallsInFunction: "note.calls",
    counting_in_argument: "argument 0",
    counting_before: "up._forward_pre_hooks",
    counting_in_method: "up._forward_pre_hooks",
}
"""What keeps state outside of the modules, and the name of that state."""
SEVERAL = "runs it several times per step"
EQUAL = [
    *(row for build in STATELESS for row in equal(code(build), "dp=2 zero=3 microbatch=1")),
    Equal("dp=2 zero=1", code(ForcedNorm)),
    *(row for build in RESTORED for row in equal(code(build), "dp=2 microbatch=1", "dp=2 zero=3 microbatch=2")),
    *equal(code(spectral), "tp=2 microbatch=2"),
    *equal(code(SpectralBlocks), "pp=2 microbatch=2"),
    *equal(code(Curriculum), "dp=2 microbatch=1"),
    *equal(code(DataOfWeight), "dp=2 zero=1"),
    *equal(_LATE[LateWrite], "dp=2"),
    *equal(_LATE[LateWriteOfData], "dp=2 zero=3"),
    *equal(_LATE[LateWriteOfItsOwn], "dp=2"),
    *equal(_LATE[Late], "dp=2 zero=1", "dp=2 zero=3"),
    *equal(_MEAN_OF_WORDS, "dp=2 zero=3", "dp=1 microbatch=1"),
    *(Equal("dp=1", name) for name in (*_BY_NUMBER, _ONE_BUFFER)),
    *(Equal("dp=1", code(build)) for build in (ReplacedMean, Queue, MaxNorm, ByFrequency)),
    *equal(code(Net, "clamped", each=clamped), "dp=1 offload", "dp=2 zero=3 offload"),
    *equal(code(Net, "clamped by data", each=clamped_by_data), "dp=2 zero=1 offload", "dp=2 zero=3 offload"),
    *equal(code(Net, "clamped elsewhere", each=clamped_elsewhere), "dp=1 offload", "dp=2 zero=1"),
]
REFUSED = [
    *unproven("down.weight", "state", code(ForcedNorm), "dp=1 microbatch=2"),
    *(row for build, name in OUTSIDE.items() for row in unproven(f"keeps .*{name}.* {SEVERAL}", "state", code(build), "dp=1 microbatch=2")),
    *unproven("KEPT .* computed from its samples", "state", code(QueueInGlobal), "dp=2"),
    *unproven("up.weight", "state", code(DataOfWeight), "dp=2 zero=3"),
    *unproven("step 2.*: the forward writes into weights", "state", _LATE[LateWrite], "dp=1 microbatch=2"),
    *unproven("step 2.*: the forward writes into weights", "state", _LATE[LateWriteOfData], "dp=1 microbatch=2"),
    *unproven("step 2: the forward writes into the weight down.weight", "state", _LATE[LateWriteOfItsOwn], "dp=2 zero=3"),
    *unproven("different sizes, and read together, padded", "samples", _MEAN_OF_PADDING, "dp=2"),
    *(row for name in _BY_NUMBER for row in unproven("step 1, .*samples influence each other", "samples", name, "dp=1 microbatch=2")),
    # Samples influence each other through statistics in the same step already; allowing that leaves the state.
    *(row for build in STATISTICS for row in refused("lets the samples of a batch influence each other", code(build), "dp=2")),
    *(
        row
        for build in STATISTICS
        for row in unproven("computed from its samples", "state", code(build, "allowed", job=allowing("samples")), "dp=1 microbatch=2")
    ),
    *(row for build in OF_SAMPLES for row in unproven("computed from its samples", "state", code(build), "dp=2")),
    *unproven("embed: scale_grad_by_freq", "state", code(ByFrequency), "dp=2"),
    *unproven("down.weight", "state", code(ForcedNorm), "dp=2 zero=2"),
    *unproven("step 2.*: two forwards of it differ", "random", _LATE[LateForkedNoise], "dp=2"),
    *unproven("step 2: .*draws .* the generator NOISE of", "random", _LATE[LateOwnNoise], "dp=1"),
    *unproven("another one when it is read alone", "data", _ONE_BUFFER, "dp=2"),
    *unproven("the loss is not a sum over the samples", "loss", _MEAN, "dp=1 microbatch=2"),
]  # fmt: skip
REMARKED = [
    Remarked("dp=2", code(EvaluationMean, "allowed", job=allowing("state")), "mean"),
    Remarked("dp=1", _MEAN, "the loss is not a sum over the samples"),
    Remarked("dp=2", code(Net, "with a mean as the loss, allowed", loss=mean, job=allowing("loss")), "the loss is not a sum over the samples"),
]  # fmt: skip
