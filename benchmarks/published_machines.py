"""The machine of a published row, and what the row's software makes of it.

A row names a device, seldom its nodes, and hardly ever what its libraries could do at the time. What is known of those:

    before Hopper     Megatron-LM and DeepSpeed hid no communication; ZeRO-3 gathered through a quarter of a node's ports
    from Hopper on    Transformer Engine's attention is cuDNN's, PyTorch's own FlashAttention-2
    CUDA graphs       the host starts a graph, not its operations
    functional tests  modules of Python cost the host more than operations; gradients are added and counted weight by weight
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from cells import Row, SkippedError, joined, says_nothing, whole
from published_cards import CARDS, of_card
from published_loops import on_its_link

from samestep import hardware as machines
from samestep.hardware import Hardware
from samestep.models.layer_spec import LayerSpec
from samestep.models.spec import ModelSpec
from samestep.wings.plan.simulation.cost import BACKWARD_KERNELS, COLLECTIVE_STARTS

GRAPH_LAUNCH_S = 2e-6
"""Host time of an operation that is part of a CUDA graph."""
MODULE_STARTS = 3.4
"""Host time of an operation of Megatron-Core's modules over that of others, as it is counted here. Measured: forward and backward of a block of
its own modules (0.16.1, its fusions, tiny sizes, one thread of a CPU) take as long as 158 to 177 forwards of PyTorch's Linear, of 20.7 us on a DGX
A100, where an operation is taken to take 29. That is 37.5 operations forward, 7 of which are an attention that is written, and 9 the modules'."""
ENGINE_STARTS = 4.0
"""The same of Transformer Engine's modules, whose Linear takes 2.7 times as long as PyTorch's (NVIDIA/TransformerEngine, issue 2053). Fitted on
every other functional test, confirmed on the rest. Recipes have CUDA graphs instead."""
WRITTEN_STARTS = 8
"""Operations of an attention that keeps its scores: two products, a softmax, its dropout, four copies of heads. PyTorch starts them, no module."""
RING_STARTS = 3
"""Operations of Transformer Engine's attention in a ring besides those of its parts: it joins keys and values, copies and casts."""
RING_PART_STARTS = 5 + COLLECTIVE_STARTS
"""Of each part but the first: two slices, an attention, two corrections of what is there (context_parallel.py), a send with a receive."""
PREALLOCATED = 0.75
"""Part of a GPU's memory that JAX takes, where nothing else is said (docs.jax.dev, GPU memory allocation); MaxText's scripts for A3 say nothing."""
GATHERED = 0.25
"""Part of a node's ports that gathers of DeepSpeed's ZeRO-3 used, for each group that the node's ranks fall into."""
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
_UNNAMED = ((r"libai|oneflow", "V100"), (r"golden values", "A100"))
"""Sources that leave the device out, and what they are taken to have run on: OneFlow's tables, Megatron-LM's functional tests."""
_INSTANCES = (
    (r"\bA3 Mega\b|a3-megagpu", "8x 200Gb/s"),
    (r"\(A3\)|\bA3 High\b|a3-highgpu", "4x 200Gb/s"),
    (r"\ba2-(high|ultra|mega)gpu", "1x 100Gb/s"),
    (r"\bp4de?\.24xlarge", "4x 100Gb/s"),
)
"""Machines that clouds rent by name, and the ports of their nodes for traffic between GPUs, as the clouds document them."""
_EARLY = r"llm-foundry|nanogpt|FlashAttention 1"
"""Sources that measured before FlashAttention-2, of July 2023: with Triton's kernel, or torch's own before 2.2."""
_SLICES = re.compile(r"(\d+)(?:x v\d| pod)")
"""Slices of TPUs, each a torus of its own, with a network between them: `2x v5p-256`, `4 pod(s) Trillium`."""
_FOLDER = Path(__file__).parent / "machines"
SHIPPED: dict[str, Hardware] = {}
"""Profiles as they are, by name: those of samestep, and those of devices it does not run on."""


