"""Makers of the pages and tables in ``docs/`` that are generated from declarations."""
