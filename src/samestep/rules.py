"""The version of the rules by which a job's words become numbers, where a later version of samestep gives other numbers.

A resolved job and a manifest hold it as `numerics.rules`; without the key it is 1. A change of a rule stands here, with what it
concerns, so that a run from before which uses it is not resumed under another rule, and every other run goes on. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

RULES: Final = 2
FIRST = 1
"""The version of a job or manifest that names none."""

Tables = Mapping[str, Mapping[str, Any]]
"""A job as plain tables, as a manifest holds it."""


@dataclass(frozen=True, slots=True)
class RuleChange:
    """A rule that gives other numbers since a version."""

    since: int
    what: str
    """The computation that changed, as the rest of the sentence "since rules 2 ..."."""
    works: str
    """The way to finish a run that began under earlier rules."""
    concerns: Callable[[Tables], bool]
    """Returns whether a job uses the rule."""


def _sources(job: Tables) -> tuple[str, ...]:
    """Return the data sources of a job."""
    data = job.get("data", {})
    return (
        str(data.get("source", "")),
        *map(str, data.get("mixture") or {}),
        *map(str, (data.get("held_out_sets") or {}).values()),
    )


def _has_source(job: Tables, *kinds: str) -> bool:
    return any(source.startswith(kinds) for source in _sources(job))


def _labels_own_data(job: Tables) -> bool:
    """Return whether the user's dataset gives the labels of a model of transformers that predicts the next token."""
    model = job.get("model", {})
    is_causal = str(model.get("source", "")).startswith("hf:") and model.get("task", "causal") in (
        "causal",
        "vision-language",
    )
    sources = (source for source in _sources(job) if ":" in source and source.partition(":")[0] not in _KINDS)
    return is_causal and any(sources)


def _rounds_base(job: Tables) -> bool:
    return (job.get("model", {}).get("lora") or {}).get("base") == "nf4"


_KINDS = ("text", "tokens", "jsonl", "parquet", "hf", "images")
_WORKS = "the version that wrote it finishes the run, and --init-from starts a new one from its weights"

CHANGES: tuple[RuleChange, ...] = (
    RuleChange(2, "labels that are the inputs are moved by one token", _WORKS, _labels_own_data),
    RuleChange(
        2,
        "documents begin as their tokenizer begins a text, and white space after a reply is not learned",
        _WORKS,
        lambda job: (
            _has_source(job, "jsonl:", "parquet:", "hf:") and job.get("data", {}).get("tokenizer", "bytes") != "bytes"
        ),
    ),
    RuleChange(
        2,
        "heads of token files and other files of a folder are not read as tokens",
        _WORKS,
        lambda job: any(source.startswith("tokens:") and not source.endswith(".bin") for source in _sources(job)),
    ),
    RuleChange(
        2,
        "pictures are turned upright, scaled by their depth, and numbered by the classes of the training data",
        _WORKS,
        lambda job: _has_source(job, "images:"),
    ),
    RuleChange(
        2,
        "files of a folder that are named as validation or test data are not trained on where others are named for training",
        _WORKS,
        lambda job: any(
            source.startswith(("jsonl:", "parquet:", "text:")) and not re.search(r"\.[a-z0-9]+$", source)
            for source in _sources(job)
        ),
    ),
    RuleChange(2, "base = 'nf4' rounds all linear layers but the head", _WORKS, _rounds_base),
)
"""All changes since rules 1."""


def version_of(job: Tables) -> int:
    """Return the number of the version of the rules under which a job was resolved."""
    return int(job.get("numerics", {}).get("rules", FIRST))


def refusal(job: Tables) -> str:
    """Return why a run of a resolved job would go on with other numbers than it began with; empty if it would not."""
    version = version_of(job)
    for change in CHANGES:
        if version < change.since and change.concerns(job):
            return f"was written under rules {version}, and since rules {change.since} {change.what}: {change.works}"
    return ""
