"""All that is found out of a model, once, before it is cut."""
