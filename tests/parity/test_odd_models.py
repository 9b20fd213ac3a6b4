"""Models that no textbook has: frozen, tied, shared, unused and tiny weights, branches, other architectures.

Each gives in every layout what one device gives, in float64 to 1e-9, and sends what its program lists; or it is refused
with the reason and what would work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.errors import LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from tests import traced
from tests.laboratory import Observed, Runs, assert_same, follow, job_of, largest_error, perturbed, whole
from tests.models import LENGTH, VOCABULARY, Plain, Tokens
from tests.pool import pool

TOLERANCE = 1e-9
LAYOUTS = ["dp=2", "dp=2 zero=1", "dp=2 zero=2 microbatch=1", "dp=2 zero=3"]
WIDTH = 10


class Language(nn.Module):
    """Embedding, something in between, head: [B, T] tokens to [B, T, V] logits."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for part in self.parts:
            x = part(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.mix(self.norm(x)))


def language() -> nn.Module:
    return Language(Block(), Block(), Block())


def frozen_embedding() -> nn.Module:
    model = Plain()
    model.embed.requires_grad_(False)
    return model


def frozen_start() -> nn.Module:
    """Embedding, scale and first block frozen: no gradient ever enters the first unit."""
    model = frozen_embedding()
    model.scale.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def frozen_middle() -> nn.Module:
    model = Plain()
    model.blocks[1].requires_grad_(False)
    return model


def frozen_biases() -> nn.Module:
    """Frozen and trained weights within one unit."""
    model = Plain()
    for name, param in model.named_parameters():
        param.requires_grad_(not name.endswith("bias"))
    return model


class Routed(nn.Module):
    """Two experts within a block: samples with an even first token go to one, the others to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, is_even: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        if is_even.any():
            y = y + self.even(x) * is_even[:, None, None]
        if not is_even.all():
            y = y + self.odd(x) * ~is_even[:, None, None]
        return x + torch.tanh(y)


class Branching(nn.Module):
    """A data-dependent branch: in a micro-batch of one sample, one expert of each block gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, input_ids[:, 0] % 2 == 0)
        return self.head(x)


class Skipping(nn.Module):
    """Only samples with an even first token go through the block in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        is_even = (input_ids[:, 0] % 2 == 0)[:, None, None]
        x = self.blocks[0](self.embed(input_ids))
        if is_even.any():
            x = torch.where(is_even, self.blocks[1](x), x)
        return self.head(self.blocks[2](x))


class Halves(Tokens):
    """In every step the first half of the samples has even first tokens, the other half odd ones."""

    def __init__(self) -> None:
        super().__init__()
        for batch in batches(self, job_of()):
            for index in range(2):
                self.input_ids[batch.shares(index, 2, 1)[0], 0] = index


class Unused(nn.Module):
    """Weights that no forward uses: of the root, of a block, of a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.spare = nn.Parameter(torch.ones(3, WIDTH))
        self.pooler = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].spare = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Repeated(nn.Module):
    """Universal Transformer: one block used three times, another once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(input_ids))
        x = self.blocks[0](self.blocks[1](x))
        return self.head(self.blocks[0](x))


class Echo(nn.Module):
    """A block that calls one of its parts twice, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.mix(torch.tanh(self.first(self.first(self.mix(x))))))


def echoing() -> nn.Module:
    return Language(Echo(), Block(), Echo())


class ReadOutside(nn.Module):
    """The embedding's weight is the head's too, without a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


class Empty(nn.Module):
    """Weights without an element: of the root, and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(0, WIDTH))
        self.inner = language()
        self.inner.parts[1].nothing = nn.Parameter(torch.randn(3, 0))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids) + self.nothing.sum() + self.inner.parts[1].nothing.sum()


def twice_listed() -> nn.Module:
    """One block that stands at two places of the list."""
    block = Block()
    return Language(block, Block(), block)


