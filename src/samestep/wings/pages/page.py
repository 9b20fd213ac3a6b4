"""A page: the answer first, the verdict, then figures and tables; one HTML file that loads nothing.

    kind and title            simulate · "dp=64 tp=8 pp=8 zero=1"
    answers                   fits   step   tokens/s   MFU, each with its interval
    verdict                   one line, why, what to try
    sections                  timeline, parts, memory, layouts, curves, tables

Its colours follow the reader's scheme, its width the window, and its policy forbids the browser any request. The figures are drawn
by Python; the script only zooms the timeline.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import ClassVar, Protocol

from samestep.output.text import Quantity, installed_version

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the numbers with which a page begins."""

    label: str
    shown: Quantity | str
    interval: tuple[Quantity, Quantity] | None = None
    note: str = ""
    tone: str = ""
    """`good`, `unsure` or `bad` where the answer is one."""

    def to_html(self) -> str:
        """Return the answer as a box."""
        shown = escape(self.shown) if isinstance(self.shown, str) else self.shown.to_html()
        between = f"<p>{self.interval[0].to_html()} to {self.interval[1].to_html()}</p>" if self.interval else ""
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f'<div class="answer {self.tone}"><h2>{escape(self.label)}</h2><b>{shown}</b>{between}{note}</div>'


@dataclass(frozen=True, slots=True)
class Section:
    """One figure or table with its title."""

    title: str
    body: str
    """HTML."""
    caption: str = ""
    is_folded: bool = False
    """Whether the body is shown only when a reader opens it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The content of one HTML file."""

    verb: str
    title: str
    subject: str
    """The job, machine and number of devices in one line."""
    answers: Sequence[Answer] = ()
    verdict: str = ""
    reasons: Sequence[str] = ()
    tries: Sequence[str] = ()
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()
    """How the numbers were made, one sentence each."""
    record: Mapping[str, object] | None = None
    """The numbers of the page as data."""

    def to_html(self) -> str:
        """Return the file."""
        data = "" if self.record is None else _data({**self.record, "page": self._said()})
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="viewport" content="width=device-width,initial-scale=1"/>'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>'
            f"<title>{escape(self.title)} · samestep {escape(self.verb)}</title><style>{_asset('page.css')}</style></head>\n<body><main>\n"
            f"{self._head()}{''.join(map(_section, self.sections))}{self._foot()}</main>\n"
            f"{data}<script>{_asset('page.js')}</script></body></html>\n"
        )

    def _said(self) -> dict[str, object]:
        """Return the sentences of the page as data."""
        captions = {section.title: section.caption for section in self.sections}
        return {
            "title": self.title,
            "subject": self.subject,
            "answers": {answer.label: answer.note for answer in self.answers},
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "try": list(self.tries),
            "captions": captions,
            "notes": list(self.notes),
        }

    def _head(self) -> str:
        answers = "".join(answer.to_html() for answer in self.answers)
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in self.reasons)
        tries = "".join(f"<li><code>{escape(layout)}</code></li>" for layout in self.tries)
        tried = f"<h2>To try</h2><ul>{tries}</ul>" if tries else ""
        verdict = (
            f'<section class="verdict"><h2>Verdict</h2><p>{escape(self.verdict)}</p><ul>{reasons}</ul>{tried}</section>'
        )
        return (
            f'<header><p class="command">samestep {escape(self.verb)}</p><h1>{escape(self.title)}</h1><p>{escape(self.subject)}</p></header>\n'
            f'<div class="answers">{answers}</div>\n{verdict if self.verdict else ""}\n'
        )

    def _foot(self) -> str:
        versions = ", ".join(f"{package} {installed_version(package)}" for package in ("samestep", "torch"))
        when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        facts = (when, versions, f"Python {platform.python_version()}", *_commit())
        is_command = Path(sys.argv[0]).as_posix().removesuffix("/__main__.py").endswith("samestep")
        typed = ["samestep", *(sys.argv[1:] if is_command else [self.verb])]
        line = " ".join(f"<span>{escape(shlex.quote(word))}</span>" for word in typed)
        made = f'<p>Made by <code class="line">{line}</code> on <code>{escape(", ".join(facts))}</code>.</p>'
        return f"<footer>{''.join(f'<p>{escape(note)}</p>' for note in self.notes)}{made}</footer>"


class TextResult(Protocol):
    """A result whose page is its text."""

    verb: ClassVar[str]

    def to_text(self) -> str:
        """Return the text, whose first line is the answer."""

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""


def page_of(result: TextResult, *, small: bool = False) -> Page:
    """Return the page of a result as it is printed: its first line is the title; a small one has no record."""
    title, _, text = result.to_text().partition("\n")
    report = Section("Report", f"<pre>{escape(text.strip(chr(10)))}</pre>")
    return Page(
        verb=result.verb, title=title, subject="", sections=[report], record=None if small else result.to_record()
    )


def _commit() -> list[str]:
    """Return the commit of the repository of git that the process works in, from its log; nothing without one."""
    logs = (folder / ".git" / "logs" / "HEAD" for folder in (Path.cwd(), *Path.cwd().parents))
    log = next((path for path in logs if os.access(path, os.R_OK)), None)
    commits = re.findall(r"^\w+ (\w{12})", log.read_text(errors="replace"), re.MULTILINE) if log else []
    return [f"commit {commit}" for commit in commits[-1:]]


def _section(section: Section) -> str:
    caption = f'<p class="caption">{escape(section.caption)}</p>' if section.caption else ""
    if section.is_folded:
        return f"<section><details><summary><h2>{escape(section.title)}</h2></summary>{caption}{section.body}</details></section>\n"
    return f"<section><h2>{escape(section.title)}</h2>{caption}{section.body}</section>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML cells, whose rows become blocks on a narrow screen; the first cell of a row names it."""
    top = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = []
    for row in rows:
        cells = "".join(
            f'<td data-label="{escape(title)}">{cell}</td>' for title, cell in zip(head[1:], row[1:], strict=True)
        )
        lines.append(f'<tr><th scope="row">{row[0]}</th>{cells}</tr>')
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def words(pairs: Mapping[str, object]) -> str:
    """Return keys and values as a list of terms."""
    shown = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in pairs.items()
    }
    terms = "".join(f"<div><dt>{_broken(key)}</dt><dd>{escape(value)}</dd></div>" for key, value in shown.items())
    return f"<dl>{terms}</dl>"


def _broken(key: str) -> str:
    """Return a key that may break after its dots and underscores, and nowhere else."""
    return re.sub(r"([._])", r"\1<wbr/>", escape(key))


def _data(record: Mapping[str, object]) -> str:
    text = json.dumps(record, separators=(",", ":")).replace("</", "<\\/")
    return f'<script type="application/json" id="record">{text}</script>\n'


@cache
def _asset(name: str) -> str:
    return resources.files("samestep.wings.pages").joinpath(name).read_text(encoding="utf-8")
