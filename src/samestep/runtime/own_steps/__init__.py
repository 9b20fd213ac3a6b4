"""Steps that a loop takes in parts: separate backwards and updates, and the gradients that wait between them."""
