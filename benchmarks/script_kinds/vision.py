"""Vision, generation and self-supervision as public scripts have them: masks per sample, crops, detectors, flows, U-Nets, norms."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from benchmarks.script_kinds.kind import (
    DATA,
    GLOBAL_BATCH,
    STEPS,
    Kind,
    Port,
    Table,
    adam,
    numbers,
    sgd,
    usual,
    whole_numbers,
)
from benchmarks.script_kinds.losses import Block, Encoder, points, returned, views, whole
from benchmarks.script_kinds.models import pictures
from benchmarks.script_kinds.optimizers import critic_sum, generator_sum
from benchmarks.script_kinds.states import Moco, cross_entropy, first_class, first_class_sum, follow, port_of

# -- masked and multi-crop self-supervision --------------------------------------------------------


class Mae(nn.Module):
    """Random patches are kept for each sample, an encoder sees them, a decoder all, and the forward returns the loss (He et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.patch_embed, self.pos_embed = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 4, 8) * 0.1)
        self.blocks, self.norm = nn.ModuleList(layer() for _ in range(2)), nn.LayerNorm(8)
        self.mask_token, self.decoder_embed = nn.Parameter(torch.zeros(1, 1, 8)), nn.Linear(8, 8)
        self.decoder_blocks, self.decoder_pred = nn.ModuleList(layer() for _ in range(2)), nn.Linear(8, 8)

    def random_masking(self, x: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        samples, length, width = x.shape
        keep = int(length * (1 - ratio))
        noise = torch.rand(samples, length, device=x.device)
        shuffled = torch.argsort(noise, dim=1)
        restored = torch.argsort(shuffled, dim=1)
        kept = torch.gather(x, 1, shuffled[:, :keep].unsqueeze(-1).repeat(1, 1, width))
        mask = torch.ones([samples, length], device=x.device)
        mask[:, :keep] = 0
        return kept, torch.gather(mask, 1, restored), restored

    def forward(self, imgs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, restored = self.random_masking(self.patch_embed(imgs) + self.pos_embed, 0.5)
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        tokens = self.mask_token.repeat(x.shape[0], restored.shape[1] - x.shape[1], 1)
        x = torch.gather(torch.cat([x, tokens], 1), 1, restored.unsqueeze(-1).repeat(1, 1, x.shape[2])) + self.pos_embed
        for block in self.decoder_blocks:
            x = block(x)
        pred = self.decoder_pred(x)
        target = (imgs - imgs.mean(-1, keepdim=True)) / (imgs.var(-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


class DinoHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 6))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 10, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class Crops(nn.Module):
    """DINO's wrapper: crops of two sizes, those of one size in one forward, all through one head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(2, 8), nn.ModuleList(Block() for _ in range(2)), DinoHead()

    def backbone(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h.mean(1)

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = torch.unique_consecutive(torch.tensor([one.shape[1] for one in crops]), return_counts=True)[1]
        start, found = 0, []
        for end in torch.cumsum(sizes, 0).tolist():
            found.append(self.backbone(torch.cat(crops[start:end])))
            start = end
        return self.head(torch.cat(found))


class MultiCrop(nn.Module):
    """Student, teacher and centre of DINO with two large and two small crops; `mean` and `keep` are the script's."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Crops()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, 10))

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        crops = [large[:, 0], large[:, 1], small[:, 0], small[:, 1]]
        student = self.online(crops) / 0.1
        with torch.no_grad():
            teacher = self.target(crops[:2])
        targets = ((teacher - self.center) / 0.04).softmax(-1).detach().chunk(2)
        total, terms = torch.zeros(len(large), dtype=large.dtype, device=large.device), 0
        for i, target in enumerate(targets):
            for j, output in enumerate(student.chunk(4)):
                if i != j:
                    total = total + torch.sum(-target * F.log_softmax(output, dim=-1), dim=-1)
                    terms += 1
        if self.training:
            self.update_center(teacher)
        return total / terms

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        mean = torch.sum(teacher, dim=0, keepdim=True) / len(teacher)
        self.center = self.center * 0.9 + mean * (1 - 0.9)


class MultiCropPort(MultiCrop):
    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        mean = samestep.batch_mean(sum(teacher.chunk(2)) / 2)[None]
        samestep.after_step(self.center, self.center * 0.9 + mean * (1 - 0.9))


def crops() -> Table:
    return Table(large=numbers(32, 2, 4, 2), small=numbers(32, 2, 2, 2, seed=1))


def sum_and_count(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    return outputs.sum(), outputs.numel()


class PointerMoco(Moco):
    """The queue as MoCo's code has it: columns that a pointer counts through, written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        query = F.normalize(self.online(first), dim=1)
        with torch.no_grad():
            key = F.normalize(self.target(second), dim=1)
        positive = torch.einsum("nc,nc->n", [query, key]).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", [query, self.queue.clone().detach()])
        if self.training:
            self.enqueue(key)
        return torch.cat([positive, negative], dim=1) / 0.2

    @torch.no_grad()
    def enqueue(self, key: Tensor) -> None:
        start = int(self.queue_ptr)
        self.queue[:, start : start + len(key)] = key.T
        self.queue_ptr[0] = (start + len(key)) % self.queue.shape[1]


class PointerMocoPort(PointerMoco):
    @torch.no_grad()
    def enqueue(self, key: Tensor) -> None:
        keys, size = samestep.batch_cat(key), self.queue.shape[1]
        places = (self.queue_ptr + torch.arange(len(keys), device=key.device)) % size
        samestep.after_step(self.queue, self.queue.clone().index_copy(1, places, keys.T))
        samestep.after_step(self.queue_ptr, (self.queue_ptr + len(keys)) % size)


def swav(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    """Swapped prediction of cluster assignments, which Sinkhorn's iterations balance over the batch (Caron et al. 2020)."""

    @torch.no_grad()
    def assigned(scores: Tensor) -> Tensor:
        q = (scores / 0.5).exp().T
        q = q / q.sum()
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / q.shape[0]
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).T

    first, second = outputs
    losses = [
        -(assigned(one) * F.log_softmax(other / 0.1, dim=1)).sum(1).mean()
        for one, other in ((first, second), (second, first))
    ]
    return sum(losses) / 2  # type: ignore[return-value]


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.prototypes = Encoder(), nn.Linear(8, 6, bias=False)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.prototypes(F.normalize(self.encoder(x), dim=1)) for x in (first, second))  # type: ignore[return-value]


def supcon(outputs: Tensor, batch: Any) -> Tensor:
    """Supervised contrastive loss (Khosla et al. 2020)."""
    z, labels = F.normalize(outputs, dim=1), batch["labels"]
    same = (labels[:, None] == labels[None]).to(z.dtype).fill_diagonal_(0)
    logits = z @ z.T / 0.5
    others = torch.exp(logits) * (1 - torch.eye(len(z), device=z.device, dtype=z.dtype))
    logprob = logits - others.sum(1, keepdim=True).log()
    return -((same * logprob).sum(1) / same.sum(1).clamp(min=1)).mean()


# -- losses that look at the batch -----------------------------------------------------------------


def hard_examples(outputs: Tensor, batch: Any) -> Tensor:
    """Online hard example mining: the mean of the largest half of all losses of a batch (Shrivastava et al. 2016)."""
    each = F.cross_entropy(outputs, batch["labels"], reduction="none")
    return each.topk(len(each) // 2).values.mean()


def focal(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The focal loss, divided by the number of anchors with an object (Lin et al. 2017)."""
    wanted = F.one_hot(batch["labels"], 5)[..., 1:].to(outputs.dtype)
    p = outputs.sigmoid()
    weight = torch.where(wanted == 1, 0.25 * (1 - p) ** 2, 0.75 * p**2)
    each = weight * F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
    return each.sum(), (batch["labels"] > 0).sum().clamp(min=1)


class Anchors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def anchors() -> Table:
    return Table(x=numbers(32, 3, 8), labels=whole_numbers(5, 32, 3))


def weighted(outputs: Tensor, batch: Any) -> Tensor:
    """Classes weighed by their frequency: torch divides by the sum of the weights of what it saw."""
    return F.cross_entropy(outputs, batch["labels"], weight=torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=outputs.dtype))


def weighted_sum(outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    weight = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=outputs.dtype, device=outputs.device)
    return F.cross_entropy(outputs, batch["labels"], weight=weight, reduction="sum"), weight[batch["labels"]].sum()


class Uncertain(nn.Module):
    """Two tasks whose weights are learned (Kendall et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = Encoder(), nn.Linear(8, 4), nn.Linear(8, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.gelu(self.body(x))
        return self.kind(h), self.size(h)[:, 0], self.log_vars


def sized() -> Table:
    return Table(x=numbers(32, 8), size=numbers(32, seed=1), labels=whole_numbers(4, 32))


def uncertain(outputs: tuple[Tensor, ...], batch: Any) -> Tensor:
    kinds, sizes = F.cross_entropy(outputs[0], batch["labels"]), F.mse_loss(outputs[1], batch["size"])
    return (torch.stack([kinds, sizes]) * (-outputs[2]).exp() + outputs[2]).sum()


def uncertain_sum(outputs: tuple[Tensor, ...], batch: Any) -> tuple[Tensor, int]:
    return uncertain(outputs, batch) * len(outputs[0]), len(outputs[0])


class ArcFace(nn.Module):
    """The margin of ArcFace in the head, which is given the labels (Deng et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.weight = Encoder(), nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(self.encoder(x)), F.normalize(self.weight)).clamp(-0.999, 0.999)
        angle = torch.acos(cosine)
        moved = torch.where(F.one_hot(kind, 4).bool(), torch.cos(angle + 0.3), cosine)
        return 8 * moved


def faces() -> Table:
    kinds = whole_numbers(4, 32)
    return Table(x=numbers(32, 8), kind=kinds, labels=kinds)


# -- detectors -------------------------------------------------------------------------------------


def overlap(boxes: Tensor, others: Tensor) -> Tensor:
    corner, end = (
        torch.maximum(boxes[:, None, :2], others[None, :, :2]),
        torch.minimum(boxes[:, None, 2:], others[None, :, 2:]),
    )
    common = (end - corner).clamp(min=0).prod(2)
    area = [(one[:, 2:] - one[:, :2]).clamp(min=0).prod(1) for one in (boxes, others)]
    return common / (area[0][:, None] + area[1][None] - common).clamp(min=1e-9)


def nms(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """The boxes that are kept, the likeliest first, without those that overlap one of them."""
    order, kept = scores.argsort(descending=True).tolist(), []
    pairs = overlap(boxes, boxes)
    for index in order:
        if all(float(pairs[index, other]) <= limit for other in kept):
            kept.append(index)
    return torch.tensor(kept, device=boxes.device)


class TwoStages(nn.Module):
    """Faster R-CNN in small: proposals by nms, boxes that are pooled, four losses from the forward; lists of images and dicts in."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(1, 8, 3, padding=1)
        self.rpn_score, self.rpn_box = nn.Linear(8, 1), nn.Linear(8, 4)
        self.fc, self.cls_score, self.bbox_pred = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {}
        for image, target in zip(images, targets, strict=True):
            features = F.relu(self.backbone(image[None]))[0]
            height, width = features.shape[1:]
            flat = features.flatten(1).T
            ys, xs = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            centres = torch.stack([xs, ys], -1).reshape(-1, 2).to(flat)
            anchors = torch.cat([centres - 1, centres + 1], 1)
            score, delta = self.rpn_score(flat)[:, 0], self.rpn_box(flat)
            is_object = (overlap(anchors, target["boxes"].to(flat)).amax(1) > 0.3).to(flat)
            with torch.no_grad():
                proposals = anchors + delta.detach().tanh()
                best = score.topk(6).indices
                kept = best[nms(proposals[best], score[best], 0.5)]
                which = overlap(proposals[kept], target["boxes"].to(flat))
                labels = torch.where(which.amax(1) > 0.1, target["labels"][which.argmax(1)], 0)
            pooled = F.relu(self.fc(flat[kept]))
            wanted = target["boxes"].to(flat)[which.argmax(1)]
            losses = {
                "objectness": F.binary_cross_entropy_with_logits(score, is_object),
                "rpn_box": F.smooth_l1_loss(
                    delta[is_object > 0], target["boxes"].to(flat)[:1].expand(int(is_object.sum()), 4)
                ),
                "classifier": F.cross_entropy(self.cls_score(pooled), labels),
                "box_reg": F.smooth_l1_loss(self.bbox_pred(pooled), wanted),
            }
            for name, loss in losses.items():
                found.setdefault(name, []).append(loss)
        return {name: torch.stack(each) for name, each in found.items()}


class Scenes(torch.utils.data.Dataset[Any]):
    """Images of three sizes, with one or two boxes and their classes."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 3.0, 4.0]], dtype=torch.float64)[: 1 + index % 2]
        return numbers(1, 4 + index % 3, 5, seed=index), {"boxes": boxes, "labels": torch.arange(len(boxes)) + 1}


def listed(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))


def scenes_loader() -> Any:
    return torch.utils.data.DataLoader(Scenes(), GLOBAL_BATCH, collate_fn=listed)


def detector_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for (images, targets), _step in zip(scenes_loader(), range(STEPS), strict=False):
        found = model(list(images), list(targets))
        loss = sum(one.mean() for one in found.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def detector_loss(outputs: dict[str, Tensor], batch: Any) -> Any:
    return {name: (one.sum(), len(one)) for name, one in outputs.items()}


def detector_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, detector_loss, sgd, forward=lambda net, batch: net(*batch))
    for batch in given.batches(scenes_loader()):
        given.losses.append(run.step(batch).loss)


def yolo_collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Images as one tensor, and boxes of all images in one, with the number of the image in front (YOLOv5)."""
    images, targets = zip(*samples, strict=True)
    rows = [
        torch.cat([torch.full((len(one), 1), float(i), dtype=torch.float64), one], 1) for i, one in enumerate(targets)
    ]
    return torch.stack(images), torch.cat(rows)


class Boxes(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return numbers(1, 4, 4, seed=index), numbers(1 + index % 3, 4, seed=100 + index).sigmoid()


class Yolo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 5, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(F.silu(self.body(images))).permute(0, 2, 3, 1)


def yolo_cells(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    image = targets[:, 0].long()
    x, y = (targets[:, 1:3] * 4).long().clamp(max=3).unbind(1)
    wanted = torch.zeros_like(outputs[..., 4]).index_put((image, y, x), outputs.new_ones(()))
    return outputs[image, y, x, :4], targets[:, 1:], wanted


def yolo_loss(outputs: Tensor, batch: Any) -> Tensor:
    boxes, targets, wanted = yolo_cells(outputs, batch[1])
    return F.mse_loss(boxes, targets) + F.binary_cross_entropy_with_logits(outputs[..., 4], wanted)


def yolo_terms(outputs: Tensor, batch: Any) -> Any:
    boxes, targets, wanted = yolo_cells(outputs, batch[1])
    objectness = F.binary_cross_entropy_with_logits(outputs[..., 4], wanted, reduction="sum")
    return {"box": (F.mse_loss(boxes, targets, reduction="sum"), boxes.numel()), "obj": (objectness, wanted.numel())}


def yolo_loader() -> Any:
    return torch.utils.data.DataLoader(Boxes(), GLOBAL_BATCH, collate_fn=yolo_collate)


def yolo_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses = sgd(model.parameters()), []
    for batch, _step in zip(yolo_loader(), range(STEPS), strict=False):
        loss = yolo_loss(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def yolo_port(given: Port, model: nn.Module) -> None:
    run = given.parallelize(model, yolo_terms, sgd)
    for batch in given.batches(yolo_loader()):
        given.losses.append(run.step(batch).loss)


# -- generation ------------------------------------------------------------------------------------


class Codebook(nn.Module):
    """A codebook whose moving averages become a new parameter in each forward, as a known notebook writes it."""

    def __init__(self) -> None:
        super().__init__()
        self._embedding = nn.Embedding(6, 4)
        self.register_buffer("_ema_cluster_size", torch.zeros(6))
        self._ema_w = nn.Parameter(torch.randn(6, 4))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        distances = (
            z.pow(2).sum(1, keepdim=True) + self._embedding.weight.pow(2).sum(1) - 2 * z @ self._embedding.weight.t()
        )
        encodings = torch.zeros(len(z), 6, device=z.device, dtype=z.dtype).scatter(
            1, distances.argmin(1, keepdim=True), 1
        )
        quantized = encodings @ self._embedding.weight
        if self.training:
            self.update(encodings, z)
        return z + (quantized - z).detach(), F.mse_loss(quantized.detach(), z, reduction="none").mean(1)

    def update(self, encodings: Tensor, z: Tensor) -> None:
        self._ema_cluster_size = self._ema_cluster_size * 0.9 + 0.1 * encodings.sum(0)
        n = self._ema_cluster_size.sum()
        self._ema_cluster_size = (self._ema_cluster_size + 1e-5) / (n + 6e-5) * n
        self._ema_w = nn.Parameter(self._ema_w * 0.9 + 0.1 * encodings.t() @ z)
        self._embedding.weight = nn.Parameter(self._ema_w / self._ema_cluster_size.unsqueeze(1))


class CodebookPort(Codebook):
    """The port: what moving averages make are buffers."""

    def __init__(self) -> None:
        super().__init__()
        weight, averages = self._embedding.weight.detach(), self._ema_w.detach()
        del self._embedding.weight, self._ema_w
        self._embedding.register_buffer("weight", weight)
        self.register_buffer("_ema_w", averages)

    def update(self, encodings: Tensor, z: Tensor) -> None:
        size = self._ema_cluster_size * 0.9 + 0.1 * samestep.batch_sum(encodings)
        n = size.sum()
        size = (size + 1e-5) / (n + 6e-5) * n
        w = self._ema_w * 0.9 + 0.1 * samestep.batch_sum(encodings[:, :, None] * z.detach()[:, None])
        samestep.after_step(self._ema_cluster_size, size)
        samestep.after_step(self._ema_w, w)
        samestep.after_step(self._embedding.weight, w / size.unsqueeze(1))


class VqVaeNotebook(nn.Module):
    codebook = Codebook

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.vq, self.decoder = Encoder(4), self.codebook(), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, commitment = self.vq(self.encoder(x))
        return self.decoder(quantized), commitment


class VqVaeNotebookPort(VqVaeNotebook):
    codebook = CodebookPort


def commitment(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return F.mse_loss(outputs[0], batch["x"]) + 0.25 * outputs[1].mean()


def commitment_sum(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return commitment(outputs, batch) * len(outputs[1]), len(outputs[1])


class Coupling(nn.Module):
    """An affine coupling (RealNVP, Dinh et al. 2017)."""

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.flip, self.net = flip, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1) if not self.flip else x.chunk(2, -1)[::-1]
        scale, shift = self.net(a).chunk(2, -1)
        b = b * torch.tanh(scale).exp() + shift
        return torch.cat([a, b] if not self.flip else [b, a], -1), logdet + torch.tanh(scale).sum(-1)


class RealNvp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        logdet = x.new_zeros(len(x))
        for flow in self.flows:
            x, logdet = flow(x, logdet)
        return -(-0.5 * (x.square() + math.log(2 * math.pi)).sum(-1) + logdet)


class FlowMatching(nn.Module):
    """A velocity field between noise and data, at times that the forward draws (Lipman et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.time = Encoder(8), nn.Linear(1, 8)

    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x), 1, device=x.device, dtype=x.dtype), torch.randn_like(x)
        return F.mse_loss(self.net((1 - t) * noise + t * x + self.time(t)), x - noise)


class UNet(nn.Module):
    """Convolutions with batch norm, skips and transposed convolutions (milesial/Pytorch-UNet)."""

    def __init__(self) -> None:
        super().__init__()
        double = lambda a, b: nn.Sequential(  # noqa: E731
            nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)
        )
        self.inc, self.down = double(1, 4), nn.Sequential(nn.MaxPool2d(2), double(4, 8))
        self.up, self.conv, self.outc = nn.ConvTranspose2d(8, 4, 2, stride=2), double(8, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.up(self.down(x1))
        x2 = F.pad(x2, [0, x1.shape[3] - x2.shape[3], 0, x1.shape[2] - x2.shape[2]])
        return self.outc(self.conv(torch.cat([x1, x2], 1)))[:, 0]


def bce_and_dice(outputs: Tensor, batch: Any) -> Tensor:
    p, y = outputs.sigmoid(), batch["labels"]
    inter, union = 2 * (p * y).sum(), p.sum() + y.sum()
    return F.binary_cross_entropy_with_logits(outputs, y) + 1 - (inter + 1e-6) / (union + 1e-6)


def masks() -> Table:
    return Table(x=numbers(32, 1, 7, 6), labels=(numbers(32, 7, 6, seed=1) > 0).double())


class SpectralGan(nn.Module):
    """A discriminator with spectral norm, whose vectors each forward moves."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(norm(nn.Linear(8, 16)), nn.LeakyReLU(0.2), norm(nn.Linear(16, 1)))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(nn.Linear(8, 16)), nn.ELU(), norm(nn.Linear(16, 8))) for _ in range(2)
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class CumulativeNorm(nn.Module):
    """Batch norm with momentum None: the mean over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """timm's: whole samples are left out of a residual branch."""
    if p == 0.0 or not training:
        return x
    keep = 1 - p
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    if keep > 0.0:
        mask.div_(keep)
    return x * mask


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 4)
        self.gammas = nn.ParameterList(nn.Parameter(torch.full((8,), 0.5)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for i, (block, gamma) in enumerate(zip(self.blocks, self.gammas, strict=True)):
            x = x + gamma * drop_path(block(x), 0.1 * i, self.training)
        return self.head(x)


class Nerf(nn.Module):
    """Rays that are sampled with jitter and rendered (Mildenhall et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        depth = torch.linspace(0.5, 2.0, 6, device=origin.device, dtype=origin.dtype).expand(len(origin), 6)
        depth = depth + torch.rand_like(depth) * 0.25
        at = origin[:, None] + direction[:, None] * depth[..., None]
        encoded = torch.cat([f(at * 2**k) for k in range(3) for f in (torch.sin, torch.cos)], -1)
        raw = self.net(encoded)
        step = F.pad(depth[:, 1:] - depth[:, :-1], (0, 1), value=1e10)
        alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * step)
        through = torch.cumprod(F.pad(1 - alpha + 1e-10, (1, 0), value=1.0), -1)[:, :-1]
        return ((alpha * through)[..., None] * raw[..., :3].sigmoid()).sum(1)


def rays() -> Table:
    return Table(
        origin=numbers(32, 3),
        direction=F.normalize(numbers(32, 3, seed=1), dim=1),
        labels=numbers(32, 3, seed=2).sigmoid(),
    )


def squares(outputs: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(outputs, batch["labels"])


class Derived(nn.Module):
    """A network of coordinates, whose derivative the loss takes (a PINN as its scripts have it)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, xt: Tensor) -> tuple[Tensor, Tensor]:
        xt = xt.requires_grad_(True)
        return self.net(xt), xt


def burgers(outputs: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    u, xt = outputs
    first = torch.autograd.grad(u, xt, torch.ones_like(u), create_graph=True)[0]
    second = torch.autograd.grad(first[:, :1], xt, torch.ones_like(u), create_graph=True)[0]
    residual = first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]
    return residual.square().sum(), len(u)


def burgers_mean(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    total, count = burgers(outputs, batch)
    return total / count


class Cutmix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def cut_by_hand() -> Any:
    """CutMix as loops have it: a box of another sample of the batch, and a loss of both labels (Yun et al. 2019)."""
    table, random = pictures().columns, torch.Generator().manual_seed(0)
    for step in range(STEPS):
        x, y = (table[name][step * 8 : step * 8 + 8].clone() for name in ("x", "labels"))
        order, top = torch.randperm(8, generator=random), int(torch.randint(0, 4, (), generator=random))
        x[:, :, top : top + 3, 1:4] = x[order][:, :, top : top + 3, 1:4]
        yield x, y, y[order], 1 - 9 / 36


def cutmix_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses = adam(model.parameters()), []
    for x, a, b, share in cut_by_hand():
        outputs = model(x)
        loss = F.cross_entropy(outputs, a) * share + F.cross_entropy(outputs, b) * (1 - share)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def cutmix_port(given: Port, model: nn.Module) -> None:
    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        _, a, b, share = batch
        total = F.cross_entropy(outputs, a, reduction="sum") * share
        return total + F.cross_entropy(outputs, b, reduction="sum") * (1 - share), len(outputs)

    run = given.parallelize(model, loss, adam, forward=lambda net, batch: net(batch[0]))
    for batch in cut_by_hand():
        given.losses.append(run.step(batch).loss)


# -- objects as batches ----------------------------------------------------------------------------


@dataclass
class Graph:
    """What a graph library's batch is: an object with tensors as attributes."""

    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor

    def to(self, device: Any) -> Graph:
        return Graph(*(one.to(device) for one in vars(self).values()))


class GraphBatch:
    """The same as a plain object, which torch's containers do not know."""

    def __init__(self, graphs: list[Graph]) -> None:
        sizes = [len(one.x) for one in graphs]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.x, self.y = torch.cat([one.x for one in graphs]), torch.cat([one.y for one in graphs])
        self.edge_index = torch.cat([one.edge_index + offset for one, offset in zip(graphs, offsets, strict=True)], 1)
        self.batch, self.num_graphs = torch.repeat_interleave(torch.tensor(sizes)), len(graphs)

    def to(self, device: Any) -> GraphBatch:
        for name, value in vars(self).items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        return self


class Molecules(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Graph:
        nodes = 3 + index % 4
        edges = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
        return Graph(
            numbers(nodes, 8, seed=index), edges, torch.zeros(nodes, dtype=torch.int64), torch.tensor([index % 4])
        )


class Gin(nn.Module):
    """Sums over neighbours, batch norm over nodes of all graphs, and a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, data: Any) -> Tensor:
        x = data.x
        for layer in (self.first, self.second):
            x = F.relu(
                self.norm(layer(x + torch.zeros_like(x).index_add(0, data.edge_index[1], x[data.edge_index[0]])))
            )
        number = data.num_graphs
        total = x.new_zeros(number, 8).index_add(0, data.batch, x)
        nodes = x.new_zeros(number).index_add(0, data.batch, x.new_ones(len(x)))
        return self.head(total / nodes[:, None])


def molecule_loader() -> Any:
    return torch.utils.data.DataLoader(Molecules(), GLOBAL_BATCH, collate_fn=GraphBatch)


def graphs_plain(model: nn.Module, _: list[Any]) -> list[float]:
    optimizer, losses = adam(model.parameters()), []
    for data, _step in zip(molecule_loader(), range(STEPS), strict=False):
        loss = F.cross_entropy(model(data), data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def graphs_port(given: Port, model: nn.Module) -> None:
    def loss(outputs: Tensor, data: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(outputs, data.y, reduction="sum"), len(data.y)

    run = given.parallelize(model, loss, adam)
    for batch in given.batches(molecule_loader()):
        given.losses.append(run.step(batch).loss)


# -- generators with an average --------------------------------------------------------------------


def style_networks() -> dict[str, nn.Module]:
    return {"d": SpectralGan(), "g": Encoder(8)}


def noises() -> Table:
    return Table(x=numbers(32, 8) + 0.5, z=numbers(32, 8, seed=1))


def fakes(models: Any, batch: Any) -> dict[str, Tensor]:
    return {"real": models["d"](batch["x"]), "fake": models["d"](models["g"](batch["z"]))}


def spectral_plain(models: dict[str, nn.Module], batches: list[Any]) -> list[float]:
    d, g = models["d"], models["g"]
    of_d, of_g, losses = adam(d.parameters()), adam(g.parameters()), []
    for batch in batches:
        total, count = critic_sum(fakes(models, batch), batch)
        of_d.zero_grad()
        (total / count).backward()
        of_d.step()
        losses.append((total / count).item())
        total, count = generator_sum(fakes(models, batch), batch)
        of_g.zero_grad()
        (total / count).backward()
        of_g.step()
        losses.append((total / count).item())
    return losses


def spectral_port(given: Port, models: Any) -> None:
    run = given.parallelize(models, critic_sum, {"d": adam, "g": adam}, forward=fakes)
    for batch in given.batches():
        given.losses.append(run.backward(batch, critic_sum, into="d").loss)
        run.update("d")
        given.losses.append(run.backward(batch, generator_sum, into="g").loss)
        run.update("g")


KINDS = [
    returned("MAE, whole", Mae, lambda: Table(imgs=numbers(32, 4, 8)), draws=True),
    port_of(usual("DINO with crops", MultiCrop, crops, lambda o, b: o.mean(), sum_and_count, each=follow), MultiCropPort),
    port_of(usual("MoCo with a pointer", PointerMoco, views, first_class, first_class_sum, each=follow), PointerMocoPort),
    usual("SwAV", Prototypes, views, swav, whole(swav)),
    usual("supervised contrast", Encoder, points, supcon, whole(supcon)),
    usual("hard examples", lambda: Encoder(4), points, hard_examples, whole(hard_examples)),
    usual("focal loss by positives", Anchors, anchors, lambda o, b: focal(o, b)[0] / focal(o, b)[1], focal),
    usual("weighted classes", lambda: Encoder(4), points, weighted, weighted_sum),
    usual("learned weights of tasks", Uncertain, sized, uncertain, uncertain_sum),
    usual("ArcFace", ArcFace, faces, cross_entropy, "cross_entropy"),
    Kind("Faster R-CNN with nms", TwoStages, points, detector_plain, detector_port, DATA),
    Kind("YOLO", Yolo, points, yolo_plain, yolo_port, DATA),
    port_of(usual("VQ-VAE with new parameters", VqVaeNotebook, lambda: Table(x=numbers(32, 8)), commitment, commitment_sum), VqVaeNotebookPort),
    usual("normalizing flow", RealNvp, lambda: Table(x=numbers(32, 8)), lambda o, b: o.mean(), sum_and_count),
    returned("flow matching", FlowMatching, lambda: Table(x=numbers(32, 8)), draws=True),
    usual("U-Net with dice", UNet, masks, bce_and_dice, whole(bce_and_dice), sgd, layouts=DATA),
    Kind("GAN with spectral norm", style_networks, noises, spectral_plain, spectral_port),
    usual("weight norm", WeightNormed, points, cross_entropy, "cross_entropy"),
    usual("batch norm without momentum", CumulativeNorm, pictures, cross_entropy, "cross_entropy", sgd, layouts=DATA),
    usual("stochastic depth", StochasticDepth, points, cross_entropy, "cross_entropy", draws=True),
    usual("NeRF", Nerf, rays, squares, "mse", layouts=DATA, draws=True),
    usual("PINN with gradients in the loss", Derived, lambda: Table(xt=numbers(32, 2)), burgers_mean, burgers, layouts=DATA),
    Kind("CutMix", Cutmix, pictures, cutmix_plain, cutmix_port),
    Kind("objects as batches", Gin, points, graphs_plain, graphs_port, DATA),
]  # fmt: skip
