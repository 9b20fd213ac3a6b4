"""Steps that a loop takes in parts: its own backwards and updates, and what waits between them."""
