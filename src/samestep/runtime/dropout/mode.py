"""Dropout masks that no layout can change: there is no random state, each mask is a function of its use.

An element is dropped or kept by a hash of (seed, step, module, entry, draw, global sample, position in the sample), so
it is the same on one device, in every cut of the batch or of the tensor, on every pipeline stage, in a recomputation,
and on a CPU and a GPU. `module` is the full name of the innermost module whose forward runs, `entry` the number of its
earlier calls in this micro-batch's forward, `draw` the index of the mask within that call. Dimension 0 of a tensor is
the batch. The hash of the first five, the mask's key, is made here, once a mask; the rest is in `masks.py`.

A model cut over tp computes with its own code on fewer heads or neurons. The shape of a mask shows which ones it is
for: the trace records the shape of each mask on one device (`record_masks`), and the dimension that is smaller is cut.

How to use it: enter a new `DropoutMode` around the forward of each micro-batch (on each stage, of each chunk).
Recomputation takes `functools.partial(recompute_contexts, model)` as the `context_fn` of
`torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which `recompute.in_our_modes` gives to every call of it,
the model's own included. Backward needs no mode: the recomputation enters its
own.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from samestep.building.families import FamilyFacts, facts_of
from samestep.errors import ModelError
from samestep.models.spec import MaskSpec, ModelSpec
from samestep.runtime.dropout.masks import MaskCuts, MaskSlice, drop_mask, hash_positions, mix, positions
from samestep.tracing.attention import AttentionCall, multi_head_attention

WRAPPERS = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Components of a module's name that wrappers add; the names in a job do not have them."""

IN_ORDER = (0, 0)
"""Rows of a mask whose samples are in order along dimension 0, each with as many positions as there are for it."""
OF_NO_SAMPLE = -1
"""The dimension of samples of a mask for a tensor that depends on none, such as a weight."""

_SELU_ALPHA = 1.7580993408473766  # alpha * scale of SELU: what alpha_dropout puts in place of a dropped element


@dataclass(frozen=True, slots=True)
class Draw:
    """The inputs of the masks of one micro-batch, besides the model."""

    seed: int
    step: int
    samples: Tensor
    """Global index of each sample of the micro-batch, int64 [B], in the order of dimension 0."""


class Dropout(enum.Enum):
    """Whether the training forwards of a model draw dropout masks.

    UNKNOWN ─► ACTIVE   a forward has drawn a mask
    UNKNOWN ─► ABSENT   a whole step has drawn none
    ABSENT  ─► UNKNOWN  a probability that was 0 has been raised
    """

    UNKNOWN = "unknown"
    """Neither the model nor a step has shown dropout so far: forwards run under a `DropoutMode`, which counts masks."""
    ACTIVE = "active"
    """Every training forward runs under a `DropoutMode`."""
    ABSENT = "absent"
    """Forwards run without a mode, and modules without its hooks."""


@dataclass(slots=True)
class DropoutState:
    """The dropout that steps have shown of a model so far: the part of an assembly that changes."""

    dropout: Dropout
    rates: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    """Where modules keep the probabilities that were 0 when the hooks were removed: attributes and names."""

    @classmethod
    def of(cls, has_dropout: bool, spec: ModelSpec) -> DropoutState:
        """Return the state before the first step: active if the trace drew masks or a probability is above 0."""
        return cls(Dropout.ACTIVE if spec.masks or has_dropout else Dropout.UNKNOWN)

    def begin_step(self, model: nn.Module) -> None:
        """Look whether a probability has been raised since the model was found to have no dropout."""
        if self.dropout is Dropout.ABSENT and any(fields.get(name) for fields, name in self.rates):
            self.dropout = Dropout.UNKNOWN
            track_modules(model)

    def end_forward(self, num_draws: int) -> None:
        """Record the number of masks that a training forward has drawn."""
        if num_draws > 0 and self.dropout is Dropout.UNKNOWN:
            self.dropout = Dropout.ACTIVE

    def end_step(self, model: nn.Module) -> None:
        """Record the end of a whole step: a model that has drawn no mask has no dropout, and loses its hooks."""
        if self.dropout is Dropout.UNKNOWN:
            self.dropout = Dropout.ABSENT
            self.rates = _rates_of(model)
            untrack_modules(model)


