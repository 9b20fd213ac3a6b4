"""The `ModelSpec` of a job's model without importing torch: from a preset, a cache, or a subprocess that traces it.

A transformers model is a function of its family, its configuration, the versions of two packages and this package's own
code, so its spec is cached under a digest of these in `~/.cache/samestep`. A user's own code can change at any time, so it
is traced each time.

A job changes the shape of a preset in two ways. It adds low-rank adapters to linear layers,

    y = W x + (alpha / r) B A x        A [r, in], B [out, r] are trained; W [out, in] is not, and may be held in 4 bits

where under `tp` a part of an adapter is cut with its layer: B by rows if W is cut by columns, A by columns if W is cut by rows. And
attentions that run by torch's math (`run.attention = "math"`) have every score, in float32 at least. For a head with s queries and as
many keys of d elements the forward keeps the weights [s, s] and factors of both products [s, d], three of them, with as many heads of
keys as of queries. A backward has the gradients of weights and of scores besides:

    kept       heads x (keys x s + 3 s d)        in float32, under bf16 and fp16 twice as many elements of theirs
    working    heads x 2 keys x s

These counts were read from what torch's `scaled_dot_product_attention` saves (`tests/unit/test_kept_scores.py` does it again).
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from samestep.errors import ModelError, did_you_mean, of_words
from samestep.job import Job
from samestep.job_files import model_folder
from samestep.job_tables import ALL_LINEAR, PRESET, LoraTable
from samestep.models import presets
from samestep.models.layer_parts import Product, WorkingSet
from samestep.models.layer_spec import LayerSpec
from samestep.models.param_spec import BLOCK, Cut, ParamSpec
from samestep.models.spec import FORMAT_VERSION, ModelSpec, from_json
from samestep.models.weight_files import digest_of
from samestep.output.text import announced, installed_version


def model_spec(job: Job) -> ModelSpec:
    """Return the shape of a job's model, with the scores of its attentions where `run.attention` is math.

    If no cache has it, a subprocess with torch traces it. `preset:NAME` needs neither: `model.config` overrides fields of the preset's decoder, and the sequence length is the
    job's, or the preset's if the job does not give one.

    Raises:
        InputError: the model cannot be built or traced; the text is the one `train` would give.
    """
    model = _own_spec(job)
    return with_kept_scores(model, job.numerics.precision in ("bf16", "fp16")) if job.run.attention == "math" else model


def _own_spec(job: Job) -> ModelSpec:
    """Return the shape of a job's model, of a preset, from a cache, or traced."""
    if job.model.preset is not None:
        length = job.data.sequence_length if "sequence_length" in job.data.model_fields_set else None
        spec = presets.preset(job.model.preset, length, job.model.config)
        return spec if job.model.lora is None else add_adapters(spec, job.model.lora)
    if ":" not in job.model.named():
        words = [f"{PRESET}{name}" for name in presets.PRESETS]
        if hint := did_you_mean(job.model.source.lower(), words):
            raise ModelError(
                "not-module-function",
                f"model.source = {job.model.source!r} is not of the form hf:FAMILY or preset:NAME{hint}",
            )
    path = _cache_path(job)
    if path is not None:
        # A file that is missing, damaged, or of another format under the same digest: the model is traced.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            return from_json(path.read_text(encoding="utf-8"))
    text = _trace_elsewhere(job)
    if path is not None:
        with contextlib.suppress(OSError):  # a home folder that cannot be written to costs only the time of tracing
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{xxhash.xxh3_64_hexdigest(text.encode())}")
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
    return from_json(text)


def _cache_path(job: Job) -> Path | None:
    """Return the path at which the spec of a job's model is cached; None if it is traced each time.

    Raises:
        ModelError: the folder of the model lacks its configuration or its weights.
    """
    # Others are traced on a sample of their data, and a tokenizer may be another one the next time.
    if not job.model.takes_tokens or isinstance(job.model.resize_embeddings, str):
        return None
    versions = [f"{name} {installed_version(name)}" for name in ("torch", "transformers")]
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    code = xxhash.xxh3_64_hexdigest(b"".join(file.read_bytes() for file in sources))
    # The sequence length shapes the sample that is traced; where samples come from does not.
    key = [FORMAT_VERSION, versions, code, job.model.model_dump(mode="json"), job.data.sequence_length]
    if (folder := model_folder(job)) is not None:
        key.append(digest_of(folder))
    digest = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    try:
        return Path.home() / ".cache" / "samestep" / "specs" / f"{digest}.json"
    except RuntimeError:  # there is no home
        return None


def _trace_elsewhere(job: Job) -> str:
    code = "import sys; from samestep.training.workload import write_spec; write_spec(sys.stdin.read())"
    started = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait = f"tracing {job.model.source}: a large model takes a minute or two, and is kept for the next time"
    with started as process, announced(wait):
        try:
            said, complaint = process.communicate(job.model_dump_json())
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        return said
    if process.returncode == 2 and said.strip():
        name, text = json.loads(said)
        raise of_words(name, text)
    words = complaint.strip().splitlines() or ["no message"]
    raise ModelError("trace-failed", f"tracing {job.model.source} failed: {words[-1]}")


ADDING_KERNELS, ADDING_PASSES = 2, 5
"""Operations that scale an adapter's output and add it to that of its layer, and the elements that they read or write for one of it."""
DROPOUT_PASSES = 2.5
"""Elements that dropout reads or writes for one of an adapter's input: it, the result, and a mask of bytes."""

