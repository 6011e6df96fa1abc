"""fp8 and 4 bits on a Gaudi card.

*fp8* is made by the Intel Neural Compressor in two passes: one runs the model in bf16 and writes
down the largest values that every layer sees, the other replaces the layers by fp8 ones whose
scales come from those. The first is a job of its own (``engines/calibration.py``); jobs in
fp8 wait for it. Its files hold for the same model, the same number of cards and the same
generation of card. They lie under ``NIGHTGRID_CALIBRATIONS``, else in the node's cache: nodes that
share no cache need the variable set to a directory that all of them see.

*4 bits* come with the checkpoint: GPTQ, AWQ or AutoRound have chosen them, and a Gaudi card expands
them to bf16 for each product.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads.base import DataMissing, Unsupported
from workloads.data.cache import cache_root

if TYPE_CHECKING:
    from workloads.base import Request

#: Written by a calibration that has come to its end.
_DONE = "complete.json"

#: Types of models whose class in optimum-habana makes the key/value cache in bf16, whatever it is
#: told. The compressor would write fp8 values into it and take them for bf16 ones.
_CACHE_IN_BF16 = ("chatglm",)

#: AutoRound's own layers for Gaudi read its checkpoints and GPTQ's, which are packed alike. (The
#: last release of auto-gptq, 0.7.1, has no layers for Gaudi.)
_AUTO_ROUND = ("auto_round", "pip install auto-round-hpu")

#: How a checkpoint names its quantisation, the package that reads it, and what installs that.
FOUR_BIT = {
    "gptq": _AUTO_ROUND,
    "awq": ("awq", "pip install autoawq==0.2.7"),
    "auto-round": _AUTO_ROUND,
    "intel/auto-round": _AUTO_ROUND,
}


NOT_FOUR_BIT = (
    f"int4 on Gaudi takes checkpoints that are quantised already ({', '.join(FOUR_BIT)}); "
    "{} is not"
)


def calibration_directory(model: str, cards: int, device_name: str) -> Path:
    """Directory of a calibration's files, for one model, number of cards and kind of card."""
    named = os.environ.get("NIGHTGRID_CALIBRATIONS")
    root = Path(named).expanduser() if named else cache_root() / "calibrations"
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{Path(model).name}-{cards}x{device_name}")
    what = f"{model}|{cards}|{device_name}"
    return root / f"{readable.strip('-')}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


def compressor_settings(directory: Path, *, measure: bool, model_type: str = "") -> dict[str, Any]:
    """The compressor's configuration of either pass, for a model whose config names this type."""
    settings: dict[str, Any] = {
        "method": "HOOKS",
        "mode": "MEASURE" if measure else "QUANTIZE",
        "observer": "maxabs",
        "dump_stats_path": str(directory / "measure"),
    }
    if measure:
        return settings
    in_bf16 = ["KVCache"] if model_type in _CACHE_IN_BF16 else []
    return {
        **settings,
        "scale_method": "maxabs_hw",
        "blocklist": {"types": in_bf16, "names": []},
    }


def start_measuring(model: Any, directory: Path) -> Any:
    """The model with what measures in it."""
    from neural_compressor.torch.quantization import prepare

    directory.mkdir(parents=True, exist_ok=True)
    (directory / _DONE).unlink(missing_ok=True)
    return prepare(model, _configuration(directory, measure=True))


def stop_measuring(model: Any, directory: Path, facts: Mapping[str, Any]) -> None:
    """Write down what was measured; what was measured last makes the files complete."""
    from neural_compressor.torch.quantization import finalize_calibration

    finalize_calibration(model)
    (directory / _DONE).write_text(json.dumps(dict(facts), indent=2) + "\n", encoding="utf-8")


def quantize(model: Any, request: Request, directory: Path) -> Any:
    """The model with its layers in fp8.

    Raises:
        DataMissing: there is no calibration for so many cards of this kind.
    """
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
    """The settings as a file, which is how the compressor wants them."""
    from neural_compressor.torch.quantization import FP8Config

    settings = compressor_settings(directory, measure=measure, model_type=model_type)
    file = directory / f"{str(settings['mode']).lower()}-{os.getpid()}.json"
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    # The library's attention looks at this variable to choose its memory saving form.
    os.environ["QUANT_CONFIG"] = str(file)
    return FP8Config.from_json_file(str(file))


def four_bit_method(config: Mapping[str, Any]) -> str | None:
    """Method by which a checkpoint of this config.json was quantised to 4 bits; None if not."""
    described = config.get("quantization_config") or {}
    method = str(described.get("quant_method", ""))
    bits = described.get("bits", described.get("w_bit", 4))
    return method if method in FOUR_BIT and bits == 4 else None


def four_bit_arguments(config: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` for a checkpoint that is in 4 bits already.

    Raises:
        Unsupported: it is not, or the package that reads it is missing.
    """
    import importlib.util

    method = four_bit_method(config)
    if method is None:
        raise Unsupported(NOT_FOUR_BIT.format(model))
    package, install = FOUR_BIT[method]
    if importlib.util.find_spec(package) is None:
        raise Unsupported(
            f"{model} is a {method} checkpoint, which needs the package {package}: {install}"
        )
    if method == "awq":
        from transformers import AwqConfig

        return {"quantization_config": AwqConfig(bits=4, version="hpu")}
    from transformers import AutoRoundConfig

    return {
        "quantization_config": AutoRoundConfig(bits=4, backend="hpu"),
        "device_map": {"": "hpu"},  # without one it takes its layers for CPUs
    }


def pack_for_the_card(model: Any) -> None:
    """Turn the weights of AutoRound's layers into the order that the card's expansion reads.

    A checkpoint packs eight inputs of one output into a number, the card wants eight outputs of one
    input. The layers have a method for it, which AutoRound 0.16 calls for other devices' layers
    only; it works on the host.
    """
    for layer in model.modules():
        as_loaded = getattr(layer, "QUANT_TYPE", "") == "hpu"
        if as_loaded and layer.qweight.shape[0] != layer.infeatures:
            layer.cpu()
            layer.post_init()
