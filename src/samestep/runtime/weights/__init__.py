"""The weights of one rank: the stores that hold them, and what the optimizer, checkpoints and guards read of them.

[Note: what a rank holds of a weight]

```
whole weight   the parameter of the model as one device has it
part           what tp and ep leave this rank of it: the parameter of this rank's modules, as the program's `Holding` says
placement      which elements of the whole weight a part consists of: a `WeightSlice` (`placement.py`)
piece          the run of a flattened part that this rank updates: all of it, or this rank's chunk under ZeRO (`pieces.py`)
gradient       the piece's gradient in master precision, summed over all ranks once the step's reductions are done
master         the piece's values in master precision: float32, or float64 in a float64 job
value          the tensor `Piece.value` that holds the master, which the optimizer updates in place
target         the tensor that the forward reads, if that is not the master: in the working dtype, on the device
```
A [4, 6] weight in bfloat16, alone in its bucket, on rank 0 of `tp=2 dp=2 zero=1`, where tp cuts columns:

```
whole weight    0  1  2 │  3  4  5          part [4, 3]      0  1  2          piece = elements [0, 6) of the flattened part
                6  7  8 │  9 10 11                           6  7  8
               12 13 14 │ 15 16 17                          ────────
               18 19 20 │ 21 22 23                          12 13 14
                  placement: dim 1,                         18 19 20
                    interval 0:3

one update     gradient [6] float32 ── optimizer ──► value, the master [6] float32 ── publish ──► target [6] bfloat16,
                                                                                                  a view of the parameter
               the other data rank's chunk of the parameter arrives by an all_gather: `WeightStore.publish`
```
Where dtypes agree and nothing is on the host, the value is the parameter's memory itself, and there is no target. Exceptions:

    a frozen weight      is a piece without an update; in 4 bits its value holds packed rows (`held_as`)
    a split master       is a bfloat16 target and a 16-bit remainder; its value exists during updates only (`pieces.py`)
    an owner's piece     is a whole weight, or a whole part, though ranks hold parts of it: its rule needs all elements (`owning.py`)
"""
