"""Published runs and textbook comparisons by name: `samestep simulate --case NAME`.

Each case states its batch and its tokens, and is predicted like any other job, with the same profiles and constants.
The published figures are printed beside the prediction for comparison; nothing is fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from samestep import hardware
from samestep.errors import InputError, did_you_mean
from samestep.hardware import Hardware
from samestep.job import Job
from samestep.layout import Layout
from samestep.memory.memory_use import at_rest, classic_bytes_per_param, held_bytes_per_param
from samestep.models import presets
from samestep.output.text import gib
from samestep.program.ops import OpKind
from samestep.wings.plan.simulation.collectives import GroupShape, collective_s
from samestep.wings.plan.simulation.simulate import Prediction, predict

A100 = "a100-80x8"
V100 = "v100x8"
ONE_DEVICE_BATCH = 64
"""Sequences in a step of a single device: enough to make the time of the update small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A training run as published, written as a job and a layout."""

    title: str
    model: str
    layout: str
    global_batch: int
    """Sequences of one step."""
    sequence: int
    """Tokens of a sequence."""
    tokens: float
    """Tokens of the whole training."""
    published: str
    """Published figures, with their source."""
    machine: str = A100
    vocab: int = 0
    """Size of the vocabulary, padded so that it can be cut; 0: the model's."""

    def job(self) -> Job:
        """Return the job of a step, with bf16 and Adam."""
        return Job(
            model={"source": f"preset:{self.model}"},
            data={"sequence_length": self.sequence},
            train={"global_batch": self.global_batch},
            numerics={"precision": "bf16"},
        )

    def predict(self, machine: Hardware | None = None) -> Prediction:
        """Return the prediction of one step, on the published machine or another one."""
        changes = {"vocab": self.vocab} if self.vocab else {}
        model, where = presets.preset(self.model, self.sequence, changes), machine or hardware.load(self.machine)
        return predict(model, self.job(), Layout(self.layout), where)

    def on_one_device(self) -> Prediction:
        """Return the prediction of the run's sequences one by one on a single device, whether or not they fit there."""
        words = Layout(self.layout)
        few = replace(self, layout=f"dp=1 microbatch=1 recompute={words.recompute}", global_batch=ONE_DEVICE_BATCH)
        return few.predict()

    def lines(self) -> list[str]:
        """Return the description of the run, its prediction and the published figures, a line each."""
        prediction, alone = self.predict(), self.on_one_device()
        years = self.tokens / alone.tokens_per_s_per_device / 86_400 / 365.25
        days = self.tokens / (prediction.tokens_per_s_per_device * prediction.devices) / 86_400
        fits = "fits" if prediction.fits else "DOES NOT FIT"
        padded = f"; the vocabulary is padded to {self.vocab:,}, so that tp can cut it" if self.vocab else ""
        return [
            self.title,
            f'{prediction.devices} devices of {self.machine}, layout "{self.layout}"',
            f"a step: {self.global_batch} sequences of {self.sequence}, {prediction.tokens:,} tokens; {self.tokens:.3g} tokens in all{padded}",
            f"{prediction.step_s:.4g} s per step, {prediction.tokens_per_s_per_device:,.0f} tokens/s and "
            f"{prediction.tflops_per_device:.0f} TFLOP/s per device, MFU {prediction.mfu:.1%}, bubbles {prediction.bubble_fraction:.1%}",
            f"peak {gib(prediction.peak.total)} GiB of {gib(prediction.hardware.memory_bytes)}: {fits}",
            f"{self.tokens:.3g} tokens take {days:.1f} days",
            f"one device would take {years:,.0f} years, and {gib(alone.peak.total)} GiB of memory: sequence by sequence",
            f"published: {self.published}",
        ]


