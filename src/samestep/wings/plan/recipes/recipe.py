"""A `Recipe`: one layout in the words of another framework, and what that framework cannot do of it.

A framework is a `Framework`: a function that says each word of a layout in its own words, and one that writes all of them as a
file. A word of the layout of which it says nothing is one that it lacks, so that no word of a layout can be passed over.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.spec import ModelSpec
from samestep.strategies import pipeline

Settings = Mapping[str, Any]
"""Settings of a framework by name, in the order in which they are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFacts:
    """The facts of a recipe: a layout for a job, on nodes of so many devices."""

    job: Job
    layout: Layout
    model: ModelSpec
    devices_per_node: int

    @property
    def global_batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.job.train.global_batch

    @property
    def rank_batch(self) -> int:
        """Samples of a step that the rank with the most of them reads."""
        return -(-self.global_batch // self.layout.dp)

    @property
    def microbatch(self) -> int:
        """Samples of a micro-batch."""
        return min(self.layout.microbatch or self.rank_batch, self.rank_batch)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step on each rank, which frameworks call gradient accumulation steps."""
        return -(-self.rank_batch // self.microbatch)

    @property
    def num_blocks(self) -> int:
        """Number of the model's blocks, without what comes before and after them."""
        return sum(layer.is_block for layer in self.model.layers)

    @property
    def chunk_blocks(self) -> tuple[int, ...]:
        """Blocks of each stage, or with virtual stages of each of its chunks, in the order of the model."""
        count = self.layout.pp * self.layout.virtual_stages
        if count == 1:
            return (self.num_blocks,)
        chunks = pipeline.chunks_of(self.model, count, self.layout.tp > 1)
        return tuple(sum(self.model.layers[index].is_block for index in chunk) for chunk in chunks)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.layout.world_size // self.devices_per_node)

    @property
    def uneven(self) -> str:
        """Why a framework whose micro-batches are all equal cannot cut this batch; empty if it can."""
        product = self.layout.dp * self.microbatch * self.num_microbatches
        if product == self.global_batch:
            return ""
        return (
            f"a batch of {self.global_batch} samples in micro-batches of {self.microbatch} on {self.layout.dp} data ranks leaves "
            f"smaller ones, and here all are equal. Use {product} samples"
        )

    def torchrun(self, script: str, words: Iterable[str] = ()) -> str:
        """Return the line that starts a script on each node, with one process for each device."""
        local = min(self.devices_per_node, self.layout.world_size)
        several = ["--rdzv-backend=c10d", '--rdzv-endpoint="$HEAD:29500"'] if self.nodes > 1 else ["--standalone"]
        start = ["torchrun", f"--nnodes={self.nodes}", f"--nproc-per-node={local}", *several, script]
        return " \\\n    ".join([" ".join(start), *words]) + "\n"


@dataclass(frozen=True, slots=True)
class Said:
    """One word of a layout in the words of a framework: settings, what has to be written in code, and what is different."""

    settings: Settings | None = None
    in_code: str = ""
    """What has to be written in code, since no setting does it."""
    lacks: str = ""
    """What the framework cannot do of the word, and what is nearest."""
    differs: str = ""
    """What it does in another way, so that the prediction of time or memory does not carry over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework: its name, how it says the words of a layout, and the file that it reads."""

    name: str
    suffix: str
    """Suffix of its file, such as `.yaml`."""
    comment: str
    """What begins a line of a comment in its file; empty where the file can hold none."""
    words: Callable[[RecipeFacts], Mapping[str, Said]]
    """What it says for each word of a layout that it knows, by the name of the field."""
    write: Callable[[RecipeFacts, dict[str, Any]], str]
    """Write the settings of all words as its file."""
    differs: tuple[str, ...] = ()
    """What of a prediction never carries over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A layout in the words of a framework."""

    framework: str
    layout: Layout
    suffix: str
    has_comments: bool
    """Whether the file can hold comments."""
    text: str
    """The file, with the notes below as its first comments where it can hold comments."""
    in_code: tuple[str, ...]
    lacks: tuple[str, ...]
    differs: tuple[str, ...]
    instead: tuple[str, ...] = ()
    """Of several layouts the fastest that the framework can do in whole, a line, if it cannot do this one."""

    @property
    def is_whole(self) -> bool:
        """Whether the framework can do all of the layout."""
        return not self.lacks

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for people: parts that have to be written in code, that the framework lacks, and that it does in another way."""
        groups = {"in code": self.in_code, "cannot": self.lacks, "differs": self.differs}
        return tuple(f"{kind}: {line}" for kind, lines in groups.items() for line in lines)

    def to_record(self) -> dict[str, Any]:
        """Return the recipe as JSON values."""
        lists = {"in_code": self.in_code, "cannot": self.lacks, "differs": self.differs, "instead": self.instead}
        return {"framework": self.framework, "layout": str(self.layout), "text": self.text} | {
            name: list(lines) for name, lines in lists.items()
        }


def recipe_of(framework: Framework, job: Job, layout: Layout, model: ModelSpec, hardware: Hardware) -> Recipe:
    """Return a layout in the words of a framework."""
    facts = RecipeFacts(job=job, layout=layout, model=model, devices_per_node=hardware.devices_per_node)
    known = framework.words(facts)
    said = [known.get(name, Said(lacks=f"{_word_of(name, facts)} has no word here")) for name in _words_given(layout)]
    settings: dict[str, Any] = {}
    for statement in said:
        settings.update(statement.settings or {})
    lacks = [facts.uneven, *(word.lacks for word in said)]
    notes = Recipe(
        framework=framework.name,
        layout=layout,
        suffix=framework.suffix,
        has_comments=bool(framework.comment),
        text="",
        in_code=_without_empty(word.in_code for word in said),
        lacks=_without_empty(lacks),
        differs=_without_empty([*(word.differs for word in said), *_not_written(job), *framework.differs]),
    )
    return _with_text(notes, framework, framework.write(facts, settings))


def _not_written(job: Job) -> Iterable[str]:
    """Yield a line for each word of the job that changes seconds or bytes, and that no file has: it is neither layout nor precision."""
    numerics = job.numerics
    for name in type(numerics).model_fields:
        value = getattr(numerics, name)
        if name != "precision" and value != getattr(type(numerics)(), name):
            yield f"numerics.{name} = {value!r} is not written, and the prediction counts it"
    if job.model.lora is not None or job.model.freeze:
        yield "adapters and frozen weights are not written, and the prediction counts gradients of the trained weights alone"


def _with_text(recipe: Recipe, framework: Framework, body: str) -> Recipe:
    """Return the recipe with the text of its file, whose first comments are its notes."""
    head = [f"{recipe.layout}, as a config of {framework.name}. Model, data, optimizer and learning rate stay yours."]
    lines = [*head, *recipe.notes] if framework.comment else []
    comments = "".join(f"{framework.comment} {line}\n" for line in lines)
    return replace(recipe, text=comments + body)


def _word_of(name: str, facts: RecipeFacts) -> str:
    """Return a word of the layout, the precision or the clipping as it was given."""
    of_job = {"precision": facts.job.numerics.precision, "clip_norm": facts.job.optimizer.clip_norm}
    value = of_job[name] if name in of_job else getattr(facts.layout, name)
    return name if value is True else f"{name}={value}"


def _words_given(layout: Layout) -> list[str]:
    """Return the names of the layout's words that say something, and those of the batch and the precision in front of them."""
    default = Layout()
    names = [field.name for field in fields(Layout) if getattr(layout, field.name) != getattr(default, field.name)]
    return list(dict.fromkeys(["dp_replicate", "dp_shard", "zero", "microbatch", "precision", "clip_norm", *names]))


def _without_empty(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(line for line in dict.fromkeys(lines) if line)


def flags(settings: Settings) -> list[str]:
    """Return settings as words of a command line; a value of True is a switch, and a list is several values."""
    words = []
    for name, value in settings.items():
        values = value if isinstance(value, (list, tuple)) else [] if value is True else [value]
        words.append(" ".join([name, *(shlex.quote(str(value)) for value in values)]))
    return words
