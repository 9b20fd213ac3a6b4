"""An nn.Module on the meta device becomes a `ModelSpec`: one forward of one sample is watched, without values.

Layers follow the modules. Blocks are the children of the containers (nn.ModuleList, nn.Sequential) in which the model
repeats itself; what runs before, between and after them, each module taken as high in the tree as it goes, makes up
the other layers:

    LlamaForCausalLM ─┬ model ─┬ embed_tokens, rotary_emb    embed_tokens      first
                      │        ├ layers ─ 0, 1, ...          model.layers.0    a block each
                      │        └ norm                        norm+lm_head      last
                      └ lm_head

Costs follow the data. An operation belongs to the layer that was entered last. A storage is made by one layer; what
another one reads of it is handed over (`output_elements` of the maker, `input_elements` of its first reader), and what
autograd keeps of it is saved once, by the layer that keeps it first. FLOPs are torch's own count
(`torch.utils.flop_counter`): 2 for a multiplication and an addition, attention as if nothing were masked.

Attention is taken as the fused kernels do it: they keep queries, keys, values, output, one log-sum-exp a row and the
mask they are given, but no matrix of scores. Whole numbers keep their values, so that code which looks at the positions
of tokens takes the branch it would really take. Code that looks at other values (`x[x > 0]`, the tokens of an expert) is
followed with all values of the sample and the weights, where these are few enough to run on the CPU once; it may do
another thing for the next sample, so the spec says where it looks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from samestep.errors import ModelError, SamestepError
from samestep.job import Job
from samestep.model import Cutting, Exchange, Factors, LayerSpec, ModelSpec, ParamSpec, Product, is_below
from samestep.runtime.build import call_model, model_source
from samestep.runtime.init import blueprint

OnUse = Callable[[str, set[str], bool], None]
"""Told of the module that runs, the modules that own the weights it uses, and whether it does so on what is cut."""

ValueOf = Callable[[str], Tensor]
"""Returns the value of the buffer of this name."""

KNOWN_ELEMENTS = 2**20
"""Whole numbers are followed in tensors of at most so many elements: tokens and positions, not masks of pairs."""
KNOWN_WEIGHTS = 2**26
"""Code that looks at other values than whole numbers is run for real in models of at most so many weights."""

_META, _CPU = torch.device("meta"), torch.device("cpu")


def model_spec(job: Job, sample: Any) -> ModelSpec:
    """Build the job's model on the meta device and trace it; `sample` is a batch of one real sample.

    Raises:
        ModelError: the model cannot be built or traced.
    """
    plan = blueprint(model_source(job), job.train.seed)
    name = job.model.source.rpartition(":")[2]
    return trace(plan.module, sample, name, functools.partial(plan.materialize, device=_CPU))


def trace(
    module: nn.Module,
    sample: Any,
    name: str,
    value_of: ValueOf | None = None,
    on_keep: Callable[[str], None] = lambda block: None,
    styles: Mapping[str, str] | None = None,
    on_use: OnUse = lambda path, owners, is_cut: None,
) -> ModelSpec:
    """Trace one forward of a module on the meta device; `sample` is a batch of one real sample.

    `value_of` serves code that looks at the values of buffers and weights; without it such code is refused.
    `on_keep` is told of each tensor that autograd keeps: the top-most module with weights that was entered last.
    `styles` says how modules may be cut, by their paths: what lies behind a column-cut one and before a row-cut one is
    cut too. `on_use` is told of every operation on trained weights and data.

    Raises:
        ModelError: the forward fails, or needs values that are not there.
    """
    num_samples = samples_traced(module)
    containers = _containers(module)
    watch = _Watch(module, on_keep, on_use, styles or {})
    try:
        _forward(module, sample, num_samples, name, containers, watch, value_of)
    except _NeedsValuesError:
        if value_of is None or _num_elements(module) > KNOWN_WEIGHTS:
            raise ModelError(_unseen(name, watch, module)) from None
        looked = watch.innermost or name
        watch = _Watch(module, on_keep, on_use, styles or {}, of_everything=True)
        watch.varies = looked
        try:
            _forward(module, sample, num_samples, name, containers, watch, value_of)
        except _NeedsValuesError:
            raise ModelError(_unseen(name, watch, module)) from None
    layers = _arrange(module, name, containers, watch)
    return ModelSpec(
        name=name,
        layers=_layer_specs(module, layers, watch, num_samples),
        params=_param_specs(module, layers, containers, watch),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        coupled_modules=_coupled(module),
        varies_at=watch.varies,
    )


def samples_traced(module: nn.Module) -> int:
    """Return how many copies of a sample are traced: batch norm refuses a batch of one."""
    return 2 if _coupled(module) else 1


def _coupled(module: nn.Module) -> tuple[str, ...]:
    return tuple(path for path, part in module.named_modules() if _couples_samples(part))


def _couples_samples(module: nn.Module) -> bool:
    """Whether samples of a batch influence each other through this module, or statistics that it keeps of them."""
    if isinstance(module, _InstanceNorm):
        return module.training and module.running_mean is not None
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


# -- where the blocks are --------------------------------------------------------------------------


def _containers(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the containers whose children are the blocks: the most repeated one and its equals in depth.

    A head of a norm and a linear layer is an nn.Sequential too, but repeats nothing.
    """
    found = dict(_outermost("", module))
    if not found:
        return ()
    repeated = {path: _repeated_elements(container) for path, container in found.items()}
    sizes = repeated if any(repeated.values()) else {path: _num_elements(part) for path, part in found.items()}
    best = max(sizes, key=sizes.__getitem__)
    return tuple(path for path, size in sizes.items() if size and _depth(path) == _depth(best))


