"""`Hardware`: ON WHAT a step is computed, the speed of one device, its memory, and the links between devices.

Profiles are in `profiles/NAME.toml`, one machine each; `[sources]` gives the origin of every number under the number's
own key. A profile of your own is a file of the same form:

```toml
memory_bytes = 84_970_000_000     # all that torch has of a device, not the data sheet's 80 GB
memory_bytes_per_s = 3.35e12
devices_per_node = 8
overlap = true                    # communication overlaps with compute
[flops_per_s]                     # peak by dtype, from the data sheet
bfloat16 = 989e12
[intra]                           # one device's link within a node, in one direction
latency_s = 3.4e-6
bytes_per_s = 450e9
[inter]                           # the same between nodes
latency_s = 14e-6
bytes_per_s = 50e9
```
The following may be left out; then everything reaches its peak, and launching a kernel takes no time.
```toml
num_units = 132                   # multiprocessors: a product runs in waves of tiles, and the last wave is seldom full
host_update_bytes_per_s = 15e9    # rate at which a device's share of the host updates weights and states under offload
kernel_s = 3e-6                   # time of the shortest kernel on the device
kernel_launch_s = 10e-6           # time in which the host launches one operation
host_step_s = 5e-3                # time of the host once a step: data, norm, log
fsdp_unit_s = 1e-3                # time of FSDP2's own code for each gather and scatter, where it is exposed: on a CPU
attention_kernel = "cudnn"        # family of the kernels of attention, of torch's choice: flash-1, flash-2, flash-3 or cudnn
sustained = 0.8                   # clock held throughout a step, over the one of the peak: lower under a power limit
memory_efficiency = 0.85          # fraction of memory_bytes_per_s that an elementwise kernel reaches
contention = 1.1                  # factor by which compute is slower while communication runs
device_spread = 0.03              # standard deviation of the seconds of the same work over devices, over their mean
reserved_bytes = 2_000_000_000    # memory of context, communicators, libraries
[efficiency]                      # fraction of its peak that the best large product reaches; `attention`: of bfloat16's
bfloat16 = 0.80
attention = 0.35                  # that of FlashAttention-2 with heads of 128, long, without a mask, forward and backward
[efficiency_by_shortest_side.float32]   # fraction of that, by the length of a product's shortest side; without it 1
64 = 0.55
256 = 1.0
```
and in a link `collective_s`, the time that every collective over it takes, however small, and `ll128_latency_s`, the
latency of a hop in NCCL's protocol for smaller messages. `library = "gloo"` says that all collectives are rings; without it
they are NCCL's (`wings/plan/simulation/collectives.py`).

All ranks wait for each other in every step, so a step over N devices takes what the slowest of them takes. Where the seconds of the
same work are spread normally over devices, the work of each takes so many times as long as the mean, and its links do not:

    1 + device_spread x E[N]        E[N] = Phi^-1((N - 3/8) / (N + 1/4)), the expected largest of N standard normal values

(Blom 1958, Statistical Estimates and Transformed Beta-Variables; E[1] = 0, and E[N] is at most 5 % too large.)
"""

from __future__ import annotations

import itertools
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from samestep.errors import InputError, did_you_mean, short_repr
from samestep.output.text import align_columns, gib

