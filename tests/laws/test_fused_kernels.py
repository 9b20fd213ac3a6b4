"""Laws of code that a compiler fuses: never slower than without, what a group reads and writes, and what inductor counts itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import assume, given
from hypothesis import strategies as st
from torch._inductor import config
from torch._inductor.exc import InductorError
from torch._inductor.scheduler import Scheduler

from samestep.enumeration import candidates
from samestep.job import Job
from samestep.layout import Layout
from samestep.program.step import StepSpec
from samestep.strategies import refusal_of
from samestep.tracing.costs import MovedElements
from samestep.tracing.operations import Work, WorkKind
from samestep.tracing.trace import model_spec
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import LAW, MACHINES, MODELS, job_of

_MACHINES = {
    **MACHINES,
    "launched": replace(MACHINES["a100"], kernel_launch_s=29e-6),  # the host binds most layers
    "both": replace(MACHINES["a100"], kernel_launch_s=1e-6),
}
_LANGUAGE = [name for name, model in sorted(MODELS.items()) if model.length]


@LAW
@given(st.sampled_from(_LANGUAGE), st.sampled_from(sorted(_MACHINES)), st.sampled_from([1, 2, 4, 8]), st.data())
def test_fused_kernels_are_never_slower(what: str, where: str, devices: int, data: st.DataObject) -> None:
    """Than the same program unfused, in every layout; and where nothing is repeated, than code that is not compiled."""
    model, machine = MODELS[what], _MACHINES[where]
    layout = data.draw(st.sampled_from(list(candidates.layouts_of(devices, model, job_of(8), thin=machine))))
    compiled = job_of(8, compile="blocks")
    assume(refusal_of(StepSpec.of(model, compiled, layout, machine.devices_per_node)) is None)
    unfused = job_of(8, compile="blocks", compile_backend="aot_eager")
    fused_s, apart_s, plain_s = (predict(model, job, layout, machine).step_s for job in (compiled, unfused, job_of(8)))
    assert fused_s <= apart_s * (1 + 1e-9)
    if layout.recompute == "none":
        assert apart_s == plain_s


@pytest.mark.parametrize("words", ["dp=2 zero=3", "dp=1 tp=2", "dp=1 cp=2"])
def test_what_is_fused_spares_time_where_memory_binds_and_where_the_host_does(words: str) -> None:
    layout = Layout(words)
    for machine in (_MACHINES["slow"], _MACHINES["launched"]):
        fused, plain = (
            predict(MODELS["unfused"], job_of(8, compile=word), layout, machine) for word in ("blocks", "none")
        )
        assert fused.step_s < plain.step_s
        assert [use.total for use in fused.memory] == [use.total for use in plain.memory]


def test_experts_are_left_out() -> None:
    job, layout = job_of(8, compile="blocks"), Layout("dp=1")
    fused_s, plain_s = (
        predict(MODELS["experts"], one, layout, _MACHINES["launched"]).step_s for one in (job, job_of(8))
    )
    assert fused_s == plain_s


# -- groups ------------------------------------------------------------------------------------------------------------

_Call = tuple[WorkKind, str, str]
"""What an operation is, the letters of what it reads, and of what it writes: each has one element, and a capital one ten."""


def _work(*calls: _Call, returned: str = "") -> tuple[int, int, int, int]:
    """Return the elements that calls move and those that groups spare, the operations, and those that groups spare."""
    sizes = {ord(letter): 10 if letter.isupper() else 1 for _, *both in calls for letter in "".join(both)}
    forward = MovedElements()
    for kind, given_, written in calls:
        reads, writes = (tuple((ord(letter), sizes[ord(letter)]) for letter in some) for some in (given_, written))
        forward.ran(Work("a", reads, writes, kind, None, None, is_cut=False, is_view=False))
    moved, fusible = forward.of({"a"}, sizes, {ord(letter) for letter in returned})
    return moved.elements, fusible.elements, moved.kernels, fusible.kernels


@pytest.mark.parametrize(
    ("calls", "returned", "expected"),
    [
        # A chain keeps what is between in registers: x and the result remain of six.
        ([("fusible", "x", "a"), ("fusible", "a", "b"), ("fusible", "b", "c")], "c", (6, 4, 3, 2)),
        # What others read is written all the same.
        ([("fusible", "x", "a"), ("product", "a", "p"), ("fusible", "a", "b")], "pb", (4, 1, 3, 1)),
        # An activation waits for the other product, which is no part of the way to it.
        (
            [("product", "x", "g"), ("fusible", "g", "s"), ("product", "x", "u"), ("fusible", "su", "m")],
            "m",
            (5, 2, 4, 1),
        ),
        # A sum behind a product does not join what the product is given.
        ([("fusible", "x", "a"), ("product", "a", "p"), ("fusible", "pa", "s")], "s", (5, 0, 3, 0)),
        # What reads the same and makes nothing for each other stays apart.
        ([("fusible", "x", "a"), ("fusible", "x", "b")], "ab", (4, 0, 2, 0)),
        # What stands alone ends a group, and joins none.
        ([("fusible", "x", "a"), ("other", "a", "b"), ("fusible", "b", "c")], "c", (6, 0, 3, 0)),
        # A row's small statistics, and the wide result beside its input.
        ([("fusible", "X", "a"), ("fusible", "Xa", "B")], "B", (32, 12, 2, 1)),
        # What is written in place is there afterwards.
        ([("fusible", "x", "a"), ("fusible", "ax", "x")], "", (5, 3, 2, 1)),
    ],
)
def test_a_group_reads_what_it_is_given_and_writes_what_others_read(
    calls: list[_Call], returned: str, expected: tuple[int, int, int, int]
) -> None:
    assert _work(*calls, returned=returned) == expected


@given(
    st.lists(
        st.tuples(st.sampled_from(["product", "fusible", "other"]), *[st.text("abcD", min_size=1, max_size=3)] * 2)
    )
)
def test_groups_spare_no_more_than_is_moved(calls: list[_Call]) -> None:
    moved, fusible, kernels, fusible_kernels = _work(*calls, returned="D")
    assert 0 <= fusible <= moved
    assert 0 <= fusible_kernels <= kernels


# -- what inductor counts ----------------------------------------------------------------------------------------------

_TOKENS, _SIZES = 64, {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 128}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_SIZES, "intermediate_size": 192, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128} | dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0),
    "phi": {**_SIZES, "intermediate_size": 256, "embd_pdrop": 0, "resid_pdrop": 0},
}  # fmt: skip


class _ScheduledError(Exception):
    """A graph has been divided into kernels, and need not be made."""


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Collect the elements in float32 that the kernels of each graph read and write that inductor writes itself."""
    elements: list[int] = []

    def count(_: Scheduler, nodes: list[Any]) -> None:
        elements.append(sum(one.get_read_write_buffers_sizes() for one in nodes if not one.is_extern()) // 4)
        raise _ScheduledError

    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own code warns when inductor imports it
        patch.setattr(Scheduler, "_codegen", count)
        yield elements


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_fused_elements_are_within_a_fifth_of_those_that_inductor_counts(family: str) -> None:
    """Of a block's forward; operations one by one move twice to five times as many. Parts of it spare no more than they move."""
    sample = {"input_ids": torch.arange(_TOKENS)[None], "labels": torch.zeros(1, _TOKENS, dtype=torch.long)}
    layer = model_spec(Job(model={"source": f"hf:{family}", "config": _FAMILIES[family]}), sample).layers[2]
    settings = transformers.AutoConfig.for_model(family, **_FAMILIES[family])
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="sdpa")
    block = next(one for one in model.modules() if isinstance(one, torch.nn.ModuleList))[1]
    given_: dict[str, Any] = {}
    hook = block.register_forward_pre_hook(
        lambda _, args, named: given_.update(args=args, named=named), with_kwargs=True
    )
    with torch.no_grad():
        model(torch.arange(_TOKENS)[None], use_cache=False)
        hook.remove()
        torch._dynamo.reset()
        with _counted() as elements, pytest.raises(InductorError, match="_ScheduledError"):
            torch.compile(block)(*given_["args"], **given_["named"])
    assert len(elements) == 1
    assert layer.moved.elements - layer.fusible.elements == pytest.approx(elements[0], rel=0.2)
    assert layer.moved.elements > 1.5 * elements[0]
    for part in (layer, layer.cut_by(2), layer.sliced_by(4), layer.cut_by(4).sliced_by(2)):
        assert 0 < part.fusible.elements <= part.moved.elements
        assert 0 < part.fusible.kernels <= part.moved.kernels - len(part.products)
        assert part.fusible.elements - part.fusible.cut_elements <= part.moved.elements - part.moved.cut_elements
