"""The interface by which all replacements of torch's random functions get hashed bits and masks; `mode.DropoutMode` implements it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.building.attention import AttentionCall, DroppedWeights
from samestep.building.attention.score_form import DropLater, WrittenCall
from samestep.building.torch_seams import current_function_modes
from samestep.errors import LayoutError, ModelError


def dropped_weights(call: AttentionCall, source: MaskSource | None, num_keys: int) -> DroppedWeights | None:
    """Return what makes the masks of dropped weights of the queries of a call and so many keys; None where none are dropped.

    The mask source is the one of the function modes that are active where none is given.
    """
    if not call.dropout_p:
        return None
    if source is None:
        source = next((mode for mode in reversed(current_function_modes()) if isinstance(mode, MaskSource)), None)
    assert source is not None, "a training forward that may drop weights runs under a mode"
    shape = torch.Size((*call.heads, call.query.size(-2), num_keys))
    return source.drop_weights(call.query, shape, call.dropout_p, "scaled_dot_product_attention")


def dropped_of_written(written: WrittenCall, num_keys: int, call: AttentionCall) -> DroppedWeights | None:
    """Return the weights that a dropout of written-out weights drops, for the heads and queries of a call and so many keys.

    Raises:
        LayoutError: the call has some of the heads, and the code has the weights of all samples in another order than by samples.
    """
    if written.draw is None:
        return None
    samples, heads, num_queries = call.query.shape[:3]
    all_heads, shared = written.call.query.shape[1], list(written.drawn_shape)
    if heads != all_heads and len(shared) > 1 and shared[0] != samples:
        raise LayoutError(
            f"dropout drops weights of shape {(*shared, num_queries, num_keys)}, and where heads are exchanged the first "
            f"dimension must hold the {samples} samples: exchange=ring works"
        )
    if len(shared) > 1:
        shared[1] = shared[1] * heads // all_heads
    else:
        shared = [samples * heads]
    dropped = written.draw(call.query, torch.Size((*shared, num_queries, num_keys)))

    def in_heads(start: int, stop: int, count: int) -> Tensor:
        return dropped.part(start, stop, count).reshape(samples, heads, stop - start, count)

    return dropped._replace(part=in_heads)


class MaskSource(TorchFunctionMode):
    """A function mode that computes the masks and random numbers of one forward; `mode.DropoutMode` implements it."""

    sees_all = False
    """Whether it must see every function of the model, those of compiled blocks too."""
    allows_random = False
    """Whether numbers that it does not compute are drawn from the process's generators instead of being refused."""

    def drop(self, x: Tensor, shape: torch.Size, p: float, what: str) -> Tensor:
        """Return a mask for x of this shape, bool, True where an element is dropped."""
        raise NotImplementedError

    def drop_elements(self, x: Tensor, p: float, what: str, *, inplace: bool) -> Tensor | None:
        """Return x with elements dropped and scaled by one kernel; None, and no mask is drawn, where `drop` is to be called."""
        return None

    def drop_weights(self, x: Tensor, shape: torch.Size, p: float, what: str) -> DroppedWeights:
        """Return such a mask of the weights of an attention, which is drawn in parts, or by a kernel, at any time."""
        raise NotImplementedError

    def drop_later(self, p: float, what: str) -> DropLater:
        """Count such a mask now; return a function that makes it, given the tensor to be dropped and the shape."""
        raise NotImplementedError

    def drop_in_graph(
        self, x: Tensor, shape: torch.Size, p: float, what: str, mask: tuple[str, int, int], entries: dict[str, int]
    ) -> Tensor:
        """Return the mask that a graph draws: of a module, the index of its call in the graph, and the draw.

        `entries` has the number of calls of each module before the graph began, and is added to.
        """
        raise NotImplementedError

    def hashes(
        self, like: Tensor | None, shape: Sequence[int], device: torch.device, what: str, *, is_shared: bool = False
    ) -> Tensor:
        """Return hashed bits of random numbers, int32 [shape].

        `like` is the tensor whose samples are at the same places as those of the result; without one the shape decides.
        Shared numbers are refused where there are some for each sample.
        """
        raise NotImplementedError

    def refuse(self, reason: str) -> ModelError:
        """Return the error that refuses an operation of the innermost module."""
        raise NotImplementedError