def machine_of(row: Row) -> Hardware:
    """Return the profile of the row's device, with the row's own nodes and network."""
    device = (row.get("gpu") or "").strip()
    if says_nothing(device):
        device = next((name for said, name in _UNNAMED if re.search(said, row.get("source") or "", re.IGNORECASE)), "")
        if not device:
            raise SkippedError("the device is not named")
    return _with_software(_on_its_network(_shipped(device), row), row)


def _shipped(device: str) -> Hardware:
    """Return the profile of a device: that of its card, or of the machine that its name is close to."""
    if card := next((one for one in CARDS if re.search(one.pattern, device, re.IGNORECASE)), None):
        found = of_card(card, _of_file(card.like))
        return SHIPPED.setdefault(found.name, found)
    name = next((name for pattern, name in _MACHINES if re.search(pattern, device, re.IGNORECASE)), None)
    if name is None:
        raise SkippedError(f"no profile of {device}")
    return _of_file(name)


def _of_file(name: str) -> Hardware:
    if name not in SHIPPED:
        file = _FOLDER / f"{name}.toml"
        SHIPPED[name] = machines.load(file if file.exists() else name)
    return SHIPPED[name]


def _on_its_network(machine: Hardware, row: Row) -> Hardware:
    """Give a machine the row's nodes and ports. Of a rack equal parts are used, where a job does not fit in one."""
    per_node, count = whole(row, "gpus_per_node"), whole(row, "n_gpus")
    if machine.devices_per_node > 16 and count > machine.devices_per_node < 1000:
        used = max(n for n in range(1, machine.devices_per_node + 1) if count % n == 0)
        machine = replace(machine, devices_per_node=used)
    if per_node and per_node > 1 and machine.devices_per_node <= 16:
        machine = replace(machine, devices_per_node=per_node)
    said = joined(row, "gpu", "notes")
    slices = _SLICES.match(joined(row, "notes"))
    if is_tpu(machine) and slices and count % int(slices[1]) == 0:
        machine = replace(machine, devices_per_node=max(count // int(slices[1]), 1))
    rented = next((ports for name, ports in _INSTANCES if re.search(name, said)), "")
    network = row.get("interconnect") or rented
    port = _port_bytes_per_s(network, whole(row, "gpus_per_node", machine.devices_per_node))
    if port and port > machine.inter.bytes_per_s / 5:  # slower ones are for storage and management
        machine = replace(machine, inter=replace(machine.inter, bytes_per_s=port))
    if rate := on_its_link(machine, row):
        machine = replace(machine, intra=replace(machine.intra, bytes_per_s=rate))
    return machine


def _with_software(machine: Hardware, row: Row) -> Hardware:
    """Make of a machine what the row's software makes of it."""
    covered = graph_part(row)
    if covered:
        machine = replace(
            machine, kernel_launch_s=machine.kernel_launch_s + covered * (GRAPH_LAUNCH_S - machine.kernel_launch_s)
        )
    if _has_own_attention(row, machine):
        machine = replace(machine, attention_kernel="cudnn")
    elif re.search(_EARLY, joined(row, "source", "notes"), re.I) and "Large Scale" not in row.get(
        "url_or_repo_path", ""
    ):
        machine = replace(machine, attention_kernel="flash-1")
    if machine.num_units and is_by_xla(row, machine):
        machine = replace(machine, memory_bytes=int(PREALLOCATED * machine.memory_bytes))
    if not is_late(machine) and _hides_nothing(row):
        machine = replace(machine, overlap=False)
    if _gathers_badly(row, machine):
        share = min(1.0, GATHERED * whole(row, "tp", 1))
        port = replace(machine.inter, bytes_per_s=share * machine.inter.bytes_per_s)
        machine = replace(machine, overlap=False, inter=port)
    return machine


def is_tested(row: Row) -> bool:
    """Whether the run is one of Megatron-LM's functional tests: they log norms and zeros of each weight, and add up gradients apart."""
    return "correctness test" in joined(row, "notes")


def as_tested(row: Row, model: ModelSpec) -> ModelSpec:
    """Let blocks start what those of a functional test do: all by modules of Python, a sum for each weight's gradient, experts one after
    the other, an attention for each part of a ring."""
    notes = joined(row, "notes")
    weights = Counter(param.layer for param in model.params)
    experts = 0 if "--moe-grouped-gemm=true" in notes else whole(row, "moe_experts") // whole(row, "ep", 1)
    parts = whole(row, "cp", 1)
    is_local = "=local" in notes
    ring = RING_STARTS + (parts - 1) * RING_PART_STARTS if parts > 1 else 0.0

    def tested(index: int, layer: LayerSpec) -> LayerSpec:
        own = layer.moved.kernels + 3 * max(experts - 1, 0) * len(
            layer.dispatches
        )  # two products and an activation each
        written = WRITTEN_STARTS * any(product.is_batched for product in layer.products)
        starts = MODULE_STARTS if is_local or layer.dispatches else ENGINE_STARTS  # routers are Megatron-Core's own
        kernels = round(starts * (own - written) + written + ring + weights[index] / (1 + BACKWARD_KERNELS))
        return replace(layer, moved=replace(layer.moved, kernels=kernels))

    layers = (tested(index, layer) if layer.is_block else layer for index, layer in enumerate(model.layers))
    return replace(model, layers=tuple(layers))


def graph_part(row: Row) -> float:
    """Part of the host's work that CUDA graphs take over: all of it, or a quarter for each kind of module they hold."""
    notes = joined(row, "notes")
    if re.search(
        r"full.cuda.graph=(?:1|true)|cuda.graph(?:.impl)?=(?:1|true|full_iteration|local)", notes, re.IGNORECASE
    ):
        return 1.0
    scopes = re.search(r"cuda_graph_impl=transformer_engine; cuda_graph_scope=([^;]+)", notes)
    if not scopes:  # its graphs hold attentions and routers, which have static shapes
        return 0.5 if "cuda-graph-impl=transformer_engine" in notes else 0.0
    return 1.0 if "full" in scopes[1] else min(1.0, 0.25 * len(re.findall(r"\w+", scopes[1])))


def _hides_nothing(row: Row) -> bool:
    """Whether it is of Megatron-LM or DeepSpeed, which hid no communication behind compute before Hopper."""
    said = joined(row, "schedule", "notes", "source")
    if re.search(r"fsdp|overlap-grad|overlap.param", said, re.IGNORECASE):
        return False
    return is_by_engine(row) or re.search(r"deepspeed|\bDS=", said, re.IGNORECASE) is not None


def _has_own_attention(row: Row, machine: Hardware) -> bool:
    """Whether attention runs in kernels written for the device: those of Transformer Engine from Hopper on."""
    late = re.match(r"h[12]|g?b[23]00|mi3", machine.name) is not None
    return late and is_by_engine(row) and "attention" in machine.efficiency


def is_by_engine(row: Row) -> bool:
    """Whether the row is of Megatron-LM or a library around it, which run on Transformer Engine since Hopper."""
    said = joined(row, "source", "model") + re.sub(r"dims: [^;]*", "", joined(row, "notes"))
    return (
        re.search(r"nemo\b|megatron|transformer.?engine|kernels=TE|dgx cloud|mlperf|maxtext|libai", said, re.I)
        is not None
    )


def _gathers_badly(row: Row, machine: Hardware) -> bool:
    """DeepSpeed's ZeRO-3 before Hopper: gathers are not hidden, and the ranks that a node has of a group share few ports."""
    said = re.search(r"\bzero.?3|deepspeed|\bDS=", joined(row, "schedule", "notes", "source"), re.IGNORECASE)
    return whole(row, "zero_stage") == 3 and said is not None and not is_late(machine)


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


def is_tpu(machine: Hardware) -> bool:
    """Whether a machine is a pod of Google's TPUs."""
    return machine.name.startswith("tpu")


def is_by_xla(row: Row, machine: Hardware) -> bool:
    """Whether XLA compiles the step, of MaxText or on TPUs."""
    return is_tpu(machine) or "maxtext" in joined(row, "source").lower()


def is_late(machine: Hardware) -> bool:
    """Whether the device is of a time when libraries split all of a layer and fused what they could: from 2022 on."""
    return not machine.name.startswith(("v100", "a100", "a30"))
