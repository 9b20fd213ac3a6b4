"""What becomes a graph, what does not, and what a run says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samestep
from samestep.building.loss import loss_of
from samestep.building.optimizer import optimizer_of
from samestep.errors import JobError, LayoutError, ModelError
from samestep.examination.examine import Source
from samestep.job import Job
from samestep.layout import Layout
from samestep.runtime.axes.rank_crossings import RankCrossing, cross, share
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run import Run
from samestep.strategies import program_of
from tests.laboratory import clipped, make_run
from tests.models import Plain, Tokens

JOB = Job(**{**clipped("float32").model_dump(), "run": {"compile": "blocks", "compile_backend": "aot_eager"}})

NOT_OF_MODULES = ("run.compile: the loss ", "run.compile: the update ")


def run_of(model: Callable[[], nn.Module], job: Job = JOB) -> Run:
    source = Source(model, loss_of(job), optimizer_of(job))
    return Run(source, Layout(), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))


def stepped(model: type[nn.Module], job: Job = JOB) -> tuple[Run, list[str]]:
    """Take the steps of a job; return the run and what its steps remarked of modules."""
    run = run_of(model, job)
    said = [line for batch in samestep.batches(Tokens(), job) for line in run.step(batch).remarks]
    return run, [line for line in said if line.startswith("run.compile") and not line.startswith(NOT_OF_MODULES)]


def with_backend(name: str) -> Job:
    return JOB.model_copy(update={"run": JOB.run.model_copy(update={"compile_backend": name})})


class DrawsInMany(Plain):
    """Blocks with masks of several kinds: of a module that is called twice, of channels, in place, and of an attention."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.dropout.p = 0.2
            block.norm = nn.Sequential(block.dropout, block.norm, nn.AlphaDropout(0.1), nn.Dropout(0.1, inplace=True))
            block.mix = Attends(block.mix)


class Attends(nn.Module):
    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.nn.functional.dropout1d(self.mix(x), 0.1).unflatten(-1, (2, -1)).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1, is_causal=True)
        return torch.nn.functional.dropout(attended.transpose(1, 2).flatten(2), p=0.1, training=self.training)


