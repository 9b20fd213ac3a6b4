"""Rules of operations that put positions elsewhere: side by side, padded, rolled, turned, repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from samestep.tracing.dependence.calls import Call, broadcast, mapped
from samestep.tracing.dependence.independence import NO_DIM, Along, Dependence, Mixed, joined


def cat(call: Call) -> Iterator[Dependence]:
    """Rule of cat: pieces with rows along its dimension fit where their rows go on counting."""
    (result,) = call.results
    pieces = [piece for piece in call.args[0] if piece.dim() == result.dim()]
    dim = call.named()["dim"] % max(result.dim(), 1)
    yield _side_by_side(call, pieces, [piece.shape[dim] for piece in pieces], dim, range(result.dim()))


def stack(call: Call) -> Iterator[Dependence]:
    """Rule of stack: pieces along a new dimension."""
    (result,) = call.results
    dim = call.named()["dim"] % result.dim()
    pieces = list(call.args[0])
    yield _side_by_side(call, pieces, [1] * len(pieces), dim, [at for at in range(result.dim()) if at != dim])


def _side_by_side(call: Call, pieces: list[Tensor], sizes: list[int], dim: int, dims: Sequence[int]) -> Dependence:
    parts: list[Along | Mixed] = []
    constants: list[Tensor] = []
    width, at = _pieces_of_a_row(call, pieces), 0
    for piece, size in zip(pieces, sizes, strict=True):
        found = call.known.of(piece)
        if found is None:
            constants.append(piece)
        elif isinstance(found, Mixed):
            parts.append(found)
        elif found.dim == NO_DIM or dims[found.dim] == dim:
            inner = width * size if found.dim == NO_DIM else found.inner
            if isinstance(found.start, int) and at % inner in range(0, inner, size if found.dim == NO_DIM else inner):
                parts.append(Along(dim, inner, (found.start - at // inner) % call.known.num_rows))
            else:
                parts.append(found if len(pieces) == 1 else Mixed(call.text, shown=False))
        else:
            parts.append(Along(dims[found.dim], found.inner, found.start))
        at += size
    result = joined(parts, call.text)
    if isinstance(result, Mixed) and not any(isinstance(part, Mixed) for part in parts):
        return Mixed(call.text, shown=False)  # rows in another order, which by itself mixes nothing
    if isinstance(result, Along) and result.dim not in (dim, NO_DIM):
        for piece in constants:
            own = list(dims).index(result.dim)
            if piece.shape[own] > 1:
                call.on_constant(piece, own, result.inner, call.where)
    return result


def _pieces_of_a_row(call: Call, pieces: list[Tensor]) -> int:
    """Return how many pieces from the first on depend on one and the same row."""
    first = call.known.of(pieces[0]) if pieces else None
    return max(1, next((at for at, piece in enumerate(pieces) if call.known.of(piece) != first), len(pieces)))


def _shifted(call: Call, dim: int, by: int) -> Dependence:
    """Return the dependence of a result whose position p along `dim` is the operand's position p - by."""
    found = call.known.of(call.args[0])
    if not isinstance(found, Along) or found.dim != dim or not by:
        return found
    if not isinstance(found.start, int) or by % found.inner:
        return Mixed(call.text, shown=False)
    return found._replace(start=(found.start - by // found.inner) % call.known.num_rows)


def pad(call: Call) -> Iterator[Dependence]:
    """Rule of constant padding: positions shift by what is put before them."""
    x, pad = call.args[:2]
    found = call.known.of(x)
    dim = found.dim if isinstance(found, Along) else NO_DIM
    place = 2 * (x.dim() - 1 - dim)
    yield _shifted(call, dim, pad[place] if dim != NO_DIM and place < len(pad) else 0)


def roll(call: Call) -> Iterator[Dependence]:
    """Rule of roll: positions shift, and go on at the other end."""
    named = call.named()
    shifts, dims = named["shifts"], named["dims"]
    found = call.known.of(call.args[0])
    if not dims or not isinstance(found, Along):
        yield found if not isinstance(found, Along) else Mixed(call.text, shown=False)
        return
    by = sum(s for s, d in zip(shifts, dims, strict=False) if d % call.args[0].dim() == found.dim)
    yield _shifted(call, found.dim, by)


def flip(call: Call) -> Iterator[Dependence]:
    """Rule of flip: rows in the opposite order are not known to be of use."""
    x = call.args[0]
    found = call.known.of(x)
    is_turned = isinstance(found, Along) and found.dim in {dim % x.dim() for dim in call.named()["dims"]}
    yield Mixed(call.text, shown=False) if is_turned else found


def repeat(call: Call) -> Iterator[Dependence]:
    """Rule of repeat: whole rounds of all rows go on counting."""
    (result,) = call.results
    x = call.args[0]
    found = call.known.of(x)
    if isinstance(found, Along) and found.dim != NO_DIM:
        at = found.dim + result.dim() - x.dim()
        is_whole = x.shape[found.dim] % (found.inner * call.known.num_rows) == 0
        if call.named()["repeats"][at] > 1 and not is_whole:
            yield Mixed(call.text, shown=False)
            return
    yield mapped(call, [broadcast(x, result)])
