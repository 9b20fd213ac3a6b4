"""Logits that are never computed whole: a model's and a loss's operations on them are recorded, and run in chunks of
tokens.

While `PendingHead.pending` is active the module that makes the logits returns `PendingLogits` instead: a tensor of their
shape and dtype without elements, which knows the hidden states and the weight that they are the product of. The code
behind it runs as it is:

    logits.float(), logits / cap, torch.tanh(...)          elementwise: noted, and applied to each chunk
    flatten(0, -2), [:, :-1], transpose(1, 2)              moves rows: done to the hidden states
    F.cross_entropy(...), torch.logsumexp(...), samestep.losses.token_entropy(...)
                                                           needs numbers of each row: `chunked_cross_entropy.row_losses`

Anything else would need logits that exist, and is refused by its name. A model is tried so once on the meta device
(`examine`), with the job's loss: what passes there is what a layout with `loss_chunk` runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.building.chunked_cross_entropy import LOGITS, Chunking, Elementwise, Head, Place, row_losses
from samestep.building.loss_result import loss_result
from samestep.building.torch_seams import DisableTorchFunction, disable_current_modes
from samestep.errors import ModelError
from samestep.models.spec import ModelSpec
from samestep.state.snapshot import preserve_function
from samestep.tracing.custom_functions import follow_calls
from samestep.tracing.meta_tensors import NeedsValuesError
from samestep.trees import tensors_in, tree_leaves, tree_map

WORKS = (
    "Use F.cross_entropy, torch.logsumexp, samestep.losses.token_entropy or elementwise functions of logits, or a layout "
    "without loss_chunk"
)


class _Made(NamedTuple):
    """The operands of logits."""

    hidden: Tensor
    """[..., D]; its D stands where the logits have their classes."""
    weight: Tensor
    bias: Tensor | None
    head: Head
    others: tuple[Tensor, ...] = ()
    class_dim: int = -1
    """The dimension of the classes, counted from the end."""


class PendingLogits(Tensor):
    """Logits without elements: shape, dtype and device alone."""

    made: _Made

    @staticmethod
    def of(source: _Made, dtype: torch.dtype, hooks: Sequence[Callable[..., Any]] = ()) -> PendingLogits:
        """Return the logits that a head makes of hidden states."""
        shape = list(source.hidden.shape)
        shape[source.class_dim] = source.weight.shape[0] * source.head.chunking.num_ranks
        tensors = (source.hidden, source.weight, *([] if source.bias is None else [source.bias]), *source.others)
        takes_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        logits: PendingLogits = Tensor._make_wrapper_subclass(
            PendingLogits, shape, dtype=dtype, device=source.hidden.device, requires_grad=takes_gradient
        )
        logits.made, logits.hooks = source, list(hooks)
        return logits

    hooks: list[Callable[..., Any]]
    """What is called with the gradient before a backward comes to the head."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out what can be done without logits.

        Raises:
            ModelError: the function needs them.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            return super().__torch_function__(func, types, args, kwargs)
        if name in _DONE:
            return _DONE[name](*args, **kwargs)
        first = args[0] if args else None
        if name in _MOVING and isinstance(first, PendingLogits):
            return _apply_to_hidden(name, func, first, args[1:], kwargs)
        pending = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PendingLogits)}
        if len(pending) == 1:
            (logits,) = pending.values()
            result = _elementwise(name, func, logits, args, kwargs)
            if result is not None:
                return result
        return super().__torch_function__(func, types, args, kwargs)  # of its shape, or else refused below

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse an operation that needs elements.

        Raises:
            ModelError: always.
        """
        raise _refusal(func.overloadpacket.__name__)

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape and dtype."""
        return f"PendingLogits({list(self.shape)}, {self.dtype})"

    def with_hidden(self, hidden: Tensor) -> PendingLogits:
        """Return the logits of other hidden states."""
        return PendingLogits.of(self.made._replace(hidden=hidden), self.dtype, self.hooks)

    def log_sums_of_own_classes(self) -> Tensor:
        """Return the log-sum-exp of each row over the classes that this rank has, without a gradient: finite if these are."""
        head = Head(Chunking(self.made.head.chunking.tokens), self.made.head.functions)
        with torch.no_grad():
            return PendingLogits.of(self.made._replace(head=head), self.dtype).rows(None)[1]

    def rows(
        self, labels: Tensor | None, smoothing: float = 0.0, *, has_means: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the cross entropy, the log-sum-exp and with `has_means` the expected logit of each row, in the shape of the logits
        without their classes.

        Collective over the ranks that cut the vocabulary: if one does not call it, the others wait until the time limit.
        """
        source = self.made
        hidden = source.hidden.movedim(source.class_dim, -1)
        flat = None if labels is None else labels.reshape(-1)
        rows = hidden.reshape(-1, hidden.shape[-1])
        results = row_losses(
            source.head, rows, source.weight, source.bias, source.others, flat, smoothing, has_means=has_means
        )
        for result in results:
            if result.requires_grad:
                for hook in self.hooks:
                    result.register_hook(hook)
        losses, log_sums, means = (result.view(hidden.shape[:-1]) for result in results)
        return losses, log_sums, means


def _refusal(what: str) -> ModelError:
    return ModelError(
        "loss-chunk-unsupported",
        f"loss_chunk makes the logits in chunks of tokens, and {what} needs them at once. {WORKS}",
    )


# -- functions of rows ---------------------------------------------------------------------------------------------------


def _cross_entropy(
    logits: Any,
    labels: Any,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute what `F.cross_entropy` does, from chunks."""
    if not isinstance(logits, PendingLogits) or weight is not None or size_average is not None or reduce is not None:
        raise _refusal("cross_entropy with a weight for each class, or logits as labels,")
    class_dim = logits.dim() + logits.made.class_dim
    if labels.is_floating_point() or class_dim != min(1, logits.dim() - 1):
        raise _refusal("cross_entropy of probabilities, or of logits with their classes in a dimension other than 1,")
    num_classes = logits.shape[class_dim]
    losses, _, _ = logits.rows(labels, label_smoothing)
    is_counted = labels != ignore_index
    is_label = (labels >= 0) & (labels < num_classes)
    losses = losses.masked_fill(~is_label, torch.nan).masked_fill(~is_counted, 0.0)
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / is_counted.sum()


def _logsumexp(logits: PendingLogits, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    """Compute what `torch.logsumexp` does, from chunks."""
    (at,) = dim if isinstance(dim, Sequence) else (dim,)
    if at % logits.dim() != logits.made.class_dim % logits.dim():
        raise _refusal(f"logsumexp over dimension {at}, which is not the dimension of the classes,")
    _, log_sums, _ = logits.rows(None)
    return log_sums.unsqueeze(at) if keepdim else log_sums


def _token_entropy(logits: PendingLogits) -> Tensor:
    """Compute what `samestep.losses.token_entropy` does, from chunks."""
    if logits.made.class_dim != -1:
        raise _refusal("token_entropy of logits with their classes in a dimension other than the last,")
    _, log_sums, means = logits.rows(None, has_means=True)
    return log_sums - means


def _register_hook(logits: PendingLogits, hook: Callable[..., Any]) -> None:
    """Call the hook before the backward of what is computed from the logits; its result is not used."""
    logits.hooks.append(lambda gradient: (hook(gradient), None)[1])


def detach_logits(logits: PendingLogits) -> PendingLogits:
    """Return the same logits without a graph."""
    source = logits.made
    bias = None if source.bias is None else source.bias.detach()
    others = tuple(tensor.detach() for tensor in source.others)
    detached = source._replace(hidden=source.hidden.detach(), weight=source.weight.detach(), bias=bias, others=others)
    return PendingLogits.of(detached, logits.dtype)


_DONE: dict[str, Callable[..., Any]] = {
    "cross_entropy": _cross_entropy,
    "logsumexp": _logsumexp,
    "token_entropy": _token_entropy,
    "register_hook": _register_hook,
    "detach": detach_logits,
}


# -- moving rows ---------------------------------------------------------------------------------------------------------

_RESHAPING = ("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous")
"""Functions that keep the order of the elements."""
_MOVING = (*_RESHAPING, "__getitem__", "narrow", "select", "transpose", "movedim", "permute", "swapaxes")


def _apply_to_hidden(
    name: str, func: Callable[..., Any], logits: PendingLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PendingLogits:
    """Do to the hidden states what a function does to the rows of logits."""
    source, size = logits.made, logits.shape[logits.made.class_dim]

    def probe(classes: int) -> Tensor:
        shape = list(logits.shape)
        shape[source.class_dim] = classes
        return torch.empty(shape, device="meta")

    with disable_current_modes():
        result, longer = func(probe(size), *args, **kwargs), None
        if name not in _RESHAPING:
            longer = func(probe(size + 1), *args, **kwargs)
    if longer is None:
        if source.class_dim != -1 or not result.dim() or result.shape[-1] != size:
            raise _refusal(f"{name} to {list(result.shape)}")
        return logits.with_hidden(source.hidden.reshape(*result.shape[:-1], source.hidden.shape[-1]))
    # A dimension that follows the number of classes is that of the classes.
    follows = [at for at, (count, more) in enumerate(zip(result.shape, longer.shape, strict=True)) if count != more]
    if len(follows) != 1 or result.shape[follows[0]] != size:
        raise _refusal(f"{name}, which takes some classes,")
    moved = source._replace(hidden=func(source.hidden, *args, **kwargs), class_dim=follows[0] - result.dim())
    return PendingLogits.of(moved, logits.dtype, logits.hooks)


# -- elementwise functions -----------------------------------------------------------------------------------------------


_COPYING = (torch.ops.aten._to_copy, torch.ops.aten.clone, torch.ops.aten.detach, torch.ops.aten.alias)


def _is_elementwise(operation: Any) -> bool:
    is_pointwise = torch.Tag.pointwise in operation.tags or operation.overloadpacket in _COPYING
    return is_pointwise and torch.Tag.nondeterministic_seeded not in operation.tags


def _elementwise(
    name: str, func: Callable[..., Any], logits: PendingLogits, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PendingLogits | None:
    """Note an elementwise function of the logits and of single numbers; return None if it is none.

    It is tried on a tensor of their shape on the meta device.
    """
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not logits]
    if any(leaf.numel() != 1 or leaf.dim() > 1 for leaf in leaves):
        return None
    operations: list[Any] = []
    try:
        with disable_current_modes(), DisableTorchFunction(), torch.no_grad():
            probe = torch.empty(logits.shape, dtype=logits.dtype, device="meta")
            tried = tree_map(lambda value: probe if value is logits else _on_meta(value), (args, kwargs))
            with follow_calls(lambda operation, *_: operations.append(operation)):
                result = func(*tried[0], **tried[1])
    except Exception:  # the call itself is wrong, and says so on the logits
        return None
    if not all(map(_is_elementwise, operations)) or not isinstance(result, Tensor) or result.shape != logits.shape:
        return None
    if not operations and result is not probe:
        return None
    writes = any(operation._schema.is_mutable for operation in operations)
    if result is probe and not writes:
        return logits  # as .float() of float32
    source = logits.made
    others = [*source.others]

    def placed(value: Any) -> Any:
        if value is logits:
            return LOGITS
        if not isinstance(value, Tensor):
            return value
        others.append(value)
        return Place(len(others) - 1)

    args, kwargs = tree_map(placed, (args, kwargs))
    noted = Elementwise(func, args, kwargs, writes=writes)
    head = Head(source.head.chunking, (*source.head.functions, noted))
    pending = PendingLogits.of(source._replace(head=head, others=tuple(others)), result.dtype, logits.hooks)
    if not writes:
        return pending
    logits.made = pending.made
    return logits


def _on_meta(value: Any) -> Any:
    """Return a tensor, or a device, on the meta device: what runs on a stand-in stays there."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


# -- the head ------------------------------------------------------------------------------------------------------------


class PendingHead:
    """The linear module that computes the logits, which need not exist while `pending` is active."""

    def __init__(self, module: nn.Linear, chunking: Chunking) -> None:
        self._module, self._forward, self._chunking = module, module.forward, chunking
        self._is_pending = False
        module.forward = self._call  # type: ignore[method-assign, assignment]

    def _call(self, hidden: Tensor) -> Tensor:
        if not self._is_pending:
            return self._forward(hidden)
        module = self._module
        source = _Made(hidden, module.weight, module.bias, Head(self._chunking))
        return PendingLogits.of(source, hidden.dtype)

    @contextmanager
    def pending(self) -> Iterator[None]:
        """Let forwards inside return logits without elements."""
        was_pending, self._is_pending = self._is_pending, True
        try:
            yield
        finally:
            self._is_pending = was_pending

    def remove(self) -> None:
        """Restore the module's forward."""
        del self._module.forward


class ChunksFound(NamedTuple):
    """The findings of a forward without logits."""

    refusal: str = ""
    """Why logits and loss cannot be computed in chunks of tokens; empty if they can."""
    reduced: tuple[tuple[str, int], ...] = ()
    """What ranks that cut the vocabulary reduce, in order, with its number of elements."""


def find_chunks(
    model: nn.Module, spec: ModelSpec, loss: Callable[[Any, Any], Any], run_on_meta: Callable[[], tuple[Any, Any]]
) -> ChunksFound:
    """Return whether logits and loss of a traced model can be computed in chunks of tokens.

    `run_on_meta` runs the model's forward on the meta device, and returns its outputs and the batch.
    """
    last = spec.layers[-1]
    if last.head is None:
        return ChunksFound("no nn.Linear of the model makes the input of its loss")
    module = model.get_submodule(last.head.owner)
    if last.is_block:
        return ChunksFound(f"{last.head.owner}, which makes the logits, is part of a block")
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return ChunksFound(
            f"{last.head.owner}, which makes the logits, is a {type(module).__name__}, and no plain nn.Linear"
        )
    reduced: list[tuple[str, int]] = []
    chunking = Chunking(_TRIED, reduce=lambda values, kind: reduced.append((kind, values.numel())))
    head = PendingHead(module, chunking)
    try:
        with head.pending():
            outputs, batch = run_on_meta()
        pending = [leaf for leaf in tensors_in(outputs) if isinstance(leaf, PendingLogits)]
        if not pending:
            return ChunksFound(f"what {last.head.owner} makes is not among the model's outputs")
        with preserve_function(loss):
            total = loss_result(loss(outputs, batch)).sums
    except NeedsValuesError:
        return ChunksFound("the model or its loss looks at values")
    except Exception as error:  # of the model's own code or the loss, which may raise anything
        reason = str(error).strip().partition("\n")[0]
        return ChunksFound(
            reason.removeprefix("loss_chunk ").partition(f". {WORKS}")[0] if reason else type(error).__name__
        )
    finally:
        head.remove()
    if total.grad_fn is None and any(leaf.requires_grad for leaf in pending):
        return ChunksFound("its loss does not read the logits")
    return ChunksFound(reduced=tuple(reduced))


_TRIED = 2**20
"""Tokens of a chunk of a trial, which has no elements."""
