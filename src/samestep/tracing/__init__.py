"""What one forward on the meta device shows of a model: costs, cuts, experts, boundaries, and what depends on what."""
