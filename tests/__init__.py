"""The tests; `pool.py` runs a function on several ranks."""
