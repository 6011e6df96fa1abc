"""fp8 and 4 bits on a Gaudi card.

*fp8*: the Intel Neural Compressor measures each layer's largest values in bf16, in a job of its own
(``CALIBRATION``) that fp8 jobs wait for, then replaces the layers. Files are valid for
one model, number of cards and card generation; they are in ``NIGHTGRID_CALIBRATIONS``, which nodes
without a shared cache must set to a shared directory, else in the node's cache. *4 bits* come with
the checkpoint (GPTQ, AWQ, AutoRound); the card expands them to bf16 for each product.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.base import DataMissing, Request, Unsupported, require_package
from workloads.data.cache import cache_root

_DONE = "complete.json"  # written at the end of a calibration

#: Models whose class always has a bf16 key/value cache, into which the compressor would write fp8
#: values and read them as bf16.
_CACHE_IN_BF16 = ("chatglm",)

#: AutoRound's layers also read GPTQ checkpoints, which are packed alike; auto-gptq (0.7.1) has no
#: layers for Gaudi.
_AUTO_ROUND = ("auto_round", "auto-round-hpu")

#: Checkpoint's method -> package that reads it, and what pip installs.
FOUR_BIT = {
    "gptq": _AUTO_ROUND,
    "awq": ("awq", "autoawq==0.2.7"),
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
}


NOT_FOUR_BIT = (
    f"int4 on Gaudi takes checkpoints that are quantised already ({', '.join(FOUR_BIT)}); "
    "{} is not"
)


def calibration_directory(model: str, cards: int, device_name: str) -> Path:
    """Directory of a calibration's files."""
    named = os.environ.get("NIGHTGRID_CALIBRATIONS")
    root = Path(named).expanduser() if named else cache_root() / "calibrations"
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{Path(model).name}-{cards}x{device_name}")
    what = f"{model}|{cards}|{device_name}"
    return root / f"{readable.strip('-')}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def start_measuring(model: Any, directory: Path) -> Any:
    """The model with measuring hooks."""
    from neural_compressor.torch.quantization import prepare

    directory.mkdir(parents=True, exist_ok=True)
    (directory / _DONE).unlink(missing_ok=True)
    return prepare(model, _configuration(directory, measure=True))


def stop_measuring(model: Any, directory: Path, facts: Mapping[str, Any]) -> None:
    """Write the measurements and mark them complete."""
    from neural_compressor.torch.quantization import finalize_calibration

    finalize_calibration(model)
    (directory / _DONE).write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")


def quantize(model: Any, request: Request, directory: Path) -> Any:
    """The model with its layers in fp8; DataMissing if there is no calibration."""
    from neural_compressor.torch.quantization import convert

    if not (directory / _DONE).is_file():
        raise DataMissing(
            f"fp8 needs a calibration of {request.model}, and there is none in {directory}; the "
            "grid's own calibration job writes one (nodes without a shared cache: set "
            "NIGHTGRID_CALIBRATIONS to a directory that all of them see)"
        )
    model_type = str(getattr(model.config, "model_type", ""))
    return convert(model, _configuration(directory, measure=False, model_type=model_type))


def _configuration(directory: Path, *, measure: bool, model_type: str = "") -> Any:
    """The configuration, to measure or to quantise, from a file, as the compressor requires."""
    from neural_compressor.torch.quantization import FP8Config

    settings: dict[str, Any] = {
        "method": "HOOKS",
        "mode": "MEASURE" if measure else "QUANTIZE",
        "observer": "maxabs",
        "dump_stats_path": str(directory / "measure"),
    }
    if not measure:
        in_bf16 = ["KVCache"] if model_type in _CACHE_IN_BF16 else []
        settings |= {"scale_method": "maxabs_hw", "blocklist": {"types": in_bf16, "names": []}}
    file = directory / f"{settings['mode'].lower()}-{os.getpid()}.json"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    # The library's attention reads it to choose its memory-saving form.
    os.environ["QUANT_CONFIG"] = str(file)
    return FP8Config.from_json_file(str(file))


def four_bit_method(config: Mapping[str, Any]) -> str | None:
    """Method of a 4-bit checkpoint, by config.json; None if it is not one."""
    described = config.get("quantization_config") or {}
    method = str(described.get("quant_method", ""))
    bits = described.get("bits", described.get("w_bit", 4))
    return method if method in FOUR_BIT and bits == 4 else None


def four_bit_arguments(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a 4-bit checkpoint; Unsupported if it is not one, or the
    package that reads it is missing."""
    method = four_bit_method(config)
    if method is None:
        raise Unsupported(NOT_FOUR_BIT.format(model))
    package, install = FOUR_BIT[method]
    require_package(package, f"{model}, a {method} checkpoint,", install)
    if method == "awq":
        from transformers import AwqConfig

        return {"quantization_config": AwqConfig(bits=4, version="hpu")}
    from transformers import AutoRoundConfig

    return {
        "quantization_config": AutoRoundConfig(bits=4, backend="hpu"),
        "device_map": {"": "hpu"},  # else it uses its CPU layers
    }


def pack_for_the_card(model: Any) -> None:
    """Repack AutoRound's weights, on the host, from eight inputs of one output to the card's eight
    outputs of one input; AutoRound 0.16 calls its own method for other devices only."""
    for layer in model.modules():
        as_loaded = getattr(layer, "QUANT_TYPE", "") == "hpu"
        if as_loaded and layer.qweight.shape[0] != layer.infeatures:
            layer.cpu()
            layer.post_init()