class Tied(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class NamedAtRoot(nn.Module):
    """A block's weight has a second name at the root, whose code reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.gain = self.blocks[1].norm.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x) * self.gain
        return self.head(x)


class TiedAndRead(Tied):
    """The embedding is the head's weight, and read by the model's own code too."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) + self.embed(input_ids) @ self.embed.weight.T


class _Predictions(nn.Module):
    """A head whose bias is that of the linear layer in it (BERT)."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.transform, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.decoder.weight = weight
        self.bias = self.decoder.bias = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.transform(x)))


class TiedWithin(Plain):
    """A module that shares a weight holds one that shares another, and one that shares none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = _Predictions(self.embed.weight)


class OwnedByRoot(nn.Module):
    """Every weight but the blocks' belongs to the root: embedding, positions, head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bias = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table[input_ids] + self.positions
        for block in self.blocks:
            x = block(x)
        return x @ self.table.T + self.bias


class Gate(nn.Module):
    """A number of its own, whose shape its code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([self.gate, 2 * self.gate]).sum() * torch.tanh(self.inner(x))


class Scaled(nn.Module):
    """Parameters without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.8))
        self.inner = Language(Gate(), Gate())

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids) * self.temperature


class Narrow(nn.Module):
    """Parameters of one row, which two ranks cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(1, WIDTH))
        self.down, self.up = nn.Linear(WIDTH, 1), nn.Linear(1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.up(torch.tanh(self.down(x)))


def narrow() -> nn.Module:
    return Language(Narrow(), Narrow())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(input_ids))[0])


class RecurrentBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


def recurrent_blocks() -> nn.Module:
    return Language(RecurrentBlock(), RecurrentBlock())


def convolutional() -> nn.Module:
    """No names, no container within the container: an nn.Sequential alone."""
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv1d(8, 8, 3), nn.GELU(),
        nn.Flatten(), nn.Linear(80, 4),
    )  # fmt: skip


class Biased(nn.Module):
    """Every block is given a learned bias too, whose gradient is known before those of the block's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.bias = nn.Embedding(VOCABULARY, 10), nn.Embedding(VOCABULARY, 10)
        self.blocks = nn.ModuleList(BiasedBlock() for _ in range(3))
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, bias = self.embed(input_ids), self.bias(input_ids)
        for block in self.blocks:
            x = block(x, bias)
        return self.head(x)


class BiasedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + bias


class InPlace(nn.Module):
    """A block that writes into its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.block = nn.Parameter(torch.randn(WIDTH)), Block()

    def forward(self, x: Tensor) -> Tensor:
        x += self.shift
        return self.block(x)


def in_place() -> nn.Module:
    return Language(InPlace(), InPlace())


class Nested(nn.Module):
    """Stages of blocks: a ModuleList of ModuleLists."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.joins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for stage, join in zip(self.stages, self.joins, strict=True):
            for block in stage:
                x = block(x)
            x = join(x)
        return self.head(x)


class Flat(nn.Module):
    """No container at all; features in, numbers out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(self.norm(torch.relu(self.first(x))))))


class FlatWithRoot(Flat):
    """The same, and a weight of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.shift


class EncoderDecoder(nn.Module):
    """Every block of the decoder reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        memory = x = self.embed(input_ids)
        for block in self.encoder:
            memory = block(memory)
        memory = self.middle(memory)
        for block in self.decoder:
            x = block(x, memory=memory)
        return self.head(x)


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.block(x + self.attention(x, memory, memory, need_weights=False)[0])


class Buffered(nn.Module):
    """Buffers of numbers, whole and real; one not persistent, one changed by the forward of training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(LENGTH - 1, -1, -1))
        angles = torch.arange(LENGTH)[:, None] / 10.0 ** torch.linspace(0, 2, WIDTH)
        self.register_buffer("waves", torch.sin(angles), persistent=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.inner = language()

    def forward(self, input_ids: Tensor) -> Tensor:
        self.num_calls += 1
        x = self.inner.embed(input_ids[:, self.order]) + self.waves
        for part in self.inner.parts:
            x = part(x)
        return self.inner.head(x)


class Picking(nn.Module):
    """Boolean indexing: a layer that sees the tokens with a high score, another every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.high, self.even = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.score(x)
        is_high = scores[..., 0] > 0
        y = torch.zeros_like(x)
        y[is_high] = self.high(x[is_high]) * scores[is_high].tanh()
        is_even = torch.arange(x.shape[1], device=x.device) % 2 == 0
        y[:, is_even] += self.even(x[:, is_even])
        return x + y


def picking() -> nn.Module:
    model = Language(Picking(), Picking())
    model.tensor_plan = {"parts.*.even": "gather"}
    return model


