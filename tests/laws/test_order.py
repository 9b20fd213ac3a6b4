"""The order of samples: a bijection in every epoch, a function of (seed, step) alone, and a partition over ranks."""

from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.datasets.batch import shares
from samestep.datasets.order import permute_positions, sample_indices

lengths = st.integers(1, 400)
keys = st.integers(-(2**70), 2**70)
seeds = st.integers(0, 2**70)


@given(lengths, keys)
def test_it_is_a_bijection(length, key):
    assert sorted(permute_positions(np.arange(length), length, key)) == list(range(length))


@given(st.integers(1, 2**60), keys, st.lists(st.integers(0, 2**60), min_size=1, max_size=20))
def test_each_position_is_mapped_for_itself(length, key, numbers):
    positions = np.array(numbers) % length
    mapped = permute_positions(positions, length, key)
    assert ((mapped >= 0) & (mapped < length)).all()
    assert len(np.unique(mapped)) == len(np.unique(positions))
    alone = [permute_positions(positions[i : i + 1], length, key)[0] for i in range(len(positions))]
    assert mapped.tolist() == alone


@given(st.integers(1, 60), st.integers(1, 50), seeds)
@settings(max_examples=25)
def test_every_epoch_holds_every_sample_once(length, global_batch, seed):
    num_steps = -(-3 * length // global_batch)
    stream = np.concatenate([sample_indices(step, global_batch, length, seed) for step in range(num_steps)])
    for epoch in range(3):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(st.integers(0, 10**12), st.integers(1, 64), st.integers(1, 10**9), seeds)
def test_the_stream_does_not_depend_on_how_it_is_cut_into_batches(step, global_batch, length, seed):
    whole = sample_indices(step, 2 * global_batch, length, seed)
    halves = [sample_indices(2 * step + half, global_batch, length, seed) for half in (0, 1)]
    assert whole.tolist() == np.concatenate(halves).tolist()
    assert whole.dtype == np.int64


@given(st.integers(0, 100), st.integers(1, 9), st.integers(1, 9))
def test_shares_partition_the_batch(num_samples, num_ranks, num_microbatches):
    indices = np.arange(num_samples)
    parts = [shares(indices, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    assert all(len(part) == num_microbatches for part in parts)
    assert np.concatenate([piece for part in parts for piece in part]).tolist() == indices.tolist()
    for sizes in [[sum(map(len, part)) for part in parts], *([len(piece) for piece in part] for part in parts)]:
        assert max(sizes) - min(sizes) <= 1
        assert all(one >= other for one, other in pairwise(sizes))


def test_epochs_and_seeds_differ():
    first, second = (sample_indices(step, 100, 100, 0) for step in (0, 1))
    other = sample_indices(0, 100, 100, 1)
    assert (first == second).sum() < 10
    assert (first == other).sum() < 10
    assert (np.diff(first) == 1).sum() < 10


def test_small_permutations_are_all_reached_about_equally_often():
    keys = np.arange(24_000, dtype=np.uint64)
    columns = [permute_positions(np.full(len(keys), position), 4, keys).tolist() for position in range(4)]
    counts = np.array(list(Counter(zip(*columns, strict=True)).values()))
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 23 + 4 * np.sqrt(2 * 23)  # chi squared of 23 degrees of freedom


def test_the_mean_place_of_a_sample_is_the_middle():
    places = permute_positions(np.zeros(4000, dtype=np.int64), 1000, np.arange(4000, dtype=np.uint64))
    assert abs(places.mean() - 499.5) < 4 * 1000 / np.sqrt(12 * 4000)


def test_the_numbers_never_change():
    """A resumed run meets the samples that its first half did not: these numbers are part of the format."""
    assert sample_indices(0, 8, 10, 0).tolist() == [9, 0, 7, 1, 3, 4, 2, 8]
    assert sample_indices(3, 8, 10, 7).tolist() == [6, 5, 4, 7, 0, 3, 3, 6]
    assert sample_indices(10**12, 3, 10**15, 2).tolist() == [214880686805651, 282085164852069, 539215182477249]
