"""The proof that a layout computes what one device computes: both sides run, compared tensor by tensor."""
