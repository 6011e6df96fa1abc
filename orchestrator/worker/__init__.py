"""Worker processes: starting, running, stopping and describing their failures."""
