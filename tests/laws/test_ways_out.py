"""What a refusal says would work does work: every way out that it names leads to a layout that no strategy refuses.

A way out follows "Use", "Set" or "use", or "or" after these: words of a layout (`microbatch=4`, `dp=2 zero=1`) or of the job's
numerics (`batch_norm_group = 4`, `exchange_every=1`). A layout may be refused for a second reason afterwards; then that refusal's ways
are walked in turn. A way that comes back to where one has been, or that ends at words that cannot be, is a circle: the law fails.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from samestep.errors import InputError
from samestep.job import Job
from samestep.layout import Layout
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.layer_parts import BatchNormCall
from samestep.models.spec import ModelSpec
from samestep.program.step import StepSpec
from samestep.schedules import SCHEDULES
from samestep.strategies import refusal_of

MOST_STEPS = 15
_COUNTS = {"microbatch", "batch_norm_group", "exchange_every", "replicas"}
"""The right value of each of these is known when a refusal names it."""
_WORDS = {field.name for field in fields(Layout)} | {"dp"}
_ASSIGNED = re.compile(r"\b([a-z_]+) ?= ?\"?([a-z0-9-]+)\"?")
_NAMED = (r"or (.*)", r"(?:Use|Set|use) (.*?)(?:, not|$)")
_LEFT = re.compile(r"\balone\b|\bwithout sequence_parallel\b")


@dataclass(frozen=True)
class State:
    """A layout of a job, of which a refusal is asked."""

    layout: Layout
    numerics: tuple[tuple[str, Any], ...]
    batch: int

    def refusal(self, model: ModelSpec) -> str | None:
        """Return why it is refused; None if it works."""
        try:
            job = Job(train={"global_batch": self.batch}, numerics=dict(self.numerics))
        except InputError as error:
            return str(error)
        error = refusal_of(StepSpec.of(model, job, self.layout))
        return None if error is None else str(error)


def ways_out(text: str) -> Iterator[dict[str, str]]:
    """Yield the words of each way out that a refusal names, by their names; `without` is a switch to leave out."""
    parts = [part.strip() for part in re.split(r"[:;(]|\. (?=[A-Z])|, (?=or )", text)]
    for before, part in itertools.pairwise(["", *parts]):
        found = next((match for pattern in _NAMED if (match := re.match(pattern, part))), None)
        if part.startswith("or ") and not re.search(r"^(?:Use|Set|use|or) ", before):
            continue  # another way to fail
        words = dict(_ASSIGNED.findall(found[1])) if found else {}
        if found and '"int8"' in found[1]:
            words["compression"] = "int8"
        if part.startswith("without it"):
            words["without"] = before.split()[0]
        elif found and words and _LEFT.search(part):
            words["without"] = "sequence_parallel"
        if words:
            yield words


def taken(state: State, words: dict[str, str]) -> State | None:
    """Return the state in which a way out is taken; None where it names keys of other tables."""
    numerics, left = dict(state.numerics), words.get("without", "")
    words = {name: value for name, value in words.items() if name != "without"}
    of_layout = {name: value for name, value in words.items() if name in _WORDS}
    for name, value in words.items():
        if name not in of_layout:
            if name not in type(Job().numerics).model_fields:
                return None
            numerics[name] = int(value) if value.isdigit() else value
    kept = dict(word.partition("=")[::2] for word in str(state.layout).split())
    if "dp" in of_layout:
        kept = {name: value for name, value in kept.items() if not name.startswith("dp_")}
    elif {"dp_replicate", "dp_shard"} & of_layout.keys() and "dp" in kept:
        del kept["dp"]
    if of_layout.get("zero") == "0" and "dp_shard" in kept and "dp_shard" not in of_layout:
        total = state.layout.dp
        kept = {name: value for name, value in kept.items() if not name.startswith("dp")} | {"dp": str(total)}
    if of_layout.get("schedule") and not SCHEDULES[of_layout["schedule"]].takes_chunks:
        kept.pop("virtual_stages", None)
    kept.pop(left, None)
    merged = kept | of_layout
    line = " ".join(f"{name}={value}" if value else name for name, value in merged.items())
    return State(Layout(line), tuple(sorted(numerics.items())), state.batch)


def walk(model: ModelSpec, state: State, been: tuple[State, ...] = ()) -> str:
    """Follow the ways out of a state, the first time every one, later until one leads out; return how they fail, or nothing."""
    text = state.refusal(model)
    if text is None:
        return ""
    trace = " -> ".join(f"{one.layout} {dict(one.numerics)}" for one in (*been, state))
    if state in been or len(been) > MOST_STEPS:
        return f"a circle: {trace}: {text}"
    failed = ""
    for words in ways_out(text):
        try:
            following = taken(state, words)
            found = "" if following is None else walk(model, following, (*been, state))
            if following is not None and not been and _takes_back(following.refusal(model), words):
                found = f"{trace}: {text}: {words} is taken back: {following.refusal(model)}"
        except InputError as error:
            found = f"{trace}: {text}: {words} cannot be: {error}"
        failed = failed or found
        if bool(found) != bool(been):  # one way that fails is enough at first, and one that leads out later
            return found
    return failed


def _takes_back(text: str | None, words: dict[str, str]) -> bool:
    """Return whether the first way out of a refusal gives a number that the way taken has set another value."""
    again = next(ways_out(text), {}) if text else {}
    return any(name in again and again[name] != words[name] for name in _COUNTS & words.keys())


def _normed(model: ModelSpec) -> ModelSpec:
    """Return a model whose blocks have batch norms."""
    layers = tuple(
        replace(layer, batch_norms=(BatchNormCall(owner=f"{layer.name}.bn", channels=4),)) if layer.is_block else layer
        for layer in model.layers
    )
    return replace(model, layers=layers)


def _balancing(model: ModelSpec) -> ModelSpec:
    """Return a model with a loss that balances experts."""
    return replace(model, balanced_experts=4)


PLAIN = spec(Decoder(layers=4, hidden=64, heads=4, vocab=512, sequence=64), "plain")
MIXED = spec(
    Decoder(layers=4, hidden=64, heads=4, vocab=512, sequence=64, experts=4, top_k=2, expert_intermediate=64), "mixed"
)
MODELS = {"plain": PLAIN, "normed": _normed(PLAIN), "mixed": MIXED, "balancing": _balancing(MIXED)}


def drawn(draw: random.Random) -> State:
    """Return a layout and numerics at random, most of which are refused."""
    pp, tp = draw.choice((1, 1, 2, 3, 8)), draw.choice((1, 1, 2, 3))
    zero = draw.randrange(4)
    schedule = draw.choice([*SCHEDULES]) if pp > 1 else "1f1b"
    layout = Layout(
        dp_replicate=draw.choice((1, 1, 2, 3)), dp_shard=draw.choice((1, 2, 3)) if zero else 1, zero=zero, tp=tp, pp=pp,
        cp=draw.choice((1, 1, 2, 3)), ep=draw.choice((1, 1, 2, 3)), schedule=schedule,
        virtual_stages=draw.choice((2, 3)) if SCHEDULES[schedule].takes_chunks else 1,
        sequence_parallel=tp > 1 and draw.random() < 0.3, microbatch=draw.choice((None, None, 1, 3, 4)),
        recompute=draw.choice(("none", "full")), accumulate=draw.choice(("sharded", "full")),
        reduce=draw.choice(("ring", "hierarchical", "root")), offload=draw.random() < 0.2,
    )  # fmt: skip
    numerics: dict[str, Any] = {}
    if draw.random() < 0.5:
        numerics = {
            "replicas": draw.choice((2, 3, 4)),
            "compression": draw.choice(("none", "int8", "powersgd", "bf16")),
        }
        if numerics["compression"] == "none" or draw.random() < 0.3:
            numerics["exchange_every"] = draw.choice((2, 4))
    elif draw.random() < 0.3:
        numerics = {"batch_norm_group": draw.choice((2, 4, 6))}
    return State(layout, tuple(sorted(numerics.items())), draw.choice((12, 24)))


def walked(seeds: range) -> list[str]:
    """Return every way out of many refusals that leads in a circle or nowhere."""
    failed = []
    for seed in seeds:
        draw = random.Random(seed)
        model = MODELS[draw.choice([*MODELS])]
        try:
            state = drawn(draw)
            Job(train={"global_batch": state.batch}, numerics=dict(state.numerics))
        except InputError:  # refused before a model is looked at
            continue
        if reason := walk(model, state):
            failed.append(f"{model.name}, seed {seed}: {reason}")
    return failed


APART = (("exchange_every", 2), ("replicas", 2))
CODED = (("compression", "int8"), ("replicas", 2))
FACTORED = (("compression", "powersgd"), ("replicas", 2))


@pytest.mark.parametrize(
    ("name", "layout", "numerics", "text"),
    [
        ("normed", "dp=1", CODED, "Use dp=2"),
        ("normed", "dp=1 microbatch=6", CODED, "Use microbatch=12"),
        ("normed", "dp=2", APART, "Use exchange_every=1 with replicas=1"),
        ("balancing", "dp=1", CODED, "Use dp=2"),
        ("balancing", "dp=2", APART, "Use exchange_every=1 with replicas=1"),
        ("plain", "dp_replicate=2 dp_shard=1 zero=1 cp=2", FACTORED, "among cp=2. Use dp=2 zero=0"),
        ("plain", "dp=1 zero=3 accumulate=full", (), "Use accumulate=sharded"),
    ],
)
def test_refusals_that_once_led_in_a_circle_lead_out(name: str, layout: str, numerics: Any, text: str) -> None:
    state = State(Layout(layout), numerics, 12)
    assert text in (state.refusal(MODELS[name]) or "")
    assert walk(MODELS[name], state) == ""


def test_every_way_out_that_a_refusal_names_works() -> None:
    assert walked(range(150)) == []


@pytest.mark.nightly
def test_every_way_out_of_many_more_refusals_works() -> None:
    assert walked(range(150, 10_000)) == []