_OWN_NAMES = {"c_attn": ("qkv",), "query_key_value": ("qkv",), "c_fc": ("up_proj",), "c_proj": ("o_proj", "down_proj")}
"""Names of linear layers in transformers that presets have under another name."""
MATH_KERNELS = 15
"""Operations that torch's math starts in place of one kernel: casts, factors, masks, two products and a softmax."""


def add_adapters(model: ModelSpec, lora: LoraTable) -> ModelSpec:
    """Return the shape of a model of linear layers in blocks, with adapters on those that `lora` names.

    Raises:
        ModelError: it has no linear layer of a name.
    """
    linear = [path for index, layer in enumerate(model.layers) for path in _linear_paths(model, layer, index)]
    known = dict.fromkeys(path.rpartition(".")[2] for path in linear)
    wanted = {full for name in lora.targets for full in _OWN_NAMES.get(name, (name,))}
    saved = {path for name in lora.modules_to_save for path in _modules_called(model, name)}
    for name in sorted(wanted - {ALL_LINEAR}):
        if not any(is_called(path, name) for path in linear):
            raise ModelError(
                "lora-targets",
                f"model.lora.targets: no linear layer of preset {model.name} is called {name!r}{did_you_mean(name, known)}. Use "
                f"{', '.join([*known, ALL_LINEAR])}",
            )
    targets = {path for path in linear if ALL_LINEAR in wanted or any(is_called(path, name) for name in wanted)}
    packing = set(linear) if lora.base != "full" else set()
    params: list[ParamSpec] = []
    for param in model.params:
        path = param.name.rpartition(".")[0]
        packed = path in packing and param.name.endswith(".weight") and param.shape[-1] % BLOCK == 0
        params.append(replace(param, trainable=path in saved, held_as=lora.base if packed else param.held_as))
        if path in targets and param.name.endswith(".weight"):
            params += _adapters(param, path, lora.r)
    layers = tuple(_layer(layer, index, targets, saved, lora) for index, layer in enumerate(model.layers))
    return replace(model, layers=layers, params=tuple(params))


def is_called(path: str, name: str) -> bool:
    """Return whether a module at a path has a name of a job: its last words."""
    return path == name or path.endswith(f".{name}")


def _modules_called(model: ModelSpec, name: str) -> set[str]:
    """Return the paths of modules with weights of a name.

    Raises:
        ModelError: there is none.
    """
    every = {param.name.rpartition(".")[0] for param in model.params}
    if not (paths := {path for path in every if is_called(path, name)}):
        raise ModelError(
            "lora-targets", f"model.lora.modules_to_save: no module of preset {model.name} is called {name!r}"
        )
    return paths


def _linear_paths(model: ModelSpec, layer: LayerSpec, index: int) -> Iterator[str]:
    """Yield the paths of a block's linear layers, of which peft has adapters: those of experts are no modules."""
    if not layer.is_block:
        return
    names = {param.name for param in model.params_of(index) if len(param.shape) == 2}
    for product in layer.products:
        path = f"{layer.name}.{product.owner}"
        if product.factors in ("weight", "frozen") and f"{path}.weight" in names:
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
    elements = flops = kernels = moved = moved_cut = 0
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
            elements += product.rows * lora.r
            results += product.rows * product.columns
            results_cut += product.rows * product.columns * (product.cut == "columns")
            flops += sum(product.flops for product in more)
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
        saved_elements=layer.saved_elements + elements - unread,
        saved_cut_elements=layer.saved_cut_elements - unread_cut,
        saved_selective_elements=layer.saved_selective_elements + elements + results,
        saved_selective_cut_elements=layer.saved_selective_cut_elements + results_cut,
        moved=layer.moved.plus(moved, moved_cut, kernels),
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


def with_kept_scores(model: ModelSpec, is_narrow: bool) -> ModelSpec:
    """Return the model with attentions that keep their scores; `is_narrow` if its activations have two bytes."""
    layers = tuple(_with_kept_scores(layer, 2 if is_narrow else 1) for layer in model.layers)
    return replace(model, layers=layers)


def _with_kept_scores(layer: LayerSpec, width: int) -> LayerSpec:
    """Return a layer of which a score takes as many bytes as `width` elements."""
    attentions = [product for product in layer.products if product.is_attention]
    if not attentions:
        return layer
    saved, kept_cut = _summed(attentions, lambda product: kept_elements(product) * width)
    working, working_cut = _summed(
        attentions[:1], lambda product: 2 * width * product.rows * product.columns * product.count
    )
    products = tuple(
        replace(product, keeps_scores=True) if product.is_attention else product for product in layer.products
    )
    is_larger = working > layer.working.elements
    return replace(
        layer,
        products=products,
        saved_elements=layer.saved_elements + saved,
        saved_cut_elements=layer.saved_cut_elements + kept_cut,
        working=WorkingSet(working, working_cut, layer.working.wide_elements) if is_larger else layer.working,
        moved=layer.moved.plus(0, kernels=MATH_KERNELS * len(attentions)),
    )


def kept_elements(attention: Product) -> int:
    """Return the elements that the forward of a sample keeps: of weights, queries, keys and values."""
    rows, keys, sizes = attention.rows, attention.columns, attention.inner
    saved = rows * sizes // 2 + keys * sizes  # queries, and keys and values together
    return attention.count * (rows * keys + saved)


def _summed(attentions: Sequence[Product], elements: Callable[[Product], int]) -> tuple[int, int]:
    """Return the elements of some attentions, and the part of them that a tensor cut divides."""
    return sum(map(elements, attentions)), sum(elements(attention) for attention in attentions if attention.cut)
