"""ChatGLM3 without remote code: its original layout, tokenizer and conversion."""
