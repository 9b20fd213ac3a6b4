"""A layout that `--to fsdp` writes, run as a file on real ranks: gradients equal those of one device."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from samestep import job_files as jobs
from samestep.hardware import resolve_hardware
from samestep.layout import Layout
from samestep.models import catalog
from samestep.wings.plan import recipes
from tests.models import LLAMA, VOCABULARY
from tests.pool import pool

_BATCH = 8


def _samples() -> Tensor:
    return torch.randint(0, VOCABULARY, (_BATCH, 16), generator=torch.Generator().manual_seed(0))


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), ids.flatten())


def _model() -> nn.Module:
    torch.manual_seed(0)
    return LLAMA().double()


def _gradients_of(rank: int, world: int, text: str, microbatches: int, data_ranks: int) -> dict[str, Tensor]:
    """Run the file on this rank, and return the whole gradients by the names of one device."""
    recipe: Any = types.ModuleType("recipe")
    exec(compile(text.replace("torch.float32", "torch.float64"), "recipe.py", "exec"), recipe.__dict__)
    model = recipe.parallelize(_model(), recipe.mesh("cpu"))
    mine = _samples().chunk(data_ranks)[rank % data_ranks].chunk(microbatches)
    recipe.accumulate(model, mine, lambda model, ids: (_loss(model, ids) / microbatches).backward())
    found = {}
    for name, param in model.named_parameters():
        assert param.grad is not None
        whole = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
        found[name.removeprefix("module.")] = whole
    return found


@pytest.mark.parametrize(
    "words",
    [
        "dp=2",
        "dp=2 microbatch=2",
        "dp=2 zero=3",
        "dp=2 zero=2 microbatch=1 recompute=full",
        "dp=2 zero=3 microbatch=2 accumulate=full",
        "tp=2 recompute=full",
    ],
)
def test_the_file_computes_the_gradients_of_one_device(words: str) -> None:
    layout = Layout(words)
    job = jobs.default(["train.global_batch=8", "numerics.precision=float32"])
    recipe = recipes.emit("fsdp", job, layout, catalog.model_spec(job), resolve_hardware("h100x8"))
    blocks = _model().get_submodule("model.layers")
    text = recipe.text.replace("range(4)", f"range({len(blocks)})")
    microbatches = _BATCH // layout.dp // (layout.microbatch or _BATCH // layout.dp)
    for found in pool(2).run(_gradients_of, text, microbatches, layout.dp):
        one = _model()
        _loss(one, _samples()).backward()
        assert set(found) == {name for name, _ in one.named_parameters()}
        for name, param in one.named_parameters():
            assert param.grad is not None
            torch.testing.assert_close(
                found[name], param.grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
