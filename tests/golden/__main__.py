"""Write all golden files anew: `python -m tests.golden`, or some of them: `python -m tests.golden verdicts`."""

import sys

import tests.conftest  # noqa: F401 - one thread, before torch is imported
from tests.golden import test_numbers, test_programs, test_verdicts

WRITERS = {"programs": test_programs.write, "numbers": test_numbers.write, "verdicts": test_verdicts.write}

if __name__ == "__main__":
    for name in sys.argv[1:] or WRITERS:
        WRITERS[name]()
