"""Dropout masks and random numbers of a forward, as functions of the seed, the step, the module, the call and the sample."""
