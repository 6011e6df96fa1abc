"""Helpers of all layers: output, words for people, redaction, and this host."""
