"""What code keeps outside of weights, from one forward, loss or update to the next: one file for each verb.

| verb | where | what it costs |
| --- | --- | --- |
| reach | `reachable.py`: one `CodeWalk`; what it finds of a model, a forward or a loss is `Reached`, of an optimizer `StepCode` (`step_code.py`); the names in code: `code_names.py` | a walk over closures, globals, classes and objects, each once |
| take, compare, put back | `snapshot.py`: `Snapshot` without copies, `KeptValues` with copies of tensors | a walk over the attributes of all modules and what they reach |
| take and put back a few tensors, or attributes | `kept_tensors.py`: `KeptTensors`, `kept_slots.py`: `KeptSlots` | a copy of each |
| run from an earlier state | `snapshot.py`: `ModelState.restored`, `preserve_modules`, `preserve_function`, `preserve_generators` | take twice, put back twice |
| digest | `fingerprints.py`: `digest` of any value, `fingerprint` and `word_sums` of a tensor | every byte read once |
| has it been written? | `writes.py`: `marks_of` tensors, compared with those of a moment before | a number a tensor; its norm where writes through `.data` count |
"""
