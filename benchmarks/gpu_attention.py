"""Attention with dropout on a GPU, by our kernels, held against the float64 formula with the same masks on the CPU.

forms     outputs and gradients, in each dtype and for heads of each width that has blocks of its own
masks     equal scores and values that are unit vectors show which weights are kept, which are those of the CPU in every bit
memory    a forward and its backward over so many tokens that one byte for each pair of them would show
again     a repetition has equal bits
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall
from samestep.building.attention.carriers import Asked, carrier_of
from samestep.randomness.masks import dropped_weights
from samestep.randomness.mode import Draw, DropoutMode
from samestep.runtime.processes.join import resolve_device

LIMITS = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
"""Largest error of an output or a gradient, of its largest element or of 1."""
KERNELS = "dropped flash"
LONG = 8192
"""Tokens of the attention whose memory is measured."""


class Form(NamedTuple):
    """An attention: its heads, heads of keys, queries, keys and features, and what its call says."""

    sizes: tuple[int, int, int, int, int] = (4, 2, 200, 200, 64)
    call: Mapping[str, Any] = MappingProxyType({})
    p: float = 0.1


PADDING = (torch.arange(200) < torch.tensor([[200], [77]]))[:, None, None]
FORMS: dict[str, Form] = {
    "causal": Form(call={"is_causal": True}),
    "all": Form((4, 4, 130, 200, 64), p=0.5),
    "window": Form((4, 2, 200, 200, 40), {"is_causal": True, "window": 50}),
    "padding": Form(call={"attn_mask": PADDING}),
    "wide": Form((4, 2, 200, 200, 128), {"is_causal": True}),
    "widest": Form((2, 1, 130, 130, 256), {"is_causal": True}, 0.3),
}


class Attention(nn.Module):
    """An attention with dropout, and the name of the carrier that computes it."""

    carrier = ""

    def forward(self, call: AttentionCall) -> Tensor:
        """Return the output."""
        dropped = dropped_weights(call, None, call.key.shape[2])
        asked = Asked(*call[:3], call.spec(dropped))
        self.carrier = carrier_of(asked).name
        return call.attend(dropped)


def attended(tensors: Sequence[Tensor], form: Form, model: Attention) -> list[Tensor]:
    """Return the output of an attention of queries, keys and values, and their gradients given that of the output."""
    leaves = [one.detach().requires_grad_() for one in tensors[:3]]
    words = {name: one.to(leaves[0].device) if isinstance(one, Tensor) else one for name, one in form.call.items()}
    samples = torch.tensor([3, 2**40 + 1])[: leaves[0].shape[0]]
    with DropoutMode(model, Draw(7, 2, samples)):
        output = model(AttentionCall(*leaves, dropout_p=form.p, enable_gqa=form.sizes[0] != form.sizes[1], **words))
    output.backward(tensors[3])
    return [output.detach(), *(one.grad for one in leaves if one.grad is not None)]


def numbers(form: Form, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output, on the CPU."""
    heads, shared, num_queries, num_keys, width = form.sizes
    shapes = [(heads, num_queries), (shared, num_keys), (shared, num_keys), (heads, num_queries)]
    draw = torch.Generator().manual_seed(11)
    return [torch.randn(2, some, tokens, width, generator=draw).to(dtype) for some, tokens in shapes]


def wrong_attentions(kind: str) -> Iterator[str]:
    """Yield what our kernels compute wrong on a kind of device; on CPUs they do not run."""
    if resolve_device(kind) != "cuda":
        return
    device = torch.device("cuda", torch.cuda.current_device())
    for name, form in FORMS.items():
        for dtype, limit in LIMITS.items():
            given, model = numbers(form, dtype), Attention()
            expected = attended([one.double() for one in given], form, Attention())
            on_device = [one.to(device) for one in given]
            found = attended(on_device, form, model)
            what = f"attention {name!r} in {dtype}"
            if model.carrier != KERNELS:
                yield f"{what} is computed by {model.carrier!r}"
            for part, ours, theirs in zip(("output", "dQ", "dK", "dV"), found, expected, strict=True):
                error = float((ours.cpu().double() - theirs).abs().max() / theirs.abs().max().clamp_min(1.0))
                if not error < limit:
                    yield f"{part} of {what} is off by {error:.2g}"
            if any(not torch.equal(*pair) for pair in zip(found, attended(on_device, form, model), strict=True)):
                yield f"{what}: a repetition has other bits"
    yield from wrong_masks(device)
    yield from wrong_memory(device)


def wrong_masks(device: torch.device) -> Iterator[str]:
    """Yield the probabilities at which the kernel keeps other weights than the CPU."""
    for p in (1e-4, 0.1, 0.5, 0.9):
        form = Form((3, 3, 300, 256, 256), p=p)
        query, key, value, gradient = numbers(form, torch.float32)
        equal = [torch.zeros_like(query), key, torch.eye(256).expand_as(value), gradient]
        kept = [attended([one.to(place) for one in equal], form, Attention())[0].cpu() > 0 for place in (device, "cpu")]
        if not torch.equal(*kept):
            yield f"masks of p={p} differ in {int((kept[0] != kept[1]).sum())} of {kept[0].numel()} weights"


def wrong_memory(device: torch.device) -> Iterator[str]:
    """Yield the bytes of a forward and backward, where they hold one for each pair of tokens."""
    form = Form((8, 8, LONG, LONG, 64), {"is_causal": True})
    given = [one[:1].to(device) for one in numbers(form, torch.bfloat16)]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attended(given, form, Attention())
    peak = torch.cuda.max_memory_allocated(device) - before
    if peak >= 8 * LONG**2:
        yield f"attention of {LONG} tokens holds {peak} bytes, and one byte for each weight is {8 * LONG**2}"
