"""ChatGLM3 without remote code: its original layout, its tokenizer, its conversion."""
