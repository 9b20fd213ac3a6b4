"""The shape of a preset with low-rank adapters on its linear layers, and all other weights frozen.

    y = W x + (alpha / r) B A x        A [r, in], B [out, r] are trained; W [out, in] is not, and may be held in 4 bits

Under `tp` a part of an adapter is cut with its layer: B by rows where W is cut by columns, A by columns where W is cut by rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from samestep.errors import ModelError, did_you_mean
from samestep.job_tables import ALL_LINEAR, LoraTable
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.packing import BLOCK
from samestep.models.param_spec import Cut, ParamSpec
from samestep.models.spec import ModelSpec

ADDING_KERNELS, ADDING_PASSES = 2, 5
"""Operations that scale an adapter's output and add it to that of its layer, and the elements that they read or write for one of it."""
DROPOUT_PASSES = 2.5
"""Elements that dropout reads or writes for one of an adapter's input: it, the result, and a mask of bytes."""

_OWN_NAMES = {"c_attn": ("qkv",), "query_key_value": ("qkv",), "c_fc": ("up_proj",), "c_proj": ("o_proj", "down_proj")}
"""Names of linear layers in transformers that presets have under another name."""


def add_adapters(model: ModelSpec, lora: LoraTable) -> ModelSpec:
    """Return the shape of a model of linear layers in blocks, with adapters on those that `lora` names.

    Raises:
        ModelError: it has no linear layer of a name.
    """
    linear = [path for index, layer in enumerate(model.layers) for path in _linear_paths(model, layer, index)]
    known = dict.fromkeys(path.rpartition(".")[2] for path in linear)
    wanted = {own for name in lora.targets for own in _OWN_NAMES.get(name, (name,))}
    saved = {path for name in lora.modules_to_save for path in _modules_called(model, name)}
    for name in sorted(wanted - {ALL_LINEAR}):
        if not any(_is_called(path, name) for path in linear):
            raise ModelError(
                f"model.lora.targets: no linear layer of preset {model.name} is called {name!r}{did_you_mean(name, known)}: "
                f"{', '.join([*known, ALL_LINEAR])} work"
            )
    targets = {path for path in linear if ALL_LINEAR in wanted or any(_is_called(path, name) for name in wanted)}
    packing = set(linear) if lora.base == "nf4" else set()
    params: list[ParamSpec] = []
    for param in model.params:
        path = param.name.rpartition(".")[0]
        packed = path in packing and param.name.endswith(".weight") and param.shape[-1] % BLOCK == 0
        params.append(replace(param, trainable=path in saved, held_as="nf4" if packed else param.held_as))
        if path in targets and param.name.endswith(".weight"):
            params += _adapters(param, path, lora.r)
    layers = tuple(_layer(layer, index, targets, saved, lora) for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, params=tuple(params))


