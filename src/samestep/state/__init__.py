"""State: what modules contain, and what objects contain that a model or a loss holds, from one forward, loss or update to the next.

| verb | where | what it costs |
| --- | --- | --- |
| take, compare, put back | `snapshot.py`: `Snapshot` without copies, `KeptValues` with copies of tensors | a walk over the attributes of all modules, five levels deep |
| run from an earlier state | `snapshot.py`: `ModelState.restored`, `preserve_modules`, `preserve_function`, `preserve_generators` | take twice, put back twice |
| name variables outside of modules | `named_variables.py`: `variables_of` a function or a class; `step_code.py`: the numbers that an optimizer's step reaches by them | the names in each code object, read once |
| take and put back a few tensors | `writes.py`: `KeptTensors` | a copy of each |
| digest | `fingerprints.py`: `digest` of any value, `fingerprint` and `word_sums` of a tensor | every byte read once |
| has it been written? | `writes.py`: `marks_of` tensors, compared with those of a moment before | a number a tensor; its norm where writes through `.data` count |
"""
