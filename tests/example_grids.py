"""Small grids that several tests run."""

GRID = """\
name: tiny-run
defaults:
  workload: tiny
  model: tiny-chatglm3
  dataset: advertisegen-synthetic
  accelerator: HPU
  precision: fp32
measure: {warmup: 0, min_repeats: 2, max_repeats: 2, time_limit_s: 5}
experiments:
  - name: sizes
    axes:
      batch_size: [1, 2]
"""

NOTEBOOK_GRID = """\
name: tiny-run
defaults: {workload: tiny, model: tiny-chatglm3, precision: fp32}
measure: {warmup: 0, min_repeats: 2, max_repeats: 2, time_limit_s: 5}
experiments:
  - name: sizes
    axes: {batch_size: 1..2}
"""
