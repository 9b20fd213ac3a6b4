"""Bytes that a layer keeps from its forward to its backward, and works on in them, for one micro-batch; the loss's too."""

from __future__ import annotations

from typing import NamedTuple

from samestep.models.layer_spec import LayerSpec
from samestep.program.ops import BYTES_OF
from samestep.program.repeated_products import KEEPS_PRODUCTS, dropped_elements
from samestep.program.step import StepSpec


class Saved(NamedTuple):
    """Bytes that a layer keeps and works on for a micro-batch."""

    kept: int = 0
    """Activations after its forward."""
    whole: int = 0
    """Activations that its backward reads."""
    working: int = 0
    """Peak working memory of its backward, without weight gradients."""
    in_norms: int = 0
    """The same in the backward of its norms; less than 0 where more of what was kept has been freed by then."""
    boundaries: int = 0
    """The gradients of its input and its output."""
    loss_made: int = 0
    """Working memory of the forward of the loss after it."""
    loss: int = 0
    """Activations that the loss after it saves for its backward, in master precision."""
    loss_working: int = 0
    """Working memory of the backward of the loss."""
    loss_fixed: int = 0
    """The part of that which a larger micro-batch does not need more of."""
    working_fixed: int = 0
    """The part of `working` which a larger micro-batch does not need more of: that of a chunk of tokens."""


def saved_bytes(step: StepSpec, layer: LayerSpec, is_on_host: bool = False) -> Saved:
    """Return the bytes that a layer saves and works on for a micro-batch; the last layer's include the loss.

    `is_on_host` is whether its input is in the host's memory between forward and backward.
    """
    one = step.microbatch_samples * BYTES_OF[step.compute_dtype]
    whole = layer.saved_elements + layer.saved_norm_elements * step.is_mixed
    recompute = step.layout.recompute if layer.is_block and layer.has_backward else "none"
    given = layer.input_elements - (layer.moved_input_elements if is_on_host else 0)
    kept = whole if recompute == "none" else given
    if recompute in KEEPS_PRODUCTS:
        kept = max(given, layer.saved_selective_elements - dropped_elements(step, layer))
    if recompute != "none" and step.is_mixed:
        whole += layer.input_norm_elements
    working = layer.working_elements * one
    most = max((working, *_in_chunks(step, layer, one)))
    return Saved(
        kept=kept * one,
        whole=max(kept, whole) * one,
        working=most,
        working_fixed=most - working,
        in_norms=(layer.norm_working_elements + layer.norm_working_wide_elements * step.is_mixed) * one,
        boundaries=min(layer.working_elements, layer.input_elements + layer.output_elements) * one,
        **_with_pairs(step, layer, _of_loss(step, layer)),
    )


def _in_chunks(step: StepSpec, layer: LayerSpec, one: int) -> list[int]:
    """Return the working memory of each part of a layer that is computed in chunks of tokens: the gradients of its input and output,
    what a chunk makes, and the gradients of its weights, which are added up over the chunks in master precision."""
    if not layer.chunk_tokens:
        return []
    size = BYTES_OF[step.compute_dtype]
    return [
        part.boundary_elements * one
        + min(layer.chunk_tokens, part.tokens * step.microbatch_samples) * part.elements_of_token * size
        + part.weights * BYTES_OF[step.master_dtype]
        for part in layer.token_parts
    ]


def _with_pairs(step: StepSpec, layer: LayerSpec, sizes: dict[str, int]) -> dict[str, int]:
    """Add what a loss over all samples keeps for pairs of samples: of all, or of those of a micro-batch with all."""
    if not (layer.loss_elements and step.model.loss_pairs):
        return sizes
    by_rows = any(one.is_by_rows for one in step.model.loss_reads or ())
    rows = step.microbatch_samples if by_rows else step.global_batch
    pairs = step.model.loss_pairs * rows * step.global_batch * BYTES_OF[step.master_dtype]
    return {**sizes, "loss_made": sizes["loss_made"] + pairs}


def _of_loss(step: StepSpec, layer: LayerSpec) -> dict[str, int]:
    """Return the bytes that the loss after a layer saves and works on."""
    samples, compute, master = step.microbatch_samples, BYTES_OF[step.compute_dtype], BYTES_OF[step.master_dtype]
    head, chunk = layer.head, step.layout.loss_chunk
    if head is None or chunk is None:
        return {
            # Behind the forward the output is there too, and its copy in master precision.
            "loss_made": layer.loss_elements * samples * (compute + master * step.is_mixed),
            "loss": layer.loss_elements * samples * master,
            "loss_working": layer.loss_working_elements * samples * master,
        }
    tokens = head.rows * samples
    logits = min(chunk, tokens) * head.columns * (master + compute * step.is_mixed)
    weight = 0 if head.is_frozen else head.columns * head.inner
    # Several chunks' gradients of a weight in half precision are added up in master precision.
    adds_up = tokens > chunk and step.is_mixed
    fixed = logits + weight * (compute + master * adds_up)
    return {
        "loss_made": logits,
        "loss": tokens * master,
        "loss_working": fixed + tokens * head.inner * compute,
        "loss_fixed": fixed,
    }
