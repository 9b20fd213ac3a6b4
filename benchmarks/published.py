"""One row of published results becomes a job, a layout and a machine: everything that predicting it needs.

A row says what was run, and seldom all of it. What it leaves out is filled by the rules below, the same for every row,
whatever its source; nothing here looks at what was measured, save to turn it into seconds a step.

| the row does not say        | taken                                                                                   |
|-----------------------------|-----------------------------------------------------------------------------------------|
| sizes of the model          | those of the preset its name is close to; else a GPT of its number of weights            |
| the device                  | V100 where it says FP16 (no bfloat16 yet), else A100                                      |
| number of devices           | one node, or as many as the layout needs                                                |
| data-parallel degree        | devices / (tp pp cp), whatever is printed, if that is a whole number                     |
| micro-batch                 | 1 in a pipeline, else the largest power of two that makes at most 2^14 tokens and fits  |
| global batch                | one micro-batch a rank; four for each stage of a pipeline                                |
| ZeRO stage                  | 1 from six billion weights on, else 0                                                   |
| recompute                   | none from H100 on; before, the least with which it fits, or none where nothing does      |
| sequence parallel           | with tp > 1 from H100 on                                                                |
| precision                   | bf16; FP8 products in entries to MLPerf on devices that have them                        |
| kind of attention           | plain before FlashAttention: V100, or FP16, or full recompute under tp or pp before H100 |
| network of a node           | the profile's, unless the row prints ports and speed                                    |

Mapped to the nearest thing: expert parallelism (each rank holds its experts, their exchange is not priced), context
parallelism (a sample is a part of a sequence), zero=2 and 3 inside a pipeline (zero=1).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep import hardware as machines
from samestep.decoder import Decoder, spec
from samestep.hardware import Hardware
from samestep.model import LayerSpec, ModelSpec
from samestep.presets import DECODERS, resnet, sized

Row = Mapping[str, str]

_YES = ("true", "yes", "1", "on", "1.0")
TARGETS = ("metric_step_time_s", "metric_tokens_per_s_per_gpu", "metric_tflops_per_gpu", "metric_mfu")
COLUMNS = ("model", "gpu", "metric_memory_gib", *TARGETS)
"""What a file must have one of to hold rows of this kind."""


CHUNKS = 4
"""Into so many parts Transformer Engine and asynchronous tensor parallelism cut a sum; all but one hide."""
_ADAPTERS = r"\bq?lora\b|task=lora"
GRAPH_LAUNCH_S = 2e-6
"""Host time of an operation that is part of a CUDA graph."""
CHECKED = 2.8
"""Host time of a run that its notes call a correctness test with deterministic kernels, over that of a plain one."""
OWN_ATTENTION = 2.2
"""What attention kernels written for a device reach over PyTorch's own (Shah et al. 2024, arXiv:2407.08608, figures 5 and 6)."""
CHECKED_COLLECTIVE = 8.0
"""The same of a collective: ranks that start kernels slowly and unevenly wait for each other."""
BILLION = 1e9
"""Weights from which on everybody recomputed blocks, before there was FlashAttention."""
LARGE = 6e9
"""Weights from which on nobody replicates Adam's states."""


class SkippedError(Exception):
    """This row cannot be predicted; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a row says was run, and what came out."""

    id: str
    source: str
    group: tuple[str, ...]
    """Rows of one group differ in their layout alone."""
    model: ModelSpec
    machine: Hardware
    words: dict[str, int | str]
    """Layout words, but for recompute."""
    recompute: str
    """Empty where the row does not say."""
    microbatches: tuple[int, ...]
    """Sizes to try, where the row does not say; the last one is taken if none fits."""
    sent_rows: float
    """Part of the rows that leave for experts: one for all experts of a node, where a dispatcher sees to that."""
    chunks: int
    """Parts into which sums over tp are cut to hide behind products; 1: not at all."""
    precision: str
    products: str
    """Dtype of matrix products, where it is not that of all else."""
    global_batch: int
    step_s: float | None
    memory_bytes: float | None
    out_of_memory: bool
    stage: int | None = None
    """The one whose memory was measured; None: the one that holds most."""
    states_per_param: int = 2


# -- cells -------------------------------------------------------------------------------------------------------------


