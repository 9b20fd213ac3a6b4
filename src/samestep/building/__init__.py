"""Objects from a job's words: the module on the meta device, its initial values, the loss, the optimizer."""
