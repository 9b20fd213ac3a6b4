"""What the loop of a published row does beyond its table, by rules that hold for every row of a kind, and were written down before
the error of a row was known.

    configurations   a name of a configuration in the notes (`...xtp2pp8cp2_cg_fp4`) fills empty cells of the layout and of the precision
    adapters         the layers and the rank that the name of the model says; as Megatron-LM has them where it says none
    4 bits           frozen weights of products, under QLoRA
    modules          blocks of Transformers run as they are written, where no fused kernels are named
    16 bits          weights, gradients and states of a model that is loaded in 16 bits; FSDP under mixed precision has float32 ones
    an update        torch's AdamW without fused kernels works on lists: the square roots of all second moments are there at once
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from cells import Row, joined, says_nothing, whole

from samestep.hardware import Hardware
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec

_CONFIGURATION = re.compile(r"xtp(?P<tp>\d+)pp(?P<pp>\d+)(?P<more>(?:[ce]p\d+)*)(?P<rest>\w*(?:[^;]{0,12}mxfp8)?)")
_ENTRY = re.compile(r"MLPerf Training v(?:5\.1|[6-9])")
"""Rounds of MLPerf in which there are products in 4 bits, and CUDA graphs where nothing else is said."""
_MODULES = r"hugging.?face|\btransformers\b|fms-acceleration|\bpeft\b|\btrl\b|fsdp_qlora|xtuner|llama.?factory|axolotl|fastchat|rocm blog|deeplearningexamples"
_FUSED = r"foak|liger|unsloth|fused kernels|fast kernels"
_ADAPTERS = r"\bq?lora\b|task=lora"
_EVERYWHERE = r"all.linear|\*_proj|automodel"
"""Sources and names with adapters on all linear layers of a block, and not on those of its attention alone."""


def with_configuration(row: Row) -> Row:
    """Return a row with what the name of a configuration in its notes says where its cells say nothing."""
    found = _CONFIGURATION.search(joined(row, "notes"))
    cells: dict[str, str] = {}
    if found:
        cells |= {"tp": found["tp"], "pp": found["pp"]} | dict(re.findall(r"([ce]p)(\d+)", found["more"]))
    if is_entry(row):
        cells["precision"] = _precision(row, found["rest"] if found else None)
    filled = {name: cell for name, cell in cells.items() if cell and says_nothing(row.get(name) or "")}
    notes = row.get("notes") or ""
    if is_entry(row) and "CUDA_GRAPH" not in notes:
        notes += "; FULL_CUDA_GRAPH=1"
    return {**row, **filled, "notes": notes}


def is_entry(row: Row) -> bool:
    """Whether a row is of a late round of MLPerf."""
    return _ENTRY.search(joined(row, "source")) is not None


def is_of_recipe(row: Row) -> bool:
    """Whether a row is of NVIDIA's recipes, or of an entry to MLPerf, which builds on them."""
    return re.search(r"nemo|bridge|dgxc|mlperf", joined(row, "source", "url_or_repo_path"), re.IGNORECASE) is not None


def hides_sums(row: Row, *, is_late: bool) -> bool:
    """Whether sums over tp are cut to hide behind products: where the row says so, or says nothing of NVIDIA's recipes."""
    said = re.search(r"tp.comm.overlap(=False)?|async TP=(False|True)", joined(row, "notes"), re.IGNORECASE)
    if said:
        return not said[1] and said[2] != "False"
    return is_of_recipe(row) and is_late


def _precision(row: Row, rest: str | None) -> str:
    """Return the precision of an entry: that of its configuration; else 4 bits, and 8 of a mixture of experts."""
    if rest is None:
        return "MXFP8" if whole(row, "moe_experts") else "NVFP4" if re.search("B[23]00", row.get("gpu") or "") else ""
    return "NVFP4" if "fp4" in rest else "MXFP8" if "mxfp8" in rest else ""


class Adapters(NamedTuple):
    """The layers that have low-rank adapters, as `model.lora.targets` names them, and their rank."""

    targets: tuple[str, ...]
    rank: int


