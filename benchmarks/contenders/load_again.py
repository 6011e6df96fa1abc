"""Print the seconds in which a tokenizer and a model are loaded again: MODEL_DIRECTORY.

The median of three: libraries are imported, and the system has read the files. Both, since a job's
loading is that of both.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    took_s = []
    for _ in range(4):
        began = time.perf_counter()
        AutoTokenizer.from_pretrained(sys.argv[1])
        AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
        took_s.append(time.perf_counter() - began)
    print(median(took_s[1:]))


if __name__ == "__main__":
    main()
