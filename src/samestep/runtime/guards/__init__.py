"""Checks during a run: ranks that drift apart, and values that are not finite."""
