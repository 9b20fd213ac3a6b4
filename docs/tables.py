"""Writes the tables of the documents, between the markers `<!-- table: NAME -->` and `<!-- end -->`.

    python docs/tables.py           rewrites README.md, benchmarks/README.md, docs/*.md and docs/reference/*.md
    python docs/tables.py --check   exits 1 where a table is not what its command prints today

Each table is what the command named in its marker's function prints; nothing is typed by hand.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import error_codes
import evidence
from pydantic import BaseModel

from samestep import Job, Layout, hardware
from samestep import job_files as jobs
from samestep.enumeration import valid_layouts
from samestep.memory.memory_use import at_rest, classic_bytes_per_param, held_bytes_per_param
from samestep.models import catalog
from samestep.models.presets import DECODERS, preset
from samestep.output.text import gib
from samestep.strategies import program_of
from samestep.wings.plan.plan import plan
from samestep.wings.plan.simulation import cases
from samestep.wings.plan.simulation.simulate import program_text, simulate

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def layouts() -> str:
    """`samestep layouts --devices 4 --markdown`: every split of four devices over the axes."""
    return valid_layouts.as_markdown(valid_layouts.layouts(_default_job(), 4))


def switches() -> str:
    """`samestep layouts --devices 2 --switches --markdown`: every split of two devices, and each switch by itself."""
    return valid_layouts.as_markdown(valid_layouts.layouts(_default_job(), 2, switches=True))


def pairs() -> str:
    """`samestep layouts --devices 1 --pairs --markdown`, of a model with experts: which words compose with which."""
    return valid_layouts.matrix(valid_layouts.pairs(Job(model={"source": "preset:mixtral-8x7b"})), markdown=True)


def _default_job() -> Job:
    return jobs.load(ROOT / "jobs" / "default.toml")


def job_keys() -> str:
    """Every key of a job file, from the schema itself."""
    lines = []
    for table, field in Job.model_fields.items():
        kind = field.annotation
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
            lines += [f"\n### [{table}]\n", str(field.description)]
            continue
        about = " ".join((kind.__doc__ or "").split())
        lines += [f"\n### [{table}]\n", about, "", "| key | default | meaning |", "| --- | --- | --- |"]
        for name, key in kind.model_fields.items():
            default = "" if key.default is None else f"`{key.default!r}`".replace("'", '"')
            lines.append(f"| `{name}` | {default} | {' '.join((key.description or '').split())} |")
    return "\n".join(lines)


def presets() -> str:
    """Every preset: what `decoder_spec.spec` counts in it."""
    lines = ["| preset | parameters | layers | hidden | heads | experts | tokens of a sample |"]
    lines.append("| --- |" + " ---: |" * 6)
    for name, decoder in DECODERS.items():
        experts = f"{decoder.top_k} of {decoder.experts}" if decoder.experts else ""
        sizes = f"{decoder.layers} | {decoder.hidden:,} | {decoder.heads} | {experts} | {decoder.sequence:,}"
        lines.append(f"| `{name}` | {preset(name).num_params / 1e9:.3f} B | {sizes} |")
    lines.append(f"| `resnet50` | {preset('resnet50').num_params / 1e9:.3f} B | | | | | |")
    return "\n".join(lines)


def memory() -> str:
    """Bytes a parameter in mixed precision with Adam, by ZeRO stage and ranks: the paper's, this runtime's."""
    degrees = (2, 4, 8, 64, 1024)
    lines = ["| | " + " | ".join(f"N={n}" for n in degrees) + " | saving at N=1024 |"]
    lines.append("| --- |" + " ---: |" * (len(degrees) + 1))
    for name, bytes_per_param in (("classic", classic_bytes_per_param), ("held here", held_bytes_per_param)):
        for zero in (0, 1, 2, 3):
            cells = " | ".join(f"{bytes_per_param(zero, n):.2f}" for n in degrees)
            saving = bytes_per_param(0, 1024) / bytes_per_param(zero, 1024)
            lines.append(f"| {name}, zero={zero} | {cells} | {saving:.1f}x |")
    return "\n".join(lines)


def held() -> str:
    """What rank 0 holds of the default job in bf16, weight by weight: the program's numbers, equal to torch's."""
    base = jobs.load(ROOT / "jobs" / "default.toml", ["numerics.precision=bf16"])
    model = catalog.model_spec(base)
    head = ("layout", "weights", "of these token embeddings", "gradients", "optimizer", "bytes per parameter")
    lines = [f"| {' | '.join(head)} |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for zero in (0, 1, 2, 3):
        for degree in (2, 4, 8):
            layout = Layout(f"dp={degree} zero={zero}")
            use = at_rest(program_of(model, Job.model_validate(base.model_dump()), layout))
            each = (use.weights + use.gradients + use.optimizer) / model.num_params
            cells = f"{use.weights:,} | {use.token_embeddings:,} | {use.gradients:,} | {use.optimizer:,} | {each:.2f}"
            lines.append(f"| `{layout}` | {cells} |")
    return "\n".join(lines)


def waits() -> str:
    """The waits and copies of one step for each layout of tests/device, which count them on a simulated GPU."""
    sys.path.insert(0, str(ROOT))
    module = importlib.import_module("tests.device.test_waits")
    places = [place for place in module.REASONS if any(place in module.expected(row) for row in module.EXPECTED)]
    lines = ["| operation | in | why |", "| --- | --- | --- |"]
    lines += [f"| {kind} | `{where}` | {module.REASONS[kind, where]} |" for kind, where in places]
    lines += ["", "| layout | model | " + " | ".join(f"`{where.rpartition('.')[2]}`" for _, where in places) + " |"]
    lines.append("| --- | --- |" + " ---: |" * len(places))
    for layout, model, others in module.EXPECTED:
        counts = module.expected((layout, model, others))
        lines.append(f"| `{layout}` | {model} | " + " | ".join(str(counts.get(place, "")) for place in places) + " |")
    return "\n".join(lines)


def faults() -> str:
    """The deliberate faults of tests/proof, with the name that `verify` must give each: the suite proves every row."""
    sys.path.insert(0, str(ROOT))
    faults = importlib.import_module("tests.proof.faults").FAULTS
    lines = ["| fault | layout | called |", "| --- | --- | --- |"]
    lines += [f"| {name.replace('_', ' ')} | `{one.layout}` | {one.cause} |" for name, one in faults.items()]
    return "\n".join(lines)


def reverted() -> str:
    """The mends of tests/proof that are taken away, with the name that `verify` must give to what comes of it."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("tests.proof.reverted")
    rows = importlib.import_module("tests.proof.planting").of_kind("reverted", "resumed")
    lines = ["| without this | code | layout | called |", "| --- | --- | --- | --- |"]
    for name, row in rows.items():
        lines.append(f"| {name.replace('_', ' ')} | {row.code} | `{row.layout}` | {row.cause} |")
    return "\n".join(lines)


