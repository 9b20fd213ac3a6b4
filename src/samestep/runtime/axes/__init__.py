"""What each way of spreading a step does on real modules: the twins of `strategies/`."""
