"""Makes the pictures of the documents: charts as SVG, and pages of `plan`, `simulate` and `explain`, as Chromium shows them.

    python docs/pictures.py             writes docs/pictures/*.svg and *.png
    python docs/pictures.py charts      writes the charts alone, which need no browser
    python docs/pictures.py simulate    writes the pictures of one command
    python docs/pictures.py --check     exits 1 if a chart is not drawn from the data of today

The predictions are those that the commands in `PAGES` make; the explained run is trained here first, on two processes, so its
times are those of this machine: make this picture while it runs nothing else. Chromium must be installed; Pillow, if it is, makes the files smaller.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from charts import CHARTS, Chart, digest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
COLOURS = 250
"""Colours of a picture, where Pillow is installed."""
PAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": (("plan", "--set", "model.source=preset:llama3-70b", "--devices", "512", "--hardware", "h100x8"),),
    "simulate": (("simulate", "--case", "gpt3-4096"),),
    "explain": (
        ("train", "--ranks", "2", "--layout", "pp=2 microbatch=4", "--steps", "60", "--record", "3", "--out", "{run}"),
        ("explain", "{run}", "--hardware", "cpu-laptop"),
    ),
}
"""The commands that make the page of each verb; the last one writes it."""


class Shot(NamedTuple):
    """One picture of a page."""

    verb: str
    name: str
    width: int
    height: int
    is_dark: bool = False


SHOTS = (
    Shot("plan", "plan", 1200, 1500),
    Shot("plan", "plan-phone", 390, 1500, is_dark=True),
    Shot("simulate", "simulate", 1200, 1960, is_dark=True),
    Shot("explain", "explain", 1200, 1560),
)


def main(names: list[str]) -> int:
    """Make the charts and the pictures of some commands, or of all; or check the charts."""
    if names == ["--check"]:
        old = [name for name, chart in CHARTS.items() if not _is_fresh(name, chart)]
        print(*(f"stale: docs/pictures/{name}.svg: python docs/pictures.py charts" for name in old), sep="\n")
        return int(bool(old))
    if not names or "charts" in names:
        FOLDER.mkdir(exist_ok=True)
        for name, chart in CHARTS.items():
            (FOLDER / f"{name}.svg").write_text(chart.svg(), encoding="utf-8")
    if verbs := [verb for verb in PAGES if verb in names or not names]:
        _take_all(verbs)
    return 0


def _is_fresh(name: str, chart: Chart) -> bool:
    """Return whether the file of a chart holds the digest of its data."""
    path = FOLDER / f"{name}.svg"
    return path.is_file() and f"<!-- data: {digest(chart.data())} -->" in path.read_text(encoding="utf-8")


def _take_all(verbs: list[str]) -> None:
    browser = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if browser is None:
        raise SystemExit("pictures are made by Chromium, and none is installed here")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for verb in verbs:
            page = _page(verb, folder)
            for shot in SHOTS:
                if shot.verb == verb:
                    _take(browser, page, shot, folder)


def _page(verb: str, folder: Path) -> Path:
    """Return the file of a verb's page."""
    page = folder / f"{verb}.html"
    *before, last = PAGES[verb]
    for command in (*before, (*last, "--html", str(page))):
        words = [word.format(run=folder / "pp2") for word in command]
        subprocess.run([sys.executable, "-m", "samestep", *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return page


def _take(browser: str, page: Path, shot: Shot, folder: Path) -> None:
    file = FOLDER / f"{shot.name}.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--hide-scrollbars"]
    flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder / 'profile'}"]
    flags += [f"--blink-settings=preferredColorScheme={0 if shot.is_dark else 1}", "--virtual-time-budget=5000"]
    flags += [f"--window-size={shot.width},{shot.height}", f"--screenshot={file}", page.as_uri()]
    subprocess.run([browser, *flags], check=True, capture_output=True, timeout=300)
    if importlib.util.find_spec("PIL") is not None:
        from PIL import Image  # noqa: PLC0415 - an extra

        with Image.open(file) as image:
            image.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                file, optimize=True
            )
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} B")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
