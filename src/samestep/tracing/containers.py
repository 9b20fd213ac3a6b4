"""Containers of blocks: the lists of modules whose children are the repeated layers of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def containers_of(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the containers whose children are the blocks: the most repeated one and others at its depth.

    A head of a norm and a linear layer is an nn.Sequential too, but repeats nothing. A dictionary of modules counts only
    where there are no lists: most of them hold a model's embeddings and its list of blocks.
    """
    found = dict(_outermost("", module, _LISTS)) or {
        path: part for path, part in _outermost("", module, (nn.ModuleDict,)) if _repeated_elements(part)
    }
    if not found:
        return ()
    repeated = {path: _repeated_elements(container) for path, container in found.items()}
    sizes = repeated if any(repeated.values()) else {path: _num_elements(part) for path, part in found.items()}
    best = max(sizes, key=sizes.__getitem__)
    return tuple(path for path, size in sizes.items() if size and _depth(path) == _depth(best))


_LISTS: tuple[type[nn.Module], ...] = (nn.ModuleList, nn.Sequential)


def _outermost(path: str, module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost containers that hold weights, without those that mostly consist of another one."""
    total = _num_elements(module)
    is_container = isinstance(module, kinds)
    computed = "parametrizations" if is_parametrized(module) else ""  # a dictionary of lists of what makes its weights
    children = [(_join(path, name), child) for name, child in module.named_children() if name != computed]
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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