class WithInstanceNorm(nn.Module):
    """Each sample is normed by itself, but the running statistics are of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)).mean(1)


def instance_norm_in_evaluation() -> nn.Module:
    model = WithInstanceNorm()
    model.norm.eval()
    return model


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def frozen_batch_norm() -> nn.Module:
    """Batch norm in evaluation mode, as in fine-tuning: samples do not influence each other."""
    model = WithBatchNorm()
    for block in model.blocks:
        block[1].running_mean.fill_(0.3)
        block[1].eval()
    return model


class Pairs:
    """Samples as tuples (features, targets), in double precision, as NumPy would give them."""

    def __init__(self, shape: tuple[int, ...] = (6,), targets: int = 3, classes: bool = False) -> None:
        generator = torch.Generator().manual_seed(7)
        self.features = torch.randn(40, *shape, generator=generator, dtype=torch.float64)
        self.targets = torch.randn(40, targets, generator=generator, dtype=torch.float64)
        if classes:
            self.targets = self.targets.argmax(-1)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.features[index], self.targets[index]


@dataclass(frozen=True)
class Odd:
    build: Callable[[], nn.Module]
    dataset: Callable[[], Any] = Tokens
    loss: str = "cross_entropy"


ODD: dict[str, Odd] = {
    "frozen_embedding": Odd(frozen_embedding),
    "frozen_start": Odd(frozen_start),
    "frozen_middle": Odd(frozen_middle),
    "frozen_biases": Odd(frozen_biases),
    "branching": Odd(Branching),
    "unused": Odd(Unused),
    "repeated": Odd(Repeated),
    "twice_listed": Odd(twice_listed),
    "echoing": Odd(echoing),
    "read_outside": Odd(ReadOutside),
    "empty": Odd(Empty),
    "tied": Odd(Tied),
    "named_at_root": Odd(NamedAtRoot),
    "tied_and_read": Odd(TiedAndRead),
    "tied_within": Odd(TiedWithin),
    "owned_by_root": Odd(OwnedByRoot),
    "narrow": Odd(narrow),
    "recurrent": Odd(Recurrent),
    "recurrent_blocks": Odd(recurrent_blocks),
    "convolutional": Odd(convolutional, lambda: Pairs((3, 12), 4, classes=True)),
    "nested": Odd(Nested),
    "flat": Odd(Flat, Pairs, "mse"),
    "flat_with_root": Odd(FlatWithRoot, Pairs, "mse"),
    "encoder_decoder": Odd(EncoderDecoder),
    "biased": Odd(Biased),
    "buffered": Odd(Buffered),
    "frozen_batch_norm": Odd(frozen_batch_norm, Pairs, "mse"),
    "instance_norm_in_evaluation": Odd(instance_norm_in_evaluation, lambda: Pairs((3, 12), 4), "mse"),
    "picking": Odd(picking),
    "scaled": Odd(Scaled),
}
REFUSED: dict[str, Odd] = {
    "batch_norm": Odd(WithBatchNorm, Pairs, "mse"),
    "instance_norm": Odd(WithInstanceNorm, lambda: Pairs((3, 12), 4), "mse"),
    "in_place": Odd(in_place),
    "skipping": Odd(Skipping, Halves),
}


def job_for(name: str, precision: str = "float64", **tables: Any) -> Job:
    return job_of(precision, 3, train={"loss": (ODD | REFUSED)[name].loss}, **tables)


def run_of(rank: int, world: int, name: str, layout: str, job: Job) -> Run:
    place = RankInfo(rank=rank, local_rank=rank, world_size=world, ranks_per_node=world, device=torch.device("cpu"))
    odd, where = (ODD | REFUSED)[name], Layout.parse(layout)
    source = Source(perturbed(odd.build), loss_of(job), optimizer_of(job), name)
    example = next(batches(odd.dataset(), job)).samples([0])
    return Run(replace(source, prepared=traced.prepared(f"odd {name}", source, job, example, where)), where, job, place)


def observe_odd(rank: int, world: int, name: str, layout: str, job: Job, record: bool = False) -> Observed:
    return follow(run_of(rank, world, name, layout, job), (ODD | REFUSED)[name].dataset(), job, record)


def observe_layouts(rank: int, world: int, name: str, layouts: list[str]) -> list[Observed]:
    return [observe_odd(rank, world, name, layout, job_for(name), True) for layout in layouts]


def _models_with_layouts() -> Iterator[Any]:
    """Every model with one layout, in turn; the others nightly."""
    for index, name in enumerate(ODD):
        turn = index % len(LAYOUTS)
        yield pytest.param(name, LAYOUTS[turn : turn + 1], id=name)
        others = [*LAYOUTS[:turn], *LAYOUTS[turn + 1 :]]
        yield pytest.param(name, others, id=f"{name}-others", marks=pytest.mark.nightly)


@pytest.fixture(scope="module")
def _traced(request: pytest.FixtureRequest) -> None:
    """Trace the models of the tests that run before the first rank is forked: each that came later would fork them again."""
    for item in request.session.items:
        if item.path == request.path and "_traced" in getattr(item, "fixturenames", ()):
            name = item.callspec.params["name"]  # type: ignore[attr-defined]
            run_of(0, 1, name, "dp=1", job_for(name))


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize(("name", "layouts"), list(_models_with_layouts()))
def test_every_layout_computes_what_one_device_computes(name: str, layouts: list[str]) -> None:
    reference = observe_odd(0, 1, name, "dp=1", job_for(name))
    ranks = pool(2).run(observe_layouts, name, layouts)
    for index, layout in enumerate(layouts):
        seen = [rank[index] for rank in ranks]
        assert_same(seen, reference, TOLERANCE)
        assert all(one.ledger == one.predicted for one in seen), layout


@pytest.mark.parametrize(
    "name",
    ["encoder_decoder", "tied_within"]
    + [
        pytest.param(name, marks=pytest.mark.nightly)
        for name in ("branching", "buffered", "recurrent_blocks", "repeated", "tied_and_read")
    ],
)
def test_blocks_of_any_kind_can_be_repeated_for_their_backward(name: str) -> None:
    layouts = ["dp=2 zero=3 recompute=full", "dp=2 zero=2 microbatch=1 accumulate=full recompute=selective"]
    reference = observe_odd(0, 1, name, "dp=1", job_for(name))
    ranks = pool(2).run(observe_layouts, name, layouts)
    for index in range(len(layouts)):
        assert_same([rank[index] for rank in ranks], reference, TOLERANCE)


# -- what is refused, and what works instead -----------------------------------------------------------------------------


def prepare_alone(name: str, layout: str) -> None:
    """Come as far as a layout can be refused before there are other ranks."""
    place = RankInfo(0, 0, Layout.parse(layout).world_size, 2, torch.device("cpu"))
    job, odd = job_for(name), (ODD | REFUSED)[name]
    run = Run(Source(odd.build, loss_of(job), optimizer_of(job)), Layout.parse(layout), job, place)
    run.prepare(next(batches(odd.dataset(), job)).samples([0]))


def test_a_branch_around_a_whole_block_is_computed_where_blocks_are_gathered() -> None:
    """Rank 1's samples pass the block by, and it takes part in the gather all the same."""
    reference = observe_odd(0, 1, "skipping", "dp=1", job_for("skipping"))
    for layout in ("dp=2 zero=1", "dp=2 zero=3"):
        assert_same(pool(2).run(observe_odd, "skipping", layout, job_for("skipping")), reference, TOLERANCE)


