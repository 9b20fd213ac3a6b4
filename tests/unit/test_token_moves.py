"""Calls that compute a token from those at a fixed distance, on slices with tokens of neighbours, are those on the whole sequence."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from samestep.building.recurrences import StateCall, convention_of, functions_of, intercepting
from samestep.independence.token_moves import Edge, TokenPlace, ViewSources, form_of, kind_of
from samestep.independence.traced_moves import _token_dim_of
from samestep.models.layer_parts import TokenMove
from samestep.models.spec import ModelSpec
from tests.parity.moved_models import (
    ENTRIES,
    MIXERS,
    WIDTH,
    Make,
    Mixing,
    MixingBlock,
    Recurrence,
    RecurrentLayers,
    Shift,
    decayed_sums,
)
from tests.parts import Words
from tests.unit.test_locality import shown

TOKENS, SLICES = 12, 3


class OnSlices(TorchFunctionMode):
    """Computes the calls of one slice, with the neighbours' tokens taken from the whole operand that each call has had."""

    def __init__(self, index: int, wholes: list[Tensor], given: list[tuple[TokenPlace, Tensor]]) -> None:
        super().__init__()
        self.index, self.wholes, self.given, self.size = index, wholes, given, TOKENS // SLICES

    def extend(
        self, x: Tensor, dim: int, left: int, right: int, first: Edge | None = None, last: Edge | None = None
    ) -> Tensor:
        whole = self.wholes.pop(0)
        start = self.index * self.size
        assert torch.equal(whole.narrow(dim, start, self.size), x)
        parts = [whole.narrow(dim, start - left, left) if self.index else _edge(x, dim, left, first, whole, -1), x]
        is_last = self.index == SLICES - 1
        parts.append(_edge(x, dim, right, last, whole, 1) if is_last else whole.narrow(dim, start + self.size, right))
        return torch.cat(parts, dim)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kind_of(func) is None:
            return func(*args, **kwargs)
        form = form_of(func, args, kwargs, self.given.pop(0)[0], self.size, ViewSources())
        assert form is not None
        return form.compute(self.extend)


def _edge(x: Tensor, dim: int, rows: int, edge: Edge | None, whole: Tensor, side: int) -> Tensor:
    if edge is None:  # around the sequence
        return whole.narrow(dim, TOKENS - rows if side < 0 else 0, rows)
    return edge if isinstance(edge, Tensor) else x.new_full((*x.shape[:dim], rows, *x.shape[dim + 1 :]), edge)


