"""Models that no textbook has: frozen, tied, shared, unused and tiny weights, branches, other architectures.

Each gives in every layout what one device gives, or is refused with the reason and what would work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ModelError
from tests.code.rows import Equal, Refused, learned
from tests.laboratory import Code
from tests.models import LENGTH, MODELS, VOCABULARY, Plain
from tests.parts import Words

WIDTH = 10


class Language(Words):
    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__(*kinds, width=WIDTH, entries=VOCABULARY)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.mix(self.norm(x)))


def of(*kinds: Callable[[], nn.Module], model: Callable[..., nn.Module] = Language) -> Callable[[], nn.Module]:
    """Return the build function of a model with such parts."""
    return functools.partial(model, *kinds)


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


class Turned(nn.Module):
    """Reads pairs of a weight's elements as complex numbers, behind weights of odd numbers of elements."""

    def __init__(self, as_complex: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gain, self.few = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(3))
        self.turn = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, 2))
        self.shift, self.phase = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.randn(WIDTH, 2))
        self.as_complex = as_complex

    def forward(self, x: Tensor) -> Tensor:
        turned = x.to(x.dtype.to_complex()) @ self.as_complex(self.turn) * self.as_complex(self.phase)
        return x + self.gain * turned.real + self.few.sum() + self.shift.sum()


def viewed(weight: Tensor) -> Tensor:
    return weight.view(weight.dtype.to_complex()).squeeze(-1)


class Repeated(Language):
    """Universal Transformer: one part used three times, another once."""

    def through(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 0):
            x = self.blocks[index](x)
        return x


class Echo(nn.Module):
    """A block that calls one of its parts twice, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.mix(torch.tanh(self.first(self.first(self.mix(x))))))


class ReadOutside(Language):
    """The embedding's weight is the head's too, without a head."""

    def __init__(self) -> None:
        super().__init__(Block, Block)
        del self.head

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.through(self.embed(input_ids)) @ self.embed.weight.T


class Empty(nn.Module):
    """Weights without an element: of the root, and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.randn(0, WIDTH))
        self.inner = Language(Block, Block, Block)
        self.inner.blocks[1].nothing = nn.Parameter(torch.randn(3, 0))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids) + self.nothing.sum() + self.inner.blocks[1].nothing.sum()


def twice_listed() -> nn.Module:
    """One block that stands at two places of the list."""
    block = Block()
    return Language(lambda: block, Block, lambda: block)


