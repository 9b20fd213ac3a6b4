"""Several models in one run, and forwards of the user's own, train as in a plain loop in every layout."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep import losses
from samestep.errors import JobError, LayoutError, ModelError
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest
from samestep.program.ops import OpKind
from samestep.runtime.axes import host_weights
from samestep.runtime.ledger import Ledger
from samestep.runtime.run import Run
from samestep.runtime.weights.moving_averages import ModelAverages
from tests.laboratory import combinations, in_loop, job_of, losses_of_steps, watched
from tests.models import Plain, Tokens
from tests.plain import Trained, assert_trained, mean_of, train_plainly, whole_batches
from tests.pool import pool

STEPS = 3
JOB = job_of("float64", STEPS, optimizer={"clip_norm": 0.5})


class Pairs(Tokens):
    """A chosen and a rejected continuation for each sample."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        other = (index * 7 + 3) % len(self)
        return {
            "chosen": self.input_ids[index],
            "chosen_labels": self.labels[index],
            "rejected": self.input_ids[other],
            "rejected_labels": self.labels[other],
        }


def plain_model(seed: int, blocks: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return Plain(blocks=blocks)


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False).eval()


def distil_forward(models: Any, batch: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = models["teacher"](batch["input_ids"])
    return models["student"](batch["input_ids"]), teacher


def two_views(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """A forward of one model, which calls it twice and reads the labels."""
    ids = batch["input_ids"]
    return model(ids), model(ids.flip(1)).mean(1) + (batch["labels"] == 3).sum(1, keepdim=True)


def of_views(outputs: Any, batch: Any) -> Any:
    logits, other = outputs
    loss = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")
    return {"tokens": (loss, (batch["labels"] != -100).sum()), "views": (other.square().mean(1).sum(), len(other))}


def dpo_forward(models: Any, batch: Any) -> dict[str, Tensor]:
    return {
        f"{name}_{side}": losses.sequence_log_probs(model(batch[side]), batch[f"{side}_labels"])
        for name, model in models.items()
        for side in ("chosen", "rejected")
    }


def features(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch["chosen"]).mean(1), model(batch["rejected"]).mean(1)


def entropy_of_tokens(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    logits = model(batch["input_ids"])
    return losses.token_log_probs(logits, batch["labels"]), losses.token_entropy(logits)


def with_entropy(outputs: Any, batch: Any) -> Any:
    log_probs, entropy = outputs
    counts = batch["labels"] != -100
    return {"policy": (-log_probs.sum(), counts.sum()), "entropy": (-0.01 * entropy.sum(), entropy.numel())}


Kind = tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any, Any], Any], type[Tokens]]
DISTIL = functools.partial(losses.distillation, temperature=2.0, hard=0.5)
CONTRASTIVE = functools.partial(losses.contrastive, temperature=0.2)
KINDS: dict[str, Kind] = {
    "two views": (lambda: plain_model(3), two_views, of_views, Tokens),
    "dpo": (lambda: {"policy": plain_model(1), "reference": frozen(plain_model(1))}, dpo_forward, losses.dpo, Pairs),
    "distillation": (
        lambda: {"student": plain_model(1), "teacher": frozen(plain_model(2, 3))},
        distil_forward,
        DISTIL,
        Tokens,
    ),
    "contrastive": (lambda: plain_model(5), features, CONTRASTIVE, Pairs),
    "entropy": (lambda: plain_model(6), entropy_of_tokens, with_entropy, Tokens),
}


def test_losses_are_those_of_their_papers() -> None:
    margin = 0.1 * torch.tensor([2.0, -1.0])
    outputs = (torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]), torch.zeros(2), torch.zeros(2))
    total, count, values = losses.dpo(outputs, None)
    torch.testing.assert_close(total / count, -F.logsigmoid(margin).mean())
    assert (values["accuracy"][0].item(), values["accuracy"][1]) == (1, 2)
    total, count = losses.pairwise(outputs[:2], None)[:2]
    torch.testing.assert_close(total / count, -F.logsigmoid(outputs[0] - outputs[1]).mean())
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(losses.token_entropy(logits), torch.distributions.Categorical(logits=logits).entropy())
    total, number = losses.distillation((logits, logits), {})
    assert (abs(total.item()) < 1e-6, number.item()) == (True, 6)
    with pytest.raises(JobError, match=r"losses\.dpo: the forward returned a Tensor. Use policy_chosen, "):
        losses.dpo(logits, None)
    with pytest.raises(JobError, match="no label for each row of logits"):
        losses.distillation((logits, logits), {}, hard=1.0)


