"""What fits can say of predictions: how well rows of a new source are met, and what measuring one node is worth.

cross_validate   six constants of which nothing is known but a range; for each source they are fitted to all others,
                 and then predict it
calibrate        a profile is refitted to five of a source's rows on one node, as `samestep calibrate` does, and predicts
                 the other ones, and rows of 64 devices and more

What was tried and is not in the model, with what it adds to the mean error over sources (about 23 % on 207 rows then):

networks that reach 0.6 or 0.9 of their ports, not 0.75      +0.1 and +0.1
attention that reaches a quarter less on every device        +0.3: torchtitan gains 4, MosaicML's A100 lose 5; taken
                                                             from Hopper on, for PyTorch's own kernels alone
products that reach 0.92 of the best shape's rate, not 0.85  +0.9: vTrain gains 2, most others lose 1 to 4
backwards that move 2.2 times a forward's bytes, not 1.75    -0.2, with signs that differ by source
32 or 96 steps to fill a tile's pipeline, not 64             none
compute slowed by a quarter beside communication             -0.2 from a tenth; the published mean, 0.19, is taken
exchanges between experts that nothing hides                 DeepSeek-V3 on 1,024 H100 takes 3.8 times what it took
recompute where memory seems full, in NVIDIA's recipes       70B on GB300 27 to 70 % too slow

and later, to 16.0 % on 570 rows of 16 sources, none of which changed which layout is chosen:

a softer maximum of device and host, its power 4, not 8      +0.4
one size of tile, 256 x 128; or small ones that reach less   none; +0.3 and +0.2 of Megatron-LM's papers
products whose rows start at 16 bytes at 0.7, not 0.8        none; BigScience gains 0.5

and later still, with constants that were the best of their levels, not the mean over all levels:

ten rows of MaxText on chips of 32 GB that recompute all     -8 of Google's recipes; but `products` went from 0.82 to 0.88 for nine other
                                                             sources: +0.6 in the middle. Both are in since, the mean for that reason
a level as probable as 1 / error^n of n sources, not rows    +1.2 in the middle, +0.9 on average: constants stay near the middle of their
                                                             levels, launches at 32 us
all combinations of levels, and the best of them             +0.9 in the middle, +0.3 on average
Transformer Engine's slower host in all rows, not in         Bridge +0.3, DGX Cloud -0.6, and the one mixture of the model zoo, 25 % too
checked ones alone                                           slow, 58 %: GPT-OSS, 24 % too fast in Bridge, is not bound by launches

errors as means of sources' means, so that the one row of    +0.9 in the middle, +0.5 on average: launches follow that row, and are 16 us where
the model zoo counts as much as ten of others               Megatron's checked runs are left out
levels of launches all equally probable, not around what    -0.1 in the middle, +0.1 on average
is published of them
half as many levels of launches, which sum up worse          +0.4 in the middle, -0.2 on average
Grace's host 2.75 times as slow as a DGX H100's, as one      MLPerf 5.0 to 8.1, the model zoo 26 to 88, DGX Cloud 16 to 14: +16 on average of
Linear is (NVIDIA/TransformerEngine, issue 2053), not 1.46   the four sources with Grace
today's fit of all constants instead of the shipped ones     14.7 to 14.3 on 246 rows, and the same 15.2 on one to eight devices: launches of
                                                             33 us (functional tests) or 25 (all others), products 0.83, attention 0.99
all ports of a node for gathers of ZeRO-3 before Hopper      BigScience 15 to 35, Megatron-LM's papers 11 to 41, other papers 12 to 33, all too fast

and of what was looked at before that (six more rules; four are below):

four forwards in FLOP/s whose formula always counts them     OneFlow's smallest model, 6 % too fast, 19 % too slow
rows that their own page disowns, or whose degrees are not   not looked at: BigScience would gain, and they were run
those of their devices, left out

What the errors by source and machine showed to be missing, and is in the model since:

what Megatron-LM's functional tests start, counted and       their mean error with constants of the other sources is the same, 60, as with four
measured, and launches as published in all profiles          factors that had been learnt on them; without modules' Python, 70; local modules are met
collectives that the host starts (pytorch/pytorch, issue     functional tests under tp were 1.3 times too fast; DGX Cloud and Bridge 1 less
138773), and fills of deterministic kernels
operations that scale and add what adapters make, as peft's  AutoModel 23.5 to 22.4, MLPerf 10.4 to 10.9: its LoRA was met without them
logits in 16 bits beside products in 8 or 4, and the last    torchtitan's NVFP4, 38 % too fast, is 19; all others 0 to 5 slower: 1 % less
15 % of the blocks in its recipe of 4 bits                   in torchtitan, 0.4 more in MLPerf, 1.5 more in LLMQ's
as many micro-batches as stages in torchtitan's pipelines    its 405B at 8k tokens, 32 and 21 % too fast, is 1 and 4; at 32k, where 8 is all
                                                             there are, it was met before
recompute that ColossalAI counts in its FLOP/s, and the      16 to 10 % of its three rows
batch of a data rank that it prints
as many tasks of each kind left out of a long step           memory of BigScience's first stages was up to 6 % too much

sends of NCCL in the queue of a stage that hides nothing     BigScience's first rows, 25 to 31 % too fast, gain 1 to 4
a clock that Blackwell does not hold (`sustained`)           steps of products alone were 20 % too fast in six sources
an update on the host (`offload`)                            70B full finetuning by torchtune took 1.85 times as long
ports of rented machines (A3: 100 Gb/s a GPU)                MaxText on 4 and 16 A3, 36 and 47 % too fast
attention by family of kernels, head, length and direction   MosaicML's steps at 32k and 65k tokens, with kernels of before
                                                             FlashAttention-2, were met by a rate that was too low for all others
scans of Mamba-2, and ten attentions (Nemotron-H)            seven rows, 28 % too fast as attentions within chunks, are 20 % too fast
the clock that a power limit leaves (GB200, GB300)           all of GB300's rows of three kinds of layouts were 1.2 to 1.3 times too slow
an exchange of NCCL serves all peers at once: one hop, not   64 ranks of a GB300 rack waited for 63 hops four times a layer, 12 % of the
one for each                                                 model zoo's step
rows go to the nodes that their routing meets                AutoModel's balanced gate takes experts that follow each other: DeepSeek-V3 on
                                                             256 H100, 47 % too slow, is 8 % too fast
adapters of all linear layers in AutoModel                   two of its three fine-tunings were 22 and 41 % too fast

and of one to eight devices, decided on one half of the sources and confirmed on the other (18.2 % on average before, 12.8 % in the middle):

long products are split, so that their last wave is full     17.7 %: modded-nanogpt's 768 columns, 19 to 15, LLMQ 25 to 24
clocks of GeForce cards above their data sheets              16.9 %, 10.3 % in the middle: LLMQ 24 to 16, torchao 16 to 13, Answer.AI 24 to 22
instructions of elementwise kernels                          16.7 %: Lambda's A100, H100 and B200, 34 to 16 % too fast, gain half, and
                                                             the model zoo loses 4; twice as many instructions 16.7 too
eager blocks of torchtune and torchao, weights in INT8       16.1 %, 9.9 % in the middle: torchao 13 to 8 and 23 to 16
gradients of NVIDIA's recipes in 16 bits, and entries of     MLPerf 6.0 19.2 to 14.8, of which instructions take 1.2 again; Bridge and DGX
MLPerf that interleave                                       Cloud lose 1 each
copies at 0.93 of the bandwidth of GDDR, not 0.85; blocks    none and none
of NVIDIA's recipes that move what compiled ones do

and of one CUDA graph for the whole step, decided with these rows known (benchmarks/first_predictions.md):

experts that exchange rows beside other micro-batches        DeepSeek-V3 in Bridge and MLPerf 6.0: 31 to 53 % too slow, 3 % too fast to 19 too slow
sums of gradients that nothing hides, with a tensor cut      four entries of 512 and 1,024 devices: 19 to 35 % too fast, 11 % too fast to 2 too slow
the same without a tensor cut                                MLPerf's 8B on 72 devices, 4 % too slow, 21 %
the same without a graph                                     GPT-3 on H100, 6 to 8 % too slow, 11 to 16 %

and of `calibrate`, whose median entry they did not lower (8.2 % with normal errors of 0.1 and factors of 0.35): factors of 0.2, as the
record's sources differ, 8.9 %; with these and Cauchy errors of 0.05, as its rows have them around their source's own factor, 8.7 %.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cells import Row, whole
from forecast import PARTS, UNREADABLE, TimedStep, busy_parts, known, rounded
from foresight_parts import work_of
from foresight_workers import Workers
from published import Case, case_of
from published_machines import SHIPPED, machine_of
from published_memory import is_timed

from samestep import hardware as machines
from samestep.hardware import Hardware
from samestep.wings.plan.calibrate import Fit, scaled
from samestep.wings.plan.simulation import cost
from samestep.wings.plan.simulation.accuracy import class_of

FAR = 64
"""Devices from which on a row is far from one node."""
LEAST_ROWS = 8
"""Of one node, without which nothing is calibrated."""

LAUNCH_S, LAUNCH_FACTOR = 20.7e-6, 2.0
"""Expected of `kernel_launch_s` before any row is seen, and the factor by which it may well be off. PyTorch's host takes 13.5 us of DGX
H100's processors for the forward of a Linear, 33 and 37 us of Grace's (NVIDIA/TransformerEngine, issue 2053); a DGX A100's take 1.53
times as long as the former, as the profiles have it. The simplest operation with a gradient takes half of that (pytorch/pytorch, issue
41383: 7 us), Transformer Engine's Linear 2.7 times as long as PyTorch's: a factor of two to both sides."""
_SPREADS = (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
"""How many times the spread levels of it are off what is expected. Twice as many move what is found by 3 %, half as many by 15 %, and
`host_step_s` by two thirds."""
CONSTANTS: dict[str, tuple[float, ...]] = {
    "kernel_launch_s": tuple(LAUNCH_S * LAUNCH_FACTOR**spread for spread in _SPREADS),
    "host_step_s": (2.5e-3, 5e-3, 10e-3, 20e-3),
    "sustained": (1.0, 0.9, 0.8, 0.7),
    "products": (1.0, 0.94, 0.88, 0.82, 0.76),
    "attention": (1.0, 0.9, 0.8, 0.65),
    "collective_s": (15e-6, 25e-6, 50e-6),
}
"""Name and levels. Those of `kernel_launch_s`, of the processors of a DGX A100, are as probable before any row is seen as a normal
distribution of its logarithm has them, those of all others equally."""
Setting = tuple[float, ...]
MIDDLE: Setting = tuple(statistics.geometric_mean(levels) for levels in CONSTANTS.values())
"""What is expected of the constants before any row is seen."""
LEAST_OFF, MOST_OFF = 1e-6, 1.5
"""The smallest and the largest part that a prediction counts as off: one odd row shall not rule a fit, nor one that is met exactly."""
BASE = machines.load("a100-80x8")
"""The machine whose host others are compared with."""
HELD = machines.load("b200x8").sustained
"""The fraction of the device with which others that do not hold their clock are compared."""
PER_SOURCE = 10
"""Rows of a source that take part, evenly spaced: a fit of six constants needs no more."""
FEW = 3
"""Times as many rows that a source may have to be predicted whole besides, where it is left out."""


def adjusted(machine: Hardware, shipped: Hardware, setting: Setting) -> Hardware:
    """Return a machine with these constants; `products` and `attention` scale what its profile says is reached, `sustained`
    is the fraction of a B200, and others that do not hold their clock hold as many times as much as their profile says."""
    kernel_launch_s, per_step_s, sustained, products, attention, collective_s = setting
    # what the profile or the row says of this host and this run beside others stays as it is
    host = machine.kernel_launch_s / BASE.kernel_launch_s
    started = (
        machine.host_step_s - shipped.host_step_s
    ) / BASE.kernel_launch_s  # of a step's own operations, in launches
    reached = {
        k: min(1.0, v * (attention / cost.ATTENTION_REACHED if k == "attention" else products / cost.REACHED))
        for k, v in machine.efficiency.items()
    }
    return replace(
        machine,
        kernel_launch_s=kernel_launch_s * host,
        host_step_s=per_step_s + started * kernel_launch_s,
        efficiency=reached,
        sustained=min(1.0, sustained * shipped.sustained / HELD) if shipped.sustained < 1 else shipped.sustained,
        intra=replace(machine.intra, collective_s=collective_s),
        inter=replace(machine.inter, collective_s=collective_s),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its programs written, to be priced again and again."""

    source: str
    case: Case
    shipped: Hardware
    step: TimedStep
    work: str
    """What is special in what it trains (`work_of`)."""

    def ratio(self, setting: Setting) -> float:
        """Return the logarithm of predicted over measured seconds with these constants."""
        assert self.case.step_s
        return math.log(self.step.step_s(adjusted(self.case.machine, self.shipped, setting)) / self.case.step_s)

    def off(self, machine: Hardware) -> float:
        """Part by which a prediction for this machine is off."""
        assert self.case.step_s
        return abs(self.step.step_s(machine) / self.case.step_s - 1)


