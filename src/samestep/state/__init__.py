"""What code keeps outside of weights: reached, taken, compared, put back, digested."""
