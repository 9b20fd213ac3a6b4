"""Build functions that load: every value is that of a plain call, and a fine-tune is that of a plain torch loop."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from samestep import job_files as jobs
from samestep.building import drawn_rows
from samestep.building.initial_values import Blueprint, blueprint, fill_rest
from samestep.building.loss import cross_entropy
from samestep.datasets import batches, open_dataset
from samestep.errors import ModelError, UnprovenError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.job_tables import RunTable
from samestep.runtime.run import Run
from tests import folders, small
from tests.laboratory import combinations, traced_run
from tests.models import Tokens
from tests.plain import train_plainly, whole_batches
from tests.pool import pool

CPU = torch.device("cpu")
SEED = 3


# -- the values of a build function ----------------------------------------------------------------


class Net(nn.Module):
    """Weights, a persistent buffer and one that is not, and a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8))
        self.register_buffer("angles", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.table = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


@functools.cache
def folder() -> Path:
    """A folder with the weights of a net in several formats."""
    made = Path(tempfile.mkdtemp(prefix="samestep-loaded-"))
    with torch.random.fork_rng():
        torch.manual_seed(11)
        net = Net()
    weights = net.state_dict()
    torch.save(weights, made / "net.pt")

    torch.save(net, made / "whole.pt")
    save_file(weights, made / "net.safetensors")
    np.save(made / "first.npy", weights["first.weight"].numpy())

    weights["first.weight"].numpy().tofile(made / "first.bin")
    return made


def from_pt(**options: Any) -> nn.Module:
    net = Net()
    net.load_state_dict(torch.load(folder() / "net.pt", **options))
    return net


def assigned() -> nn.Module:
    net = Net()
    net.load_state_dict(torch.load(folder() / "net.pt", mmap=True), assign=True)
    return net


def to_empty_then_loaded() -> nn.Module:
    with torch.device("meta"):
        net = Net()
    net = net.to_empty(device="cpu")
    net.load_state_dict(torch.load(folder() / "net.pt"))
    net.angles.copy_(1.0 / 100 ** (torch.arange(0, 8, 2) / 8))
    net.table = torch.arange(4.0)
    return net


def from_safetensors() -> nn.Module:
    net = Net()
    net.load_state_dict(load_file(folder() / "net.safetensors"))
    return net


def memory_mapped() -> nn.Module:
    net = from_pt()
    net.first.weight.data = torch.from_numpy(np.load(folder() / "first.npy", mmap_mode="c"))
    return net


def from_file_of_numbers() -> nn.Module:
    net = from_pt()
    size = net.first.weight.numel()
    net.first.weight = nn.Parameter(torch.from_file(str(folder() / "first.bin"), size=size).view(8, 6).clone())
    net.first.bias.data.numpy()[:] = 2.5
    return net


def with_own_generator() -> nn.Module:
    net, generator = from_pt(), torch.Generator().manual_seed(5)
    net.register_buffer("projection", torch.randn(4, 4, generator=generator))
    nn.init.trunc_normal_(net.first.bias, generator=generator)
    with torch.no_grad():
        net.second.bias.normal_(generator=generator)
    return net


LOADED: dict[str, Callable[[], nn.Module]] = {
    "pt": from_pt,
    "pt, mapped": functools.partial(from_pt, mmap=True),

    "whole module": lambda: copy.deepcopy(torch.load(folder() / "whole.pt", weights_only=False)),
    **{
        function.__name__: function
        for function in (
            assigned, to_empty_then_loaded, from_safetensors, memory_mapped, from_file_of_numbers, with_own_generator,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_all_values_are_those_of_a_plain_call(name):
    made, expected = blueprint(LOADED[name], SEED), LOADED[name]()
    assert not made.drawn
    assert_filled(made, expected, set(dict(expected.named_parameters())))


def assert_filled(made: Blueprint, expected: nn.Module, parameters: set[str]) -> None:
    """The blueprint makes these parameters, all buffers and all attributes as `expected` has them."""
    for name, tensor in expected.named_parameters():
        if name in parameters:
            assert torch.equal(made.materialize(name, CPU), tensor), name
    fill_rest(made, CPU)
    buffers = dict(made.module.named_buffers())
    assert buffers.keys() == dict(expected.named_buffers()).keys()
    for name, tensor in expected.named_buffers():
        assert torch.equal(buffers[name], tensor), name
    assert torch.equal(made.module.table, expected.table)


def test_what_is_drawn_beside_what_is_loaded_is_a_function_of_seed_and_name():
    def build() -> nn.Module:
        net = from_pt()
        net.second = nn.Linear(8, 5)
        with torch.no_grad():  # two rows more
            net.first.weight = nn.Parameter(torch.cat([net.first.weight, torch.randn(2, 6)]))
        return net

    made, other = blueprint(build, SEED), blueprint(build, SEED + 1)
    assert made.drawn == {"first.weight", "second.weight", "second.bias"}
    assert_filled(made, build(), {"first.bias"})
    ours, theirs = (one.materialize("first.weight", CPU) for one in (made, other))
    assert torch.equal(ours[:8], theirs[:8])
    assert not torch.equal(ours[8:], theirs[8:])
    alone = blueprint(lambda: nn.ModuleDict({"second": nn.Linear(8, 5)}), SEED)
    assert torch.equal(made.materialize("second.weight", CPU), alone.materialize("second.weight", CPU))


def test_numbers_of_numpy_are_those_of_the_seed():
    def build() -> nn.Module:
        net = Net()
        net.scale = torch.from_numpy(np.random.rand(8)).float()
        return net

    ours, again, other = (blueprint(build, seed).materialize("scale", CPU) for seed in (SEED, SEED, SEED + 1))
    assert torch.equal(ours, again)
    assert not torch.equal(ours, other)


def test_a_function_that_returns_one_module_each_time():
    kept = from_pt()
    assert_filled(blueprint(lambda: kept, SEED), kept, set(dict(kept.named_parameters())))
    cached = functools.cache(Net)
    assert blueprint(cached, SEED).drawn == {"first.weight", "first.bias", "second.weight", "second.bias"}


def test_a_large_model_without_files_is_not_called_plainly(monkeypatch):
    monkeypatch.setattr(drawn_rows, "SMALL_BYTES", 8)
    calls = []

    def build() -> nn.Module:
        calls.append(1)
        return Net()

    blueprint(build, SEED)
    assert len(calls) == 1
    blueprint(lambda: calls.append(1) or from_pt(), SEED)  # type: ignore[func-returns-value]
    assert len(calls) == 4


def test_a_model_that_does_not_fit_is_made_by_the_tape_alone(monkeypatch):
    monkeypatch.setattr(drawn_rows, "fits", lambda size_bytes: False)
    assert_filled(blueprint(from_pt, SEED), from_pt(), set(dict(Net().named_parameters())))
    with pytest.raises(ModelError, match=r"scale is never given values.*too large"):
        blueprint(unfilled, SEED)


def unfilled() -> nn.Module:
    net = Net()
    net.scale = torch.empty(8)
    return net


_SUPPLY = itertools.count()


def used_up() -> nn.Module:
    net = from_pt()
    net.scale = torch.full((8,), float(next(_SUPPLY)))
    return net


def without_a_seed() -> nn.Module:
    net = Net()
    net.scale = torch.from_numpy(np.random.default_rng().random(8)).float()
    return net


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "unfilled": (unfilled, r"scale is never given values \(torch.empty\)"),
    "used up": (used_up, "scale differs between two calls .*uses up"),
    "no seed": (without_a_seed, "scale differs between two calls"),
    "to_empty": (lambda: Net().to_empty(device="cpu"), "first.weight is never given values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_made_in_no_known_way_is_refused(name):
    build, text = REFUSED[name]
    with pytest.raises(ModelError, match=text):
        blueprint(build, SEED)


def test_the_refusal_may_be_waived():
    waived = functools.partial(RunTable().waived, "build", "values-differ")
    with pytest.raises(UnprovenError, match=r'scale .*run.allow = \["build"\]'):
        blueprint(unfilled, SEED, waived)
    made = blueprint(unfilled, SEED, functools.partial(RunTable(allow=("build",)).waived, "build", "values-differ"))
    assert "scale" in made.waived[0]


# -- wrappers --------------------------------------------------------------------------------------


def wrapped_within() -> nn.Module:
    net = Net()
    net.first = nn.DataParallel(torch.compile(net.first))
    return net


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch.compile imports what warns
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda net: nn.DataParallel(torch.compile(net))])
def test_a_wrapped_model_starts_as_the_model_does(wrap):
    expected, made = blueprint(Net, SEED), blueprint(lambda: wrap(Net()), SEED)
    names = list(dict(made.module.named_parameters()))
    for name, plain_name in zip(names, dict(expected.module.named_parameters()), strict=True):
        assert torch.equal(made.materialize(name, CPU), expected.materialize(plain_name, CPU)), name


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_wrapped_part_starts_as_the_part_does():
    expected, made = blueprint(Net, SEED), blueprint(wrapped_within, SEED)
    weight = made.materialize("first.module._orig_mod.weight", CPU)
    assert torch.equal(weight, expected.materialize("first.weight", CPU))
    own = blueprint(lambda: nn.ModuleDict({"first": nn.ModuleDict({"module": nn.Linear(6, 8)})}), SEED)
    assert not torch.equal(own.materialize("first.module.weight", CPU), weight)  # no wrapper, though it is named so


# -- a fine-tune -----------------------------------------------------------------------------------

LAYOUTS = ("dp=2 zero=3", "dp=1 pp=2 microbatch=4")


@functools.cache
def saved(family: str) -> str:
    """A folder with a small model of a family, whose weights are no first values."""
    with torch.random.fork_rng():
        return str(folders.saved(folder() / family, family))


def fine_tuned(family: str) -> nn.Module:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(saved(family), use_cache=False).train()


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def job() -> Job:
    return Job(train={"global_batch": 8, "steps": 3, "seed": SEED}, numerics={"precision": "float32"})  # type: ignore[arg-type]


def make_run(rank: int, world: int, family: str, layout: str) -> Run:
    source = Source(functools.partial(fine_tuned, family), cross_entropy, _named_sgd, family)
    return traced_run((family, "loaded"), source, Tokens(), layout, job(), rank, world)


def _named_sgd(named: list[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    return sgd([tensor for _, tensor in named])


def losses_of(rank: int, world: int, family: str, layout: str) -> list[float]:
    run = make_run(rank, world, family, layout)
    return [run.step(batch).loss for batch in batches(Tokens(), job())]


@functools.cache
def losses_of_a_plain_loop(family: str) -> list[float]:
    model = fine_tuned(family)
    samples = whole_batches(Tokens(), job())
    return train_plainly(model, samples, functools.partial(loss_of_tokens, model), sgd(list(model.parameters())))[0]


def loss_of_tokens(model: nn.Module, samples: Any) -> Tensor:
    return F.cross_entropy(model(samples["input_ids"]).logits.flatten(0, 1), samples["labels"].flatten())


@pytest.mark.parametrize(("layout", "family"), combinations(LAYOUTS, ("llama", "gpt2")))
def test_a_fine_tune_through_a_function_is_a_plain_loop(family, layout):
    make_run(0, 2, family, "dp=2")  # before the ranks are forked
    expected = losses_of_a_plain_loop(family)
    for losses in pool(2).run(losses_of, family, layout):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_fine_tune_by_a_job_file_is_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_model.py").write_text(
        "from transformers import AutoModelForCausalLM\n\n"
        "def build(path):\n    return AutoModelForCausalLM.from_pretrained(path)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    np.random.default_rng(SEED).integers(0, 61, 4096, dtype=np.uint8).tofile(tmp_path / "tokens.bin")
    path = tmp_path / "job.toml"
    path.write_text(
        f'[model]\nsource = "own_model:build"\nconfig = {{ path = "{saved("llama")}" }}\n'
        f'[data]\nsource = "tokens:{tmp_path}/tokens.bin"\ndtype = "uint8"\nsequence_length = 32\n'
        "[train]\nglobal_batch = 8\nsteps = 6\nevaluate_samples = 0\nsample_tokens = 0\n"
        '[optimizer]\nname = "adamw"\nlr = 0.01\nclip_norm = 1.0\n[schedule]\nwarmup_steps = 2\n'
    )
    assert small.main("train", path, "--layout", LAYOUTS[0], "--out", tmp_path / "run") == 0
    expected = _adamw_losses(jobs.load(path), fine_tuned("llama"))
    sys.modules.pop("own_model")
    assert small.losses(tmp_path / "run") == pytest.approx(expected, rel=1e-6)


def _adamw_losses(job: Job, model: nn.Module) -> list[float]:
    """The losses of the job's steps, taken as torch's own documentation would."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    samples = itertools.islice(whole_batches(open_dataset(job, "train"), job), job.train.steps)
    return train_plainly(model, samples, functools.partial(loss_of_tokens, model), optimizer, 1.0, [warm_up])[0]
