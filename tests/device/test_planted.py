"""Mistakes that no CPU run shows are refused, or found, on the simulated device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from samestep.datasets import batches
from samestep.job import Job
from samestep.runtime import device_decides, microbatches
from samestep.runtime.axes.host_inputs import HostLanes
from samestep.runtime.axes.pipeline.stage_messages import Messages
from samestep.runtime.axes.rank_crossings import GroupLine
from samestep.runtime.host_copies import batch_to_device
from samestep.runtime.interpreter import Interpreter
from samestep.runtime.ledger import OwnedCollectives
from samestep.runtime.optimizers.optimizer_step import Updater
from samestep.runtime.stepper import Stepper
from samestep.runtime.weights.flat_buffers import FlatBuffer
from samestep.runtime.weights.replicated import LateWeights
from tests.device.simulated_cuda import refusal
from tests.laboratory import clipped, job_of, make_run, observe, on_ranks
from tests.models import Tokens
from tests.pool import close_busy, pool

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())


def batch_stays_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(microbatches, "batch_to_device", lambda batch, device: batch)


def batch_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)


def sums_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlatBuffer, "wait", lambda self: None)


def weights_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    hold = LateWeights.hold
    patch.setattr(LateWeights, "hold", lambda self, bucket, wait: hold(self, bucket, lambda: None))


def messages_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    post = Messages._post

    def posted(self: Messages, *args: Any) -> Any:
        return [(SimpleNamespace(wait=lambda: None), into) for _, into in post(self, *args)]

    patch.setattr(Messages, "_post", posted)


def gradients_of_a_cut_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    all_reduce = GroupLine.all_reduce

    def unawaited(line: GroupLine, x: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(OwnedCollectives, "sent", lambda issue, work: SimpleNamespace(wait=lambda: None))
            return all_reduce(line, x)

    patch.setattr(GroupLine, "all_reduce", unawaited)


def update_runs_aside(patch: pytest.MonkeyPatch) -> None:
    update = Updater.update

    def aside(self: Updater, *args: Any, **named: Any) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) as stream:
            stream.wait_stream(torch.cuda.default_stream())
            update(self, *args, **named)

    patch.setattr(Updater, "update", aside)


def sent_beside_the_scalars(patch: pytest.MonkeyPatch, sent: Tensor) -> None:
    agree = Stepper._agree

    def sending(self: Stepper, *args: Any) -> Tensor:
        dist.all_reduce(sent.to(self.place.device))
        return agree(self, *args)

    patch.setattr(Stepper, "_agree", sending)


def a_dtype_without_sums_is_sent(patch: pytest.MonkeyPatch) -> None:
    sent_beside_the_scalars(patch, torch.zeros(3, dtype=torch.int16))


def columns_are_sent(patch: pytest.MonkeyPatch) -> None:
    sent_beside_the_scalars(patch, torch.zeros(3, 2).T)


def scalars_are_sent_from_the_host(patch: pytest.MonkeyPatch) -> None:
    agree = Stepper._agree

    def from_host(self: Stepper, own: Sequence[Tensor], *rest: bool) -> Tensor:
        dist.all_reduce(own[0].cpu())
        return agree(self, own, *rest)

    patch.setattr(Stepper, "_agree", from_host)


def generator_of_the_host_draws(patch: pytest.MonkeyPatch) -> None:
    forward_backward = Stepper.forward_backward

    def drawing(self: Stepper, *args: Any) -> Tensor:
        torch.empty(3, device=self.place.device).normal_(generator=torch.Generator())
        return forward_backward(self, *args)

    patch.setattr(Stepper, "forward_backward", drawing)


def gathered_weight_is_kept(patch: pytest.MonkeyPatch) -> None:
    forward = Interpreter._forward
    kept: list[Tensor] = []

    def keeping(self: Interpreter, *args: Any) -> Any:
        module = self.assembly.model.module.get_submodule("model.layers.0.self_attn.q_proj")
        handle = module.register_forward_pre_hook(lambda m, a: kept.append(m.weight))
        loss = forward(self, *args)
        handle.remove()
        return loss + 0 * kept[-1].detach().sum()

    patch.setattr(Interpreter, "_forward", keeping)


def gradients_are_sent_behind_the_sums(patch: pytest.MonkeyPatch) -> None:
    """The host then waits for the sums alone; a report's numbers would be there, and gradients not."""
    send, step = device_decides.send_unless, Updater.step

    def later(self: Updater, factor: float, **given: Any) -> None:
        if self.late is not None:
            send(self, *self.late)
        step(self, factor, **given)

    patch.setattr(Updater, "late", None, raising=False)
    patch.setattr(device_decides, "send_unless", lambda updater, *given: setattr(Updater, "late", given))
    patch.setattr(Updater, "step", later)


def with_mistake(
    rank: int, world: int, model: str, layout: str, job: Job, mistake: Callable[[pytest.MonkeyPatch], None]
) -> str:
    with pytest.MonkeyPatch.context() as patch:
        mistake(patch)
        try:
            seen = observe(rank, world, model, layout, job)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "not finite" if any(not bool(one.isfinite().all()) for *_, one in seen.weights) else "nothing"


