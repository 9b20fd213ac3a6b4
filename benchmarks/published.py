"""One row of published results becomes a job, a layout and a machine: everything that predicting it needs.

A row says what was run, and seldom all of it. What it leaves out is filled by the rules below, the same for every row,
whatever its source; nothing here looks at what was measured, save to turn it into seconds a step.

| the row does not say        | taken                                                                                   |
|-----------------------------|-----------------------------------------------------------------------------------------|
| sizes of the model          | those of the preset its name is close to; else a GPT of its number of weights            |
| the device                  | that of its source, where it is one of two that leave it out; else it is skipped      |
| number of devices           | one node, or as many as the layout and its experts need; 64 in Megatron-LM's release runs |
| degrees tp and pp           | what the replicas leave: tp within a node, then pp; 1 where no replicas are printed      |
| data-parallel degree        | devices / (tp pp cp), whatever is printed; too many cuts for the devices: fewer stages     |
| micro-batch                 | by the steps of accumulation in the notes; the whole batch in MaxText and on TPUs; 1 in a pipeline, in torchtitan's as many as stages; else the largest power of two that makes at most 2^14 tokens and fits; memory is not judged then |
| global batch                | by the tokens of a step in the notes; one micro-batch a rank; four for each stage of a pipeline |
| ZeRO stage                  | 1 from six billion weights on, 3 where weights and gradients alone fill a device, else 0; in MaxText and on TPUs 3 within a slice or node, whose weights others hold too; with experts at most 1 |
| recompute                   | full where the printed FLOP/s are four forwards of the printed tokens; Megatron-LM and around it: full from a billion weights on before H100, none since, nor where the host keeps activations; torchtitan: selective; else, and in MaxText with a printed micro-batch, the least that fits within the error of memory, and full where nothing does; none of convolutions |
| order of an image's elements | torch's default, channels first; last in entries to MLPerf                              |
| end of a repeated forward   | that of the block; before its last product in MosaicML, MaxText and torchtitan           |
| sequence parallel           | with tp > 1 from H100 on, but for functional tests, whose arguments are printed, and with experts, which Megatron-LM does not train without it |
| experts of a token          | those of the preset; else two                                                           |
| sums over tp                | cut in four parts, all but one hidden, in NVIDIA's recipes from H100 on                  |
| dtype of reduced gradients  | float32; that of the weights in NVIDIA's recipes from H100 on (`grad_reduce_in_fp32 = False` in Megatron-Bridge's) |
| virtual stages              | one; in MLPerf's rounds of late, as in those before, two blocks each                     |
| parts of an expert          | as many as of the tensor cut (Megatron-LM's default); whole ones in NVIDIA's recipes     |
| rows that go to experts     | to a node once, or within one to a rank (DeepEP, HybridEP), with fewer copies, in NVIDIA's recipes from H100 on; else once each; DeepSeek-V3's to four of eight groups of experts |
| exchange of rows            | exposed; hidden beside another micro-batch where the row says so and has CUDA graphs, and in entries with one graph |
| precision                   | bf16; FP8 products in entries to MLPerf on devices that have them; logits never in 8 or 4 bits |
| kind of attention           | plain before FlashAttention: V100, or FP16, or full recompute under tp or pp before H100 |
| which memory was measured   | what tensors had at most; in torchtitan what the allocator took from the device, which its log prints |
| network of a node           | the profile's, unless the row prints ports and speed                                    |
| what its configuration says | what the name of one in the notes says, and what loops are beyond their table (`published_loops.py`) |
| all of it but the model     | torchtune, LLMQ: their own defaults; no masters, logits in chunks, 4 bits a frozen weight under QLoRA; states, then gradients, on the host where they do not fit |

What software made of a machine is in `published_machines.py`, of precisions in `published_precision.py`, of recompute in `published_recompute.py`, of a loss in `published_memory.py`, and of mixers of Mamba-2 in `published_mixers.py`. Mapped to the nearest thing: context parallelism (a sample
is a part of a sequence), zero=2 and 3 inside a pipeline (zero=1), experts that are dealt to the ranks of a tensor cut too
(their rows travel among data ranks).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from cells import Row, SkippedError, joined, number, says_nothing, whole
from composed import is_calculated
from published_experts import hides_exchanges, sent_rows, with_experts
from published_loops import (
    adapters_of,
    adds_apart,
    bits_of_states,
    hides_sums,
    holds_sixteen_bits,
    is_entry,
    is_of_recipe,
    is_packed,
    offloads,
    updates_lists,
    with_configuration,
    with_its_modules,
    with_its_windows,
)
from published_machines import as_tested, graph_part, is_by_xla, is_late, is_tested, machine_of
from published_memory import (
    TARGETS,
    is_out_of_memory,
    is_reserved,
    is_timed,
    is_titan,
    memory_bytes,
    states_per_param,
    step_s,
    with_its_logits,
    with_its_loss,
)
from published_mixers import MIXERS, with_mixers
from published_models import Recipe, decoder_of, is_compiled, recipe_of
from published_precision import precision_of, wide_layers
from published_recompute import as_it_recomputes, recompute_of
from published_vision import has_channels_last, vision_model, vision_of

from samestep.hardware import Hardware
from samestep.job_tables import LoraTable
from samestep.models.catalog import add_adapters
from samestep.models.decoder import Decoder
from samestep.models.decoder_spec import spec
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec
from samestep.program.ops import TF32

_YES = ("true", "yes", "1", "on", "1.0")
COLUMNS = ("model", "gpu", "metric_memory_gib", *TARGETS)
"""What a file must have one of to hold rows of this kind."""

RELEASE_DEVICES = 64
"""Of Megatron-LM's release runs: what bert_release needs (tp 8, pp 8), and t5_release for one micro-batch a step (512 / 32 x 4)."""
MOST_AT_ONCE = 4
"""Samples of a rank that entries to MLPerf have in one micro-batch, without a pipeline."""
HOST_BYTES_PER_S = 20e9
"""From the host to a device by PCIe 4.0 of 16 lanes, where the profile does not say."""
LOGGED = 4
"""Operations for each weight by which functional tests log how many of its gradients are zero (Megatron-LM's `count_zeros_fp32`: a
comparison, a sum, a difference, a sum)."""
MUON_STARTS = 40
"""Operations of Muon for one matrix: five times three products and what adds them up (Jordan 2024), momentum, norm, update."""
CHUNKS = 4
"""Into so many parts Transformer Engine and asynchronous tensor parallelism cut a sum; all but one hide."""
LARGE = 6e9
"""Weights from which on nobody replicates Adam's states."""


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
    hides_exchanges: bool
    """Whether rows leave for experts, and come back, beside the compute of another micro-batch."""
    chunks: int
    """Parts into which sums over tp are cut to hide behind products; 1: not at all."""
    reduces_narrow: bool
    """Whether gradients are reduced in the dtype of the weights."""
    waits_for_sums: bool
    """Whether sums of gradients over replicas hide behind no compute: with a tensor cut, in one CUDA graph for the whole step. Four entries of two
    rounds, on GB200 and GB300, show it; entries without a tensor cut, or without such a graph, hide theirs. No source says why."""
    precision: str
    deterministic: bool
    products: str
    """Dtype of matrix products, where it is not that of all else."""
    wide_layers: frozenset[int]
    """Layers whose products stay in the dtype of all else."""
    global_batch: int
    step_s: float | None
    memory_bytes: float | None
    is_reserved: bool
    """Whether that is what the allocator took from the device, and not what tensors had of it."""
    out_of_memory: bool
    stage: int | None = None
    """The one whose memory was measured; None: the one that holds most."""
    states_per_param: int = 2
    packs_states: bool = False
    """Whether an element of a state takes eight bits."""
    repeats_half: bool = False
    """Under selective recompute every second product runs again."""
    compiles: str = ""
    """What is a graph of torch.compile: `blocks`, or all of the `model`; nothing."""
    is_lean: bool = False
    """Weights, gradients and states in the compute dtype, on the host what does not fit."""
    is_narrow: bool = False
    """Weights, gradients and states in the compute dtype."""
    offloads: bool = False
    """Whether weights and gradients are in the host's memory between their uses."""
    updates_lists: bool = False
    """Whether an update has another copy of all weights that it updates."""
    adds_apart: bool = False
    """Whether gradients of a micro-batch are added up in 16 bits before they are in float32."""
    spread: float = 0.0
    """Part of the seconds by which the row says that results vary."""
    updates: bool = True
    """Whether what was timed has an update, and the code of a loop around it."""


