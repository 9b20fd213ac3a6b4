"""The verb `measure`: a profile that loads, whose every number has a source; who reads it, and what steps that are run refit in it."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from samestep import cli, hardware
from samestep.hardware import cautions_here, load
from samestep.job import Job
from samestep.layout import Layout
from samestep.models import presets
from samestep.strategies import programs_of
from samestep.wings.plan import calibrate
from samestep.wings.plan.calibrate import calibrated, fit_of
from samestep.wings.plan.measured_steps import TimedStep
from samestep.wings.plan.measurement import microbenchmarks, profile
from samestep.wings.plan.simulation.kernel_rates import scores_s
from tests import small


class Normed(torch.optim.SGD):
    """Divides every gradient by the norm of all."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        torch._foreach_div_(gradients, torch.nn.utils.get_total_norm(gradients))
        super().step(closure)


def normed(params: list[torch.Tensor]) -> Normed:
    return Normed(params, lr=0.1)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmarks, "EDGES", {"cpu": (16, 32)})
    monkeypatch.setattr(microbenchmarks, "COPIED_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(microbenchmarks, "MESSAGES", {"cpu": (2**10, 2**14)})
    monkeypatch.setattr(microbenchmarks, "ENOUGH_S", {"cpu": 0.01})
    monkeypatch.setattr(microbenchmarks, "TURNS", {"cpu": 2})


@pytest.mark.usefixtures("quick")
def test_a_measured_profile_is_used_from_then_on(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", "--set", "model.source=preset:gpt2", "--devices", "2", "--top", "1", "--json", "plan.json"]
    assert cli.main(plan) == 0
    assert "hardware profile cpu-laptop: not measured on this machine" in capfd.readouterr().out
    assert json.loads(Path("plan.json").read_text())["hardware"] == "cpu-laptop"

    assert cli.main(["measure", "--device", "cpu", "--ranks", "2"]) == 0
    said = capfd.readouterr().out
    path = home / ".cache" / "samestep" / "this-machine.toml"
    assert f"written: {path}" in said
    machine = load("this-machine")
    assert f"{machine.memory_bytes_per_s / 1e9:.4g} GB/s" in said
    assert_every_number_has_its_source(path, ranks=2)

    assert cli.main(plan) == 0
    assert "not measured" not in capfd.readouterr().out
    assert json.loads(Path("plan.json").read_text())["hardware"] == "this-machine"


def test_more_ranks_than_this_machine_has_devices_are_named() -> None:
    mine = replace(load("cpu-laptop"), name="this-machine")
    assert cautions_here(mine, 2) == []
    (line,) = cautions_here(mine, 4)
    assert line.startswith("this-machine has 2 devices, so 4 are predicted as several such machines")


def assert_every_number_has_its_source(path: Path, ranks: int) -> None:
    """Each is measured, or said to be assumed."""
    machine, table = load(path), tomllib.loads(path.read_text())
    sources = table.pop("sources")
    keys = {
        f"{key}.{part}" if isinstance(value, dict) else key
        for key, value in table.items()
        for part in (value if isinstance(value, dict) else [""])
    }
    assert keys == set(sources)
    assumed = {key for key, text in sources.items() if not text.startswith("measured: ")}
    assert assumed == {"inter.latency_s", "inter.bytes_per_s"} | (
        {"intra.latency_s", "intra.bytes_per_s", "overlap"} if ranks == 1 else set()
    )
    assert all(sources[key].startswith("assumed: ") for key in assumed)
    assert machine.devices_per_node == ranks
    assert set(machine.flops_per_s) == set(microbenchmarks.DTYPES)
    for dtype in machine.flops_per_s:  # a curve by size, and its best
        rates = [float(rate) for rate in re.findall(r"\^3 (\S+?)[,;]", sources[f"flops_per_s.{dtype}"])]
        assert len(rates) == 2
        assert machine.flops_per_s[dtype] == pytest.approx(max(rates), rel=0.01)


@pytest.mark.usefixtures("quick", "home")
def test_one_device_has_no_link_to_tell_of(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["measure", "--device", "cpu", "--ranks", "1", "--out", "mine.toml"]) == 0
    said = capfd.readouterr().out
    assert said.startswith("1 device of ")
    assert "no link measured: one device sends nothing" in said
    assert "a hop" not in said
    assert_every_number_has_its_source(Path("mine.toml"), ranks=1)


def _sent(ranks: int, collective_s: float, latency_s: float, bytes_per_s: float) -> dict[str, dict[int, float]]:
    """What a ring takes, by the formula that `cost` prices with."""
    return {
        name: {
            size: collective_s + ways * (ranks - 1) * (latency_s + size / (ranks * bytes_per_s))
            for size in microbenchmarks.MESSAGES["cpu"]
        }
        for name, ways in (("all_reduce", 2), ("all_gather", 1))
    }


def _found(sent: dict[str, dict[int, float]]) -> microbenchmarks.Figures:
    return microbenchmarks.Figures(
        products={"float32": {64: 1e9}}, copied_bytes_per_s=1e9, kernel_launch_s=1e-6, kernel_s=0.0, attention_flops_per_s=1e8,
        sent=sent, beside_s=(1.0, 1.0, 1.9),
    )  # fmt: skip


@pytest.mark.parametrize("spoilt", [{}, {("all_reduce", 2**10): 9.0, ("all_gather", 2**21): 3.0}])
@pytest.mark.parametrize("collective_s", [0.0, 3e-4])
def test_the_link_is_fitted_to_what_a_ring_takes(collective_s: float, spoilt: dict[tuple[str, int], float]) -> None:
    """Figures made of a link give it back, though a few of them took many times as long."""
    ranks, latency_s, bytes_per_s = 4, 2e-5, 3e9
    sent = _sent(ranks, collective_s, latency_s, bytes_per_s)
    for (name, size), times in spoilt.items():
        sent[name][size] *= times
    link, about = profile._intra(_found(sent), ranks)
    assert link["collective_s"] == pytest.approx(collective_s, rel=0.02, abs=1e-9)
    assert link["latency_s"] == pytest.approx(latency_s, rel=0.02)
    assert link["bytes_per_s"] == pytest.approx(bytes_per_s, rel=0.02)
    assert ("0% off" in about["latency_s"]) == (not spoilt)
    assert profile._overlap(_found(sent))[0] is False


def test_a_figure_is_the_middle_one_of_its_turns() -> None:
    turns = [
        dataclasses.replace(_found({"all_reduce": {1024: seconds}}), kernel_s=seconds, beside_s=(seconds, 1.0, 2.0))
        for seconds in (5.0, 1.0, 2.0)
    ]
    middle = microbenchmarks._middle(turns)
    assert (middle.kernel_s, middle.sent, middle.beside_s) == (2.0, {"all_reduce": {1024: 2.0}}, [2.0, 1.0, 2.0])
    assert middle.products == turns[0].products


def test_a_gpu_profile_loads_too(tmp_path: Path) -> None:
    device = microbenchmarks.Device("GPU", 80 * 10**9, 132)
    found = microbenchmarks.Figures(
        products={dtype: {4096: 5e14} for dtype in microbenchmarks.DTYPES}, copied_bytes_per_s=2e12, kernel_launch_s=5e-6, kernel_s=2e-6,
        attention_flops_per_s=2.5e14,
    )  # fmt: skip
    (tmp_path / "gpu.toml").write_text(profile.as_toml(device, found, 1))
    machine = load(tmp_path / "gpu.toml")
    assert machine.num_units == 132
    assert machine.efficiency["bfloat16"] == 1.0
    # Priced alone, the attention that was measured takes as long as it did.
    attended = scores_s("sdpa", False, 128, 4096, 4096, 16, 0.5, 5e14 * machine.efficiency["attention"], 5e14, 132)
    assert 2 * 4096**2 * 128 * 16 / attended == pytest.approx(2.5e14, rel=0.01)


def test_what_cannot_be_written_is_said_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile.workers, "run_workers", lambda *_, **__: pytest.fail("it was measured"))
    assert cli.main(["measure", "--out", "/proc/mine.toml"]) == 2
    assert capsys.readouterr().err.startswith("samestep: /proc/mine.toml cannot be written: ")
    nowhere = tmp_path / "nowhere"
    assert cli.main(["measure", "--out", str(nowhere / "mine.toml")]) == 2
    assert small.without_code(capsys.readouterr().err) == (
        f"samestep: {nowhere / 'mine.toml'} cannot be written: there is no folder {nowhere}\n"
    )
    assert not nowhere.exists()


def test_what_was_not_measured_cannot_be_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--set", "model.source=preset:gpt2", "--devices", "2", "--hardware", "this-machine"]
    assert cli.main(words) == 2
    assert small.without_code(capsys.readouterr().err) == (
        "samestep: this machine has not been measured: samestep measure writes the profile this-machine\n"
    )


def test_what_another_version_measured_is_to_be_measured_anew(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = hardware.own_path()
    own.parent.mkdir(parents=True)
    shipped = resources.files("samestep").joinpath("profiles", "h100x8.toml").read_text(encoding="utf-8")
    own.write_text(shipped.replace("kernel_launch_s", "launch_s"))
    assert cli.main(["plan", "--set", "model.source=preset:gpt2", "--devices", "2"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("samestep: this-machine: launch_s: ")
    assert small.without_code(complaint).endswith("; samestep measure writes a new this-machine\n")


# -- train --layout auto -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("home")
def test_auto_trains_in_the_layout_that_plan_finds(capfd: pytest.CaptureFixture[str]) -> None:
    assert small.train("--layout", "auto", "--ranks", "2", "--out", "run", train__steps=2) == 0
    said = capfd.readouterr().out.splitlines()[0]
    found = re.match(
        r'layout "(.+)", the fastest(?: that is likely to fit)? of \d+ on 2 devices of cpu-laptop: predicted \S+ s per step, bound by ',
        said,
    )
    assert found
    assert Path("run/layout.txt").read_text() == found[1] + "\n"
    assert len(small.losses(Path("run"))) == 2


@pytest.mark.usefixtures("home")
def test_auto_passes_over_what_the_optimizer_cannot_follow(capfd: pytest.CaptureFixture[str]) -> None:
    """An optimizer that looks at all weights together leaves only replicas, though ZeRO is predicted to be as fast."""
    words = {"optimizer__name": "tests.unit.test_measure:normed", "optimizer__options": {}}
    assert small.train("--dry-run", "--layout", "auto", "--ranks", "2", **words) == 0
    assert "zero=" not in capfd.readouterr().out.splitlines()[0]


@pytest.mark.usefixtures("home")
def test_auto_says_when_nothing_fits(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    tiny = replace(load("cpu-laptop"), memory_bytes=1000)
    monkeypatch.setattr(hardware, "own", lambda: tiny)
    assert small.train("--layout", "auto", "--ranks", "2") == 2
    assert "--layout auto found no layout for 2 ranks: nothing fits" in capfd.readouterr().err


# -- plan --measure-top --------------------------------------------------------------------------------------------------


def test_the_best_are_run_and_the_own_profile_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "_why_kept", lambda _: "")  # how busy the machine is decides otherwise
    shipped = hardware.load("cpu-laptop")
    words = ["plan", *small.settings(), "--devices", "2", "--measure-top", "2", "--json", str(tmp_path / "plan.json")]
    assert small.main(*words) == 0
    said = capsys.readouterr().out
    steps = json.loads((tmp_path / "plan.json").read_text())["measured"]["steps"]
    assert len(steps) == 2
    assert all(step["measured_s"] > 0 and step["before_s"] > 0 for step in steps)
    assert re.search("layout +measured s +before +after", said)
    assert f"written: {hardware.own_path()}" in said
    assert hardware.load(hardware.OWN).memory_bytes == shipped.memory_bytes
    assert hardware.load("cpu-laptop") == shipped


def test_one_step_refits_nothing(tmp_path: Path) -> None:
    """What a fit is worth is said by steps that had no part in it, and there are none."""
    machine, job = hardware.load("cpu-laptop"), Job(model={"source": "preset:gpt2"}, train={"global_batch": 4})
    layout, model = Layout("dp=1"), presets.preset("gpt2")
    step = TimedStep(origin="5 steps", job=job, model=model, layout=layout, step_s=1.0)
    fit = fit_of([step], [programs_of(model, job, layout, 2)], machine)
    calibration = calibrated([step], fit, machine, tmp_path / "own.toml", [])
    assert calibration.hardware == machine
    assert "nothing written: one step" in calibration.to_text()
    assert not (tmp_path / "own.toml").exists()


@pytest.mark.parametrize(
    ("load", "cores", "is_busy"),
    [(7.0, 2, True), (1.9, 2, False), (1.2, 1, False), (40.0, 64, True), (20.0, 64, False)],
)
def test_a_measurement_on_a_busy_machine_says_so(load, cores, is_busy, monkeypatch):
    monkeypatch.setattr("psutil.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    lines = profile.busy()
    assert [f"the load was {load:.1f} on {cores} CPU cores" in line for line in lines] == [True] * is_busy


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--hardware", "h100x8"], "--measure-top runs on this machine, and --hardware h100x8 is another"),
        (["--set", "model.source=preset:gpt2"], "preset:gpt2 has a shape but no code"),
    ],
)
def test_what_cannot_be_run_is_refused_first(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert small.main("plan", "--devices", "2", "--measure-top", "2", *words) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1
