"""Trackers: other programs that show runs. Each file here declares one (``base.py``)."""
