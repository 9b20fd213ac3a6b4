"""Layouts as a Python file that uses torch alone: `DeviceMesh`, `fully_shard` (FSDP2), `parallelize_module`, `checkpoint`.

The file has `mesh()`, `parallelize(model)` and `accumulate(model, microbatches, backward)`, and names the blocks and the cut
weights of the model as samestep found them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from samestep.models.spec import ModelSpec
from samestep.program.repeated_products import KEEPS_PRODUCTS
from samestep.wings.plan.recipes.recipe import Framework, RecipeFacts, Said

_STYLES = {
    "column": "ColwiseParallel()",
    "row": "RowwiseParallel()",
    "gather": "ColwiseParallel(output_layouts=Replicate())",
}
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def _words(facts: RecipeFacts) -> Mapping[str, Said]:
    layout, clip_norm = facts.layout, facts.job.optimizer.clip_norm
    return {
        "dp_replicate": Said(
            lacks="replicas that shard nothing, with another axis. Use zero=3"
            if layout.zero == 0 and layout.dp > 1 and layout.world_size > layout.dp
            else ""
        ),
        "dp_shard": Said(),
        "zero": _zero(facts),
        "tp": _tensor(facts),
        "sequence_parallel": Said(lacks="sequence_parallel: this file keeps full activations between sharded matmuls"),
        "cp": Said(
            lacks=f"cp={layout.cp}: torch.distributed.tensor.experimental.context_parallel is a ring, and wants the buffers of your loop"
        ),
        "exchange": Said(),
        "pp": Said(lacks=f"pp={layout.pp}: torch.distributed.pipelining wants stages that your code builds"),
        "ep": Said(lacks=f"ep={layout.ep}: torch has no expert parallelism of its own"),
        "schedule": Said(),
        "virtual_stages": Said(),
        "microbatch": Said(
            in_code=f"{facts.num_microbatches} micro-batches of {facts.microbatch} samples a rank in `accumulate`"
        ),
        "precision": _precision(facts),
        "clip_norm": Said(
            in_code=""
            if clip_norm is None
            else f"torch.nn.utils.clip_grad_norm_(model.parameters(), {clip_norm}) before each update"
        ),
        "recompute": Said({"recompute": True}, lacks=_not_repeated(layout.recompute)),
        "loss_chunk": Said(lacks="loss_chunk: logits of a micro-batch exist whole"),
        "accumulate": Said({"accumulate": True}),
        "offload": Said(lacks="offload: CPUOffloadPolicy moves the weights to CPU memory too; it is left out"),
    }


def _not_repeated(recompute: str) -> str:
    reasons = {
        **{word: f"recompute={word}: this file repeats whole blocks" for word in KEEPS_PRODUCTS},
        "offload": "recompute=offload: this file leaves the inputs of blocks on the device",
    }
    return reasons.get(recompute, "")


def _precision(facts: RecipeFacts) -> Said:
    """Return what a precision needs in code: DDP casts nothing, and no part of this file scales a loss."""
    precision = facts.job.numerics.precision
    if precision == "float32":
        return Said()
    if precision not in _DTYPES:
        return Said(lacks=f"{precision}: this file casts and reduces in float32")
    words = [
        f"with torch.autocast(device, dtype={_DTYPES[precision]}) around forward and loss"
        if facts.layout.zero == 0
        else "",
        "torch.amp.GradScaler around loss and update" if precision == "fp16" else "",
    ]
    return Said(in_code="; ".join(filter(None, words)))


def _zero(facts: RecipeFacts) -> Said:
    zero = facts.layout.zero
    if zero == 2:
        return Said(differs="zero=2 holds weights whole; here they are sharded between steps, one gather per step")
    if zero == 1:
        return Said(lacks="zero=1: gradients and weights are sharded as well; this file has the nearest one, zero=2")
    return Said()


def _tensor(facts: RecipeFacts) -> Said:
    styles = _tensor_styles(facts.model)
    if not styles:
        return Said(lacks=f"tp={facts.layout.tp}: {facts.model.cut_refusal or 'its cuts have no style of torch'}")
    fused = [param.name for param in facts.model.params if param.cut and param.cut.parts > 1]
    lacks = (
        f"tp={facts.layout.tp}: {fused[0]} holds {facts.layout.tp} fused weights, which torch's styles cut as one"
        if fused
        else ""
    )
    return Said({"styles": styles}, lacks=lacks, differs="the head and the embedding stay whole on each rank")


def _tensor_styles(model: ModelSpec) -> dict[str, str]:
    """Return torch's style of each module whose weight is cut within a block, by its path in the block."""
    blocks = {layer.name for layer in model.layers if layer.is_block}
    styles = {}
    for param in model.params:
        path, _, _ = param.name.rpartition(".")
        block = next((name for name in blocks if path.startswith(f"{name}.")), None)
        if block is not None and param.cut is not None and param.cut.style in _STYLES:
            styles[path.removeprefix(f"{block}.")] = _STYLES[param.cut.style]
    return styles