class OnTheWhole(TorchFunctionMode):
    """Records the operand of each call, and computes it by its form: that of one rank with all tokens."""

    def __init__(self, place: TokenPlace) -> None:
        super().__init__()
        self.place, self.wholes, self.given = place, list[Tensor](), list[tuple[TokenPlace, Tensor]]()

    def extend(
        self, x: Tensor, dim: int, left: int, right: int, first: Edge | None = None, last: Edge | None = None
    ) -> Tensor:
        self.wholes.append(x)
        return torch.cat([_edge(x, dim, left, first, x, -1), x, _edge(x, dim, right, last, x, 1)], dim)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kind_of(func) is None or (form := form_of(func, args, kwargs, self.place, TOKENS, ViewSources())) is None:
            return func(*args, **kwargs)
        self.given.append((self.place, args[0]))
        return form.compute(self.extend)


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], TokenPlace]] = {
    **{
        f"a convolution of {kernel} taps, {dilation} apart, {padding} zeros, {groups} groups": (
            functools.partial(F.conv1d, weight=torch.randn(8, 8 // groups, kernel).double(), padding=padding, dilation=dilation, groups=groups),
            TokenPlace(0, 2),
        )
        for kernel, dilation, padding, groups in (
            (4, 1, 3, 8), (2, 1, 1, 1), (3, 2, 4, 8), (3, 1, 1, 2), (5, 1, "same", 1), (3, 2, "same", 8), (4, 1, 2, 1),
        )
    },
    "a convolution of rows and columns": (
        lambda x: F.conv2d(x.unsqueeze(1), torch.ones(3, 1, 3, 3).double(), padding=(1, 2))[..., :TOKENS], TokenPlace(0, 3),
    ),
    "zeros in front": (lambda x: F.pad(x, (3, 0)), TokenPlace(0, 2)),
    "ones on both sides": (lambda x: F.pad(x, (1, 2), value=1.0), TokenPlace(0, 2)),
    "repeated ends": (lambda x: F.pad(x, (2, 1), mode="replicate"), TokenPlace(0, 2)),
    "shifted": (lambda x: F.pad(x, (2, -2)), TokenPlace(0, 2)),
    "shifted back": (lambda x: F.pad(x, (-1, 1)), TokenPlace(0, 2)),
    "both dimensions": (lambda x: F.pad(x, (1, -1, 0, 1)), TokenPlace(0, 2)),
    "rolled": (lambda x: x.roll(3, -1), TokenPlace(0, 2)),
    "rolled back": (lambda x: torch.roll(x, shifts=(-2,), dims=(2,)), TokenPlace(0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("what", FORMS)
def test_slices_with_tokens_of_neighbours_are_the_whole(what: str) -> None:
    compute, place = FORMS[what]
    x = torch.randn(2, 8, TOKENS, dtype=torch.float64)
    whole = compute(x)
    with (record := OnTheWhole(place)):
        compute(x)
    size, found = TOKENS // SLICES, []
    rows = 0 if "convolution" in what else whole.shape[-1] - TOKENS  # code cuts the last rows of a convolution off
    for index in range(SLICES):
        with OnSlices(index, [*record.wholes], [*record.given]):
            part = compute(x.narrow(2, index * size, size))
        found.append(part[..., : size + (rows if index == SLICES - 1 else 0)])
    assert record.given
    torch.testing.assert_close(torch.cat(found, -1), whole[..., : TOKENS + rows], rtol=1e-12, atol=1e-12)


def moves_of(spec: ModelSpec) -> list[TokenMove]:
    assert spec.slice_refusal == ""
    assert not any(layer.gathered_parts for layer in spec.layers)
    return [move for layer in spec.layers for move in layer.token_moves]


def shown_together(makes: Sequence[Make]) -> ModelSpec:
    """Trace a model in which each of these mixers has a block of its own."""
    return shown(lambda: Words(*(functools.partial(MixingBlock, make) for make in makes), width=WIDTH, entries=ENTRIES))


def test_a_trace_finds_what_is_needed_of_neighbours() -> None:
    found: dict[str, set[tuple[int, int]]] = {}
    for move in moves_of(shown_together([make for make, _, _ in MIXERS.values()])):
        if move.messages:
            found.setdefault(move.owner.split(".")[1], set()).add((move.left, move.right))
    assert {mixer: found.get(str(index)) for index, mixer in enumerate(MIXERS)} == {
        mixer: {(left, right)} for mixer, (_, left, right) in MIXERS.items()
    }


class Valid(nn.Conv1d):
    """A convolution that makes fewer rows, to which zeros are added."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(super().forward(x.mT), (2, 0)).mT


class Unequal(nn.Module):
    """Reads behind the tokens that zeros were added for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 4, padding=3, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT)[..., 3:].mT


class Strided(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT).repeat_interleave(2, -1).mT


class Generated(nn.Module):
    """A convolution whose weights are computed from all tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        weights = self.weights(x.mean(1)).view(-1, 1, 3)
        found = F.conv1d(x.mT.reshape(1, -1, tokens), weights, padding=2, groups=samples * width)
        return found[..., :tokens].view(samples, width, tokens).mT


def _mean_first(x: Tensor) -> Tensor:
    shifted = x.mean(1, keepdim=True).expand_as(x).clone()
    shifted[:, 1:] = x[:, :-1]
    return shifted


def _padding_written(x: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 2, 0)) + 1
    padded[:, :2] = 0.5
    return padded[:, : x.shape[1]]


OF_ALL_TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "the last token in front": lambda x: torch.cat((x[:, -1:], x[:, :-1]), 1),
    "the first token behind": lambda x: torch.cat((x[:, 1:], x[:, :1]), 1),
    "the mean in front": lambda x: torch.cat((x.mean(1, keepdim=True), x[:, :-1]), 1),
    "written onto the mean": _mean_first,
    "padding that is written": _padding_written,
    "a convolution of all tokens but the last": lambda x: F.conv1d(x.mT[..., :-1], x.new_ones(16, 1, 3), padding=2, groups=16)[..., : x.shape[1]].mT,
}  # fmt: skip


def test_a_recurrence_is_computed_from_the_state_of_the_rank_before() -> None:
    found = moves_of(shown(functools.partial(Mixing, Recurrence)))
    states = [move for move in found if move.kind == "state"]
    assert {(move.function, move.elements) for move in states} == {("decayed_sums", 16)}
    assert [move.owner for move in states] == ["blocks.0.mixer", "blocks.1.mixer"]
    assert sum(move.kind == "conv" for move in found) == 2


def test_recurrent_layers_of_torch_are_computed_from_the_state_of_the_rank_before() -> None:
    spec = shown_together([RecurrentLayers])
    states = moves_of(spec)
    assert [(move.owner[-4:].strip("."), move.function, move.dim, move.elements) for move in states] == [
        ("gru", "gru", 1, 16),
        ("lstm", "lstm", 0, 2 * (24 + 16)),
        ("rnn", "rnn_relu", 1, 16),
    ]
    block, sliced = (
        next(layer for layer in one if layer.is_block)
        for one in (spec.layers, [layer.sliced_by(2) for layer in spec.layers])
    )
    serial = {move.owner for move in states}
    of_layers = [one.flops for one in block.products if one.owner in serial]
    assert of_layers == [one.flops for one in sliced.products if one.owner in serial], (
        "a rank waits for the others' tokens"
    )
    others = [one.flops for one in block.products if one.owner not in serial]
    assert sum(others) == 2 * sum(one.flops for one in sliced.products if one.owner not in serial)


class OneLayer(nn.Module):
    """A recurrent layer that computes all tokens on every rank."""

    def __init__(self, width: int, how: str) -> None:
        super().__init__()
        self.how, both, layers = how, how == "both ways", 2 if how == "dropout" else 1
        drop, hidden = 0.5 * (layers == 2), width // 2 if both else width
        self.gru = nn.GRU(width, hidden, layers, dropout=drop, bidirectional=both, batch_first=True)
        self.first = nn.Parameter(torch.rand(layers, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.expand(-1, len(x), -1).contiguous() if self.how == "trained state" else None
        if self.how == "state of tokens":
            first = x.detach().mean(1)[None]
        found, last = self.gru(x, first)
        return found + last[-1][:, None] if self.how == "last state" else found


OF_NO_SUCH_FORM: dict[str, Make] = {
    "fewer rows": lambda width: Valid(width, width, 3),
    "unequal": Unequal,
    "strided": Strided,
    "generated": Generated,
    "a function that ignores its state": functools.partial(Recurrence, is_true=False),
    **{what: functools.partial(Shift, shift=shift) for what, shift in OF_ALL_TOKENS.items()},
    **{
        how: functools.partial(OneLayer, how=how)
        for how in ("both ways", "dropout", "trained state", "state of tokens", "last state")
    },
}
"""Mixers that no rank can go on with."""


@pytest.mark.parametrize("first", range(0, len(OF_NO_SUCH_FORM), 2))
def test_what_is_of_no_such_form_computes_all_tokens(first: int) -> None:
    """Two of them in each model, which is examined again for each."""
    names = [*OF_NO_SUCH_FORM][first : first + 2]
    spec = shown_together([OF_NO_SUCH_FORM[name] for name in names])
    assert spec.slice_refusal == ""
    blocks = [layer for layer in spec.layers if layer.is_block]
    assert [name for name, layer in zip(names, blocks, strict=True) if not layer.gathered_parts] == []
    moved = {name for name, layer in zip(names, blocks, strict=True) if layer.token_moves}
    assert moved <= {"a function that ignores its state"}  # a convolution is in front of it


@pytest.mark.parametrize(("kind", "width"), [(nn.RNN, 1), (nn.GRU, 1024), (nn.LSTM, 16)])
def test_a_trial_shows_the_state_of_layers_of_any_width(kind: Any, width: int) -> None:
    layer, x, found = kind(width, width), torch.rand(6, 2, width), list[StateCall]()

    def receive(call: StateCall) -> Any:
        found.append(call)
        return NotImplemented

    with intercepting(functions_of(layer), receive):
        tokens = layer(x)[0]
    (call,) = found
    assert call.begins
    torch.testing.assert_close(call.run(None)[0], tokens)
    dims = [0, *(None for _ in (*call.args[2], *call.args[3]))]
    assert _token_dim_of(call, dims) == 0


def of_positive(
    x: Tensor, decay: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Ignores its state, which drawn values below zero do not show."""
    tokens, state = decayed_sums(x.relu(), decay)
    return tokens, state


def of_documents(
    x: Tensor, number: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Begins anew at each document, but not at one that begins with the tokens that it is given."""
    same = F.pad(number[:, 1:] == number[:, :-1], (1, 0), value=True)
    return decayed_sums(x, same[..., None].to(x.dtype), initial_state, output_final_state)


def with_state_asked(x: Tensor, decay: Tensor, initial_state: Any = None, output_final_state: bool = True) -> Any:
    """Returns its state if it is not told otherwise."""
    return decayed_sums(x, decay, initial_state, output_final_state)


@pytest.mark.parametrize(
    ("function", "second", "is_one"),
    [
        (decayed_sums, torch.rand(2, 6, 4), True),
        (of_positive, torch.rand(2, 6, 4), False),
        (of_documents, torch.zeros(2, 6, dtype=torch.long), False),
    ],
)
def test_a_trial_tells_recurrences_from_other_functions(function: Any, second: Tensor, is_one: bool) -> None:
    convention = convention_of(function)
    assert convention is not None
    call = StateCall(function.__name__, convention, function, (torch.rand(2, 6, 4), second), {})
    assert call.begins
    assert (_token_dim_of(call, [1, 1]) == 1) is is_one


def test_a_state_that_is_asked_for_by_default_is_asked_for() -> None:
    convention = convention_of(with_state_asked)
    assert convention is not None
    assert not StateCall("one", convention, with_state_asked, (torch.rand(2, 6, 4), torch.rand(2, 6, 4)), {}).begins


@pytest.mark.parametrize("gated", [False, True])
def test_a_scan_of_mamba_goes_on_from_a_state(gated: bool) -> None:
    modeling = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    scan = inspect.unwrap(modeling.mamba_selective_scan)
    u, d, z = (torch.randn(2, 4, 9, dtype=torch.float64) for _ in range(3))
    b, c = (torch.randn(2, 3, 9, dtype=torch.float64) for _ in range(2))
    convention = convention_of(scan)
    assert convention is not None
    fixed = {
        "A": -torch.rand(4, 3).double(),
        "D": torch.rand(4).double(),
        "delta_bias": torch.rand(4).double(),
        "delta_softplus": True,
    }

    def run(rows: slice, state: tuple[Tensor, ...] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        given = {"B": b[..., rows], "C": c[..., rows], "z": z[..., rows] if gated else None, **fixed}
        return StateCall("scan", convention, scan, (u[..., rows], d[..., rows]), given).run(state)

    whole, end = run(slice(None), None)
    first, state = run(slice(0, 5), None)
    second, last = run(slice(5, None), state)
    torch.testing.assert_close(torch.cat((first, second), -1), whole, rtol=1e-5, atol=1e-6)  # B in float32
    torch.testing.assert_close(last, end, rtol=1e-5, atol=1e-6)
