"""The verb `measure`: microbenchmarks of this machine, its hardware profile, and steps of layouts, to which `calibrate.py` refits it."""
