"""What torch does in a run: the run itself, the twins of `strategies/`, guards, dropout, and the processes."""