# -- a policy whose reference is itself, with its adapters off -------------------------------------


class Adapted(nn.Module):
    """A frozen layer with an adapter that a flag turns off."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.is_on = base, True
        self.low = nn.Linear(base.in_features, 2, bias=False)
        self.high = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x)) if self.is_on else self.base(x)


def adapted() -> nn.Module:
    model: Any = plain_model(8).requires_grad_(False)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn the adapters off as peft's `disable_adapter` does: by a flag of each, and they ask for no gradient meanwhile."""

    def turn(is_on: bool) -> None:
        for part in model.modules():
            if isinstance(part, Adapted):
                part.is_on = is_on
                part.low.requires_grad_(is_on)

    turn(False)
    yield
    turn(True)


def itself_first(model: Any, batch: Any) -> dict[str, Tensor]:
    with torch.no_grad(), adapters_off(model):
        found = dpo_forward({"reference": model}, batch)
    return found | dpo_forward({"policy": model}, batch)


KINDS["adapters off"] = (adapted, itself_first, losses.dpo, Pairs)


def siamese() -> dict[str, nn.Module]:
    torch.manual_seed(11)
    encoder = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    return {
        "encoder": encoder,
        "predictor": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)),
    }


def two_encoded(models: Any, batch: Any) -> tuple[Tensor, ...]:
    views = torch.sin(batch["input_ids"][:, :10].double()), torch.cos(batch["input_ids"][:, -10:].double())
    first, second = (models["encoder"](view) for view in views)
    return models["predictor"](first), models["predictor"](second), first.detach(), second.detach()


def alike(outputs: Any, batch: Any) -> Any:
    a, b, first, second = outputs
    return -(F.cosine_similarity(a, second) + F.cosine_similarity(b, first)).sum(), len(a)


KINDS["siamese"] = (siamese, two_encoded, alike, Tokens)


def sharing() -> dict[str, nn.Module]:
    first, second = plain_model(12), plain_model(13)
    second.embed = first.embed
    return {"first": first, "second": second}


def apart(models: Any, batch: Any) -> Tensor:
    return (models["first"](batch["chosen"]) - models["second"](batch["rejected"])).square().mean((1, 2))


KINDS["one embedding"] = (sharing, apart, lambda outputs, batch: (outputs.sum(), len(outputs)), Pairs)


EMA: dict[str, Any] = {"ema teacher": {"teacher": ("student", 0.9)}}


# -- weights in the host's memory between their uses -----------------------------------------------


def judged() -> dict[str, nn.Module]:
    torch.manual_seed(14)
    net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8))
    critics = [nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)) for _ in "ab"]
    return {"net": net, **{name: frozen(one) for name, one in zip(("critic", "judge"), critics, strict=True)}}


