"""The table of evidence in README.md: every number is read from the rows that a command of this repository has written."""

from __future__ import annotations

import itertools
import json
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks" / "rows"
LAYOUTS = ("dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4")
"""The layouts of the table of scripts that are counted."""


def table() -> str:
    """Each claim, its measured value, and the page that shows how it was measured."""
    rows = (
        ("Losses and weights of a plain loop, by kind of script", _scripts(), "list", "docs/reference/scripts.md"),
        ("Hugging Face causal architectures equal to one device", _architectures(), "list", "docs/families.md"),
        ("Deliberate faults that `verify` catches and names", _faults(), "verify", "docs/verify.md"),
        (
            "Collectives sent are those predicted",
            "byte for byte, in every parity test",
            "architecture",
            "docs/architecture.md",
        ),
        ("Crashes and corruptions injected", _crashes(), "checkpoints", "docs/checkpoints.md"),
        ("Step time on 2 CPU ranks", _step_time(), "benchmarks", "benchmarks/README.md"),
        ("Step time predicted, published GPU runs", _predictions(), "accuracy", "docs/foresight.md"),
    )
    lines = ["| claim | measured | how |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {claim} | {value} | [{name}]({page}) |" for claim, value, name, page in rows)])


def _scripts() -> str:
    """How many kinds of single-device scripts give equal results, from `benchmarks/scripts.py`."""
    kinds = json.loads((ROWS / "scripts.json").read_text(encoding="utf-8"))
    tried = {layout: [row[layout][0] for row in kinds.values() if layout in row] for layout in LAYOUTS}
    shares = [f"{words.count('equal')} of {len(words)} with `{layout}`" for layout, words in tried.items()]
    assert {word for words in tried.values() for word in words} <= {"equal", "refused"}
    return f"equal: {', '.join(shares)}; the others are rejected"


def _architectures() -> str:
    """How many architectures are equal, from `make families`."""
    families = json.loads((ROWS / "families.json").read_text(encoding="utf-8"))
    built = [row for row in families.values() if row["dp=2"][0] != "unbuilt"]
    everywhere = [row for row in built if {row[name][0] for name in row if name != "folder"} <= {"proven", "absent"}]
    equal = Counter(row["dp=2"][0] for row in built)["proven"]
    return f"{equal} of {len(built)} with `dp=2`, {len(everywhere)} in every layout that applies"


def _faults() -> str:
    sys.path.insert(0, str(ROOT))
    from tests.proof.faults import FAULTS  # noqa: PLC0415 - the tests are no package of the documents

    return f"{len(FAULTS)} of {len(FAULTS)}"


def _crashes() -> str:
    """The sums of `make crashes`."""
    kinds = json.loads((ROWS / "crashes.json").read_text(encoding="utf-8")).values()
    injected, recovered, wrong = (sum(kind[key] for kind in kinds) for key in ("injected", "recovered", "wrong"))
    return f"{injected:,}: {recovered:,} recovered, {wrong} wrong results"


def _step_time() -> str:
    """The ratios that `make bench` printed last."""
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    ratios = re.findall(r"\| two ranks \| step time, samestep / ([^|]+?) \| ([\d.]+) ", text)
    assert len(ratios) == 3, ratios
    return ", ".join(f"{float(ratio):.2f}x {peer}" for peer, ratio in ratios)


def _predictions() -> str:
    """The intervals of past predictions, of runs on several nodes and on fewer devices."""
    record = tomllib.loads((ROOT / "src" / "samestep" / "record.toml").read_text(encoding="utf-8"))
    nodes, cards = record["nodes"]["time"], record["cards"]["time"]
    return (
        f"8 in 10 of {nodes['rows']:,} measurements on whole nodes took {nodes['low']:.2f} to {nodes['high']:.2f} times the prediction; "
        f"with cards on PCIe {cards['low']:.2f} to {cards['high']:.2f}"
    )


