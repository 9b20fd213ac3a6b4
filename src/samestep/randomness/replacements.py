"""Replacements of torch's random functions: dropouts take masks from a `MaskSource`, distributions (`distributions.py`)
hashed bits, and other functions are refused.

`HANDLERS` has the replacement of each function; it is called with the source of masks, the function, and its arguments.

A function mode calls Python for each operation of torch, and a dozen times for each of torch's functions in Python, although a model
may call only two functions that draw. So if a model's forwards draw by `F.dropout` and `F.scaled_dot_product_attention` alone,
these names are their replacements while a forward runs (`DrawsByName`), and there is no mode:

    first forward    under both: a function that reaches the mode has no name here or was called by another one, such as an attribute
    later            by names alone, or if there was such a function, under the mode

A draw by any other function changes the state of a generator of the process, which is compared after the forward
(`guards/randomness.py`): the step is then taken once more, and all later ones under the mode.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.attention import AttentionCall, multi_head_attention
from samestep.building.torch_seams import Replaced, is_transformed
from samestep.kernels import kernel_choice
from samestep.randomness.distributions import DRAWS
from samestep.randomness.masks import MaskSource, dropped_weights

_SELU_ALPHA = 1.7580993408473766  # alpha * scale of SELU, which alpha_dropout puts in place of a dropped element


@dataclass(frozen=True, slots=True)
class _DropoutKind:
    """A member of the family of dropouts."""

    channels: bool = False
    """Whether whole channels (dimension 1) are dropped instead of elements."""
    alpha: bool = False
    """Whether mean and variance of SELU's outputs are kept."""
    min_dims: int = 1
    """Least number of dimensions of an input with a batch."""


def _drop_elements(mode: MaskSource, what: str, kind: _DropoutKind, x: Tensor, p: float, inplace: bool) -> Tensor:
    """Drop elements of `x` with probability p and scale the others; the backward is exact, and keeps the bool mask,
    or draws it anew where a kernel drops them."""
    if x.dim() < kind.min_dims:
        raise mode.refuse(
            f"{what} of a tensor with {x.dim()} dimensions has no batch. Use {kind.min_dims} or more dimensions"
        )
    if (x.is_cuda or kernel_choice.IS_INTERPRETED) and not kind.channels and not kind.alpha:
        dropped = mode.drop_elements(x, p, what, inplace=inplace)
        if dropped is not None:
            return dropped
    drop = mode.drop(x, x.shape[:2] if kind.channels else x.shape, p, what)
    if kind.channels:
        drop = drop.view(*x.shape[:2], *(1,) * (x.dim() - 2))
    if not kind.alpha:
        undropped = x.masked_fill_(drop, 0.0) if inplace else x.masked_fill(drop, 0.0)
        return undropped.mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)
    if p >= 1.0:
        return x.masked_fill_(drop, 0.0) if inplace else x.masked_fill(drop, 0.0)
    a = 1.0 / math.sqrt((_SELU_ALPHA**2 * p + 1.0) * (1.0 - p))
    filled = x.masked_fill_(drop, -_SELU_ALPHA) if inplace else x.masked_fill(drop, -_SELU_ALPHA)
    return filled.mul_(a).add_(_SELU_ALPHA * a * p)


