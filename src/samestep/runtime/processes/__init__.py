"""Worker processes: started, joined to one world, and grouped by the axes of a layout."""
