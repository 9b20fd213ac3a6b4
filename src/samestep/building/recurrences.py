"""Functions of models that compute tokens from a state, and return the state after them: recurrences and linear attentions.

A function is one by the names of its arguments (`Convention`): one that takes the state at which a sequence begins, as a tensor,
several, or a list of them, and one that asks for the state at its end. A scan of Mamba takes none: it is linear in its state,

    h_t = exp(A d_t) h_{t-1} + d_t B_t u_t        y_t = C_t h_t

so that a state h at the beginning adds C_t exp(A (d_1 + ... + d_t)) h to token t (`_scan_from`; Gu and Dao 2023, arXiv:2312.00752).

A model's code calls them by their names, as functions of its file or methods of its classes; inside `intercepting` these names are a
wrapper's, which hands each call to a receiver. What torch's recurrent layers (`nn.RNN`, `nn.GRU`, `nn.LSTM`) call is seen by a function
mode there: it is given the state at the beginning, which is the rank's own only where the sequence begins. That the convention
holds is tried on drawn values (`independence/traced_moves.py`).
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.building.torch_seams import FunctionMode, Replaced
from samestep.trees import tree_leaves

State = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Convention:
    """The arguments by which functions take and return a state."""

    states: tuple[str, ...]
    """The state at the beginning, None for zeros; empty for a scan of Mamba."""
    asks: str = ""
    """The argument that asks for the state at the end; empty where it is always returned."""
    is_list: bool = False
    """Whether the state is one argument that is a list of tensors."""
    is_alone: bool = False
    """Whether the tokens alone are returned, and not a pair, where the state is not asked for."""
    is_layer: bool = False
    """Whether the function is that of a recurrent layer of torch, which is given weights and a state, and returns states behind the tokens."""


CONVENTIONS = (
    Convention(("initial_state",), "output_final_state"),
    Convention(("initial_states",), "return_final_states", is_alone=True),
    Convention(("c_initial", "n_initial", "m_initial")),
    Convention(("state",), "return_state", is_list=True),
    Convention(("recurrent_states",)),
    Convention((), "return_last_state", is_alone=True),
)
"""Those of fla and of transformers' gated delta rules, Mamba 2, xLSTM, RWKV, RecurrentGemma and Mamba."""
_SCAN = ("A", "B", "C", "D", "z", "delta_bias", "delta_softplus")
"""Arguments of a scan of Mamba behind u and d."""


