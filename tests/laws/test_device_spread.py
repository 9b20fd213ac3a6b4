"""Laws of devices that are not equally fast: a step waits for the slowest, and more devices are never faster for each.

What is expected of the largest of N normal values is held against its integral, N integral of x phi(x) Phi(x)^(N-1) dx.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import InputError
from samestep.hardware import Hardware, largest_normal, load
from samestep.layout import Layout
from samestep.program.ops import OpKind
from samestep.strategies import programs_of
from samestep.wings.plan.simulation import cost
from samestep.wings.plan.simulation.simulate import predict
from tests.laws.models import MACHINES, MODELS, job_of

_SPREADS = st.floats(0.001, 1.0)
_DEVICES = st.integers(1, 10**6)
_LAYOUTS = ("dp={n}", "dp={n} zero=1", "dp={n} zero=3", "dp={n} offload", "dp=1 tp={n}", "dp=1 pp={n}", "dp=1 cp={n}")
_NORMAL = statistics.NormalDist()


def _integral(count: int) -> float:
    """Return the expected largest of so many standard normal values, by the trapezium rule."""
    width = 1e-3
    values = (index * width for index in range(-9000, 9001))
    return sum(x * count * _NORMAL.pdf(x) * _NORMAL.cdf(x) ** (count - 1) for x in values) * width


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100, 4096])
def test_the_largest_of_normal_values_is_within_a_twentieth_of_its_integral(count: int) -> None:
    assert largest_normal(count) == pytest.approx(_integral(count), rel=0.05, abs=1e-9)


@given(_SPREADS, _SPREADS, _DEVICES, _DEVICES)
def test_more_devices_and_a_wider_spread_are_never_faster(spread: float, other: float, few: int, many: int) -> None:
    """The factor of the work grows with both, and is 1 of one device."""

    def times(spread: float, devices: int) -> float:
        machine = replace(MACHINES["slow"], device_spread=spread)
        return MACHINES["slow"].memory_bytes_per_s / machine.slowest_of(devices).memory_bytes_per_s

    (less, more), (few, many) = sorted((spread, other)), sorted((few, many))
    assert times(spread, 1) == 1.0
    assert 1.0 <= times(less, few) <= times(less, many) <= times(more, many)
    assert few < 2 or times(less, few) > 1.0


@pytest.mark.parametrize("name", ["h100x8", "cpu-laptop"])
@pytest.mark.parametrize("devices", [1, 2, 4096])
def test_devices_that_are_equally_fast_are_what_they_were(name: str, devices: int) -> None:
    assert (machine := load(name)).slowest_of(devices) is machine
    assert (
        replace(machine, device_spread=0.5).slowest_of(1).slowest_of(1).memory_bytes_per_s == machine.memory_bytes_per_s
    )


@pytest.mark.parametrize("words", _LAYOUTS)
@pytest.mark.parametrize("where", sorted(MACHINES))
def test_work_takes_the_factor_and_messages_take_what_they_did(words: str, where: str) -> None:
    """Of every op of a program; the links to the host are no work of a device."""
    machine = replace(MACHINES[where], device_spread=0.1, host_bytes_per_s=1e10)
    slow, times = machine.slowest_of(4), 1 + 0.1 * largest_normal(4)
    for program in programs_of(MODELS["tiny"], job_of(16), Layout(words.format(n=4)), machine.devices_per_node):
        for _, op in program.ops():
            before_s, after_s = (cost.seconds(op, program, one) for one in (machine, slow))
            if op.beside:  # what hides it takes longer
                assert 0 <= after_s <= before_s
            elif op.axis is not None:
                assert after_s == before_s
            elif op.kind is not OpKind.UPDATE or not program.step.layout.offload:
                assert after_s == pytest.approx(times * before_s)
            else:
                assert before_s < after_s < times * before_s


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(_LAYOUTS), st.sampled_from(sorted(MACHINES)), st.sampled_from([2, 4]), _SPREADS)
def test_a_step_is_longer_by_no_more_than_the_factor(words: str, where: str, devices: int, spread: float) -> None:
    """At every split of the same devices, and by the whole factor where messages are free."""
    layout, machine = Layout(words.format(n=devices)), MACHINES[where]

    def step_s(spread: float) -> float:
        return predict(MODELS["tiny"], job_of(16), layout, replace(machine, device_spread=spread)).step_s

    even_s, less_s, more_s = (step_s(one) for one in (0.0, spread / 2, spread))
    factor = 1 + spread * largest_normal(devices)
    assert even_s < less_s < more_s <= factor * even_s * (1 + 1e-9)
    if where == "free":
        assert more_s == pytest.approx(factor * even_s)


def test_a_prediction_keeps_the_machine_that_it_was_given() -> None:
    """Its MFU is that of the peak of a device, and no device is slower than itself: one device takes what it did."""
    machine = replace(load("h100x8"), device_spread=0.1)
    one, more = (predict(MODELS["tiny"], job_of(16), Layout(f"dp={n}"), machine) for n in (1, 4))
    assert one.hardware == more.hardware == machine
    assert one.step_s == predict(MODELS["tiny"], job_of(16), Layout("dp=1"), load("h100x8")).step_s


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("-0.01", "greater than or equal to 0"),
        ("1.5", "less than or equal to 1"),
        ("nan", "less than or equal to 1"),
        ("inf", "less than or equal to 1"),
        ('"wide"', "valid number"),
        ("[0.1]", "valid number"),
    ],
)
def test_a_spread_that_is_none_is_refused_by_its_key(value: str, said: str, profile: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=f"device_spread: .*{said}"):
        load(profile(f"device_spread = {value}"))


def test_a_profile_may_have_it(profile: Callable[[str], Path]) -> None:
    machine: Hardware = load(profile("device_spread = 0.03"))
    assert machine.device_spread == 0.03


@pytest.fixture
def profile(tmp_path: Path) -> Callable[[str], Path]:
    """Return a function that writes a profile with a further line, and returns its path."""

    def written(line: str) -> Path:
        file = tmp_path / "mine.toml"
        text = (Path(__file__).parents[1] / "seams" / "abacus.toml").read_text()
        file.write_text(f"{line}\n{text}")
        return file

    return written
