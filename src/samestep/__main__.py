"""`python -m samestep` is the command `samestep`."""

import sys

from samestep.cli import main

sys.exit(main())
