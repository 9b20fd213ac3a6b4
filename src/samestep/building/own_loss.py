"""Models of transformers that shift the labels in their loss: those that predict the next token.

Data for such a model has each token as the label at that token's position (`datasets/labels.py`). Masked models,
classifiers and encoder-decoders pair the output at a position with the label there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from samestep.building.families import facts_of
from samestep.building.model_loss import ModelLoss, target_in

_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")
_UNMOVED = ("XLMWithLMHeadModel", "XLNetLMHeadModel")
"""Classes of language models whose loss takes the labels unshifted."""


def moves_labels(module: nn.Module) -> bool:
    """Return whether a model is one of transformers that predicts the next token, or holds one, as an adapter's wrapper does."""
    return any(_is_causal(model) for model in _outermost(module))


def settle_own_loss(module: nn.Module, loss: object, example: Any) -> None:
    """Let a model that returns its loss settle by the labels of a batch like `example` which loss that is."""
    if isinstance(loss, ModelLoss):
        settle_problem_type(module, target_in(example))


def settle_problem_type(module: nn.Module, labels: Any) -> None:
    """Let classifiers of transformers know what their loss is before the first forward, which would write it into their configuration.

    It follows from the number of labels and from their dtype, as in those models' own code.
    """
    for model in _outermost(module):
        config, number = model.config, getattr(model, facts_of(model).classes_field, None)
        if number is None or getattr(config, "problem_type", "") is not None or not isinstance(labels, Tensor):
            continue
        several = "multi_label_classification" if labels.is_floating_point() else "single_label_classification"
        config.problem_type = "regression" if number == 1 else several


def _outermost(module: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers in a module that are no part of another one."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    if isinstance(module, modeling.PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)


def _is_causal(model: Any) -> bool:
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    from transformers.models.auto import modeling_auto  # noqa: PLC0415 - the model is one of transformers

    names = {kind.__name__ for kind in type(model).__mro__}
    if not names.isdisjoint(_UNMOVED):
        return False
    known: set[str] = set()
    for classes in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for one in classes.values():
            known.update((one,) if isinstance(one, str) else one)
    return not names.isdisjoint(known) or getattr(model, "loss_type", None) in _CAUSAL
