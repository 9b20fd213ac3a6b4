"""ON WHAT a step is computed: a `Hardware` is the speed of one device, its memory, and the links between devices.

Profiles lie in `profiles/NAME.toml`, one machine each; `[sources]` says for every number where it comes from, under the
number's own key. A profile of your own is a file of the same form:

```toml
memory_bytes = 80_000_000_000
memory_bytes_per_s = 3.35e12
devices_per_node = 8
overlap = true                    # communication runs beside compute
[flops_per_s]                     # by dtype, as the data sheet says
bfloat16 = 989e12
[intra]                           # one direction of one device's link, inside a node
latency_s = 3.4e-6
bytes_per_s = 450e9
[inter]                           # the same between nodes
latency_s = 14e-6
bytes_per_s = 50e9
```
What follows may be left out; then nothing reaches less than its peak, and launching is free.
```toml
num_units = 132                   # multiprocessors: a product is cut into tiles, and the last wave is seldom full
kernel_s = 3e-6                   # what the shortest kernel takes on the device
kernel_launch_s = 10e-6           # what the host needs to start one operation
host_step_s = 5e-3                # what the host does once a step: data, norm, log
fsdp_unit_s = 1e-3                # what FSDP2 does for each gather and scatter, where nothing hides it: on a CPU
memory_efficiency = 0.85          # part of memory_bytes_per_s that an elementwise kernel reaches
contention = 1.1                  # compute beside communication takes so much longer
reserved_bytes = 2_000_000_000    # context, communicators, libraries
[efficiency]                      # part of a peak that the best large product reaches; `attention` of bfloat16's
bfloat16 = 0.80
attention = 0.6
[efficiency_by_shortest_side.float32]   # part of it that a product reaches whose shortest side is so long; without it any does
64 = 0.55
256 = 1.0
```
and `collective_s` in a link: what every collective over it takes, however small.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from samestep.errors import InputError, did_you_mean

Positive = Annotated[float, Field(gt=0.0)]
Seconds = Annotated[float, Field(ge=0.0)]
Fraction = Annotated[float, Field(gt=0.0, le=1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device sends over, one direction; the latency is that of one hop of a collective."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    latency_s: Annotated[float, Field(ge=0.0)]
    bytes_per_s: Positive
    collective_s: Annotated[float, Field(ge=0.0)] = 0.0
    """What every collective takes, beside its hops and bytes."""
    all_reduce_bytes_per_s: Positive | None = None
    """Where a switch adds up on the way, of an all_reduce over most of a node; without it as any ring."""
    by_ranks: Mapping[Annotated[int, Field(ge=2)], Positive] = field(default_factory=dict)
    """Where no switch joins the devices: bytes_per_s of groups of so many ranks, up to the next number."""

    def among(self, num_ranks: int) -> Link:
        """Return what a group of so many ranks within the link's reach runs at."""
        known = [count for count in self.by_ranks if count <= num_ranks]
        return replace(self, bytes_per_s=self.by_ranks[max(known)]) if known else self

    def __hash__(self) -> int:
        """Hash what tells links apart."""
        return hash((self.latency_s, self.bytes_per_s, self.collective_s))

    def slower(self, other: Link) -> Link:
        """Return what a ring runs at that goes over both links."""
        return Link(
            latency_s=max(self.latency_s, other.latency_s),
            bytes_per_s=min(self.bytes_per_s, other.bytes_per_s),
            collective_s=max(self.collective_s, other.collective_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A machine of equal devices, numbered node by node."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    flops_per_s: Mapping[str, Positive]
    """By dtype."""
    memory_bytes: Annotated[int, Field(gt=0)]
    """Of one device."""
    memory_bytes_per_s: Positive
    devices_per_node: Annotated[int, Field(ge=1)]
    intra: Link
    inter: Link
    overlap: bool
    """Communication runs beside compute."""
    num_units: Annotated[int, Field(ge=0)] = 0
    """Multiprocessors; 0 knows nothing of tiles and waves."""
    efficiency: Mapping[str, Fraction] = field(default_factory=dict)
    """Part of a dtype's peak that the best large product reaches; `attention`: that a fused attention does."""
    efficiency_by_shortest_side: Mapping[str, Mapping[Annotated[int, Field(ge=1)], Fraction]] = field(
        default_factory=dict
    )
    """By dtype: part of the best product's rate by the length of a product's shortest side; straight between two."""
    memory_efficiency: Fraction = 1.0
    kernel_s: Seconds = 0.0
    """What the shortest kernel takes."""
    kernel_launch_s: Seconds = 0.0
    """What the host needs to start one operation."""
    host_step_s: Seconds = 0.0
    """What the host does once a step."""
    fsdp_unit_s: Seconds = 0.0
    """What the code around a gather or a scatter of zero=2 and 3 takes, where host and device are one."""
    contention: Annotated[float, Field(ge=1.0)] = 1.0
    """How much longer compute takes beside communication."""
    reserved_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory that no tensor can have: context, communicators, libraries."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from, by its key."""

    def __hash__(self) -> int:
        """Hash what tells machines apart, so that prices can be remembered by machine."""
        return hash((self.name, self.memory_bytes_per_s, self.kernel_launch_s, self.kernel_s, self.num_units))


def load(name_or_path: str | Path) -> Hardware:
    """Read a profile by its name, or a TOML file of the same form.

    Raises:
        InputError: there is no such profile or file, or it has mistakes; each is named.
    """
    source = _find(name_or_path)
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{name_or_path} is not TOML: {error}") from None
    try:
        return TypeAdapter(Hardware).validate_python({"name": source.name.removesuffix(".toml"), **table})
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, m['loc']))}: {m['msg'].lower()}" for m in error.errors(include_url=False)]
        anew = f"; samestep measure writes {OWN} anew" if str(name_or_path) == OWN else ""
        raise InputError(f"{name_or_path}: {'; '.join(mistakes)}{anew}") from None


