"""The shape of a model as data: traced, or counted from hyperparameters."""