class NamedAtRoot(Language):
    """A part's weight has a second name at the root, whose code reads it."""

    def __init__(self) -> None:
        super().__init__(Block, Block, Block)
        self.gain = self.blocks[1].norm.weight

    def through(self, x: Tensor) -> Tensor:
        for part in self.blocks:
            x = part(x) * self.gain
        return x


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
        self.table, self.positions = (nn.Parameter(torch.randn(rows, WIDTH)) for rows in (VOCABULARY, LENGTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.bias = nn.Parameter(torch.randn(VOCABULARY))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.blocks(self.table[input_ids] + self.positions) @ self.table.T + self.bias


def convolutional() -> nn.Module:
    """No names, no container within the container: an nn.Sequential alone."""
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv1d(8, 8, 3), nn.GELU(),
        nn.Flatten(), nn.Linear(80, 4),
    )  # fmt: skip


class Biased(Language):
    """Every part is given a learned bias too, whose gradient is known before those of the part's own weights."""

    def __init__(self) -> None:
        super().__init__(BiasedBlock, BiasedBlock, BiasedBlock)
        self.bias = nn.Embedding(VOCABULARY, WIDTH)

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


class Nested(Language):
    """Stages of blocks: a ModuleList of ModuleLists."""

    def __init__(self) -> None:
        super().__init__(*(lambda: nn.ModuleList([Block(), Block()]) for _ in range(2)))
        self.joins = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        for stage, join in zip(self.blocks, self.joins, strict=True):
            for block in stage:
                x = block(x)
            x = join(x)
        return x


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


class EncoderDecoder(Language):
    """Every block of the decoder reads the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(2))

    def through(self, x: Tensor) -> Tensor:
        memory = x
        for block in self.encoder:
            memory = block(memory)
        memory = self.middle(memory)
        for block in self.decoder:
            x = block(x, memory=memory)
        return x


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.block = Block()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.block(x + self.attention(x, memory, memory, need_weights=False)[0])


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
    model = Language(Picking, Picking)
    model.tensor_plan = {"blocks.*.even": "gather"}
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
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


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


ODD: dict[str, Code] = {
    "frozen_start": learned(frozen_start),
    "repeated": learned(of(Block, Block, model=Repeated)),
    "twice_listed": learned(twice_listed),
    "echoing": learned(of(Echo, Block, Echo)),
    "read_outside": learned(ReadOutside),
    "empty": learned(Empty),
    "named_at_root": learned(NamedAtRoot),
    "tied_within": learned(TiedWithin),
    "owned_by_root": learned(OwnedByRoot),
    "convolutional": learned(convolutional, lambda: Pairs((3, 12), 4, classes=True)),
    "nested": learned(Nested),
    "encoder_decoder": learned(EncoderDecoder),
    "biased": learned(Biased),
    "instance_norm_in_evaluation": learned(instance_norm_in_evaluation, lambda: Pairs((3, 12), 4), "mse"),
    "picking": learned(picking),
}
ODD |= {
    "flat": learned(Flat, Pairs, "mse"),
    "flat_with_root": learned(FlatWithRoot, Pairs, "mse"),
    "batch_norm": learned(WithBatchNorm, Pairs, "mse"),
    "instance_norm": learned(WithInstanceNorm, lambda: Pairs((3, 12), 4), "mse"),
    "in_place": learned(of(InPlace, InPlace)),
    "turned": learned(of(*[functools.partial(Turned, torch.view_as_complex)] * 2)),
    "turned_by_views": learned(of(*[functools.partial(Turned, viewed)] * 2)),
}
MODELS |= {f"odd {name}": code for name, code in ODD.items()}
LAYOUTS = ["dp=2", "dp=2 zero=1", "dp=2 zero=2 microbatch=1", "dp=2 zero=3"]
OTHERS = ("flat", "flat_with_root", "batch_norm", "instance_norm", "in_place", "turned", "turned_by_views")
HELD = [name for name in ODD if name not in OTHERS]
REPEATED = ["dp=2 zero=3 recompute=full", "dp=2 zero=2 microbatch=1 accumulate=full recompute=selective"]
EQUAL = [
    # Every model with one layout, in turn; the others nightly.
    *(
        Equal(layout, f"odd {name}", is_nightly=index % len(LAYOUTS) != turn)
        for index, name in enumerate(HELD)
        for turn, layout in enumerate(LAYOUTS)
    ),
    *(Equal(layout, f"odd {name}") for name, layout in zip(("encoder_decoder", "tied_within"), REPEATED, strict=True)),
    *(Equal("dp=2 zero=1", f"odd {name}") for name in ("in_place", "turned", "turned_by_views")),
    # Shapes that depend on values within blocks close no stage.
    *(Equal(layout, "odd picking") for layout in ("pp=2", "pp=2 microbatch=2")),
]
REFUSED = [
    *(
        Refused(f"dp=1 recompute={recompute}", "odd in_place", r"blocks.0 writes into its own input.*Use .*recompute=none", ModelError)
        for recompute in ("full", "selective")
    ),
    *(
        Refused(layout, "odd instance_norm", r"norm lets samples influence each other.*Use one rank with microbatch=8")
        for layout in ("dp=1 microbatch=4", "dp=2 zero=3")
    ),
    Refused("tp=2", "odd picking", r"at blocks.0 depend on values.*Use a module of its own.*Use tp=1"),
]  # fmt: skip