Positive = Annotated[float, Field(gt=0.0)]
NonNegative = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link of one device, in one direction: its rate, and the latency of one hop of a collective."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    latency_s: NonNegative
    bytes_per_s: Positive
    collective_s: NonNegative = 0.0
    """Seconds that every collective takes besides its hops and bytes."""
    ll128_latency_s: NonNegative | None = None
    """Latency of one hop in NCCL's protocol LL128, which moves fewer bytes; None where it is not used."""
    all_reduce_bytes_per_s: Positive | None = None
    """Rate of an all_reduce where switches sum, over most of a node (NVLS) or between nodes (SHARP); None where a ring does."""
    by_ranks: Mapping[Annotated[int, Field(ge=2)], Positive] = field(default_factory=dict)
    """bytes_per_s by the number of ranks of a group, up to the next number, for devices without a switch."""

    def among(self, num_ranks: int) -> Link:
        """Return the link at the rate of a group of `num_ranks` ranks."""
        known = [count for count in self.by_ranks if count <= num_ranks]
        return replace(self, bytes_per_s=self.by_ranks[max(known)]) if known else self

    def __hash__(self) -> int:
        """Return a hash of the numbers in which links differ."""
        return hash((self.latency_s, self.bytes_per_s, self.collective_s))

    def slower(self, other: Link) -> Link:
        """Return the link with the larger latency and the lower rate of two: that of a ring over both."""
        return Link(
            latency_s=max(self.latency_s, other.latency_s),
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
            collective_s=max(self.collective_s, other.collective_s),
        )

    def delayed(self, *, transfer: float, collective: float = 1.0) -> Link:
        """Return a link whose transfers, and latencies of collectives, take so many times as long."""
        return replace(
            self,
            collective_s=self.collective_s * collective,
            bytes_per_s=self.bytes_per_s / transfer,
            all_reduce_bytes_per_s=self.all_reduce_bytes_per_s and self.all_reduce_bytes_per_s / transfer,
            by_ranks={ranks: rate / transfer for ranks, rate in self.by_ranks.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine of equal devices, numbered node by node."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    flops_per_s: Mapping[str, Positive]
    """Peak FLOP/s of one device by dtype."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """Memory of one device, all that torch has of it."""
    memory_bytes_per_s: Positive
    devices_per_node: Annotated[int, Field(ge=1)]
    intra: Link
    inter: Link
    overlap: bool
    """Whether communication overlaps with compute."""
    library: Literal["nccl", "gloo"] = "nccl"
    """The library of collectives: gloo has rings alone, NCCL (and RCCL) trees too."""
    num_units: Annotated[int, Field(ge=0)] = 0
    """Number of multiprocessors; 0 leaves tiles and waves out of the prediction."""
    efficiency: Mapping[str, Fraction] = field(default_factory=dict)
    """Fraction of a dtype's peak that the best large product reaches; under `attention` the fraction of
    FlashAttention-2, forward and backward, with long heads of 128 and without a mask."""
    attention_kernel: Literal["sdpa", "flash-1", "flash-2", "flash-3", "cudnn"] = "sdpa"
    """Family of kernels that computes a fused attention (`wings/plan/simulation/kernel_rates.py`)."""
    efficiency_by_shortest_side: Mapping[str, Mapping[Annotated[int, Field(ge=1)], Fraction]] = field(
        default_factory=dict
    )
    """For each dtype: fraction of the best product's rate by the length of the shortest side, interpolated linearly."""
    host_bytes_per_s: NonNegative = 0.0
    """Rate of copies from CPU memory to one device; 0 if the two share one memory."""
    host_update_bytes_per_s: Positive = 15e9
    """Rate at which one device's share of the CPU memory bandwidth in updates of weights and states. The default is an assumption:
    an eighth of the rate that updates reach on two CPU sockets."""
    sustained: Annotated[float, Field(gt=0.0, le=1.25)] = 1.0
    """Clock that the device holds throughout a step over the one of its peak. Lower under a power limit, as the best product was
    measured alone. Higher on cards that boost beyond their data sheet."""
    memory_efficiency: Fraction = 1.0
    """Fraction of `memory_bytes_per_s` that an elementwise kernel reaches."""
    kernel_s: NonNegative = 0.0
    """Seconds of the shortest kernel."""
    kernel_launch_s: NonNegative = 0.0
    """Seconds of CPU time to launch one operation."""
    host_step_s: NonNegative = 0.0
    """Seconds of CPU work once per step."""
    fsdp_unit_s: NonNegative = 0.0
    """Seconds of the code around one gather or scatter of zero=2 and 3, if the CPU is the device."""
    contention: Annotated[float, Field(ge=1.0)] = 1.0
    """Slowdown of compute while communication runs, as a factor."""
    device_spread: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Standard deviation of the seconds of the same work over devices, as a fraction of their mean."""
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory that tensors cannot use: context, communicators, libraries."""
    kept_free: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Part of the memory that a plan leaves free."""
    device_names: tuple[str, ...] = ()
    """Names that CUDA or ROCm gives a device of this data sheet."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Origin of each number, by its key."""

    @property
    def room_bytes(self) -> int:
        """Bytes of a device that a layout may need, `reserved_bytes` among them: its memory without what is kept free."""
        return int(self.memory_bytes * (1 - self.kept_free))

    def slowest_of(self, devices: int) -> Hardware:
        """Return a machine of which every device is as slow as the slowest of so many devices of this one is expected to be."""
        times = 1 + self.device_spread * largest_normal(devices)
        return replace(self.slowed(times), device_spread=0.0) if times > 1 else self

    def slowed(self, times: float) -> Hardware:
        """Return a machine on which the work of a device and its host takes so many times as long; its links are as they were."""
        return replace(
            self,
            flops_per_s={dtype: rate / times for dtype, rate in self.flops_per_s.items()},
            memory_bytes_per_s=self.memory_bytes_per_s / times,
            host_update_bytes_per_s=self.host_update_bytes_per_s / times,
            kernel_s=self.kernel_s * times,
            kernel_launch_s=self.kernel_launch_s * times,
            host_step_s=self.host_step_s * times,
            fsdp_unit_s=self.fsdp_unit_s * times,
        )

    def __hash__(self) -> int:
        """Return a hash of the numbers in which machines differ, so that predicted times can be cached by machine."""
        reached = (
            self.efficiency.get("bfloat16"),
            self.efficiency.get("attention"),
            self.sustained,
            self.attention_kernel,
        )
        numbers = (
            self.name,
            self.memory_bytes_per_s,
            self.kernel_launch_s,
            self.host_step_s,
            self.kernel_s,
            self.num_units,
        )
        return hash((numbers, self.intra, self.inter, reached))


def largest_normal(count: int) -> float:
    """Return the expected largest of so many standard normal values, in standard deviations, by Blom's approximation."""
    return statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def load(name_or_path: str | Path) -> Hardware:
    """Return the profile of a name, or of a TOML file of the same form.

    Raises:
        InputError: there is no such profile or file, or it has mistakes; each is named.
    """
    source = _find(name_or_path)
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8-sig"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # not TOML, not text, a number of over 4,300 digits, too many brackets
        raise InputError("hardware-profile", f"{name_or_path} is not TOML: {error}") from None
    try:
        return TypeAdapter(Hardware).validate_python({"name": source.name.removesuffix(".toml"), **table})
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, m['loc']))}: {m['msg'].lower()}" for m in error.errors(include_url=False)]
        renewed = f"; samestep measure writes a new {OWN}" if str(name_or_path) == OWN else ""
        raise InputError("hardware-profile", f"{name_or_path}: {'; '.join(mistakes)}{renewed}") from None


