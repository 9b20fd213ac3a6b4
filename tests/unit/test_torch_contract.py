"""The names of torch's that samestep uses and torch does not promise: they must be there, and do what is relied on.

`make matrix` runs this file on every torch that it is given, so that a release which moves one of them is named here, and
not by a run. FSDP2 is private to `runtime/weights`; the others stand in `building/torch_seams.py`, or are listed with the file that needs them.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samestep
from samestep.building import torch_seams
from samestep.runtime.axes.recompute import in_our_modes
from tests import fsdp_sources

PRIVATE: dict[str, tuple[Any, str]] = {
    "runtime/axes/compiled_blocks.py, calls that leave a graph": (nn.Module, "_compiled_call_impl _call_impl"),
    "runtime/axes/recompute.py": (
        importlib.import_module("torch.utils.checkpoint"),
        "_checkpoint_without_reentrant_generator CheckpointFunction noop_context_fn create_selective_checkpoint_contexts",
    ),
    "runtime/weights/sharded.py": (importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_api"), "ReduceScatter"),
    "runtime/weights/fsdp_units.py": (importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common"), "TrainingState"),
}  # fmt: skip
SEAMS = {
    "building/torch_seams.py": r"torch\._(C|dynamo|guards|inductor)\b|torch\.(overrides|utils\._python_dispatch|_C\b).*",
    "trees.py": r"torch\.utils\._pytree",
    "runtime/weights/": r"torch\.distributed\.fsdp\..*",
}
"""The file, or the folder, that alone may name a private part of torch."""
WALKERS = ("trees.py", "runtime/processes/messages.py", "datasets/values.py")
"""The files that may look for tensors in nested containers: the walker, the form in which values are written, and the values of a
batch, in which a list may hold one item for each sample."""


NEEDING = {
    "samestep.kernels.flash_dropout": "triton",
    "samestep.kernels.hashed_dropout": "triton",
    "samestep.kernels.remainder_bits": "triton",
}
"""Modules that need a package which is not always installed."""


@pytest.mark.parametrize("where", PRIVATE)
def test_a_name_that_a_file_needs_is_there(where):
    home, names = PRIVATE[where]
    assert not [name for name in names.split() if not hasattr(home, name)]


def test_the_compiler_has_what_compiled_blocks_need():
    import torch._dynamo

    assert hasattr(torch._dynamo.exc, "TorchDynamoException")
    assert hasattr(torch._dynamo, "OptimizedModule")
    assert callable(torch._dynamo.lookup_backend)
    assert callable(torch._dynamo.eval_frame.skip_code)
    assert "max_autotune" in torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert torch._dynamo.config.recompile_limit > 0
    assert torch._dynamo.config.accumulated_recompile_limit > 0
    assert "frame_id" in inspect.signature(torch._guards.CompileId).parameters
    assert "reason" in inspect.signature(torch.compiler.disable).parameters
    assert torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint in (False, True)
    assert {"FUNCTIONAL", "PROXY"} <= set(dir(torch._C._TorchDispatchModeKey))
    assert torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None


def _source(root: Path) -> list[tuple[Path, str]]:
    return [(path, path.read_text(encoding="utf-8")) for path in root.rglob("*.py")]


def test_private_parts_of_torch_are_named_in_one_place_each():
    root = Path(samestep.__file__).parent
    elsewhere = [
        f"{path.relative_to(root)}:{node.lineno} {name}"
        for path, text in _source(root)
        if re.search(r"torch[\w.]*\._|torch\.overrides", text)  # before it is parsed, which takes the most time
        for node in ast.walk(ast.parse(text))
        for name in _private_parts(node)
        if not any(str(path.relative_to(root)).startswith(home) and re.match(of, name) for home, of in SEAMS.items())
    ]
    assert elsewhere == []


def test_nested_tensors_are_walked_in_one_file():
    root = Path(samestep.__file__).parent
    elsewhere = [
        f"{path.relative_to(root)}:{node.lineno} {node.name}"
        for path, text in _source(root)
        if re.search(
            r"\bis_tensor\(|isinstance\([^:]{0,200}?\bTensor\b", text
        )  # before it is parsed, which takes the most time
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and _walks_tensors(node) and str(path.relative_to(root)) not in WALKERS
    ]
    assert not elsewhere, "; ".join(elsewhere)


@pytest.mark.parametrize(
    ("code", "walks"),
    [
        ("def f(x):\n if isinstance(x, Tensor): return [x]\n return [y for z in x for y in f(z)] if isinstance(x, list) else []", 1),
        ("def f(x):\n if torch.is_tensor(x): return 1\n return is_dataclass(x) and all(map(f, vars(x).values()))", 1),
        ("def f(x):\n return [x] if isinstance(x, Tensor) else isinstance(x, list) and len(x)", 0),
        ("def f(x):\n return [f(y) for y in x] if isinstance(x, list | tuple) else x", 0),
    ],
)  # fmt: skip
def test_a_walker_of_tensors_is_known_by_its_code(code, walks):
    assert _walks_tensors(ast.parse(code).body[0]) == bool(walks)


def _walks_tensors(function: ast.AST) -> bool:
    """Return whether a function calls itself, and looks for both tensors and containers."""
    names, asked = set(), set()
    for node in ast.walk(function):
        names |= {getattr(node, "id", getattr(node, "attr", ""))}
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            asked |= {called} & {"is_tensor", "is_dataclass"}
            if called == "isinstance":
                asked |= {getattr(one, "id", getattr(one, "attr", "")) for one in ast.walk(node.args[1])}
    containers = {"tuple", "list", "dict", "Mapping", "Sequence", "is_dataclass"}
    return bool(function.name in names and asked & {"Tensor", "is_tensor"} and asked & containers)


def _private_parts(node: ast.AST) -> list[str]:
    """Return the private modules of torch that a node of a syntax tree imports or reaches into."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        is_private = "._" in str(node.module) or node.module == "torch.overrides"
        return [f"{node.module}.{one.name}" for one in node.names if is_private and "._" in f"{node.module}.{one.name}"]
    if isinstance(node, ast.Attribute):
        name = ast.unparse(node)
        return (
            [name]
            if re.match(r"torch\._(C|dynamo|guards|jit|inductor|functorch|subclasses|higher_order_ops)\b", name)
            else []
        )
    return []