def test_a_block_that_writes_into_its_input_cannot_be_repeated() -> None:
    reference = observe_odd(0, 1, "in_place", "dp=1", job_for("in_place"))
    assert_same(pool(2).run(observe_odd, "in_place", "dp=2 zero=1", job_for("in_place")), reference, TOLERANCE)
    for recompute in ("full", "selective"):
        with pytest.raises(ModelError, match=r"parts.0 writes into its own input.*recompute=none works"):
            observe_odd(0, 1, "in_place", f"dp=1 recompute={recompute}", job_for("in_place"))


def test_running_statistics_of_instances_are_refused_where_the_batch_is_split() -> None:
    for layout in ("dp=1 microbatch=4", *LAYOUTS):
        with pytest.raises(LayoutError, match=r"norm lets samples influence each other.*microbatch=8 computes it"):
            prepare_alone("instance_norm", layout)


def test_shapes_that_depend_on_values_are_refused_where_they_must_be_known() -> None:
    with pytest.raises(LayoutError, match=r"at parts.0 depend on values.*a module of its own works.*tp=1 works"):
        prepare_alone("picking", "tp=2")


def test_shapes_that_depend_on_values_within_blocks_close_no_stage() -> None:
    reference = observe_odd(0, 1, "picking", "dp=1", job_for("picking"))
    for layout in ("pp=2", "pp=2 microbatch=2"):
        seen = pool(2).run(observe_odd, "picking", layout, job_for("picking"), True)
        assert_same(seen, reference, TOLERANCE)


