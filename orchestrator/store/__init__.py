"""The results of runs on disk: one writer a run, any number of readers."""
