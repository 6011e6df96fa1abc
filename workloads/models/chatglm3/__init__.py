"""chatglm3."""
