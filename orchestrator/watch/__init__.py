"""``nightgrid watch``: a run as a web page that updates itself, served from the run's own files."""
