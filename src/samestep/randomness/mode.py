"""Dropout masks and random numbers that no layout can change: there is no random state, each draw is a function of its use.

An element is dropped or kept by a hash of (seed, step, module, entry, draw, global sample, position in the sample), and a
number of a distribution is a function of such a hash (`distributions.py`). So it is
the same on one device, in every cut of the batch or of the tensor, on every pipeline stage, in a recomputation,
and on a CPU and a GPU. `module` is the full name of the innermost module whose forward runs, `entry` the number of its
earlier calls in this micro-batch's forward, `draw` the index of the mask within that call. The hash of the first five,
the draw's key, is computed here, once a draw; the rest is in `masks.py`. The trace records which dimension of a tensor
is that of samples (`examination/traced_forward.py`); by default it is dimension 0. Numbers whose shape does not grow with
the samples are the same for all samples of a step.

A model cut over tp runs its code on fewer heads or neurons. The shape of a mask shows which ones it is
for: the trace records the shape of each mask on one device, and the dimension that is smaller is cut.

A new `DropoutMode` is entered around the forward of each micro-batch (on each stage, of each chunk). `recompute_contexts` lets
a recomputation (`dropout_state.py`), which `recompute.in_our_modes` gives to every call of torch's `checkpoint`, enter it again; a backward needs none.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from samestep.building.attention import DroppedWeights
from samestep.building.torch_seams import disable_compiler, is_transformed
from samestep.errors import ModelError
from samestep.kernels.kernel_choice import runs_kernels
from samestep.models.spec import MaskSpec
from samestep.randomness.graph_draws import report_uncompiled
from samestep.randomness.masks import (
    DRAWING_NOTHING,
    HashedPositions,
    MaskCuts,
    MaskSlice,
    MaskSource,
    hash_positions,
    mix,
    named_modules,
    positions,
)
from samestep.randomness.replacements import HANDLERS, WITHIN_TRANSFORM, DrawsByName
from samestep.randomness.row_hashes import (
    OF_NO_SAMPLE,
    CountedDraw,
    DrawBits,
    Drawn,
    ForwardRows,
    KnownDraws,
    RunningForward,
    part_of,
)  # fmt: skip

DrawKey = tuple[str, int, int]
"""A mask, or a tensor of random numbers: the module that draws it, its entry, and the draw, as in `MaskSpec`."""
IN_ORDER = (0, 0)
"""Rows of a mask whose samples are in order along dimension 0, each with as many positions as there are for it."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The inputs of the masks of one micro-batch, besides the model."""

    seed: int
    step: int
    samples: Tensor
    """Global index of each sample of the micro-batch, int64 [B], in the order of dimension 0."""
    backward: int = 0
    """The number of backwards of the step before this one, where a loop calls several."""


_AS_IT_IS = nullcontext()
_MOST_MASKS, _MOST_SHAPES = 4096, 64
"""Masks whose place among those hashed at once is remembered, and shapes of masks whose hashed positions are."""


@dataclass(slots=True, eq=False)
class _ModeTracker:
    """The modes active on one model, and the hooks by which its modules report their forwards."""

    modes: list[DropoutMode] = field(default_factory=list)
    rows: dict[DrawKey, tuple[int, int]] = field(default_factory=dict)
    """The dimension and stride of the samples of each draw of the traced forward."""
    draws_numbers: bool = False
    """Whether it has drawn random numbers besides masks."""
    in_graph: Set[nn.Module] = frozenset()
    """Modules that get no hooks, since a graph contains their calls."""
    is_expected: bool = False
    """Whether forwards are known to draw; then what a model compiles itself runs uncompiled, since its graph would keep or change masks."""
    hooked: WeakKeyDictionary[nn.Module, RemovableHandle] = field(default_factory=WeakKeyDictionary)
    hooks: list[RemovableHandle] = field(default_factory=list)
    known: KnownDraws = field(default_factory=KnownDraws)
    """The draws of earlier forwards."""
    names: DrawsByName = field(default_factory=DrawsByName)
    """Whether its draws need a mode."""
    in_order: dict[tuple[Any, ...], Drawn] = field(default_factory=dict)
    """The positions of masks whose samples are in order, so that they are views, by draw, shape, probability and what else decides."""
    part: MaskSlice | None = None
    """The part of each mask for which these positions are."""
    hashed: dict[tuple[tuple[int, ...], MaskCuts, torch.device], HashedPositions] = field(default_factory=dict)
    """Hashed positions by the shape of a sample's whole mask and its cuts."""
    num_removed: int = 0
    """The number of times that the hooks were removed; a restored state of the model may bring removed ones back,
    which do nothing."""

    @property
    def is_installed(self) -> bool:
        """Whether the hooks are on the modules, judged by one of them: a restored state may lack all."""
        return any(
            handle.id in module._forward_pre_hooks for module, handle in itertools.islice(self.hooked.items(), 1)
        )

    def positions_of(self, shape: tuple[int, ...], cuts: MaskCuts, device: torch.device) -> HashedPositions:
        """Return the hashed positions of a sample's mask, or of a rank's part of it."""
        key = (shape, cuts, device)
        if key not in self.hashed:
            if len(self.hashed) >= _MOST_SHAPES:
                self.hashed.clear()
            self.hashed[key] = HashedPositions(*hash_positions(*positions(shape, cuts, device)))
        return self.hashed[key]