def silent() -> str:
    """What raises nothing and is wrong: how much, how it is done here, and the tests and faults that prove it."""
    sys.path.insert(0, str(ROOT))
    rows = importlib.import_module("tests.proof.silent").SILENT
    lines = [
        "| silent error | loss | gradients | how samestep does it | proven by |",
        "| --- | ---: | ---: | --- | --- |",
    ]
    for row in rows:
        sizes = " | ".join("" if size is None else f"{size:.2g}" for size in (row.loss, row.gradients))
        tests = [f"`{test.rpartition('::')[2]}`" for test in row.tests]
        proofs = "; ".join([*tests, *(f"fault: {name.replace('_', ' ')}" for name in row.faults)])
        lines.append(f"| {row.what} | {sizes} | {row.right} | {proofs} |")
    return "\n".join(lines)


def crashes() -> str:
    """The sums of all calls of `make crashes`."""
    sys.path.insert(0, str(ROOT))
    outcomes = importlib.import_module("tests.crashes.outcomes")
    return str(outcomes.table(outcomes.read(outcomes.RECORD)))


TECHNIQUES = (
    ("initial values", "building/initial_values.py building/tape.py"),
    ("order of samples", "datasets/order.py datasets/batch.py"),
    ("data parallelism (DDP, ZeRO-1)", "strategies/data.py runtime/weights/replicated.py program/buckets.py"),
    (
        "sharding (ZeRO-2, ZeRO-3, FSDP, hybrid)",
        "strategies/shard.py runtime/weights/sharded.py runtime/weights/fsdp_units.py program/units.py",
    ),
    ("micro-batches (gradient accumulation)", "runtime/microbatches.py strategies/shard.py runtime/interpreter.py"),
    ("recompute (activation checkpointing)", "strategies/recompute.py runtime/axes/recompute.py"),
    (
        "activation offloading (inputs of blocks, to CPU memory)",
        "strategies/host_inputs.py runtime/axes/host_inputs.py",
    ),
    ("chunked MLP (tiled MLP)", "strategies/chunked_mlp.py runtime/axes/chunked_mlp.py tracing/backward.py"),
    (
        "chunked loss",
        "strategies/chunked_loss.py runtime/axes/applied_axes.py building/chunked_cross_entropy.py tracing/pending_logits.py",
    ),
    ("offload of the optimizer", "runtime/optimizers/optimizer_step.py runtime/host_copies.py"),
    (
        "parameter offloading of frozen models (weights in CPU memory)",
        "strategies/host_weights.py runtime/axes/host_weights.py program/program.py",
    ),
    ("mixed precision", "strategies/precision.py runtime/axes/precision.py runtime/optimizers/loss_scale.py"),
    ("tensor parallelism", "strategies/tensor.py runtime/axes/tensor.py independence/tensor_plan.py"),
    ("sequence parallelism", "strategies/sequence.py runtime/axes/sequence.py independence/sequence_proof.py"),
    ("context parallelism", "strategies/context.py runtime/axes/context/slicing.py independence/token_slices.py"),
    (
        "ring attention",
        "runtime/axes/context/ring_attention.py runtime/axes/context/block_exchanges.py program/ring_visits.py",
    ),
    ("pipelines", "strategies/pipeline.py runtime/axes/pipeline/stage.py runtime/axes/pipeline/stage_messages.py"),
    ("schedules of pipelines", "schedules.py runtime/axes/weight_gradients.py"),
    ("expert parallelism", "strategies/expert.py runtime/axes/expert.py tracing/experts.py"),
    (
        "batch norm",
        "strategies/batch_norm.py runtime/axes/batch_norm.py runtime/axes/one_group_norm.py program/step.py tracing/batch_norms.py",
    ),
    ("compressed gradients", "strategies/compress.py program/codecs.py runtime/codecs/exchange.py"),
    (
        "DiLoCo, local SGD (local replicas)",
        "wings/slow_links/local_replicas.py program/contributions.py runtime/weights/weight_store.py",
    ),
    (
        "optimizers over the whole matrix (Muon, Shampoo)",
        "strategies/whole_update.py runtime/weights/owning.py runtime/optimizers/update_rule.py",
    ),
    ("8-bit optimizer states, packed", "runtime/optimizers/packed_states.py program/update_rules.py"),
    ("compiled blocks", "runtime/axes/compiled_blocks.py runtime/axes/graph_compiler.py"),
    ("packed documents", "wings/readers/documents.py building/packed_positions.py building/attention/fused.py"),
    (
        "attention",
        "building/attention/attention_spec.py building/attention/carriers.py building/attention/formula.py kernels/flash_dropout.py runtime/axes/context/ring_attention.py",
    ),
    ("dropout masks", "randomness/masks.py randomness/mode.py randomness/replacements.py kernels/hashed_dropout.py"),
    ("distributions of random numbers", "randomness/distributions.py examination/traced_forward.py"),
    ("families of transformers", "building/families.py building/pretrained.py"),
    ("adapters (LoRA, QLoRA)", "wings/adapters/lora.py wings/adapters/nf4.py building/model_changes.py"),
    (
        "proof of independence",
        "independence/dependence.py independence/dimension_maps.py independence/row_prover.py independence/cut_proof.py independence/operation_trial.py",
    ),
    ("the canary", "runtime/guards/canary.py runtime/guards/repeat.py independence/roundings.py"),
    ("the ledger", "runtime/ledger.py program/program.py"),
    (
        "checkpoints and resume",
        "runtime/checkpoints/checkpoint.py runtime/checkpoints/writer.py runtime/checkpoints/manifests.py",
    ),
    ("workers (samestep.launch)", "runtime/processes/workers.py runtime/processes/worker.py"),
    (
        "launchers (torchrun, srun)",
        "runtime/processes/launchers.py runtime/processes/rank_variables.py runtime/processes/rank_order.py "
        "runtime/processes/join.py runtime/processes/hang_watch.py",
    ),
    (
        "several hosts",
        "wings/cluster/hosts/run_on_hosts.py training/elastic.py wings/cluster/hosts/meeting.py wings/cluster/hosts/distant_workers.py "
        "runtime/processes/host_share.py",
    ),
    ("samestep verify", "proof/verify.py proof/sides.py proof/comparison.py proof/causes.py"),
    (
        "samestep plan",
        "wings/plan/plan.py wings/plan/search.py enumeration/candidates.py wings/plan/ranking.py wings/plan/bounds/step_time.py",
    ),
    (
        "samestep simulate",
        "wings/plan/simulation/simulate.py wings/plan/simulation/clock.py wings/plan/simulation/cost.py memory/memory_use.py",
    ),
    ("valid layouts", "enumeration/valid_layouts.py wings/plan/open_groups.py"),
    ("samestep inspect", "training/inspection.py"),
    (
        "samestep doctor",
        "wings/cluster/diagnosis/doctor.py wings/cluster/diagnosis/findings.py wings/cluster/diagnosis/one_host.py wings/cluster/diagnosis/all_hosts.py wings/cluster/diagnosis/gathering.py "
        "wings/cluster/diagnosis/doors.py",
    ),
    (
        "hardware profiles",
        "wings/plan/measurement/profile.py hardware.py wings/plan/measurement/microbenchmarks.py wings/plan/calibrate.py",
    ),
)
"""Each technique as docs/features.md names it, and the files below src/samestep that hold it: the first is named like it."""