class DrawsNumbers(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, own=block.forward: own(x) + 0.1 * torch.randn_like(x)


class Hooked(Plain):
    """A user's hook within a block, which must run in each step."""

    calls: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.register_forward_hook(lambda *_: self.calls.append("up"))


class CompilesItself(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].compile()


class CountsGraphs(Plain):
    """A model that compiles a block itself, with a backend that keeps the graphs."""

    graphs: ClassVar[list[torch.fx.GraphModule]] = []

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].compile(backend=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward


class _BreaksInside(nn.Module):
    """A module whose own code leaves a graph, and drops before and behind that."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(self.inner(x), 0.2, self.training)
        torch._dynamo.graph_break()
        return self.dropout(torch.nn.functional.dropout(x, 0.2, self.training))


class BreaksBetweenMasks(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mix = _BreaksInside(block.mix)


class BreaksInItsOwnCode(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, own=block.forward: self.dropped(own(x))

    @staticmethod
    def dropped(x: Tensor) -> Tensor:
        x = torch.nn.functional.dropout(x, 0.3)
        torch._dynamo.graph_break()
        return torch.nn.functional.dropout(x, 0.3)


def test_a_batch_of_another_size_is_said_to_compile_anew():
    torch._dynamo.reset()  # it remembers the sizes that other tests have changed
    job = JOB.model_copy(update={"train": JOB.train.model_copy(update={"global_batch": 7})})
    run = make_run(0, 1, "plain", "dp=1 microbatch=4", job)
    batch = next(iter(samestep.batches(Tokens(), job)))
    remarks = run.step(batch).remarks
    (said,) = [line for line in remarks if line.startswith("run.compile") and not line.startswith(NOT_OF_MODULES)]
    assert "2 graphs of aot_eager, 1 of them again for other shapes or values" in said


def test_masks_of_graphs_are_those_of_code_that_is_not_compiled():
    run, said = stepped(DrawsInMany)
    assert len(said) == 1
    assert said[0].startswith("run.compile: 3 blocks as 1 graph of aot_eager, with 0 islands, compiled in ")
    plainly, _ = stepped(DrawsInMany, clipped("float32"))
    pairs = zip(run.model.parameters(), plainly.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("model", [BreaksBetweenMasks, BreaksInItsOwnCode])
def test_masks_behind_a_break_of_the_users_own_are_those_of_code_that_is_not_compiled(model):
    run, said = stepped(model)
    plainly, _ = stepped(model, clipped("float32"))
    pairs = zip(run.model.parameters(), plainly.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs), said
    assert said == [
        "run.compile: blocks.0 and 2 more run uncompiled: it cannot be compiled: it draws masks of dropout, and its graph breaks"
    ]


def test_a_block_that_draws_numbers_runs_uncompiled_and_says_so():
    _, said = stepped(DrawsNumbers)
    assert said == ["run.compile: blocks.0 and 2 more run uncompiled: it draws random numbers"]


def test_a_hook_within_a_block_runs_as_often_as_without():
    Hooked.calls.clear()
    run, _ = stepped(Hooked)
    with_graphs = len(Hooked.calls)
    Hooked.calls.clear()
    stepped(Hooked, clipped("float32"))
    assert with_graphs == len(Hooked.calls) > 0
    assert run.assembly.model.compiled.compiler.num_graphs > 1
    assert run.assembly.model.compiled.num_breaks > 0


def test_a_backend_that_fails_leaves_blocks_uncompiled_with_the_same_result(monkeypatch):
    def failing(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: failing)
    run, said = stepped(Plain)
    assert said == ["run.compile: blocks.0 runs uncompiled: aot_eager fails for it and its like: no compiler here"]
    plainly, _ = stepped(Plain, clipped("float32"))
    pairs = zip(run.model.parameters(), plainly.model.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch.compile imports what warns
def test_a_model_that_compiles_its_blocks_is_refused():
    with pytest.raises(ModelError, match=r"blocks\.0, which the model compiles itself"):
        stepped(CompilesItself)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler asks each input for its gradient
def test_what_a_model_compiles_itself_is_traced_uncompiled_and_runs_compiled():
    job = JOB.model_copy(update={"run": JOB.run.model_copy(update={"compile": "none"})})
    CountsGraphs.graphs.clear()
    runs = [run_of(model, job) for model in (CountsGraphs, Plain)]
    assert not CountsGraphs.graphs
    losses = [[run.step(batch).loss for batch in samestep.batches(Tokens(), job)] for run in runs]
    assert CountsGraphs.graphs
    assert losses[0] == losses[1]


class DropsInItsOwnGraph(Plain):
    """A function that is compiled by itself, as a fused dropout and sum is; with `rate` 0 nothing is drawn."""

    rate: ClassVar[float] = 0.2

    def __init__(self, backend: str = "") -> None:
        super().__init__()
        added = type(self).added
        self.compiled = [
            torch.compile(added, backend=backend) if backend else added
        ]  # a list is no attribute that is copied

    @staticmethod
    def added(x: Tensor, rate: float) -> Tensor:
        return x + nn.functional.dropout(x, rate, training=True) if rate else x + x

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.compiled[0](super().forward(input_ids), type(self).rate)


def _whole_by_itself(backend: str) -> nn.Module:
    return torch.compile(DrawsInMany(), backend=backend) if backend else DrawsInMany()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning", "ignore:Dynamo does not know:UserWarning")
@pytest.mark.parametrize("build", [_whole_by_itself, DropsInItsOwnGraph])
def test_what_a_model_compiles_itself_draws_the_masks_of_one_device(build: Callable[[str], nn.Module]) -> None:
    job = JOB.model_copy(update={"run": JOB.run.model_copy(update={"compile": "none"})})
    losses = []
    for backend in ("aot_eager", ""):
        torch._dynamo.reset()
        source = Source(lambda backend=backend: build(backend), loss_of(job), optimizer_of(job))
        run = Run(source, Layout(microbatch=2), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))
        losses.append([run.step(batch).loss for batch in samestep.batches(Tokens(), job)])
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == len(losses[0])


class NormedOverBatch(nn.Module):
    """A block with a batch norm, whose statistics a forward writes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, nn.BatchNorm1d(10)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)


