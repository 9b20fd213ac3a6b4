"""What a rank holds of the weights: stores, pieces, placements and units of FSDP2."""
