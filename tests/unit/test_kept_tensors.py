"""Tensors whose values are copied before each step are put back, also where code has given one of them another shape meanwhile."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.state.writes import AlikeTensors

SHAPES = [(), (3,), (2, 3), (1, 2, 3), (0,)]
DTYPES = [torch.float32, torch.float64, torch.int64]


@given(
    kinds=st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), max_size=6),
    reshaped=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(SHAPES)), max_size=2),
)
def test_values_are_put_back(kinds, reshaped):
    held = [torch.full(shape, float(number)).to(dtype) for number, (shape, dtype) in enumerate(kinds)]
    alike = AlikeTensors(held)
    alike.keep().restore()
    for index, shape in reshaped:
        if index < len(held):
            held[index].data = torch.full(shape, 7.0).to(held[index].dtype)
    expected = [one.clone() for one in held]
    kept = alike.keep()
    for one in held:
        one.fill_(-1)
    kept.restore()
    assert all(map(torch.equal, held, expected))