def _with_batch_norms() -> nn.Module:
    torch.manual_seed(0)
    model = Plain()
    model.blocks = nn.ModuleList(map(NormedOverBatch, model.blocks))
    return model


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_blocks_with_batch_norms_have_the_statistics_of_code_that_is_not_compiled(recompute: str) -> None:
    """A batch norm has no graph where a block is repeated: it writes into buffers, or copies of them, that the repetition reads."""
    found = []
    for job in (JOB, Job(**{**JOB.model_dump(), "run": {}})):
        source = Source(_with_batch_norms, loss_of(job), optimizer_of(job))
        run = Run(source, Layout(recompute=recompute), job, RankInfo(0, 0, 1, 1, torch.device("cpu")))
        losses = [run.step(batch).loss for batch in samestep.batches(Tokens(), job)]
        found.append((losses, run.state_dict()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, value in found[0][1].items():
        assert torch.allclose(value, found[1][1][name], rtol=1e-5, atol=1e-6), name


def test_an_unknown_backend_is_refused():
    with pytest.raises(JobError, match=r"'inducter' is not a backend .*did you mean 'inductor'"):
        stepped(Plain, with_backend("inducter"))


def test_a_mode_is_given_to_inductor_and_stands_in_the_line(monkeypatch):
    given: list[dict[str, Any]] = []

    def keeping(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
        given.append(options)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: keeping)
    run = {"compile": "blocks", "compile_mode": "max-autotune-no-cudagraphs"}
    _, said = stepped(Plain, Job(**{**clipped("float32").model_dump(), "run": run}))
    assert said[0].startswith(
        "run.compile: 3 blocks as 1 graph of inductor (max-autotune-no-cudagraphs), with 0 islands"
    )
    options = {"config_patches": {"max_autotune": True, "coordinate_descent_tuning": True}}
    assert given == [options, options]  # of the blocks and of the loss


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"compile_mode": "max-autotun"}, r"run\.compile_mode.*max-autotune"),
        (
            {"compile_mode": "max-autotune-no-cudagraphs", "compile_backend": "aot_eager"},
            r"'aot_eager' takes no mode. Set compile_backend = 'inductor'",
        ),
        ({"compile_mode": "reduce-overhead"}, r'"reduce-overhead" was removed in this version; use compile_mode = "default"'),
        ({"compile_mode": "max-autotune"}, r'"max-autotune" was removed in this version; use compile_mode = "max-autotune-no'),
        ({"compile": "model"}, r'run\.compile: compile = "model" was removed in this version; use compile = "blocks"'),
    ],
)  # fmt: skip
def test_modes_that_no_backend_takes_are_refused(run, message):
    with pytest.raises(JobError, match=message):
        Job(**{**clipped("float32").model_dump(), "run": run})


def test_what_differs_from_step_to_step_is_in_no_cuda_graph():
    for name in ("drop_mask", "all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.samestep, name).default.tags


def test_a_split_backward_is_refused_by_name():
    spec = make_run(0, 1, "llama", "dp=1", clipped())._own.source.prepared.spec
    with pytest.raises(LayoutError, match=r"run\.compile = 'blocks'.*Use .*schedule=1f1b, or run\.compile = 'none'"):
        program_of(spec, JOB, Layout("dp=1 pp=2 schedule=zero-bubble microbatch=2"))


# -- crossings -------------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The group of a process by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.distributed_c10d.GroupMember.WORLD
    dist.destroy_process_group()


class _Written(nn.Module):
    """Two crossings of one tensor, which is written in between or not."""

    def __init__(self, first: RankCrossing, second: RankCrossing, write: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.second, self.write = first, second, write

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2.0
        first = self.first(x) * 3.0
        self.write(x)
        return first + self.second(x)


@pytest.mark.parametrize(
    ("write", "number"),
    [
        (lambda x: None, 1),
        (lambda x: x.relu(), 1),
        (lambda x: x.view(-1).mul_(2.0), 2),
        (lambda x: x.__setitem__(0, 1.0), 2),
        (lambda x: torch.nn.functional.relu(x, inplace=True), 2),
        (lambda x: torch.add(x, 1.0, out=x), 2),
    ],
)
def test_crossings_of_one_tensor_are_one_in_a_graph_unless_it_is_written(write, number, alone):
    crossings_ = [RankCrossing(name, alone, "gather", "scatter", lambda x: x, is_shared=True) for name in ("q", "k")]
    kept: list[torch.fx.Graph] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        share(graph.graph)
        kept.append(graph.graph)
        graph.recompile()
        return graph.forward

    torch.compiler.allow_in_graph(cross)
    module = _Written(*crossings_, write)
    x = torch.arange(6.0, dtype=torch.float64).view(1, 2, 3)
    with torch.no_grad():
        assert torch.equal(torch.compile(module, backend=keep)(x.clone()), module(x.clone()))
    assert sum(node.target is cross for graph in kept for node in graph.nodes) == number


@pytest.mark.parametrize(
    ("name", "more"), [("all_reduce", ()), ("all_gather", (1,)), ("reduce_scatter", (1,)), ("all_to_all", ())]
)
def test_operations_between_ranks_return_what_a_compiler_is_told(alone: dist.ProcessGroup, name, more):
    """The shapes, the strides and the dtypes of results, and that none shares memory with what is given."""
    crossing = RankCrossing("a swap", alone, "swap", "swap", lambda x: x)
    tensor = torch.randn(2, 4, 6, 8, dtype=torch.bfloat16).transpose(0, 1)
    for place in (crossing.place, torch.tensor(-1)):
        given = (tensor, *more, place)
        operation = getattr(torch.ops.samestep, name)
        torch.library.opcheck(operation, given, test_utils=("test_schema", "test_faketensor"))
