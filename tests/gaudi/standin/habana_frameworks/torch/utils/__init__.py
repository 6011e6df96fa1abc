"""Small things of the bridge."""
