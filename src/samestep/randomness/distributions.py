"""Random numbers of a forward as functions of their place: the distributions that torch's functions draw from.

Each element has 32 hashed bits h, an int32, computed like those of a dropout mask (`masks.py`). A distribution is one
function of them, so a number is the same on one device, in every cut of the batch or of the tensor, on every stage, and
when a forward is repeated. Distributions that are not uniform are the inverse of their cumulative distribution:

    u = (h >> 8) / 2^24 + 1/2                      in [0, 1), as many bits as the dtype holds
    v = ((h >> 9) + 1/2) / 2^22                    in (-1, 1), symmetric, exact in float32
    normal         sqrt(2) erfinv(v)               exponential   -log((1 + v) / 2) / lambda
    cauchy         median + sigma tan(pi v / 2)    geometric     ceil(log((1 + v) / 2) / log(1 - p))
    integers       low + floor(n (h + 2^31) / 2^32)
    choices        the largest of p / exponential without replacement (Efraimidis and Spirakis 2006), else the inverse
                   of the cumulative sum at u

They are computed in at least float32 and then cast, so that bf16 has float32's numbers, rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import ModelError
from samestep.randomness.masks import MaskSource

_BITS = {torch.bfloat16: 8, torch.float16: 11}
"""Bits of a uniform number in dtypes that cannot hold 24."""


def _uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1), none of which the dtype rounds up to 1."""
    num_bits = _BITS.get(dtype, 24)
    number = ((bits >> 8) + 2**23) >> (24 - num_bits)
    return (number.to(_compute_dtype(dtype)) * 2.0**-num_bits).to(dtype)


