"""Checks the public texts against the rules of CONTRIBUTING.md: the words of docs/words.toml, and the length of sentences.

    python docs/plain_english.py           prints every fault, and the mean words of a sentence on each page; exits 1 if there is one
    python docs/plain_english.py README.md prints those of some surfaces

A surface is a page with its tables, the help texts of the command line, the descriptions of job keys, the docstrings of public functions, the error
texts, the script of the HTML pages, the comments of the jobs, the notebook, or the messages: all other texts of the source.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import api_tables
import error_codes
from pydantic import BaseModel

import samestep
from samestep import Job
from samestep.cli import _parser

ROOT = Path(__file__).parent.parent
WORDS = tomllib.loads((ROOT / "docs" / "words.toml").read_text(encoding="utf-8"))


def _patterns(surface: str) -> list[tuple[re.Pattern[str], str, str]]:
    """Return the patterns of a surface, each with the words to use and its rule."""
    of_it = [word for word in WORDS["word"] if surface in word.get("only", (surface,))]
    return [(re.compile(word["pattern"], re.IGNORECASE), word["use"], word["rule"]) for word in of_it]


PATTERNS = {surface: _patterns(surface) for surface in ("", "errors", "messages")}
"""The patterns of errors and of other messages, and the ones of every other surface."""
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md", "tests/README.md", "benchmarks/README.md", "docs", ".github",
)  # fmt: skip
MOST_WORDS = 20.0
"""The mean words of a sentence on a page must be below this."""
LONGEST = 32
"""The most words that one sentence has."""
MARKUP = re.compile(r"\s*(<|import |add sub |size stride )")
"""Texts of the source that are markup, a program or a list of names, and no sentences."""
OF_SENTENCES = ("R1", "R2")
"""Rules that headings need not follow: they may be questions."""
RECORDED = re.compile(rf"<!-- table: ({'|'.join(WORDS['recorded'])}) -->\n.*?<!-- end -->", re.DOTALL)
"""Tables with the names of tests, or with texts that a run has recorded."""
CODE = re.compile(r"^ *```.*?^ *```$|(?<=\n\n)(?: {4}.*\n)+", re.MULTILINE | re.DOTALL)

Texts = list[tuple[str, str]]
"""Paragraphs, bullets and cells of a surface, each with the place where it stands."""


def surfaces() -> dict[str, Texts]:
    """Return the texts of every surface by its name."""
    found = {str(path.relative_to(ROOT)): of_page(path.read_text(encoding="utf-8")) for path in pages()}
    found |= {str(path.relative_to(ROOT)): _comments(path) for path in sorted((ROOT / "jobs").glob("*.toml"))}
    found["examples/quickstart.ipynb"] = _notebook(ROOT / "examples" / "quickstart.ipynb")
    found["page.js"] = _script(ROOT / "src" / "samestep" / "wings" / "pages" / "page.js")
    found["help"] = [(where, plain(text)) for where, text in _help(_parser(), "samestep")]
    found["job keys"] = [(where, plain(text)) for where, text in _keys()]
    found["docstrings"] = [(where, plain(text)) for where, text in _docstrings()]
    found["errors"] = [(site.code, plain(site.text)) for site in error_codes.source()]
    found["messages"] = [(where, plain(text)) for where, text in _messages()]
    return found


def pages() -> list[Path]:
    """Return the files of all pages."""
    return [path for name in PAGES for path in (sorted((ROOT / name).rglob("*.md")) or [ROOT / name])]


def of_page(text: str) -> Texts:
    """Return the paragraphs, bullets and cells of a page, without code, markup and recorded tables."""
    text = CODE.sub(_blank, RECORDED.sub(_blank, text))
    text = re.sub(r"<!-- (table: \w+|end) -->|<(?!br>)[^<>\n]+>", " ", text)
    found: Texts = []
    block: list[str] = []
    first = ""

    def close() -> None:
        if block:
            found.append((first, plain(" ".join(block))))
            block.clear()

    for number, line in enumerate(text.splitlines(), 1):
        is_new = re.match(r"\s*([-*#>]|\d+\.) ", line)
        if not line.strip() or line.startswith("|") or is_new or first.endswith(" heading"):
            close()
        if line.startswith("|"):
            found += [
                (str(number), plain(cell)) for cell in re.split(r"(?<!\\)\||<br>", line) if re.search(r"[a-z]", cell)
            ]
        elif line.strip():
            first = first if block else f"{number} heading" if line.startswith("#") else str(number)
            block.append(line.strip().lstrip("-*#> "))
    close()
    return found


def _comments(path: Path) -> Texts:
    """Return the comments of a file, each with its line."""
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return [(str(number), plain(line.partition("# ")[2])) for number, line in lines if "# " in line]


def _notebook(path: Path) -> Texts:
    """Return the texts of a notebook's cells that are not code."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [text for cell in cells if cell["cell_type"] == "markdown" for text in of_page("".join(cell["source"]))]


