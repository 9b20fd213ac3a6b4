"""The code of a row of `code_array.py`: a model, data, a loss, optimizers and a loop, as plain torch and with a run."""

from __future__ import annotations

import functools
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import AffineTransform, Categorical, Normal, TransformedDistribution
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

import samestep
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.run import Run
from tests.parity.code_array import Row
from tests.plain import Trained, mean_of

STEPS, LENGTH, WIDTH, WORDS, DECAY, IGNORED = 3, 5, 8, 11, 0.8, -100


class Samples:
    """Words with labels, some of which do not count."""

    def __init__(self, form: str) -> None:
        self.form = form

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(index))
        labels = words[1].masked_fill(torch.arange(LENGTH) < index % 3, IGNORED)
        return (words[0], labels) if self.form == "tuple" else {"words": words[0], "labels": labels}


def in_form(form: str, samples: Any) -> Any:
    """Return the values of a batch in the form that a loop hands over."""
    forms = {"record": Given, "encoding": Encoding}
    return forms[form](**samples) if form in forms else samples


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples, one after another."""

    def __init__(self, form: str) -> None:
        self.samples = Samples(form)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


@dataclass
class Record:
    """What a forward returns in attributes."""

    logits: Any
    size: Any


@dataclass
class Given:
    """A batch whose parts are attributes."""

    words: Tensor
    labels: Tensor


class Encoding(UserDict[str, Any]):
    """A mapping whose keys are attributes too, as a tokenizer of transformers returns it."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


Pair = namedtuple("Pair", "logits size")
OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda logits, size: logits,
    "dict": lambda logits, size: {"logits": logits, "size": size},
    "record": Record,
    "object": lambda logits, size: SimpleNamespace(logits=logits, size=size),
    "named tuple": Pair,
    "distribution": lambda logits, size: UserDict(
        logits=Categorical(logits=logits),
        size=TransformedDistribution(Normal(size, 1.0 + size), [AffineTransform(size, 2.0)]),
    ),
}  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def limited(gradient: Tensor) -> Tensor:
    """Return a gradient whose elements are bounded, which is no linear function."""
    return gradient.clamp(-3e-3, 3e-3)