def number(row: Row, column: str) -> float | None:
    """Read a cell: 1840000000.0, ~250k, 1.5e9; None where it is empty or holds no number."""
    text = (row.get(column) or "").strip().lstrip("~").replace(",", "")
    found = re.match(r"([0-9]*\.?[0-9]+(?:e[+-]?\d+)?)\s*([kmbt]?)", text, re.IGNORECASE)
    if not found:
        return None
    return float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[found[2].lower()]


def whole(row: Row, column: str, default: int = 0) -> int:
    """Read a cell that counts something."""
    value = number(row, column)
    return default if value is None or value < 1 else round(value)


def _text(row: Row, *columns: str) -> str:
    return " ".join((row.get(column) or "") for column in columns)


# -- the machine -------------------------------------------------------------------------------------------------------

_MACHINES = (
    (r"GB300", "gb300-nvl72"),
    (r"GB200", "gb200-nvl72"),
    (r"B300", "b300x8"),
    (r"B200|SM100", "b200x8"),
    (r"GH200|H200", "h200x8"),
    (r"H100.*500\s?W", "h100-500wx8"),
    (r"H100.*(PCIe|NVL\b)", "h100-pciex8"),
    (r"H100|H800|DGX.?H\b", "h100x8"),
    (r"\bH20\b", "h20x8"),
    (r"A100.*PCIe|A800.*PCIe", "a100-pciex8"),
    (r"A100.*40|A800.*40", "a100-40x8"),
    (r"A100|A800", "a100-80x8"),
    (r"V100", "v100x8"),
    (r"MI300", "mi300x8"),
    (r"MI325", "mi325x8"),
    (r"MI35[05]", "mi355x8"),
    (r"MI2[15]0", "mi250x8"),
    (r"L40S", "l40sx8"),
    (r"L40", "l40x8"),
    (r"\bL4\b", "l4x8"),
    (r"\bA30\b", "a30x8"),
    (r"\bA10G?\b", "a10x8"),
    (r"A6000|\bA40\b|RTX 6000", "a6000x8"),
    (r"\bT4\b", "t4x8"),
    (r"3090", "rtx3090x8"),
    (r"4090", "rtx4090x8"),
    (r"5060", "rtx5060tix8"),
    (r"5090", "rtx5090x8"),
    (r"gaudi", "gaudi2x8"),
    (r"v6e|trillium", "tpu-v6e"),
    (r"v5p", "tpu-v5p"),
    (r"v5e", "tpu-v5e"),
    (r"TPU.*v4", "tpu-v4"),
    (r"TPU.*v3", "tpu-v3"),
)
_FOLDER = Path(__file__).parent / "machines"
SHIPPED: dict[str, Hardware] = {}
"""Profiles as they are, by name: those of samestep, and those of devices it does not run on."""


def machine_of(row: Row) -> Hardware:
    """Return the profile of the row's device, with the row's own nodes and network."""
    device = (row.get("gpu") or "").strip()
    if not device:
        device = "V100" if "16" in (row.get("precision") or "") and "BF" not in row["precision"].upper() else "A100"
    name = next((name for pattern, name in _MACHINES if re.search(pattern, device, re.IGNORECASE)), None)
    if name is None:
        raise SkippedError(f"no profile of {device}")
    if name not in SHIPPED:
        file = _FOLDER / f"{name}.toml"
        SHIPPED[name] = machines.load(file if file.exists() else name)
    return _with_software(_on_its_network(SHIPPED[name], row), row)


def _on_its_network(machine: Hardware, row: Row) -> Hardware:
    """Give a machine the row's nodes and ports. Of a rack equal parts are used, where a job does not fit in one."""
    per_node, count = whole(row, "gpus_per_node"), whole(row, "n_gpus")
    if machine.devices_per_node > 16 and count > machine.devices_per_node < 1000:
        used = max(n for n in range(1, machine.devices_per_node + 1) if count % n == 0)
        machine = replace(machine, devices_per_node=used)
    if per_node and per_node > 1 and machine.devices_per_node <= 16:
        machine = replace(machine, devices_per_node=per_node)
    port = _port_bytes_per_s(row.get("interconnect") or "", whole(row, "gpus_per_node", machine.devices_per_node))
    if port and port > machine.inter.bytes_per_s / 5:  # slower ones are for storage and management
        machine = replace(machine, inter=replace(machine.inter, bytes_per_s=port))
    return machine