def _script(path: Path) -> Texts:
    """Return the strings of a script that are sentences, each with its line; expressions within them are an ellipsis."""
    strings = re.finditer(r'"([^"\n]*)"|`([^`]*)`', path.read_text(encoding="utf-8"))
    texts = ((match.start(), re.sub(r"\$\{[^{}]*\}", "…", match[1] or match[2] or "")) for match in strings)
    return [(f"character {start}", plain(text)) for start, text in texts if len(words(text)) > 3]


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def plain(text: str) -> str:
    """Return a text in which code is one word, and links and images are their texts."""
    text = re.sub(r"`[^`]+`", "CODE", text).replace("**", "")
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*_]{1,2}(\S[^*_]*\S|\S)[*_]{1,2}", r"\1", text).split())


def _help(parser: ArgumentParser, name: str) -> Iterator[tuple[str, str]]:
    """Yield the help texts of a parser and its commands."""
    yield name, parser.description or ""
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for about in action._get_subactions():
                yield f"{name} {about.dest}", about.help or ""
                yield from _help(action.choices[about.dest], f"{name} {about.dest}")
        elif action.help and action.dest not in ("help", "version"):
            yield f"{name} {(action.option_strings or [action.dest])[-1]}", action.help


def _keys() -> Iterator[tuple[str, str]]:
    """Yield the descriptions of a job's tables and keys."""
    for table, field in Job.model_fields.items():
        kind: Any = field.annotation
        yield f"[{table}]", field.description or ""
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"[{table}]", kind.__doc__ or ""
            for key, one in kind.model_fields.items():
                yield f"{table}.{key}", one.description or ""


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield the paragraphs of the docstrings of public functions and classes with their fields, and of the methods of a run."""
    public = {name: getattr(samestep, name) for name in samestep.__all__}
    public |= {f"Run.{name}": getattr(samestep.Run, name) for name in dir(samestep.Run) if not name.startswith("_")}
    for name, one in public.items():
        for paragraph in (inspect.getdoc(one) or "").split("\n\n"):
            yield name, re.sub(r"^ *(\w+): ", r"`\1`: ", paragraph, flags=re.MULTILINE)
        if is_dataclass(one) and isinstance(one, type):
            yield from ((f"{name}.{field}", text) for field, _, text in api_tables.fields_of(one))


def _messages() -> Iterator[tuple[str, str]]:
    """Yield the texts of the source that are printed, logged, drawn on pages or part of an error: all but docstrings, short names and code."""
    for path in sorted((ROOT / "src" / "samestep").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docs | parts:
                text = error_codes.text_of(node)
                if len(words(text)) > 3 and "->" not in text and not MARKUP.match(text):
                    yield f"{path.name}:{node.lineno}", text


def faults(texts: Texts, surface: str = "") -> list[str]:
    """Return the listed words of some texts of a surface, each with its place and the word to use."""
    return [
        f"{where}: '{found[0].strip()}' ({rule}; use: {use}) in: {text[max(0, found.start() - 40) : found.end() + 40]}"
        for where, text in texts
        for pattern, use, rule in PATTERNS.get(surface, PATTERNS[""])
        for found in pattern.finditer(text)
        if not (rule in OF_SENTENCES and where.endswith("heading"))
    ]


def sentences(texts: Texts) -> list[str]:
    """Return the sentences of some texts; a text of less than four words is none."""
    found = [one for _, text in texts for one in re.split(r"(?<=[.!?])\s+(?=[A-Z(*\d]|samestep )", text)]
    return [one for one in found if len(words(one)) > 3]


def long(texts: Texts) -> list[tuple[str, int, str]]:
    """Return the sentences of more than LONGEST words, each with its place and its count."""
    every = ((where, len(words(one)), one) for where, text in texts for one in sentences([(where, text)]))
    return [found for found in every if found[1] > LONGEST]


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z0-9][\w'./%-]*", text)


def mean_words(texts: Texts) -> float:
    """Return the mean words of a sentence."""
    lengths = [len(words(one)) for one in sentences(texts)]
    return sum(lengths) / max(1, len(lengths))


def refused() -> list[str]:
    """Return one line for each fault of the surfaces that are not pending, and for each pending one without a fault."""
    lines = []
    for name, texts in surfaces().items():
        wrong = [f"{name}:{fault}" for fault in faults(texts, name)]
        if mean_words(texts) >= MOST_WORDS:
            wrong.append(
                f"{name}: {mean_words(texts):.1f} words in a sentence on average, at most {MOST_WORDS:.0f} (R10)"
            )
        wrong += [
            f"{name}:{where}: {count} words in a sentence, at most {LONGEST} (R10): {one}"
            for where, count, one in long(texts)
        ]
        if name not in WORDS["pending"]:
            lines += wrong
        elif not wrong:
            lines.append(f"{name} has no fault: take it out of `pending` in docs/words.toml")
    return lines


def main(names: list[str]) -> int:
    """Print the report, and the faults."""
    for name, texts in surfaces().items():
        if not names or name in names:
            every = faults(texts, name)
            state = " pending" if name in WORDS["pending"] else ""
            print(f"{name}: {mean_words(texts):.1f} words a sentence, {len(every)} listed words{state}")
            print(*(f"  {fault}" for fault in every if names), sep="\n" if names else "", end="\n" if names else "")
    lines = refused()
    print(*(lines if not names else ()), sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
