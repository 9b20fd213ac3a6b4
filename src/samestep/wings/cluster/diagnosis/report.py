"""The lines of a report: what was found on which hosts, whether it is well, and the remedy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from samestep.output.text import listed

Level = Literal["ok", "warning", "fault"]
_ORDER: tuple[Level, ...] = ("fault", "warning", "ok")
_MOST_NAMED = 6
_WIDTH = 160


@dataclass(frozen=True)
class ReportLine:
    """One finding: its topic, whether it is well, and the hosts that it is about."""

    level: Level
    about: str
    """The topic, a word that stays the same over versions, such as `clock`."""
    found: str
    remedy: str = ""
    """What to do about it; empty where it is well."""
    hosts: tuple[str, ...] = ()
    """The names of the hosts; empty for a finding about all of them together."""

    def to_text(self) -> str:
        """Return the line, as it is printed."""
        where = f"{listed(self.hosts, _MOST_NAMED)}: " if self.hosts else ""
        remedy = f". {self.remedy}" if self.remedy else ""
        return f"{self.level:<8} {self.about:<10} {where}{self.found}{remedy}"

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "level": self.level,
            "about": self.about,
            "hosts": [*self.hosts],
            "found": self.found,
            "remedy": self.remedy,
        }


@dataclass(frozen=True)
class Report:
    """The findings on the hosts that came, as lines, the faults first."""

    head: str
    """The hosts and their launcher, in words."""
    lines: tuple[ReportLine, ...]
    seconds: float
    written: str = ""
    """The line about the profile that was written; empty without one."""
    has_come: bool = True
    """Whether this host came to the first one; where it did not, the lines are about this host alone."""
    host: str = ""
    """The name of the host that writes the report."""
    told: int | None = None
    """The exit status that the process that leads has sent; None on that one itself."""

    @property
    def faults(self) -> int:
        """The number of lines that are faults."""
        return sum(line.level == "fault" for line in self.lines)

    @property
    def status(self) -> int:
        """The exit status of the examination, a number: 1 where there is a fault, else 0."""
        return int(self.faults > 0) if self.told is None else self.told

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(self.to_text())

    def to_text(self) -> str:
        """Return the report as text."""
        lines = [self.head, *(line.to_text() for line in self.lines)]
        lines += [self.written] if self.written else []
        return "\n".join([*lines, f"{self._counts()}, in {self.seconds:.1f} s"])

    def to_short_text(self) -> str:
        """Return the report as text without the lines that are well, but for the one that says who this is."""
        shown = [line.to_text() for line in self.lines if line.level != "ok" or line.about == "identity"]
        return "\n".join(
            [self.head, *shown, f"{self._counts()}, {sum(line.level == 'ok' for line in self.lines)} lines are well"]
        )

    def _counts(self) -> str:
        warnings = sum(line.level == "warning" for line in self.lines)
        return " and ".join(
            f"{count} {word}{'s' * (count != 1)}" for count, word in ((self.faults, "fault"), (warnings, "warning"))
        )

    def to_record(self) -> dict[str, object]:
        """Return plain data for JSON: `faults`, and `lines` with `level`, `about`, `hosts`, `found` and `remedy`."""
        return {
            "head": self.head,
            "faults": self.faults,
            "lines": [line.to_record() for line in self.lines],
            "written": self.written,
            "has_come": self.has_come,
            "seconds": round(self.seconds, 3),
        }


def merged(lines: Iterable[ReportLine]) -> tuple[ReportLine, ...]:
    """Return the lines of several hosts, those that say the same as one, by level and in the order of their topics.

    A topic that is well on several hosts is one line, with what was found on the first of them.
    """
    groups: dict[tuple[str, ...], list[ReportLine]] = {}
    for line in lines:
        is_well = line.level == "ok" and bool(line.hosts)
        groups.setdefault((line.level, line.about, *(() if is_well else (line.found, line.remedy))), []).append(line)
    one_each = [_as_one(group) for group in groups.values()]
    topics = {about: place for place, about in enumerate(dict.fromkeys(line.about for line in one_each))}
    return tuple(sorted(one_each, key=lambda line: (_ORDER.index(line.level), topics[line.about])))


def _as_one(group: Sequence[ReportLine]) -> ReportLine:
    first, hosts = group[0], tuple(dict.fromkeys(host for line in group for host in line.hosts))
    is_same = all(line.found == first.found for line in group)
    return replace(
        first, hosts=hosts, found=first.found if is_same else f"{first.found} ({first.hosts[0]}, the others too)"
    )


def shortened(text: str, most: int = _WIDTH) -> str:
    """Return a text of another program as one short line."""
    return textwrap.shorten(" ".join(text.split()), most, placeholder=" ...")
