"""What reaches torch's kernels of attention in a step: no mask of all pairs where causality says it, and no dropout of theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.datasets import batches
from tests.laboratory import clipped, make_run
from tests.models import Tokens

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BY_PARTS = torch.ops.aten._scaled_dot_product_attention_math.default


class Kernels(TorchDispatchMode):
    """The calls of torch's kernels of attention: whether each has a mask, its dropout, and whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[bool, float, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _FUSED:
            named = dict(zip(("query", "key", "value", "dropout_p", "is_causal"), args, strict=False)) | kwargs
            self.seen.append(
                (named.get("attn_mask") is not None, named.get("dropout_p", 0.0), named.get("is_causal", False))
            )
        assert func is not _BY_PARTS, "a fused kernel computes it"
        return func(*args, **kwargs)


@pytest.mark.parametrize("model", ["llama", "deep_gemma", "attentive", "dropping_llama", "dropping_attentive"])
def test_no_dense_mask_and_no_dropout_reach_a_fused_kernel(model: str) -> None:
    job = clipped()
    run = make_run(0, 1, model, "dp=1", job)
    with Kernels() as kernels:
        _ = run.step(next(batches(Tokens(), job))).loss
    if model.startswith("dropping"):
        assert not kernels.seen  # by the formula, with masks of our own
    else:
        assert kernels.seen
        assert {*kernels.seen} == {(False, 0.0, True)}