def _functional(kind: _DropoutKind) -> Callable[..., Tensor]:
    """Return the handler of `torch.nn.functional.dropout` and similar functions."""

    def handler(
        mode: MaskSource,
        func: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        return _drop_elements(mode, func.__name__, kind, input, p, inplace)

    return handler


def _native(kind: _DropoutKind, inplace: bool) -> Callable[..., Tensor]:
    """Return the handler of `torch.dropout`, `torch.dropout_` and similar functions."""

    def handler(mode: MaskSource, func: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
        return input if not train or p == 0 else _drop_elements(mode, func.__name__, kind, input, p, inplace)

    return handler


def _attention(mode: MaskSource, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Handle `scaled_dot_product_attention`: with dropout, by the formula; without, the fused kernel runs."""
    call = AttentionCall(*args, **kwargs)
    if call.dropout_p == 0.0:
        return call.run(func)
    if call.is_causal and call.attn_mask is not None:
        raise mode.refuse("attention with both attn_mask and is_causal. Use one of them")
    return call.attend(dropped_weights(call, mode, call.key.size(-2)))


def _multi_head_attention(
    mode: AbstractContextManager[Any], func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Handle `F.multi_head_attention_forward`: run it with the mode active inside."""
    return multi_head_attention(mode, *args, **kwargs)


def _recurrent(mode: MaskSource, func: Callable[..., Any], /, *args: Any) -> Any:
    """Handle torch's recurrent layers: with dropout, run one layer at a time, and drop elements of the inputs of
    later layers."""
    # (input, [batch_sizes,] hx, weights, has_biases, num_layers, dropout, train, ...): has_biases is the first bool.
    first = next(i for i, arg in enumerate(args) if isinstance(arg, bool))
    has_biases, num_layers, dropout, train, *form = args[first:]
    if not (train and dropout > 0 and num_layers > 1):
        return func(*args)
    if first > 3:
        if mode.allows_random:
            return func(*args)
        raise mode.refuse(
            f"torch's {func.__name__} with dropout={dropout} on a packed sequence, which hides the sample of each row. Use "
            "padded sequences, or dropout=0"
        )
    x, state, weights = args[:first]
    states = state if isinstance(state, list | tuple) else (state,)  # those of an lstm are two
    ends = []
    for layer in range(num_layers):
        states_here = [part.chunk(num_layers)[layer] for part in states]
        first_state = states_here if isinstance(state, list | tuple) else states_here[0]
        each = len(weights) // num_layers
        x, *end = func(x, first_state, weights[layer * each :][:each], has_biases, 1, 0.0, train, *form)
        ends.append(end)
        if layer + 1 < num_layers:
            x = _drop_elements(mode, func.__name__, _DropoutKind(), x, dropout, inplace=False)
    return (x, *map(torch.cat, zip(*ends, strict=True)))


def _refuse_random(mode: MaskSource, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Refuse random numbers that samestep cannot make the same in every layout, unless the user allows them."""
    if mode.allows_random:
        return func(*args, **kwargs)
    name = _NAMES.get(func.__name__, func.__name__)
    raise mode.refuse(
        f"{name}: its random numbers would differ between layouts. Use torch.rand, randn, randint, normal, bernoulli, "
        "multinomial, exponential_ and functions like them, or nn.Dropout, torch.nn.functional.dropout*, the dropout_p of "
        "attention and numbers that the data set draws"
    )


# Functions of torch, torch.Tensor, torch.nn.functional and torch.nn.init that a forward may not call, but for those of DRAWS.
_REFUSED = """
    binomial poisson _standard_gamma _sample_dirichlet native_dropout rrelu_with_noise rrelu_with_noise_ sparse_ fractional_max_pool2d fractional_max_pool3d
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices _fused_dropout
    uniform_ normal_ kaiming_normal_ kaiming_uniform_ trunc_normal_ xavier_normal_ xavier_uniform_ orthogonal_ svd_lowrank pca_lowrank lobpcg
"""

_NAMES = {
    "fn": "fractional_max_pool",
    "_standard_gamma": "a gamma distribution",
    "_sample_dirichlet": "a beta or Dirichlet distribution",
}
"""What a message calls functions whose own names say little."""


def _handlers() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the handler of each function that the mode intercepts."""
    homes = (torch, torch.Tensor, F, nn.init)
    handlers: dict[Callable[..., Any], Callable[..., Any]] = {
        getattr(home, name): _refuse_random for home in homes for name in _REFUSED.split() if hasattr(home, name)
    }
    handlers |= DRAWS
    handlers |= {getattr(torch, name): _recurrent for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    for name, kind in {
        "dropout": _DropoutKind(),
        "alpha_dropout": _DropoutKind(alpha=True),
        "feature_dropout": _DropoutKind(channels=True, min_dims=2),
        "feature_alpha_dropout": _DropoutKind(channels=True, alpha=True, min_dims=2),
        "dropout1d": _DropoutKind(channels=True, min_dims=3),
        "dropout2d": _DropoutKind(channels=True, min_dims=3),
        "dropout3d": _DropoutKind(channels=True, min_dims=5),
    }.items():
        if hasattr(F, name):
            handlers[getattr(F, name)] = _functional(kind)
        if hasattr(torch, name):
            handlers[getattr(torch, name)] = _native(kind, inplace=False)
            handlers[getattr(torch, f"{name}_")] = _native(kind, inplace=True)
    handlers[F.scaled_dot_product_attention] = _attention
    handlers[F.multi_head_attention_forward] = _multi_head_attention
    return handlers


HANDLERS = _handlers()
"""The replacement of each function that a mode intercepts."""
DROPPING = frozenset(
    function
    for function, handler in HANDLERS.items()
    if handler is _attention or handler.__qualname__.startswith((_functional.__name__, _native.__name__))
)
"""The functions whose replacement draws one mask."""


_NAMED = ("dropout", "scaled_dot_product_attention")
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(getattr(F, name) for name in _NAMED)
_PLACES = frozenset(map(id, _FUNCTIONS))
_ACTIVE: list[tuple[int, MaskSource, DrawsByName]] = []
"""The sources that draw by name, innermost last, each with the thread of its forward."""
WITHIN_TRANSFORM = (
    "random numbers inside of a transform of torch.func, which hides the samples. Use dropout "
    "before or after torch.vmap"
)


@dataclass(slots=True, eq=False)
class DrawsByName:
    """The state of one model that says how its draws are seen; its training forwards change it.

    the first    names stand for replacements, and the mode notes the draws that reach it in another way
    later        names alone, or if there were such draws, the mode alone
    """

    is_tried: bool = False
    """Whether a forward that drew something has shown which."""
    needs_mode: bool = False
    """Whether a function that has no name here draws, or was called by another name."""
    depth: int = 0
    """The number of replacements that run, whose own calls of torch's functions are no draws."""
    _names: Replaced | None = None

    def end_forward(self) -> None:
        """Decide how later forwards are watched, since this one drew something."""
        self.is_tried = True

    def note(self, function: Callable[..., Any]) -> None:
        """Note a function that has reached the mode although its name is bound to a replacement: torch's function passes on what has its name."""
        if function in HANDLERS or getattr(function, "__wrapped__", None) in _FUNCTIONS:
            self.needs_mode |= not self.depth

    def give_up(self) -> bool:
        """See all later forwards by the mode; return whether this one was not."""
        was_by_names = self.is_tried and not self.needs_mode
        self.is_tried = self.needs_mode = True
        return was_by_names

    def enter(self, source: MaskSource, model: nn.Module) -> None:
        """Let the names be replacements that draw from a source, on this thread."""
        self._names = self._names or _names_in(model)
        _ACTIVE.append((threading.get_ident(), source, self))
        self._names.__enter__()

    def leave(self) -> None:
        """Let the names be what they were."""
        assert self._names is not None
        self._names.__exit__()
        _ACTIVE.pop()


def _names_in(model: nn.Module) -> Replaced:
    """Return a context inside which the functions are replacements, in torch and where the code of a model has imported them."""
    homes = {F.__name__: F} | {
        name: sys.modules[name]
        for name in {kind.__module__ for kind in map(type, model.modules())}
        if name in sys.modules
    }
    return Replaced(
        *(
            (home, name, functools.partial(_replacing, value))
            for home in homes.values()
            for name, value in vars(home).items()
            if id(value) in _PLACES
        )
    )


@functools.cache
def _replacement(function: Callable[..., Any]) -> Callable[..., Any]:
    handler = HANDLERS[function]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _ACTIVE:
            return function(*args, **kwargs)
        thread, source, names = _ACTIVE[-1]
        if thread != threading.get_ident():
            return function(*args, **kwargs)
        if is_transformed():
            raise source.refuse(WITHIN_TRANSFORM)
        names.depth += 1
        try:
            return handler(source, function, *args, **kwargs)
        finally:
            names.depth -= 1

    return call


def _replacing(function: Callable[..., Any], _: Any) -> Callable[..., Any]:
    return _replacement(function)