class StateCall(NamedTuple):
    """One call of such a function."""

    name: str
    convention: Convention
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def begins(self) -> bool:
        """Whether the call begins at no state, and the code asks for none at its end or is always given it."""
        bound = self._bound
        return all(bound.get(name) is None for name in self.convention.states) and not (
            self.convention.asks and bound.get(self.convention.asks) not in (None, False)
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """The function and its arguments that are no tensors, as a key of a dictionary."""
        others = (tree_leaf for tree_leaf in tree_leaves((self.args, self.kwargs)) if not isinstance(tree_leaf, Tensor))
        return self.original, *(weakref.ref(part) if isinstance(part, nn.Module) else repr(part) for part in others)

    @property
    def _bound(self) -> dict[str, Any]:
        bound = _signature(self.original).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        extra = bound.arguments.pop("kwargs", {})
        return {**bound.arguments, **extra}

    def run(self, state: State | None, args: Any = None, kwargs: Any = None) -> tuple[Tensor, State]:
        """Return the tokens computed from a state, and the state after them.

        Raises:
            TypeError: the function returns something else.
        """
        args, kwargs = self.args if args is None else args, dict(self.kwargs if kwargs is None else kwargs)
        how = self.convention
        if not how.states:
            return _scan_from(self.original, args, kwargs, state)
        names = [*_signature(self.original).parameters]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if state is not None:
            arguments |= {how.states[0]: [*state]} if how.is_list else dict(zip(how.states, state, strict=True))
        if how.asks:
            arguments[how.asks] = True
        first = [arguments.pop(name) for name in names[: len(args)]]
        outcome = self.original(*first, **arguments)
        if not isinstance(outcome, tuple) or len(outcome) < 2 or (len(outcome) > 2 and not how.is_layer):
            raise TypeError(f"{self.name} returns no pair")
        tokens, last = outcome[0], (outcome[1:] if how.is_layer else outcome[1])
        states = (last,) if isinstance(last, Tensor) else tuple(last)
        if not isinstance(tokens, Tensor) or not all(isinstance(part, Tensor) for part in states):
            raise TypeError(f"{self.name} returns other things than tensors")
        return tokens, states

    def returned(self, tokens: Tensor, state: State) -> Any:
        """Return what the code has asked for."""
        if self.convention.is_layer:
            return tokens, *state
        if not self.convention.asks:
            return tokens, (state if len(state) > 1 else state[0])
        return tokens if self.convention.is_alone else (tokens, None)


def _scan_from(original: Any, args: Any, kwargs: Any, state: State | None) -> tuple[Tensor, State]:
    """Return what a scan of Mamba computes from a state on: u and d are [B, D, T], A [D, N], B and C [B, N, T]."""
    tokens, last = original(*args, **{**kwargs, "return_last_state": True})
    if state is None:
        return tokens, (last,)
    names = [*_signature(original).parameters]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    steps = arguments[names[1]]
    a, c = arguments["A"], arguments["C"]
    gate, bias, is_softplus = (arguments.get(name) for name in _SCAN[4:])
    steps = steps if bias is None else steps + bias.to(steps.dtype)[..., None]
    steps = F.softplus(steps) if is_softplus else steps
    decays = torch.exp(a[None, :, None, :] * steps.cumsum(-1)[..., None])  # [B, D, T, N]
    decayed = decays * state[0].to(decays.dtype)[:, :, None, :]
    more = torch.einsum("bdtn,bnt->bdt", decayed, c.to(decayed.dtype))
    more = more if gate is None else more * F.silu(gate)
    return tokens + more.to(tokens.dtype), (last + decayed[:, :, -1].to(last.dtype),)


_LAYERS = frozenset(getattr(torch, name) for name in ("rnn_tanh", "rnn_relu", "gru", "lstm"))
"""What torch's recurrent layers call."""
_OF_LAYERS = Convention(("state",), is_list=True, is_layer=True)


def layer_call(function: Any, args: tuple[Any, ...]) -> StateCall | None:
    """Return a call of what a recurrent layer of torch calls as one with a state; None if it is another one.

    Nor is it one on packed sequences, in both directions, with dropout between layers, or from a state that takes a gradient, which
    only the rank with the first tokens would give.
    """
    # (input, [batch_sizes,] states, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    if function not in _LAYERS or len(args) != 9 or not isinstance(args[3], bool):
        return None
    x, initial, weights, has_biases, num_layers, dropout, train, is_both_ways, is_batch_first = args
    states = [*initial] if isinstance(initial, list | tuple) else [initial]
    if is_both_ways or (train and dropout and num_layers > 1) or any(state.requires_grad for state in states):
        return None
    settings = has_biases, num_layers, 0.0, train, False, is_batch_first
    return StateCall(function.__name__, _OF_LAYERS, _run_layer, (function, x, states, [*weights], settings), {})


def _run_layer(
    function: Any,
    x: Tensor,
    initial: list[Tensor],
    weights: list[Tensor],
    settings: tuple[Any, ...],
    state: list[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Return what a recurrent layer computes from a state on, and the states after it."""
    states = initial if state is None else state
    tensors: tuple[Tensor, ...] = function(x, states if function is torch.lstm else states[0], weights, *settings)
    return tensors


@functools.lru_cache(maxsize=1024)
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


def convention_of(function: Any) -> Convention | None:
    """Return the convention of a function by the names of its arguments; None if it has none of them."""
    try:
        names = _signature(function).parameters
    except (TypeError, ValueError):
        return None
    for convention in CONVENTIONS:
        needed = (
            *convention.states,
            *([convention.asks] if convention.asks else []),
            *(() if convention.states else _SCAN[:3]),
        )
        if all(name in names for name in needed) and len(names) > 2:
            return convention
    return None


def functions_of(model: nn.Module) -> list[tuple[Any, str]]:
    """Return the files and classes of a model's modules that name such a function, with its name; torch for its recurrent layers."""
    functions: dict[tuple[int, str], tuple[Any, str]] = {}
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        functions[id(torch), ""] = torch, ""
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        methods = [member for member in vars(kind).values() if inspect.isfunction(member)]
        file = vars(sys.modules[kind.__module__]) if kind.__module__ in sys.modules else {}
        used = {name for method in methods for name in method.__code__.co_names}
        for method in methods:  # decorated ones name what they wrap
            used |= set(getattr(inspect.unwrap(method), "__code__", method.__code__).co_names)
        for name in used & file.keys():
            if inspect.isfunction(file[name]) and convention_of(file[name]):
                functions[id(file), name] = sys.modules[kind.__module__], name
        for method in methods:
            if convention_of(method) and inspect.isfunction(vars(kind).get(method.__name__)):
                functions[id(kind), method.__name__] = kind, method.__name__
    return [functions[key] for key in sorted(functions, key=lambda key: functions[key][1])]


@contextmanager
def intercepting(functions: Sequence[tuple[Any, str]], receive: Callable[[StateCall], Any]) -> Iterator[None]:
    """Hand each call of these functions inside to a receiver, which returns `NotImplemented` for the function to compute it."""
    wrapped = [
        (owner, name, functools.partial(_wrapped, name, receive)) for owner, name in functions if owner is not torch
    ]

    def carry_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = None if kwargs else layer_call(func, args)
        outcome = NotImplemented if call is None else receive(call)
        return func(*args, **kwargs) if outcome is NotImplemented else outcome

    with Replaced(*wrapped), FunctionMode(carry_out) if len(wrapped) < len(functions) else nullcontext():
        yield


_OURS = "_samestep_receives_states"


def _wrapped(name: str, receive: Callable[[StateCall], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    original = inspect.unwrap(function, stop=lambda f: not hasattr(f, _OURS))
    convention = convention_of(original)
    assert convention is not None

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        outcome = receive(StateCall(name, convention, original, args, kwargs))
        return original(*args, **kwargs) if outcome is NotImplemented else outcome

    setattr(call, _OURS, True)
    return call