def _outermost(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost containers that hold weights; one that is mostly a container of them gives way to it."""
    total = _num_elements(module)
    is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
    children = [(_join(path, name), child) for name, child in module.named_children()]
    inner = [c for _, c in children if isinstance(c, (nn.ModuleList, nn.Sequential)) and 2 * _num_elements(c) > total]
    if is_container and total and not inner:
        yield path, module
        return
    for child_path, child in children:
        yield from _outermost(child_path, child)


def _repeated_elements(container: nn.Module) -> int:
    """Weights in the children of one class, where there are several, or the container is a list."""
    sizes: Counter[type[nn.Module]] = Counter()
    counts: Counter[type[nn.Module]] = Counter()
    for child in container.children():
        sizes[type(child)] += _num_elements(child)
        counts[type(child)] += 1
    least = 1 if isinstance(container, nn.ModuleList) else 2
    return max((size for kind, size in sizes.items() if counts[kind] >= least), default=0)


def _num_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _block_of(path: str, containers: Iterable[str]) -> str | None:
    """Path of the container's child that `path` is, or is part of."""
    for container in containers:
        if path != container and is_below(path, container):
            below = path[len(container) + 1 :] if container else path
            return _join(container, below.partition(".")[0])
    return None


# -- watching a forward ----------------------------------------------------------------------------


class _NeedsValuesError(Exception):
    """Code looked at a value that is not known."""


class _Values:
    """Values of whole numbers on the meta device. A storage has a flat twin on the CPU; views are views of it."""

    def __init__(self, of_everything: bool) -> None:
        self.of_everything = of_everything
        """Values of all numbers."""
        self._twins: dict[int, Tensor] = {}

    def follows(self, tensor: Tensor) -> bool:
        """Whether values of this kind are kept."""
        return tensor.is_meta and (self.of_everything or _is_whole(tensor))

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Remember the value of a tensor that has a storage of its own."""
        size = _storage_elements(tensor)
        if self.follows(tensor) and (self.of_everything or size <= KNOWN_ELEMENTS):
            twin = torch.zeros(size, dtype=tensor.dtype)
            twin.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(value)
            self._twins[_address(tensor)] = twin

    def forget(self, tensor: Tensor) -> None:
        """Something unknown was written into it."""
        self._twins.pop(_address(tensor), None)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the value is known."""
        if not tensor.is_meta:
            return True
        twin = self._twins.get(_address(tensor))
        return twin is not None and twin.dtype == tensor.dtype

    def of(self, tensor: Tensor) -> Tensor:
        """Return the value; writing into it changes what is known."""
        if not tensor.is_meta:
            return tensor
        return self._twins[_address(tensor)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the values."""
        args, kwargs = tree_map_only(Tensor, self.of, (args, kwargs))
        return func(*args, **(kwargs | {"device": _CPU} if "device" in kwargs else kwargs))

    def follow(
        self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any
    ) -> None:
        """Repeat on the values what an operation has done on the meta device."""
        kept = [tensor for tensor in _operands(outcome) if self.follows(tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if not kept or (is_random and not self.of_everything):
            return
        if not all(map(self.knows, given)):
            for tensor in kept if func._schema.is_mutable else ():
                self.forget(tensor)
            return
        with torch.random.fork_rng(devices=[]) if is_random else nullcontext():
            value = self.run(func, args, kwargs)
        if not func._schema.is_mutable:
            for tensor, real in zip(_operands(outcome), _operands(value), strict=True):
                if _address(tensor) not in self._twins:
                    self.learn(tensor, real)


@dataclass(slots=True)
class _Region:
    """What happened between the entry of a top-most module with weights and the next such entry."""

    flops: int = 0
    products: list[Product] = field(default_factory=list)
    moved: int = 0
    """Elements that other operations than products read and write."""
    moved_cut: int = 0
    kernels: int = 0
    read: set[int] = field(default_factory=set)
    results: set[int] = field(default_factory=set)
    """Storages written by matrix products, convolutions and attention."""


class _Watch(TorchDispatchMode):
    """Notes what every operation reads, writes and costs, by regions. A storage is known by its address."""

    def __init__(
        self,
        module: nn.Module,
        on_keep: Callable[[str], None],
        on_use: OnUse,
        styles: Mapping[str, str],
        of_everything: bool = False,
    ) -> None:
        super().__init__()
        self._on_keep, self._on_use = on_keep, on_use
        self.styles = styles
        self.cut: set[int] = set()
        """Storages of which a tensor cut leaves a rank its part."""
        self.regions: dict[str, _Region] = {"": _Region()}
        self.region = ""
        """Path of the top-most module with weights that was entered last; nothing before the first."""
        self.order: list[str] = []
        """Top-most modules, with or without weights, as they were first entered."""
        self.entries: Counter[str] = Counter()
        self.taking_gradient: set[str] = set()
        """Modules that were given something that takes a gradient when they were first entered."""
        self.newest: dict[str, str] = {}
        """For each module: the region that was the newest one when the module was entered last."""
        self.entered: dict[str, int] = {}
        """When each module was first entered, as a count of entries and exits."""
        self.left: dict[str, int] = {}
        """When each module was last left."""
        self.stacks: dict[int, set[frozenset[str]]] = {}
        """For each weight: the modules that were running, each time that it was read."""
        self.innermost = ""
        """Path of the module that was entered last."""
        self.makers: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.savers: dict[int, str] = {}
        self.returned: set[int] = set()
        self.sizes: dict[int, int] = {}
        """Elements of each storage."""
        self.values = _Values(of_everything)
        self.varies = ""
        """Path of a module whose code may do another thing, or make another shape, for other values."""
        self.exchanges: list[tuple[str, Exchange]] = []
        """By region: what attentions read and make."""
        self.pairs: set[int] = set()
        """Storages of masks of pairs of tokens."""
        self._running: list[str] = []
        self._events = 0
        self._depth = 0
        self._alive: dict[int, torch.UntypedStorage] = {}
        self._weights = {self.key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._frozen = {self.key(param) for param in module.parameters() if not param.requires_grad}
        self._owners: dict[int, set[str]] = {}
        """For trained weights, and what is made of nothing else: the modules that own them."""
        for path, part in module.named_modules():
            for param in part.parameters(recurse=False):
                if param.requires_grad:
                    self._owners.setdefault(self.key(param), set()).add(path)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _operands(*args, *kwargs.values())
        if any(tensor.is_meta for tensor in given) and not all(tensor.is_meta for tensor in given):
            # A constant that the forward made on the CPU: on meta nothing else may stand beside it.
            args, kwargs = tree_map_only(Tensor, self.place, (args, kwargs))
            given = _operands(*args, *kwargs.values())
        outcome = self._run(func, given, args, kwargs)
        written = [tensor for tensor in _operands(outcome) if tensor.is_meta]
        flops = _flops_of(func, args, kwargs, outcome)
        given = [tensor for tensor in given if tensor.is_meta]
        self.note(given, written, flops, None if flops is None else self._product(func, args, outcome, flops))
        return outcome

    def _product(self, func: Any, args: tuple[Any, ...], outcome: Tensor, flops: int) -> Product:
        """Describe a matrix product or convolution by its three numbers; one of another kind by its FLOPs alone."""
        packet, count, groups, taps = func.overloadpacket, 1, 1, 1
        left, right = args[1:3] if packet in _ADDING else args[:2]
        key = self.key(right)
        known = key in self._weights
        factors: Factors = ("frozen" if key in self._frozen else "weight") if known else "pair"
        if packet in _PLAIN:
            rows, inner, columns = left.shape[0], left.shape[1], right.shape[1]
        elif packet in _BATCHED:
            (count, rows, inner), columns = left.shape, right.shape[2]
            if known:  # a weight for each of the rows' groups
                count, rows, groups = 1, count * rows, count
        elif packet is torch.ops.aten.convolution:
            count = args[8]
            columns, inner, taps = right.shape[0] // count, right.shape[1:].numel(), right.shape[2:].numel()
            rows = outcome.numel() // right.shape[0]
        elif func in _GROUPED_PRODUCTS or func._schema.name == _GROUPED_FALLBACK:
            rows, inner, columns, groups = left.shape[0], left.shape[1], right.shape[2], right.shape[0]
        else:
            rows, inner, columns = max(flops // 2, 1), 1, 1
        style = self.styles.get(self.innermost, "")
        cut: Cutting = "inner" if style == "row" else "columns" if style in _BY_COLUMNS else ""
        if not known and any(self.key(tensor) in self.cut for tensor in (left, right)):
            cut = "count"
        return Product(
            rows=rows, inner=inner, columns=columns, count=count, factors=factors, groups=groups, taps=taps,
            cut=cut, owner=self.innermost,
        )  # fmt: skip

    def _run(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the meta device, and on the values where they are known."""
        looks, sizes = torch.Tag.data_dependent_output in func.tags, torch.Tag.dynamic_output_shape in func.tags
        if (looks or sizes) and any(tensor.is_meta for tensor in given):
            if all(map(self.values.knows, given)):
                outcome = self.values.run(func, args, kwargs)
                return outcome if looks else tree_map_only(Tensor, self.place, outcome)
            if looks or func.overloadpacket not in _PICKING:
                raise _NeedsValuesError
            picks = _operands(args[1])
            if any(pick.dtype in (torch.bool, torch.uint8) for pick in picks):
                return self._pick(func, args[0], picks, args[1:])
        outcome = _grouped_product(*args[:2]) if func in _GROUPED_PRODUCTS else func(*args, **kwargs)
        self.values.follow(func, given, args, kwargs, outcome)
        return outcome

    def _pick(self, func: Any, tensor: Tensor, picks: list[Tensor], args: tuple[Any, ...]) -> Tensor:
        """Make the result of `tensor[mask]`, whose shape only the values of the mask tell."""
        if not all(map(self.values.knows, picks)):
            raise _NeedsValuesError
        self.varies = self.varies or self.innermost
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        real = func(zeros, *tree_map_only(Tensor, self.values.of, args))
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)

    def note(
        self, given: list[Tensor], written: list[Tensor], flops: int | None, product: Product | None = None
    ) -> None:
        """Book an operation to the region; one whose FLOPs are counted has results worth keeping."""
        region = self.regions[self.region]
        read = {self.key(tensor) for tensor in given}
        for key in read - self._weights - region.read:
            self.readers.setdefault(key, []).append(self.region)
        region.read |= read
        for key in read & self._weights:
            self.stacks.setdefault(key, set()).add(frozenset(self._running))
        keys = {self.key(tensor) for tensor in written}
        for key in keys - read:  # a view, or what is written in place, was made before
            self.makers.setdefault(key, self.region)
        self._note_use(read, keys)
        is_cut = product.cut in ("columns", "count") if product else bool(read & self.cut)
        if is_cut and not (product and self.styles.get(product.owner) == "gather"):
            self.cut |= keys - read
        if flops is not None:
            region.flops += flops
            region.results.update(keys)
        if product is not None:
            region.products.append(product)
            region.kernels += 1
        elif keys - read or any(tensor._version for tensor in written):  # no view
            elements = sum(tensor.numel() for tensor in (*given, *written))
            region.moved += elements
            region.moved_cut += elements if is_cut else 0
            region.kernels += 1

    def _note_use(self, read: set[int], written: set[int]) -> None:
        """Tell of trained weights that meet data, and follow what is made of them before they do."""
        owners = {path for key in read & self._owners.keys() for path in self._owners[key]}
        if not owners:
            return
        if read <= self._owners.keys() | self._weights:
            self._owners |= dict.fromkeys(written - read, owners)
        else:
            self._on_use(self._running[-1] if self._running else "", owners, bool(read & self.cut))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """Note what an attention reads and makes; one without heads has nothing to exchange."""
        if query.dim() != 4:
            return
        roles = {"query": query, "key": key, "value": value, "output": output}
        for role, tensor in roles.items():
            exchange = Exchange(
                role=role,  # type: ignore[arg-type]
                elements=tensor.numel(),
                heads=tensor.shape[1],
                query_heads=query.shape[1],
                is_cut=self.key(query) in self.cut,
                takes_gradient=tensor.requires_grad or role == "output",
            )
            self.exchanges.append((self.region, exchange))

    def save(self, tensor: Tensor) -> Tensor:
        """Book what autograd keeps, unless it is there anyway."""
        self._on_keep(self.region)
        key = self.key(tensor)
        if tensor.is_meta and key not in self._weights:
            self.savers.setdefault(key, self.region)
        return tensor

    def place(self, real: Tensor) -> Tensor:
        """Return a tensor on the meta device for a real one, whose whole numbers stay known."""
        if real.is_meta:
            return real
        tensor = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=_META)
        self.key(tensor)
        self.values.learn(tensor, real)
        return tensor

    def key(self, tensor: Tensor) -> int:
        """Return the address of a tensor's storage, and keep it, so that no other storage gets it."""
        address = _address(tensor)
        if address not in self._alive:
            self._alive[address] = tensor.untyped_storage()
            self.sizes[address] = _storage_elements(tensor)
        return address

    def enter(self, path: str, part: nn.Module, is_outside: bool, given: Any) -> None:
        """Note that a module's forward starts."""
        self.innermost = path
        self.entries[path] += 1
        self._running.append(path)
        self._events += 1
        self.entered.setdefault(path, self._events)
        if self.entries[path] == 1 and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(given)):
            self.taking_gradient.add(path)
        if not is_outside:
            self._enter_inside(path, part)
        self.newest[path] = next(reversed(self.regions))

    def _enter_inside(self, path: str, part: nn.Module) -> None:
        if self._depth == 0:
            if self.entries[path] == 1:
                self.order.append(path)
                if any(True for _ in part.parameters()):
                    self.regions[path] = _Region()
            self.region = path if path in self.regions else self.region
        self._depth += 1

    def leave(self, is_outside: bool) -> None:
        """Note that a module's forward ends."""
        self._events += 1
        self.left[self._running.pop()] = self._events
        self._depth -= not is_outside

    @contextmanager
    def knowing(self, module: nn.Module, value_of: ValueOf | None) -> Iterator[None]:
        """Know buffers of whole numbers, or all weights and buffers, for the length of a forward."""
        known = (*module.named_parameters(), *module.named_buffers())
        for path, tensor in known:
            is_wanted = self.values.of_everything or (_is_whole(tensor) and tensor.numel() <= KNOWN_ELEMENTS)
            if value_of is not None and is_wanted:
                with suppress(ModelError):
                    self.values.learn(tensor, value_of(path))
        yield
        self.values = _Values(of_everything=False)