def test_every_module_imports_on_this_torch():
    for found in pkgutil.walk_packages(samestep.__path__, "samestep."):
        if not found.name.endswith("__main__") and (
            found.name not in NEEDING or importlib.util.find_spec(NEEDING[found.name])
        ):
            importlib.import_module(found.name)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_what_a_model_checkpoints_is_repeated_in_the_modes_of_its_forward(is_reentrant):
    entered: list[str] = []

    @contextmanager
    def entering(when: str) -> Iterator[None]:
        entered.append(when)
        yield

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return entering("forward"), entering("recomputation")

    given = torch.randn(3, requires_grad=True)
    with in_our_modes(contexts, plainly=False, detached=False):
        torch.utils.checkpoint.checkpoint(torch.sin, given, use_reentrant=is_reentrant).sum().backward()
    assert entered == ["forward", "recomputation"]
    assert given.grad is not None
    assert torch.equal(given.grad, given.cos())


# -- FSDP2 -----------------------------------------------------------------------------------------


def test_what_is_reached_of_fsdp2_is_in_its_sources_and_called_by_its_signatures(tmp_path: Path) -> None:
    held, copy = Path(torch.__file__).parents[1], tmp_path / "torch/distributed/fsdp/_fully_shard"
    assert {home for home, _ in fsdp_sources.reached()} == {*fsdp_sources.HOLDERS.values()}
    assert fsdp_sources.faults(held) == []
    copy.mkdir(parents=True)
    for path in (held / copy.relative_to(tmp_path)).glob("*.py"):
        text = path.read_text(encoding="utf-8").replace("_unsharded_param", "_gathered_param")
        (copy / path.name).write_text(text.replace("def unshard(self, ", "def unshard(self, now, "), encoding="utf-8")
    assert fsdp_sources.faults(tmp_path) == ["FSDPModule.unshard needs {'now'}", "FSDPParam has no _unsharded_param"]


def test_a_module_whose_forward_is_compiled_is_seen() -> None:
    class Decorated(torch.nn.Linear):
        forward = torch.compile(torch.nn.Linear.forward, backend="eager")

    called, replaced = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    called.compile(backend="eager")
    replaced.forward = torch.compile(replaced.forward, backend="eager")
    compiled = [Decorated(2, 2), called, replaced, torch.compile(torch.nn.Linear(2, 2), backend="eager")]
    assert all(map(torch_seams.is_compiled, compiled))
    assert not torch_seams.is_compiled(torch.nn.Linear(2, 2))
