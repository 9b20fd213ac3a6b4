"""The modules into which a trace looks: the calls of their children form the layers and the stages.

In a model that repeats itself these are the containers of its blocks (the lists of modules whose children are the repeated layers) and
what holds them. In another one, such as two linear layers with an activation between them, they are the model itself and, where it has
few children, the largest of these:

    model ─┬ stem           the calls of stem, encoder.first, encoder.second, head
           ├ encoder ─ first, second
           └ head

A module that `model.stages` names is looked for too, so what is around it is opened, but no block and nothing of torch's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from samestep.building.named_tensors import join_name
from samestep.errors import ModelError, did_you_mean
from samestep.models.spec import is_below
from samestep.tracing.flow import makes_event


def containers_of(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the containers whose children are the blocks: the most repeated one and others at its depth.

    A head of a norm and a linear layer is an nn.Sequential too, but repeats nothing. A dictionary of modules counts only
    where there are no lists: most of them hold a model's embeddings and its list of blocks.
    """
    containers = dict(_outermost("", module, _LISTS)) or {
        path: part for path, part in _outermost("", module, (nn.ModuleDict,)) if _repeated_elements(part)
    }
    if not containers:
        return ()
    repeated = {path: _repeated_elements(container) for path, container in containers.items()}
    sizes = repeated if any(repeated.values()) else {path: _num_elements(part) for path, part in containers.items()}
    best = max(sizes, key=sizes.__getitem__)
    return tuple(path for path, size in sizes.items() if size and _depth(path) == _depth(best))


_LISTS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.Sequential)


def _outermost(path: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost containers that hold weights, without those that mostly consist of another one."""
    total = _num_elements(module)
    is_container = isinstance(module, kinds)
    computed = "parametrizations" if is_parametrized(module) else ""  # a dictionary of lists of what makes its weights
    children = [(join_name(path, name), child) for name, child in module.named_children() if name != computed]
    inner = [c for _, c in children if isinstance(c, kinds) and 2 * _num_elements(c) > total]
    if is_container and total and not inner:
        yield path, module
        return
    for child_path, child in children:
        yield from _outermost(child_path, child, kinds)


def _repeated_elements(container: nn.Module) -> int:
    """Return the weights in children of one class, where there are several of it, or the container is a list."""
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


ENOUGH_CALLS = 16
"""Modules are opened until so many are called, so that stages can be balanced."""
_CLOSED = ("torch", "peft")
"""Packages whose modules may read the weights of their children without calling them, as torch's attention does."""
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def opened_modules(module: nn.Module, containers: Collection[str], stages: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths of the modules whose children make calls; `containers` are those of the blocks.

    Raises:
        ModelError: `stages` names no module with weights, or a part of a block.
    """
    opened = dict.fromkeys(containers or _open_by_size(module))
    for name in stages:
        opened |= dict.fromkeys(_around(name, module, containers))
    return tuple(opened)


def _open_by_size(module: nn.Module) -> Iterator[str]:
    """Yield the model, and the largest of what is called as long as that are few modules."""
    called = {"": module}
    while len(called) < ENOUGH_CALLS:
        may = [path for path, part in called.items() if _can_be_opened(part)]
        if not may:
            return
        path = max(may, key=lambda candidate: _num_elements(called[candidate]))
        yield path
        part = called.pop(path)
        prefix = f"{path}." if path else ""
        called |= {f"{prefix}{name}": child for name, child in part.named_children() if makes_event(child)}


def _can_be_opened(part: nn.Module) -> bool:
    """Return whether a module's code is seen to call its children: it is no leaf, and not code of a library."""
    if not any(makes_event(child) for child in part.children()):
        return False
    return type(part) in _CONTAINERS or type(part).__module__.partition(".")[0] not in _CLOSED


def _around(name: str, module: nn.Module, containers: Collection[str]) -> Iterator[str]:
    """Yield the modules around one that `model.stages` names."""
    parts = dict(module.named_modules())
    if name not in parts or not name:
        known = [path for path, part in parts.items() if path and _num_elements(part)]
        raise ModelError("stages-unknown", f"model.stages: the model has no module {name!r}{did_you_mean(name, known)}")
    steps = name.split(".")
    for index in range(len(steps)):
        path = ".".join(steps[:index])
        is_block = any(path != container and is_below(path, container) for container in containers) if path else False
        if is_block or (path and not _can_be_opened(parts[path])):
            what = "a block" if is_block else type(parts[path]).__name__
            raise ModelError(
                "stages-unknown",
                f"model.stages: {name!r} is a part of {what}, which stays whole. Use {path!r}",
            )
        yield path
