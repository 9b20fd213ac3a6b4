"""Which rows of which inputs each row of a value depends on, through the operations of a trace: rules, one for each operation."""