class Block(nn.Module):
    """Two linear layers beside their input."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.kind = row["dropout"], row["checkpoint"], row["hook"]
        norms = {"layer": nn.LayerNorm(WIDTH), "batch": nn.BatchNorm1d(LENGTH), "none": nn.Identity()}
        self.norm, self.drop = norms[row["norm"]], nn.Dropout(0.3 if row["dropout"] == "module" else 0.0)
        up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.up = Adapted(up) if row["adapter"] == "low rank" else up
        if row["parametrization"] == "weight norm":
            nn.utils.parametrizations.weight_norm(self.down)
        if row["buffer"] == "scale":
            self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        _, keeps, _ = self.kind
        inner = checkpoint(self.inner, x, use_reentrant=False) if keeps == "own" else self.inner(x)
        return x + inner

    def inner(self, x: Tensor) -> Tensor:
        dropout, _, hook = self.kind
        y = F.gelu(self.up(self.norm(x)))
        y = F.dropout(y, 0.3, self.training) if dropout == "function" else self.drop(y)
        y = y + 0.1 * torch.randn_like(y) if dropout == "noise" else y
        if hook == "of a tensor" and y.requires_grad:
            y.register_hook(limited)
        y = self.down(y)
        return y * self.scale if hasattr(self, "scale") else y


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.form = row["output"]
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="mean") if row["embedding"] == "bag" else None
        self.blocks = nn.ModuleList(Block(row) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if row["tied"] == "head":
            self.head.weight = self.embed.weight
        if row["tied"] == "blocks":
            first, second = (block.down for block in self.blocks)
            second.bias = first.bias
        if row["tied"] == "called twice":
            self.blocks[1] = self.blocks[0]
        if row["unused"] != "none":
            self.other = nn.Linear(WIDTH, WIDTH)
        self.is_at_times = row["unused"] == "at times"
        if row["frozen"] == "front":
            self.blocks[0].requires_grad_(False)
        if row["hook"] == "of a weight":
            self.head.weight.register_hook(lambda gradient: 0.5 * gradient)
        if row["hook"] == "of a module":
            self.blocks[0].register_forward_hook(lambda module, inputs, output: 1.5 * output)

    def forward(self, words: Any) -> Any:
        words = words if isinstance(words, Tensor) else words.words
        x = self.embed(words)
        if self.bag is not None:
            x = x + self.bag(words)[:, None]
        begins = words[:, 0] == 3
        if self.is_at_times and bool(begins.any()):
            x = x + self.other(x) * begins[:, None, None]
        for block in self.blocks:
            x = block(x)
        return OUTPUTS[self.form](self.head(x), x.square().mean((1, 2)))


class WithLoss(Model):
    """A model whose forward returns its loss."""

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(logits_of(super().forward(words)).flatten(0, 1), labels.flatten())


def _part(outputs: Any, name: str) -> Any:
    part = outputs[name] if isinstance(outputs, dict | UserDict) else getattr(outputs, name)
    if isinstance(part, TransformedDistribution):  # which checks the number of the samples
        return part.log_prob(torch.zeros(part.batch_shape, dtype=torch.float64))
    return part


def logits_of(outputs: Any) -> Tensor:
    """Return the logits in outputs of any form."""
    logits = outputs if isinstance(outputs, Tensor) else _part(outputs, "logits")

    return logits.logits if isinstance(logits, Categorical) else logits


def _loss(kind: str, outputs: Any, batch: Any) -> Any:
    labels = (
        batch[1] if isinstance(batch, list | tuple) else batch.labels if isinstance(batch, Given) else batch["labels"]
    )
    logits = logits_of(outputs)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    count = (labels != IGNORED).sum()
    if kind == "mean":
        return total / count
    if kind == "sum":
        return total, count
    if kind == "over the batch":
        return total / count + logits.mean((1, 2)).square().mean().sqrt()
    size = logits.square().mean((1, 2)) if isinstance(outputs, Tensor) else _part(outputs, "size")
    return {"words": (total, count), "size": (0.1 * size.sum(), len(logits))}


def loss_of(row: Row) -> Any:
    """Return the loss that a run is given."""
    if row["loss"] == "of the model":
        return "model"
    loss = functools.partial(_loss, row["loss"])
    if row["loss"] == "over the batch":
        return samestep.whole_batch(loss)
    return samestep.mean_over("tokens", loss) if row["loss"] == "mean" else loss


def plain_loss(row: Row, model: nn.Module, batch: Any) -> Tensor:
    """Return the mean of a loss in a plain loop."""
    parts = batch if isinstance(batch, list | tuple) else (batch["words"], batch["labels"])
    if row["loss"] == "of the model":
        loss: Tensor = model(*parts)
        return loss
    result: Tensor = mean_of(_loss(row["loss"], model(parts[0]), batch))
    return result


def built(row: Row) -> nn.Module:
    """Return the model of a row, always with the same values."""
    torch.manual_seed(7)
    return WithLoss(row) if row["loss"] == "of the model" else Model(row)


def _is_matrix(name: str) -> bool:
    return name.startswith("blocks") and name.endswith("weight") and ".up." in name


def muon(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([param for name, param in named if _is_matrix(name)], lr=0.02, weight_decay=0.05)


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for name, param in named if not _is_matrix(name)], lr=0.01, eps=1e-3)


def grouped(named: Any) -> torch.optim.Optimizer:
    biases, others = ([param for name, param in named if name.endswith("bias") == is_bias] for is_bias in (True, False))
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.01, eps=1e-3)


def apart(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer of groups with options of their own."""
    matrices, others = ([param for _, param in named if (param.dim() > 1) == is_matrix] for is_matrix in (True, False))
    first, second = {"params": matrices, "lr": 0.05, "weight_decay": 0.1}, {"params": others, "momentum": 0.9}
    return torch.optim.SGD([first, second], lr=0.1)


momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def optimizers_of(row: Row, model: nn.Module) -> Any:
    """Return what a run is given as its optimizer."""
    if row["optimizer"].startswith("instance"):
        optimizers = plain_optimizers(row, model)
        return optimizers if row["optimizer"] == "instances" else optimizers[0]
    return {"momentum": momentum, "groups": grouped, "several": {"matrices": muon, "others": adamw}}[row["optimizer"]]