_TRACKERS: WeakKeyDictionary[nn.Module, _ModeTracker] = WeakKeyDictionary()


def track_modules(model: nn.Module) -> None:
    """Install on each module that may draw the two hooks that report its forward to the active mode.

    The first `DropoutMode` of a model does it. Call it again after modules were added or replaced: a module without
    hooks would draw in the name of its parent. Without an active mode the hooks do nothing.
    """
    tracker = _TRACKERS.setdefault(model, _ModeTracker())
    for name, module in named_modules(model).items():
        if type(module) in DRAWING_NOTHING or module in tracker.in_graph:
            continue
        handle = tracker.hooked.get(module)
        if handle is None or handle.id not in module._forward_pre_hooks:  # or a trace has taken its hooks away
            enter, leave = _reports(name, tracker, tracker.num_removed)
            tracker.hooked[module] = handle = module.register_forward_pre_hook(enter, prepend=True)
            tracker.hooks += [handle, module.register_forward_hook(leave, always_call=True)]


def expect_draws(model: nn.Module) -> None:
    """Note that the forwards of a model draw."""
    _TRACKERS.setdefault(model, _ModeTracker()).is_expected = True


def leave_out(model: nn.Module, in_graph: Set[nn.Module]) -> None:
    """Install no hooks on modules whose calls a graph contains, but report those that run uncompiled."""
    tracker = _TRACKERS.setdefault(model, _ModeTracker())
    tracker.in_graph = in_graph
    for name, module in named_modules(model).items():
        if module in in_graph and type(module) not in DRAWING_NOTHING:
            report_uncompiled(module, *_reports(name, tracker, None))


def untrack_modules(model: nn.Module) -> None:
    """Remove the hooks where nothing draws: a module with hooks takes longer to call."""
    tracker = _TRACKERS.setdefault(model, _ModeTracker())
    for hook in tracker.hooks:
        hook.remove()
    tracker.hooks.clear()
    tracker.hooked.clear()
    tracker.num_removed += 1


def _reports(name: str, tracker: _ModeTracker, round_: int | None) -> tuple[Callable[..., None], ...]:
    """Return the two functions that report the forwards of a module, until hooks are removed once more than in this round."""
    modes = tracker.modes

    def enter(module: nn.Module, args: Any) -> None:
        if modes and (round_ is None or tracker.num_removed == round_):
            modes[-1]._enter_module(name)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if modes and (round_ is None or tracker.num_removed == round_):
            frames = modes[-1]._frames
            if frames[-1].name == name and len(frames) > 1:
                frames.pop()

    return enter, leave


