"""Checks during a run: ranks that drift apart, steps that cannot be repeated, and values that are not finite."""
