"""Tensor parallelism on real modules (twin of `strategies/tensor.py`): hooks around modules that keep their classes.

A plan names modules by patterns and says how each is cut: `{"blocks.*.q": "column", "blocks.*.out": "row"}`. It comes
from transformers (`base_model_tp_plan`) or from the user (`module.tensor_plan`). The modules compute with their own code
on the weights they are left with; `copy` and `reduce` stand at the borders:

    column   input through `copy`                      output cut along its last dimension
    row      bias held back, output through `reduce`   then the bias is added, once
    vocab    tokens of other ranks give zeros          output through `reduce`; a head's logits stay cut
    gather   a column cut whose output is put together again
    sum      a weight that stays whole on what is cut  used through `copy`, so its gradient is summed; where a plan
             does not name one, the forward on the meta device shows it
    shared   a column cut of fewer heads than ranks    the rows of one head of the whole weight, used through `copy`
"""

from __future__ import annotations

import fnmatch
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.errors import ModelError
from samestep.model import Cut, LayerSpec, ModelSpec, ParamSpec, PartialSum, is_below
from samestep.program import Program
from samestep.runtime import sequence
from samestep.runtime.build import IGNORED_LABEL, at_least_float32, target_of
from samestep.runtime.expert import experts_of
from samestep.runtime.mesh import Mesh
from samestep.runtime.precision import DTYPES
from samestep.runtime.record import owned

Plan = Mapping[str, str]
"""Patterns of module paths, and how they are cut: column, row, vocab, gather, sum."""

_OWN_PLANS: dict[str, dict[str, str]] = {
    "gpt2": {"h.*.attn.c_attn": "qkv", "h.*.attn.c_proj": "row", "h.*.mlp.c_fc": "column", "h.*.mlp.c_proj": "row"},
}
"""For families that transformers has no plan for, below the base model."""

_COUNTS = ("num_heads", "split_size", "embed_dim")
"""What an attention keeps of its own width, of which a rank has a part."""

_FROM_TRANSFORMERS = {
    "colwise": "column",
    "rowwise": "row",
    "embedding_rowwise": "vocab",
    "replicated_with_grad_allreduce": "sum",
    "colwise_gather_output": "gather",
    **{style: style for style in ("column", "row", "qkv")},
}


# -- the plan --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cuts:
    """Modules of one model that its plan cuts, or why it has none."""

    styles: dict[str, str] = field(default_factory=dict)
    """How each planned module is cut, by its path."""
    refusal: str = ""


def cuts_of(model: nn.Module) -> Cuts:
    """Find how a model may be cut: by its own `tensor_plan`, or by what transformers says of its family."""
    own = getattr(model, "tensor_plan", None)
    if own is not None:
        return _matched(model, dict(own))
    plan = _transformers_plan(model)
    if plan is None:
        return Cuts(refusal="it has no tensor_plan, and transformers has none for it")
    plan = {pattern: style for pattern, style in plan.items() if not _is_of_experts(model, pattern)}
    unknown = sorted({style for style in plan.values() if style not in _FROM_TRANSFORMERS})
    if unknown:
        return Cuts(refusal=f"its plan asks for {', '.join(unknown)}, which is not built")
    cuts = _matched(model, {pattern: _FROM_TRANSFORMERS[style] for pattern, style in plan.items()})
    for part in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        path = next((path for path, module in model.named_modules() if module is part), None)
        if path is not None:
            cuts.styles[path] = "vocab"
    return cuts


def _transformers_plan(model: nn.Module) -> dict[str, str] | None:
    """Return the plan of a transformers model with whole paths, without the head's."""
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", "")
    plan = getattr(config, "base_model_tp_plan", None) or _OWN_PLANS.get(family)
    prefix = getattr(model, "base_model_prefix", "")
    if not plan or not prefix:
        return None
    return {f"{prefix}.{pattern}": style for pattern, style in plan.items()}


def _is_of_experts(model: nn.Module, pattern: str) -> bool:
    """Whether a pattern names experts, which stay whole on each rank of a tensor cut: `ep` deals them."""
    names = [
        [path, *(f"{path}.{leaf}" for leaf, _ in model.get_submodule(path).named_parameters())]
        for path in experts_of(model)
    ]
    return any(fnmatch.fnmatch(name, pattern) for below in names for name in below)


