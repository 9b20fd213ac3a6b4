"""Proof that blocks and head work token by token, attention aside: the tokens on which each element depends.

A forward runs on the meta device on T tokens. At the first block the hidden states, and every other argument with a row
for each token, become a slice of t tokens, as under a cut of the sequence. From there on every storage has a boolean
twin,

    twin[p, e] = element e may depend on token p of the slice          at first: on the token of its own row

which each operation propagates: elementwise ones by or, products and norms by or over the dimensions they sum over;
views need nothing, since they share their storage's twin. The result of an operation without a rule here depends on all
its inputs. A fused attention returns rows of its own tokens, since the exchange lets it see the whole sequence; and so
does a module of experts, which is called with rows and computes each by itself, however it sorts them. Slicing is right
if

    queries, keys and values of every attention, and the logits, depend on the token of their own row alone
    no constant with a row for each token meets them: positions counted in a block would restart in every slice
    forwards of two lengths t use the same numbers: a block that divides by its length would divide by a slice's

What cannot be shown is refused, with the operation at which it failed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from samestep.building.loss import target_of
from samestep.errors import InputError
from samestep.models.analysis import ExpertModules
from samestep.models.spec import ModelSpec
from samestep.tracing import experts as experts_module
from samestep.tracing.forward import ForwardTracer, NeedsValuesError, ValueOf, address, operands, watch_forward
from samestep.tracing.trace import containers_of

LENGTHS = (7, 5, 3, 2)
"""Tokens of a slice that are tried: odd sizes, which few dimensions of a model have."""
PARTS = 2
"""Number of slices of the sequence that is tried."""

WHOLE = -1
"""The dimension of tokens of an argument that has none."""

_WORKS = "scaled_dot_product_attention (attn_implementation = 'sdpa') with a mask of the whole sequence, or none, works"

_aten = torch.ops.aten


def prove(
    module: nn.Module, sample: Any, spec: ModelSpec, value_of: ValueOf | None, experts: ExpertModules
) -> ModelSpec:
    """Return the spec with the length of its samples, and how its blocks are sliced or why they cannot be.

    `sample` is a batch of one real sample; tensors as long as its labels have a number for each token.
    """
    length = _length(sample)
    lengths = [size for size in LENGTHS if size * PARTS <= length][:2]
    blocks = [path for layer in spec.layers if layer.is_block for path in layer.modules]
    if not length or len(lengths) < 2 or not blocks:
        reason = (
            "its samples are no sequences" if not length else "they are too short" if blocks else "it has no blocks"
        )
        return _refused(spec, length, reason)
    watches = [_Dependence(module, blocks, size) for size in lengths]
    for watch in watches:
        if refusal := _refusal_of(watch, module, _shortened(sample, length, watch.size * PARTS), value_of, experts):
            return _refused(spec, length, refusal)
    first, second = (watch.calls for watch in watches)
    if first != second:
        path, *_ = next((a for a, b in zip(first, second, strict=False) if a != b), first[-1])
        refusal = f"{path} computes differently, or with other numbers, on slices of another length"
        return _refused(spec, length, refusal)
    slices = {name: WHOLE if dim is None else dim for watch in watches for name, dim in watch.slices.items()}
    return dataclasses.replace(_refused(spec, length, ""), slices=tuple(sorted(slices.items())))


def _refused(spec: ModelSpec, length: int, reason: str) -> ModelSpec:
    return dataclasses.replace(spec, length=length, slice_refusal=reason, expert_refusal=reason)


def _length(sample: Any) -> int:
    """Return the tokens of a sample, the second dimension of its labels; 0 where there is none."""
    try:
        labels = target_of(sample)
    except InputError:
        return 0
    return labels.shape[1] if labels.dim() == 2 else 0


def _shortened(sample: Any, length: int, wanted: int) -> Any:
    return tree_map_only(Tensor, lambda t: t[:, :wanted] if t.dim() > 1 and t.shape[1] == length else t, sample)


def _refusal_of(
    watch: _Dependence, module: nn.Module, sample: Any, value_of: ValueOf | None, experts: ExpertModules
) -> str:
    """Run the forward; return why it cannot be sliced, or an empty text."""
    handles = [
        module.get_submodule(path).register_forward_pre_hook(watch.enter_block, with_kwargs=True)
        for path in watch.blocks
    ]
    handles.append(module.register_forward_hook(lambda _, args, outputs: watch.check_outputs(outputs)))
    for path in experts.counts:
        part = module.get_submodule(path)
        handles.append(part.register_forward_pre_hook(watch.enter_experts, with_kwargs=True))
        handles.append(part.register_forward_hook(watch.leave_experts))
    try:
        with _Reshaping(watch), experts_module.record_dispatches(module, experts):
            watch_forward(module, sample, 1, "the model", containers_of(module), watch, value_of)
    except NeedsValuesError:
        return f"{watch.where} looks at values of its slice"
    except InputError as error:
        reason = str(error).removeprefix("the model cannot be traced: ")
        return watch.refusal or f"on a slice {reason}; {_WORKS}"
    finally:
        for handle in handles:
            handle.remove()
    return watch.refusal


class _Dependence(ForwardTracer):
    """A traced forward that knows for every element on which tokens of the slice it may depend."""

    has_backward = False

    def __init__(self, module: nn.Module, blocks: list[str], size: int) -> None:
        super().__init__(module, lambda block: None, {})
        self.blocks, self.size, self.refusal = blocks, size, ""
        self.slices: dict[str, int | None] = {}
        """Arguments of blocks by their position: the dimension that is sliced, or None."""
        self.calls: list[tuple[str, ...]] = []
        """Operations after the first block was entered, with the numbers that the code gave them."""
        self._started = False
        self._mixed = ""
        self._twins: dict[int, Tensor] = {}
        self._of_rows: Tensor | None = None
        """Tokens on which each row depends that experts are computing, bool [tokens, rows]."""
        self._uniform: set[int] = set()
        """Storages whose elements are all equal, or random; other checks cover randomness."""

    @property
    def where(self) -> str:
        """Path of the module whose code runs."""
        return super().where or "the model itself"

    # -- twins -------------------------------------------------------------------------------------

    def tokens_of(self, tensor: Tensor) -> Tensor | None:
        """Return the tokens on which each element depends, bool [tokens, *shape]; None where on none."""
        twin = self._twins.get(address(tensor))
        if twin is None:
            return None
        return twin.as_strided((self.size, *tensor.shape), (twin.shape[1], *tensor.stride()), tensor.storage_offset())

    def learn(self, tensor: Tensor, tokens: Tensor) -> None:
        """Store the tokens on which the elements of a tensor depend, bool [tokens, *shape]."""
        key = self.key(tensor)
        if key not in self._twins:
            self._twins[key] = torch.zeros(self.size, self.sizes[key], dtype=torch.bool)
        found = self.tokens_of(tensor)
        assert found is not None
        found.copy_(tokens.expand(found.shape))

    def rows(self, shape: torch.Size, dim: int) -> Tensor:
        """Return the dependences of a tensor with a row for each token along `dim`, bool [tokens, *shape]."""
        sizes = [1] * (len(shape) + 1)
        sizes[0] = sizes[dim + 1] = self.size
        return torch.eye(self.size, dtype=torch.bool).view(sizes).expand(self.size, *shape)

    def is_sliced(self, tensor: Tensor, dim: int) -> bool:
        """Return whether each row along `dim` depends on its own token alone."""
        tokens = self.tokens_of(tensor)
        return (
            tokens is not None and tensor.shape[dim] == self.size and torch.equal(tokens, self.rows(tensor.shape, dim))
        )

    @property
    def started(self) -> bool:
        """Whether the first block was entered."""
        return self._started

    # -- events of the forward ---------------------------------------------------------------------

    def enter_block(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return a block's arguments, with slices of those that have a row for each token."""
        self._started = True
        leaves, tree = tree_flatten_with_path((args, kwargs))
        mine = [self._sliced(keystr(argument), leaf) if isinstance(leaf, Tensor) else leaf for argument, leaf in leaves]
        return tree_unflatten(mine, tree)

    def _sliced(self, argument: str, leaf: Tensor) -> Tensor:
        if self.tokens_of(leaf) is not None:
            return leaf
        dim = sequence_dim(leaf.shape, self.size * PARTS)
        if self.slices.setdefault(argument, dim) != dim:
            self.refuse(f"{argument} has rows of tokens in one block and not in another")
        if dim is None:
            return leaf
        part = leaf.narrow(dim, self.size, self.size).clone()
        with _disable_current_modes():
            self.learn(part, self.rows(part.shape, dim))
        return part

    def enter_experts(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Record the dependences of the rows that experts are given; they compute each row by itself."""
        if not self._started:
            return
        with _disable_current_modes():
            given = experts_module.called_with(args, kwargs)
            self._of_rows = torch.zeros(self.size, len(given[0]), dtype=torch.bool)
            for tensor in given:
                tokens = self.tokens_of(tensor)
                if tokens is not None:
                    self._of_rows |= tokens.flatten(2).any(2)

    def leave_experts(self, _: nn.Module, args: Any, output: Tensor) -> None:
        """Set the dependences of each row of the experts' result to those of its input row."""
        if self._of_rows is None:
            return
        with _disable_current_modes():
            self.learn(output, self._of_rows.view(*self._of_rows.shape, *(1,) * (output.dim() - 1)))
        self._of_rows = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """Check an attention that will be exchanged: it is given slices, and a mask of the whole sequence."""
        if not self._started:
            return
        with _disable_current_modes():
            whole = self.size * PARTS
            if query.dim() != 4:
                self.refuse(f"the attention in {self.where} has no dimension of heads")
            elif not all(self.is_sliced(tensor, 2) for tensor in (query, key, value)):
                reason = f"; {self._mixed}" if self._mixed else ""
                self.refuse(f"the attention in {self.where} is not between the tokens of one sequence{reason}")
            elif mask is not None and not _fits(mask.shape, whole):
                self.refuse(f"{self.where} makes its attention mask itself, for a slice")
            elif not any(path in self._running for path in self.blocks):
                self.refuse(f"the attention in {self.where} stands outside the blocks")
            else:
                self.learn(output, self.rows(output.shape, 2))

    def check_outputs(self, outputs: Any) -> None:
        """Check that the logits have a row for each token of the slice."""
        logits = getattr(outputs, "logits", outputs)
        with _disable_current_modes():
            if not isinstance(logits, Tensor) or logits.dim() != 3 or not self.is_sliced(logits, 1):
                self.refuse(
                    self._mixed or "its outputs have no row for each token, so the loss cannot be summed over slices"
                )

    def refuse(self, reason: str) -> None:
        """Store a refusal; the first reason is kept, since later ones follow from it."""
        self.refusal = self.refusal or reason

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outcome = super().__torch_dispatch__(func, types, args, kwargs)
        if self._started and not self.refusal and self._of_rows is None:
            self._carry_on(func, args, kwargs or {}, [t for t in operands(outcome) if t.is_meta])
        return outcome

    def _carry_on(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: list[Tensor]) -> None:
        """Set the dependences of the results of an operation."""
        packet, writes = func.overloadpacket, func._schema.is_mutable
        given = [tensor for tensor in operands(*args, *kwargs.values()) if tensor.is_meta]
        met = [tensor for tensor in given if self.tokens_of(tensor) is not None]
        if packet in _FILLS or torch.Tag.nondeterministic_seeded in func.tags:
            self._record_call(func, args, kwargs)
            if not (met and packet not in _FILLS):
                self._uniform |= {self.key(tensor) for tensor in outcome}
                return
        elementwise = torch.Tag.pointwise in func.tags or packet in _COPIES
        if not met:
            if given and elementwise and all(self.key(tensor) in self._uniform for tensor in given):
                self._uniform |= {self.key(tensor) for tensor in outcome}
            elif writes:
                self._uniform -= {self.key(tensor) for tensor in outcome}
            return
        if not writes and all(address(result) in {address(t) for t in given} for result in outcome):
            return  # views
        if elementwise:
            self._record_call(func, args, kwargs)
        rule = _RULES.get(packet) or (_pointwise if torch.Tag.pointwise in func.tags else _everything)
        for result, tokens in zip(outcome, rule(self, func, args, kwargs, outcome), strict=False):
            self.learn(result, tokens)
            if not self._mixed and int(self._most(result)) > max(int(self._most(tensor)) for tensor in met):
                self._mixed = f"{self.where} mixes tokens by {packet.__name__}, and only attention is exchanged"

    def _most(self, tensor: Tensor) -> Tensor:
        tokens = self.tokens_of(tensor)
        assert tokens is not None
        return tokens.sum(0).max() if tokens.numel() else torch.zeros(())

    def _record_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the numbers that code gave to an operation; the sizes of the tensors it fills are not among them."""
        given = [*args, *kwargs.values()]
        if func.overloadpacket not in _FILLS:
            given = tree_flatten(given)[0]
        numbers = [repr(one) for one in given if isinstance(one, int | float | complex)]
        numbers += [
            repr(one.item()) for one in given if isinstance(one, Tensor) and not one.is_meta and one.numel() == 1
        ]
        self.calls.append((self.where, str(func), *numbers))

    def check_constant(self, constant: Tensor, tokens: Tensor) -> None:
        """Refuse a constant that meets a result with these dependences, if it has a row for each token."""
        if constant.numel() == 1 or address(constant) in self._uniform:
            return
        for back in range(1, min(constant.dim(), tokens.dim() - 1) + 1):
            if constant.shape[-back] > 1 and not torch.equal(tokens, tokens.narrow(-back, 0, 1).expand_as(tokens)):
                self.refuse(f"{self.where} counts the tokens of a slice itself; positions made before the blocks work")


_RESHAPES = (torch.reshape, Tensor.reshape, Tensor.view)


def reshaped(func: Any, args: tuple[Any, ...], length: int, size: int) -> tuple[Any, ...]:
    """Return the arguments of a reshape on slices, where the code computed the shape from whole sequences.

    A reshape of [B, size, ...] to [B, length, ...] keeps its shape, as at the end of GPT-2.
    """
    if func not in _RESHAPES or len(args) < 2:
        return args
    tensor, *shape = args
    wanted = tuple(shape[0]) if isinstance(shape[0], list | tuple) else tuple(shape)
    alike = len(wanted) == tensor.dim() > 1 and wanted[2:] == tuple(tensor.shape[2:])
    if alike and wanted[1] == length and tensor.shape[1] == size and wanted[0] in (-1, tensor.shape[0]):
        return tensor, (wanted[0], size, *wanted[2:])
    return args


class _Reshaping(TorchFunctionMode):
    def __init__(self, watch: _Dependence) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._watch.started:
            args = reshaped(func, args, self._watch.size * PARTS, self._watch.size)
        return func(*args, **(kwargs or {}))


def sequence_dim(shape: torch.Size, length: int) -> int | None:
    """Return the dimension with `length` rows, one for each token; None without one, or for pairs of tokens."""
    if length not in shape or (len(shape) in (2, 4) and shape[-1] == shape[-2]):
        return None
    return list(shape).index(length) if len(shape) < 2 or shape[1] != length else 1


def _fits(shape: torch.Size, whole: int) -> bool:
    return len(shape) >= 2 and shape[-1] == whole and shape[-2] in (1, whole)


# -- rules: the dependences of each operation's results ----------------------------------------------

_Rule = Callable[[_Dependence, Any, tuple[Any, ...], dict[str, Any], list[Tensor]], Iterator[Tensor]]


def _aligned(tokens: Tensor, dims: int) -> Tensor:
    """Insert dimensions behind that of the tokens, so that dependences broadcast as the tensors do."""
    return tokens.view(tokens.shape[0], *(1,) * (dims + 1 - tokens.dim()), *tokens.shape[1:])


def _pointwise(watch: _Dependence, func: Any, args: Any, kwargs: Any, outcome: list[Tensor]) -> Iterator[Tensor]:
    given = [tensor for tensor in operands(*args, *kwargs.values()) if tensor.is_meta]
    for result in outcome:
        total = torch.zeros(watch.size, *result.shape, dtype=torch.bool)
        for tensor in given:
            tokens = watch.tokens_of(tensor)
            if tokens is not None:
                total |= _aligned(tokens, result.dim())
        for tensor in given:
            if watch.tokens_of(tensor) is None:
                watch.check_constant(tensor, total)
        yield total


def _everything(watch: _Dependence, func: Any, args: Any, kwargs: Any, outcome: list[Tensor]) -> Iterator[Tensor]:
    """Rule of an operation without one of its own: each element depends on all inputs."""
    total = torch.zeros(watch.size, dtype=torch.bool)
    for tensor in (tensor for tensor in operands(*args, *kwargs.values()) if tensor.is_meta):
        tokens = watch.tokens_of(tensor)
        total |= False if tokens is None else tokens.flatten(1).any(1)
    for result in outcome:
        yield total.view(-1, *(1,) * result.dim())


def _along(watch: _Dependence, func: Any, args: Any, kwargs: Any, outcome: list[Tensor]) -> Iterator[Tensor]:
    """Rule of norms, sums and sorts along dimensions: the results depend on everything along these."""
    tokens = watch.tokens_of(args[0])
    assert tokens is not None
    for tensor in (tensor for tensor in operands(*args[1:], *kwargs.values()) if tensor.is_meta):
        if watch.tokens_of(tensor) is not None:  # weights of a norm that depend on tokens
            yield from _everything(watch, func, args, kwargs, outcome)
            return
        watch.check_constant(tensor, tokens)
    named = {one.name: value for one, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    dims = named.get("dim", -1 if "dim" in {one.name for one in func._schema.arguments} else None)
    if "normalized_shape" in named:
        dims = list(range(-len(named["normalized_shape"]), 0))
    every = list(range(args[0].dim()))
    chosen = every if dims is None else [every[dim] for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    total = tokens
    for dim in chosen or every:
        total = total.any(dim + 1, keepdim=True)
    for result in outcome:
        if result.dim() == args[0].dim():
            yield total
        else:
            yield total.reshape(watch.size, *(size for dim, size in enumerate(total.shape[1:]) if dim not in chosen))


def _product(watch: _Dependence, func: Any, args: Any, kwargs: Any, outcome: list[Tensor]) -> Iterator[Tensor]:
    """Rule of a matrix product: an element depends on its row, on its column, and on the tensor it is added to."""
    (result,) = outcome
    adds = func.overloadpacket in (_aten.addmm, _aten.baddbmm)
    left, right = args[1:3] if adds else args[:2]
    total = torch.zeros(watch.size, *result.shape, dtype=torch.bool)
    for factor, inner in ((left, -1), (right, -2)):
        tokens = watch.tokens_of(factor)
        if tokens is not None:
            total |= tokens.any(inner, keepdim=True)
    if adds:
        tokens = watch.tokens_of(args[0])
        if tokens is not None:
            total |= _aligned(tokens, result.dim())
        else:
            watch.check_constant(args[0], total)
    # A constant with a row for each token, beside a factor with tokens as columns or in its batches.
    for factor, mine in ((left, result.dim() - 2), (right, result.dim() - 1)):
        if watch.tokens_of(factor) is None:
            rows = total if mine == result.dim() - 2 else total.transpose(-1, -2)
            across = factor if mine == result.dim() - 2 else factor.transpose(-1, -2)
            watch.check_constant(across.narrow(-1, 0, 1), rows)
    yield total


def _embedding(watch: _Dependence, func: Any, args: Any, kwargs: Any, outcome: list[Tensor]) -> Iterator[Tensor]:
    tokens = watch.tokens_of(args[1])
    if tokens is None or watch.tokens_of(args[0]) is not None:
        yield from _everything(watch, func, args, kwargs, outcome)
    else:
        yield tokens[..., None]


def _moved(watch: _Dependence, func: Any, args: Any, kwargs: Any, outcome: list[Tensor]) -> Iterator[Tensor]:
    """Rule of operations that move elements: dependences move alike, token by token."""
    parts = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    known = [watch.tokens_of(part) for part in parts]
    planes = [
        torch.zeros(watch.size, *p.shape, dtype=torch.bool) if k is None else k
        for p, k in zip(parts, known, strict=True)
    ]
    moved = [
        func([plane[p] for plane in planes] if parts is args[0] else planes[0][p], *args[1:], **kwargs)
        for p in range(watch.size)
    ]
    total = torch.stack(moved)
    for part, tokens in zip(parts, known, strict=True):
        if tokens is None and part.numel():
            for met in (tokens for tokens in known if tokens is not None):
                watch.check_constant(part, met.any(-1, keepdim=True) if part.dim() == met.dim() - 1 else met)
    yield total


_FILLS = {
    _aten.zeros, _aten.ones, _aten.full, _aten.empty, _aten.zeros_like, _aten.ones_like, _aten.full_like,
    _aten.empty_like, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty, _aten.empty_strided,
    _aten.new_empty_strided, _aten.scalar_tensor,
}  # fmt: skip
"""Operations that make a tensor of equal elements, or of uninitialised ones."""
_COPIES = {_aten.clone, _aten._to_copy, _aten.copy_, _aten.lift_fresh_copy, _aten.dropout, _aten.native_dropout}
_RULES: dict[Any, _Rule] = {
    **dict.fromkeys(_COPIES, _pointwise),
    **dict.fromkeys(
        (
            _aten.mean, _aten.sum, _aten.amax, _aten.amin, _aten.var, _aten.std, _aten.var_mean, _aten.std_mean, _aten.any,
            _aten.all, _aten.argmax, _aten.argmin, _aten.max, _aten.min, _aten.logsumexp, _aten.linalg_vector_norm,
            _aten._softmax, _aten._log_softmax, _aten.native_layer_norm, _aten._fused_rms_norm, _aten.topk, _aten.sort,
            _aten.cumsum, _aten.prod,
        ),
        _along,
    ),
    **dict.fromkeys((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm), _product),
    _aten.embedding: _embedding,
    **dict.fromkeys((_aten.cat, _aten.stack, _aten.repeat, _aten.flip, _aten.roll, _aten.constant_pad_nd), _moved),
}  # fmt: skip