@pytest.mark.parametrize(
    ("mistake", "layout", "found"),
    [
        (batch_stays_on_the_host, "dp=1", "at least two devices"),
        (batch_is_not_waited_for, "dp=1", "used on a stream that has not waited for it"),
        (sums_are_not_waited_for, "dp=2", "used on a stream that has not waited for it"),
        (messages_are_not_waited_for, "pp=2 microbatch=2", "used on a stream that has not waited for it"),
        (gradients_of_a_cut_are_not_waited_for, "tp=2", "used on a stream that has not waited for it"),
        (update_runs_aside, "dp=1", "used on a stream that has not waited for it"),
        (a_dtype_without_sums_is_sent, "dp=2", "Unsupported data type for NCCL"),
        (columns_are_sent, "dp=2", "Tensors must be contiguous"),
        (scalars_are_sent_from_the_host, "dp=2", "No backend type associated with device type cpu"),
        (generator_of_the_host_draws, "dp=1", "Expected a 'cuda' device type for generator"),
        (gathered_weight_is_kept, "dp=2 zero=3", "used after its storage was freed"),
        (gradients_are_sent_behind_the_sums, "dp=1 offload", "not finite"),
    ],
)
def test_a_mistake_is_found(mistake: Callable[[pytest.MonkeyPatch], None], layout: str, found: str) -> None:
    for seen in on_ranks(layout, with_mistake, "llama", clipped(), mistake, device="cuda"):
        assert found in seen
    close_busy()  # what one rank has sent, nobody may have received


def ahead(rank: int, world: int, model: str, layout: str, job: Job, waits: bool) -> str:
    """Take steps as `samestep train` does, whose weights arrive while the next forward runs."""
    run = make_run(rank, world, model, layout, job)
    run._stepper._owns_weights = True
    with pytest.MonkeyPatch.context() as patch:
        if not waits:
            weights_are_not_waited_for(patch)
        try:
            return f"a loss of {[run.step(batch) for batch in batches(Tokens(), job)][-1].loss}"
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize(
    ("waits", "found"), [(True, "a loss of "), (False, "used on a stream that has not waited for it")]
)
def test_weights_under_way_are_waited_for(waits: bool, found: str) -> None:
    job = job_of("bf16", 3, optimizer={"name": "adamw", "options": {}}, train={"watch_every": 0})
    for seen in on_ranks("dp=2 zero=1", ahead, "llama", job, waits, device="cuda"):
        assert found in seen


def copied(rank: int, world: int, mistake: str) -> str:
    """Copy the input of a block to the host and back, as `recompute=offload` does; return what is there, or the error."""
    lanes = HostLanes(torch.device("cuda", 0))
    given = torch.arange(4.0).to("cuda") * 2
    with pytest.MonkeyPatch.context() as patch:
        if mistake == "leaves before it is made":
            patch.setattr(torch.cuda.Stream, "wait_stream", lambda self, other: None)
        wait = HostLanes.wait_for
        patch.setattr(
            HostLanes, "wait_for", lambda self, event, layer, way: way == mistake or wait(self, event, layer, way)
        )
        try:
            copy, left = lanes.to_host(given, "a")
            lanes.wait_for(left, "a", "to host")
            back, arrived = lanes.from_host(copy, "a")
            lanes.wait_for(arrived, "a", "from host")
            return f"{(back + 1).cpu().tolist()}"
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ("", "[1.0, 3.0, 5.0, 7.0]"),
        ("leaves before it is made", "used on a stream that has not waited for it"),
        ("to host", "what another stream copies to the host is read by one that has not waited for it"),
        ("from host", "used on a stream that has not waited for it"),
    ],
)
def test_copies_of_inputs_wait_for_what_made_them_and_are_waited_for(mistake: str, found: str) -> None:
    (seen,) = pool(1, "cuda").run(copied, mistake)
    assert found in seen


def recorded(rank: int, world: int) -> list[tuple[int, bool]]:
    """Return the tensors that are copied beside the computations, and whether the stream that uses them is recorded."""
    noted: list[tuple[int, bool]] = []
    current = torch.cuda.current_stream()
    batch = {"input_ids": torch.ones(2, 3), "labels": [torch.ones(1)]}
    with pytest.MonkeyPatch.context() as patch:
        record = lambda self, stream: noted.append((self.numel(), stream is current))  # noqa: E731
        patch.setattr(Tensor, "record_stream", record)
        batch_to_device(batch, torch.device("cuda", 0))
    return noted


def test_memory_of_a_batch_is_kept_for_the_stream_that_uses_it() -> None:
    """Nothing else shows on a simulated device that its memory would be given to the next batch too early."""
    assert pool(1, "cuda").run(recorded) == [[(6, True), (1, True)]]


def watched(rank: int, world: int, model: str, layout: str, job: Job) -> list[float]:
    return observe(rank, world, model, layout, job).losses


@pytest.mark.parametrize("layout", ["dp=2 offload", pytest.param("tp=2 offload", marks=pytest.mark.nightly)])
def test_weights_on_the_host_are_compared_on_the_device(layout: str) -> None:
    job = clipped()
    job = job.model_copy(update={"train": job.train.model_copy(update={"watch_every": 1})})
    one, other = on_ranks(layout, watched, "llama", job, device="cuda")
    assert one == other
