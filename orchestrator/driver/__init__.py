"""The driver of a run: its loop, row writer, session, recovery and supervisor."""
