"""A hardware profile refitted to measured steps, of any framework."""
