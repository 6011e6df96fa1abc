"""Compression: pruning, weight sharing, distillation and quantization of models."""