def origins(machine: Hardware) -> dict[str, int]:
    """Count where the numbers of a profile come from: measured, fitted, refitted, assumed, or published."""
    words = [source.partition(":")[0].split()[0].rstrip(":,") for source in machine.sources.values() if source]
    known = ("measured", "fitted", "refitted", "assumed")
    return dict(Counter(word if word in known else "published" for word in words).most_common())


OWN = "this-machine"
"""The name of the profile that `measure` has written of the machine it ran on."""


def own_path() -> Path:
    """Return where `measure` writes, and where `load` finds what it wrote."""
    return Path.home() / ".cache" / "samestep" / f"{OWN}.toml"


def own_or(name: str) -> Hardware:
    """Read what was measured of this machine, or the named profile where nothing was."""
    return load(OWN if _is_measured() else name)


def resolve_hardware(given: Hardware | str | Path | None) -> Hardware:
    """Return a profile as it is given, or read it by its name or file; without one what was measured here, or cpu-laptop.

    Raises:
        InputError: there is no such profile or file, or it has mistakes; each is named.
    """
    if given is None:
        return own_or("cpu-laptop")
    return given if isinstance(given, Hardware) else load(given)


def cautions_here(machine: Hardware, devices: int) -> list[str]:
    """Say what speaks against a profile as that of the machine this runs on, with so many devices in use."""
    lines = []
    if machine.name != OWN:
        lines.append(f"hardware {machine.name}: nothing was measured here, samestep measure does")
    if devices > machine.devices_per_node:
        lines.append(
            f"{machine.name} has {machine.devices_per_node} devices: {devices} are predicted as several such machines, "
            "and on one of them ranks would take turns"
        )
    return lines


def _is_measured() -> bool:
    try:
        return own_path().is_file()
    except RuntimeError:  # there is no home
        return False


def profiles() -> tuple[str, ...]:
    """List the names of the profiles that come with samestep."""
    folder = files("samestep") / "profiles"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def _find(name_or_path: str | Path) -> Traversable:
    name = str(name_or_path)
    if name.lower() in profiles():
        return files("samestep") / "profiles" / f"{name.lower()}.toml"
    if name == OWN:
        if _is_measured():
            return own_path()
        raise InputError(f"nothing was measured of this machine: samestep measure writes {OWN}")
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        raise InputError(f"{path} is a folder; a hardware profile is a TOML file")
    what = f"there is no file {path}" if path.suffix == ".toml" else f"no hardware {name!r}"
    hint = did_you_mean(path.stem.lower() if path.suffix == ".toml" else name.lower(), profiles())
    raise InputError(f"{what}{hint}: the profiles are {', '.join(profiles())}, or give a TOML file of that form")