def where() -> str:
    """The files of each technique; a path that does not exist is an error."""
    lines = ["| technique | files |", "| --- | --- |"]
    for technique, paths in TECHNIQUES:
        for path in paths.split():
            assert (ROOT / "src" / "samestep" / path).is_file(), f"{technique}: there is no src/samestep/{path}"
        files = ", ".join(f"`{path}`" for path in paths.split())
        name = technique.replace("|", r"\|")
        lines.append(f"| {name} | {files} |")
    return "\n".join(lines)


def a_step() -> str:
    """The program of both stages of a small job, as `samestep simulate --program` prints it."""
    job = jobs.load(ROOT / "jobs" / "default.toml", ["model.config.num_hidden_layers=2", "train.global_batch=4"])
    text = program_text(simulate(job, "dp=2 tp=2 pp=2 zero=1 microbatch=1", "cpu-laptop"))
    return f"```\n{text}\n```"


def techniques() -> str:
    """The rows of examples/techniques.py: what each changes of the layout and of the job."""
    sys.path.insert(0, str(ROOT))
    rows = importlib.import_module("examples.techniques").TECHNIQUES
    lines = ["| technique | layout | in the job's `numerics` |", "| --- | --- | --- |"]
    for name, (layout, numerics) in rows.items():
        keys = " ".join(f"`{key} = {value!r}`".replace("'", '"') for key, value in numerics.items())
        lines.append(f"| {name} | `{layout}` | {keys} |")
    return "\n".join(lines)


