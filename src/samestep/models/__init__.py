"""The shape of a model as data, without torch: traced from a module, or counted from hyperparameters."""
