"""What a published row says was measured, of time and of memory, and what the loss of its library keeps.

allocated   bytes that tensors had at most: Megatron-LM's golden values, and all others that do not say
reserved    bytes that the allocator took from the device: torchtitan's log prints them (`max_reserved`, components/metrics.py)
"""

from __future__ import annotations

import re
from dataclasses import replace

from cells import Row, SkippedError, joined, number
from published_loops import bits_of_states, holds_sixteen_bits
from published_models import Recipe, is_compiled

from samestep.hardware import Hardware
from samestep.models.decoder import Decoder
from samestep.models.layer_parts import WorkingSet
from samestep.models.param_spec import ParamSpec
from samestep.models.spec import ModelSpec

TARGETS = ("metric_step_time_s", "metric_tokens_per_s_per_gpu", "metric_tflops_per_gpu", "metric_mfu")
QUANTIZED = 0.516
"""Bytes of a weight in NF4: half a byte, and a scale of 64 weights that is quantized too (arXiv:2305.14314, section 3)."""

_EAGER_LOSS = "torchtitan benchmarks 2024"
"""Sources that compiled blocks and left the loss as it was, of which compiling made errors then (train.py of December 2024)."""
_FUSED_LOSS = "llm-foundry"
"""Sources whose loss is one kernel over logits in 16 bits: FlashAttention's cross entropy (`loss_fn` of ComposerMPTCausalLM, by default
`fused_crossentropy`)."""


def is_timed(row: Row) -> bool:
    """Whether a row says how long a step took, in any unit."""
    return any(number(row, column) for column in TARGETS)


def is_titan(row: Row) -> bool:
    """Whether the row is of torchtitan."""
    return re.search(r"titan|torchao", joined(row, "source"), re.IGNORECASE) is not None


def is_reserved(row: Row) -> bool:
    """Whether the memory of a row is what the allocator took from the device."""
    return is_titan(row) or re.search(r"\breserved\b", joined(row, "notes"), re.IGNORECASE) is not None


def is_out_of_memory(row: Row) -> bool:
    """Whether the run ran out of memory."""
    return bool(re.search(r"\bOOM\b|OUT OF MEMORY", joined(row, "notes")))


def memory_bytes(row: Row, *, is_said: bool) -> float | None:
    """Return the bytes of memory of a row that says what its micro-batch is.

    Raises:
        SkippedError: it does not, and nothing else was measured.
    """
    size = number(row, "metric_memory_gib")
    if not is_said and not is_timed(row) and not is_out_of_memory(row):
        raise SkippedError("its memory alone was measured, and its micro-batch is not printed")
    if not size or not is_said or _is_of_driver(row):
        return None
    return size * (1e9 if re.search(r"in GB|\d\s?GB\b|\(GB\)", joined(row, "notes")) else 2**30)


def states_per_param(row: Row, *, has_decoder: bool) -> int:
    """Return the number of states of a weight, in elements as they are held: two states in 16 bits are one in 32, two in 4 are one in 8."""
    if bits := bits_of_states(row):
        return bits // 4
    return 1 if not has_decoder or holds_sixteen_bits(row) else 2


def _is_of_driver(row: Row) -> bool:
    """Whether the memory is what a driver says is taken, with what the allocator keeps for later, context and libraries."""
    notes = joined(row, "notes")
    return bool(re.search(r"nvidia-smi|rocm-smi", notes)) and "allocated by torch" not in notes


def with_its_loss(row: Row, model: ModelSpec, recipe: Recipe | None, *, is_packed: bool) -> ModelSpec:
    """Make of a model what its library's loss and adapters do; `is_packed` where frozen weights are in 4 bits."""
    model = _packed(model) if is_packed else model
    if recipe:
        return _in_chunks(model, recipe.loss_chunks)
    if re.search(_FUSED_LOSS, row.get("source") or ""):
        return _in_one_kernel(model)
    return _in_whole(model) if re.search(_EAGER_LOSS, row.get("source") or "") else model


