"""Print the seconds in which a model is loaded that was loaded before: MODEL_DIRECTORY.

The median of three: libraries are imported, and the system has read the file.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    took_s = []
    for _ in range(4):
        began = time.perf_counter()
        AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
        took_s.append(time.perf_counter() - began)
    print(median(took_s[1:]))


if __name__ == "__main__":
    main()
