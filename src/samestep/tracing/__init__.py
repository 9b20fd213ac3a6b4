"""What a forward on the meta device shows of a model: costs, cuts, experts, boundaries, dependences."""
