"""Ranks that would run something else than each other are named before they wait for each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import samestep
from samestep.datasets import batches, open_dataset, stamps
from samestep.datasets.imported import loaded_sources
from samestep.errors import LayoutError
from samestep.runtime.processes import messages
from samestep.runtime.processes.join import RankInfo
from samestep.runtime.run_batches import TrainedData
from tests.laboratory import clipped, in_loop, job_of, make_run
from tests.models import VOCABULARY, Tokens
from tests.pool import pool, telling


class Asking(nn.Module):
    """A model whose rank 1 has one more operation, or that leaves out layers at random."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.kind = kind

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.kind == "rank" and torch.distributed.get_rank() == 1:
                x = block(x)
            if self.kind == "draw" and float(torch.rand(())) < 0.5:
                continue
            x = block(x).tanh()
        return self.head(x)


class Divided(Tokens):
    """A data set that is divided among the ranks already, into parts of equal or of other lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __len__(self) -> int:
        return super().__len__() // (2 + (self._kind == "lengths") * torch.distributed.get_rank())

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(2 * index + torch.distributed.get_rank())


@telling
def divided(rank: int, world: int, layout: str, kind: str) -> None:
    """Take the steps of a run whose ranks have their own parts of the data; return the error."""
    run = make_run(rank, world, "llama", layout, clipped())
    for batch in batches(Divided(kind) if kind else Tokens(), clipped()):
        run.step(batch)


@pytest.mark.parametrize("layout", ["dp=2 zero=3", "tp=2", "pp=2 microbatch=4"])
def test_a_data_set_that_is_divided_among_the_ranks_is_refused(layout: str) -> None:
    for found in pool(2).run(divided, layout, "samples"):
        assert "rank 1 reads another sample" in found
        assert "Use the whole data set on every rank" in found


def test_parts_of_other_lengths_are_refused_and_one_data_set_is_right() -> None:
    for found in pool(2).run(divided, "dp=2", "lengths"):
        assert "rank 1 reads other indices of the data set than rank 0" in found
    assert pool(2).run(divided, "dp=2", "") == ["", ""]


@telling
def own_loop(rank: int, world: int, kind: str) -> None:
    """Take the steps of a loop of one's own on ranks whose generators are in other states; return the error."""
    torch.manual_seed(1 + rank)
    job = clipped()
    run = samestep.parallelize(
        lambda rank=rank: Asking(kind),  # the ranks of a session share the findings of code that is the same
        "cross_entropy",
        functools.partial(torch.optim.SGD, lr=0.1),
        layout="dp=2",
        job=in_loop(job),
    )
    for batch in batches(Tokens(), job):
        run.step(batch)


@telling
def started(rank: int, world: int, kind: str) -> None:
    """Prepare a run whose rank 1 is given another layout or job; return the error."""
    layout = "dp=2 zero=1" if kind == "layout" and rank else "dp=2"
    job = clipped(global_batch=16) if kind == "job" and rank else clipped()
    make_run(rank, world, "llama", layout, job).prepare({name: one[None] for name, one in Tokens()[0].items()})


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (started, "layout", "rank 1 has another layout than rank 0 ('dp=2 zero=1' and 'dp=2')"),
        (started, "job", "rank 1 has another job than rank 0"),
        (own_loop, "rank", "rank 1 has another traced model than rank 0"),
        (own_loop, "none", ""),
    ],
)
def test_ranks_that_differ_are_named_on_every_rank(function: Callable[..., str], kind: str, text: str) -> None:
    for found in pool(2).run(function, kind):
        assert (text in found) if text else not found


def on_two_hosts(rank: int, world: int, kind: str) -> str:
    """Prepare a run whose ranks are on two hosts, one of which has another file, or one file more."""
    found = {"samestep": "a", "train": "b"}
    if rank and kind:
        found["train" if kind == "other" else kind] = "c"
    job = job_of("float64", 4, run={"ranks_per_node": 1})
    before, messages.loaded_sources = messages.loaded_sources, lambda: found
    try:
        run = make_run(rank, world, "llama", "dp=2", job)
        run.prepare({name: one[None] for name, one in Tokens()[0].items()})
    except LayoutError as error:
        return str(error)
    finally:
        messages.loaded_sources = before
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("", ""),
        ("of this host alone", ""),
        ("other", "ranks 1 and 0 have different train. Use the same files on all hosts"),
        ("samestep", "ranks 1 and 0 have different samestep"),
    ],
)
def test_hosts_with_other_code_are_named(kind: str, text: str) -> None:
    for found in pool(2).run(on_two_hosts, kind):
        assert text in found if text else not found


def test_the_users_own_modules_are_compared() -> None:
    found = loaded_sources()
    assert {"samestep", "tests.models"} <= found.keys()
    assert not {"torch", "json", "samestep.errors"} & found.keys()


@telling
def with_data(rank: int, world: int, texts: list[str], folder: str) -> None:
    """Take the stamp of a file that each host has for itself."""
    file = Path(folder) / str(rank) / "corpus.txt"
    file.parent.mkdir()
    file.write_text(texts[rank])
    place = RankInfo(rank, 0, world, 1, torch.device("cpu"))
    source = job_of("float64", 4, data={"source": f"text:{file}"})
    TrainedData(source, place).is_of(lambda: stamps.of_job(source, open_dataset(source)))


@pytest.mark.parametrize(
    ("other", "text"),
    [(0, ""), (1, "the host of rank 1 has other data than the host of rank 0"), (2, "Use the same on all hosts")],
)
def test_hosts_with_other_data_are_named(other: int, text: str, tmp_path: Path) -> None:
    whole = "some words of a corpus " * 40
    texts = [whole, {0: whole, 1: whole.replace("words", "wordz", 1), 2: whole + "more"}[other]]
    for found in pool(2).run(with_data, texts, str(tmp_path)):
        assert text in found if text else not found
