"""What the redesign of the core must keep, frozen before it and compared behind each move: `python -m tests.frozen`.

    python -m tests.frozen freeze rows [PATH ...]       run tests and keep the outcome of each row; goes on where it was stopped
    python -m tests.frozen freeze families|scripts      keep the verdicts of the tables in benchmarks/rows
    python -m tests.frozen freeze specs|calls [NAME ...]    keep what is found out of families, and the calls of a step
    python -m tests.frozen compare PART [NAME ...]      run it again, and print every difference; exits 1 if there is one
    python -m tests.frozen compare rows --since COMMIT  the rows of the rooms that have changed since a commit
    python -m tests.frozen gate --seed COMMIT           24 families and 40 kinds of scripts in ten minutes, at low priority

A part is `rows`, `families`, `scripts`, `specs`, `calls` or `golden`, which is `tests/golden` as it stands. A frozen row is one line
of `tests/frozen_rows.json` (tests) or `tests/frozen_tables.json` (all others): its name, its layout, what comes of it, and the commit:

    "tests/code/test_code.py::test_code_is_refused_by_name[...]": ["dp=2", "rejected: some-code", "6f035214"]
    "family llama dp=2": ["dp=2", "proven", "6f035214"]

A test comes to `equal` where it passes and no error of samestep reaches it, to `rejected: CODES` where it passes and these do,
else to `failed` or `skipped`. `frozen_rows.json` begins with what a move changes on purpose:

    "given_up": [{"move": "11", "rows": "tests/parity/test_written_attention.py::*", "why": "..."}]
    "renamed": {"tests/parity/test_old.py::*": "tests/parity/test_new.py::*", "code old-code": "code new-code"}

A name that ends with `*` is that of all rows that begin so. `"code unproven-error": "code *"` lets a code of a class alone, which names no
rule, become any other one. What is in neither list, and differs, is a difference.
"""
