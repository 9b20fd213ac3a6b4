"""Nothing that came over a socket or from a file is unpickled: a search of the source, each use with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import samestep

SOURCE = Path(samestep.__file__).parent
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "rpc_sync", "rpc_async", "eval", "exec", "unsafe_load", "load_with_pickle",
}  # fmt: skip
ALLOWED = {
    (
        "runtime/processes/local_workers.py",
        "pickle",
    ): "what workers that this process started tell over inherited pipes",
    ("runtime/processes/whereabouts.py", "pickle"): "the other end of these pipes",
    (
        "runtime/checkpoints/torch_checkpoint.py",
        "pickle",
    ): "an unpickler that makes records of torch's metadata, and refuses every other name",
    ("state/fingerprints.py", "pickle"): "writes only: a stream that is hashed",
}


def uses(source: str) -> Iterator[str]:
    """Every word of a file by which something could be unpickled or run."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name for one in node.names if (name := one.name.partition(".")[0]) in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from (one.name for one in node.names if one.name in CALLS)
            if (node.module or "").partition(".")[0] in MODULES:
                yield str(node.module)
        elif isinstance(node, ast.Call):
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[str]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    is_builtin = isinstance(function, ast.Name) or name not in ("eval", "exec")  # a module has a method eval
    if name in CALLS and is_builtin:
        yield name
    owner = function.value if isinstance(function, ast.Attribute) else None
    if name == "load" and isinstance(owner, ast.Name) and owner.id in ("torch", "np", "numpy"):
        safe = {"torch": ("weights_only", True), "np": ("allow_pickle", False)}[owner.id.replace("numpy", "np")]
        given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        if given.get(safe[0]) is not safe[1]:
            yield f"{owner.id}.load without {safe[0]}={safe[1]}"


def test_the_source_unpickles_nothing_else() -> None:
    found = {
        (str(path.relative_to(SOURCE)), use) for path in SOURCE.rglob("*.py") for use in uses(path.read_text("utf-8"))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "torch.load('x', weights_only=False)",
        "dist.all_gather_object(a, b)", "from torch.distributed import broadcast_object_list as b", "np.load('x')",
        "exec('1')", "eval(text)",
    ],
)  # fmt: skip
def test_a_use_is_found(text: str) -> None:
    assert [*uses(text)]


@pytest.mark.parametrize(
    "text", ["torch.load(x, weights_only=True)", "model.eval()", "json.load(file)", "np.load(x, allow_pickle=False)"]
)
def test_what_runs_nothing_is_no_use(text: str) -> None:
    assert not [*uses(text)]
