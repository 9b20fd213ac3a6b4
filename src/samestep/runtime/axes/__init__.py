"""How each strategy acts on real modules: the twins of `strategies/`."""
