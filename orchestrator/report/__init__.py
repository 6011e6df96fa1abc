"""The report of a run: its page, its text, its figures, and exports for other programs."""