def test_running_statistics_are_updated_once_a_step() -> None:
    """As in a plain loop: neither a repeated forward counts, nor one without gradients."""
    job, dataset = job_of("float64", 3, train={"loss": "mse"}, optimizer={"lr": 0.0}), Pairs()
    for layout in ("dp=1", "dp=1 recompute=full", "dp=1 recompute=selective"):
        run = run_of(0, 1, "batch_norm", layout, job)
        run.prepare(next(batches(dataset, job)).samples([0]))
        plain = WithBatchNorm().double()
        plain.load_state_dict(run.model.state_dict())
        for batch in batches(dataset, job):
            run.step(batch)
            run.evaluate(batch)
            plain(batch.samples(batch.indices)[0])
        for name, buffer in plain.named_buffers():
            assert torch.allclose(dict(run.model.named_buffers())[name], buffer, rtol=1e-12), (layout, name)


# -- the Python way ----------------------------------------------------------------------------------------------------


def regressor() -> nn.Module:
    torch.manual_seed(11)
    return FlatWithRoot()


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Weights and biases in groups of their own, the first layer frozen by leaving it out."""
    named = [(name, param) for name, param in model.named_parameters() if not name.startswith("first")]
    return torch.optim.SGD(
        [
            {"params": [param for name, param in named if name.endswith("weight")], "lr": 0.05, "weight_decay": 0.1},
            {"params": [param for name, param in named if not name.endswith("weight")], "momentum": 0.9},
        ],
        lr=0.2,
    )


def own_loss(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), outputs.numel()


def parallel(rank: int, world: int, layout: str, clip: float) -> tuple[list[float], Runs]:
    """A user's loop around an instance of a model and an instance of an optimizer."""
    model = regressor()
    job = Job(
        train={"global_batch": 8, "steps": 4},
        numerics={"precision": "float64"},
        optimizer={"clip_norm": clip},
        run={"device": "cpu"},
    )
    run = samestep.parallelize(model, own_loss, grouped(model), layout=layout, job=job)
    losses = [run.step(batch).loss for batch in samestep.batches(Pairs(), job)]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), regressor().parameters(), strict=True))
    return losses, [(p.name, p.start, p.stop, p.master().clone()) for p in run.updater.pieces]


@pytest.mark.parametrize("layout", ["", "dp=2 zero=1 microbatch=1", "dp=2 zero=2 microbatch=2", "dp=2 zero=3"])
def test_an_instance_trains_as_in_a_plain_loop(layout: str) -> None:
    clip = 0.5
    model = regressor().double()
    optimizer = grouped(model)
    losses = []
    for batch in samestep.batches(Pairs(), Job(train={"global_batch": 8, "steps": 4})):
        samples = batch.samples(batch.indices)
        total, count = own_loss(model(samples[0]), samples)
        model.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float(total.detach()) / count)
    ranks = pool(2).run(parallel, layout, clip)
    assert ranks[0][0] == ranks[1][0]
    assert ranks[0][0] == pytest.approx(losses, rel=1e-9)
    expected = {name: param.detach().flatten() for name, param in model.named_parameters()}
    error, name = largest_error(whole([runs for _, runs in ranks]), expected)
    assert error <= TOLERANCE, f"{name}: {error:.1e}"


def main(place: RankInfo, layout: str) -> list[float]:
    """What a user's script does on every rank."""
    job = samestep.Job(train={"global_batch": 8, "steps": 4}, numerics={"precision": "float64"}, run={"device": "cpu"})
    run = samestep.parallelize(
        regressor, own_loss, lambda params: torch.optim.Adam(params, lr=0.01), layout=layout, job=job
    )
    assert run.place == place
    return [run.step(batch).loss for batch in samestep.batches(Pairs(), job)]


def test_a_script_of_ones_own_gives_the_same_losses_in_every_layout() -> None:
    alone = samestep.launch(main, ("dp=1",), ranks=1, device="cpu")
    for layout in ("dp=2", "dp=2 zero=3 microbatch=1"):
        assert samestep.launch(main, (layout,), ranks=2, device="cpu") == pytest.approx(alone, rel=1e-6)


def test_a_model_that_was_built_for_inference_trains() -> None:
    """As `from_pretrained` gives it: evaluation mode of the whole is none of the user's wishes."""

    def losses(is_built_in_training: bool) -> list[float]:
        def build() -> nn.Module:
            return Plain(dropout=0.5).train(is_built_in_training)

        job = job_of("float64", 2)
        run = Run(
            Source(build, loss_of(job), optimizer_of(job)), Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu"))
        )
        return [run.step(batch).loss for batch in batches(Tokens(), job)]

    assert losses(False) == losses(True)