def _preset_job(model: str, batch: int) -> Job:
    """A preset in bf16, with sequences of 2,048 tokens."""
    tables = {"data": {"sequence_length": 2048}, "train": {"global_batch": batch}, "numerics": {"precision": "bf16"}}
    return Job(model={"source": f"preset:{model}"}, **tables)


LADDER = (("gpt3-350m", 1), ("gpt3-1.3b", 8), ("llama2-7b", 8), ("llama2-13b", 8), ("llama2-70b", 64))
"""Models, and on how many devices each is planned with 256 sequences of 2,048 tokens a step."""


def ladder() -> str:
    """`samestep plan --hardware h100x8` of growing models, and what one sequence at a time would need in replicas."""
    machine = hardware.load("h100x8")
    lines = [
        f"| model | devices | GiB of replicas, of {gib(machine.memory_bytes)} | the fastest that fits | s per step | GiB |"
    ]
    lines.append("| --- | ---: | ---: | --- | ---: | ---: |")
    for model, devices in LADDER:
        job = _preset_job(model, 256)
        replicas = simulate(job, f"dp={devices} microbatch=1", machine)
        best = plan(job, devices, machine, top=1).best[0]
        cells = f"{gib(replicas.peak.total)} | `{best.layout}` | {best.step_s:.2f} | {gib(best.peak.total)}"
        lines.append(f"| `{model}` | {devices} | {cells} |")
    return "\n".join(lines)


