"""Analysis of measurements: rows in, one ``Summary`` out. Pure."""
