"""Runs on the machines of other launchers: what each needs, written as text that a person reads and keeps."""
