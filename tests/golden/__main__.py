"""Write all golden files anew: `python -m tests.golden`."""

from tests.golden import test_programs

if __name__ == "__main__":
    test_programs.write()
