"""Decoder layers in machine code of their own."""