RUNS = {
    "gpt3-4096": PublishedRun(
        title="GPT-3 175B on 4,096 A100: 64 data x 8 tensor x 8 pipeline",
        model="gpt3-175b",
        layout="dp=64 zero=1 tp=8 pp=8 microbatch=1 recompute=selective",
        global_batch=1536,
        sequence=2048,
        tokens=300e9,
        published="batch of 3.2 M tokens, 300 B tokens (arXiv:2005.14165); 1,024 A100 take 34 days at 140 TFLOP/s "
        "(arXiv:2104.04473, section 5.1), so 4,096 at that rate would take 8.5",
        vocab=51200,
    ),
    "llama2-70b-fsdp": PublishedRun(
        title="Llama 2 70B with fully sharded data parallel on 2,048 A100",
        model="llama2-70b",
        layout="dp=2048 zero=3 microbatch=1 recompute=full",
        global_batch=2048,
        sequence=4096,
        tokens=2e12,
        published="1,720,320 GPU hours (arXiv:2307.09288, table 2), which is 35.0 days of 2,048; its batch was 4 M tokens, "
        "half of this, which gives every device one sequence",
    ),
    "mt-nlg-530b": PublishedRun(
        title="Megatron-Turing NLG 530B on 4,480 A100: 16 data x 8 tensor x 35 pipeline",
        model="mt-nlg-530b",
        layout="dp=16 tp=8 pp=35 microbatch=1 recompute=full",
        global_batch=1920,
        sequence=2048,
        tokens=270e9,
        published="60.1, 50.2 and 44.4 s per step on 2,240, 2,800 and 3,360 A100 (arXiv:2201.11990, section 3.2), batch 1,920; "
        "270 B tokens",
    ),
    "llama-65b": PublishedRun(
        title="LLaMA 65B with fully sharded data parallel on 2,048 A100",
        model="llama-65b",
        layout="dp=2048 zero=3 microbatch=1 recompute=selective",
        global_batch=2048,
        sequence=2048,
        tokens=1.4e12,
        published="380 tokens/s per device, 21 days for 1.4 T tokens, batch of 4 M tokens (arXiv:2302.13971, section 2.4)",
    ),
}


# -- comparisons -------------------------------------------------------------------------------------------------------


def _gpt2(layout: str, model: str = "gpt2", batch: int = 64) -> Prediction:
    return _one_step(model, layout, batch, 1024)


def _one_step(model: str, layout: str, batch: int, sequence: int, machine: Hardware | None = None) -> Prediction:
    run = PublishedRun(
        title="", model=model, layout=layout, global_batch=batch, sequence=sequence, tokens=1.0, published=""
    )
    return run.predict(machine)


def _zero_memory() -> list[str]:
    """Return the memory of ZeRO as in Rajbhandari et al. 2020, arXiv:1910.02054, figure 1."""
    params, ranks = 7.5e9, 64
    lines = [
        f"weights, gradients and Adam's states of {params:.3g} weights on {ranks} ranks, GB a rank (no batch: activations)"
    ]
    for name, bytes_of in (("the paper's", classic_bytes_per_param), ("held here", held_bytes_per_param)):
        unsharded = bytes_of(0, ranks)
        sizes = [bytes_of(zero, ranks) for zero in range(4)]
        lines.append(
            f"{name:<11}  "
            + "  ".join(f"zero={z} {params * s / 1e9:6.1f} ({unsharded / s:.1f}x)" for z, s in enumerate(sizes))
        )
    return [*lines, "published: 120, 31.4, 16.6 and 1.9 GB; for many ranks 4x, 8x and N-fold"]


def _spread() -> list[str]:
    """Return the memory of the same weights on 64 devices: cut by pipeline and tensor, sharded, or replicated."""
    model, devices = presets.preset("llama2-70b", 4096), 64
    lines = [
        f"Llama 2 70B, {model.num_params / 1e9:.1f} B weights, on {devices} of {A100}; {devices} sequences of 4,096 per step"
    ]
    for words in (
        "dp=64 zero=3 microbatch=1",
        "tp=8 pp=8 microbatch=1",
        "dp=8 zero=3 tp=8 microbatch=1",
        "dp=64 microbatch=1",
    ):
        prediction = _one_step("llama2-70b", f"{words} recompute=full", devices, 4096)
        use_at_rest = max((at_rest(program) for program in prediction.programs), key=lambda use: use.total)
        room = "fits" if prediction.fits else "DOES NOT FIT"
        lines.append(
            f"{words:<30} {_mean_params(prediction) / 1e9:5.2f} B weights a device; {gib(use_at_rest.total):>6} GiB of weights, "
            f"gradients and Adam's states, {gib(prediction.peak.total):>6} GiB at the peak: {room}"
        )
    return [
        *lines,
        f"{model.num_params / 1e9:.1f} B weights / {devices} devices = {model.num_params / devices / 1e9:.2f} B",
    ]


