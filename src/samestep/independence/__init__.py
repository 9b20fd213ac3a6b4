"""Independence: which parts of a forward ranks may compute by themselves, and the proof that parts are the whole.

## The claim
A layout cuts one axis of a model into rows: samples (`dp`, micro-batches), tokens (`cp`, `sequence_parallel`), or units, which are heads, neurons
and tokens of a vocabulary (`tp`). Let x[p] be the rows of a part p. A rank may compute a forward f of its part if

    f(x[p]) = f(x)[p]                                 each output row follows from its own row
    the sum over p of the gradients of w from f(x[p])  = the gradient of w from f(x), of each weight w that all parts share

The second line follows from the first one: the loss is a sum over rows, and the backward of an operation that keeps rows apart keeps them apart.
What adds to a backward past its forward (custom Functions, hooks) is followed or tried by itself.

## One notation, by storages
A storage holds the answer to "which row does this element belong to?", with two numbers whatever its size:

    samples, tokens     Rows(stride, span, start)     byte o      row (o mod span) // stride + start, modulo the number of rows
    units               Rows(stride, span)            element o   unit (o mod span) // stride
    Mixed, MixesError   elements belong to several rows, with the operation that mixed them, or which row is not known
    "partial"           a sum of which each rank has a summand, up to the `reduce` of a row cut
    nothing             the same for all rows

Views share the storage, so they need no rule: which dimension of a view has the rows follows from its strides (`along`). For samples and tokens the
number of rows is that of the forward, a view may show some of them, and storages are written row by row. Units are counted for each weight, become
coarser where a view distinguishes them less finely, and a view must show all of them.

## One table of operations
`dimension_maps.py` says of each operation which dimension of an operand becomes which dimension of the result: itself, SUMMED, MOVED, or blocks of
channels. If rows lie along a dimension that stays, the result has them there. If it is SUMMED, rows are mixed, and units are partial. If it is MOVED,
positions go elsewhere by a known number, or by an index, which `Pick` remembers until they are written back (`row_rules.py`). An operation without a map
is tried on drawn values, as a whole and in parts (`operation_trial.py`).

## The theorem
The maps show that a part may be computed. That it is computed *alike* is shown by a second forward on the part: values have numbers (`value_numbers.py`),
one for each pair of operation and operands, the dimension of the rows left out. The proof holds if the outputs of part and whole have equal numbers.
The part's forward may run fewer turns of a loop, as long as each row has the same number. Under `tp`, operations are compared one by one, each view of a
rank with its part of the whole's view (`rank_trial.py`).

    samples     samples.py          row_prover.py, row_rules.py, dependence.py; sample_decisions.py: numbers of all samples on which code acts
    tokens      token_slices.py     slice_prover.py, value_numbers.py; gathered_parts.py, token_moves.py, traced_moves.py: what needs other tokens
                sequence_proof.py   the same between the cut parts of `tp`
    units       cut_proof.py        unit_walk.py, unit_rules.py, feature_units.py; rank_trial.py; tensor_plan.py: the plan and what its cuts send
    state       kept_state.py       what a later forward reads of an earlier one
"""
