"""The contestants of `overhead.py`: one model, one optimizer, one order of samples, in five hands.

Each contestant is written as its own documentation has it. It is a generator that takes a step and yields the loss;
`serve` lets the benchmark take the steps one by one. Nothing is imported before the contestant that needs it is chosen,
so that start-up and memory are each one's own.

    python peers.py plain ...                                        a loop of one rank
    python peers.py samestep [--ranks 2] ...                         samestep.parallelize, alone or samestep.launch
    python -m torch.distributed.run --nproc-per-node 2 peers.py ddp ...
    python -m torch.distributed.run --nproc-per-node 2 peers.py accelerate ...
    python peers.py fabric ...                                       starts its second process itself
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

VOCAB = 256
STEPS = 1000
"""Steps for which there are samples; one pass over them."""
CLIP_NORM = 1.0


@dataclass(frozen=True)
class Size:
    """The shape of the model and of a sample."""

    hidden: int
    layers: int
    heads: int
    tokens: int


SIZES = {"middle": Size(192, 4, 4, 64), "heavy": Size(512, 2, 8, 64)}


# -- what all contestants share --------------------------------------------------------------------


def ddp_options(to: Callable[..., Any] = DistributedDataParallel) -> dict[str, bool]:
    """Return the arguments that make torch's DDP leanest, by the names that it has where they are given `to`."""
    names = inspect.signature(to).parameters
    of_buffers = (
        "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    )  # older torch, and Accelerate
    return {"gradient_as_bucket_view": True, of_buffers: False}


class Block(nn.Module):
    """Attention with rotary positions and a gated feed-forward, each behind a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden, inner = size.hidden, size.hidden * 11 // 4
        self.heads = size.heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (_rotated(part, cos, sin) for part in (q, k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Llama(nn.Module):
    """A small Llama-like decoder."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.hidden), nn.Linear(size.hidden, VOCAB, bias=False)
        width = size.hidden // size.heads
        frequencies = 10000.0 ** (-torch.arange(0, width, 2).repeat(2) / width)
        angles = torch.arange(size.tokens)[:, None] * frequencies
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
        return self.head(self.norm(x))


def build(size: str) -> Llama:
    """Build the model with weights that come from no random generator, so that all contestants start alike."""
    model = Llama(SIZES[size])
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            if param.dim() > 1:
                places = torch.arange(param.numel(), dtype=torch.float64)
                chirp = (places * places * (0.6180339887 + index)) % 1.0 - 0.5
                param.copy_(chirp.view(param.shape) * (12.0**0.5 * 0.02))
    return model


class Windows:
    """Sample i is a window of a text of 16 letters; `order` is what the peers' sequential samplers go through."""

    def __init__(self, size: str, samples: int, order: np.ndarray | None = None) -> None:
        self.length, self.samples, self.order = SIZES[size].tokens, samples, order
        letters = torch.randint(16, (samples + self.length + 1,), generator=torch.Generator().manual_seed(0))
        self.text = letters * letters.roll(1) % VOCAB

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(index if self.order is None else self.order[index])
        window = self.text[start : start + self.length + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def windows() -> Windows:
    """Return the data of the job file that `overhead.py` writes for `samestep train`."""
    return Windows("middle", 16 * STEPS)


def adamw(params: Any) -> torch.optim.Optimizer:
    """The optimizer of all contestants."""
    return torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def loss_mean(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The peers' loss: a mean, which is right here because every rank counts as many tokens."""
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def loss_sum(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """samestep's loss: a sum, and the count that it is a sum over."""
    labels = batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), labels.numel()


# -- the contestants -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """What the benchmark tells a contestant."""

    name: str
    size: str
    ranks: int
    global_batch: int
    order: str
    socket: str

    def data(self) -> Windows:
        """The samples in the order in which samestep reads them, for loaders that go through them in sequence."""
        return Windows(self.size, self.global_batch * STEPS, np.load(self.order, mmap_mode="r"))


def plain(words: Words) -> None:
    """A loop of one rank in plain PyTorch."""
    from torch.utils.data import DataLoader

    def losses() -> Iterator[float]:
        model = build(words.size)
        optimizer = adamw(model.parameters())
        for batch in DataLoader(words.data(), batch_size=words.global_batch):
            loss = loss_mean(model(batch["input_ids"]), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            yield loss.item()

    serve(losses(), 0, words)


def ddp(words: Words) -> None:
    """PyTorch's DistributedDataParallel by hand."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")

    def losses() -> Iterator[float]:
        model = DistributedDataParallel(build(words.size), **ddp_options())
        optimizer = adamw(model.parameters())
        data = words.data()
        sampler = DistributedSampler(data, shuffle=False)
        for batch in DataLoader(data, batch_size=words.global_batch // words.ranks, sampler=sampler):
            loss = loss_mean(model(batch["input_ids"]), batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            yield loss.item()

    serve(losses(), dist.get_rank(), words)
    dist.destroy_process_group()


def accelerate(words: Words) -> None:
    """Hugging Face Accelerate."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from torch.utils.data import DataLoader

    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**ddp_options(DistributedDataParallelKwargs))]
    )

    def losses() -> Iterator[float]:
        model = build(words.size)
        loader = DataLoader(words.data(), batch_size=words.global_batch // words.ranks)
        model, optimizer, loader = accelerator.prepare(model, adamw(model.parameters()), loader)
        for batch in loader:
            loss = loss_mean(model(batch["input_ids"]), batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            yield loss.item()

    serve(losses(), accelerator.process_index, words)
    accelerator.end_training()


def fabric(words: Words) -> None:
    """Lightning Fabric, which starts this file a second time."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    lightning = Fabric(accelerator="cpu", devices=words.ranks, strategy=DDPStrategy(**ddp_options()))
    lightning.launch()

    def losses() -> Iterator[float]:
        model = build(words.size)
        model, optimizer = lightning.setup(model, adamw(model.parameters()))
        loader = DataLoader(words.data(), batch_size=words.global_batch // words.ranks)
        for batch in lightning.setup_dataloaders(loader):
            loss = loss_mean(model(batch["input_ids"]), batch)
            optimizer.zero_grad()
            lightning.backward(loss)
            lightning.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
            optimizer.step()
            yield loss.item()

    serve(losses(), lightning.global_rank, words)


def samestep(words: Words) -> None:
    """samestep with a loop of one's own, started by `samestep.launch` where there are several ranks."""
    from samestep import launch

    if words.ranks == 1:
        samestep_rank(None, words)
    else:
        launch(samestep_rank, (words,), ranks=words.ranks)


def samestep_rank(place: Any, words: Words) -> None:
    """What each rank of samestep does; alone there is no place."""
    from samestep import Job, batches, parallelize

    own_session()
    job = Job(
        train={"global_batch": words.global_batch, "steps": STEPS},
        optimizer={"clip_norm": CLIP_NORM},
        run={"device": "cpu"},
    )
    data = Windows(words.size, words.global_batch * STEPS)

    def losses() -> Iterator[float]:
        run = parallelize(lambda: build(words.size), loss_sum, adamw, layout=f"dp={words.ranks}", job=job)
        for batch in batches(data, job):
            yield run.step(batch).loss

    serve(losses(), place.rank if place else 0, words)


# -- taking steps when told ------------------------------------------------------------------------


def own_session() -> None:
    """Give this process a session of its own, as torchrun does with its ranks.

    Linux shares out a busy machine by sessions (autogroups): two ranks in one session get half as much of it. On a
    quiet machine this changes nothing; on a busy one it would be taken for a difference between libraries.
    """
    if os.getsid(0) != os.getpid():
        os.setpgid(0, os.getpgid(os.getppid()))  # who leads a process group may not leave its session
        os.setsid()


def serve(losses: Iterator[float], rank: int, words: Words) -> None:
    """Take the first step, tell the benchmark, then take as many more as each of its lines asks for; 0 ends it."""
    first = next(losses)
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(words.socket)
        with wire.makefile("r") as lines:
            _say(wire, rank=rank, pid=os.getpid(), losses=[first])
            for line in lines:
                if int(line) == 0:
                    return
                began, cpu_began = time.perf_counter(), time.process_time()
                values = [next(losses) for _ in range(int(line))]
                seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
                _say(wire, seconds=seconds, cpu_s=cpu_s, losses=values)


def _say(wire: socket.socket, **facts: Any) -> None:
    wire.sendall(json.dumps(facts).encode() + b"\n")


CONTESTANTS = {each.__name__: each for each in (plain, ddp, accelerate, fabric, samestep)}


def main() -> None:
    """Be one contestant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--order", required=True, help="numpy file of sample indices")
    parser.add_argument("--socket", required=True, help="where the benchmark listens")
    words = Words(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    own_session()
    CONTESTANTS[words.name](words)


if __name__ == "__main__":
    main()
