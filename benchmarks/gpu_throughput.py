"""How fast one device trains Llamas of growing size: samestep beside a loop written by hand in torch alone.

Both contestants train the same module from the same weights on the same tokens, in bf16 with float32 masters, clipped, with
torch's fused AdamW; before a row counts, their first losses must agree to a few roundings of bf16. The loop keeps a bf16
model and float32 masters by hand, as Megatron-LM does, and calls nothing else. With `compiled`, each block of either is
compiled. `step_times.py` times them.

The samples of a step and recompute are those with which a step is predicted to fit, samples first; of an 8B as many layers
run as fit.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from single_gpu import empty
from step_times import Losses, timed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from samestep import Job, Layout, hardware
from samestep.building.loss import cross_entropy
from samestep.building.optimizer import optimizer_of
from samestep.datasets import batches
from samestep.examination.examine import Source, examine, with_new_blueprint
from samestep.models.spec import ModelSpec
from samestep.program.update_rules import states_per_param
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.training.metrics import speed_of
from samestep.training.out_of_memory import is_shortage
from samestep.wings.plan.simulation.simulate import predict

AGREE = 0.02
"""The largest difference of two contestants' losses, relative: a few roundings of bf16."""
FITS = 0.88
"""The part of the free memory that a step may be predicted to need."""
BYTES_BY_HAND = 2 + 4 + 4 + 8
"""Of a weight: itself, its master, its gradient and AdamW's two states."""
SAMPLES = (8, 4, 2, 1)
"""Samples of a step, the best first."""
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a Llama and of its samples."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int
    tokens: int
    as_fit: bool = False
    """Whether as many layers run as fit, up to `layers`."""


SIZES = {
    "0.5B": Size(22, 1280, 10, 5, 3584, 32000, 4096),
    "1B": Size(16, 2048, 16, 8, 8192, 32000, 4096),
    "3B": Size(28, 3072, 24, 8, 8192, 32000, 4096),
    "8B-layers": Size(32, 4096, 32, 8, 14336, 128256, 4096, as_fit=True),
}
TOY_SIZES = {"toy": Size(2, 32, 4, 2, 64, 64, 16), "toy-layers": Size(3, 32, 4, 2, 64, 64, 16, as_fit=True)}


# -- the model -------------------------------------------------------------------------------------


class Block(nn.Module):
    """Grouped attention with rotary positions and a gated feed-forward, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.hidden // size.heads
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(size.hidden), nn.RMSNorm(size.hidden)
        self.q, self.o = (nn.Linear(size.hidden, size.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.hidden, width * size.kv_heads, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.hidden, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (n, -1)).transpose(1, 2) for part, n in self._parts())
        q, k = (part * cos + torch.cat((-part.chunk(2, -1)[1], part.chunk(2, -1)[0]), -1) * sin for part in (q, k))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _parts(self) -> tuple[tuple[nn.Module, int], ...]:
        return (self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads)


class Llama(nn.Module):
    """A Llama-like decoder; its weights come from no random generator, which takes seconds for each billion."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.hidden), nn.Linear(size.hidden, size.vocab, bias=False)
        width = size.hidden // size.heads
        self.register_buffer("cos", torch.empty(size.tokens, width))
        self.register_buffer("sin", torch.empty(size.tokens, width))
        self.fill()

    @torch.no_grad()
    def fill(self) -> None:
        """Give the weights and the angles their values, wherever they are."""
        for index, param in enumerate(self.parameters()):
            param.copy_(_noise(param, index)) if param.dim() > 1 else param.fill_(1.0)
        tokens, width = self.cos.shape
        frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=self.cos.device).repeat(2) / width)
        angles = torch.arange(tokens, device=self.cos.device)[:, None] * frequencies
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _noise(like: Tensor, index: int) -> Tensor:
    """Return values of a standard deviation of 0.02 that look random: what is left of large products by whole numbers."""
    rows, columns = (torch.arange(1, n + 1, dtype=torch.float32, device=like.device) for n in like.shape)
    product = (rows * (0.6180339887 + index)).frac()[:, None] * (columns * 0.7548776662).frac()
    return ((product * 7919.0).frac() - 0.5) * (12.0**0.5 * 0.02)


