"""The optimizer of a run: its rule is read from its operations, and it steps over the pieces of weights that a rank updates."""