def _write(facts: RecipeFacts, settings: dict[str, Any]) -> str:
    layout = facts.layout
    is_ddp = layout.zero == 0
    axes = {"replicate": layout.dp_replicate, "shard": layout.dp_shard, "tensor": layout.tp}
    axes = {name: degree for name, degree in axes.items() if degree > 1 or (name == "shard" and not is_ddp)} or {
        "replicate": 1
    }
    data = [name for name in axes if name != "tensor"]
    lines = [*_imports(facts, settings, is_ddp), "", f"BLOCKS = {_listed(_blocks(facts.model))}", ""]
    if styles := settings.get("styles"):
        lines += ["STYLES = {", *(f'    "{path}": {style},' for path, style in styles.items()), "}", ""]
    lines += [
        "",
        "def mesh(device: str) -> DeviceMesh:",
        f"    return init_device_mesh(device, {tuple(axes.values())}, mesh_dim_names={_tuple(axes)})",
        "",
        "",
        "def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:",
        '    """Return the model in this layout; build the optimizer after it, of the weights that it has then."""',
        *_body(facts, settings, data, is_ddp),
        "    return model",
        "",
        "",
        *_accumulate(facts, settings, is_ddp),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _imports(facts: RecipeFacts, settings: Mapping[str, Any], is_ddp: bool) -> Iterable[str]:
    if "recompute" in settings:
        yield "import functools"
    yield from ("from collections.abc import Callable, Sequence", "")
    yield from ("import torch", "from torch import nn")
    yield "from torch.distributed.device_mesh import DeviceMesh, init_device_mesh"
    yield (
        "from torch.nn.parallel import DistributedDataParallel"
        if is_ddp
        else "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    )
    if "styles" in settings:
        yield "from torch.distributed.tensor import Replicate" if "Replicate" in str(settings["styles"]) else ""
        yield "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
    if "recompute" in settings:
        yield "from torch.utils.checkpoint import checkpoint"


def _body(facts: RecipeFacts, settings: Mapping[str, Any], data: list[str], is_ddp: bool) -> Iterable[str]:
    """Yield the lines of `parallelize`: cut each block, let it recompute, then shard it, then the rest."""
    dtype = _DTYPES.get(facts.job.numerics.precision, "torch.float32")
    group = f'mesh["{data[0]}"]' if len(data) == 1 else f"mesh[{_tuple(data)}]"
    names = [word for word in ("styles", "recompute") if word in settings]
    if not is_ddp:
        yield f"    policy = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)"
        yield f"    options = dict(mesh={group}, mp_policy=policy, reshard_after_forward={facts.layout.zero == 3})"
    if names or not is_ddp:
        yield "    for path in BLOCKS:"
        yield "        block = model.get_submodule(path)"
    if "styles" in settings:
        yield '        parallelize_module(block, mesh["tensor"], STYLES)'
    if "recompute" in settings:
        yield "        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)"
    if not is_ddp:
        yield "        fully_shard(block, **options)"
        yield "    fully_shard(model, **options)"
    elif facts.layout.dp > 1:
        yield f"    model = DistributedDataParallel(model, process_group={group}.get_group())"


def _accumulate(facts: RecipeFacts, settings: Mapping[str, Any], is_ddp: bool) -> Iterable[str]:
    """Yield the function that runs the micro-batches of a step: torch reduces gradients in its last one, or in each."""
    yield "def accumulate(model: nn.Module, microbatches: Sequence, backward: Callable) -> None:"
    yield '    """Call `backward(model, microbatch)` for each micro-batch of a step; gradients are reduced as in the layout."""'
    yield "    for index, microbatch in enumerate(microbatches):"
    if is_ddp and facts.layout.dp > 1:
        yield "        model.require_backward_grad_sync = index == len(microbatches) - 1"
    elif not is_ddp and "accumulate" in settings:
        yield "        model.set_requires_gradient_sync(index == len(microbatches) - 1)"
    elif not is_ddp:
        yield "        model.set_is_last_backward(index == len(microbatches) - 1)"
    yield "        backward(model, microbatch)"


def _tuple(names: Iterable[str]) -> str:
    return "({})".format(" ".join(f'"{name}",' for name in names))


def _blocks(model: ModelSpec) -> list[str]:
    return [layer.name for layer in model.layers if layer.is_block]


def _listed(names: list[str]) -> str:
    """Return the names as a Python expression, short where they count up."""
    stem = names[0].rpartition(".")[0] if names else ""
    if len(names) > 1 and names == [f"{stem}.{index}" for index in range(len(names))]:
        return f'[f"{stem}.{{index}}" for index in range({len(names)})]'
    return repr(names)


FSDP = Framework(
    name="fsdp",
    suffix=".py",
    comment="#",
    words=_words,
    write=_write,
    differs=(
        "gradients are means over ranks: divide the loss of a micro-batch by the tokens of the whole step times 1/ranks yourself",
    ),
)
