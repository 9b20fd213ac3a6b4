"""ON WHAT a step is computed: a `Hardware` is the speed of one device, its memory, and the links between devices.

Profiles lie in `profiles/NAME.toml`, one machine each; `[sources]` says for every number where it comes from, under the
number's own key. A profile of your own is a file of the same form:

```toml
memory_bytes = 80_000_000_000
memory_bytes_per_s = 3.35e12
devices_per_node = 8
overlap = true                    # communication runs beside compute
[flops_per_s]                     # by dtype
bfloat16 = 989e12
[intra]                           # one direction of one device's link, inside a node
latency_s = 3.4e-6
bytes_per_s = 450e9
[inter]                           # the same between nodes
latency_s = 14e-6
bytes_per_s = 50e9
```
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from samestep.errors import SamestepError, did_you_mean

Positive = Annotated[float, Field(gt=0.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What one device sends over, one direction; the latency is that of one hop of a collective."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    latency_s: Annotated[float, Field(ge=0.0)]
    bytes_per_s: Positive

    def slower(self, other: Link) -> Link:
        """Return what a ring runs at that goes over both links."""
        return Link(
            latency_s=max(self.latency_s, other.latency_s), bytes_per_s=min(self.bytes_per_s, other.bytes_per_s)
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
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where each number comes from, by its key."""


def load(name_or_path: str | Path) -> Hardware:
    """Read a profile by its name, or a TOML file of the same form.

    Raises:
        SamestepError: there is no such profile or file, or it has mistakes; each is named.
    """
    source = _find(name_or_path)
    try:
        table = tomllib.loads(source.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SamestepError(f"{name_or_path} is not TOML: {error}") from None
    try:
        return TypeAdapter(Hardware).validate_python({"name": source.name.removesuffix(".toml"), **table})
    except ValidationError as error:
        mistakes = [f"{'.'.join(map(str, m['loc']))}: {m['msg'].lower()}" for m in error.errors(include_url=False)]
        raise SamestepError(f"{name_or_path}: {'; '.join(mistakes)}") from None


def profiles() -> tuple[str, ...]:
    """List the names of the profiles that come with samestep."""
    folder = files("samestep") / "profiles"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def _find(name_or_path: str | Path) -> Traversable:
    name = str(name_or_path)
    if name in profiles():
        return files("samestep") / "profiles" / f"{name}.toml"
    path = Path(name_or_path)
    if path.is_file():
        return path
    raise SamestepError(
        f"no hardware {name!r}{did_you_mean(name, profiles())}: "
        f"the profiles are {', '.join(profiles())}, or give a TOML file of that form"
    )
