"""Decoder layers in machine code of our own, compiled on the node that runs them."""