def intervals() -> str:
    """Return the table of docs/foresight.md: measured over predicted by class of machines, from past predictions."""
    record = tomllib.loads((ROOT / "src" / "samestep" / "record.toml").read_text(encoding="utf-8"))
    names = {"all": "all", "cards": "cards on PCIe", "few": "part of a node", "nodes": "whole nodes"}
    figures = [
        (f"{part}, {name}", record[key][part])
        for part in ("time", "memory")
        for key, name in names.items()
        if part in record[key]
    ]
    lines = ["| prediction | measured / predicted | measurements |", "| --- | ---: | ---: |"]
    for name, interval in figures:
        lines.append(f"| {name} | {interval['low']:.2f} to {interval['high']:.2f} | {interval['rows']:,} |")
    return "\n".join(lines)


def _page() -> str:
    """The page of errors by source, which `benchmarks/foresight.py` writes."""
    return (ROOT / "docs" / "reference" / "prediction-errors.md").read_text(encoding="utf-8")


def _of_new_source(text: str) -> tuple[str, str, str]:
    """The mean error of a new source, the rows that show it, and the median over sources, from one line of text."""
    return re.findall(
        r"expect an error of \*\*([\d.]+) %\*\*: the error of (\d+) rows.*?median error is \*\*([\d.]+) %", text
    )[0]


def alike() -> str:
    """Return the line of docs/plans.md on layouts that are nearly as fast, with the error of a new source."""
    error, *_ = _of_new_source(" ".join(_page().split()))
    return (
        "If rows differ by less than 3 %, their order means little: predictions of the step time have a mean error of "
        f"{error} % for a new source ([accuracy](foresight.md))."
    )


def aims() -> str:
    """Return the table of docs/foresight.md with each aim, its figure, and whether it is reached."""
    lines = _table_from("| figure | aim | is | reached |")
    plans = json.loads((ROWS / "planning.json").read_text(encoding="utf-8"))
    now, before = (sum(row[key] for row in plans.values()) for key in ("now", "before"))
    aim = f"{before:.1f}, as before micro-batches of 64 and 128"
    lines.append(f"| {len(plans)} plans, CPU seconds | {aim} | {now:.1f} | {'yes' if now <= before else 'no'} |")
    return "\n".join(lines)


def off_parts() -> str:
    """Return the table of docs/foresight.md with the sources that are off most, and for how much of their step each part is busy."""
    return "\n".join(_table_from("| busy for per cent of the step |"))


def _table_from(head: str) -> list[str]:
    """The lines of the table of errors by source whose first line begins so."""
    lines = _page().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(head))
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))


def order() -> str:
    """Return the lines of docs/foresight.md on the order of layouts: why no prediction reaches the aim of tau on these rows."""
    text = " ".join(_page().split())
    tau = re.findall(r"groups of layouts the order has tau ([\d.]+)\.", text)[0]
    apart = re.findall(r"Over such pairs tau is ([\d.]+)\.", text)[0]
    bound = re.findall(r"a prediction without error would have about ([\d.]+),", text)[0]
    noise = round(100 * (1 - float(bound)))
    return (
        f"The tau of these rows is {tau}, and the aim of 0.75 cannot be reached on them. For {noise} % of the pairs of layouts the measured order is noise, "
        f"so a prediction without error would have a tau of about {bound}.\nOver the pairs that their source tells apart, tau is {apart}."
    )


def accuracy() -> str:
    """Return the table of docs/foresight.md: the errors that the pages of predictions state, which `benchmarks/foresight.py` writes."""
    text = " ".join(_page().split())
    source = _of_new_source(text)
    few = re.findall(r"\| 1 to 8 devices \| (\d+) \| \d+ \| ([\d.]+) \| ([\d.]+) ", text)[0]
    first = re.findall(r"a mean error of ([\d.]+) % and a median of ([\d.]+) % over (\d+) rows", text)[0]
    shipped = re.findall(r"is \*\*([\d.]+) %\*\* on average, with a median of ([\d.]+) %", text)[0]
    memory = re.findall(r"over (\d+) rows, is ([\d.]+) % on average, with a median of ([\d.]+) %", text)[0]
    rows = (
        (
            "step time, a new source: constants fitted to the others",
            source[0],
            f"{source[2]} (over sources)",
            source[1],
        ),
        ("step time, the same, on 1 to 8 devices", few[1], few[2], few[0]),
        ("step time, measurements predicted before any rule followed from them", *first),
        ("step time, constants as shipped", *shipped, "all"),
        ("peak memory", *memory[1:], memory[0]),
    )
    lines = ["| prediction of | mean error, % | median error, % | measurements |", "| --- | ---: | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