def plain_optimizers(row: Row, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a plain loop."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if row["optimizer"] in ("several", "instances"):
        return [muon(named), adamw(named)]
    if row["optimizer"] == "instance":
        return [apart([(name, param) for name, param in named if not name.startswith("embed")])]
    return [grouped(named) if row["optimizer"] == "groups" else momentum([param for _, param in named])]


def job_of(row: Row) -> Job:
    """Return the job of a row."""
    return Job(
        train={
            "global_batch": int(row["batch"]),
            "steps": STEPS,
            "watch_every": 2 if row["watched"] == "every second" else 0,
            "ema": DECAY if row["average"] == "ema" else None,
        },
        numerics={"precision": "float64"},
        optimizer={"clip_norm": 0.3 if row["clip"] == "job" else None},
        run={"device": "cpu"},
        **({"schedule": {"name": "linear"}} if row["schedule"] == "linear" else {}),
    )


def layout_of(row: Row) -> Layout:
    """Return the layout of a row."""
    words = row["layout"] + (f" recompute={row['recompute']}" if row["recompute"] != "none" else "")
    return Layout(words + (" offload" if row["offload"] == "optimizer" else ""))


def source_of(row: Row) -> Any:
    """Return what a loop takes its batches from."""
    samples = Samples(row["data"])
    if row["source"] == "stream":
        return Stream(row["data"])
    return DataLoader(samples, batch_size=int(row["batch"])) if row["source"] == "loader" else samples


def whole_batches(row: Row) -> Iterator[Any]:
    """Return the samples of each step, which a loader or a stream has in its own order."""
    size, samples = int(row["batch"]), Samples(row["data"])
    if row["source"] in ("loader", "stream"):
        for begin in range(0, STEPS * size, size):
            yield default_collate([samples[index] for index in range(begin, begin + size)])
        return
    for batch in samestep.batches(samples, job_of(row)):
        yield batch.samples(batch.indices)


def _freeze(row: Row, model: nn.Module, step: int) -> None:
    """Freeze a layer of the last block in the second of the steps."""
    if row["frozen"] == "in turn":
        for name, param in model.named_parameters():
            if name.startswith("blocks.1.down"):
                param.requires_grad_(step != 1)


def _shrink(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.mul_(0.9)


HELD_OUT = list(range(33, 40))


def held_out(row: Row) -> Any:
    """Return a batch that no step has."""
    samples = [Samples(row["data"])[index] for index in HELD_OUT]
    return default_collate(samples)


def train_plainly(row: Row) -> Trained:
    """Take the steps of a row as plain torch."""
    model, losses = built(row).double(), []
    optimizers = plain_optimizers(row, model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (STEPS - 1)) for optimizer in optimizers
    ]

    def evaluate(module: nn.Module) -> None:
        with torch.no_grad():
            losses.append(plain_loss(row, module.eval(), held_out(row)).item())
        model.train()

    for step, batch in enumerate(whole_batches(row)):
        _freeze(row, model, step)
        model.zero_grad()
        total = 0.0
        for _ in range(2 if row["loop"] == "two backwards" else 1):
            loss = plain_loss(row, model, batch)
            loss.backward()
            total += loss.item()
        if row["loop"] == "clips":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if row["clip"] == "job":
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for update in [*optimizers, *(schedules if row["schedule"] == "linear" else [])]:
            update.step()
        averaged.update_parameters(model)
        losses.append(total)
        if row["between"] == "evaluates":
            evaluate(model)
        if row["between"] == "writes weights" and step == 0:
            _shrink(model)
    if row["average"] == "ema":
        evaluate(averaged.module)
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def given_to(row: Row, rank: int, world: int, batch: Any) -> tuple[Any, dict[str, bool]]:
    """Return what the loop of a rank hands over as a batch, and how."""
    if not row["source"].endswith(("values", "rank 0")):
        return batch, {}
    if row["source"] == "own values" and world > 1:
        cut = len(batch.indices) // 3  # shares of different sizes
        share = batch.indices[:cut] if rank == 0 else batch.indices[cut:]
        return in_form(row["data"], batch.samples(share)), {"local": True}
    is_given = rank == 0 or row["source"] != "values of rank 0"
    return in_form(row["data"], batch.samples(batch.indices)) if is_given else None, {}


def _step(row: Row, run: Run, batch: Any, how: dict[str, bool]) -> float:
    if row["loop"] == "steps":
        return run.step(batch, **how).loss
    for _ in range(2 if row["loop"] == "two backwards" else 1):
        loss = run.backward(batch, **how).loss
    if row["loop"] == "clips":
        nn.utils.clip_grad_norm_([*run.model.parameters()], 0.1)
    run.update()
    return loss


def train_in_layout(rank: int, world: int, row: Row, layout: str, folder: str) -> Trained:
    """Take the steps of a row with a run, from a checkpoint behind the first if the row resumes."""

    def make() -> Run:
        model = built(row)
        return samestep.parallelize(model, loss_of(row), optimizers_of(row, model), layout=layout, job=job_of(row))

    run, losses = make(), list[float]()
    for batch in samestep.batches(source_of(row), run.job):
        step = batch.step
        if step == 1 and row["resume"] == "amid":
            run.save(folder)
            run = make()
            run.load(folder)
        if step == STEPS:
            break
        if step:
            _freeze(row, run.model, step)
        losses.append(_step(row, run, *given_to(row, rank, world, batch)))
        if row["between"] == "evaluates":
            losses.append(run.evaluate(in_form(row["data"], held_out(row)))["loss"])
        if row["between"] == "writes weights" and step == 0:
            with run.gathered() as model:
                _shrink(model)
    if row["average"] == "ema":
        with run.averaged():
            losses.append(run.evaluate(in_form(row["data"], held_out(row)))["loss"])
    return losses, run.state_dict(on_every_rank=True)