def strata(rows: Sequence[Row], most: int) -> list[tuple[str, list[Row]]]:
    """Divide the timed rows of each source into at most so many runs of consecutive rows, each with its source."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if is_timed(row):
            by_source[row["file"]].append(row)
    found = []
    for source, alike in by_source.items():
        count = min(most, len(alike))
        bounds = [index * len(alike) // count for index in range(count + 1)]
        found += [(source, alike[first:last]) for first, last in itertools.pairwise(bounds)]
    return found


def prepare(runs: Sequence[tuple[str, Sequence[Row]]]) -> list[Prepared | None]:
    """Write the programs of the first row of each run that can be predicted; None where none can."""
    return [next((one for row in alike if (one := _prepared(source, row))), None) for source, alike in runs]


def _prepared(source: str, row: Row) -> Prepared | None:
    """Return a row with its programs; None if it cannot be predicted."""
    try:
        case = case_of(row)
        shipped = SHIPPED[case.machine.name]
        return Prepared(source, case, shipped, known(case)[1], work_of(row)) if case.step_s else None
    except UNREADABLE:
        return None


class Fits:
    """How predictions of the timed rows of sources answer to each constant, and what is expected of the constants given some of the
    sources. The first row of each run that can be predicted takes part."""

    def __init__(self, runs: Sequence[tuple[str, Sequence[Row]]], workers: Workers) -> None:
        self._workers, self._runs = workers, defaultdict[str, list[tuple[str, Sequence[Row]]]](list)
        for source, alike in runs:
            self._runs[source].append((source, alike))
        found = workers.each(_ratios, [(source, (alike, _one_by_one())) for source, alike in self._runs.items()])
        answers = {source: np.array(one) for source, one in zip(self._runs, found, strict=True)}
        self.rows_of = {source: found.shape[1] for source, found in answers.items() if found.size}
        self.sources = [*self.rows_of]
        self._off = np.stack([_sum_off(answers[source]) for source in self.sources], axis=1)
        """Sum of the errors of each source's rows at each combination of levels."""

    def ratios(self, setting: Setting, source: str) -> list[float]:
        """Return the logarithms of predicted over measured seconds of a source's rows at one setting."""
        [[found]] = self._workers.each(_ratios, [(source, (self._runs[source], [setting]))])
        return found

    def all_ratios(self, setting: Setting, source: str) -> list[float]:
        """Return the same of all rows of a source, where those that take part are only some of a few."""
        alike = [(source, [row]) for _, run in self._runs[source] for row in run]
        if not self.rows_of[source] < len(alike) <= FEW * self.rows_of[source]:
            return []
        [[found]] = self._workers.each(_ratios, [(source, (alike, [setting]))])
        return found

    def labels(self, source: str) -> list[tuple[str, int, str]]:
        """Return the class of machine, the number of devices and the kind of work of a source's rows."""
        return [label for label, _ in self._described(source)]

    def busy(self, source: str) -> dict[str, float]:
        """Return for how much of a step each of its parts is busy, the mean over a source's rows in per cent."""
        parts = [part for _, part in self._described(source)]
        return {
            name: rounded(100 * statistics.fmean(alike))
            for name, alike in zip(PARTS, zip(*parts, strict=True), strict=True)
        }

    def _described(self, source: str) -> list[Described]:
        [found] = self._workers.each(_describe, [(source, (self._runs[source],))])
        return found

    def expected(self, without: Container[str]) -> Setting:
        """Return what is expected of the constants given all sources but some.

        Errors of n rows with a Laplace distribution of a width that nobody knows make a combination of levels as probable as
        1 / (mean error)^n, times what is expected of it before any row is seen. Rows count one by one, at most `PER_SOURCE` of a source,
        since a source's own factor would leave most of their errors (the record's table of factors). The mean over all combinations
        moves little where a row is added; the most probable one jumps from level to level.
        """
        others = [place for place, source in enumerate(self.sources) if source not in without]
        off = self._off[:, others].sum(axis=1) if others else np.ones(len(self._off))
        odds = _BEFORE * (off.min() / off) ** sum(self.rows_of[self.sources[place]] for place in others)
        return tuple(np.exp(np.average(_LOGS, axis=0, weights=odds)).tolist())


