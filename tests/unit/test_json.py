"""Every verb gives programs one line of JSON, results and errors, with the exit status that people get."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from samestep import arguments, cli, errors, hardware
from samestep.output import results
from samestep.proof.verdict import Verdict
from tests import small

PRESET = ("--set", "model.source=preset:gpt2", "--set", "train.global_batch=8")
OF_A_RUN = ("explain", "sample", "evaluate", "export")
WORDS: dict[str, tuple[str, ...]] = {
    "train": (*small.settings(), "--ranks", "2", "--dry-run"),
    "verify": ("--layout", "dp=2"),
    "submit": (*small.settings(), "--on", "mpi", "--nodes", "2", "--layout", "dp=2", "--dry-run"),
    "launch": ("script.py", "--ranks", "2"),
    "export": ("RUN", "--out", "exported"),
    "sample": ("RUN", "--tokens", "3"),
    "evaluate": ("RUN", "--samples", "2"),
    "plan": (*PRESET, "--devices", "2", "--why", "dp=2"),
    "simulate": (*PRESET, "--layout", "dp=2"),
    "explain": ("RUN",),
    "layouts": (*PRESET, "--devices", "2"),
    "inspect": (*small.settings(),),
    "measure": (),
    "doctor": (),
    "presets": (),
    "profiles": ("--show", "h100x8"),
    "env": (),
    "completion": ("bash",),
    "calibrate": ("rows.csv",),
}
"""Words with which each verb has a result; RUN stands for a run folder."""
ASKS = {
    "train": ("folder", "ranks"), "verify": ("layout", "proven"), "submit": ("engine", "script"), "launch": ("script",), "export": ("folder", "step"),
    "sample": ("text",), "evaluate": ("loss",), "plan": ("best", "why"), "simulate": ("step_s",), "explain": ("verdict",),
    "layouts": ("layout", "legal"), "inspect": ("layers",), "measure": ("file", "profile"), "doctor": ("faults", "lines"), "presets": ("source", "num_params"),
    "profiles": ("h100x8",), "env": ("python", "packages"), "completion": ("shell", "script"), "calibrate": ("rows",),
}  # fmt: skip
"""Keys of each verb's result, or of its first row."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run folder, and what `train --json` said on its two outputs: from a fork of this process, with workers."""
    folder, talk = (tmp_path_factory.mktemp("json") / name for name in ("run", "talk"))
    words = ["train", *small.settings(), "--layout", "dp=2", "--out", str(folder), "--record", "3:5"]
    status = small.status_of(small.in_background([*words, "--json"], talk), 300)
    out, err = ((talk / name).read_text(encoding="utf-8") for name in ("out", "err"))
    assert status == 0, err
    return folder, out, err


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print(1)")


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    def said(*words: str) -> tuple[int, Any]:
        """The exit status of a command, and the one document that it printed."""
        capfd.readouterr()
        status = small.main(*words)
        lines = capfd.readouterr().out.splitlines()
        assert len(lines) == 1, lines
        document = json.loads(lines[0], parse_constant=pytest.fail)  # NaN is no JSON
        assert (document.pop("samestep"), document.pop("format")) == (metadata.version("samestep"), results.FORMAT)
        assert document.pop("verb") == words[0]
        return status, document

    return said


def _verbs() -> list[str]:
    return [*arguments.verbs_of(cli._parser())]


def test_every_verb_has_a_row() -> None:
    assert set(WORDS) == set(ASKS) == set(_verbs())


