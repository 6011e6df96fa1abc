"""Golden figures of what must not change: ids, reports, simulated nights, schema, codes, plans."""
