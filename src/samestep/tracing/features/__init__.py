"""What tensor parallelism may cut: heads, hidden neurons and vocabulary, followed through the operations of a trace, and tried."""
