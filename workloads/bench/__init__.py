"""The timed part of a job: warm-up, repeats, card checks, and figures of raw samples."""
