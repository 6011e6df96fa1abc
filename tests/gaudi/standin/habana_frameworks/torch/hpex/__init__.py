"""Fused kernels, written out in torch."""