def with_its_logits(row: Row, model: ModelSpec) -> ModelSpec:
    """Make of a model's loss what its row says of it: a product that is one kernel with its loss has no logits, a compiled loss reads them
    in one kernel; logits become float32 where all else is held in 16 bits too."""
    if re.search("fused linear cross entropy", joined(row, "notes")):
        *others, head = _in_one_kernel(model).layers
        few = head.output_elements // 32
        head = replace(head, loss_elements=few, loss_working_elements=few, working=WorkingSet(few, few))
        model = replace(model, layers=(*others, head))
    elif is_compiled(row) and not is_titan(row):
        model = _in_one_kernel(model)
    if "--cross-entropy-loss-fusion=true" in joined(
        row, "notes"
    ):  # compiled, it cannot write its exponents over the logits
        *others, head = model.layers
        more = head.loss_working_elements + head.output_elements
        model = replace(model, layers=(*others, replace(head, loss_working_elements=more)))
    if holds_sixteen_bits(row):
        *others, head = model.layers
        head = replace(head, loss_elements=3 * head.loss_elements, loss_working_elements=2 * head.loss_working_elements)
        model = replace(model, layers=(*others, head))
    return model


def _in_chunks(model: ModelSpec, chunks: int) -> ModelSpec:
    """Let the loss make float32 of one chunk of the logits at a time.

    It keeps all logits, and gives up each chunk of them for its gradient, of which one more chunk is held. The memory model counts a
    loss's input beside what the loss keeps, so each of the two is given half of that.
    """
    *others, head = _in_one_kernel(model).layers
    logits = head.output_elements
    held = (logits + logits // chunks) // 2
    head = replace(
        head,
        loss_elements=held,
        loss_working_elements=held,
        working=head.working.plus(-head.working.cut_elements, -head.working.cut_elements),
    )
    return replace(model, layers=(*others, head))


def _in_one_kernel(model: ModelSpec) -> ModelSpec:
    """Let one kernel read all logits twice and write their gradients: of the nine times that a loss goes over them otherwise, one and a
    half are left."""
    *others, head = model.layers
    spared = 15 * head.output_elements // 2
    head = replace(head, moved=head.moved.plus(-spared, -spared))
    return replace(model, layers=(*others, head))


def _in_whole(model: ModelSpec) -> ModelSpec:
    """Let the loss hold three copies of all logits in float32, as one that is not compiled does."""
    *others, head = model.layers
    head = replace(head, loss_elements=head.output_elements, loss_working_elements=2 * head.output_elements)
    return replace(model, layers=(*others, head))


def _packed(model: ModelSpec) -> ModelSpec:
    """Keep frozen weights of products in 4 bits: two bytes hold the fewer elements that are left of a weight."""

    def packed(param: ParamSpec) -> ParamSpec:
        is_product = not param.trainable and len(param.shape) > 1 and model.layers[param.layer].is_block
        return replace(param, shape=(round(param.shape[0] * QUANTIZED / 2), *param.shape[1:])) if is_product else param

    return replace(model, params=tuple(map(packed, model.params)))


def step_s(
    row: Row, machine: Hardware, model: ModelSpec, decoder: Decoder | None, tokens: int, devices: int, samples: int, has_batch: bool
) -> float | None:  # fmt: skip
    """Turn what was measured into seconds a step; FLOPs a second by the definition the row names (see below).

    Where the row does not say how many samples a step takes, a rate says more than the seconds. Most count three forwards with attention
    unmasked; `recompute` in the notes beside `include`, `count` or a factor of 8 makes it four.
    """
    rate = number(row, "metric_tokens_per_s_per_gpu")
    if number(row, "metric_step_time_s") and (has_batch or not rate):
        return number(row, "metric_step_time_s")
    if rate and rate * 2 * sum(layer.forward_flops for layer in model.layers) / (
        decoder.sequence if decoder else 1
    ) > max(machine.flops_per_s.values()):
        rate /= devices  # more than the device can: the rate of all of them
    if rate:
        return tokens / (rate * devices)
    flops_per_s = (number(row, "metric_tflops_per_gpu") or 0) * 1e12
    if not flops_per_s:
        share = number(row, "metric_mfu")
        peak = machine.flops_per_s.get("bfloat16") or machine.flops_per_s["float16"]
        flops_per_s = peak * (share / 100 if share and share > 1 else share or 0)
    if not flops_per_s:
        return None
    notes = joined(row, "notes").lower()
    again = "full" in (row.get("recompute") or "") and re.search(
        r"counts? the recompute|incl\. recomput|counts recompute|recompute\)|8n|96", notes
    )
    flops = sum(product.flops for layer in model.layers for product in layer.products)
    return flops * samples * (4 if again else 3) / (flops_per_s * devices)