def _is_called(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _modules_called(model: ModelSpec, name: str) -> set[str]:
    """Return the paths of modules with weights of a name.

    Raises:
        ModelError: there is none.
    """
    every = {param.name.rpartition(".")[0] for param in model.params}
    if not (found := {path for path in every if _is_called(path, name)}):
        raise ModelError(f"model.lora.modules_to_save: no module of preset {model.name} is called {name!r}")
    return found


def _linear_paths(model: ModelSpec, layer: LayerSpec, index: int) -> Iterator[str]:
    """Yield the paths of a block's linear layers, of which peft has adapters: those of experts are no modules."""
    if not layer.is_block:
        return
    mine = {param.name for param in model.params_of(index) if len(param.shape) == 2}
    for product in layer.products:
        path = f"{layer.name}.{product.owner}"
        if product.factors in ("weight", "frozen") and f"{path}.weight" in mine:
            yield path


def _adapters(param: ParamSpec, path: str, rank: int) -> Iterator[ParamSpec]:
    columns, inner = param.shape
    of_down = of_up = None
    if param.cut is not None:
        part = Cut(
            style=param.cut.style, dim=param.cut.dim, groups=param.cut.groups, is_shareable=param.cut.is_shareable
        )
        of_down, of_up = (part, None) if part.style == "row" else (None, part)
    for name, shape, cut in (("lora_A", (rank, inner), of_down), ("lora_B", (columns, rank), of_up)):
        yield ParamSpec(name=f"{path}.{name}.default.weight", shape=shape, layer=param.layer, cut=cut)


def _layer(layer: LayerSpec, index: int, targets: set[str], saved: set[str], lora: LoraTable) -> LayerSpec:
    """Return a layer whose weights are frozen, with the products and other operations of its adapters."""
    products: list[Product] = []
    results = results_cut = 0
    kept = flops = kernels = moved = moved_cut = 0
    for product in layer.products:
        path = f"{layer.name}.{product.owner}"
        is_trained = path in saved or product.owner in saved
        products.append(
            replace(product, factors="frozen") if product.factors == "weight" and not is_trained else product
        )
        if path in targets:
            products[-1] = replace(products[-1], is_repeated=True)
            more = _adapter_products(product, lora.r)
            products += more
            kept += product.rows * lora.r
            results += product.rows * product.columns
            results_cut += product.rows * product.columns * (product.cut == "columns")
            flops += sum(one.flops for one in more)
            kernels += len(more) + ADDING_KERNELS + bool(lora.dropout)
            added = ADDING_PASSES * product.rows * product.columns
            dropped = round(DROPOUT_PASSES * product.rows * product.inner) if lora.dropout else 0
            moved += added + dropped
            moved_cut += added * (product.cut == "columns") + dropped * (product.cut == "inner")
    unread, unread_cut = _unread_elements(layer, targets | saved)
    if index == 1 and not saved:
        unread += layer.input_elements  # no gradient flows back to it
    head = None if layer.head is None else replace(layer.head, is_frozen=layer.head.owner not in saved)
    return replace(
        layer,
        products=tuple(products),
        forward_flops=layer.forward_flops + flops,
        saved_elements=layer.saved_elements + kept - unread,
        saved_cut_elements=layer.saved_cut_elements - unread_cut,
        saved_selective_elements=layer.saved_selective_elements + kept + results,
        saved_selective_cut_elements=layer.saved_selective_cut_elements + results_cut,
        moved_elements=layer.moved_elements + moved,
        moved_cut_elements=layer.moved_cut_elements + moved_cut,
        kernels=layer.kernels + kernels,
        has_backward=index > 0,
        head=head,
    )


def _unread_elements(layer: LayerSpec, trained: set[str]) -> tuple[int, int]:
    """Return the elements that were kept for gradients of frozen weights alone, and the part of them that a tensor cut divides: inputs
    of linear layers of which none is trained. A fused attention keeps its output itself, and experts their rows."""
    fused = {product.owner for product in layer.products if product.is_attention}
    is_read: dict[tuple[str, bool], bool] = {}
    sizes: dict[tuple[str, bool], int] = {}
    for product in layer.products:
        part, is_inner = product.owner.rpartition(".")[0], product.cut == "inner"
        if product.factors != "weight" or (layer.dispatches and part not in fused) or (is_inner and part in fused):
            continue
        key = part, is_inner
        is_read[key] = is_read.get(key, False) or bool({product.owner, f"{layer.name}.{product.owner}"} & trained)
        sizes[key] = product.rows * product.inner
    unread = {key: size for key, size in sizes.items() if not is_read[key]}
    return sum(unread.values()), sum(size for (_, is_inner), size in unread.items() if is_inner)


def _adapter_products(product: Product, rank: int) -> tuple[Product, Product]:
    """Return the products with A and B of an adapter, cut as its layer is: by its columns B is, by its inner size A."""
    down, up = (
        Product(rows=product.rows, inner=product.inner, columns=rank, owner="lora"),
        Product(rows=product.rows, inner=rank, columns=product.columns, owner="lora", is_repeated=product.is_repeated),
    )
    if product.cut == "columns":
        return down, replace(up, cut=product.cut, most_parts=product.most_parts)
    return (replace(down, cut=product.cut) if product.cut == "inner" else down), up
