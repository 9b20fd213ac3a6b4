"""What is expected of the record's constants given rows, and the models that are put together for published rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import forecast  # noqa: E402
import foresight_fits as fits  # noqa: E402
import published  # noqa: E402
import published_mixers  # noqa: E402
from foresight_workers import Workers  # noqa: E402
from published_models import _NEAR  # noqa: E402

from samestep.models.decoder_spec import spec  # noqa: E402

PLAIN = {
    "model": "GPT", "n_layers": "4", "hidden": "256", "heads": "4", "seq_len": "128", "gpu": "A100", "n_gpus": "8",
    "precision": "BF16", "tp": "1", "pp": "1", "micro_batch": "1", "global_batch": "8", "recompute": "none",
}  # fmt: skip
SMALL = [{**PLAIN, "n_layers": str(layers)} for layers in (2, 4, 8)]  # whose launches take longer than their kernels
LARGE = [{**PLAIN, "hidden": "8192", "heads": "64", "seq_len": "2048", "n_layers": str(layers)} for layers in (2, 3)]


LEVELS = tuple(levels[len(levels) // 2] for levels in fits.CONSTANTS.values())


def timed_at(setting: fits.Setting, sources: Sequence[str]) -> list[dict[str, str]]:
    """Rows of these sources that took the seconds which these constants predict."""
    rows = [{**cells, "file": "a", "source": "own", "metric_step_time_s": "1"} for cells in (*SMALL, *LARGE)]
    found = [one for one in fits.prepare([("a", [row]) for row in rows]) if one]
    timed = [
        {**row, "metric_step_time_s": repr(math.exp(one.ratio(setting)))} for row, one in zip(rows, found, strict=True)
    ]
    return [{**row, "file": source} for source in sources for row in timed]


@pytest.mark.parametrize(
    ("place", "level"),
    # a launch of 7 us, the lowest level, takes no longer than the shortest kernels of a layer
    [("kernel_launch_s", 1), ("kernel_launch_s", -1), ("products", 0), ("products", -1)],
)
def test_constants_move_to_what_the_other_sources_show(place: str, level: int) -> None:
    names = [*fits.CONSTANTS]
    index, shown = names.index(place), fits.CONSTANTS[place][level]
    setting = (*LEVELS[:index], shown, *LEVELS[index + 1 :])
    rows = timed_at(setting, "abc")
    found = fits.Fits(fits.strata(rows, 10), Workers(rows))
    expected = dict(zip(names, found.expected(without="c"), strict=True))
    assert abs(math.log(expected[place] / shown)) < 0.35 * abs(math.log(fits.MIDDLE[index] / shown))
    for name, value in expected.items():
        least, most = min(fits.CONSTANTS[name]), max(fits.CONSTANTS[name])
        assert least * (1 - 1e-9) <= value <= most * (1 + 1e-9)
    assert found.expected(without="a") == pytest.approx(found.expected(without="c")), "all sources show the same"


def test_without_other_sources_the_middle_of_the_levels_is_expected() -> None:
    rows = timed_at(fits.MIDDLE, "a")
    found = fits.Fits(fits.strata(rows, 10), Workers(rows))
    assert found.expected(without="a") == pytest.approx(fits.MIDDLE)
    assert fits.MIDDLE[0] == pytest.approx(fits.LAUNCH_S), "what is published of a launch stands where no row shows it"


def test_a_row_counts_once_however_few_rows_its_source_has() -> None:
    """A row of its own source moves constants by as much as the same row among those of another one."""
    low, high = ((*LEVELS[:3], fits.CONSTANTS["products"][at], *LEVELS[4:]) for at in (-1, 0))
    rows, [odd] = timed_at(low, "a"), timed_at(high, "b")[-1:]

    def products(more: dict[str, str]) -> float:
        given = [*rows, more]
        return fits.Fits(fits.strata(given, 10), Workers(given)).expected(without="")[3]

    assert products(odd) == pytest.approx(products({**odd, "file": "a"}))


def test_a_source_that_is_aside_shows_the_others_nothing() -> None:
    """What is aside neither is predicted nor moves the constants of measured sources; as if it were not, it does both."""
    slow = (*fits.MIDDLE[:3], fits.CONSTANTS["products"][-1], *fits.MIDDLE[4:])
    rows = [*timed_at(fits.MIDDLE, "ab"), *timed_at(slow, "c")]
    measured, every = fits.cross_validate(rows, Workers(rows), aside=("c",))
    alone, same = fits.cross_validate([row for row in rows if row["file"] != "c"], Workers(rows))
    assert measured == alone == same
    assert every.keys() == {"a", "b", "c"}
    assert every["a"]["products"] < measured["a"]["products"]


def test_a_source_of_few_rows_more_is_predicted_whole_besides() -> None:
    """Where a source has up to three times as many rows as take part, the error of all of them is there too; else it is left out."""
    rows = timed_at(fits.MIDDLE, "a")
    late = [{**row, "file": "b", "metric_step_time_s": repr(2 * float(row["metric_step_time_s"]))} for row in rows]
    few, many = rows[:2] + late[:1], rows[:1] * 40
    given = [*rows, *({**row, "file": "b"} for row in few), *({**row, "file": "c"} for row in many)]
    found = fits.Fits(fits.strata(given, 2), Workers(given))
    expected = [math.log(0.5) if row is late[0] else 0.0 for row in few]
    assert found.all_ratios(fits.MIDDLE, "b") == pytest.approx(expected, abs=1e-6)
    assert found.all_ratios(fits.MIDDLE, "c") == []
    assert len(found.ratios(fits.MIDDLE, "b")) == 2


def test_what_two_constants_change_is_nearly_what_each_changes() -> None:
    """All combinations of levels are weighed by what each constant changes alone."""
    rows = timed_at(fits.MIDDLE, "a")
    (first, *_), (second, *_) = fits.CONSTANTS["kernel_launch_s"], fits.CONSTANTS["products"]
    products = [*fits.CONSTANTS].index("products")
    for one in fits.prepare([("a", [row]) for row in rows]):
        assert one
        alone = [
            one.ratio((first, *fits.MIDDLE[1:])),
            one.ratio((*fits.MIDDLE[:products], second, *fits.MIDDLE[products + 1 :])),
        ]
        both = one.ratio((first, *fits.MIDDLE[1:products], second, *fits.MIDDLE[products + 1 :]))
        assert both == pytest.approx(sum(alone), abs=0.02)


def test_a_hybrid_model_scans_in_linear_time_and_attends_in_some_layers() -> None:
    hybrid, mixers = _NEAR["nemotron-h-56b"], published_mixers.MIXERS["nemotron-h-56b"]
    models = [
        published_mixers.with_mixers(spec(one, "h"), one, mixers)
        for one in (hybrid, replace(hybrid, sequence=2 * hybrid.sequence))
    ]
    assert 55.5e9 < models[0].num_params < 56.5e9, "arXiv:2504.03624 counts 56 billion"
    assert [param.layer for param in models[0].params] == sorted(param.layer for param in models[0].params)
    assert len({param.name for param in models[0].params}) == len(models[0].params)
    scans, attentions = (
        [sum(p.flops for layer in model.layers for p in layer.products if is_kind(p)) for model in models]
        for is_kind in (lambda p: p.factors == "pair", lambda p: p.is_attention)
    )
    assert scans[1] == 2 * scans[0] > 0
    assert attentions[1] == 4 * attentions[0] > 0
    assert sum(any(p.is_attention for p in layer.products) for layer in models[0].layers) == mixers.attentions


def test_states_of_a_scan_are_moved_and_cut() -> None:
    cells = {
        **PLAIN,
        "model": "NEMOTRONH_56B",
        "n_layers": "",
        "hidden": "",
        "heads": "",
        "seq_len": "8192",
        "gpu": "H100",
    }
    case = published.case_of({**cells, "tp": "8", "file": "own", "source": "own", "metric_step_time_s": "1"})
    mixers = published_mixers.MIXERS["nemotron-h-56b"]
    attending = spec(_NEAR["nemotron-h-56b"], "h").layers[1]
    states = 8192 // mixers.chunk * mixers.width * mixers.state
    block = case.model.layers[1]
    assert block.moved.cut_elements - attending.moved.cut_elements > published_mixers.STATE_ELEMENTS * states
    assert all(p.cut_by(8).flops * 8 == p.flops for p in block.products if p.factors == "pair")


@pytest.mark.parametrize(
    ("cells", "busy"),
    [
        ({"n_gpus": "1", "global_batch": "1"}, {"compute", "update"}),
        ({"dp_replicate": "8"}, {"compute", "update", "between replicas"}),
        ({"tp": "4", "dp_replicate": "2"}, {"compute", "update", "within layers", "between replicas"}),
        (
            {"pp": "2", "dp_replicate": "4", "global_batch": "64"},
            {"compute", "update", "between stages", "between replicas"},
        ),
    ],
)
def test_parts_of_a_step_are_busy_where_a_layout_has_them(cells: dict[str, str], busy: set[str]) -> None:
    row = {**LARGE[0], "metric_step_time_s": "1", "file": "a", "source": "own", "n_layers": "4", **cells}
    parts = fits.Fits([("a", [row])], Workers([row])).busy("a")
    assert {name for name, share in parts.items() if share > 0} == busy
    assert 50 < parts["compute"] <= 100
    whole, few = (
        forecast.busy_parts(forecast.known(case)[1], case.machine)[0]
        for case in (published.case_of({**row, "global_batch": str(batch)}) for batch in (512, 8))
    )
    assert few <= whole + 1e-9, "more micro-batches leave less to update, to reduce and to wait for"
