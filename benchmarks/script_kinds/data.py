"""Batches as scripts have them: loaders, streams, tensors by hand, ragged samples, graphs, samples that are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.script_kinds.kind import (
    DATA,
    GLOBAL_BATCH,
    STEPS,
    UNCUT,
    Kind,
    Port,
    Table,
    adam,
    inputs_of,
    numbers,
    usual,
    whole_numbers,
)
from benchmarks.script_kinds.losses import Block, Encoder, points
from benchmarks.script_kinds.states import cross_entropy


def fed(name: str, build: Any, source: Any, scalar: Any, loss: Any, by_hand: bool = False, **more: Any) -> Kind:
    """A script that iterates over `source()`, whose batches are read in its own order."""

    def plain(model: nn.Module, _: list[Any]) -> list[float]:
        optimizer, losses = adam(model.parameters()), []
        for batch, _step in zip(source(), range(STEPS), strict=False):
            found = scalar(model(**inputs_of(batch)), batch)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            losses.append(found.item())
        return losses

    def port(given: Port, model: nn.Module) -> None:
        run = given.parallelize(model, loss, adam)
        for batch in zip(source(), range(STEPS), strict=False) if by_hand else given.batches(source()):
            given.losses.append(run.step(batch[0] if by_hand else batch).loss)

    return Kind(name, build, points, plain, port, **more)


# -- loaders and streams ---------------------------------------------------------------------------


class Texts(torch.utils.data.Dataset[Any]):
    """Lists of numbers of different lengths."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return whole_numbers(12, 2 + index % 5, seed=index).tolist(), index % 4