def _mean_params(prediction: Prediction) -> float:
    """Return the number of weights that a rank keeps between steps, averaged over stages."""
    numbers = [
        sum(param.numel for param in program.step.model.params)
        / (program.step.layout.num_shards if program.step.zero == 3 else 1)
        for program in prediction.programs
    ]
    return sum(numbers) / len(numbers)


def _data_parallel() -> list[str]:
    prediction = _gpt2("dp=1 microbatch=8")
    lines = [f"GPT-2 on {A100}, 64 x 1,024 tokens per step ({prediction.tokens:,}) on every number of devices"]
    for count in (1, 2, 4, 8):
        ring, root = (_gpt2(f"dp={count} microbatch=8{words}") for words in ("", " reduce=root"))
        lines.append(
            f"{count} devices: {ring.step_s * 1e3:7.1f} ms, {prediction.step_s / ring.step_s:.2f} times as fast; "
            f"reduced to one and broadcast {root.step_s * 1e3:7.1f} ms, {prediction.step_s / root.step_s:.2f} times"
        )
    return lines


def _naive_pipeline() -> list[str]:
    prediction = _gpt2("pp=4 microbatch=32", "gpt2-xl", 32)
    lines = [
        f"GPT-2 XL on 4 of {A100}, 32 sequences of 1,024 per step ({prediction.tokens:,} tokens); layer l on one device of four"
    ]
    for name, words in (
        ("naive: one batch goes through all", "microbatch=32"),
        ("GPipe, 8 micro-batches", "schedule=gpipe microbatch=4"),
        ("1F1B, 8 micro-batches", "microbatch=4"),
        ("interleaved, 2 virtual stages", "schedule=interleaved virtual_stages=2 microbatch=4"),
    ):
        staged = _gpt2(f"pp=4 {words}", "gpt2-xl", 32)
        lines.append(
            f"{name:<34} {staged.step_s * 1e3:7.1f} ms, {prediction.step_s / staged.step_s:.2f} times as fast, "
            f"bubbles {staged.bubble_fraction:.0%}, peak {gib(staged.peak.total)} GiB"
        )
    return [*lines, "the formula: (p-1)/(m+p-1) is 75 % for one micro-batch on four stages, 27 % for eight"]


def _two_sizes() -> list[str]:
    machine = hardware.load(A100)
    size = 4 * 1_000_000_000
    lines = [
        f"one all_reduce of the float32 gradients of 1 B weights, S = {size:,} B, inside a node of {A100} (no batch, no tokens)"
    ]
    for ranks in (2, 4, 8):
        taken_s = collective_s(OpKind.ALL_REDUCE, size, GroupShape(ranks, 1, ranks), machine)
        rule_s = 2 * size / machine.intra.among(ranks).bytes_per_s
        lines.append(
            f"{ranks} ranks: {taken_s * 1e3:6.2f} ms; 2 S / B = {rule_s * 1e3:6.2f} ms; (n-1)/n of it {rule_s * (ranks - 1) / ranks * 1e3:6.2f} ms"
        )
    return lines


