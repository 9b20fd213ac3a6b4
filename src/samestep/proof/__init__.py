"""The verb `verify`: one device and a layout run the same steps, and every tensor is compared."""