CUTS = (
    ("replication (DDP)", "dp=8", "weights, gradients, states", "samples"),
    ("ZeRO-1", "dp=8 zero=1", "weights, gradients", "samples, states"),
    ("ZeRO-3 (FSDP)", "dp=8 zero=3", "nothing", "samples, weights, gradients, states"),
    ("tensor", "tp=8", "samples, norms, activations between blocks", "weights of linear layers and embeddings, heads"),
    ("pipeline", "pp=8", "nothing", "layers, with their weights, gradients and states; a batch into micro-batches"),
)
"""Ways to spread a step, a layout of eight devices, and what each copies and cuts."""


def cuts() -> str:
    """What each way copies and cuts, and what its program holds and sends for Llama 2 7B on eight H100."""
    lines = [
        "| technique | layout | replicated on every rank | sharded over 8 ranks | GiB held | GiB at the peak | GiB sent per step by rank 0 | s per step |"
    ]
    lines.append("| --- | --- | --- | --- | ---: | ---: | --- | ---: |")
    for way, layout, copied, cut in CUTS:
        found = simulate(_preset_job("llama2-7b", 64), f"{layout} microbatch=1", "h100x8")
        sent: Counter[str] = Counter()
        for _, op in found.programs[0].ops():
            if op.axis and op.axis != "world" and op.kind.value != "recv":
                sent[op.kind.value] += op.size_bytes
        held = max(at_rest(program).total for program in found.programs)
        messages = ", ".join(f"{kind} {gib(size)}" for kind, size in sorted(sent.items()))
        peak = f"{gib(found.peak.total)}{'' if found.fits else ': does not fit'}"
        cells = f"{copied} | {cut} | {gib(held)} | {peak} | {messages} | {found.step_s:.2f}"
        lines.append(f"| {way} | `{layout}` | {cells} |")
    return "\n".join(lines)


def overtaking() -> str:
    """Replicas and shards of GPT-3 1.3B on eight A100 by the number of sequences of a step, one at a time."""
    node = hardware.load("a100-80x8")
    ethernet = replace(node, devices_per_node=1, inter=replace(node.inter, bytes_per_s=1.25e9))
    words = ("dp=8", "dp=8 zero=1", "dp=8 zero=3")
    names = [f"{where}, `{layout}`" for where in ("NVLink", "10 Gb/s") for layout in words]
    lines = ["| sequences | micro-batches | " + " | ".join(names) + " |", "| ---: |" + " ---: |" * (1 + len(names))]
    for batch in (8, 16, 32, 64, 128, 256):
        job = _preset_job("gpt3-1.3b", batch)
        times = [simulate(job, f"{layout} microbatch=1", on).step_s for on in (node, ethernet) for layout in words]
        lines.append(f"| {batch} | {batch // 8} | " + " | ".join(f"{seconds:.3f}" for seconds in times) + " |")
    return "\n".join(lines)