def _centred_numbers(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in (-1, 1), in at least float32."""
    return ((bits >> 9).to(_compute_dtype(dtype)) + 0.5) * 2.0**-22


def _normal(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.erfinv(_centred_numbers(bits, dtype)) * math.sqrt(2.0)


def _exponential(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return -((_centred_numbers(bits, dtype) + 1.0) * 0.5).log()


def _integers(bits: Tensor, low: int, high: int) -> Tensor:
    return (((bits.to(torch.int64) + 2**31) * (high - low)) >> 32) + low


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float64


# -- new tensors -------------------------------------------------------------------------------------------------------


def _new(draw: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """Return the handler of `torch.rand` or `torch.randn`, given a size."""

    def handler(mode: MaskSource, func: Any, /, *size: Any, **named: Any) -> Tensor:
        return _draw_new(mode, func, _size_of(size, named), draw, named)

    return handler


def _new_integers(mode: MaskSource, func: Any, /, *args: Any, **named: Any) -> Tensor:
    """Handle `torch.randint([low,] high, size)`."""
    *bounds, size = (*args, named.pop("size")) if "size" in named else args
    low, high = _range(mode, func, bounds, named)
    return _draw_new(
        mode, func, tuple(size), lambda bits, _: _integers(bits, low, high), {"dtype": torch.int64, **named}
    )


def _range(mode: MaskSource, func: Any, bounds: Sequence[Any], named: dict[str, Any]) -> tuple[int, int]:
    """Return the bounds of integers, given as ([low,] high) or by name."""
    limits = [*bounds]
    high = int(named.pop("high") if "high" in named else limits.pop())
    low = int(named.pop("low", limits.pop() if limits else 0))
    if not low < high <= low + 2**31:
        raise mode.refuse(f"{func.__name__} of integers from {low} to below {high}. Use 1 to 2^31 different ones")
    return low, high


def _size_of(size: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, ...]:
    shape = named.pop("size", size)
    return tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)


def _draw_new(
    mode: MaskSource,
    func: Any,
    shape: Sequence[int],
    draw: Callable[[Tensor, torch.dtype], Tensor],
    named: dict[str, Any],
    *,
    like: Tensor | None = None,
    is_shared: bool = False,
) -> Tensor:
    """Return a new tensor of random numbers, with the samples, device and dtype of the tensor that it is like, if any."""
    device = torch.device(named.pop("device", None) or (torch.get_default_device() if like is None else like.device))
    dtype = named.pop("dtype", None) or (torch.get_default_dtype() if like is None else like.dtype)
    wants_gradient = named.pop("requires_grad", False)
    _check_others(mode, func, named)
    with torch.no_grad():
        numbers = draw(mode.hashes(like, shape, device, func.__name__, is_shared=is_shared), dtype).to(dtype)
    return numbers.requires_grad_() if wants_gradient else numbers


def _like(draw: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """Return the handler of `torch.rand_like` or `torch.randn_like`."""

    def handler(mode: MaskSource, func: Any, /, input: Tensor, **named: Any) -> Tensor:
        return _draw_new(mode, func, input.shape, draw, named, like=input)

    return handler


def _integers_like(mode: MaskSource, func: Any, /, input: Tensor, *bounds: Any, **named: Any) -> Tensor:
    """Handle `torch.randint_like(input, [low,] high)`."""
    low, high = _range(mode, func, bounds, named)
    return _draw_new(mode, func, input.shape, lambda bits, _: _integers(bits, low, high), named, like=input)


def _permutation(mode: MaskSource, func: Any, /, n: int, **named: Any) -> Tensor:
    """Handle `torch.randperm`: one order for the whole step."""
    named = {"dtype": torch.int64, **named}
    return _draw_new(mode, func, (n,), lambda bits, _: bits.argsort(stable=True), named, is_shared=True)


# -- of given parameters -----------------------------------------------------------------------------------------------


def _normal_of(
    mode: MaskSource, func: Any, /, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **named: Any
) -> Tensor:
    """Handle `torch.normal` of tensors, of numbers, or of one of each."""
    like = mean if isinstance(mean, Tensor) else std if isinstance(std, Tensor) else None
    if like is None:
        return _draw_new(mode, func, tuple(size), lambda bits, dtype: _normal(bits, dtype) * std + mean, named)
    _check_others(mode, func, named)
    with torch.no_grad():
        both = torch.broadcast_tensors(*(tensor for tensor in (mean, std) if isinstance(tensor, Tensor)))[0]
        bits = mode.hashes(like if like.shape == both.shape else both, both.shape, like.device, func.__name__)
        return (_normal(bits, like.dtype) * std + mean).to(like.dtype)


def _bernoulli(mode: MaskSource, func: Any, /, input: Tensor, p: float | None = None, **named: Any) -> Tensor:
    """Handle `torch.bernoulli(input)`, the probabilities, or `torch.bernoulli(input, p)`."""
    _check_others(mode, func, named)
    with torch.no_grad():
        drawn = _uniform(mode.hashes(input, input.shape, input.device, func.__name__), torch.float32)
        return (drawn < (input if p is None else p)).to(input.dtype)


def _choices(
    mode: MaskSource, func: Any, /, input: Tensor, num_samples: int, replacement: bool = False, **named: Any
) -> Tensor:
    """Handle `torch.multinomial` of weights [.., categories]."""
    _check_others(mode, func, named)
    with torch.no_grad():
        weights, what = input.double(), func.__name__
        if not replacement:
            races = _exponential(mode.hashes(input, input.shape, input.device, what), torch.float64)
            return (weights / races).topk(num_samples, dim=-1).indices
        bits = mode.hashes(input, (*input.shape[:-1], num_samples), input.device, what)
        sums = weights.cumsum(-1)
        return torch.searchsorted(sums, _uniform(bits, torch.float64) * sums[..., -1:], right=True)


def _soft_choices(
    mode: MaskSource,
    func: Any,
    /,
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    eps: float = 1e-10,
    dim: int = -1,
) -> Tensor:
    """Handle `gumbel_softmax` (Jang, Gu and Poole 2017; Maddison, Mnih and Teh 2017)."""
    with torch.no_grad():
        bits = mode.hashes(logits, logits.shape, logits.device, func.__name__)
        gumbels = -_exponential(bits, logits.dtype).log().to(logits.dtype)
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    chosen = torch.zeros_like(soft).scatter_(dim, soft.argmax(dim, keepdim=True), 1.0)
    return chosen - soft.detach() + soft


def _rrelu(
    mode: MaskSource,
    func: Any,
    /,
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
    **named: Any,
) -> Tensor:
    """Handle `rrelu`, whose slopes are random in training."""
    if not training:
        return func(input, lower, upper, training, **({"inplace": inplace} if func is F.rrelu else {}))
    _check_others(mode, func, named)
    with torch.no_grad():
        bits = mode.hashes(input, input.shape, input.device, func.__name__)
        slopes = torch.where(input >= 0, 1.0, _uniform(bits, input.dtype) * (upper - lower) + lower).to(input.dtype)
    return input.mul_(slopes) if inplace or func is torch.rrelu_ else input * slopes


# -- tensors that are filled -------------------------------------------------------------------------------------------


def _make_fill_handler(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the handler of a method that fills a tensor; the method's parameters follow bits and dtype in a call of
    `draw`."""

    def handler(mode: MaskSource, func: Any, /, self: Tensor, *args: Any, **named: Any) -> Tensor:
        if named.pop("generator", None) is not None:
            raise _of_own_generator(mode, func)
        bits = mode.hashes(self, self.shape, self.device, func.__name__)
        with torch.no_grad():
            numbers = draw(bits, self.dtype, *args, **named).to(self.dtype)
        return self.copy_(numbers)

    return handler


def _fill_uniform(bits: Tensor, dtype: torch.dtype, low: float = 0.0, to: float = 1.0, **named: float) -> Tensor:
    low = named.get("from", low)
    return _uniform(bits, dtype) * (to - low) + low


def _fill_normal(bits: Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _normal(bits, dtype) * std + mean


def _fill_log_normal(bits: Tensor, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _fill_normal(bits, dtype, mean, std).exp()


def _fill_exponential(bits: Tensor, dtype: torch.dtype, lambd: float = 1.0) -> Tensor:
    return _exponential(bits, dtype) / lambd


def _fill_cauchy(bits: Tensor, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return (_centred_numbers(bits, dtype) * (math.pi / 2)).tan() * sigma + median


def _fill_geometric(bits: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    return (((_centred_numbers(bits, dtype) + 1.0) * 0.5).log() / math.log1p(-p)).ceil().clamp_min(1.0)


def _fill_bernoulli(bits: Tensor, dtype: torch.dtype, p: Any = 0.5) -> Tensor:
    return _uniform(bits, torch.float32) < p


def _fill_integers(bits: Tensor, dtype: torch.dtype, low: int = 0, to: int | None = None, **named: int) -> Tensor:
    low = named.get("from", low)
    if to is None:  # random_() and random_(to)
        largest = 2 ** {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 31)
        low, to = 0, low or (min(largest, torch.iinfo(dtype).max) if not dtype.is_floating_point else largest)
    return _integers(bits, low, min(to, low + 2**31))


# -- draws that are refused --------------------------------------------------------------------------------------------


def _check_others(mode: MaskSource, func: Any, named: dict[str, Any]) -> None:
    """Refuse arguments with effects outside the call, such as a generator or a tensor to write to."""
    if named.pop("generator", None) is not None:
        raise _of_own_generator(mode, func)
    unclear = {name for name, value in named.items() if value is not None and value is not False} - _FORMS
    if unclear:
        raise mode.refuse(f"{func.__name__} with {', '.join(sorted(unclear))}: without it random numbers can be drawn")


_FORMS = frozenset(("layout", "memory_format", "pin_memory"))
"""Arguments that change no number."""


def _of_own_generator(mode: MaskSource, func: Any) -> ModelError:
    return mode.refuse(
        f"{func.__name__} draws from a generator of its own, so every layout would draw other numbers; without `generator` "
        "each number is a function of seed, step, module and sample"
    )


DRAWS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.rand: _new(_uniform),
    torch.randn: _new(_normal),
    torch.randint: _new_integers,
    torch.randperm: _permutation,
    torch.rand_like: _like(_uniform),
    torch.randn_like: _like(_normal),
    torch.randint_like: _integers_like,
    torch.normal: _normal_of,
    torch.bernoulli: _bernoulli,
    torch.multinomial: _choices,
    torch.rrelu: _rrelu,
    torch.rrelu_: _rrelu,
    F.rrelu: _rrelu,
    F.gumbel_softmax: _soft_choices,
    Tensor.bernoulli: _bernoulli,
    Tensor.multinomial: _choices,
    Tensor.uniform_: _make_fill_handler(_fill_uniform),
    Tensor.normal_: _make_fill_handler(_fill_normal),
    Tensor.log_normal_: _make_fill_handler(_fill_log_normal),
    Tensor.exponential_: _make_fill_handler(_fill_exponential),
    Tensor.cauchy_: _make_fill_handler(_fill_cauchy),
    Tensor.geometric_: _make_fill_handler(_fill_geometric),
    Tensor.bernoulli_: _make_fill_handler(_fill_bernoulli),
    Tensor.random_: _make_fill_handler(_fill_integers),
}
"""The handler of each function that draws from a distribution."""
