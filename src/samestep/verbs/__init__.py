"""The functions of the command line's verbs: each takes the parsed words, and returns a result that can be printed or written as JSON."""