def origins(machine: Hardware) -> dict[str, int]:
    """Return the number of a profile's values of each origin: measured, fitted, refitted, assumed, published."""
    words = [source.partition(":")[0].split()[0].rstrip(":,") for source in machine.sources.values() if source]
    known = ("measured", "fitted", "refitted", "assumed")
    return dict(Counter(word if word in known else "published" for word in words).most_common())


OWN = "this-machine"
"""Name of the profile that `measure` writes of the machine it runs on."""


def own_path() -> Path:
    """Return the path of the profile that `measure` writes and `load` reads."""
    return Path.home() / ".cache" / "samestep" / f"{OWN}.toml"


def own() -> Hardware | None:
    """Return the measured profile of this machine; None if there is none.

    Raises:
        InputError: the profile has mistakes; each is named.
    """
    return load(OWN) if _is_measured() else None


def of_device(device_name: str) -> Hardware | None:
    """Return the profile of a GPU by the name that its driver gives it; None if no profile has that name."""
    return next((machine for machine in map(load, profiles()) if device_name in machine.device_names), None)


def resolve_hardware(hardware: Hardware | str | Path | None) -> Hardware:
    """Return a profile, given as an object, a name or a file; by default the one measured on this machine, else cpu-laptop.

    Raises:
        InputError: there is no such profile or file, or it has mistakes; each is named.
    """
    if hardware is None:
        return own() or load("cpu-laptop")
    return hardware if isinstance(hardware, Hardware) else load(hardware)


