"""Hooks on gradients, of weights, tensors and modules: each acts once, on what it acts on in a plain loop, or is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import ModelError
from tests.code.rows import Equal, Refused, entered, learned
from tests.models import VOCABULARY

WIDTH = 8
Hook = Callable[[Tensor], Any]


def to_unit_norm(gradient: Tensor) -> Tensor:
    return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-12)


def clipped_to_a_norm(gradient: Tensor) -> Tensor:
    return gradient * (100.0 / (gradient.norm(dim=-1, keepdim=True) + 1e-12)).clamp(max=1.0)


def by_its_largest(gradient: Tensor) -> Tensor:
    return gradient / gradient.abs().amax(-1, keepdim=True).clamp(min=1e-12)


def limited(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def tripled(gradient: Tensor) -> Tensor:
    return 3 * gradient


def skipped_beyond_50(gradient: Tensor) -> Tensor:
    return gradient * (gradient.norm() < 50)


def chosen_by_size(gradient: Tensor) -> Tensor:
    return torch.where(gradient.abs() > 50, 0, gradient)


def looked_at(gradient: Tensor) -> Tensor:
    return gradient if gradient.norm() < 50 else 0 * gradient


def logged(gradient: Tensor) -> None:
    LOGGED.append(gradient.norm().item())


LOGGED: list[float] = []


class Counted:
    """Halves gradients from a number of calls on."""

    def __init__(self, first: int) -> None:
        self.first, self.calls, self.__name__ = first, 0, f"halved after {first} calls"

    def __call__(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * (0.5 if self.calls > self.first else 1.0)


def counting(first: int) -> Hook:
    """Return the same as a function, whose number of calls is in a dict of its closure."""
    seen = {"calls": 0}

    def hook(gradient: Tensor) -> Tensor:
        seen["calls"] += 1
        return gradient if seen["calls"] < first else gradient * 0.5

    hook.__name__ = f"halved from call {first} on"
    return hook


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.each: Hook | None = None
        self.several, self.mode = 0, "all"
        """The tensors whose gradients one hook is given; 0 for a hook on each tensor."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        seen = [x]
        for block in self.blocks:
            x = block(x)
            seen.append(x)
            if self.each is not None and not self.several:
                x.register_hook(self.each)
            elif self.several == 1 and x.requires_grad:
                self._on_several([x])
        if self.several > 1 and x.requires_grad:
            self._on_several(seen[-self.several :])
        return x

    def _on_several(self, tensors: list[Tensor]) -> None:
        """Let the hook write into the gradients of some tensors."""

        def write(gradients: Sequence[Tensor]) -> None:
            for gradient in gradients:
                gradient.copy_(self.each(gradient))

        if self.mode == "all":
            torch.autograd.graph.register_multi_grad_hook(tensors, write)
        else:
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda first: write([first]), mode="any")


class Hooked(nn.Module):
    """A body of blocks, and a head; a hook is put on a gradient in one of several ways."""

    def __init__(self, how: str, hook: Hook) -> None:
        super().__init__()
        hook = copy.deepcopy(hook)  # whose number of calls is that of one row
        self.body, self.head, self.how, self.hook = Body(), nn.Linear(WIDTH, VOCABULARY), how, hook
        act, last = self.body.blocks[0].act, self.body.blocks[0]
        if how == "each block":
            self.body.each = hook
        if how.startswith("written"):
            self.body.each, self.body.several = hook, int(how.split()[-1])
            self.body.mode = "any" if how.startswith("written first") else "all"
        if how == "activation":
            act.register_forward_hook(self._on_output)
        if how == "full":
            act.register_full_backward_hook(lambda _, given, __: (hook(given[0]),))
        if how == "seen in full":
            last.register_full_backward_hook(lambda _, __, above: hook(above[0]))
        if how == "before":
            act.register_full_backward_pre_hook(lambda _, above: (hook(above[0]),))
        if how == "last of a stage":
            last.register_full_backward_hook(lambda _, given, __: (hook(given[0]),))
        on_weights = {
            "weights": lambda: hook,
            "weights apart": lambda: lambda g: hook(g),
            "weights by a method": lambda: self._method,
        }
        for param in self.parameters() if how in on_weights else ():
            param.register_hook(on_weights[how]())

    def _method(self, gradient: Tensor) -> Tensor:
        return self.hook(gradient)

    def _on_output(self, _: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.hook)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.body(input_ids)
        if self.how == "result" and x.requires_grad:
            x.register_hook(self.hook)
        if self.how == "node" and x.requires_grad:
            x.grad_fn.register_hook(lambda given, _: tuple(None if one is None else self.hook(one) for one in given))
        if self.how == "before a node" and x.requires_grad:
            x.grad_fn.register_prehook(lambda above: tuple(map(self.hook, above)))
        if self.how == "several" and x.requires_grad:
            torch.autograd.graph.register_multi_grad_hook([x], lambda given: given[0].copy_(self.hook(given[0])))
        return self.head(x)


