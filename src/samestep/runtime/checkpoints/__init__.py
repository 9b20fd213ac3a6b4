"""Files from which a run goes on: written in coordinates of the whole model, checked, and read in any layout."""
