"""From a job's words to objects: the module on the meta device, its initial values, the loss, the optimizer."""
