"""Code blocks that are parts of a script: each runs with the names that the page takes as given, and what it defines is called.

A call of `samestep.parallelize` is only bound to its parameters, since a page shows many: `tests/parity` trains such runs. All else is
samestep's own.
"""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import samestep

DOCS = Path(__file__).parents[2] / "docs"
B, T, V = 4, 5, 7
"""Samples, tokens of each, and classes."""


class Part(NamedTuple):
    """A block of a page, found by some words of it."""

    page: str
    words: str
    given: Mapping[str, Any]
    """Names that the page takes as given."""
    use: Callable[[dict[str, Any]], Any] = lambda names: None
    """Calls what the block defines."""


def _parallelize(*arguments: Any, **options: Any) -> SimpleNamespace:
    inspect.signature(samestep.parallelize).bind(*arguments, **options)
    return SimpleNamespace()


SAMESTEP = SimpleNamespace(
    **{name: getattr(samestep, name) for name in samestep.__all__} | {"parallelize": _parallelize}
)


def _classes(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % V


def _log_prob(output: Tensor, labels: Tensor) -> Tensor:
    return -F.cross_entropy(output, labels, reduction="none")


class Recorded:
    """The calls of a run in a loop by hand."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(samestep.Run, name)

        def call(*arguments: Any, **options: Any) -> Any:
            inspect.signature(method).bind(self, *arguments, **options)
            self.calls.append(name)
            return {"weight": torch.tensor([-3.0, 3.0])} if name == "gradients" else None

        return call


MODEL = nn.Linear(3, V)
PAIR = {
    side: torch.ones(B, 3) for side in ("chosen", "rejected")
} | {f"{side}_labels": _classes(B) for side in ("chosen", "rejected")}  # fmt: skip
USUAL = {
    "model": MODEL,
    "optimizer": torch.optim.AdamW(MODEL.parameters()),
    "job": samestep.Job(),
    "build": lambda: MODEL,
    "loss": "model",
}
FEATURES = (torch.ones(B, 3), torch.ones(B, 3), torch.tensor(2.0))
RUN = Recorded()

PARTS = (
    Part("losses", "an item of the DataLoader", {}, lambda names: names["loss"](torch.ones(B, T, V), (None, _classes(B, T)))),
    Part("losses", "label_smoothing=0.1", USUAL | {"weights": torch.ones(V)}),
    Part("losses", "focal(", USUAL | {"focal": F.cross_entropy}, lambda names: names["loss"](torch.ones(B, V), {"labels": _classes(B)})),
    Part(
        "losses", "NO_OBJECT", {"NO_OBJECT": 0},
        lambda names: names["loss"](
            {"classes": torch.ones(B, T, V), "boxes": torch.ones(B, T, 4)}, {"classes": _classes(B, T), "boxes": torch.zeros(B, T, 4)}
        ),
    ),
    Part("losses", '"accuracy": (right', {}, lambda names: names["loss"](torch.ones(B, V), {"labels": _classes(B)})),
    Part("losses", "def clip_loss", USUAL, lambda names: names["clip_loss"](FEATURES, {})),
    Part("losses", "def info_nce", {}, lambda names: names["info_nce"](FEATURES[:2], {})),
    Part("losses", "samestep.batch_cat", {"target": torch.ones(B, 3), "one_hot": torch.ones(B, V), "key": torch.ones(B, 3)}),
    Part("losses", "samestep.after_step", {"self": SimpleNamespace(centre=torch.zeros(3)), "target": torch.ones(B, 3)}),
    Part("losses", "transformers_model", USUAL | {"transformers_model": MODEL}),
    Part(
        "losses", "start_logits", {},
        lambda names: names["loss"](
            {"start_logits": torch.ones(B, T), "end_logits": torch.ones(B, T)}, {"start": _classes(B) % T, "end": _classes(B) % T}
        ),
    ),
    Part(
        "losses", '"policy": policy', USUAL | {"policy": MODEL, "reference": MODEL, "log_prob": _log_prob},
        lambda names: names["forward"]({"policy": MODEL, "reference": MODEL}, PAIR),
    ),
    Part("losses", '"student": build', USUAL | {"forward": lambda models, batch: None}),
    Part("losses", "view_1", USUAL),
    Part("optimizers", '"matrices": muon', USUAL | {"muon": torch.optim.SGD, "adamw": torch.optim.AdamW}),
    Part("optimizers", "gradient.clamp_", {"run": RUN, "batch": None}),
    Part("own-modules", "tensor_plan = ", {}, lambda names: _plan(names["tensor_plan"])),
    Part(
        "python-api", "class Crops", {},
        lambda names: [
            read(_crops(names["Crops"]))
            for read in (lambda data: data[0], lambda data: data.sample(1, torch.Generator()), lambda data: data.read([0, 2]))
        ],
    ),
)  # fmt: skip


def _plan(styles: Mapping[str, str]) -> None:
    assert {*styles.values()} <= {"vocab", "qkv", "column", "row", "gather", "sum"}


def _crops(kind: Any) -> Any:
    data = kind()
    data.images, data.labels = torch.ones(B, 8, 8), _classes(B)
    return data


def text_of(part: Part) -> str:
    (text,) = (text for text in _texts(part.page) if part.words in text)
    return text


def _texts(page: str) -> Iterator[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"^ *```python\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        yield textwrap.dedent(block)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page}, {part.words}")
def test_a_part_of_a_script_runs(part: Part) -> None:
    names: dict[str, Any] = {
        "samestep": SAMESTEP,
        "torch": torch,
        "nn": nn,
        "F": F,
        "functools": functools,
        **part.given,
    }
    exec(compile(text_of(part), f"{part.page}.md", "exec"), names)
    part.use(names)


LOOPS = (
    ("optimizers", "-def closure", "run.step"),
    ("optimizers", '"update_hessian"', "run.call"),
    ("optimizers", 'into="d"', "run.update"),
)


def test_calls_of_loops_fit_the_methods_of_a_run() -> None:
    """The lines of a difference that come in are run over one batch."""
    text = (DOCS / "optimizers.md").read_text(encoding="utf-8")
    found = re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for _, words, call in LOOPS:
        (difference,) = (block for block in found if words in block)
        lines = [line[1:] for line in difference.splitlines() if line[0] in " +"]
        run = Recorded()
        names = {
            "run": run,
            "batch": None,
            "batches": [None],
            "bs": 8,
            "step": 10,
            "d_loss": len,
            "g_loss": len,
            "sampled_loss": len,
        }
        exec(textwrap.dedent("\n".join(lines)), names)
        assert call.removeprefix("run.") in run.calls
