"""The command of this wing: explain."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from samestep import wings
from samestep.errors import InputError
from samestep.output.durable_files import write
from samestep.output.results import Result
from samestep.training import run_folder


def explain(words: Namespace) -> Result:
    """Return where the time of recorded steps went, or how two runs differ.

    Raises:
        InputError: the arguments do not go together.
    """
    from samestep.wings.explain import explain, foreign_traces

    if len(words.run) > 2:
        raise InputError("command-options", f"explain {' '.join(words.run)}: one run is explained, or two are compared")
    run = Path(words.run[0]) if words.run else run_folder.newest("to explain")
    words.heading = [f"run: {' and '.join(map(str, words.run or [run]))}"]
    if len(words.run) == 2 or foreign_traces.is_foreign(run):
        return _without_records(words, run)
    explained = explain.explain(run, step=words.step, hardware=words.hardware)
    if words.trace:
        write(words.trace, json.dumps(explained.to_chrome_trace()))
    if words.html:
        explained_page = wings.required("pages", "explained_page")
        write(words.html, explained_page.page_of(explained).to_html())
    return Result(explained.to_record, explained.to_text())


def _without_records(words: Namespace, run: Path) -> Result:
    """Return how two steps differ, or where the time of another program's steps went."""
    from samestep.wings.explain import differences, foreign_traces

    if words.trace or (len(words.run) == 2 and words.step):
        raise InputError(
            "command-options", "--trace is of one run with records, and --step is of one run: leave them out"
        )
    result: differences.Differences | foreign_traces.ForeignSteps
    if len(words.run) == 2:
        result = differences.differences(words.run[0], words.run[1], words.hardware)
    else:
        result = foreign_traces.explain_traces(run, step=words.step)
    if words.html:
        write(words.html, wings.required("pages", "page").page_of(result).to_html())
    return Result(result.to_record, result.to_text())