def adapters_of(row: Row) -> Adapters | None:
    """Return what a row says of its adapters; no targets where it does not say which layers have them."""
    said = joined(row, "model", "notes")
    if not re.search(_ADAPTERS, said, re.IGNORECASE):
        return None
    rank = re.search(r"\br(?:ank)?[ =]?(\d+)\b", said)
    named = re.search(r"\(((?:[qkvo],?)+)\)", row.get("model") or "")
    targets = tuple(f"{one}_proj" for one in named[1].split(",") if one) if named else ()
    if re.search(_EVERYWHERE, joined(row, "model", "source", "notes"), re.IGNORECASE):
        targets = ("all-linear",)
    return Adapters(targets, int(rank[1]) if rank else 16)


def is_packed(row: Row) -> bool:
    """Whether frozen weights of products are in 4 bits."""
    return re.search(r"qlora|\bnf4\b|4.bit base", joined(row, "model", "precision"), re.IGNORECASE) is not None


def by_modules(row: Row) -> bool:
    """Whether blocks are modules of Transformers, each operation a kernel of its own."""
    fused = re.search(_FUSED, joined(row, "source", "notes"), re.IGNORECASE)
    return is_of_transformers(row) and not fused


def is_of_transformers(row: Row) -> bool:
    """Whether the loop is one around Transformers, with kernels of its own or without."""
    said = joined(row, "source", "notes")
    return bool(re.search(_MODULES, said, re.IGNORECASE)) and "megatron" not in joined(row, "schedule", "notes").lower()


def holds_sixteen_bits(row: Row) -> bool:
    """Whether weights, gradients and states are all in 16 bits."""
    said = joined(row, "precision", "notes")
    if adapters_of(row) and re.fullmatch("BF16", row.get("precision") or "") and is_of_transformers(row):
        return True
    if re.search(r"^(?!.*titan).*torchao", joined(row, "source")) and not re.search("AMP", row.get("precision") or ""):
        return True  # its examples make the model in bfloat16
    if not re.search(r"torch_dtype b?float16|bfloat16 masters|pure b?f|full bf", said, re.IGNORECASE):
        return False
    widens = re.search("mixed", row.get("precision") or "", re.IGNORECASE) and whole(row, "zero_stage") == 3
    return is_packed(row) or not widens


def bits_of_states(row: Row) -> int:
    """Return the bits of one element of the optimizer's states where they are quantized; 0 of those that are not."""
    found = re.search(r"\b([48])-?bit adam", joined(row, "notes"), re.IGNORECASE)
    return int(found[1]) if found else 0


def adds_apart(row: Row, precision: str) -> bool:
    """Whether gradients are in 16 bits, of which DeepSpeed's BF16_Optimizer adds up float32 ones, with ZeRO-1."""
    said = joined(row, "schedule", "notes", "source")
    return (
        precision == "bf16" and whole(row, "zero_stage") == 1 and re.search(r"deepspeed|\bDS=", said, re.I) is not None
    )


def updates_lists(row: Row) -> bool:
    """Whether the optimizer is torch's AdamW on lists of tensors: its default on GPUs, and that of the Trainer."""
    fused = re.search(
        r"fused adam|fusedadam|8-?bit|4-?bit adam|deepspeed|paged|apex", joined(row, "notes"), re.IGNORECASE
    )
    return is_of_transformers(row) and not fused


def widens(row: Row) -> bool:
    """Whether activations between products are in float32: peft's `prepare_model_for_kbit_training` casts norms, which the stream follows."""
    prepares = is_packed(row) and by_modules(row) and whole(row, "zero_stage") < 3
    return prepares and not re.search("accelerated-peft|fsdp_qlora", joined(row, "source", "notes"))


def keeps_float32(row: Row) -> bool:
    """Whether what a block is given is kept in float32: with adapters, where norms are, and under FSDP."""
    return widens(row) or bool(
        adapters_of(row) and whole(row, "zero_stage") == 3 and "fms-acceleration" in joined(row, "source")
    )


def offloads(row: Row) -> bool:
    """Whether weights and gradients are in the host's memory between their uses."""
    return re.search("cpu_offload|offloaded to CPU", joined(row, "notes")) is not None


STARTS = ((r"deepspeed", 60), (r"", 15))
"""Operations in whose time the host gathers and frees the weights of a block: DeepSpeed fetches and releases each of a block's ten
parameters by hooks of its own, FSDP one flat tensor with its views, events and allocations."""