def overtaking_at_best() -> str:
    """`samestep simulate --case sharding-overtakes`: each at its best micro-batch."""
    return "```\n" + "\n".join(cases.lines_of("sharding-overtakes")) + "\n```"


def number_formats() -> str:
    """The number formats as torch has them."""
    torch = importlib.import_module("torch")
    lines = ["| | bits | exponent | mantissa | largest | smallest normal | next after 1 | 70,000 | 1e-8 | 1 + 0.003 |"]
    lines.append("| --- |" + " ---: |" * 9)
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        about = torch.finfo(dtype)
        mantissa = -round(math.log2(about.eps))
        sizes = f"{about.bits} | {about.bits - 1 - mantissa} | {mantissa} | {about.max:.6g} | {about.tiny:.3g}"
        kept = " | ".join(f"{torch.tensor(number, dtype=dtype).item():.7g}" for number in (70_000.0, 1e-8, 1.003))
        lines.append(f"| {name} | {sizes} | {1 + about.eps:.9g} | {kept} |")
    return "\n".join(lines)


STORED = {
    # How many causal families of transformers are equal to one device, or refused, in each layout: `make families`.
    "family_counts": ("benchmarks.family_table", "counts"),
    # Every causal family of transformers with what each layout makes of it, as `make families` has found it.
    "families": ("benchmarks.family_table", "table"),
    # Kinds of single-device scripts with what each layout makes of them, as `benchmarks/scripts.py` has found it.
    "scripts": ("benchmarks.script_table", "table"),
    # What `benchmarks/gpu.py` has measured on GPUs: nothing where none was at hand.
    "gpu": ("benchmarks.gpu_rows", "tables"),
    # Which of twelve layouts load to the bit what the others save, as `benchmarks/resharding.py` has found it.
    "resharding": ("benchmarks.resharding", "table"),
    # What `benchmarks/checkpoint.py` has measured of saves, ours and torch's.
    "checkpoint_costs": ("benchmarks.checkpoint", "kept"),
    # How long runs of 4 workers stand still after a fault, as `benchmarks/recovery.py` has measured it.
    "recovery": ("benchmarks.recovery", "kept"),
    # What each codec sends and saves on a slow link, as `benchmarks/slow_links.py` has measured it.
    "slow_links": ("slow_links", "markdown"),
    # PowerSGD beside PyTorch's hook, as `benchmarks/powersgd.py` has measured it.
    "powersgd": ("powersgd", "markdown"),
    # Held-out losses with codecs, as `benchmarks/held_out_losses.py` has found them.
    "coded_losses": ("held_out_losses", "markdown", "codecs"),
    # Held-out losses of replicas that are trained apart, as `benchmarks/held_out_losses.py` has found them.
    "apart_losses": ("held_out_losses", "markdown", "exchanges"),
    # What the kernels of codecs take, as `benchmarks/codec_kernels.py` has measured it.
    "codec_kernels": ("codec_kernels", "markdown"),
    # What `plan` recommends for well-known models beside published recipes, as `benchmarks/plans.py` has found it.
    "plans": ("plans", "markdown"),
    # Host time of a step beside loops by hand, as `benchmarks/host.py --keep` has measured it.
    "host": ("host_rows", "markdown"),
    # How much of a ring's transfer is hidden between two hosts, as `benchmarks/ring_overlap.py` has measured it.
    "ring_overlap": ("ring_overlap", "markdown"),
    # Measured steps around a ring over those by heads, by link, degree and heads, as `benchmarks/ring_overlap.py --crossover` has kept them.
    "exchanges_measured": ("ring_overlap", "measured_markdown"),
    # Predicted steps with a ring over those with heads.
    "exchanges": ("ring_overlap", "crossover"),
    # What `plan` recommends for each of the published bests, as `benchmarks/published_bests.py` has found it.
    "published_bests": ("published_bests", "markdown"),
    "published_bests_summary": ("published_bests", "summary"),
    # What fits of long sequences on H100s, as `benchmarks/long_context.py` has found it.
    "long_context": ("long_context", "markdown"),
    # What `make launchers` has found of each way to start ranks.
    "launchers": ("launchers", "stored"),
    # ZeRO-3 over all devices beside the best layout, as `benchmarks/plans.py` has found it.
    "sharded": ("plans", "all_sharded"),
    # Code that people write, with what each layout makes of it: `tests/proof/reproductions.py` runs every row.
    "reproductions": ("tests.proof.reproductions", "table"),
}
"""Tables of what commands have found and kept: the module that has the rows, its function that writes them, and what that is given."""