def cautions_here(machine: Hardware, devices: int) -> list[str]:
    """Return warnings, one a line, about a profile taken for this machine with `devices` devices in use."""
    lines = []
    if machine.name != OWN:
        lines.append(f"hardware profile {machine.name}: not measured on this machine. Use samestep measure")
    if devices > machine.devices_per_node:
        lines.append(
            f"{machine.name} has {machine.devices_per_node} devices, so {devices} are predicted as several such machines"
        )
    return lines


def _is_measured() -> bool:
    try:
        return own_path().is_file()
    except RuntimeError:  # there is no home folder
        return False


def profiles() -> tuple[str, ...]:
    """Return the names of the profiles that come with samestep."""
    folder = files("samestep") / "profiles"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def known() -> tuple[str, ...]:
    """Return the names that `--hardware` takes here: those of the profiles, and that of this machine once it is measured."""
    return (*profiles(), *[OWN] * _is_measured())


def profile_table() -> str:
    """Return a table of the profiles: names, devices of a machine, memory, peak rates and links of one device."""
    rows = [("--hardware", "devices", "GiB", "TFLOP/s", "GB/s inside", "GB/s outside")]
    for name in known():
        row = load(name)
        rate = max(row.flops_per_s.get(dtype, 0.0) for dtype in ("bfloat16", "float16", "float32"))
        inside, outside = (_rate(link.bytes_per_s / 1e9) for link in (row.intra, row.inter))
        rows.append((name, str(row.devices_per_node), gib(row.memory_bytes), f"{rate / 1e12:,.4g}", inside, outside))
    return align_columns(rows) + "\n"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def as_written(name_or_path: str) -> str:
    """Return the text of a profile: TOML, with the source of every number.

    Raises:
        InputError: there is no such profile or file, or it has mistakes; each is named.
    """
    load(name_or_path)
    return _find(name_or_path).read_text(encoding="utf-8-sig")


def _find(name_or_path: str | Path) -> Traversable:
    name = str(name_or_path)
    if name.lower() in profiles():
        return files("samestep") / "profiles" / f"{name.lower()}.toml"
    if name == OWN:
        if _is_measured():
            return own_path()
        raise InputError(
            "machine-not-measured", f"this machine has not been measured: samestep measure writes the profile {OWN}"
        )
    path = Path(name_or_path)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise InputError(
            "argument-type", f"{short_repr(name)} is not the path of a hardware profile: {error.strerror}"
        ) from None
    if is_file:
        return path
    if is_folder:
        raise InputError("hardware-profile", f"{path} is a folder; a hardware profile is a TOML file")
    what = f"there is no file {path}" if path.suffix == ".toml" else f"no hardware {name!r}"
    word = path.stem.lower() if path.suffix == ".toml" else name.lower()
    card = re.match(r"[a-z]*[0-9]*", word)
    same_card = [known for known in profiles() if card and card[0] and re.match(rf"{card[0]}(?![0-9])", known)]
    hint = f" (did you mean {' or '.join(map(repr, same_card))}?)" if same_card else did_you_mean(word, profiles())
    raise InputError(
        "hardware-profile",
        f"{what}{hint}: the profiles are {', '.join(profiles())}, or give a TOML file of that form (docs/hardware.md)",
    )


def without_fixed_costs(hardware: Hardware) -> Hardware:
    """Return the hardware without the costs that an op has however small it is, and as if work could be cut anywhere.

    No op takes longer on it. Without units a product of m x k x n takes 2 m k n / rate, which whole tiles and whole waves of them exceed,
    and attention the keys of its tiles / rate; links have no hops; and no product has a lower rate than a smaller one.
    """
    rising: dict[str, dict[int, float]] = {}
    for dtype, rates in hardware.efficiency_by_shortest_side.items():
        sides = sorted(rates)
        rising[dtype] = dict(zip(sides, itertools.accumulate((rates[side] for side in sides), max), strict=True))
    intra, inter = (
        replace(link, latency_s=0.0, collective_s=0.0, ll128_latency_s=None)
        for link in (hardware.intra, hardware.inter)
    )
    return replace(
        hardware, intra=intra, inter=inter, num_units=0, kernel_s=0.0, kernel_launch_s=0.0, efficiency_by_shortest_side=rising
    )  # fmt: skip
