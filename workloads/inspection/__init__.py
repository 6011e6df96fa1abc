"""The look at a checkpoint before anything loads it. Without torch."""
