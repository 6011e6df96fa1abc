"""The programs that take turns; each is started by the benchmark that it belongs to."""