class Tokens:
    """Random tokens of a vocabulary."""

    def __init__(self, size: Size, count: int = 1024) -> None:
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        ids = torch.randint(0, self.size.vocab, (self.size.tokens + 1,), generator=drawn)
        return {"input_ids": ids[:-1], "labels": ids[1:]}


# -- the contestants -------------------------------------------------------------------------------

COMPILED = (False, True)
"""Whether contestants run eager, or with compiled blocks: all of them in one way, then in the other."""
BACKEND = "inductor" if torch.version.cuda else "aot_eager"
"""The backend of compiled blocks: where there is no GPU, which takes the longest to compile for, graphs without kernels."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What both contestants train."""

    size: Size
    samples: int
    recompute: str = "none"
    compiled: bool = False

    @property
    def layout(self) -> Layout:
        """One rank, one micro-batch."""
        return Layout(f"dp=1 recompute={self.recompute}")

    @property
    def job(self) -> Job:
        """The job of samestep."""
        run = {"compile": "blocks", "compile_backend": BACKEND} if self.compiled else {}
        return Job(
            train={"global_batch": self.samples, "steps": 1000},
            optimizer={"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "clip_norm": CLIP_NORM},
            numerics={"precision": "bf16"},
            run=run,
        )

    @property
    def source(self) -> Source:
        """The untraced model, loss and optimizer of samestep."""
        size = self.size
        return Source(lambda: Llama(size), cross_entropy, optimizer_of(self.job), "llama")

    def traced(self) -> Source:
        """Return the source with its model traced, without memory or device."""
        example = next(batches(Tokens(self.size), self.job)).samples([0])
        return replace(self.source, prepared=examine(self.source, self.job, example))


def by_samestep(place: RankInfo, setting: Setting, source: Source) -> Losses:
    """Take steps by samestep."""
    untouched = replace(source, prepared=with_new_blueprint(source, setting.job))
    run = Run(untouched, setting.layout, setting.job, place)
    for batch in batches(Tokens(setting.size), setting.job):
        report = run.step(batch)
        yield lambda report=report: report.loss


def by_hand(place: RankInfo, setting: Setting, source: Source) -> Losses:
    """Take steps in torch alone: a bf16 model, float32 masters."""
    with torch.device("meta"):
        model = Llama(setting.size)
    model.to_empty(device=place.device).fill()
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    params = list(model.parameters())
    for block in model.blocks:
        if setting.recompute != "none":
            block.forward = _recomputed(block.forward)
        if setting.compiled:
            block.compile(backend=BACKEND)
    adamw = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.1, fused=True)
    for batch in batches(Tokens(setting.size), setting.job):
        samples = batch.samples(batch.shares(0, 1, 1)[0])
        ids, labels = (samples[name].to(place.device, non_blocking=True) for name in ("input_ids", "labels"))
        loss = F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        for master, param in zip(masters, params, strict=True):
            master.grad, param.grad = param.grad.float(), None
        nn.utils.clip_grad_norm_(masters, CLIP_NORM, foreach=True)
        adamw.step()
        adamw.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        yield loss.detach().item


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


CONTESTANTS: dict[str, Callable[[RankInfo, Setting, Source], Losses]] = {"samestep": by_samestep, "by hand": by_hand}


# -- measuring -------------------------------------------------------------------------------------


def needed_bytes(setting: Setting, traced: Source) -> int:
    """Return the bytes that a step is predicted to need at most, without what the context of the device takes."""
    states = states_per_param(setting.job)
    said = predict(spec_of(traced), setting.job, setting.layout, hardware.load("h200x8"), states)
    return said.peak.total - said.peak.overhead


def needed_by_hand(traced: Source) -> int:
    """Return the bytes that the loop by hand holds at its update: bf16 weights, the rest in float32."""
    return BYTES_BY_HAND * spec_of(traced).num_params