def _with_software(machine: Hardware, row: Row) -> Hardware:
    """Make of a machine what the row's software makes of it."""
    if "deterministic kernels" in _text(row, "notes"):
        near, far = (
            replace(link, collective_s=CHECKED_COLLECTIVE * link.collective_s)
            for link in (machine.intra, machine.inter)
        )
        host = {"launch_s": CHECKED * machine.launch_s, "step_s": CHECKED * machine.step_s}
        machine = replace(machine, **host, intra=near, inter=far)
    notes = _text(row, "notes")
    covered = _in_graphs(notes)
    if covered:
        machine = replace(machine, launch_s=machine.launch_s + covered * (GRAPH_LAUNCH_S - machine.launch_s))
    if _has_own_attention(row, machine):
        reached = min(1.0, machine.efficiency["attention"] * OWN_ATTENTION)
        machine = replace(machine, efficiency={**machine.efficiency, "attention": reached})
    if not _is_late(machine) and _hides_nothing(row):
        machine = replace(machine, overlap=False)
    if _gathers_through_one_port(row, machine):
        inside = max(1, machine.devices_per_node // whole(row, "tp", 1))
        port = machine.inter.bytes_per_s * (2 if machine.name.startswith("v100") else 1)  # two devices had one
        machine = replace(machine, overlap=False, inter=replace(machine.inter, bytes_per_s=port / inside))
    return machine


def _in_graphs(notes: str) -> float:
    """Part of the host's work that CUDA graphs take over: all of it, or a quarter for each kind of module they hold."""
    if re.search(
        r"full.cuda.graph=(?:1|true)|cuda.graph(?:.impl)?=(?:1|true|full_iteration|local)", notes, re.IGNORECASE
    ):
        return 1.0
    scopes = re.search(r"cuda_graph_impl=transformer_engine; cuda_graph_scope=([^;]+)", notes)
    if not scopes:
        return 0.0
    return 1.0 if "full" in scopes[1] else min(1.0, 0.25 * len(re.findall(r"\w+", scopes[1])))


def _hides_nothing(row: Row) -> bool:
    """Whether it is of Megatron-LM or DeepSpeed, which hid no communication behind compute before Hopper."""
    said = _text(row, "schedule", "notes", "source")
    if re.search(r"fsdp|overlap-grad|overlap.param", said, re.IGNORECASE):
        return False
    return _is_by_engine(row) or re.search(r"deepspeed|\bDS=", said, re.IGNORECASE) is not None


def _has_own_attention(row: Row, machine: Hardware) -> bool:
    """Whether attention runs in kernels written for the device: those of Transformer Engine from Hopper on."""
    late = re.match(r"h[12]|g?b[23]00|mi3", machine.name) is not None
    return late and _is_by_engine(row) and "attention" in machine.efficiency


def _is_by_engine(row: Row) -> bool:
    """Whether the row is of Megatron-LM or a library around it, which run on Transformer Engine since Hopper."""
    said = _text(row, "source", "model") + re.sub(r"dims: [^;]*", "", _text(row, "notes"))
    return (
        re.search(r"nemo\b|megatron|transformer.?engine|kernels=TE|dgx cloud|mlperf|maxtext|libai", said, re.I)
        is not None
    )


def _gathers_through_one_port(row: Row, machine: Hardware) -> bool:
    """DeepSpeed's ZeRO-3 before Hopper: gathers are not hidden, and the ranks that a node has of a group share one port."""
    said = re.search(r"\bzero.?3|deepspeed|\bDS=", _text(row, "schedule", "notes", "source"), re.IGNORECASE)
    return whole(row, "zero_stage") == 3 and said is not None and not _is_late(machine)


def _port_bytes_per_s(text: str, per_node: int) -> float | None:
    """Bytes a second of one device to the network: `4x Omni-Path 100Gb/s per node` is 50 GB/s for all of the node."""
    parts = [
        part for part in re.split(r"[|;,+]", text) if not re.search(r"storage|management|NVLink|NVSwitch", part, re.I)
    ]
    speeds = []
    for part in parts:
        found = re.search(r"(\d+)\s*(?:Gb(?:/s|/Sec|ps|it))", part, re.IGNORECASE)
        if found and "GB/s" not in part:
            ports = re.search(r"(\d+)\s*x\s*\S", part)
            speed = 0.95 * int(found[1]) * 1e9 / 8
            speeds.append(speed if "per GPU" in part else speed * int(ports[1] if ports else 1) / per_node)
    return max(speeds, default=None)


# -- the model ---------------------------------------------------------------------------------------------------------

_NAMES = (
    (r"llama.?3(\.\d)?.?405b", "llama3-405b"),
    (r"llama.?3(\.\d)?.?70b", "llama3-70b"),
    (r"llama.?3(\.\d)?.?8b", "llama3-8b"),
    (r"llama.?2.?70b|llama.like.70b", "llama2-70b"),
    (r"llama.?2.?13b", "llama2-13b"),
    (r"llama.?2.?7b|llama.like.7b", "llama2-7b"),
    (r"llama.?4.?scout", "llama4-scout"),
    (r"llama.?65b", "llama-65b"),
    (r"llama.?7b", "llama-7b"),
    (r"mixtral.?8x22b", "mixtral-8x22b"),
    (r"mixtral", "mixtral-8x7b"),
    (r"qwen.?3.*235b", "qwen3-235b-a22b"),
    (r"qwen.?3.*30b", "qwen3-30b-a3b"),
    (r"qwen.?2\.5.?32b", "qwen2.5-32b"),
    (r"qwen.?2\.5.?7b", "qwen2.5-7b"),
    (r"qwen.?2\.5.?3b", "qwen2.5-3b"),
    (r"qwen.?2\.5.?1\.5b", "qwen2.5-1.5b"),
    (r"qwen.?2\.5.?0\.5b", "qwen2.5-0.5b"),
    (r"gpt.?oss.?120b", "gpt-oss-120b"),
    (r"gpt.?oss.?20b", "gpt-oss-20b"),
    (r"deepseek.?v?3(?!\d)", "deepseek-v3"),
    (r"nemotron.?4.?340b", "nemotron4-340b"),
    (r"nemotron.?4.?15b", "nemotron4-15b"),
    (r"grok.?1", "grok1-314b"),
    (r"bloom", "bloom-176b"),
    (r"mt.nlg", "mt-nlg-530b"),
    (r"gpt.?3.*175b", "gpt3-175b"),
    (r"bert.large", "bert-large"),
)
_NO_DECODER = r"stable diffusion|retinanet|mask r-cnn|grouped gemm|hybrid|nemotron.?v?[3h]|multimodal|mimo|single moe|ultra.proxy|dlrm|unet|flux|maverick"


def decoder_of(row: Row, machine: Hardware) -> tuple[Decoder, str]:
    """Return the row's model and its name."""
    name = row.get("model") or ""
    if re.search(_NO_DECODER, name, re.IGNORECASE):
        raise SkippedError("the model is no transformer of one kind of block, or part of one")
    known = next((preset for pattern, preset in _NAMES if re.search(pattern, name, re.IGNORECASE)), None)
    decoder = _of_its_kind(replace(_base(row, known), **_sizes(row, known)), row, machine)
    return decoder, known or name


def _base(row: Row, known: str | None) -> Decoder:
    """Return the preset of a row; else a GPT with its layers, or of its number of weights."""
    layers, hidden = _depth(row), whole(row, "hidden")
    weights = number(row, "n_params") or _weights_in(row.get("model") or "")
    if known:
        return DECODERS[known]
    if layers and hidden:
        return replace(DECODERS["gpt3-175b"], layers=layers, hidden=hidden, heads=max(1, hidden // 128))
    if weights:
        return sized(weights, whole(row, "seq_len", 2048))
    raise SkippedError("no sizes of the model, and its name is no preset's")


def _depth(row: Row) -> int:
    hidden = whole(row, "hidden")
    weights = number(row, "n_params") or _weights_in(row.get("model") or "")
    layers = whole(row, "n_layers")
    return layers or (max(1, round(weights / (12 * hidden**2))) if hidden and weights else 0)


def _sizes(row: Row, known: str | None) -> dict[str, Any]:
    """Return the sizes that a row prints, over those of its preset."""
    columns = {"vocab": "vocab", "sequence": "seq_len"}
    given: dict[str, Any] = {field: whole(row, column) for field, column in columns.items() if whole(row, column)}
    if not (_depth(row) and whole(row, "hidden")):
        return given
    given |= {"layers": _depth(row), "hidden": whole(row, "hidden")}
    if whole(row, "heads"):
        given |= {"heads": whole(row, "heads")}
        given |= {"kv_heads": whole(row, "kv_heads")} if whole(row, "kv_heads") or not known else {}
    if whole(row, "ffn"):
        given["intermediate"] = whole(row, "ffn")
    if whole(row, "moe_experts") and not known:
        given |= {"experts": whole(row, "moe_experts"), "top_k": whole(row, "moe_topk", 1)}
    return given


def _of_its_kind(decoder: Decoder, row: Row, machine: Hardware) -> Decoder:
    """Add what kind of model and of code it is."""
    name = row.get("model") or ""
    if re.search(r"\bt5", name, re.IGNORECASE):  # an encoder, and a decoder that attends to it as well as to itself
        sequence = whole(row, "seq_len", 512)
        decoder = replace(decoder, layers=5 * decoder.layers // 2, sequence=sequence, vocab=30592)
    if re.search("bert", name, re.IGNORECASE):
        decoder = replace(decoder, attention="attention", dropout=True, vocab=whole(row, "vocab", 30592))
    if "unpadded" in name:  # half of MLPerf's 512 tokens are padding, and are left out
        decoder = replace(decoder, sequence=decoder.sequence // 2)
    if decoder.positions:
        decoder = replace(decoder, positions=decoder.sequence)
    if "FSDP2" in (row.get("schedule") or "") and (row.get("compile") or "").lower() != "true":
        decoder = replace(decoder, fused=False)
    if _is_plain(row, machine):
        decoder = replace(decoder, attention="plain", dropout=not decoder.gated)
    return decoder


def _weights_in(name: str) -> float | None:
    found = re.search(r"(\d+(?:\.\d+)?)\s*([MBT])\b", name)
    return float(found[1]) * {"M": 1e6, "B": 1e9, "T": 1e12}[found[2]] if found else None


def _is_plain(row: Row, machine: Hardware) -> bool:
    """Whether attention keeps its scores: FlashAttention is of 2022 and for Ampere and later."""
    if "unfused" in _text(row, "notes").lower() or machine.name.startswith("v100"):
        return True
    if not machine.name.startswith("a100") or "flash" in _text(row, "notes", "model", "source").lower():
        return False
    cut = whole(row, "tp", 1) > 1 or whole(row, "pp", 1) > 1
    old = re.fullmatch(r"(?i)\s*fp16.*", row.get("precision") or "") is not None
    return old or (cut and "full" in (row.get("recompute") or ""))


# -- all of it ---------------------------------------------------------------------------------------------------------


def case_of(row: Row) -> Case:
    """Read a row.

    Raises:
        SkippedError: it cannot be predicted.
    """
    if not is_timed(row) and not number(row, "metric_memory_gib") and not _failed(row):
        raise SkippedError("nothing was measured")
    machine = machine_of(row)
    if (
        re.search(r"resnet.?50", row.get("model") or "", re.IGNORECASE)
        and "cnn" not in row["model"].lower()
        and "retina" not in row["model"].lower()
    ):
        model, decoder, name = resnet(), None, "resnet50"
    else:
        decoder, name = decoder_of(row, machine)
        model = None
    tp, pp, cp = _cuts(row, machine)
    devices = whole(row, "n_gpus") or _devices(row, machine, tp * pp * cp)
    if devices % (tp * pp * cp):
        printed = max(whole(row, "dp_replicate", 1) * whole(row, "dp_shard", 1), 1)
        devices = tp * pp * cp * printed
    dp = devices // (tp * pp * cp)
    tokens = decoder.sequence if decoder else 196
    per_rank = whole(row, "micro_batch") or _microbatch(row, tokens // cp, pp, dp)
    printed_batch = whole(row, "global_batch") or _batch_in(_text(row, "notes"), tokens)
    global_batch = printed_batch or per_rank * dp * (4 * pp if pp > 1 else 1)
    if global_batch < dp:
        raise SkippedError(f"{global_batch} samples for {dp} data ranks")
    if decoder:
        unit = 128 * tp  # vocabularies are padded, so that they can be cut and rows are aligned
        decoder = replace(decoder, vocab=-(-decoder.vocab // unit) * unit)
        decoder = _on_a_rank(row, decoder, cp)
        model = spec(decoder, name)
    assert model is not None
    splits = _splits_sequence(row, machine, decoder, tp)
    if splits:
        model = replace(model, layers=tuple(map(_gathered_again, model.layers)))
    if pp > 1:  # other libraries deal out the blocks evenly, whatever the head costs
        model = replace(model, layers=tuple(la if la.is_block else replace(la, forward_flops=1) for la in model.layers))
    precision, products = _precision(row, machine)
    products = products if decoder else ""
    words = _words(row, tp, pp, cp * dp, per_rank, model, machine) | ({"sequence_parallel": True} if splits else {})
    ep = min(whole(row, "ep", 1), cp * dp * tp)
    if ep > 1 and _can_be_dealt(model, words, ep) and not _hides_exchange(row, machine, tp):
        words["ep"] = ep
    elif ep > 1 and any(param.experts for param in model.params):
        model = _without_exchange(model, ep)
    tokens_of_step = global_batch * tokens
    return Case(
        id=row.get("id") or "",
        source=row.get("source") or row.get("file") or "",
        group=_group(row, machine, name, devices, global_batch, tokens),
        model=model,
        machine=machine,
        words=words,
        recompute=_recompute(row, machine, model),
        microbatches=() if whole(row, "micro_batch") or per_rank == 1 else _halves(per_rank),
        sent_rows=_sent_rows(row, machine, decoder, ep),
        chunks=CHUNKS if _hides_sums(row, machine) else 1,
        precision=precision,
        products=products,
        global_batch=global_batch * cp,
        step_s=_step_s(
            row, machine, model, decoder, tokens_of_step, devices, global_batch * cp, precision, bool(printed_batch)
        ),
        memory_bytes=_memory_bytes(row),
        out_of_memory=_failed(row),
        stage=-1 if "on the logging rank" in _text(row, "notes") else None,  # the last one logs
        states_per_param=1 if name == "resnet50" else 2,
    )


def is_timed(row: Row) -> bool:
    """Whether a row says how long a step took, in any unit."""
    return any(number(row, column) for column in TARGETS)


def _failed(row: Row) -> bool:
    return bool(re.search(r"\bOOM\b|OUT OF MEMORY", _text(row, "notes")))


def _memory_bytes(row: Row) -> float | None:
    size = number(row, "metric_memory_gib")
    if not size:
        return None
    return size * (1e9 if re.search(r"in GB|\d\s?GB\b|\(GB\)", _text(row, "notes")) else 2**30)


def _devices(row: Row, machine: Hardware, needed: int) -> int:
    printed = whole(row, "dp_replicate") or whole(row, "dp_shard")
    least = needed * max(1, -(-whole(row, "ep", 1) // whole(row, "tp", 1)))
    return needed * printed if printed else max(min(machine.devices_per_node, 8) // least, 1) * least


def _cuts(row: Row, machine: Hardware) -> tuple[int, int, int]:
    """Degrees tp, pp, cp; where only the replicas are printed, what they leave is tp within a node, and pp."""
    tp, pp, cp = (whole(row, column, 1) for column in ("tp", "pp", "cp"))
    copies = whole(row, "dp_replicate", 1) * whole(row, "dp_shard", 1)
    if not (whole(row, "tp") or whole(row, "pp")) and copies > 1 and whole(row, "n_gpus") % (copies * cp) == 0:
        left = whole(row, "n_gpus") // (copies * cp)
        tp = math.gcd(left, machine.devices_per_node)
        pp = left // tp
    return tp, pp, cp


def _batch_in(notes: str, sequence: int) -> int:
    """Samples of a step whose tokens the notes print: `tokens per step 2097152`, `batch 0.5M tokens`, `2M tokens global batch`."""
    found = re.search(
        r"tokens per step:? ([\d.,]+)([KM]?)|batch ([\d.]+)([KM]) tokens|([\d.]+)([KM]) tokens global batch", notes
    )
    if not found:
        return 0
    text, unit = [part for part in found.groups() if part is not None]
    tokens = float(text.replace(",", "")) * {"": 1, "K": 1e3, "M": 1e6}[unit]
    return max(1, round(tokens / sequence))


def _microbatch(row: Row, tokens: int, pp: int, dp: int) -> int:
    total = whole(row, "global_batch")
    said = re.search(r"gradient_accumulation_steps=(\d+)|\bGA=(\d+)", _text(row, "notes"))
    if said and total >= dp * int(said[1] or said[2]) > 0:
        return total // (dp * int(said[1] or said[2]))
    if pp > 1:
        return 1
    size = 256
    while size > 1 and (size * tokens > 2**14 or (total and total // dp < size)):
        size //= 2
    return size


def _halves(size: int) -> tuple[int, ...]:
    return (size, *_halves(size // 2)) if size > 1 else (1,)


def _on_a_rank(row: Row, decoder: Decoder, cp: int) -> Decoder:
    """Cut the sequence, and add adapters."""
    if cp > 1:
        decoder = replace(decoder, sequence=max(decoder.sequence // cp, 1), keys=decoder.sequence)
    if re.search(_ADAPTERS, _text(row, "model", "notes"), re.IGNORECASE):
        decoder = replace(decoder, adapter_rank=16)
    return decoder


def _splits_sequence(row: Row, machine: Hardware, decoder: Decoder | None, tp: int) -> bool:
    said = (row.get("sequence_parallel") or "").strip().lower()
    wants = said in _YES or (not said and _is_late(machine))
    return decoder is not None and tp > 1 and wants and decoder.sequence % tp == 0


def _gathered_again(layer: LayerSpec) -> LayerSpec:
    """What is gathered for the cut parts is not kept: those libraries gather it again in the backward."""
    return replace(layer, saved_cut_elements=layer.saved_elements) if layer.is_block else layer


def _can_be_dealt(model: ModelSpec, words: Mapping[str, int | str], ep: int) -> bool:
    """Whether layout words can say that experts are dealt to so many ranks."""
    counts = {param.experts for param in model.params} - {0}
    ranks = int(words.get("dp_shard") or words.get("dp_replicate") or 1)
    divides = ranks % ep == 0 and all(count % ep == 0 for count in counts)
    return bool(counts) and divides and int(words.get("zero", 0)) < 2


def _sent_rows(row: Row, machine: Hardware, decoder: Decoder | None, ep: int) -> float:
    """Expected nodes among those of the experts chosen for a token, over the choices: DeepEP and HybridEP send to a node once."""
    nodes = -(-ep // machine.devices_per_node)
    if (
        decoder is None
        or decoder.top_k < 2
        or nodes < 2
        or not re.search(r"deepep|hybridep", _text(row, "notes"), re.I)
    ):
        return 1.0
    return float(nodes * (1 - (1 - 1 / nodes) ** decoder.top_k) / decoder.top_k)


def _hides_exchange(row: Row, machine: Hardware, tp: int) -> bool:
    """Whether the exchange runs beside another micro-batch's compute, or within a node: experts are not cut by tp then."""
    said = _text(row, "notes")
    whole_experts = tp > 1 and _is_late(machine) and _is_by_engine(row) and "deterministic" not in said
    return whole_experts or re.search(r"a2a_overlap=True", said) is not None


def _without_exchange(model: ModelSpec, ep: int) -> ModelSpec:
    """Leave a rank its experts; what they exchange is not priced."""
    params = tuple(replace(p, shape=(-(-p.shape[0] // ep), *p.shape[1:])) if p.experts else p for p in model.params)
    layers = tuple(
        replace(layer, products=tuple(replace(p, groups=-(-p.groups // ep)) for p in layer.products))
        for layer in model.layers
    )
    return replace(model, params=params, layers=layers)


def _precision(row: Row, machine: Hardware) -> tuple[str, str]:
    text = (row.get("precision") or "").upper()
    products = ""
    if re.search(r"FP4", text) and "float4" in machine.flops_per_s:
        products = "float4"
    elif re.search(r"FP8|FLOAT8", text) or (not text and "mlperf" in _text(row, "source").lower()):
        products = "float8" if "float8" in machine.flops_per_s else ""
    if re.match(r"FP16(?!/BF)", text) or "bfloat16" not in machine.flops_per_s:
        return "fp16", products
    return ("float32" if re.match(r"FP32|FLOAT32", text) else "bf16"), products


def _words(
    row: Row, tp: int, pp: int, dp: int, microbatch: int, model: ModelSpec, machine: Hardware
) -> dict[str, int | str]:
    words: dict[str, int | str] = {"tp": tp, "pp": pp, "microbatch": microbatch}
    stage = whole(row, "zero_stage")
    shard = whole(row, "dp_shard")
    zero = stage or (3 if shard > 1 else int(model.num_params >= LARGE))
    if not stage and zero and tp == pp == 1 and _too_large(model, machine):
        zero = 3
    zero = min(zero, 1) if pp > 1 else zero
    if zero and dp > 1:
        words |= {"dp_shard": dp, "zero": min(zero, 3)}
    else:
        words["dp_replicate"] = dp
    virtual = whole(row, "vp", 1)
    blocks = sum(layer.is_block for layer in model.layers)
    if pp > 1 and (virtual > 1 or "interleaved" in (row.get("schedule") or "").lower()):
        virtual = max(min(virtual if virtual > 1 else 2, blocks // pp), 1)
        if virtual > 1:
            words |= {"schedule": "interleaved", "virtual_stages": virtual}
    return words


def _too_large(model: ModelSpec, machine: Hardware) -> bool:
    """Whether whole weights and gradients alone fill a device: then nobody keeps them whole."""
    held = sum(param.numel * (6 if param.trainable else 2) for param in model.params)
    return held > machine.memory_bytes and not any(p.experts for p in model.params) and machine.num_units > 0


def _is_late(machine: Hardware) -> bool:
    """Whether the device is of a time when libraries split all of a layer and fused what they could: from 2022 on."""
    return not machine.name.startswith(("v100", "a100", "a30"))


def _hides_sums(row: Row, machine: Hardware) -> bool:
    """Whether sums over tp are cut to hide behind products: where the row says so, or says nothing of NVIDIA's recipes."""
    said = re.search(r"tp.comm.overlap(=False)?|async TP=(False|True)", _text(row, "notes"), re.IGNORECASE)
    if said:
        return not said[1] and said[2] != "False"
    recipes = re.search(r"nemo|bridge|dgxc|mlperf", _text(row, "source", "url_or_repo_path"), re.IGNORECASE)
    return recipes is not None and _is_late(machine)


def _recompute(row: Row, machine: Hardware, model: ModelSpec) -> str:
    """What is said; nothing for the least that fits."""
    text = (row.get("recompute") or "").lower()
    if "not set" in text:
        text = ""
    if not text and "FSDP2" in (row.get("schedule") or ""):
        return "selective"  # torchtitan's own default
    if not text and _is_by_engine(row) and "FSDP" not in _text(row, "notes"):
        return "none" if _is_late(machine) or model.num_params < BILLION else "full"
    if "full" in text:
        return "full"
    if "selective" in text and "[" not in text and ":" not in text:
        return "selective"
    return "none" if text.strip() else ""


def _group(row: Row, machine: Hardware, name: str, devices: int, batch: int, tokens: int) -> tuple[str, ...]:
    said = (str(whole(row, "n_layers")), str(whole(row, "hidden")), str(number(row, "n_params") or ""))
    precision = (row.get("precision") or "").upper()
    return (row.get("source") or "", name, *said, machine.name, str(devices), str(batch), str(tokens), precision)


def _step_s(
    row: Row, machine: Hardware, model: ModelSpec, decoder: Decoder | None, tokens: int, devices: int, samples: int,
    precision: str, has_batch: bool,
) -> float | None:  # fmt: skip
    """Turn what was measured into seconds a step; FLOPs a second by the definition the row names (see below).

    Where the row does not say how many samples a step takes, a rate says more than the seconds. Most count three forwards with attention unmasked; `recompute` in the notes beside `include`, `count` or a factor of
    8 makes it four.
    """
    rate = number(row, "metric_tokens_per_s_per_gpu")
    if number(row, "metric_step_time_s") and (has_batch or not rate):
        return number(row, "metric_step_time_s")
    if rate and rate * 2 * sum(layer.forward_flops for layer in model.layers) / (
        decoder.sequence if decoder else 1
    ) > max(machine.flops_per_s.values()):
        rate /= devices  # more than the device can: the rate of all of them
    if rate:
        return tokens / (rate * devices)
    flops_per_s = (number(row, "metric_tflops_per_gpu") or 0) * 1e12
    if not flops_per_s:
        share = number(row, "metric_mfu")
        peak = machine.flops_per_s.get("bfloat16") or machine.flops_per_s["float16"]
        flops_per_s = peak * (share / 100 if share and share > 1 else share or 0)
    if not flops_per_s:
        return None
    notes = _text(row, "notes").lower()
    again = "full" in (row.get("recompute") or "") and re.search(
        r"counts? the recompute|incl\. recomput|counts recompute|recompute\)|8n|96", notes
    )
    flops = sum(product.flops for layer in model.layers for product in layer.products)
    return flops * samples * (4 if again else 3) / (flops_per_s * devices)