@dataclass(slots=True)
class _Frame:
    """One running forward of a module."""

    name: str
    entry: int
    num_draws: int = 0
    num_choices: int = 0
    """Number of expert choices recorded in this forward (`runtime/expert_routes.py`)."""


@dataclass(slots=True, eq=False)
class _Tracker:
    """The modes active on one model, and the hooks by which its modules report their forwards."""

    modes: list[DropoutMode] = field(default_factory=list)
    rows: dict[tuple[str, int, int], tuple[int, int]] = field(default_factory=dict)
    """Where each mask has its samples, where they are not in order along dimension 0."""
    hooked: WeakKeyDictionary[nn.Module, RemovableHandle] = field(default_factory=WeakKeyDictionary)
    hooks: list[RemovableHandle] = field(default_factory=list)


_TRACKERS: WeakKeyDictionary[nn.Module, _Tracker] = WeakKeyDictionary()


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by full name, without the components that wrappers add; a wrapper itself has no name."""
    modules = {}
    for name, module in model.named_modules():
        # A wrapper comes before the module it wraps and has the same name here, so the inner module stays.
        modules[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return modules


def track_modules(model: nn.Module) -> None:
    """Install on each module the two hooks that report its forward to the active mode.

    The first `DropoutMode` of a model does it. Call it again after modules were added or replaced: a module without
    hooks would draw in the name of its parent. Without an active mode the hooks do nothing.

    Raises:
        ModelError: a transformer layer with dropout has the sequence in dimension 0.
    """
    _refuse_sequence_first(model)
    tracker = _TRACKERS.setdefault(model, _Tracker())
    for name, module in named_modules(model).items():
        handle = tracker.hooked.get(module)
        if handle is None or handle.id not in module._forward_pre_hooks:  # or a trace has taken its hooks away
            tracker.hooked[module] = _hook(module, name, tracker)


def untrack_modules(model: nn.Module) -> None:
    """Remove the hooks where nothing draws: a module with hooks takes longer to call."""
    tracker = _TRACKERS.setdefault(model, _Tracker())
    for hook in tracker.hooks:
        hook.remove()
    tracker.hooks.clear()
    tracker.hooked.clear()


def _hook(module: nn.Module, name: str, tracker: _Tracker) -> RemovableHandle:
    """Install the hooks that report the forwards of one module to the active mode; return the handle of the first."""

    def enter(module: nn.Module, args: Any) -> None:
        if tracker.modes:
            tracker.modes[-1]._enter_module(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if tracker.modes:
            tracker.modes[-1]._leave_module(name)

    handle = module.register_forward_pre_hook(enter, prepend=True)
    tracker.hooks += [handle, module.register_forward_hook(leave, always_call=True)]
    return handle


class DropoutMode(TorchFunctionMode):
    """A function mode that replaces every dropout by one whose mask depends only on its position and on `draw`.

    One object serves one forward of one micro-batch (its counts of entries are never reset). Other random numbers in
    the forward are refused, except `torch.rand([])`, one number for the whole step (LayerDrop).

    Raises:
        ModelError: inside, a forward needs other random numbers, or a dropout's tensor has no batch in dimension 0.
    """

    def __init__(self, model: nn.Module, draw: Draw, part: MaskSlice | None = None) -> None:
        super().__init__()
        if not (model in _TRACKERS and _TRACKERS[model].hooks):
            track_modules(model)
        self.allows_random = False
        """Whether other random numbers are drawn from the process's generators instead of being refused."""
        self.num_draws = 0
        """Masks drawn so far, recomputed ones included; 0 after a forward means that this model has no dropout."""
        self._draw = draw
        self._part = part
        self._tracker = _TRACKERS[model]
        self._frames = [
            _Frame("", -1)
        ]  # for draws outside every module, as in a loss; the model itself is entry 0 of ""
        self._entries: dict[str, int] = {}
        self._sample_keys: dict[torch.device, Tensor] = {}
        self._hashed_positions: dict[tuple[tuple[int, ...], MaskCuts, torch.device], tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> DropoutMode:
        super().__enter__()
        self._tracker.modes.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracker.modes.pop()
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        return handler(self, func, *args, **(kwargs or {}))

    def _enter_module(self, name: str) -> None:
        entry = self._entries.get(name, 0)
        self._entries[name] = entry + 1
        self._frames.append(_Frame(name, entry))

    def _leave_module(self, name: str) -> None:
        if self._frames[-1].name == name and len(self._frames) > 1:
            self._frames.pop()

    def _snapshot(self) -> tuple[list[_Frame], dict[str, int]]:
        return [dataclasses.replace(frame) for frame in self._frames], dict(self._entries)

    def _refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self._frames[-1].name or 'the model itself'}: {reason}")

    def _next_draw(self) -> tuple[str, int, int]:
        """Count a draw of the innermost module; return the module's name, the entry and the draw."""
        frame = self._frames[-1]
        frame.num_draws += 1
        self.num_draws += 1
        return frame.name, frame.entry, frame.num_draws - 1

    def _next_key(self) -> int:
        """Count a draw and return its key of 64 bits."""
        return self._key_of(self._next_draw())

    def _key_of(self, mask: tuple[str, int, int]) -> int:
        text = "/".join(map(str, (self._draw.seed, self._draw.step, *mask)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)

    def _drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped.

        Raises:
            ModelError: the dimension of samples does not hold the samples, or p is not between 0 and 1.
        """
        mask = self._next_draw()
        dim, inner = self._tracker.rows.get(mask, IN_ORDER)
        num_samples = 1 if dim == OF_NO_SAMPLE else self._draw.samples.numel()
        if not shape or (dim != OF_NO_SAMPLE and (shape[dim] % (num_samples * max(inner, 1)) or not shape[dim])):
            raise self._refuse(
                f"{what} of a tensor of shape {tuple(shape)}: dimension {dim} must hold the {num_samples} samples of the "
                "micro-batch (or as many rows for each), or the mask would differ between layouts"
            )
        if not 0.0 <= p <= 1.0:
            raise self._refuse(f"{what} with probability {p}; it is between 0 and 1")
        whole = tuple(shape) if dim == OF_NO_SAMPLE else (*shape[:dim], shape[dim] // num_samples, *shape[dim + 1 :])
        each = whole
        cuts: MaskCuts = ()
        if self._part is not None:
            cuts = self._part.cuts(mask, whole)
            for at, degree, _ in cuts:
                whole = (*whole[:at], whole[at] * degree, *whole[at + 1 :])
        key = (whole, cuts, x.device)
        if key not in self._hashed_positions:
            self._hashed_positions[key] = hash_positions(*positions(whole, cuts, x.device))
        keys = self._keys_of_samples(x.device, of_samples=dim != OF_NO_SAMPLE) ^ self._key_of(mask)
        drop = drop_mask(keys, *self._hashed_positions[key], p)
        if dim == OF_NO_SAMPLE or (dim == 0 and inner in (0, each[0])):
            return drop.view(shape)
        inner = inner or each[dim]
        drop = drop.view(num_samples, *each[:dim], each[dim] // inner, inner, *each[dim + 1 :])
        return drop.movedim(0, dim + 1).reshape(shape)

    def _keys_of_samples(self, device: torch.device, *, of_samples: bool) -> Tensor:
        """Return a key for each sample, int64 [B]; for a mask that all samples share one key, 0."""
        if not of_samples:
            return torch.zeros(1, dtype=torch.int64, device=device)
        if device not in self._sample_keys:
            self._sample_keys[device] = mix(self._draw.samples.to(device, torch.int64))
        return self._sample_keys[device]


RowsOf = Callable[[Tensor], tuple[int, int] | None]
"""Returns the dimension of a tensor that holds the samples and the positions of one side by side; None if not known."""


class _MaskRecorder(DropoutMode):
    """A mode that records the shape of each mask, and leaves the forward unchanged."""

    def __init__(self, model: nn.Module, num_samples: int, rows_of: RowsOf | None) -> None:
        track_modules(model)
        super().__init__(model, Draw(0, 0, torch.zeros(num_samples, dtype=torch.int64)))
        self.masks: list[MaskSpec] = []
        self._rows_of = rows_of

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            # A step raises its own errors, so none is raised here; nor may a trace of costs see what is only tried here.
            unseen = _disable_current_modes() if self._rows_of is None else nullcontext()
            with suppress(ModelError), unseen, torch.no_grad():
                handler(
                    self,
                    func,
                    *args,
                    **{**(kwargs or {}), **({"inplace": False} if (kwargs or {}).get("inplace") else {})},
                )
        return func(*args, **(kwargs or {}))

    def _drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        owner, entry, draw = self._next_draw()
        rows = IN_ORDER if self._rows_of is None else self._rows_of(x)
        rows = rows if rows is None or rows[0] < len(shape) else None  # of a mask of channels
        dim = 0 if rows is None else rows[0]
        each = tuple(shape)
        if shape and dim != OF_NO_SAMPLE:
            each = (*shape[:dim], shape[dim] // self._draw.samples.numel(), *shape[dim + 1 :])
        self.masks.append(MaskSpec(owner=owner, entry=entry, draw=draw, shape=each, rows=rows))
        return torch.empty(shape, dtype=torch.bool, device=x.device)


@contextmanager
def record_masks(model: nn.Module, num_samples: int = 1, rows_of: RowsOf | None = None) -> Iterator[list[MaskSpec]]:
    """Record every mask that a forward of `num_samples` samples draws inside, and where `rows_of` finds its samples."""
    mode = _MaskRecorder(model, num_samples, rows_of)
    with mode:
        yield mode.masks


def place_samples(model: nn.Module, masks: tuple[MaskSpec, ...]) -> None:
    """Tell a model's modes where each mask has its samples, as a trace has found them."""
    tracker = _TRACKERS.setdefault(model, _Tracker())
    tracker.rows = {
        (mask.owner, mask.entry, mask.draw): mask.rows for mask in masks if mask.rows not in (None, IN_ORDER)
    }


class _Recompute:
    """A context that restores the counts that a mode had when this object was made."""

    def __init__(self, mode: DropoutMode) -> None:
        self._mode = mode
        self._then = mode._snapshot()
        self._now: list[tuple[list[_Frame], dict[str, int]]] = []

    def __enter__(self) -> None:
        mode = self._mode
        self._now.append((mode._frames, mode._entries))
        frames, entries = self._then
        # Copies: with retain_graph the same block is recomputed several times.
        mode._frames, mode._entries = [dataclasses.replace(frame) for frame in frames], dict(entries)
        mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._mode._frames, self._mode._entries = self._now.pop()


def recompute_contexts(model: nn.Module) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a checkpointed forward and of its recomputation, which then draws the same masks.

    They are for `context_fn` of `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which calls it in the
    forward. The recomputation activates the mode of that forward by itself, on whatever thread the backward runs.
    """
    tracker = _TRACKERS.get(model)
    if tracker is None or not tracker.modes:
        return nullcontext(), nullcontext()
    return nullcontext(), _Recompute(tracker.modes[-1])


def has_dropout(model: nn.Module) -> bool:
    """Return whether a module or a configuration in the model has a dropout probability above 0.

    A probability is a number above 0 and up to 1 whose name contains "drop" (`dropout`, `attn_pdrop`, `layerdrop`), in
    a module's attributes or in its configuration, or any such number of a module whose class name contains it
    (`Dropout.p`). Fields of a configuration for heads (`classifier_dropout`, `summary_first_dropout`) count through
    their `nn.Dropout` only. A number written in the code (`F.dropout(x, 0.1)`) cannot be seen: run the first
    micro-batch under a `DropoutMode` whatever this returns, and keep the mode if its `num_draws` is not 0. That first
    one also refuses random numbers.
    """
    seen: set[int] = set()
    facts = facts_of(model)
    for module in model.modules():
        if _has_rate(vars(module), facts, everything="drop" in type(module).__name__.lower()):
            return True
        for config in facts.configurations_of(module):
            if id(config) in seen:
                continue
            seen.add(id(config))
            fields = config.to_dict() if hasattr(config, "to_dict") else config
            if _has_rate(fields if isinstance(fields, Mapping) else getattr(fields, "__dict__", {}), facts):
                return True
    return False


def _rates_of(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
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


def _has_rate(fields: Mapping[str, Any], facts: FamilyFacts, everything: bool = False) -> bool:
    """Return whether a field, or a field of a mapping in it, is a dropout probability above 0."""
    for name, value in fields.items():
        named = everything or ("drop" in str(name).lower() and not facts.is_head_dropout(str(name)))
        if named and isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1:
            return True
        if isinstance(value, Mapping) and not str(name).startswith("_") and _has_rate(value, facts):
            return True
    return False


def _refuse_sequence_first(model: nn.Module) -> None:
    """Refuse torch's transformer layers that put the sequence in dimension 0: their dropout cannot see the samples.

    Raises:
        ModelError: such a layer has dropout.
    """
    for name, module in model.named_modules():
        if not isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            continue
        if not module.self_attn.batch_first and module.dropout.p > 0:
            raise ModelError(
                f"{name or 'the model itself'}: dropout in a {type(module).__name__} with batch_first=False, whose "
                "tensors hold no batch in dimension 0; batch_first=True works"
            )


# Handlers: replacements of torch's functions, each called with the mode, the function, and its arguments. -------------


@dataclass(frozen=True, slots=True)
class _DropoutKind:
    """A member of the family of dropouts."""

    channels: bool = False
    """Whether whole channels (dimension 1) are dropped instead of elements."""
    alpha: bool = False
    """Whether mean and variance of SELU's outputs are kept."""
    min_dims: int = 1
    """Least number of dimensions of an input with a batch."""


def _dropped(mode: DropoutMode, what: str, kind: _DropoutKind, x: Tensor, p: float, inplace: bool) -> Tensor:
    """Drop elements of `x` with probability p and scale the others; the backward is exact, and keeps the bool mask."""
    if x.dim() < kind.min_dims:
        raise mode._refuse(
            f"{what} of a tensor with {x.dim()} dimensions has no batch; {kind.min_dims} or more dimensions work"
        )
    drop = mode._drop(x, x.shape[:2] if kind.channels else x.shape, p, what)
    if kind.channels:
        drop = drop.view(*x.shape[:2], *(1,) * (x.dim() - 2))
    if not kind.alpha:
        kept = x.masked_fill_(drop, 0.0) if inplace else torch.where(drop, 0.0, x)
        return kept.mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)
    if p >= 1.0:
        return x.masked_fill_(drop, 0.0) if inplace else x.masked_fill(drop, 0.0)
    a = 1.0 / math.sqrt((_SELU_ALPHA**2 * p + 1.0) * (1.0 - p))
    filled = x.masked_fill_(drop, -_SELU_ALPHA) if inplace else x.masked_fill(drop, -_SELU_ALPHA)
    return filled.mul_(a).add_(_SELU_ALPHA * a * p)


def _functional(kind: _DropoutKind) -> Callable[..., Tensor]:
    """Return the handler of `torch.nn.functional.dropout` and similar functions."""

    def handler(
        mode: DropoutMode,
        func: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not training or p == 0:
            return input
        return _dropped(mode, func.__name__, kind, input, p, inplace)

    return handler


def _native(kind: _DropoutKind, inplace: bool) -> Callable[..., Tensor]:
    """Return the handler of `torch.dropout`, `torch.dropout_` and similar functions."""

    def handler(mode: DropoutMode, func: Callable[..., Tensor], input: Tensor, p: float, train: bool) -> Tensor:
        return input if not train or p == 0 else _dropped(mode, func.__name__, kind, input, p, inplace)

    return handler


def _attention(mode: DropoutMode, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Handle `scaled_dot_product_attention`: with dropout, compute the formula in at least float32.

    Legend: B batch, H heads, L queries, S keys, D head width. Keeps the [B, H, L, S] weights that a fused kernel
    would not; without dropout the fused kernel runs.
    """
    call = AttentionCall(*args, **kwargs)
    if call.dropout_p == 0.0:
        return call.run(func)
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    if is_causal and attn_mask is not None:
        raise mode._refuse("attention with both attn_mask and is_causal; one of them works")
    q_bhld, k_bhsd, v_bhsd = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (query, key, value))
    if enable_gqa:
        k_bhsd = k_bhsd.repeat_interleave(q_bhld.size(-3) // k_bhsd.size(-3), -3)
        v_bhsd = v_bhsd.repeat_interleave(q_bhld.size(-3) // v_bhsd.size(-3), -3)
    scores_bhls = (q_bhld * (query.size(-1) ** -0.5 if scale is None else scale)) @ k_bhsd.transpose(-2, -1)
    if is_causal:
        future_ls = torch.ones(scores_bhls.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores_bhls = scores_bhls.masked_fill(future_ls, -math.inf)
    if attn_mask is None:
        weights_bhls = scores_bhls.softmax(-1)
    else:
        if attn_mask.dtype == torch.bool:
            scores_bhls = scores_bhls.masked_fill(~attn_mask, -math.inf)
        else:
            scores_bhls = scores_bhls + attn_mask.to(scores_bhls.dtype)
        # A query that may look at nothing gets zeros, forward and backward, as in torch.
        blind_bhl1 = (scores_bhls == -math.inf).all(-1, keepdim=True)
        weights_bhls = scores_bhls.masked_fill(blind_bhl1, 0.0).softmax(-1).masked_fill(blind_bhl1, 0.0)
    weights_bhls = _dropped(mode, func.__name__, _DropoutKind(), weights_bhls, dropout_p, inplace=False)
    return (weights_bhls @ v_bhsd).to(query.dtype)


def _multi_head_attention(mode: DropoutMode, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Handle `F.multi_head_attention_forward`: run it with the mode active inside."""
    return multi_head_attention(mode, *args, **kwargs)


def _recurrent(mode: DropoutMode, func: Callable[..., Any], *args: Any) -> Any:
    """Handle torch's recurrent layers: refuse those with dropout, which draw inside one native operation."""
    # (input, [batch_sizes,] hx, weights, has_biases, num_layers, dropout, train, ...): has_biases is the first bool.
    first = next(i for i, arg in enumerate(args) if isinstance(arg, bool))
    num_layers, dropout, train = args[first + 1 : first + 4]
    if train and dropout > 0 and num_layers > 1 and not mode.allows_random:
        raise mode._refuse(
            f"torch's {func.__name__} draws its dropout={dropout} inside one native operation, so its masks would "
            "differ between layouts; dropout=0, or single layers with nn.Dropout between them, work"
        )
    return func(*args)


def _one_number(mode: DropoutMode, func: Callable[..., Tensor], *size: Any, **kwargs: Any) -> Tensor:
    """Handle `torch.rand`: draw a single number, equal for all samples of the step; refuse other sizes."""
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else kwargs.pop("size", size)
    if len(shape) or kwargs.keys() - {"dtype", "device"}:
        return _refused(mode, func)
    return torch.full((), (mode._next_key() >> 11) % 2**53 / 2**53, **kwargs)


def _rrelu(mode: DropoutMode, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Handle `rrelu`: refuse it in training, where its slopes are random."""
    if kwargs.get("training") or args[3:4] == (True,):
        return _refused(mode, func)
    return func(*args, **kwargs)


def _refused(mode: DropoutMode, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse random numbers that samestep cannot make the same in every layout, unless the user allows them."""
    if mode.allows_random:
        return func(*args, **kwargs)
    name = "fractional_max_pool" if func.__name__ == "fn" else func.__name__
    raise mode._refuse(
        f"{name}: random numbers in a forward would differ between layouts; nn.Dropout, torch.nn.functional.dropout* "
        "and the dropout_p of attention work"
    )


# Functions of torch, torch.Tensor, torch.nn.functional and torch.nn.init that a forward may not call.
_REFUSED = """
    bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ gumbel_softmax log_normal_ multinomial native_dropout
    normal normal_ poisson rand_like randint randint_like randn randn_like random_ randperm rrelu_with_noise
    rrelu_with_noise_ uniform_ kaiming_normal_ kaiming_uniform_ trunc_normal_ xavier_normal_ xavier_uniform_ orthogonal_
    sparse_ fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices _sample_dirichlet _standard_gamma _fused_dropout
    svd_lowrank pca_lowrank lobpcg
"""


def _handlers() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the handler of each function that the mode intercepts."""
    homes = (torch, torch.Tensor, F, nn.init)
    handlers: dict[Callable[..., Any], Callable[..., Any]] = {
        getattr(home, name): _refused for home in homes for name in _REFUSED.split() if hasattr(home, name)
    }
    handlers |= {getattr(torch, name): _rrelu for name in ("rrelu", "rrelu_")} | {F.rrelu: _rrelu}
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
    handlers[torch.rand] = _one_number
    handlers[F.scaled_dot_product_attention] = _attention
    handlers[F.multi_head_attention_forward] = _multi_head_attention
    return handlers


_HANDLERS = _handlers()