@pytest.mark.parametrize("verb", _verbs())
def test_a_verb_gives_its_result(
    verb: str,
    said: Callable[..., tuple[int, Any]],
    run: tuple[Path, str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from samestep.proof import verify
    from samestep.wings.cluster.diagnosis import doctor
    from samestep.wings.cluster.diagnosis.report import Report
    from samestep.wings.plan import calibrate
    from samestep.wings.plan.measurement import profile

    verdict = Verdict(layout="dp=2", job="", steps=1, precision="float64", checks=())
    monkeypatch.setattr(verify, "verify", lambda *_, **__: verdict)
    report = Report("one host", (), 0.0)
    monkeypatch.setattr(doctor, "doctor", lambda *_, say, **__: say(report.to_text()) or report)
    refit = SimpleNamespace(to_record=lambda: {"rows": []}, to_text=lambda: "refitted", kept="")
    monkeypatch.setattr(calibrate, "calibrate", lambda *_, **__: refit)
    monkeypatch.setattr(profile, "benchmark_hardware", lambda **_: hardware.load("cpu-laptop"))
    platform.platform()  # runs a program the first time, of which tests/audit.py would complain
    words = [str(run[0]) if word == "RUN" else word for word in WORDS[verb]]
    status, document = said(verb, *words, "--json")
    assert (status, list(document)) == (0, ["result"]), document
    found = document["result"]
    row = found[0] if isinstance(found, list) else found
    if verb != "train":
        assert not set(ASKS[verb]) - set(row), sorted(row)
    if verb not in ("export", "simulate"):  # all write a file in the same way
        return
    if verb == "export":
        words[-1] = "another"
    assert small.main(verb, *words, "--json", "result.json") == 0
    assert capfd.readouterr().out.strip()
    written = json.loads(Path("result.json").read_text())
    assert type(written) is type(found)
    assert set(written) == set(found) if isinstance(found, dict) else len(written) == len(found)


def test_a_run_prints_its_summary_alone_and_its_workers_on_the_other_output(run: tuple[Path, str, str]) -> None:
    folder, out, err = run
    document = json.loads(out)
    assert out.count("\n") == 1
    assert document["result"] == json.loads((folder / "summary.json").read_text())
    assert "loss" in err


@pytest.mark.parametrize("verb", _verbs())
def test_a_mistake_is_json_too(verb: str, said: Callable[..., tuple[int, Any]]) -> None:
    status, document = said(verb, "--nosuch", "--json")
    assert status == 2
    assert document["error"]["class"] == "InputError"
    assert document["error"]["code"] in ("unknown-argument", "arguments")  # one is missing too
    assert "--nosuch" in document["error"]["message"]


@pytest.mark.parametrize(
    ("words", "status", "code"),
    [
        (("plan", "none.toml", "--devices", "2", "--json"), 2, "job-file-missing"),
        (("plan", "--json", "none.toml", "--devices", "2"), 2, "job-file-missing"),
        (("plan", "--json", "-", "none.toml", "--devices", "2"), 2, "job-file-missing"),
        (("simulate", *PRESET, "--layout", "tp=7", "--json"), 2, "tp-indivisible"),
        (("evaluate", "nowhere", "--json"), 2, "run-folder-missing"),
        (("explain", "nowhere", "--json"), 2, "record-missing"),
    ],
)
def test_an_error_has_its_class_and_its_exit_status(
    words: tuple[str, ...], status: int, code: str, said: Callable[..., tuple[int, Any]]
) -> None:
    found, document = said(*words)
    error = document["error"]
    assert (found, error["code"]) == (status, code)
    assert issubclass(getattr(errors, error["class"]), errors.InputError)
    assert error["remedy"]


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (errors.WorkerError("worker-error", "rank 1 died"), 1, "WorkerError"),
        (KeyboardInterrupt(), 130, "KeyboardInterrupt"),
        (ZeroDivisionError("a mistake of ours"), None, "ZeroDivisionError"),
    ],
)
def test_a_failure_is_json_too(
    raised: BaseException,
    status: int | None,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(_: object) -> cli.Result:
        print("words of a library")
        raise raised

    monkeypatch.setattr(cli, "_env", fail)
    if status is None:
        with pytest.raises(type(raised)):
            cli.main(["env", "--json"])
    else:
        assert cli.main(["env", "--json"]) == status
    out, err = capfd.readouterr()
    assert json.loads(out)["error"]["class"] == kind
    assert "words of a library" in err


def test_a_number_that_is_none_is_null() -> None:
    assert results.plain({"a": float("nan"), 1: (float("inf"), Path("x"), {2})}) == {"a": None, "1": [None, "x", [2]]}