class DropoutMode(MaskSource, TorchFunctionMode):
    """A function mode that computes every dropout mask and random number as a function of its position and of `draw`.

    One object serves one forward of one micro-batch (its counts of entries are never reset).

    Raises:
        ModelError: raised inside, where a forward needs random numbers of another kind, or a tensor has no samples
        where the trace has found them.
    """

    def __init__(self, model: nn.Module, draw: Draw, part: MaskSlice | None = None) -> None:
        super().__init__()
        if not (model in _TRACKERS and _TRACKERS[model].is_installed):
            track_modules(model)
        self.allows_random = False
        self._names: DrawsByName | None = None
        self._entered: list[tuple[bool, bool, AbstractContextManager[object]]] = []
        """Whether draws are seen by names and by the mode since each time that it was entered, and what keeps the model's own graphs from running."""
        self.num_draws = 0
        """Masks drawn so far, recomputed ones included; 0 after a forward means that this model has no dropout."""
        self._model, self._draw, self._part, self._num_samples = model, draw, part, draw.samples.numel()
        self._tracker = _TRACKERS[model]
        if self._tracker.part is not part:  # the identity of a part that is gone may be another's
            self._tracker.part = part
            self._tracker.in_order.clear()
        # For draws outside every module, as in a loss; the model itself is entry 0 of "".
        self._frames = [RunningForward("", -1)]
        self._entries: dict[str, int] = {}
        self._sample_keys: dict[torch.device, Tensor] = {}
        self._generator: Tensor | None = None
        self.settle()
        step = f"{draw.step}.{draw.backward}" if draw.backward else draw.step
        keys = hashlib.blake2b(f"{draw.seed}/{step}/".encode(), digest_size=8)
        self._rows = ForwardRows(self._tracker.known, keys)
        self._unknown = set[DrawKey]()  # when they were drawn first: a recomputation draws them by the same operations

    def may_go_by_name(self) -> DropoutMode:
        """Let draws be seen by the names of their functions, where earlier forwards have shown that this suffices; return the mode."""
        if type(self).__torch_function__ is __class__.__torch_function__:  # type: ignore[name-defined]  # whatever its name stands for
            self._names = self._tracker.names
        return self

    def end_forward(self) -> None:
        """Decide by a training forward that has ended how the next one is watched."""
        if self._names is not None and self.num_draws and self._tracker.is_expected:
            self._names.end_forward()

    def __enter__(self) -> Self:
        names = self._names
        by_name = names is not None and self._tracker.is_expected and not (names.is_tried and names.needs_mode)
        by_mode = names is None or names.needs_mode or not names.is_tried
        is_uncompiled = self._tracker.is_expected and not self._tracker.in_graph
        uncompiled = disable_compiler() if is_uncompiled else _AS_IT_IS
        uncompiled.__enter__()
        self._entered.append((by_name, by_mode, uncompiled))
        if by_mode:
            super().__enter__()
        if names is not None and by_name:
            names.enter(self, self._model)
        self._tracker.modes.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self._tracker.modes.pop()
        by_name, by_mode, uncompiled = self._entered.pop()
        uncompiled.__exit__(*error)
        if self._names is not None and by_name:
            self._names.leave()
        if by_mode:
            super().__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        if self._names is not None and self._entered[-1][0]:
            self._names.note(func)
        if handler is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        if is_transformed():
            raise self.refuse(WITHIN_TRANSFORM)
        return handler(self, func, *args, **(kwargs or {}))

    def settle(self) -> None:
        """Record the present state of the process's generator as that before the forward, if there are random numbers."""
        if self._tracker.draws_numbers:
            self._generator = torch.default_generator.get_state()

    def _enter_module(self, name: str) -> None:
        entry = self._entries.get(name, 0)
        self._entries[name] = entry + 1
        self._frames.append(RunningForward(name, entry))

    def count_entries(self, entries: Mapping[str, int]) -> None:
        """Count earlier calls of modules, by name, that run elsewhere."""
        for name, count in entries.items():
            self._entries[name] = self._entries.get(name, 0) + count

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses an operation of the innermost module."""
        return ModelError("random-numbers", f"{self._frames[-1].name or 'the model itself'}: {reason}")

    def _next_draw(self) -> DrawKey:
        """Count a mask of the innermost module; return the module's name, the entry and the draw."""
        frame = self._frames[-1]
        frame.num_draws += 1
        self.num_draws += 1
        return frame.name, frame.entry, frame.num_draws - 1

    def _next_numbers(self) -> DrawKey:
        """Count a tensor of random numbers of the innermost module, from -1 down: evaluation draws them without masks."""
        frame = self._frames[-1]
        frame.num_numbers += 1
        self.num_draws += 1
        return frame.name, frame.entry, -frame.num_numbers

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped.

        Raises:
            ModelError: the dimension of samples does not hold the samples, or p is not between 0 and 1.
        """
        known = self._known_mask(x, shape, p)
        return self._counted(p, what).bits(x, shape).dropped() if known is None else known

    def drop_elements(self, x: Tensor, p: float, what: str, *, inplace: bool) -> Tensor | None:
        """Drop elements of x by one kernel; return None, and draw no mask, where none runs. It raises what `drop` does."""
        if not runs_kernels(x) or p >= 1.0:
            return None
        return self._counted(p, what).drop_elements(x, inplace=inplace)

    def _known_mask(self, x: Tensor, shape: torch.Size, p: float) -> Tensor | None:
        """Return the mask of the next draw and count it, if it was hashed at once with the forward's first; most often it was."""
        frame = self._frames[-1]
        draw = frame.name, frame.entry, frame.num_draws
        drawn = self._tracker.in_order.get((draw, shape, p, self._num_samples, x.device))
        mask = None if drawn is None or draw in self._unknown else self._rows.taken(draw, drawn)
        if mask is None:
            return None
        frame.num_draws += 1
        self.num_draws += 1
        return mask.view(shape)

    def drop_weights(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DroppedWeights:
        """Return such a mask of the weights of an attention; its functions raise what `drop` does."""
        known = None if x.is_cuda and runs_kernels(x) else self._known_mask(x, shape, p)
        if known is None:
            return self._counted(p, what).weights(x, shape)
        return DroppedWeights(p, functools.partial(part_of, known))

    def drop_in_graph(
        self, x: Tensor, shape: torch.Size, p: float, what: str, mask: DrawKey, entries: dict[str, int]
    ) -> Tensor:
        """Return the mask that a graph draws: of a module, the index of its call in the graph, and the draw.

        Raises:
            ModelError: `p` is no probability, or the graph draws what the trace did not.
        """
        name, call, draw = mask
        if not 0.0 <= p <= 1.0:
            raise ModelError("value-out-of-range", f"{name}: {what} with probability {p}; it is between 0 and 1")
        frame = next((frame for frame in reversed(self._frames) if frame.name == name), None)
        if frame is not None:
            entry = frame.entry
        else:  # a graph contains its calls, which no hook counts
            entry = entries.setdefault(name, self._entries.get(name, 0)) + call
            self._entries[name] = max(self._entries.get(name, 0), entry + 1)
        self.num_draws += 1
        key, rows = (name, entry, draw), self._tracker.rows
        if key not in rows and any(owner == name for owner, _, _ in rows):
            raise ModelError(
                "random-numbers",
                f'{name}: its graph draws {what} {key[1:]}, which the trace did not. Set run.compile = "none"',
            )
        bits = self._arranged(key, rows.get(key, IN_ORDER), shape, x.device, what, p)
        # A compiler may write into the memory of a result; that of known masks is shared.
        return bits.dropped().clone() if bits.mask is not None else bits.dropped().contiguous()

    def _counted(self, p: float, what: str) -> CountedDraw:
        """Count a mask of the innermost module."""
        self._unknown.add(mask := self._next_draw())
        if not 0.0 <= p <= 1.0:
            raise self.refuse(f"{what} with probability {p}; it is between 0 and 1")
        rows = self._tracker.rows.get(mask, IN_ORDER)

        def arranged(device: torch.device, shape: torch.Size, p: float) -> DrawBits:
            return self._remembered(mask, self._arranged(mask, rows, shape, device, what, p), shape, device, p)

        return CountedDraw(arranged, rows[0], p)

    def _remembered(
        self, mask: DrawKey, draw_bits: DrawBits, shape: torch.Size, device: torch.device, p: float
    ) -> DrawBits:
        """Return the bits of a mask, and remember its place where it was hashed at once with others."""
        if draw_bits.mask is not None and draw_bits.is_in_order:
            if len(self._tracker.in_order) >= _MOST_MASKS:
                self._tracker.in_order.clear()
            key = mask, tuple(shape), p, self._num_samples, device
            self._tracker.in_order[key] = self._rows.drawn(mask)
        return draw_bits

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Return the hashed bits of random numbers, int32 [shape], which are those of their samples.

        Raises:
            ModelError: no trace has shown where these numbers have their samples, or they are not there.
        """
        if self._generator is not None and not torch.equal(torch.default_generator.get_state(), self._generator):
            raise self.refuse(
                f"{what}: the forward seeds the generator itself, so these numbers are constants. Make constants in "
                "__init__, as a buffer. Without torch.manual_seed, numbers are functions of seed, step and sample"
            )
        if len(self._frames) == 1:
            raise self.refuse(
                f"{what}: random numbers in the loss. Use numbers that the model's forward draws and returns"
            )
        numbers = self._next_numbers()
        rows = (
            (OF_NO_SAMPLE, 0) if not shape else self._tracker.rows.get(numbers, IN_ORDER if like is not None else None)
        )
        if rows is None:
            raise self.refuse(
                f"{what}: the traced forward has not drawn these random numbers, so their samples are "
                "unknown. Draw them in every forward, or like another tensor (torch.randn_like)"
            )
        if is_shared and rows[0] != OF_NO_SAMPLE:
            raise self.refuse(
                f"{what}: an order of samples, which would mix the samples of a batch. Use an order of features"
            )
        return self._arranged(numbers, rows, shape or (1,), device, what).whole().view(tuple(shape))

    def _arranged(
        self,
        draw: DrawKey,
        rows: tuple[int, int],
        shape: Sequence[int],
        device: torch.device,
        what: str,
        p: float = 0.0,
    ) -> DrawBits:
        """Return the hashed bits of a draw of this shape, with its samples at `rows`; of a mask with its probability."""
        dim, inner = rows
        num_samples = 1 if dim == OF_NO_SAMPLE else self._num_samples
        if not shape or (dim != OF_NO_SAMPLE and (shape[dim] % (num_samples * max(inner, 1)) or not shape[dim])):
            raise self.refuse(
                f"{what} of a tensor of shape {tuple(shape)}: dimension {dim} must hold the {num_samples} samples of the "
                "micro-batch (or as many rows for each), or the mask would differ between layouts"
            )
        whole = tuple(shape) if dim == OF_NO_SAMPLE else (*shape[:dim], shape[dim] // num_samples, *shape[dim + 1 :])
        each = whole
        cuts: MaskCuts = ()
        if self._part is not None:
            cuts = self._part.cuts(draw, whole)
            for cut, degree, _ in cuts:
                whole = (*whole[:cut], whole[cut] * degree, *whole[cut + 1 :])
        at = self._tracker.positions_of(whole, cuts, device)
        keys = self._keys_of_samples(device, of_samples=dim != OF_NO_SAMPLE)
        halves, mask = self._rows.of_draw(draw, keys, at, p, is_shared=dim == OF_NO_SAMPLE)
        return DrawBits(halves, mask, at.columns, p, num_samples, tuple(shape), each, dim, inner)

    def _keys_of_samples(self, device: torch.device, *, of_samples: bool) -> Tensor:
        """Return a key for each sample, int64 [B]; for a mask that all samples share one key, 0."""
        if not of_samples:
            return torch.zeros(1, dtype=torch.int64, device=device)
        if device not in self._sample_keys:
            self._sample_keys[device] = mix(self._draw.samples.to(device, torch.int64))
        return self._sample_keys[device]


def begin_after(model: nn.Module, entries: Mapping[str, int]) -> None:
    """Let the active mode of a model, if there is one, count the calls of modules by earlier pipeline stages."""
    if (mode := active_mode(model)) is not None:
        mode.count_entries(entries)


def place_samples(model: nn.Module, masks: tuple[MaskSpec, ...]) -> None:
    """Give a model's modes the place of the samples in each draw, as a trace has found it."""
    tracker = _TRACKERS.setdefault(model, _ModeTracker())
    tracker.rows = {(mask.owner, mask.entry, mask.draw): mask.rows or IN_ORDER for mask in masks}
    tracker.draws_numbers = any(mask.draw < 0 for mask in masks)


def active_mode(model: nn.Module) -> DropoutMode | None:
    """Return the innermost mode that is active on a model; None where none is."""
    tracker = _TRACKERS.get(model)
    return tracker.modes[-1] if tracker is not None and tracker.modes else None


def needs_mode(model: nn.Module) -> bool:
    """See all later forwards of a model by a mode, since one has drawn what no name has shown; return whether it was seen by names."""
    tracker = _TRACKERS.get(model)
    return tracker is not None and tracker.names.give_up()
