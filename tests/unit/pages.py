"""What a page says of itself: its elements, texts and numbers, the boxes of its figures, and what it looks like in Chromium."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import dataclass, field
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

VOID = {"meta"}
PAPER = 690
"""Pixels between the margins of a sheet of paper."""
DATA_IN = {"data", "code", "dt", "dd", "i", "script", "style", "title", "button", "output"}
"""Elements whose digits are data, names, or labels of ticks."""


@dataclass
class Svg:
    """One figure: attributes, and its parts with theirs."""

    label: str
    parts: list[tuple[str, dict[str, str]]] = field(default_factory=list)


class PageReader(HTMLParser):
    """Reads a page, and refuses elements that are not closed in order and what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        """Texts with digits outside of `DATA_IN`."""
        self.values: list[tuple[float, str]] = []
        self.svgs: list[Svg] = []
        self.headings: list[str] = []
        self.classes: set[str] = set()
        self.scripts: dict[str, str] = {}
        self._value: float | None = None
        self._script = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        assert tag not in {"link", "img", "iframe", "object", "base", "form"}
        assert not {*given} & {"src", "href", "onclick", "onload", "action"}
        self.classes |= {*given.get("class", "").split()}
        if tag == "script":
            self._script = given.get("id") or given.get("class") or "code"
        if tag == "data":
            self._value = float(given["value"])
        if tag == "svg":
            self.svgs.append(Svg(given.get("aria-label", "")))
        elif "svg" in self.open:
            self.svgs[-1].parts.append((tag, given))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = {*self.open}
        if "script" in inside:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data
        elif self.open[-1:] == ["data"]:
            assert self._value is not None
            self.values.append((self._value, data))
        elif self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if not inside & DATA_IN and re.search(r"\d", data):
            self.texts.append(data)

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts["record"])
        return found

    @property
    def boxes(self) -> dict[str, Any]:
        """The boxes of the timeline, unpacked as the page's script does it."""
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(self.scripts["boxes"])))
        return found


def read(text: str) -> PageReader:
    page = PageReader()
    page.feed(text)
    assert page.open == []
    return page