def padded(samples: list[tuple[list[int], int]]) -> dict[str, Tensor]:
    rows = nn.utils.rnn.pad_sequence([torch.tensor(row) + 1 for row, _ in samples], batch_first=True)
    return {"ids": rows, "mask": (rows > 0).double(), "labels": torch.tensor([kind for _, kind in samples])}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(13, 8),
            nn.ModuleList(Block() for _ in range(2)),
            nn.Linear(8, 4),
        )

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head((h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class Read(Texts):
    """The same with `read`, which pads what is read together."""

    def read(self, indices: Any) -> dict[str, Tensor]:
        return padded([self[int(index)] for index in indices])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        table = points()
        for index in range(10_000):
            yield table[index % len(table)]


def stream_of_batches() -> Iterator[dict[str, Tensor]]:
    """A generator of whole batches, as scripts write `get_batch` in a loop."""
    generator = torch.Generator().manual_seed(0)
    while True:
        x = torch.randn(GLOBAL_BATCH, 8, generator=generator, dtype=torch.float64)
        yield {"x": x, "labels": (x.sum(1) > 0).long()}


def mixed_by_hand() -> Iterator[dict[str, Tensor]]:
    """Mixup over the whole batch, with a factor of numpy's Beta (Zhang et al. 2018)."""
    table, random = points().columns, np.random.default_rng(0)
    for step in range(STEPS):
        x, y = (table[name][step * 8 : step * 8 + 8] for name in ("x", "labels"))
        factor, order = random.beta(0.4, 0.4), torch.from_numpy(random.permutation(len(x)))
        classes = F.one_hot(y, 4).double()
        target = factor * classes + (1 - factor) * classes[order]
        yield {"x": factor * x + (1 - factor) * x[order], "labels": target}


def soft(outputs: Tensor, batch: Any) -> Tensor:
    return -(batch["labels"] * outputs.log_softmax(-1)).sum(-1).mean()


def soft_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return -(batch["labels"] * outputs.log_softmax(-1)).sum(), len(outputs)


class Augmented(Table):
    """A random crop in `__getitem__`, by torch's generator and numpy's."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        noise = torch.randn(8, dtype=torch.float64) * 0.1 + float(np.random.rand())
        return {**sample, "x": sample["x"] + noise}


# -- ragged samples and graphs ---------------------------------------------------------------------


class Graphs(torch.utils.data.Dataset[Any]):
    """Graphs of 3 to 6 nodes."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        nodes = 3 + index % 4
        edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        return {"x": numbers(nodes, 8, seed=index), "edges": edges, "labels": torch.tensor(index % 4)}


def disjoint(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One graph of all, with the number of the sample at each node, as PyG's `Batch` has it."""
    sizes = [len(one["x"]) for one in samples]
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    return {
        "x": torch.cat([one["x"] for one in samples]),
        "edges": torch.cat([one["edges"] + offset for one, offset in zip(samples, offsets, strict=True)], 1),
        "batch": torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(sizes)),
        "labels": torch.stack([one["labels"] for one in samples]),
    }


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = x + F.relu(torch.zeros_like(x).index_add(0, edges[1], layer(x)[edges[0]]))
        count = int(batch[-1]) + 1
        return self.head(x.new_zeros(count, 8).index_add(0, batch, x))


class Pictures(torch.utils.data.Dataset[Any]):
    """Images of different sizes with boxes, as torchvision's detection has them: lists and dicts."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        height = 4 + index % 3
        boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 3.0, 4.0]], dtype=torch.float64)[: 1 + index % 2]
        return numbers(1, height, 5, seed=index), {"boxes": boxes, "classes": torch.arange(len(boxes))}


def listed(samples: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


class Detector(nn.Module):
    """A detector that returns a dict of losses, each a mean over what it counts (Faster R-CNN, Ren et al. 2015; no nms here)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 8, 3, padding=1)
        self.box, self.kind = nn.Linear(8, 4), nn.Linear(8, 2)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Any]:
        features = torch.stack([self.body(image[None]).mean((0, 2, 3)) for image in images])
        boxes, kinds = self.box(features), self.kind(features)
        found = [self.losses(box, kind, target) for box, kind, target in zip(boxes, kinds, targets, strict=True)]
        return {"box": torch.stack([box for box, _ in found]), "kind": torch.stack([kind for _, kind in found])}

    @staticmethod
    def losses(box: Tensor, kind: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        wide = (box - target["boxes"].to(box.dtype)).abs().sum()
        return wide, F.cross_entropy(kind.expand(len(target["boxes"]), 2), target["classes"], reduction="sum")


def detection(outputs: dict[str, Tensor], batch: Any) -> Tensor:
    count = sum(len(one["boxes"]) for one in batch[1])
    return outputs["box"].sum() / count + outputs["kind"].sum() / count


def detection_terms(outputs: dict[str, Tensor], batch: Any) -> Any:
    count = sum(len(one["boxes"]) for one in batch[1])
    return {"box": (outputs["box"].sum(), count), "kind": (outputs["kind"].sum(), count)}


def pictures_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses = adam(model.parameters()), []
    for batch, _step in zip(DataLoader(Pictures(), GLOBAL_BATCH, collate_fn=listed), range(STEPS), strict=False):
        loss = detection(model(*batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pictures_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, detection_terms, adam, forward=lambda net, batch: net(*batch))
    for batch in given.batches(DataLoader(Pictures(), GLOBAL_BATCH, collate_fn=listed)):
        given.losses.append(run.step(batch).loss)


# -- hidden states from one step to the next --------------------------------------------------------


class Lstm(nn.Module):
    """A language model whose hidden state goes on from step to step, sample by sample (torch's word_language_model)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(12, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, ids: Tensor, carried: Any = None) -> tuple[Tensor, Any]:
        h, carried = self.lstm(self.embed(ids), carried)
        return self.head(h), carried


class Memory(nn.Module):
    """Attention that reads the hidden states of the segment before (Transformer-XL, Dai et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.kv, self.head = (
            nn.Embedding(12, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 16),
            nn.Linear(8, 12),
        )

    def forward(self, ids: Tensor, carried: Any = None) -> tuple[Tensor, Any]:
        h = self.embed(ids)
        memory = torch.zeros_like(h) if carried is None else carried
        k, v = self.kv(torch.cat([memory, h], 1)).chunk(2, -1)
        mask = torch.ones(h.shape[1], k.shape[1], dtype=torch.bool, device=h.device).tril(memory.shape[1])
        scores = (self.q(h) @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf)
        return self.head(h + scores.softmax(-1) @ v), h


def segments() -> Table:
    """32 segments of a text in 8 lanes: segment i of a lane follows i - 1."""
    text = whole_numbers(12, 8, 4 * 5 + 1)
    rows = [(text[lane, i * 5 : i * 5 + 5], text[lane, i * 5 + 1 : i * 5 + 6]) for i in range(4) for lane in range(8)]
    return Table(ids=torch.stack([x for x, _ in rows]), labels=torch.stack([y for _, y in rows]))


def tokens_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def carried_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses, carried = adam(model.parameters()), [], None
    for batch in DataLoader(segments(), GLOBAL_BATCH):
        outputs, carried = model(batch["ids"], carried)
        carried = tuple(one.detach() for one in carried) if isinstance(carried, tuple) else carried.detach()
        loss = F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def carried_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, tokens_sum, adam, forward=lambda net, batch, carried: net(batch["ids"], carried))
    for batch in given.batches(DataLoader(segments(), GLOBAL_BATCH), lanes=True):
        given.losses.append(run.step(batch).loss)


# -- two loaders -----------------------------------------------------------------------------------


class FixMatch(nn.Module):
    """Labels of weak views where the model is sure, for the strong ones (Sohn et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(4)

    def forward(self, x: Tensor, weak: Tensor, strong: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), self.unlabelled(weak, strong)

    def unlabelled(self, weak: Tensor, strong: Tensor) -> Tensor:
        with torch.no_grad():
            sure, pseudo = self.net(weak).softmax(-1).max(-1)
        return F.cross_entropy(self.net(strong), pseudo, reduction="none") * (sure > 0.3)


def half_labelled() -> Table:
    x = numbers(32, 8)
    return Table(x=x, weak=x + 0.1, strong=x + 0.5 * numbers(32, 8, seed=1), labels=whole_numbers(4, 32))


def fixmatch(outputs: Any, batch: Any) -> Tensor:
    return F.cross_entropy(outputs[0], batch["labels"]) + outputs[1].mean()


def fixmatch_sum(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs[0], batch["labels"], reduction="sum") + outputs[1].sum(), len(outputs[1])


ENCODER = lambda: Encoder(4)  # noqa: E731
KINDS = [
    fed("DataLoader", ENCODER, lambda: DataLoader(points(), GLOBAL_BATCH), cross_entropy, "cross_entropy"),
    fed("collate_fn that pads", Reader, lambda: DataLoader(Texts(), GLOBAL_BATCH, collate_fn=padded), cross_entropy, "cross_entropy"),
    usual("data set with read", Reader, Read, cross_entropy, "cross_entropy"),
    fed("stream", ENCODER, lambda: DataLoader(Stream(), GLOBAL_BATCH), cross_entropy, "cross_entropy"),
    fed("generator of batches", ENCODER, stream_of_batches, cross_entropy, "cross_entropy"),
    fed("batches of tensors", ENCODER, stream_of_batches, cross_entropy, "cross_entropy", by_hand=True),
    fed("mixup of a batch", ENCODER, mixed_by_hand, soft, soft_sum, by_hand=True),
    usual("random transforms", ENCODER, lambda: Augmented(**points().columns), cross_entropy, "cross_entropy", draws=True),
    fed("batches of graphs", GraphNet, lambda: DataLoader(Graphs(), GLOBAL_BATCH, collate_fn=disjoint), cross_entropy, "cross_entropy", layouts=DATA),
    Kind("Faster R-CNN", Detector, points, pictures_plain, pictures_port, DATA),
    Kind("LSTM with its hidden state", Lstm, points, carried_plain, carried_port, DATA),
    Kind("Transformer-XL", Memory, points, carried_plain, carried_port, UNCUT),
    usual("FixMatch", FixMatch, half_labelled, fixmatch, fixmatch_sum),
]  # fmt: skip
