"""What a published row repeats of the forward, and what the blocks of its library keep of it."""

from __future__ import annotations

import re
from dataclasses import replace

from cells import Row, SkippedError, joined, number, says_nothing, whole
from published_machines import is_by_engine, is_late
from published_memory import is_titan
from published_models import recipe_of
from published_vision import vision_of

from samestep.hardware import Hardware
from samestep.models.layer_parts import Product
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec

_REPEATED = r"^(true|yes|on|1|all)$|^(?!.*selective).*checkpointing"
_KEPT = r"\b(none|no|off|false|disabled|without|0)\b"
_PARTLY = r"selective|partial|minimal|custom|save|attn|attention|qkv|mlp|moe|norm|act|proj|layer|block|uniform|offload|\bsac\b|\d"
"""Some of what a block keeps, which is little, is computed again."""
BILLION = 1e9
"""Weights from which on everybody recomputed blocks, before there was FlashAttention."""
COUNTS_FOUR = 3.5
"""Forwards from which on a source counts four in a step, not three."""
_ENDS_EARLY = re.compile("mosaic|maxtext|google|automodel|llmq", re.IGNORECASE)
"""Sources of libraries that repeat a block's forward no further than its backward asks for: by torch's checkpoint without
reentrance (torch's `checkpoint_wrapper`, in AutoModel), as torchtitan does too, by a compiler that leaves out what nobody reads, or by
hand (`_recompute_block` of LLMQ)."""


def as_it_recomputes(row: Row, model: ModelSpec) -> ModelSpec:
    """Let blocks keep and repeat what those of a row's library do."""
    if is_titan(row):
        return replace(model, layers=tuple(map(_without_every_second, model.layers)))
    if _ENDS_EARLY.search(joined(row, "source")):
        return model
    return replace(model, layers=tuple(map(_repeated_to_its_end, model.layers)))


def _repeated_to_its_end(layer: LayerSpec) -> LayerSpec:
    """Repeat all of a block, its last sum over `tp` too, as the checkpoints of Megatron-LM and DeepSpeed do: torch's checkpoint with
    reentrance calls the whole forward again (`CheckpointFunction.backward`)."""
    products = tuple(replace(product, is_repeated=True) for product in layer.products)
    return replace(layer, products=products, repeats_last_sum=True) if layer.is_block else layer


def _without_every_second(layer: LayerSpec) -> LayerSpec:
    """Keep under selective recompute what torchtitan keeps: every second product (its policy counts calls of mm)."""
    dropped = repeated(layer)
    whole, cut = (
        sum(p.rows * p.columns for p in dropped if p.cut in cuts) for cuts in (("", "inner", "columns"), ("columns",))
    )
    return replace(
        layer,
        saved_selective_elements=max(layer.saved_selective_elements - whole, layer.input_elements),
        saved_selective_cut_elements=max(layer.saved_selective_cut_elements - cut, 0),
    )


def repeated(layer: LayerSpec) -> tuple[Product, ...]:
    """Return the products of a block of which torchtitan's selective recompute keeps nothing."""
    return tuple(product for product in layer.products if product.factors == "weight")[1::2] if layer.is_block else ()


def recompute_of(row: Row, machine: Hardware, model: ModelSpec) -> str:
    """What is said; nothing for the least that fits."""
    text = (row.get("recompute") or "").strip().lower()
    if not text and vision_of(row):
        return "none"
    if "not set" in text or (says_nothing(text) and not re.search(_KEPT, text)):
        text = ""
    if not text and _counts_four_forwards(row, model):
        return "full"
    if not text and (recipe := recipe_of(row)):
        return recipe.recompute
    if not text and "cpu_offloading_num_layers" in joined(row, "notes"):
        return "none"  # the host keeps what would be computed again
    if not text and "FSDP2" in (row.get("schedule") or ""):
        return "selective"  # torchtitan's own default
    if (
        not text
        and "maxtext" in joined(row, "source", "notes", "url_or_repo_path").lower()
        and whole(row, "micro_batch")
    ):
        return ""  # XLA's compiler keeps what fits
    if not text and is_by_engine(row) and "FSDP" not in joined(row, "notes"):
        return "none" if is_late(machine) or model.num_params < BILLION else "full"
    if "full" in text or (re.search(_REPEATED, text) and not re.search(_KEPT, text)):
        return "full"
    if "selective" in text and "[" not in text and ":" not in text:
        return "selective"
    if text and not re.search(f"{_KEPT}|{_PARTLY}", text):
        raise SkippedError(f"recompute={text} is neither none nor selective nor full")
    return "none" if text else ""


def _counts_four_forwards(row: Row, model: ModelSpec) -> bool:
    """Whether the FLOP/s that a row prints are four forwards of its tokens, so that its backward repeats the forward: ColossalAI's are
    three, and one more with checkpoints. A formula that always counts it says nothing."""
    if re.search(r"includes recompute", joined(row, "notes")):
        return False
    rate, flops_per_s = number(row, "metric_tokens_per_s_per_gpu"), number(row, "metric_tflops_per_gpu")
    a_token = sum(product.flops for layer in model.layers for product in layer.products) / (model.sequence or 1)
    return bool(rate and flops_per_s) and 1e12 * flops_per_s / (rate * a_token) > COUNTS_FOUR