def judged_forward(models: Any, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients flow through both calls of one frozen model, and through one of another."""
    made = models["net"](batch["input_ids"][:, :10].double() / 61)
    return models["critic"](made), models["critic"](made.flip(1)), models["judge"](made)


KINDS["judged"] = (
    judged,
    judged_forward,
    lambda outputs, batch: (sum(one.square().sum() for one in outputs), len(outputs[0])),
    Tokens,
)
OFFLOAD = {"dpo": ["reference"], "ema teacher": ["teacher"], "judged": ["critic"], "distillation": ["teacher.blocks"]}


def with_offload(
    rank: int, world: int, layout: str, kind: str, folder: str
) -> tuple[list[float], dict[str, Tensor], tuple[float, float]]:
    """Train with weights on the host, with an evaluation, and go on after two steps without: where they are changes no result."""
    build, forward, loss, dataset = KINDS[kind]
    make = functools.partial(
        samestep.parallelize,
        loss=loss,
        optimizer=adam,
        layout=layout,
        job=in_loop(JOB),
        forward=forward,
        ema=EMA.get(kind),
    )
    first = make(build(), offload=OFFLOAD[kind])
    found = losses_of_steps(first, dataset(), 0, 1)
    before = host_weights.num_copies
    found += losses_of_steps(first, dataset(), 1, 2)
    held_as_predicted(first, host_weights.num_copies - before)
    mean = first.evaluate(dataset())["loss"]
    first.save(folder)
    run = make(build())
    run.load(folder)
    other = run.evaluate(dataset())["loss"]
    return [*found, *losses_of_steps(run, dataset(), 2, STEPS)], run.state_dict(on_every_rank=True), (mean, other)


def held_as_predicted(run: Run, num_copies: int) -> None:
    """Compare the copies of a step, and the bytes on the host, with those of the program."""
    program = run.program
    away = {name for one in program.host_modules for name in one.params}
    listed = [op for _, op in program.ops() if op.kind is OpKind.COPY]
    held = {piece.name: piece.value.nbytes for piece in run.assembly.weights.store.frozen}
    use, whole = (at_rest(one) for one in (program, dataclasses.replace(program, host_modules=())))
    assert (use.weights + use.host, whole.host) == (whole.weights, 0)
    assert num_copies == (0 if program.units else len(listed))  # FSDP2 copies shards
    if not program.units:  # whose shards are padded
        assert use.host == sum(size for name, size in held.items() if name in away)
    assert bool(away) == bool(listed)


HOST_LAYOUTS = ["dp=2 microbatch=3 recompute=full", "dp=2 zero=3 microbatch=2", "pp=2 microbatch=4", "tp=2"]


@pytest.mark.parametrize(("layout", "kind"), combinations(HOST_LAYOUTS, [*OFFLOAD]))
def test_a_frozen_model_is_on_the_host_between_its_uses(layout: str, kind: str, tmp_path: Path) -> None:
    ranks = pool(2).run(with_offload, layout, kind, str(tmp_path / "saved"))
    assert_trained(ranks, plain(kind), 1e-7, 1e-9)
    assert all(mean == other for *_, (mean, other) in ranks)


def test_only_frozen_weights_are_on_the_host() -> None:
    make = functools.partial(samestep.parallelize, loss=losses.dpo, optimizer=adam, forward=dpo_forward)
    build = KINDS["dpo"][0]
    with pytest.raises(JobError, match=r"offload='reference' is one name.*Use .*offload=\['reference'\]"):
        make(build(), offload="reference")
    for names, text in (
        ("policy", "policy.scale takes a gradient. Use requires_grad_"),
        ("refference", "did you mean .reference.*Use a name of a module"),
    ):
        run = make(build(), offload=[names], job=in_loop(JOB))
        with pytest.raises(LayoutError, match=text):
            losses_of_steps(run, Pairs(), 0, 1)


KINDS["ema teacher"] = (lambda: {"student": plain_model(7)}, distil_forward, DISTIL, Tokens)


def gan() -> dict[str, nn.Module]:
    torch.manual_seed(9)
    return {"g": nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 8)), "d": nn.Linear(8, 1)}


def gan_forward(models: Any, batch: Any) -> dict[str, Tensor]:
    noise = batch["input_ids"][:, :10].double() / 61
    return {
        "fake": models["d"](models["g"](noise)),
        "real": models["d"](torch.sin(batch["input_ids"][:, :8].double())),
        "average": models["average"](noise).mean(1),
    }


def d_loss(outputs: Any, batch: Any) -> Any:
    number = len(outputs["real"])
    return (F.softplus(-outputs["real"]) + F.softplus(outputs["fake"])).sum(), number


def g_loss(outputs: Any, batch: Any) -> Any:
    number = len(outputs["fake"])
    return F.softplus(-outputs["fake"]).sum(), number, {"average": (outputs["average"].sum(), number)}


def gan_in_turn(rank: int, world: int, layout: str) -> Trained:
    rules = {"g": adam, "d": adam}
    run = samestep.parallelize(
        gan(), d_loss, rules, layout=layout, job=in_loop(JOB), forward=gan_forward, ema={"average": ("g", 0.9)}
    )
    seen = []
    for batch in samestep.batches(Tokens(), JOB):
        for name, loss in (("d", d_loss), ("g", g_loss)):
            seen.append(run.backward(batch, loss, into=name).loss)
            run.update(name)
    return seen, run.state_dict(on_every_rank=True)


@functools.cache
def plain_gan() -> Trained:
    built = gan()
    models = nn.ModuleDict({**built, "average": frozen(copy.deepcopy(built["g"]))}).double()
    rules, seen = {name: adam([*models[name].parameters()]) for name in "gd"}, []
    for samples in whole_batches(Tokens(), JOB):
        for name, loss in (("d", d_loss), ("g", g_loss)):
            models.zero_grad()
            mean = mean_of(loss(gan_forward(models, samples), samples))
            mean.backward()
            torch.nn.utils.clip_grad_norm_(models[name].parameters(), 0.5)
            rules[name].step()
            seen.append(mean.item())
        move_averages(models, {"average": ("g", 0.9)})
    return seen, {name: value.detach() for name, value in models.state_dict().items()}


def test_an_average_moves_behind_the_updates_of_what_it_follows() -> None:
    assert_trained(pool(2).run(gan_in_turn, "pp=2 microbatch=4"), plain_gan(), 1e-7, 1e-9)


adam = functools.partial(torch.optim.Adam, lr=0.01)


def parallel(rank: int, world: int, layout: str, kind: str, folder: str, watch_every: int) -> Trained:
    """Train in a layout, from a checkpoint on after the first step; the last step sends what the program lists, unless samples run again."""
    build, forward, loss, dataset = KINDS[kind]
    how: dict[str, Any] = {"layout": layout, "forward": forward, "ema": EMA.get(kind)}

    def make() -> Run:
        return samestep.parallelize(build(), loss, adam, job=in_loop(watched(JOB, watch_every)), **how)

    run = make()
    found = losses_of_steps(run, dataset(), 0, 1)
    run.save(folder)
    run = make()
    run.load(folder)
    found += losses_of_steps(run, dataset(), 1, 2)
    with Ledger() as ledger:
        found += losses_of_steps(run, dataset(), 2, STEPS)
    assert watch_every or ledger.rows == run.program.ledger(group_of=run.assembly.parallel.mesh.group_of)
    assert bool(run.program.followed) == (kind in EMA and "pp" in layout)
    return found, run.state_dict(on_every_rank=True)


@functools.cache
def plain(kind: str) -> Trained:
    """One device with the whole batch."""
    build, forward, loss, dataset = KINDS[kind]
    built = build()
    if kind in EMA:
        built["teacher"] = frozen(plain_model(7))
    models = nn.ModuleDict(built).double() if isinstance(built, dict) else built.double()
    optimizer = adam([param for param in models.parameters() if param.requires_grad])
    follow = functools.partial(move_averages, models, EMA.get(kind, {}))
    return train_plainly(
        models, whole_batches(dataset(), JOB), lambda batch: loss(forward(models, batch), batch), optimizer, 0.5, after=follow
    )  # fmt: skip


def move_averages(models: Any, averages: dict[str, tuple[str, float]]) -> None:
    for name, (source, decay) in averages.items():
        for average, param in zip(models[name].parameters(), models[source].parameters(), strict=True):
            average.data.lerp_(param.data, 1 - decay)


LAYOUTS = [
    "dp=2 microbatch=3",
    "dp=2 zero=3",
    "tp=2",
    "pp=2 microbatch=4",
    "dp=2 zero=1 microbatch=2",
    "dp=1 microbatch=3",
]
CASES = [
    *combinations(LAYOUTS, ["two views", "dpo", "distillation", "entropy", "adapters off"]),
    ("dp=2 zero=3", "contrastive"),
    ("dp=2 zero=3", "adapters off"),
    ("pp=2", "siamese"),  # of which a stage holds all calls of a batch norm
    ("pp=2 microbatch=4", "one embedding"),
    ("dp=2 zero=3", "ema teacher"),
    ("pp=2 microbatch=4", "ema teacher"),
    *(
        pytest.param(layout, kind, marks=pytest.mark.nightly)
        for layout, kind in (
            ("pp=3", "siamese"),
            ("pp=2 microbatch=4", "contrastive"),
            ("tp=2", "ema teacher"),
            ("pp=2 dp=2 zero=3 microbatch=2", "ema teacher"),
            ("pp=4 microbatch=2", "ema teacher"),
        )
    ),
]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_models_in_one_run_train_as_in_a_plain_loop(layout: str, kind: str, tmp_path: Path) -> None:
    """Some of the runs take samples again."""
    watch_every = 3 if "microbatch=3" in layout or (layout, kind) == ("dp=2 zero=3", "ema teacher") else 0
    ranks = pool(Layout(layout).world_size).run(parallel, layout, kind, str(tmp_path / "saved"), watch_every)
    assert_trained(ranks, plain(kind), 1e-7, 1e-9)


def test_what_follows_no_model_is_refused() -> None:
    models = {"student": plain_model(1)}
    with pytest.raises(
        ModelError, match="'teacher' follows 'policy', which is not one of the trained models 'student'"
    ):
        samestep.parallelize(models, DISTIL, adam, forward=distil_forward, ema={"teacher": ("policy", 0.9)})
    with pytest.raises(LayoutError, match="no master weights, and bf16 would round its updates away"):
        ModelAverages({"teacher": ("student", 0.9)}).check(Layout(), job_of("bf16"))


def test_several_models_need_a_forward() -> None:
    with pytest.raises(ModelError, match=r"no forward passes a batch through them\. Use forward="):
        samestep.parallelize({"a": plain_model(1), "b": plain_model(2)}, losses.dpo, adam)
