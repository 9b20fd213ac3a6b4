"""The result of a verb: text for people, and the same as JSON for programs, in one versioned form.

`samestep VERB --json` prints one line on standard output and nothing else there; whatever prints meanwhile, worker processes
and the user's own code included, goes to standard error:

```
{"samestep": "0.1.0", "format": 1, "verb": "plan", "result": {...}}
{"samestep": "0.1.0", "format": 1, "verb": "plan", "error": {"class": "LayoutError", "code": "...", ...}}
```
The exit status is that of the same command without `--json`. `--json FILE` prints the text as usual, and writes the result alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from samestep.errors import SamestepError
from samestep.output.durable_files import write

FORMAT = 1
"""The version of the form: it rises when a key of it goes away or gets another meaning, and not when one is added."""
STANDARD_OUTPUT = Path("-")
"""The value of `--json` without a file."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a verb: data for JSON, text for people, and an exit status."""

    record: Callable[[], object] | None
    """Makes plain data for JSON, only where it is asked for; None where another process has the result, as on ranks but 0."""
    text: str = ""
    """The text for people that has not been printed yet, without the end of its last line."""
    status: int = 0
    """The exit status."""


@dataclass(frozen=True, slots=True)
class VerbFailure:
    """Why a verb has no result."""

    error: BaseException
    status: int

    @property
    def text(self) -> str:
        """The error in words, its code in brackets at the end of the first line."""
        return self.error.with_code if isinstance(self.error, SamestepError) else self._message

    def to_record(self) -> dict[str, object]:
        """Return the error as plain data: the class of the public error, its code, its text, and what to do about it."""
        if not isinstance(self.error, SamestepError):
            code = "interrupted" if isinstance(self.error, KeyboardInterrupt) else "mistake-of-samestep"
            return {"class": type(self.error).__name__, "code": code, "message": self._message}
        name = next(
            class_.__name__ for class_ in type(self.error).__mro__ if class_.__module__ == SamestepError.__module__
        )
        return {"class": name, "code": self.error.code, "message": self._message, "remedy": self.error.remedy}

    @property
    def _message(self) -> str:
        return "interrupted" if isinstance(self.error, KeyboardInterrupt) else str(self.error)


@contextlib.contextmanager
def only_json() -> Iterator[Callable[[str, Result | VerbFailure], None]]:
    """Keep standard output, of this process and of those it starts, for what the yielded function prints.

    The function takes the name of a verb and its result or failure. All other output goes to standard error meanwhile.
    """
    stdout = sys.stdout
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        out = stack.enter_context(_descriptor_kept(stdout))

        def say(verb: str, result: Result | VerbFailure) -> None:
            key = "error" if isinstance(result, VerbFailure) else "result"
            record = result.to_record() if isinstance(result, VerbFailure) else result.record and result.record()
            if isinstance(result, VerbFailure) or result.record is not None:
                head = {"samestep": metadata.version("samestep"), "format": FORMAT, "verb": verb}
                print(json.dumps(plain({**head, key: record}), allow_nan=False), file=out, flush=True)

        yield say


@contextlib.contextmanager
def _descriptor_kept(stdout: IO[str]) -> Iterator[IO[str]]:
    """Point descriptor 1, which other processes inherit, at standard error, and yield a stream to where `stdout` leads."""
    try:
        target, original = os.dup(stdout.fileno()), os.dup(1)
    except (OSError, ValueError, io.UnsupportedOperation):  # a stream within this process, as a notebook's
        yield stdout
        return
    stdout.flush()
    with contextlib.suppress(OSError):  # standard error may be closed
        os.dup2(2, 1)
    try:
        with open(target, "w", encoding="utf-8") as out:
            yield out
    finally:
        os.dup2(original, 1)
        os.close(original)


def write_file(path: Path, result: Result) -> None:
    """Write the result alone to a file, where this process has it.

    Raises:
        InputError: the system does not allow it.
    """
    if result.record is not None:
        write(path, json.dumps(plain(result.record()), indent=1, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """Return a value as JSON has it: a number that is not finite is null, and what has no form there is its text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        return [plain(item) for item in value]
    return str(value)
