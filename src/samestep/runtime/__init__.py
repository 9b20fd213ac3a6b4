"""What torch does: the twins of `strategies/`, and the process they run in."""
