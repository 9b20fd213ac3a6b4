"""Checks while a run goes on: ranks that drift apart, numbers that are not finite."""
