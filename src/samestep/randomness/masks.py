"""Dropout masks: a hash of the mask's key and of each element's position in the uncut tensor, and the interface that gives them to code.

    a, b     = two halves of mix64((mix64(sample) ^ key) + row * G)  once a row
    h        = f(f(column' ^ a) + b),   f(x) = x (2x + 1) mod 2^32   once an element, in int32
    dropped  = h < p * 2^32

Row and column are positions in the sample's own tensor: its dimensions but the last, flattened, and the last. A rank
that holds a part of the tensor passes the rows and columns of its part, and gets that part of the mask:

    whole mask [heads 0 1 2 3, queries, keys]     rank 1 of tp=2: heads 2 3, so rows 2L to 4L - 1, all columns
    whole mask [tokens 0 1 2 3, features]         rank 1 of cp=2: tokens 2 3

mix64 is the finalizer of splitmix64 (Steele, Lea, Flood 2014); f is the quadratic permutation of RC6 (Rivest et al.
1998), one `addcmul` in torch.

All replacements of torch's random functions get hashed bits and masks from a `MaskSource` (`mode.DropoutMode` is one). The last part of the
file looks for dropout probabilities in a model's modules and configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.building.attention import AttentionCall, DroppedWeights
from samestep.building.families import CONFIGURATIONS, HEAD_DROPOUTS
from samestep.building.named_tensors import set_attributes
from samestep.building.torch_seams import current_function_modes
from samestep.errors import LayoutError, ModelError
from samestep.kernels.dropped_elements import HashedMask, mask_of
from samestep.kernels.kernel_choice import runs_kernels
from samestep.models.param_spec import Cut, ParamSpec
from samestep.models.spec import ModelSpec, is_below

_GOLDEN = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as a signed number
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


MaskCut = tuple[int, int, int]
"""A cut of one dimension: (dimension, number of equal intervals, index of this rank's interval)."""
MaskCuts = tuple[MaskCut, ...]


@dataclass(frozen=True, slots=True)
class MaskSlice:
    """The part of each dropout mask that a rank draws.

    With tp it is one of `degree` equal intervals of the dimension that tp cuts. With cp it is one of `cp` intervals of
    the tokens, or inside an attention, of the heads that tp leaves the rank.
    """

    model: ModelSpec
    """Spec of the whole model."""
    degree: int
    index: int
    cuts_sequence: bool = False
    """Whether tensors between blocks hold an interval of the tokens, cut by tp."""
    cp: int = 1
    cp_index: int = 0
    cp_heads: int = 1
    """Ranks of `cp` that exchange heads where others pass keys around a ring: inside an attention they cut both."""
    _found: dict[tuple[Any, ...], MaskCuts] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: ModelSpec, tp: tuple[int, int], cp: tuple[int, int], *, cuts_sequence: bool, cp_heads: int = 1
    ) -> MaskSlice | None:
        """Return the part of a rank whose degree and index on tp and cp are given; None where no axis cuts a mask."""
        return cls(model, *tp, cuts_sequence, *cp, cp_heads) if tp[0] * cp[0] > 1 else None

    def cuts(self, mask: tuple[str, int, int], shape: tuple[int, ...]) -> MaskCuts:
        """Return the dimensions of one sample's mask that are cut on this rank, where the mask has this `shape`.

        A mask is identified by its module, entry and draw.

        Raises:
            LayoutError: the shapes do not determine the part, or the traced forward drew no such mask.
        """
        if (mask, shape) not in self._found:
            self._found[mask, shape] = self._find(mask, shape)
        return self._found[mask, shape]

    def _find(self, mask: tuple[str, int, int], shape: tuple[int, ...]) -> MaskCuts:
        whole = next(
            (known.shape for known in self.model.masks if (known.owner, known.entry, known.draw) == mask), None
        )
        if whole == shape:
            return ()
        owner, what = mask[0] or "the model itself", "random numbers" if mask[2] < 0 else "a dropout mask"
        waiver = " ".join(f"{axis}=1" for axis, degree in (("tp", self.degree), ("cp", self.cp)) if degree > 1)
        if whole is None:
            raise LayoutError("random-numbers", f"{owner} draws {what} that the traced forward did not. Use {waiver}")
        cuts: list[MaskCut] = []
        unused = {axis for axis, degree in (("tp", self.degree), ("cp", self.cp)) if degree > 1}
        differs = [dim for dim, (all_, size) in enumerate(zip(whole, shape, strict=False)) if all_ != size]
        # [1, sequence, features] between blocks; within their cut parts heads or neurons are fewer.
        is_sequence = self.cuts_sequence and differs == [1] and whole == (1, self.model.sequence, whole[-1])
        # Under cp they are an interval of a slice's.
        parts = self.degree * self.cp
        if is_sequence and whole[1] == shape[1] * parts and len(whole) == len(shape):
            return ((1, parts, self.cp_index * self.degree + self.index),)
        if self.cp_heads > 1 and len(differs) == 2 and len(whole) == len(shape):
            cuts += self._cut_by_groups(differs, whole, shape)
        for dim in differs if len(whole) == len(shape) and not cuts else []:
            run = self._cut_by_axis(mask[0], whole[dim], shape[dim], unused)
            cuts += [] if run is None else [(dim, *run)]
        if cuts and len(cuts) == len(differs):
            return tuple(cuts)
        layout = " ".join(f"{axis}={n}" for axis, n in (("tp", self.degree), ("cp", self.cp)) if n > 1)
        raise LayoutError(
            "random-numbers",
            f"{owner} draws {what} of shape {list(shape)} for a sample, and "
            f"on one device of {list(whole)}: it is not known which heads or neurons {layout} gives to a rank. Use a "
            f"tensor with a dimension for them, or {waiver}",
        )

    def _cut_by_groups(self, dims: list[int], whole: tuple[int, ...], shape: tuple[int, ...]) -> list[MaskCut]:
        """Return the cuts of heads and queries of an attention that groups of ranks share; nothing where these do not fit."""
        (heads, tokens), ring = dims, self.cp // self.cp_heads
        if not whole[tokens] == shape[tokens] * ring == self.model.length:
            return []
        for tp, index in ((self.degree, self.index), (1, 0)):
            if whole[heads] == shape[heads] * tp * self.cp_heads:
                group = self.cp_index % self.cp_heads
                return [
                    (heads, tp * self.cp_heads, index * self.cp_heads + group),
                    (tokens, ring, self.cp_index // self.cp_heads),
                ]
        return []

    def _cut_by_axis(self, owner: str, size: int, size_here: int, unused: set[str]) -> tuple[int, int] | None:
        """Return the number of intervals of a dimension, and this rank's index; None where no unused axis cuts it."""
        if "cp" in unused and size == size_here * self.cp == self.model.length:
            unused.remove("cp")
            return self.cp, self.cp_index
        if "tp" in unused and size == size_here * self.degree and size in _cut_sizes(self.model, owner):
            unused.remove("tp")
            return self.degree, self.index
        for exchange in (e for layer in self.model.layers for e in layer.exchanges if "cp" in unused):
            tp, index = (self.degree, self.index) if exchange.is_cut else (1, 0)
            if size == exchange.query_heads == size_here * tp * self.cp:
                unused.clear()
                return tp * self.cp, index * self.cp + self.cp_index
        return None


def _cut_sizes(model: ModelSpec, owner: str) -> set[int]:
    """Return the sizes of dimensions cut in one interval: numbers of heads, or features of a neighbouring weight.

    A dimension with another one folded into it, or that holds q, k and v one after another, is cut in several.
    """
    near: list[tuple[ParamSpec, Cut]] = []
    scope = f"{owner}."
    while not near and scope:
        scope = scope.rpartition(".")[0]
        near = [(param, param.cut) for param in model.params if param.cut and is_below(param.name, scope)]
    fused = {param.shape[cut.dim] for param, cut in near if cut.parts > 1}
    return {size for param, cut in near for size in (cut.groups, param.shape[cut.dim] // cut.parts)} - fused


def positions(shape: tuple[int, ...], cuts: MaskCuts, device: torch.device) -> list[Tensor]:
    """Return the rows and columns, int64 [R] and [C], of a sample's mask, or of a rank's part of it.

    `shape` is that of the whole mask. A mask of one dimension is one row.
    """

    def along(dim: int) -> Tensor:
        numbers = torch.arange(shape[dim], device=device)
        for cut, degree, index in cuts:
            numbers = numbers.view(degree, -1)[index] if cut == dim else numbers
        return numbers

    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(len(shape) - 1):
        rows = (rows[:, None] * shape[dim] + along(dim)).flatten()
    return [rows, along(len(shape) - 1)]


@dataclass(frozen=True, slots=True, eq=False)
class HashedPositions:
    """The hashed positions of a sample's mask, or of a rank's part of it; equal ones are the same object."""

    rows: Tensor
    """int64 [R]."""
    columns: Tensor
    """int32 [C]."""


def hash_positions(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Hash positions in a sample's uncut tensor, int64 [R] and [C], for `hash_bits`; return int64 [R] and int32 [C]."""
    return rows * _GOLDEN, mix(columns).view(torch.int32).view(-1, 2)[:, 0].contiguous()


def row_halves(keys: Tensor, rows: Tensor) -> Tensor:
    """Return the two halves of each row, int32 [B, R, 2], for samples with these keys [B] at these hashed rows."""
    return mix(keys[:, None] + rows).view(torch.int32).view(keys.numel(), rows.numel(), 2)


def hash_bits(halves: Tensor, columns: Tensor) -> Tensor:
    """Return 32 hashed bits an element, int32 [B, R, C], of rows with these halves at these hashed columns."""
    bits = columns ^ halves[..., :1]
    bits.addcmul_(bits, bits, value=2)
    bits.add_(halves[..., 1:])
    return bits.addcmul_(bits, bits, value=2)


def drop_mask(bits: Tensor, p: float) -> Tensor:
    """Return which elements are dropped with probability p, bool, by their hashed bits."""
    if p >= 1.0:
        return torch.ones_like(bits, dtype=torch.bool)
    return bits < drop_threshold(p)


def dropped_at(halves: Tensor, columns: Tensor, p: float) -> Tensor:
    """Return which elements are dropped with probability p, bool [..., R, C], of rows with these halves at these hashed columns."""
    if p < 1.0 and runs_kernels(halves):
        mask = hashed_mask(halves, columns, p)
        return mask_of(mask).view(*halves.shape[:-1], columns.numel())
    return drop_mask(hash_bits(halves, columns), p)


def hashed_mask(halves: Tensor, columns: Tensor, p: float) -> HashedMask:
    """Return a mask with probability p < 1 in the form that kernels take."""
    return HashedMask(halves.reshape(-1, 2), columns.contiguous(), drop_threshold(p))


def drop_threshold(p: float) -> int:
    """Return the number, of 32 bits with a sign, below which the hashed bits of dropped elements are, for a probability below 1."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def mix(x: Tensor) -> Tensor:
    """Mix the bits of int64 numbers, one to one (splitmix64)."""
    # On CPUs in NumPy, which has unsigned numbers: so it takes eight operations, and a third of the time.
    return _mix_on_cpu(x) if x.device.type == "cpu" else _mix_on_device(x)


def _mix_on_cpu(x: Tensor) -> Tensor:
    words = x.numpy().view(np.uint64).copy()
    words += np.uint64(_GOLDEN % 2**64)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor % 2**64)
    words ^= words >> np.uint64(31)
    return torch.from_numpy(words.view(np.int64))


def _mix_on_device(x: Tensor) -> Tensor:
    """Mix in torch, whose shift copies the sign, so it is masked off."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module or a configuration in the model has a dropout probability above 0.

    A probability is a number above 0 and up to 1 whose name contains "drop" (`dropout`, `attn_pdrop`, `layerdrop`), in
    a module's attributes or in its configuration, or any such number of a module whose class name contains it
    (`Dropout.p`). Fields of a configuration for heads (`classifier_dropout`, `summary_first_dropout`) count through
    their `nn.Dropout` only. A number written in the code (`F.dropout(x, 0.1)`) cannot be seen: run the first
    micro-batch under a `DropoutMode` whatever this returns, and keep the mode if its `num_draws` is not 0.
    """
    seen: set[int] = set()
    for module in model.modules():
        if _has_rate(set_attributes(module), everything="drop" in type(module).__name__.lower()):
            return True
        for config in map(vars(module).get, CONFIGURATIONS):
            if config is None or id(config) in seen:
                continue
            seen.add(id(config))
            fields = config.to_dict() if hasattr(config, "to_dict") else config
            if _has_rate(fields if isinstance(fields, Mapping) else getattr(fields, "__dict__", {})):
                return True
    return False


def rates_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the attributes of modules that look like dropout probabilities, whatever their value."""
    return [
        (fields, name)
        for module in model.modules()
        for fields, named in [(vars(module), "drop" in type(module).__name__.lower())]
        for name, value in fields.items()
        if ((named and not name.startswith("_")) or "drop" in name.lower())
        and not isinstance(value, bool)
        and (value is None or (isinstance(value, int | float) and value == 0))
    ]


def _has_rate(fields: Mapping[str, Any], everything: bool = False) -> bool:
    """Return whether a field, or a field of a mapping in it, is a dropout probability above 0."""
    for name, value in fields.items():
        named = everything or ("drop" in str(name).lower() and not str(name).startswith(HEAD_DROPOUTS))
        if named and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            return True
        if isinstance(value, Mapping) and not str(name).startswith("_") and _has_rate(value):
            return True
    return False


def dropped_weights(call: AttentionCall, source: MaskSource | None, num_keys: int) -> DroppedWeights | None:
    """Return what makes the masks of dropped weights of the queries of a call and so many keys; None where none are dropped.

    The mask source is the one of the function modes that are active where none is given.
    """
    if not call.dropout_p:
        return None
    if source is None:
        source = next((mode for mode in reversed(current_function_modes()) if isinstance(mode, MaskSource)), None)
    assert source is not None, "a training forward that may drop weights runs under a mode"
    shape = torch.Size((*call.heads, call.query.size(-2), num_keys))
    return source.drop_weights(call.query, shape, call.dropout_p, "scaled_dot_product_attention")


class MaskSource:
    """Computes the masks and random numbers of one forward; `mode.DropoutMode` implements it."""

    sees_all = False
    """Whether it must see every function of the model, those of compiled blocks too."""
    allows_random = False
    """Whether numbers that it does not compute are drawn from the process's generators instead of being refused."""

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped."""
        raise NotImplementedError

    def drop_elements(self, x: Tensor, p: float, what: str, *, inplace: bool) -> Tensor | None:
        """Return x with elements dropped and scaled by one kernel; None, and no mask is drawn, where `drop` is to be called."""
        return None

    def drop_weights(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DroppedWeights:
        """Return such a mask of the weights of an attention, of which parts are asked at any time."""
        drop = self.drop(x, shape, p, what)
        return DroppedWeights(p, lambda start, stop, num_keys: drop[..., start:stop, :num_keys])

    def drop_in_graph(
        self, x: Tensor, shape: torch.Size, p: float, what: str, mask: tuple[str, int, int], entries: dict[str, int]
    ) -> Tensor:
        """Return the mask that a graph draws: of a module, the index of its call in the graph, and the draw.

        `entries` has the number of calls of each module before the graph began, and is added to.
        """
        raise NotImplementedError

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Return hashed bits of random numbers, int32 [shape].

        `like` is the tensor whose samples are at the same places as those of the result; without one the shape decides.
        Shared numbers are refused where there are some for each sample.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses an operation of the innermost module."""
        raise NotImplementedError


WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Components of a module's name that wrappers add; the names in a job do not have them."""

_QUIET = (
    "activation",
    "batchnorm",
    "conv",
    "flatten",
    "linear",
    "normalization",
    "padding",
    "pixelshuffle",
    "pooling",
    "sparse",
    "upsampling",
)
_FILES = frozenset(f"torch.nn.modules.{name}" for name in _QUIET)
DRAWING_NOTHING: frozenset[Any] = frozenset(
    kind for kind in vars(nn).values() if getattr(kind, "__module__", "") in _FILES
) - {nn.RReLU, nn.MultiheadAttention, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d}
"""Modules of torch whose code draws nothing, and calls no other module: a hook would make each call longer."""


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by full name, without the components that wrappers add; a wrapper itself has no name."""
    modules = {}
    for name, module in model.named_modules():
        # A wrapper comes before the module it wraps and has the same name here, so the inner module stays.
        modules[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return modules