_LOGS = np.log([*itertools.product(*CONSTANTS.values())])
"""Logarithms of the constants at all combinations of levels."""
_BEFORE = np.repeat(np.exp(-0.5 * np.square(_SPREADS)), len(_LOGS) // len(_SPREADS))
"""How probable the combinations are before any row is seen, as parts of the most probable one."""


def _one_by_one() -> list[Setting]:
    """Return the middle of all constants, and each of their levels where the others are in the middle."""
    places = enumerate(CONSTANTS.values())
    return [MIDDLE, *((*MIDDLE[:place], level, *MIDDLE[place + 1 :]) for place, levels in places for level in levels)]


def _sum_off(answers: np.ndarray) -> np.ndarray:
    """Return the sum of the errors of some rows at all combinations of levels, from their logarithms of predicted over measured seconds
    at `_one_by_one`: each constant adds its own part, which is what it changes where the others are in the middle."""
    middle, first = answers[0], 1
    total = middle
    for levels in CONSTANTS.values():
        total = total[..., None, :] + (answers[first : first + len(levels)] - middle)
        first += len(levels)
    return np.clip(np.abs(np.expm1(total.reshape(-1, len(middle)))), LEAST_OFF, MOST_OFF).sum(axis=1)


def _ratios(runs: Sequence[tuple[str, Sequence[Row]]], settings: Sequence[Setting]) -> list[list[float]]:
    """Return the logarithms of predicted over measured seconds at each of some settings, of a row of each run."""
    prepared = [one for one in prepare(runs) if one is not None]
    return [[one.ratio(setting) for one in prepared] for setting in settings]


Described = tuple[tuple[str, int, str], list[float]]
"""The labels of a row, and for how much of its step each part is busy."""


def _describe(runs: Sequence[tuple[str, Sequence[Row]]]) -> list[Described]:
    groups: list[Described] = []
    for prepared in prepare(runs):
        if prepared is not None:
            words = prepared.case.words
            count = math.prod(int(words.get(word, 1)) for word in ("tp", "pp", "dp_replicate", "dp_shard"))
            label = class_of(prepared.case.machine, count), count, prepared.work
            groups.append((label, busy_parts(prepared.step, prepared.case.machine)))
    return groups


Fitted = dict[str, dict[str, Any]]
"""By source: its rows, their errors in per cent, and the constants that the other sources show."""


def cross_validate(rows: Sequence[Row], workers: Workers, aside: Container[str] = ()) -> tuple[Fitted, Fitted]:
    """Fit the constants to all sources but one, and predict that one: measured ones without those `aside`,
    and all as if nothing were aside."""
    fits = Fits(strata(rows, PER_SOURCE), workers)
    names = [name for name in dict.fromkeys(row["file"] for row in rows) if name in fits.sources]
    left_out = [name for name in names if name in aside]
    measured = {name: _left_out(fits, name, (name, *left_out)) for name in names if name not in aside}
    every = {name: _left_out(fits, name, (name,)) for name in names} if left_out else measured
    return measured, every


def _left_out(fits: Fits, source: str, without: Container[str]) -> dict[str, Any]:
    """Return how well a source is met with what is expected of the constants without some."""
    setting = fits.expected(without)
    mine, every = (
        [100 * min(abs(math.expm1(ratio)), MOST_OFF) for ratio in found]
        for found in (fits.ratios(setting, source), fits.all_ratios(setting, source))
    )
    return {
        "each": [(*label, rounded(off)) for label, off in zip(fits.labels(source), mine, strict=True)],
        "busy": fits.busy(source),
        "rows": len(mine),
        "all_rows": len(every),
        "all_mape": rounded(statistics.fmean(every)) if every else None,
        "mape": rounded(statistics.fmean(mine)),
        "median_ape": rounded(statistics.median(mine)),
        **{name: float(f"{value:.3g}") for name, value in zip(CONSTANTS, setting, strict=True)},
    }


NEAR_ROWS = 40
"""Rows of one node that take part, at most, evenly spaced."""
FITTED_ROWS = 5
"""Rows of them that a profile is refitted to, evenly spaced: as many as a user has."""


def calibrate(rows: Sequence[Row], workers: Workers) -> dict[str, dict[str, float | None]]:
    """Refit the profile of each source's machine to five rows on one node, as `samestep calibrate` does; per cent of the rest.

    `near` are the other rows on one node, `far` those on 64 devices and more: nothing was fitted to either.
    """
    near: dict[tuple[str, str], list[Row]] = defaultdict(list)
    far: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        with contextlib.suppress(*UNREADABLE):
            machine, devices = machine_of(row), whole(row, "n_gpus")
            beyond = near if 0 < devices <= min(machine.devices_per_node, 16) else far if devices >= FAR else None
            if beyond is not None and is_timed(row):
                beyond[row["file"], machine.name].append(row)
    found = workers.each(_calibrated, [(key[0], (alike, far[key])) for key, alike in near.items()])
    return {f"{key[0]}, {key[1]}": one for key, one in zip(near, found, strict=True) if one}


def _calibrated(near: Sequence[Row], far: Sequence[Row]) -> dict[str, float | None]:
    """Return what five rows of one machine on one node are worth for its other rows; nothing where there are too few."""
    cases = _cases(near)
    if len(cases) < LEAST_ROWS:
        return {}
    fitted = cases[:: max(1, len(cases) // FITTED_ROWS)][:FITTED_ROWS]
    fit = Fit(
        [one.case.machine for one in fitted], [one.step.step_s for one in fitted], [one.case.step_s for one in fitted]
    )
    factors = _worth(fit, [one.case.step_s for one in fitted])
    rest = [one for one in cases if not any(one is other for other in fitted)]
    errors = {
        name: [100 * one.off(scaled(one.case.machine, factors)) for one in found]
        for name, found in (("near", rest), ("far", _cases(far)))
    }
    before = [100 * one.off(one.case.machine) for one in rest]
    return {
        "before": rounded(statistics.fmean(before)),
        **{name: rounded(statistics.fmean(found)) if found else None for name, found in errors.items()},
        "near_rows": len(errors["near"]),
        "far_rows": len(errors["far"]),
        **{name: rounded(value) for name, value in factors.items()},
    }


def _cases(rows: Sequence[Row]) -> list[Prepared]:
    return [one for one in prepare(strata(rows, NEAR_ROWS)) if one is not None]


def _worth(fit: Fit, measured_s: Sequence[float]) -> dict[str, float]:
    """Return the most probable factors; all one where `samestep calibrate` keeps the profile, as steps that a fit has not seen say."""
    found = fit.best(range(len(measured_s)))

    def median_error(predicted_s: Sequence[float]) -> float:
        return statistics.median(abs(one / other - 1) for one, other in zip(predicted_s, measured_s, strict=True))

    is_worth = median_error(fit.left_out(found)) < median_error(fit.seconds({}))
    return found if is_worth else dict.fromkeys(found, 1.0)