def _stored(module: str, function: str, *arguments: str) -> str:
    """Return a table of `STORED`; modules of the benchmarks import each other by their names alone."""
    sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "benchmarks")) if folder not in sys.path]
    return str(getattr(importlib.import_module(module), function)(*arguments))


def port_diffs() -> str:
    """The difference of each script of examples/ports to its port, and the number of changed lines."""
    parts = []
    for kind, title in {
        "ddp": "Plain DDP",
        "accelerate": "Accelerate",
        "trainer": "Trainer",
        "fabric": "Lightning Fabric",
        "nanogpt": "nanoGPT",
    }.items():
        before, after = (
            (ROOT / "examples" / "ports" / f"{kind}_{side}.py").read_text(encoding="utf-8").splitlines()
            for side in ("before", "after")
        )
        lines = [
            line.replace("  ", " ", 1) if line.startswith("  ") else line[0] + line[2:]
            for line in difflib.ndiff(before, after)
            if line[0] != "?"
        ]
        removed, added = (sum(line.startswith(sign) for line in lines) for sign in "-+")
        parts.append(
            f"## {title}\n\n{removed} lines removed, {added} lines added.\n\n```diff\n"
            + "\n".join(line.rstrip() for line in lines)
            + "\n```"
        )
    return "\n\n".join(parts)


TABLES = {
    "port_diffs": port_diffs,
    **{name: functools.partial(_stored, *row) for name, row in STORED.items()},
    **{
        name: functools.partial(_stored, "explain_tables", name)
        for name in ("slower_with_more_machines", "planted", "clean_runs", "layout_rows", "recorder_cost")
    },
    "layouts": layouts,
    "switches": switches,
    "pairs": pairs,
    "job_keys": job_keys,
    "presets": presets,
    "memory": memory,
    "held": held,
    "waits": waits,
    "faults": faults,
    "reverted": reverted,
    "silent": silent,
    "crashes": crashes,
    "where": where,
    "a_step": a_step,
    "ladder": ladder,
    "cuts": cuts,
    "overtaking": overtaking,
    "overtaking_at_best": overtaking_at_best,
    "number_formats": number_formats,
    "techniques": techniques,
    **importlib.import_module("api_tables").TABLES,
    "errors": error_codes.table,
    "evidence": evidence.table,
    "intervals": evidence.intervals,
    "accuracy": evidence.accuracy,
    "aims": evidence.aims,
    "alike": evidence.alike,
    "off_parts": evidence.off_parts,
    "order": evidence.order,
}


def main() -> int:
    stale = []
    for path in (ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        fresh = BLOCK.sub(lambda block: f"{block[1]}{TABLES[block['name']]()}\n{block[3]}", text)
        if fresh != text:
            stale.append(path)
            if "--check" not in sys.argv:
                path.write_text(fresh, encoding="utf-8")
    for path in stale:
        print("stale:" if "--check" in sys.argv else "written:", path.relative_to(ROOT))
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
