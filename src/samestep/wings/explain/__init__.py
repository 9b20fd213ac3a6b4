"""The verb `explain`: where the time of a measured step went, held against the predicted step."""
