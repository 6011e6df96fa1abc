"""The process on a card: what it runs, how it starts, ends, and says what went wrong."""