def _sharding_overtakes() -> list[str]:
    """Return from which batch sharding is faster than replicas.

    It frees memory for larger micro-batches and divides the update, and costs gathers in every micro-batch.
    """
    node = hardware.load(A100)
    ethernet = replace(node, devices_per_node=1, inter=replace(node.inter, bytes_per_s=1.25e9))
    lines = [
        "GPT-3 1.3B on 8 A100, sequences of 2,048: replicas (zero=0) against sharding (zero=3), each at its best micro-batch"
    ]
    for where, machine in (("one node, NVLink", node), ("one device a node, 10 Gb/s", ethernet)):
        ahead = {}
        for batch in (8, 16, 32, 64, 128):
            replicas, shards = (_best_microbatch("gpt3-1.3b", batch, zero, machine) for zero in (0, 3))
            cells = [
                f'{prediction.step_s:7.3f} s "{prediction.layout}"' if prediction else "does not fit"
                for prediction in (replicas, shards)
            ]
            lines.append(f"{where}, {batch:>3} sequences, {batch * 2048:>7,} tokens: {cells[0]}; {cells[1]}")
            ahead[batch] = shards is not None and (replicas is None or shards.step_s < replicas.step_s)
        lines.append(f"{where}: {_overtaking(ahead)}")
    return lines


def _overtaking(ahead: dict[int, bool]) -> str:
    """Return from which batch on sharding is ahead, as a sentence."""
    behind = [batch for batch, is_ahead in ahead.items() if not is_ahead]
    if not behind:
        return "sharding is ahead from the smallest batch on: its gathers hide behind compute, and it cuts the update"
    after = [batch for batch in ahead if batch > max(behind)]
    return f"sharding overtakes at {after[0]} sequences" if after else f"sharding is behind at {max(behind)} sequences"


def _best_microbatch(model: str, batch: int, zero: int, machine: Hardware) -> Prediction | None:
    steps = []
    for size in (1, 2, 4, 8, 16):
        if size * 8 > batch:
            break
        steps.append(_one_step(model, f"dp=8 zero={zero} microbatch={size}", batch, 2048, machine))
    return min(
        (prediction for prediction in steps if prediction.fits), key=lambda prediction: prediction.step_s, default=None
    )


def _images() -> list[str]:
    """Return ResNet-50 with a batch too large for one device, split over four, with the statistics of the whole batch."""
    lines = [f"ResNet-50 on {V100}, 512 images of 224 x 224 per step, batch norm over all 512"]
    job = Job(model={"source": "preset:resnet50"}, train={"global_batch": 512}, numerics={"precision": "float32"})
    model, machine = presets.preset("resnet50"), hardware.load(V100)
    for words in ("dp=1", "dp=2", "dp=4", "dp=4 zero=1", "dp=8"):
        prediction = predict(model, job, Layout(words), machine)
        sent = sum(op.size_bytes for program in prediction.programs for _, op in program.ops() if op.axis == "dp")
        lines.append(
            f"{words:<12} {prediction.step_s * 1e3:7.1f} ms, {512 / prediction.step_s:7,.0f} images/s, peak {gib(prediction.peak.total):>6} GiB of "
            f"{gib(machine.memory_bytes)}: {'fits' if prediction.fits else 'DOES NOT FIT'}; statistics {sent / 2**20:.2f} MiB"
        )
    return lines


COMPARISONS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "zero-memory": ("memory saved by ZeRO: 4x, 8x, N-fold", _zero_memory),
    "spread": ("70B weights on 64 devices: memory of each of them", _spread),
    "data-parallel": ("speed-up on 2, 4 and 8 devices, by ring and by root", _data_parallel),
    "naive-or-pipeline": ("layers spread over devices, naively and as a pipeline", _naive_pipeline),
    "resnet50-512": ("ResNet-50 with a batch that one device cannot hold, split over four", _images),
    "two-sizes": ("an all_reduce takes 2 x size / bandwidth", _two_sizes),
    "sharding-overtakes": (
        "at which batches sharding beats replicas, on a fast and a slow network",
        _sharding_overtakes,
    ),
}


def lines_of(name: str) -> list[str]:
    """Return the lines of a case; `list` returns the names and titles of all cases.

    Raises:
        InputError: there is no such case.
    """
    if name == "list":
        titles = {key: run.title for key, run in RUNS.items()} | {key: title for key, (title, _) in COMPARISONS.items()}
        return [f"{key:<20} {title}" for key, title in titles.items()]
    if name in RUNS:
        return RUNS[name].lines()
    if name in COMPARISONS:
        return COMPARISONS[name][1]()
    known = [*RUNS, *COMPARISONS]
    raise InputError(
        "case-unknown", f"no case {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}, and list"
    )