def _forward(
    module: nn.Module,
    sample: Any,
    num_samples: int,
    name: str,
    containers: tuple[str, ...],
    watch: _Watch,
    value_of: ValueOf | None,
) -> None:
    """Run the forward under `watch`, on `num_samples` copies of the sample.

    Raises:
        ModelError: it fails.
        _NeedsValuesError: it looks at values that `watch` does not know.
    """
    copies = tree_map_only(Tensor, lambda t: torch.cat([t] * num_samples) if t.dim() else t, sample)
    batch = tree_map_only(Tensor, watch.place, copies)
    try:
        with ExitStack() as stack:
            stack.enter_context(watch.knowing(module, value_of))
            stack.enter_context(_hooks(module, containers, watch))
            stack.enter_context(_fused_attention(watch))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(watch.save, lambda tensor: tensor))
            stack.enter_context(watch)
            outputs = call_model(module, batch)
    except (SamestepError, _NeedsValuesError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{name} cannot be traced: {_at(watch)} fails: {type(error).__name__}: {reason}") from error
    watch.returned = {watch.key(tensor) for tensor in _tensors(outputs)}


def _at(watch: _Watch) -> str:
    return f"the forward at {watch.innermost}" if watch.innermost else "the forward"


def _unseen(name: str, watch: _Watch, module: nn.Module) -> str:
    """Say that code looks at values that a trace does not have."""
    return (
        f"{name} cannot be traced: {_at(watch)} looks at the values of a tensor (as .item(), `if`, x[mask] or a loop over "
        f"experts do), and the {_num_elements(module):,} weights of a model on the meta device have none; models of up "
        f"to {KNOWN_WEIGHTS:,} weights are run once to see, and a form that does not look, as torch.where, always works"
    )


@contextmanager
def _hooks(module: nn.Module, containers: tuple[str, ...], watch: _Watch) -> Iterator[None]:
    """Tell `watch` of every module that is entered and left."""
    handles = []
    for path, part in module.named_modules():
        outside = _is_outside(path, containers)
        enter = functools.partial(
            lambda path, outside, part, *given: watch.enter(path, part, outside, given), path, outside
        )
        leave = functools.partial(lambda outside, part, args, output: watch.leave(outside), outside)
        handles.append(part.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(part.register_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_outside(path: str, containers: tuple[str, ...]) -> bool:
    """Whether it is the model itself, a container, or has one within."""
    return not path or any(is_below(container, path) for container in containers)


class _Attention(torch.autograd.Function):
    """What the fused kernels of attention make and keep."""

    @staticmethod
    def forward(
        ctx: Any, watch: _Watch, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> Tensor:
        # Queries come as [..., head, token, features]; the kernels write the heads of a token side by side.
        *batch, num_heads, length = query.shape[:-1] if query.dim() > 3 else (*query.shape[:-2], 1, query.shape[-2])
        output = query.new_empty((*batch, length, num_heads, value.shape[-1])).transpose(-3, -2)
        output = output if query.dim() > 3 else output.squeeze(-3)
        log_sum_exp = query.new_empty(query.shape[:-1])
        # A mask of booleans is turned into one of numbers, at every call.
        masks = () if mask is None else (query.new_empty(mask.shape) if mask.dtype is torch.bool else mask,)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, *masks)
        products = query.shape[:-1].numel() * key.shape[-2]
        flops = 2 * products * (query.shape[-1] + value.shape[-1])
        product = Product(
            rows=query.shape[-2], inner=query.shape[-1] + value.shape[-1], columns=key.shape[-2],
            count=query.shape[:-2].numel(), factors="causal" if causal else "attention", owner=watch.innermost,
            cut="count" if watch.key(query) in watch.cut else "",
        )  # fmt: skip
        given = [query, key, value, *([] if mask is None else [mask])]
        watch.note(given, [output, log_sum_exp], flops, product)
        watch.attend(query, key, value, output, mask)
        watch.pairs |= {watch.key(one) for one in masks}
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("a trace has no backward")


@contextmanager
def _fused_attention(watch: _Watch) -> Iterator[None]:
    """Let scaled_dot_product_attention on the meta device be a fused kernel; its own choice there is plain products."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # tried out beside the forward, as for the shape of a dropout mask
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        output = _Attention.apply(watch, query, key, value, attn_mask, is_causal)
        given = (query, key, value, attn_mask)
        if watch.values.of_everything and all(tensor is None or watch.values.knows(tensor) for tensor in given):
            with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                real: list[Any] = [tensor if tensor is None else watch.values.of(tensor) for tensor in given]
                found = nn.functional.scaled_dot_product_attention(
                    real[0], real[1], real[2], real[3], dropout_p, is_causal, **named
                )
                watch.values.learn(output, found)
        return output

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
        yield


_PICKING = (torch.ops.aten.index, torch.ops.aten.masked_select)
"""`tensor[picks]`: of whole numbers the result has a shape that is known without them, of a mask it has not."""

_GROUPED_PRODUCTS = (torch.ops.aten._grouped_mm.default,)
"""Products of rows with the matrix of their group (expert): torch does not count them, and on meta takes only bf16."""


_GROUPED_FALLBACK = "transformers::grouped_mm_fallback"
_PLAIN = (torch.ops.aten.mm, torch.ops.aten.addmm)
_BATCHED = (torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_ADDING = (torch.ops.aten.addmm, torch.ops.aten.baddbmm)
"""Products whose first operand is what they are added to."""
_BY_COLUMNS = ("column", "qkv", "gather", "vocab")


def _grouped_product(rows: Tensor, matrices: Tensor) -> Tensor:
    """Make the result of rows [N, K], sorted by group, with a matrix [K, M] for each group."""
    if rows.dim() != 2 or matrices.dim() != 3:
        raise NotImplementedError(f"a grouped product of {list(rows.shape)} with {list(matrices.shape)}")
    return rows.new_empty((rows.shape[0], matrices.shape[-1]))


def _flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outcome: Any) -> int | None:
    """Count the FLOPs of a matrix product or convolution; None for all else."""
    if func in _GROUPED_PRODUCTS or func._schema.name == _GROUPED_FALLBACK:
        return int(2 * outcome.numel() * args[0].shape[-1])
    formula = flop_registry.get(func.overloadpacket)
    return None if formula is None else int(formula(*args, **kwargs, out_val=outcome))


def _operands(*values: Any) -> list[Tensor]:
    """List the tensors among an operator's arguments or results, which are nested in one list at most."""
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,)))
    return [item for item in flat if isinstance(item, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storage_elements(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors within what a model returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(list(vars(value).values()))


# -- from what was seen to a spec ------------------------------------------------------------------


@dataclass(slots=True)
class _Layer:
    """A layer in the making."""

    name: str = ""
    is_block: bool = False
    modules: list[str] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)


def _arrange(module: nn.Module, name: str, containers: tuple[str, ...], watch: _Watch) -> list[_Layer]:
    """Put the top-most modules into layers, in the order in which they were first entered."""
    if not containers or len(watch.regions) == 1:
        owns_weights = any(True for _ in module.parameters(recurse=False))
        modules = [] if owns_weights else [path for path in watch.order if path in watch.regions]
        return [_Layer(name=name, modules=modules or [""], regions=list(watch.regions))]
    layers: list[_Layer] = []
    blocks: dict[str, _Layer] = {}
    for path in watch.order:
        block = _block_of(path, containers)
        has_weights = path in watch.regions
        last = layers[-1] if layers else None
        if block in blocks:
            layer = blocks[block]
        elif last is not None and (block is None) != last.is_block and not (block and has_weights):
            layer = last  # joins a layer of its kind; an activation among the blocks, the block before it
        elif has_weights:
            layer = _Layer(name=block or "", is_block=block is not None)
            layers.append(layer)
            if block is not None:
                blocks[block] = layer
        else:
            continue  # without weights, and between layers of another kind
        if has_weights:
            layer.regions.append(path)
        if has_weights or watch.entries[path] == 1:
            layer.modules.append(path)
    layers[0].regions.append("")
    _name(layers)
    return layers


def _name(layers: list[_Layer]) -> None:
    """Name the layers that are no blocks after their modules with weights."""
    for layer in layers:
        if not layer.is_block:
            parts = [path for path in layer.regions if path]
            short = "+".join(path.rpartition(".")[2] for path in parts)
            taken = {other.name for other in layers if other is not layer}
            layer.name = "+".join(parts) if short in taken else short


def _layer_specs(module: nn.Module, layers: list[_Layer], watch: _Watch, num_samples: int) -> tuple[LayerSpec, ...]:
    """Add up what each layer's regions did."""
    layer_of = {region: index for index, layer in enumerate(layers) for region in layer.regions}
    inputs, outputs, saved = ([set[int]() for _ in layers] for _ in range(3))
    for key, readers in watch.readers.items():
        maker = layer_of[watch.makers[key]] if key in watch.makers else None
        others = [layer_of[reader] for reader in readers if layer_of[reader] != maker]
        if others:
            inputs[others[0]].add(key)
        if others and maker is not None:
            outputs[maker].add(key)
    for key in watch.returned & watch.makers.keys():
        outputs[layer_of[watch.makers[key]]].add(key)
    for key, saver in watch.savers.items():
        saved[layer_of[saver]].add(key)

    def elements(keys: set[int]) -> int:
        return sum(watch.sizes[key] for key in keys) // num_samples

    specs = []
    for index, layer in enumerate(layers):
        regions = [watch.regions[path] for path in layer.regions]
        results = set[int]().union(*(region.results for region in regions))
        kept = inputs[index] | results
        spec = LayerSpec(
            name=layer.name,
            modules=tuple(layer.modules),
            is_block=layer.is_block,
            forward_flops=sum(region.flops for region in regions) // num_samples,
            input_elements=elements(inputs[index]),
            output_elements=elements(outputs[index]),
            saved_elements=elements(saved[index]),
            saved_pair_elements=elements(saved[index] & watch.pairs),
            saved_selective_elements=elements(kept),
            saved_cut_elements=elements(saved[index] & watch.cut),
            saved_selective_cut_elements=elements(kept & watch.cut),
            products=tuple(_of_one(part, num_samples) for region in regions for part in region.products),
            moved_elements=sum(region.moved for region in regions) // num_samples,
            moved_cut_elements=sum(region.moved_cut for region in regions) // num_samples,
            kernels=sum(region.kernels for region in regions),
            backward_reads_weights=_backward_reads_weights(module, layer),
            exchanges=tuple(
                dataclasses.replace(exchange, elements=exchange.elements // num_samples)
                for region, exchange in watch.exchanges
                if layer.is_block and region in layer.regions
            ),
        )
        specs.append(spec)
    return tuple(specs)


def _of_one(product: Product, num_samples: int) -> Product:
    """Return the part of one sample."""
    if product.factors in ("weight", "frozen"):
        return dataclasses.replace(product, rows=product.rows // num_samples)
    return dataclasses.replace(product, count=product.count // num_samples)


def _backward_reads_weights(module: nn.Module, layer: _Layer) -> bool:
    """Whether a gradient flows through a weight to an input; through an embedding it does not."""
    parts = (part for path in layer.modules for part in module.get_submodule(path).modules())
    owners = [part for part in parts if any(True for _ in part.parameters(recurse=False))]
    return not all(isinstance(owner, nn.Embedding) for owner in owners)


def _param_specs(
    module: nn.Module, layers: list[_Layer], containers: tuple[str, ...], watch: _Watch
) -> tuple[ParamSpec, ...]:
    """Describe each parameter once, under its first name."""
    names = _names_of(module)
    meeting = set()
    for alike in names.values():
        owners = {_owner(name) for name in alike}
        if len(alike) > 1 or any(watch.entries[owner] > 1 for owner in owners):
            meeting |= owners
    layer_of = {path: index for index, layer in enumerate(layers) for path in layer.modules}
    region_layer = {path: index for index, layer in enumerate(layers) for path in layer.regions}
    specs = []
    for name, param in module.named_parameters():
        alike = names[id(param)]
        owners = {_owner(alias) for alias in alike}
        layer = _layer_of(_owner(name), layer_of, containers)
        # A module's weights are gathered together, so one that is shared makes all of them so.
        shared = bool(owners & meeting)
        roots = owners if shared else {root for root in layers[layer].modules if is_below(_owner(name), root)}
        entered = [path for path in watch.entries if path in roots]
        last = max([layer, *(region_layer[watch.newest[path]] for path in owners if path in watch.newest)])
        spec = ParamSpec(
            name=name,
            shape=tuple(param.shape),
            layer=layer,
            aliases=tuple(alike[1:]),
            shared=shared,
            called=(
                min((watch.entered[path] for path in entered), default=0),
                max((watch.left[path] for path in entered), default=0),
            ),
            calls=max(1, *(watch.entries[path] for path in owners)),
            last_layer=last if shared and last != layer else None,
            read_outside=any(roots) and any(not roots & running for running in watch.stacks.get(watch.key(param), ())),
            takes_gradient=bool(entered) and entered[0] in watch.taking_gradient,
            trainable=param.requires_grad,
            sparse_gradient=any(getattr(module.get_submodule(path), "sparse", False) is True for path in owners),
        )
        specs.append(spec)
    return tuple(specs)


def _names_of(module: nn.Module) -> dict[int, list[str]]:
    """List the names of each parameter, by its id; a module that stands at two places of the tree counts once."""
    names: dict[int, list[str]] = {}
    for path, part in module.named_modules():
        for leaf, param in part.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(param), []).append(_join(path, leaf))
    return names


def _owner(param_name: str) -> str:
    return param_name.rpartition(".")[0]


def _layer_of(path: str, layer_of: Mapping[str, int], containers: tuple[str, ...]) -> int:
    """Layer of a module: of the listed one above it, else of the nearest that ran; the first for those outside."""
    if _is_outside(path, containers):
        return 0
    above = path
    while above and above not in layer_of:
        above = above.rpartition(".")[0]
    if above:
        return layer_of[above]
    while path:
        path = path.rpartition(".")[0]
        near = [index for listed, index in layer_of.items() if is_below(listed, path)]
        if near:
            return min(near)
    return 0
