"""Worker processes: starting them, joining them to one run, and the process groups of a layout."""
