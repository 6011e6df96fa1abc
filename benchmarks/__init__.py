"""Nightgrid beside its peers, in one run on the same cores: ``python -m benchmarks``.

Each benchmark compares *contenders*, which are processes of their own (``contenders/``): all are
started and warmed up first, then take turns, so that whatever else the machine does hits all of
them. A ratio is that of one turn; what is told is the median of the ratios and how far they
spread. Nothing here passes or fails by its time: a goal that is not met is a line of the page.
"""
