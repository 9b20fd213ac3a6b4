"""Rows of benchmarks: verdicts of families, kinds of scripts, what is found out of families, and the calls of a step."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import lzma
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import samestep
from tests.frozen import table

SPECS = table.TESTS / "frozen_specs.txt.xz"
"""What is found out of each family, as text: one line of JSON a family."""
BENCHMARKS = table.ROOT / "benchmarks"
sys.path[:0] = [str(table.ROOT), str(BENCHMARKS)]


def code_of(text: str) -> str:
    """Return the code in brackets at the end of a refusal's text."""
    code = re.search(r"\[([a-z0-9-]+)\]$", text)
    return code[1] if code else "none"


def kept_families() -> table.Rows:
    """Return the verdicts of families in each layout that `benchmarks/rows` has."""
    import family_table

    return {
        f"family {family} {layout}": _row(layout, word, text)._replace(commit=f"code {code}")
        for (family, layout), (word, text, code) in family_table.kept().items()
    }


def kept_scripts() -> table.Rows:
    """Return the outcomes of kinds of scripts in each layout that `benchmarks/rows` has."""
    import script_table

    kept_at = table.git("log", "-1", "--format=%h", "--", str(script_table.KEPT))
    return {
        f"script {name} {layout}": _row(layout, word, text)._replace(commit=kept_at)
        for name, row in script_table.kept().items()
        for layout, (word, text) in row.items()
    }


def _row(layout: str, word: str, text: str) -> table.Row:
    return table.Row(layout, table.rejected({code_of(text)}) if word == "refused" else word, table.commit())


def proven(family: str, layouts: Sequence[str]) -> table.Rows:
    """Return the verdicts of a family, proven anew in a process of its own."""
    import families

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        file = Path(folder) / "rows"
        families._in_a_process(family, layouts, file)
        return {
            f"family {family} {row.layout}": _row(row.layout, row.outcome, row.text)
            for row in families.read(file).values()
        }


def ported(kind: str, layouts: Sequence[str]) -> table.Rows:
    """Return the outcomes of a kind of scripts, run anew."""
    from benchmarks import scripts

    found = scripts.rows([kind], list(layouts))
    return {f"script {name} {layout}": _row(layout, word, why) for name, layout, word, why in found}


def names_of(rows: Iterable[str], part: str) -> dict[str, list[str]]:
    """Return the layouts of each family or kind of which there are rows; `part` is the first word of these."""
    columns = {"family": _columns(), "script": ("dp=1", "dp=2", "dp=2 zero=3", "tp=2", "pp=2 microbatch=4")}[part]
    names: dict[str, list[str]] = {}
    for row in rows:
        word, _, rest = row.partition(" ")
        layout = max((one for one in columns if rest.endswith(f" {one}")), key=len, default="")
        if word == part and layout:
            names.setdefault(rest.removesuffix(f" {layout}"), []).append(layout)
    return names


def _columns() -> tuple[str, ...]:
    import family_table

    return family_table.COLUMNS


def examined(families: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what is found out of each family, as text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "specs"
        for family in families:
            file.unlink(missing_ok=True)
            command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "families.py"), family, "--specs", str(file)]
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            lines = (
                file.read_text(encoding="utf-8") if file.is_file() else f'{family} none "nothing: its process ended"'
            )
            yield family, json.loads(lines.split(" ", 2)[2])


def spec_row(family: str, text: str) -> table.Rows:
    """Return the row of what is found out of a family: the digest of its text."""
    return {f"spec {family}": table.Row("", hashlib.sha256(text.encode()).hexdigest()[:16], table.commit())}


def kept_specs() -> dict[str, str]:
    """Return the frozen text of each family."""
    if not SPECS.is_file():
        return {}
    texts: dict[str, str] = json.loads(lzma.decompress(SPECS.read_bytes()))
    return texts


def keep_specs(texts: Mapping[str, str]) -> None:
    """Write the frozen texts, in place of those of the same families."""
    with table.locked(SPECS):
        together = json.dumps(dict(sorted({**kept_specs(), **texts}.items())), indent=0)
        SPECS.write_bytes(lzma.compress(together.encode()))


def spec_differences(family: str, text: str, most: int = 40) -> list[str]:
    """Return the lines in which what is found out of a family differs from its frozen text."""
    frozen = kept_specs().get(family, "")
    lines = list(difflib.unified_diff(frozen.splitlines(), text.splitlines(), "frozen", "now", n=0, lineterm=""))
    return [f"    {line}" for line in lines[:most]] + [f"    ... {len(lines)} lines"] * (len(lines) > most)


def calls() -> dict[str, Callable[[], table.Rows]]:
    """Return what counts the calls of ATen and of Python functions in a step, by the name of a row of `benchmarks/host.py`."""
    import host_rows

    def counting(row: Any) -> Callable[[], table.Rows]:
        def counted() -> table.Rows:
            aten, python = samestep.launch(_counted, (row,), ranks=row.num_ranks, device="cpu")
            return {
                f"calls {row.name}": table.Row(row.layout, f"{table.CALLS}ATen {aten}, Python {python}", table.commit())
            }

        return counted

    return {row.name: counting(row) for row in host_rows.ROWS if not row.backend}


def _counted(_: object, row: Any) -> tuple[int, int]:
    import host

    from samestep.datasets import read_ahead

    read_ahead.WORTH_A_THREAD_S = math.inf  # a thread that reads would make calls that are not seen
    steps = host.ours(row)
    return host.calls_of(steps), host.python_calls_of(steps, warm=0)
