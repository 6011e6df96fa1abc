"""A lazy process, as it was started: what is left of a model, and which graphs are for inference.

Prints JSON: whether a model's parameters outlive it, and for each job (bf16, fp8, bf16 again after
it) whether the graphs that it compiled carry the attribute of inference mode.
"""

from __future__ import annotations

import gc
import json
import sys
import weakref

import torch

from workloads.devices import device_for


def main(old_names_only: bool) -> None:
    device = device_for("hpu")
    device.synchronize()  # imports the bridge, which does not come with torch in lazy mode
    from habana_frameworks.torch import core
    from habana_frameworks.torch.hpu import metrics

    for name in [n for n in dir(core) if n.startswith("hpu_inference")] if old_names_only else ():
        delattr(core, name)
    model = torch.nn.Linear(4, 4)
    model.to("hpu")
    gone = weakref.ref(model.weight)
    del model
    gc.collect()
    attributes = []
    for fp8 in (False, True, False):
        linear = torch.nn.Linear(4, 4)
        if fp8:
            device.before_quantized_loading()
            device.after_quantized_loading(linear)
        graph = device.capture_graphs(linear)
        graph(torch.ones(1, 4))
        attributes.append(metrics.inference_graphs[-1])
    print("SAW", json.dumps({"outlives": gone() is not None, "inference": attributes}))


main(sys.argv[1] == "old")