def gather_starts(row: Row) -> int:
    """Return the operations that a block's forward starts more where its weights are gathered for it by a loop of modules."""
    said = joined(row, "source", "schedule", "notes")
    if whole(row, "zero_stage") < 3 or not (is_of_transformers(row) or re.search("deepspeed", said, re.IGNORECASE)):
        return 0
    return next(starts for name, starts in STARTS if re.search(name, said, re.IGNORECASE))


def with_its_modules(row: Row, model: ModelSpec) -> ModelSpec:
    """Let blocks start, move and keep what those of a loop around Transformers do."""
    starts, wide, keeps_wide = gather_starts(row), widens(row), keeps_float32(row)
    adapters = adapters_of(row)
    passes = CAST_PASSES * max(len(adapters.targets), 4) if adapters and by_modules(row) else 0
    casts = re.search(r"mixed|amp\b|autocast", row.get("precision") or "", re.IGNORECASE) and not holds_sixteen_bits(
        row
    )
    casts = bool(casts) and by_modules(row) and "deeplearningexamples" not in joined(row, "notes").lower()
    experts = whole(row, "moe_experts") if is_of_transformers(row) else 0

    def own(layer: LayerSpec) -> LayerSpec:
        more = starts + EXPERT_STARTS * experts * bool(layer.dispatches)
        layer = replace(
            layer, moved=layer.moved.plus(0, kernels=more), input_elements=layer.input_elements * (1 + keeps_wide)
        )
        scores = sum(p.count * p.rows * p.columns for p in layer.products if p.is_batched) // 2
        moved = layer.moved.elements * (1 + wide) + passes * layer.output_elements + casts * SCORE_PASSES * scores
        return replace(layer, moved=replace(layer.moved, elements=moved))

    if not (starts or wide or keeps_wide or experts or passes or casts):
        return model
    return replace(model, layers=tuple(own(layer) if layer.is_block else layer for layer in model.layers))


def with_its_windows(row: Row, model: ModelSpec) -> ModelSpec:
    """Let the attention of every other block see no further than the window that the notes say it has."""
    window = re.search(r"sliding window (\d+) in every other layer", joined(row, "notes"))
    if not window:
        return model
    width = 2 * int(window[1])  # under a causal mask half of it is attended on average

    def narrow(layer: LayerSpec) -> LayerSpec:
        products = (replace(p, columns=min(p.columns, width)) if p.is_attention else p for p in layer.products)
        return replace(layer, products=tuple(products))

    blocks = [index for index, layer in enumerate(model.layers) if layer.is_block][::2]
    layers = (narrow(layer) if index in blocks else layer for index, layer in enumerate(model.layers))
    return replace(model, layers=tuple(layers))


CAST_PASSES = 5
"""Elements of its input that are read or written for each layer with adapters: peft's are in float32, so what they are given is cast."""
SCORE_PASSES = 6
"""Elements of a score that autocast adds: its softmax is in float32, as is the dropout of it, whose result is cast for the product."""
EXPERT_STARTS = 9
"""Operations of Transformers for each expert besides its products: which rows it has, that they are taken, weighted and added."""


def on_its_link(machine: Hardware, row: Row) -> float | None:
    """Return the bytes a second of a card's link to the others of its machine, where the row says what that is: a bridge of two cards, some
    lanes of a slot, a slot of a generation before; None of a machine that has no slots."""
    said = (row.get("interconnect") or "").lower()
    if re.search(r"nvlink bridge|\bnv4\b", said) and "no nvlink" not in said:
        return BRIDGE_BYTES_PER_S
    if machine.intra.bytes_per_s > SLOT_BYTES_PER_S:
        return None
    lanes = 4 if re.search(r"\bx4\b", said) else 2 if re.search(r"\bx8\b|slow lanes", said) else 1
    return machine.intra.bytes_per_s / lanes / (2 if re.search(r"pcie.?3|older", said) else 1)


BRIDGE_BYTES_PER_S = 45e9
"""What an NVLink bridge of two cards reaches of 56 GB/s."""
SLOT_BYTES_PER_S = 26e9
"""More than a slot of PCIe 4.0 reaches."""