class Containers(nn.Module):
    """Blocks that are containers, of which the model's own code reads an item, counts the items, or goes through them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.head, self.how = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), how
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.how == "indexed":
                factor = block[1].weight.square().mean()
            elif self.how == "counted":
                factor = 1 / len(block) if block and nn.ReLU not in map(type, block) else 0.0
            else:
                factor = sum(part.weight.square().mean() for part in block)
            x = x + block(x) * factor
        return self.head(x)


@functools.cache
def _code(how: str, hook: Hook) -> str:
    return entered(f"hooks {how} {hook.__name__}", learned(functools.partial(Hooked, how, hook), steps=2))


@functools.cache
def _containers(how: str) -> str:
    return entered(f"hooks containers {how}", learned(functools.partial(Containers, how), steps=2))


UNIT_NORM, TRIPLED = _code("activation", to_unit_norm), _code("result", tripled)
STAGES = "pp=2 microbatch=4"
LATE = Counted(15)
EQUAL = [
    *(Equal("tp=2", _code("activation", hook)) for hook in (to_unit_norm, limited)),
    Equal("tp=2", _code("full", clipped_to_a_norm)),
    Equal("tp=2 recompute=full", _code("before", by_its_largest)),
    *(Equal(STAGES, _code("result", hook)) for hook in (tripled, to_unit_norm)),
    Equal(STAGES, _code("each block", tripled)),
    Equal(STAGES, _code("written by 1", to_unit_norm)),
    Equal("pp=2 microbatch=4 schedule=gpipe", _code("written by 1", limited)),
    Equal("dp=2", _code("written by 2", tripled), is_nightly=True),
    Equal(STAGES, _code("last of a stage", to_unit_norm)),
    *(Equal("dp=2", _code(how, logged)) for how in ("weights", "result", "seen in full")),
    *(Equal(layout, _code("weights", logged)) for layout in ("tp=2", "dp=1 microbatch=4")),
    *(Equal("dp=2", _code("weights", hook)) for hook in (LATE, counting(20))),
    Equal("dp=2", _code("weights apart", LATE)),
    *(Equal(STAGES, _containers(how)) for how in ("indexed", "counted", "iterated")),
]
REFUSED = [
    *(
        Refused(
            layout,
            _code("weights", hook),
            r"hook on the gradient of \S+ is not linear.*one rank with one micro-batch",
            ModelError,
        )
        for layout, hook in (("dp=2", skipped_beyond_50), ("tp=2", chosen_by_size), ("dp=1 microbatch=4", looked_at))
    ),
    *(
        Refused("dp=1 microbatch=4", _code("weights", hook), "depends on the number of its calls", ModelError)
        for hook in (Counted(30), counting(5))
    ),
    Refused("dp=2 zero=3", _code("weights", Counted(4)), "zero=3 calls it for .* in another order", ModelError),
    *(
        Refused("pp=2 microbatch=8", _code(how, hook), "pp=2 calls it for the weights of a stage alone", ModelError)
        for how, hook in (("weights", LATE), ("weights by a method", Counted(21)), ("weights apart", counting(23)))
    ),
    Refused("dp=2", _code("result", skipped_beyond_50), "influence each other by a hook on a gradient"),
    *(
        Refused("dp=1 microbatch=4", _code(how, skipped_beyond_50), words)
        for how, words in (
            ("node", r"grad_fn\.register_hook"),
            ("before a node", r"Use a hook on a tensor \(x\.register_hook\)"),
            ("several", "influence each other by a hook on several gradients"),
        )
    ),
    *(
        Refused(STAGES, _code(f"written {words} {number}", tripled), r"one hook is given gradients of both sides")
        for words, number in (("by", 2), ("first by", 2))
    ),
    Refused("dp=2", _code("result", looked_at), "by a hook on a gradient, which looks at its values"),
]