def assert_whole(text: str) -> PageReader:
    """Assert what holds of every page; return it as it was read."""
    page = read(text)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|import\(", text)
    assert len(text) <= 500_000
    assert_numbers_are_data(page)
    for svg in page.svgs:
        assert_nothing_overlaps(svg)
    return page


def assert_numbers_are_data(page: PageReader) -> None:
    said = json.dumps(page.record, ensure_ascii=False)
    labels = re.compile(r"(stage|rank|step|tie|layers?|dp|exposed communication|wait for others)\b")
    for text in page.texts:
        known = json.dumps(text, ensure_ascii=False)[1:-1]
        assert known in said or labels.match(text), text
    for value, text in page.values:
        if number := re.search(r"[\d,.]+", text):
            shown = float(number[0].replace(",", ""))
            assert shown == 0 or value != 0, (value, text)


def assert_nothing_overlaps(svg: Svg) -> None:
    """Assert that the boxes of a figure overlap with none of their row, and that none is cut off."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for tag, given in svg.parts:
        if tag == "path" and given["d"].startswith("M") and ".5h" in given["d"]:
            rows.setdefault("lane", []).extend(
                (float(at), float(at) + float(width)) for at, width in re.findall(r"M([\d.]+) \.5h([\d.]+)", given["d"])
            )
        elif tag == "rect":
            start = float(given["x"].rstrip("%"))
            rows.setdefault(given.get("y", ""), []).append((start, start + float(given["width"].rstrip("%"))))
    for name, boxes in rows.items():
        boxes.sort()
        assert all(end <= start + 0.011 for (_, end), (start, _) in pairwise(boxes)), svg.label
        assert boxes[0][0] >= 0
        assert boxes[-1][1] <= (500 if name == "lane" else 100.05), svg.label


# -- in a browser ------------------------------------------------------------------------------------------------------

PROBE = """<script>
const problems = [];
addEventListener("error", (event) => problems.push("error: " + event.message));
addEventListener("unhandledrejection", (event) => problems.push("rejected: " + event.reason));
document.addEventListener("securitypolicyviolation", (event) => problems.push("refused: " + event.violatedDirective));
for (const word of ["error", "warn"]) console[word] = (...given) => problems.push(word + ": " + given.join(" "));
addEventListener("message", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
  const root = document.documentElement;
  if (root.scrollWidth > innerWidth) problems.push(`scrolls: ${root.scrollWidth} of ${innerWidth}`);
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, parent = node.parentElement;
    if (!node.data.trim() || parent.closest("script,style,thead,.tip")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width > 1) texts.push([box, node.data.trim().slice(0, 40)]);
    if (getComputedStyle(parent).overflow === "hidden" && parent.scrollWidth > parent.clientWidth + 1) problems.push("cut off: " + node.data);
    const box = range.getBoundingClientRect();
    if (box.right > innerWidth + 1 || box.left < -1) problems.push("outside: " + node.data.trim().slice(0, 40));
  }
  texts.sort((one, other) => one[0].top - other[0].top);
  texts.forEach(([one, name], index) => {
    for (let next = index + 1; next < texts.length && texts[next][0].top < one.bottom - 3; next++) {
      const [other, its] = texts[next];
      if (Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1.5) problems.push(`overlap: ${name} | ${its}`);
    }
  });
  const timeline = document.querySelector(".timeline");
  let zoomed = "", arrows = 0, found = 0;
  if (timeline) {
    const before = timeline.querySelector(".ticks").textContent;
    for (const key of ["+", "+", "ArrowRight", ".", "ArrowDown"]) timeline.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    zoomed = timeline.querySelector("output").textContent;
    if (timeline.querySelector(".ticks").textContent === before) problems.push("the axis did not zoom");
    if (!timeline.querySelector(".cursor")) problems.push("no op is marked");
    const frame = Number(timeline.querySelector(".map .frame").getAttribute("width"));
    if (!(frame > 0 && frame < 400)) problems.push(`the overview frames ${frame} of 500`);
    timeline.dispatchEvent(new KeyboardEvent("keydown", { key: "0", bubbles: true }));
    for (let lane = 0; lane < 40 && !timeline.querySelector(".arrows path"); lane++) timeline.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
    arrows = timeline.querySelectorAll(".arrows path").length;
    const search = timeline.querySelector("input"), said = timeline.querySelector("output");
    search.value = "forward"; search.dispatchEvent(new Event("input"));
    found = Number(said.textContent.split(" ")[0]);
    if (!timeline.querySelector("path.found")) problems.push("nothing is found");
    search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    if (!said.textContent.includes("forward")) problems.push("the next one is not shown");
  }
  parent.postMessage({ name: window.name, problems: problems.slice(0, 12), texts: texts.length, zoomed, arrows, found }, "*");
});
</script>"""
OUTER = """<!DOCTYPE html><html><body>{frames}<script>
const found = {{}};
addEventListener("message", (event) => {{
  found[event.data.name] = event.data;
  if (Object.keys(found).length === {count}) document.body.innerHTML = "<pre id=found></pre>", document.querySelector("pre").textContent = JSON.stringify(found);
}});
addEventListener("load", () => setTimeout(() => {{ for (let i = 0; i < frames.length; i++) frames[i].postMessage("", "*"); }}, 1500));
</script></body></html>"""


def chromium() -> str | None:
    """The browser, where it is installed."""
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


def looked_at(pages: dict[str, str], folder: Path) -> dict[str, dict[str, Any]]:
    """Open all pages at 390 and 1,200 pixels and as they are printed, in one browser; return what is wrong with each, and what its timeline says."""
    frames = []
    for name, text in pages.items():
        probed = text.replace("<main>", PROBE + "<main>", 1)
        frames += [
            f'<iframe name="{name} {width}" width="{width}" height="900" style="border:0" srcdoc="{escape(probed, quote=True)}"></iframe>'
            for width in (390, 1200)
        ]
        printed = probed.replace("@media screen", "@media not all").replace("@media print", "@media all")
        assert printed.count("@media all") == 1
        frames.append(
            f'<iframe name="{name} printed" width="{PAPER}" height="900" style="border:0" srcdoc="{escape(printed, quote=True)}"></iframe>'
        )
    file = folder / "outer.html"
    file.write_text(OUTER.format(frames="".join(frames), count=len(frames)), encoding="utf-8")
    command = [str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync"]
    command += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
    ]
    command += ["--virtual-time-budget=20000", "--window-size=1300,1000", "--dump-dom", file.as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', said, re.DOTALL)
    assert found, said[-2000:]
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    answer: dict[str, dict[str, Any]] = json.loads(text)
    return answer
