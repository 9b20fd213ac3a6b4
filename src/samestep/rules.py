"""The version of the rules by which a job's words become numbers, where a later version of samestep gives other numbers.

A resolved job and a manifest hold it as `numerics.rules`; without the key it is 1. A change of a rule stands here, with what it
concerns, so that a run from before which uses it is not resumed under another rule, and every other run goes on. No torch.
"""

from __future__ import annotations

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
    """What is computed otherwise, as the rest of the sentence "since rules 2 ..."."""
    works: str
    """How a run from before can still be finished."""
    concerns: Callable[[Tables], bool]
    """Returns whether a job uses the rule."""


CHANGES: tuple[RuleChange, ...] = ()
"""All changes since rules 1."""


def version_of(job: Tables) -> int:
    """Return the version of the rules under which a job was resolved."""
    return int(job.get("numerics", {}).get("rules", FIRST))


def refusal(job: Tables) -> str:
    """Return why a run of a resolved job would go on with other numbers than it began with; empty if it would not."""
    version = version_of(job)
    for change in CHANGES:
        if version < change.since and change.concerns(job):
            return f"was written under rules {version}, and since rules {change.since} {change.what}: {change.works}"
    return ""
