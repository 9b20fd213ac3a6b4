"""Weights that pipeline stages send each other, since a model on one stage follows a trained model on another.

A teacher or target network m of a trained model w moves behind each step,

    m = d m + (1 - d) w

and its layers run where the pipeline has them, which need not be where those of w run. All weights of stage i that weights of stage j
follow are one buffer, which stage i broadcasts to stage j behind the update. Under zero=2 and zero=3 it holds the shards of a data rank,
each of the size of the largest, so that data ranks need not know each other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from samestep.layout import Layout
from samestep.models.param_spec import ParamSpec
from samestep.program.ops import Op, OpKind
from samestep.program.ranks import tie_of


@dataclass(frozen=True, slots=True)
class FollowedWeights:
    """The weights that one stage sends to another one after each step."""

    source: int
    """Stage of the trained weights."""
    target: int
    """Stage of the weights that follow them."""
    members: tuple[tuple[str, int], ...]
    """Name of each weight that follows, and the number of elements of its place in the buffer."""

    @property
    def axis(self) -> str:
        """The axis of the two stages."""
        return tie_of(sorted((self.source, self.target)))

    @property
    def owner(self) -> str:
        """The name of the buffer in the program."""
        return f"followed.{self.source}.{self.target}"

    @property
    def numel(self) -> int:
        """Number of elements of the buffer."""
        return sum(numel for _, numel in self.members)


def weights_sent(
    params: Iterable[ParamSpec], stages_of: Mapping[str, tuple[int, ...]], layout: Layout
) -> tuple[FollowedWeights, ...]:
    """Return the weights that stages send each other, in the order in which they do; `params` are those of all stages."""
    sent: dict[tuple[int, int], list[tuple[str, int]]] = {}
    shards = layout.num_shards if layout.zero >= 2 else 1
    for param in params:
        sources = stages_of.get(param.follows, ())
        for target in stages_of[param.name] if sources else ():
            if target not in sources:
                numel = -(-param.rows // shards) * param.row_numel
                sent.setdefault((sources[0], target), []).append((param.name, numel))
    return tuple(FollowedWeights(source, target, tuple(members)) for (source, target), members in sorted(sent.items()))


def send_followed(followed: Iterable[FollowedWeights], stage: int, dtype: str) -> Iterator[Op]:
    """Yield the broadcasts in which a stage takes part."""
    for sent in followed:
        if stage in (sent.source, sent.target):
            op = Op(
                kind=OpKind.BROADCAST,
                owner=sent.owner,
                axis=sent.axis,
                dtype=dtype,
                after=(f"{OpKind.UPDATE}:optimizer",),
            )
            yield op.sized(sent.numel)
