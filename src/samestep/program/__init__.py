"""One optimizer step as plain data, and the geometry that the runtime obeys."""