def spec_of(traced: Source) -> ModelSpec:
    """Return the shape of a traced model."""
    assert traced.prepared is not None
    return traced.prepared.spec


def fitted(size: Size, free_bytes: int) -> tuple[Setting, Source]:
    """Return the setting with most samples a step that is predicted to fit, rather without recompute, and its trace.

    A model that is run as far as it fits has as many layers as fit with one sample and without recompute.
    """
    most = FITS * free_bytes
    if size.as_fit:
        small = [Setting(replace(size, layers=n), 1) for n in (1, 2)]
        traces = [setting.traced() for setting in small]
        layers = min(
            1 + int((most - one) // (two - one))
            for one, two in (map(needed_bytes, small, traces), map(needed_by_hand, traces))
        )
        size = replace(size, layers=max(1, min(size.layers, layers)), as_fit=False)
    traced = Setting(size, 1).traced()
    choices = [Setting(size, samples, recompute) for recompute in ("none", "full") for samples in SAMPLES]
    fitting = (one for one in choices if needed_bytes(one, traced) <= most)
    return next(fitting, choices[-1]), traced


def free_bytes(place: RankInfo) -> int:
    """Return the bytes that this process may have on its device."""
    if place.device.type == "cuda":
        return int(torch.cuda.mem_get_info(place.device)[0])
    return int(psutil.virtual_memory().available)


def rows(
    place: RankInfo, sizes: Sequence[tuple[str, Size]], end_s: float, groups: int = 3, of: int = 4
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and values of a row for each contestant and size; eager ones first, compiled ones while time is left.

    A row that fails holds its error, and the other rows are measured all the same. `end_s` is a moment of `time.monotonic`
    after which no contestant begins.
    """
    chosen: dict[str, tuple[Setting, Source]] = {}
    for compiled in COMPILED:
        for name, size in sizes:
            losses: dict[str, tuple[float, ...]] = {}
            for loop in CONTESTANTS:
                title = f"{name}, {loop}{', compiled' * compiled}"
                if time.monotonic() > end_s:
                    yield title, {"loop": loop, "note": "left out, since no time was left: --sizes runs it alone"}
                    continue
                try:
                    if name not in chosen:
                        chosen[name] = fitted(size, free_bytes(place))
                    setting, traced = chosen[name]
                    yield title, _row(place, replace(setting, compiled=compiled), traced, loop, losses, groups, of)
                except Exception as error:
                    traceback.print_exc()
                    why = "out of memory" if is_shortage(error) else f"{type(error).__name__}: {error}".splitlines()[0]
                    yield title, {"loop": loop, "error": why}
                empty(place.device)


def _row(
    place: RankInfo,
    setting: Setting,
    traced: Source,
    loop: str,
    losses: dict[str, tuple[float, ...]],
    groups: int,
    of: int,
) -> dict[str, Any]:
    """Time one contestant, and hold its losses against those of the one before."""
    if setting.compiled:
        torch._dynamo.reset()
    found = timed(place.device, CONTESTANTS[loop](place, setting, traced), groups, of)
    spec = spec_of(traced)
    speed = speed_of(spec, setting.job, setting.layout, place.device)
    tokens = setting.samples * setting.size.tokens
    values = {
        "loop": loop, "layers": setting.size.layers, "params": spec.num_params, "tokens": tokens,
        "recompute": setting.recompute, "step_s": found.step_s, "tokens_per_s": tokens / found.step_s,
        "tflops": speed.tflops_per_device(found.step_s), "mfu": speed.mfu(found.step_s),
        "allocated_bytes": found.allocated_bytes, "reserved_bytes": found.reserved_bytes,
        "predicted_bytes": needed_bytes(setting, traced), "first_step_s": found.first_step_s, "losses": found.losses,
    }  # fmt: skip
    for other, theirs in losses.items():
        if any(abs(a - b) > AGREE * abs(b) for a, b in zip(found.losses, theirs, strict=True)):
            values["error"] = f"not the losses of {other}: {found.losses} against {theirs}"
    losses[loop] = found.losses
    return values
