"""Encoders that read texts in one pass, whichever engine runs them."""
