"""Every error samestep raises for a user's mistake; the text says what was given, the rule, and what would work.

```
SamestepError (ValueError)      one clear line on the command line, exit 2
├── JobError                    the job: a key, a type, a value
├── LayoutError                 the layout: a word, a product of degrees, a rule of a strategy
├── ModelError                  the model: cannot be built, traced, initialised or cut
├── DataError                   the data: missing, too short, badly formed
├── CheckpointError             the checkpoint: missing, of another job, damaged
├── NonFiniteError              the loss or a gradient is not finite and the job says stop; exit 1
└── DriftError                  ranks that must agree do not; exit 1
WorkerError (RuntimeError)      a worker process died: which rank, and its last words; exit 1
```
A broken invariant of our own is an `assert`, never one of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SamestepError(ValueError):
    """A mistake in what samestep was given; the text says what would work."""


class JobError(SamestepError):
    """The job cannot be understood or cannot be run."""


class LayoutError(SamestepError):
    """The layout cannot be understood, or a strategy refuses it."""


class ModelError(SamestepError):
    """The model cannot be built, traced, initialised or cut."""


class DataError(SamestepError):
    """The data is missing, too short or badly formed."""


class CheckpointError(SamestepError):
    """The checkpoint is missing, belongs to another job, or is damaged."""


class NonFiniteError(SamestepError):
    """The loss or a gradient is not finite; the text names the first module at fault."""


class DriftError(SamestepError):
    """Ranks that must hold the same do not; the text names the tensor and the rank."""


class OutOfMemoryError(SamestepError):
    """Memory ran out; the text says what held it, what was foreseen, and which layout needs less."""


class WorkerError(RuntimeError):
    """A worker process died; the text names its rank and its last words."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'x'?)` for the known word nearest to `word`, or nothing when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