def case_of(row: Row) -> Case:
    """Read a row.

    Raises:
        SkippedError: it cannot be predicted.
    """
    row = with_configuration(row)
    if not is_timed(row) and not number(row, "metric_memory_gib") and not is_out_of_memory(row):
        raise SkippedError("nothing was measured")
    if is_calculated(row):
        raise SkippedError("it was calculated, and not measured")
    if "layout not printed" in joined(row, "notes"):
        raise SkippedError("the layout is not printed")
    _refuse_nonsense(row)
    machine = machine_of(row)
    decoder, name = _network_of(row, machine)
    tp, pp, cp = _cuts(row, machine, decoder.layers if decoder else 1)
    devices = whole(row, "n_gpus") or _devices(row, machine, tp * pp * cp)
    dp = devices // (tp * pp * cp)
    tokens = decoder.sequence if decoder else 196
    per_rank = whole(row, "micro_batch") or _microbatch(row, machine, tokens // cp, pp, dp)
    printed_batch = whole(row, "global_batch") or _batch_in(joined(row, "notes"), tokens, dp)
    recipe = recipe_of(row)
    global_batch = printed_batch or per_rank * dp * (4 * pp if pp > 1 else recipe.microbatches if recipe else 1)
    if global_batch < dp and dp % global_batch == 0:  # more ranks than samples: they have parts of sequences
        cp, dp = cp * dp // global_batch, global_batch
    if global_batch < dp and not whole(row, "global_batch"):
        global_batch = per_rank * dp
    if global_batch < dp:
        raise SkippedError(f"{global_batch} samples for {dp} data ranks")
    if decoder:
        unit = 128 * tp  # vocabularies are padded, so that they can be cut and rows are aligned
        decoder = replace(decoder, vocab=-(-decoder.vocab // unit) * unit)
        decoder = _on_a_rank(row, decoder, cp)
    splits = _splits_sequence(row, machine, decoder, tp)
    known = name if name in MIXERS else ""
    model = _model(
        decoder or name,
        known,
        row.get("source") or "",
        recipe_of(row),
        is_packed(row),
        splits,
        pp > 1,
        adapters.targets if (adapters := adapters_of(row)) else (),
        has_channels_last(row),
    )
    model = _interned(with_its_windows(row, with_its_modules(row, with_its_logits(row, model)))) if decoder else model
    precision, products = precision_of(row, machine)
    products = products if decoder or products == TF32 else ""
    words = _words(row, tp, pp, cp * dp, per_rank, model, machine) | ({"sequence_parallel": True} if splits else {})
    ep = min(whole(row, "ep", 1), cp * dp * tp)
    if decoder and decoder.experts:
        model, dealt = with_experts(row, machine, model, words, tp if splits else 1, ep)
        model = _interned(model)
        words |= {"ep": dealt} if dealt > 1 else {}
    starts = 0
    if is_tested(row):
        model, starts = _interned(as_tested(row, model)), len(model.params) // pp * LOGGED
    if "optimizer=muon" in joined(row, "notes") and not words.get("zero"):
        starts += _matrices(model, pp, ep) * MUON_STARTS
    copied_s = _copied_s(model, machine, cp * dp) if offloads(row) else 0.0
    host_step_s = machine.host_step_s + starts * machine.kernel_launch_s + copied_s
    machine = replace(machine, host_step_s=host_step_s)
    tokens_of_step = global_batch * tokens
    return Case(
        id=row.get("id") or "",
        source=row.get("source") or row.get("file") or "",
        group=_group(row, machine, name, devices, global_batch, tokens),
        model=model,
        machine=machine,
        words=words,
        recompute=recompute_of(row, machine, model),
        microbatches=() if whole(row, "micro_batch") or recipe else _halves(per_rank),
        sent_rows=sent_rows(row, machine, decoder, ep),
        hides_exchanges=hides_exchanges(row, decoder),
        chunks=CHUNKS if hides_sums(row, is_late=is_late(machine)) else 1,
        reduces_narrow=is_of_recipe(row) and is_late(machine),
        waits_for_sums=tp > 1 and graph_part(row) == 1.0,
        precision=precision,
        deterministic="--deterministic-mode=true" in joined(row, "notes"),
        products=products,
        wide_layers=wide_layers(row, model),
        global_batch=global_batch * cp,
        step_s=step_s(row, machine, model, decoder, tokens_of_step, devices, global_batch * cp, bool(printed_batch)),
        memory_bytes=memory_bytes(row, is_said=_says_microbatch(row, per_rank, dp)),
        is_reserved=is_reserved(row),
        out_of_memory=is_out_of_memory(row),
        stage=-1 if "on the logging rank" in joined(row, "notes") else None,  # the last one logs
        states_per_param=states_per_param(row, has_decoder=decoder is not None),
        packs_states=bits_of_states(row) > 0,
        repeats_half=is_titan(row),
        compiles="" if not is_compiled(row) else "blocks" if is_titan(row) else "model",
        is_lean=recipe is not None,
        is_narrow=holds_sixteen_bits(row),
        offloads=offloads(row),
        updates_lists=updates_lists(row),
        updates="no optimizer step" not in joined(row, "notes"),
        adds_apart=adds_apart(row, precision),
        spread=float(said[1]) / 100 if (said := _VARIES.search(joined(row, "notes"))) else 0.0,
    )


def _copied_s(model: ModelSpec, machine: Hardware, ranks: int) -> float:
    """Seconds in which three passes copy a rank's part of weights in 16 bits from the host to its device."""
    held = 2 * sum(param.numel for param in model.params) / ranks
    return 3 * held / (machine.host_bytes_per_s or HOST_BYTES_PER_S)


def _network_of(row: Row, machine: Hardware) -> tuple[Decoder | None, str]:
    """Return the row's transformer and its name, or the name of its network of convolutions."""
    name = vision_of(row)
    return (None, name) if name else decoder_of(row, machine)


@lru_cache(maxsize=256)
def _model(
    decoder: Decoder | str, known: str, source: str, recipe: Recipe | None, is_packed: bool, splits: bool,
    has_stages: bool, targets: tuple[str, ...], channels_last: bool,
) -> ModelSpec:  # fmt: skip
    """Return the model of a row of a source; rows that have these alike have one model, which is made once."""
    row = {"source": source}
    if isinstance(decoder, str):
        model = vision_model(decoder, is_fused="MLPerf" in source, channels_last=channels_last)
    else:
        model = with_its_loss(row, _spec_of(decoder, known or "published", targets), recipe, is_packed=is_packed)
        model = with_mixers(model, decoder, MIXERS[known]) if known else model
    if splits and not is_titan(row):
        model = replace(model, layers=tuple(map(_gathered_again, model.layers)))
    model = as_it_recomputes(row, model)
    if has_stages:  # other libraries deal out the blocks evenly, whatever the head costs
        model = replace(model, layers=tuple(la if la.is_block else replace(la, forward_flops=1) for la in model.layers))
    return _interned(model)


def _spec_of(decoder: Decoder, name: str, targets: tuple[str, ...]) -> ModelSpec:
    """Return the shape of a decoder, with its adapters where its row says which layers have them."""
    if not decoder.adapter_rank or not targets:
        return spec(decoder, name)
    if decoder.bias:  # one product makes queries, keys and values
        targets = tuple(dict.fromkeys("qkv" if one in ("q_proj", "k_proj", "v_proj") else one for one in targets))
    return add_adapters(
        spec(replace(decoder, adapter_rank=0), name), LoraTable(targets=targets, r=decoder.adapter_rank)
    )


@lru_cache(maxsize=64)
def _interned(model: ModelSpec) -> ModelSpec:
    """Return the first of equal models, of which much is computed once and kept by the model's identity."""
    return model


_COUNTS = (
    "n_params", "n_layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "moe_experts", "moe_topk", "n_gpus",
    "gpus_per_node", "tp", "pp", "vp", "cp", "ep", "dp_replicate", "dp_shard", "micro_batch", "global_batch",
)  # fmt: skip


def _refuse_nonsense(row: Row) -> None:
    """Skip a row with words for a number, or without devices."""
    for column in _COUNTS:
        cell = (row.get(column) or "").strip()
        if not says_nothing(cell) and not re.search(r"\d", cell):
            raise SkippedError(f"{column}={cell} is no number")
    devices = (row.get("n_gpus") or "").strip()
    if re.match(r"-?[\d.]", devices) and not whole(row, "n_gpus"):
        raise SkippedError(f"n_gpus={devices}, and a step takes one at least")


def _matrices(model: ModelSpec, pp: int, ep: int) -> int:
    """Matrices of the blocks that one rank updates; each of its experts has its own."""
    params = [p for p in model.params if p.trainable and len(p.shape) > 1 and model.layers[p.layer].is_block]
    return sum(-(-p.experts // ep) if p.experts else 1 for p in params) // pp


def _devices(row: Row, machine: Hardware, needed: int) -> int:
    printed = whole(row, "dp_replicate") or whole(row, "dp_shard")
    if "_release" in (row.get("model") or "") and not printed:
        return max(RELEASE_DEVICES // needed, 1) * needed
    least = needed * max(1, -(-whole(row, "ep", 1) // whole(row, "tp", 1)))
    return needed * printed if printed else max(min(machine.devices_per_node, 8) // least, 1) * least


def _cuts(row: Row, machine: Hardware, blocks: int) -> tuple[int, int, int]:
    """Degrees tp, pp, cp; where only the replicas are printed, what they leave is tp within a node, and pp.

    More of them than the devices allow, or the blocks, are misprints: rates agree with the number of devices, and there
    are fewer stages. Others that do not divide it are no layout.
    """
    tp, pp, cp = (whole(row, column, 1) for column in ("tp", "pp", "cp"))
    copies = whole(row, "dp_replicate", 1) * whole(row, "dp_shard", 1)
    if not (whole(row, "tp") or whole(row, "pp")) and copies > 1 and whole(row, "n_gpus") % (copies * cp) == 0:
        left = whole(row, "n_gpus") // (copies * cp)
        tp = math.gcd(left, machine.devices_per_node)
        pp = left // tp
    devices = whole(row, "n_gpus", tp * pp * cp)
    if devices % (tp * cp) or (devices % (tp * pp * cp) and tp * pp * cp < devices):
        raise SkippedError(f"tp={tp} pp={pp} cp={cp} does not divide {devices} devices")
    pp = max(degree for degree in range(1, min(pp, blocks) + 1) if devices % (tp * degree * cp) == 0)
    return tp, pp, cp


def _batch_in(notes: str, sequence: int, dp: int) -> int:
    """Samples of a step whose tokens the notes print: `tokens per step 2097152`, `batch 0.5M tokens`, `2M tokens global batch`;
    or whose samples of a data rank: `batch per DP=48`."""
    if each := re.search(r"batch per DP=(\d+)", notes):
        return dp * int(each[1])
    found = re.search(
        r"tokens per step:? ([\d.,]+)([KM]?)|batch ([\d.]+)([KM]) tokens|([\d.]+)([KM]) tokens global batch", notes
    )
    if not found:
        return 0
    text, unit = [part for part in found.groups() if part is not None]
    tokens = float(text.replace(",", "")) * {"": 1, "K": 1e3, "M": 1e6}[unit]
    return max(1, round(tokens / sequence))


_VARIES = re.compile(r"results \+-(\d+)%")
_ACCUMULATES = re.compile(r"gradient_accumulation_steps=(\d+)|\bGA=(\d+)")


def _microbatch(row: Row, machine: Hardware, tokens: int, pp: int, dp: int) -> int:
    total = whole(row, "global_batch")
    said = _ACCUMULATES.search(joined(row, "notes"))
    if said and total >= dp * int(said[1] or said[2]) > 0:
        return total // (dp * int(said[1] or said[2]))
    if is_by_xla(row, machine) and total >= dp:
        return total // dp  # no micro-batches but those of a pipeline
    if pp > 1:
        # torchtitan makes as many micro-batches as there are stages (`pipeline_parallel_microbatches or parallel_dims.pp`)
        return max(1, total // (dp * pp)) if is_titan(row) else 1
    if recipe := recipe_of(row):
        return recipe.samples
    if is_entry(row) and dp <= total <= MOST_AT_ONCE * dp:
        return total // dp
    size = 256
    while size > 1 and (size * tokens > 2**14 or (total and total // dp < size)):
        size //= 2
    return size


def _says_microbatch(row: Row, per_rank: int, dp: int) -> bool:
    """Whether the samples of a micro-batch are printed, or those of a rank's whole batch, which is one: peaks of memory depend on them,
    and steps hardly do."""
    total = whole(row, "global_batch")
    is_whole = whole(row, "pp", 1) == 1 and total == per_rank * dp
    return bool(whole(row, "micro_batch") or recipe_of(row) or _ACCUMULATES.search(joined(row, "notes"))) or is_whole


def _halves(size: int) -> tuple[int, ...]:
    return (size, *_halves(size // 2)) if size > 1 else (1,)


def _on_a_rank(row: Row, decoder: Decoder, cp: int) -> Decoder:
    """Cut the sequence, and add adapters."""
    if cp > 1:
        decoder = replace(decoder, sequence=max(decoder.sequence // cp, 1), keys=decoder.sequence)
    if adapters := adapters_of(row):
        decoder = replace(decoder, adapter_rank=adapters.rank)
    return decoder


def _splits_sequence(row: Row, machine: Hardware, decoder: Decoder | None, tp: int) -> bool:
    said = (row.get("sequence_parallel") or "").strip().lower()
    if decoder is None or tp == 1 or decoder.sequence % tp:
        return False
    return said in _YES or (not said and ((is_late(machine) and not is_tested(row)) or decoder.experts > 0))


def _gathered_again(layer: LayerSpec) -> LayerSpec:
    """What is gathered for the cut parts is not kept: Megatron-LM gathers it again in the backward, where DTensors keep it."""
    return replace(layer, saved_cut_elements=layer.saved_elements) if layer.is_block else layer


def _words(
    row: Row, tp: int, pp: int, dp: int, microbatch: int, model: ModelSpec, machine: Hardware
) -> dict[str, int | str]:
    words: dict[str, int | str] = {"tp": tp, "pp": pp, "microbatch": microbatch}
    stage = whole(row, "zero_stage")
    shard = whole(row, "dp_shard")
    by_xla = is_by_xla(row, machine)
    zero = stage or (3 if shard > 1 else int(model.num_params >= LARGE))
    if not stage and zero and tp == pp == 1 and (by_xla or _too_large(model, machine)):
        zero = 1 if any(p.experts for p in model.params) else 3
    zero = min(zero, 1) if pp > 1 else zero
    if zero and dp > 1:
        # MaxText: `ici_fsdp_parallelism` takes all devices of a node or slice of TPUs, `dcn_data_parallelism` all nodes or slices
        slices = dp // machine.devices_per_node if by_xla and not stage and dp % machine.devices_per_node == 0 else 1
        words |= {"dp_replicate": slices, "dp_shard": dp // slices, "zero": min(zero, 3)}
    else:
        words["dp_replicate"] = dp
    blocks = sum(layer.is_block for layer in model.layers)
    virtual = whole(row, "vp", -(-blocks // (2 * pp)) if is_entry(row) else 1)
    if pp > 1 and (virtual > 1 or "interleaved" in (row.get("schedule") or "").lower()):
        virtual = max(min(virtual if virtual > 1 else 2, blocks // pp), 1)
        if virtual > 1:
            words |= {"schedule": "interleaved", "virtual_stages": virtual}
    return words


def _too_large(model: ModelSpec, machine: Hardware) -> bool:
    """Whether whole weights and gradients alone fill a device: then nobody keeps them whole."""
    held = sum(param.numel * (6 if param.trainable else 2) for param in model.params)
    return held > machine.memory_bytes


_DEGREES = re.compile(r"_?(?:tp|pp|cp|ep|vp|etp)\d+")
"""The layout in the name of a functional test."""


def _group(row: Row, machine: Hardware, name: str, devices: int, batch: int, tokens: int) -> tuple[str, ...]:
    said = (*(str(whole(row, name)) for name in ("n_layers", "hidden", "heads")), str(number(row, "n_params") or ""))
    if "LAYOUT INCONSISTENT" in joined(row, "notes"):  # what it was is not known, so it tells nothing of an order
        said += (row.get("id") or "",)
    precision = (row.get("precision") or "").upper()
    name = _DEGREES.sub("", name) if is_tested(row) else name
    return (row.get("source") or "", name, *said, machine.name, str(devices), str(batch), str(tokens), precision)