def _matched(model: nn.Module, plan: Plan) -> Cuts:
    """Match the plan's patterns with the model's modules."""
    cuts = Cuts()
    paths = [path for path, _ in model.named_modules()]
    for pattern, style in plan.items():
        if style not in (*_AROUND, "sum"):
            raise ModelError(f"tensor_plan: {pattern!r} is {style!r}; {', '.join(_AROUND)} and sum work")
        found = fnmatch.filter(paths, pattern)
        for path in found:
            module = model.get_submodule(path)
            if style == "sum" or isinstance(module, nn.Linear | nn.Embedding) or is_transposed(module):
                cuts.styles[path] = style
            else:
                cuts.refusal = f"{path} is a {type(module).__name__}, and only Linear and Embedding can be cut"
    if not cuts.styles:
        cuts.refusal = cuts.refusal or f"its plan names no module of it (it has {', '.join(plan)})"
    return cuts


# -- what a cut costs, seen in a forward on the meta device ----------------------------------------


@dataclass(slots=True)
class Seen:
    """Sums that a cut would need, in order of the forward: (path, elements, is a weight's)."""

    shareable: dict[str, int] = field(default_factory=dict)
    """Heads of projections that ranks may share, by their paths."""
    forward: list[PartialSum] = field(default_factory=list)
    copies: list[PartialSum] = field(default_factory=list)
    kept_after: set[str] = field(default_factory=set)
    """Of forward sums: owners after which the same block keeps something for its backward, as a mask."""
    logit_rows: int = 0
    uses: dict[str, set[str]] = field(default_factory=dict)
    """How the trained weights of a module are used: on what is "cut" or "whole"; "elsewhere" is on cut, by another."""
    _last: list[Tensor] = field(default_factory=list)
    """What the last column cut was given: several that are given one tensor share its sum."""
    _entered: dict[str, int] = field(default_factory=dict)

    def use(self, path: str, owners: set[str], is_cut: bool) -> None:
        """Note that the code of a module uses weights."""
        for owner in {path} & owners or owners:
            where = ("cut" if owner == path else "elsewhere") if is_cut else "whole"
            self.uses.setdefault(owner, set()).add(where)

    def enter(self, path: str, _: nn.Module, args: Any) -> None:
        """Note that a module starts: its own weights are copied before what is within."""
        self._entered[path] = len(self.copies)

    def leave(self, path: str, style: str, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a module was given and gave."""
        if not style and "cut" in self.uses.get(path, ()):
            style = "sum"
        if not style:
            return
        trained = [param for param in module.parameters(recurse=False) if param.requires_grad]
        if style in ("row", "vocab") and not _is_head(module, style):
            self.forward.append(PartialSum(owner=path, elements=output.numel()))
        if style == "sum":
            sums = [PartialSum(owner=path, elements=param.numel(), weight=True) for param in trained]
            self.copies[self._entered[path] : self._entered[path]] = sums
        elif (style in ("column", "qkv", "gather") or _is_head(module, style)) and args[0].requires_grad:
            if not self._last or self._last[0] is not args[0]:
                self.copies.append(PartialSum(owner=path, elements=args[0].numel()))
            self._last[:] = [args[0]]
        if groups := self.shareable.get(path):
            self.copies += [PartialSum(owner=path, elements=p.numel(), weight=True, groups=groups) for p in trained]
        if _is_head(module, style):
            self.logit_rows = output.numel() // output.shape[-1]

    def keep(self, block: str) -> None:
        """Note that autograd keeps something in a block."""
        if self.forward and is_below(self.forward[-1].owner, block):
            self.kept_after.add(self.forward[-1].owner)


@contextmanager
def watching(model: nn.Module, cuts: Cuts) -> Iterator[Seen]:
    """Note, in the forward of one sample that runs meanwhile, what each module with weights is given and gives."""
    seen = Seen(_shareable_heads(model, cuts))
    handles = []
    for path, module in model.named_modules():
        if path in cuts.styles or any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(functools.partial(seen.enter, path)))
            leave = functools.partial(seen.leave, path, cuts.styles.get(path, ""))
            handles.append(module.register_forward_hook(leave))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def with_cuts(spec: ModelSpec, model: nn.Module, cuts: Cuts, seen: Seen) -> ModelSpec:
    """Write into a spec how its weights may be cut and what that costs, and into `cuts` which whole weights need sums."""
    varies = f"the shapes at {spec.varies_at} depend on values" if spec.varies_at else ""
    refusal = cuts.refusal or varies or _unclear_use(spec, cuts, seen)
    if refusal:
        return replace(spec, cut_refusal=refusal)
    cuts.styles |= {path: "sum" for path, uses in seen.uses.items() if "cut" in uses and path not in cuts.styles}
    shareable = _shareable_heads(model, cuts)
    params = tuple(replace(param, cut=_cut_of(model, cuts, param, shareable)) for param in spec.params)
    layers = tuple(_layer_with(layer, seen) for layer in spec.layers)
    return replace(spec, params=params, layers=layers, cut_refusal="", logit_rows=seen.logit_rows)


def _unclear_use(spec: ModelSpec, cuts: Cuts, seen: Seen) -> str:
    """Say which weight is used on what is cut so that its gradient is neither whole on every rank nor a part on each."""
    blocks = [path for layer in spec.layers if layer.is_block for path in layer.modules]
    for path, uses in seen.uses.items():
        if path in cuts.styles or uses == {"whole"}:
            continue
        where = f"a weight of {path or spec.name} is used on what tp cuts"
        if "elsewhere" in uses:
            return f"{where} by another module: use it in a module of its own"
        if "whole" in uses:
            return f"{where}, and on what it leaves whole: give each a module of its own"
        if not any(is_below(path, block) for block in blocks):
            return f"{where} behind the last block: use it before the head"
    return ""


def _layer_with(layer: LayerSpec, seen: Seen) -> LayerSpec:
    forward = tuple(part for part in seen.forward if _is_within(part.owner, layer))
    backward = tuple(part for part in reversed(seen.copies) if _is_within(part.owner, layer))
    repeats = bool(forward) and forward[-1].owner in seen.kept_after
    return replace(layer, forward_sums=forward, backward_sums=backward, repeats_last_sum=repeats)


def _is_within(path: str, layer: LayerSpec) -> bool:
    return any(is_below(path, root) for root in layer.modules)


def _shareable_heads(model: nn.Module, cuts: Cuts) -> dict[str, int]:
    """Count the heads of keys and values that several ranks may share, by the projection's path.

    The attention's code repeats them `num_key_value_groups` times, which a rank with fewer queries is told.
    """
    found: dict[str, int] = {}
    projections: dict[str, dict[str, int]] = {}
    for path, style in cuts.styles.items():
        module = model.get_submodule(path)
        if style == "column" and isinstance(module, nn.Linear):
            parent = path.rpartition(".")[0]
            heads = _heads(model.get_submodule(parent), module.out_features)
            projections.setdefault(parent, {})[path] = heads
    for parent, heads_of in projections.items():
        times = getattr(model.get_submodule(parent), "num_key_value_groups", 1)
        if isinstance(times, int) and times > 1:
            queries = max(heads_of.values())
            found |= {path: heads for path, heads in heads_of.items() if heads * times == queries}
    return found


def _cut_of(model: nn.Module, cuts: Cuts, param: ParamSpec, shareable: Mapping[str, int]) -> Cut | None:
    """Say along which dimension a weight is cut, and between which groups of its elements."""
    path, _, leaf = param.name.rpartition(".")
    style = cuts.styles.get(path)
    if style in (None, "sum"):
        return None
    module = model.get_submodule(path)
    if style == "vocab":
        return Cut(style="vocab", dim=0, groups=param.shape[0])
    if style == "row" and leaf == "bias":
        return None
    across = 0 if is_transposed(module) and leaf == "weight" else 1  # the dimension of the input
    dim = across if style == "row" else (1 - across) * (len(param.shape) > 1)
    parts = 3 if style == "qkv" else 1
    size = param.shape[dim] // parts
    heads = _heads(model.get_submodule(path.rpartition(".")[0]), size)
    return Cut(
        style="row" if style == "row" else "column", dim=dim, groups=heads, parts=parts, is_shareable=path in shareable
    )


def _heads(attention: nn.Module, size: int) -> int:
    """Count the heads that a projection of an attention is made of; elsewhere every neuron is one of its own."""
    width, count = getattr(attention, "head_dim", None), getattr(attention, "num_heads", None)
    if isinstance(width, int) and width and size % width == 0:
        return size // width
    return count if isinstance(count, int) and count and size % count == 0 else size


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a linear layer that keeps its weight as [in, out], as GPT-2's do."""
    return type(module).__name__ == "Conv1D" and "weight" in module._parameters


def _is_head(module: nn.Module, style: str) -> bool:
    return style == "vocab" and isinstance(module, nn.Linear)


# -- carrying it out -------------------------------------------------------------------------------


def local_part(whole: Tensor, param: ParamSpec, mesh: Mesh) -> Tensor:
    """Cut this rank's part out of a whole weight."""
    if param.cut is None or mesh.tp == 1:
        return whole
    parts = whole.chunk(param.cut.parts, dim=param.cut.dim)
    return torch.cat([part.chunk(mesh.tp, dim=param.cut.dim)[mesh.tp_index] for part in parts], dim=param.cut.dim)


def joined(cuts: Sequence[Tensor], cut: Cut) -> Tensor:
    """Put a weight together from the parts of all ranks, in their order: the inverse of `local_part`."""
    parts = zip(*(part.chunk(cut.parts, dim=cut.dim) for part in cuts), strict=True)
    return torch.cat([torch.cat(part, dim=cut.dim) for part in parts], dim=cut.dim)


def apply(model: nn.Module, program: Program, mesh: Mesh) -> None:
    """Put `copy` and `reduce` around every module that the program's model cuts."""
    if program.step.layout.tp == 1:
        return
    cuts = cuts_of(model)
    summed = [part for layer in program.step.model.layers for part in layer.backward_sums if part.weight]
    for part in summed:
        cuts.styles.setdefault(part.owner, "sum")  # the plan may not know them
    cut = {p.name.rpartition(".")[0] for p in program.step.model.params if p.cut is not None}
    cut |= {a.rpartition(".")[0] for p in program.step.model.params if p.cut is not None for a in p.aliases}
    group = mesh.groups["tp"]
    whole = _Borders(_Copies(group), functools.partial(_reduced, group))
    within = _Borders(lambda _, x: x, lambda path, x: sequence.scatter(x, group, path))
    blocks = [path for layer in program.step.model.layers if layer.is_block for path in layer.modules]
    projected: set[str] = set()
    shared = {path: heads for path, heads in _shareable_heads(model, cuts).items() if heads < mesh.tp}
    for path, style in cuts.styles.items():
        module = model.get_submodule(path)
        if style == "sum":
            _sum_gradients(module, path, group, DTYPES[program.step.master_dtype])
        elif path in cut or path in shared:
            if _is_head(module, style) and not program.step.cuts_loss:
                style = "gather"
            if style in ("column", "qkv"):
                projected.add(path.rpartition(".")[0])
            cuts_sequence = program.step.layout.sequence_parallel and any(is_below(path, block) for block in blocks)
            borders = within if cuts_sequence else whole
            if path in shared:
                _around_shared(module, path, mesh, borders, shared[path], DTYPES[program.step.master_dtype])
            else:
                _AROUND[style](module, path, mesh, borders)
    for path in projected:
        _divide_counts(model.get_submodule(path), mesh.tp)
    for parent, heads in {path.rpartition(".")[0]: heads for path, heads in shared.items()}.items():
        attention = model.get_submodule(parent)
        attention.num_key_value_groups = attention.num_key_value_groups * heads // mesh.tp  # type: ignore[operator, assignment]
    sequence.apply(model, program, mesh, cuts.styles)


@dataclass(frozen=True, slots=True)
class _Borders:
    """What a cut module's input and sum go through; under sequence parallelism the part around it has gathered."""

    enter: Callable[[str, Tensor], Tensor]
    leave: Callable[[str, Tensor], Tensor]


def _reduced(group: dist.ProcessGroup, path: str, x: Tensor) -> Tensor:
    return reduce(x, group, path)


def _divide_counts(attention: nn.Module, degree: int) -> None:
    """Tell an attention how many heads a rank has, where it keeps the number."""
    for name in _COUNTS:
        if isinstance(getattr(attention, name, None), int):
            setattr(attention, name, getattr(attention, name) // degree)


def _around_column(module: nn.Module, path: str, mesh: Mesh, borders: _Borders) -> None:
    module.register_forward_pre_hook(lambda _, args: (borders.enter(path, args[0]), *args[1:]))
    if isinstance(module, nn.Linear):
        module.out_features //= mesh.tp
    elif is_transposed(module):
        module.nf //= mesh.tp  # type: ignore[operator, assignment]


def _around_shared(module: nn.Module, path: str, mesh: Mesh, borders: _Borders, heads: int, dtype: torch.dtype) -> None:
    """Compute the one head of keys or values that this rank's queries need, by its rows of the whole weight."""
    assert isinstance(module, nn.Linear)
    group, index = mesh.groups["tp"], mesh.tp_index * heads // mesh.tp
    module.register_forward_pre_hook(lambda _, args: (borders.enter(path, args[0]), *args[1:]))
    _replace_weights(module, lambda param: copy(param, group, path, dtype).chunk(heads)[index])
    module.out_features //= heads


def _around_gather(module: nn.Module, path: str, mesh: Mesh, borders: _Borders) -> None:
    _around_column(module, path, mesh, borders)
    group = mesh.groups["tp"]
    module.register_forward_hook(lambda _, args, output: gather_last(output, group, path), prepend=True)


def _around_row(module: nn.Module, path: str, mesh: Mesh, borders: _Borders) -> None:
    """Hold the bias back while the module runs, and add it once to the sum."""
    held: list[Tensor | None] = []

    def before(_: nn.Module, args: Any) -> None:
        bias = module._parameters.get("bias")
        held.append(bias)
        # GPT-2's linear layers cannot do without one.
        none = bias.new_zeros(()) if is_transposed(module) and bias is not None else None
        module._parameters["bias"] = none  # type: ignore[assignment]

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        bias = held.pop()
        module._parameters["bias"] = bias  # type: ignore[assignment]
        if output is None:
            return None
        total = borders.leave(path, output)
        return total if bias is None else total + bias

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True, prepend=True)
    if isinstance(module, nn.Linear):
        module.in_features //= mesh.tp


def _around_vocab(module: nn.Module, path: str, mesh: Mesh, borders: _Borders) -> None:
    """A cut embedding looks up its own tokens; a cut head gives its own logits."""
    if isinstance(module, nn.Linear):
        _around_column(module, path, mesh, borders)
        return
    assert isinstance(module, nn.Embedding)
    module.num_embeddings //= mesh.tp
    first, size = mesh.tp_index * module.num_embeddings, module.num_embeddings
    if module.padding_idx is not None:
        own = module.padding_idx - first
        module.padding_idx = own if 0 <= own < size else None
    elsewhere: list[Tensor] = []

    def before(_: nn.Module, args: Any) -> Any:
        tokens = args[0] - first
        elsewhere.append((tokens < 0) | (tokens >= size))
        return (tokens.masked_fill(elsewhere[-1], 0), *args[1:])

    def after(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        return borders.leave(path, output.masked_fill(elsewhere.pop()[..., None], 0.0))

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, prepend=True)


def _sum_gradients(module: nn.Module, path: str, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Use a module's weights through `copy`; their gradients are summed in master precision, as all are."""
    _replace_weights(module, lambda param: copy(param, group, path, dtype))


def _replace_weights(module: nn.Module, used: Callable[[nn.Parameter], Tensor]) -> None:
    """Let a module compute with what is made of its weights each time."""
    held: dict[str, nn.Parameter | None] = {}

    def before(_: nn.Module, args: Any) -> None:
        for name, param in list(module._parameters.items()):
            if param is not None:
                held[name] = param
                module._parameters[name] = used(param)  # type: ignore[assignment]

    def after(_: nn.Module, args: Any, output: Any) -> None:
        for name, param in held.items():
            module._parameters[name] = param
        held.clear()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after, always_call=True, prepend=True)


_AROUND: dict[str, Callable[[nn.Module, str, Mesh, _Borders], None]] = {
    "column": _around_column,
    "qkv": _around_column,
    "gather": _around_gather,
    "row": _around_row,
    "vocab": _around_vocab,
}


class _Copies:
    """`copy`, once for all modules that read one tensor in turn: q, k and v share one sum in the backward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._given: weakref.ref[Tensor] | None = None
        self._copied: Tensor | None = None

    def __call__(self, path: str, x: Tensor) -> Tensor:
        if self._copied is not None and self._given is not None and self._given() is x:
            return self._copied
        copied = copy(x, self._group, path)
        self._given, self._copied = weakref.ref(x, self._forget), copied
        return copied

    def _forget(self, given: weakref.ref[Tensor]) -> None:
        """Let go of the copy, and of the graph behind it, with the tensor it was made of."""
        if given is self._given:
            self._given = self._copied = None


# -- the two borders, and what stands on them ------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str, dtype: torch.dtype) -> Tensor:
        ctx.group, ctx.owner, ctx.dtype = group, owner, dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = _summed(gradients[0].to(ctx.dtype), ctx.group, ctx.owner)
        return total.to(gradients[0].dtype), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
        return _summed(x, group, owner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        with owned(owner):
            dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts = gradients[0].chunk(dist.get_world_size(ctx.group), dim=-1)
        return parts[dist.get_rank(ctx.group)].contiguous(), None, None


def copy(x: Tensor, group: dist.ProcessGroup, owner: str, dtype: torch.dtype | None = None) -> Tensor:
    """Hand x on as it is; sum its gradient over the group, in `dtype` where it is given."""
    return _Copy.apply(x, group, owner, dtype or x.dtype)


def reduce(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Sum x over the group; hand its gradient on as it is."""
    return _Reduce.apply(x, group, owner)


def gather_last(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    """Put the last dimension together from all ranks; every rank goes on with the whole."""
    return _GatherLast.apply(x, group, owner)


def _summed(x: Tensor, group: dist.ProcessGroup, owner: str) -> Tensor:
    total = x.contiguous().clone()
    with owned(owner):
        dist.all_reduce(total, group=group)
    return total


def cut_cross_entropy(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum of the cross entropies of rows whose logits are cut by vocabulary; labels of -100 count nothing.

    logits [N, V / tp], labels [N]. With m the largest logit of a row: log(sum exp(x - m)) + m - x[label], each sum
    taken over all ranks.
    """
    size = logits.shape[-1]
    first = dist.get_rank(group) * size
    largest = logits.detach().amax(dim=-1)
    with owned("loss.largest"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[:, None]
    own = labels - first
    elsewhere = (own < 0) | (own >= size)
    right = shifted.gather(-1, own.masked_fill(elsewhere, 0)[:, None])[:, 0].masked_fill(elsewhere, 0.0)
    sums = reduce(torch.stack([shifted.exp().sum(dim=-1), right]), group, "loss.sums")
    losses = sums[0].log() - sums[1]
    return losses.masked_fill(labels == IGNORED_LABEL, 0.0).sum()


def cuts_logits(program: Program) -> bool:
    """Whether the loss gets logits that are cut by vocabulary."""
    return program.step.layout.tp > 1 and program.step.cuts_loss and program.step.model.logit_rows > 0


def cut_loss(mesh: Mesh, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """`build.cross_entropy` on logits cut by vocabulary."""
    logits, labels = outputs.logits if not isinstance(outputs, Tensor) else outputs, target_of(batch)
    total = cut_cross_entropy(at_least_float32(logits).flatten(0, -2), labels.flatten(), mesh.groups["tp"])
    return total, (labels != IGNORED_LABEL).sum()


def whole_logits(outputs: Any, program: Program, mesh: Mesh) -> Any:
    """Put logits cut by vocabulary together, for what reads all of them."""
    if not cuts_logits(program):
        return outputs
    if isinstance(outputs, Tensor):
        return gather_last(outputs, mesh.groups["tp"], "logits")
    outputs.logits = gather_last(outputs.logits, mesh.groups["tp"], "logits")
    return outputs
