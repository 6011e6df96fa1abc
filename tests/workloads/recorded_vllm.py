"""vLLM and vllm-gaudi as far as their recorded interface goes, in the place of the packages.

``vllm_gaudi_interface.json`` was read from the sources of the versions it names
(``tools/record_vllm_gaudi.py``). Arguments that the real callables do not have, attributes that
their classes do not have, are errors here as well. It generates by a rule that tests know.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

_FILE = Path(__file__).with_name("vllm_gaudi_interface.json")
INTERFACE: dict[str, Any] = json.loads(_FILE.read_text())


def bound(name: str, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a recorded method by name; a TypeError where it does not take them."""
    parameters = INTERFACE["classes"][name]["methods"][method]
    signature = inspect.signature(eval(f"lambda {parameters}: None"))
    return signature.bind(None, *args, **kwargs).arguments


class Recorded:
    """An object of a recorded class: it has the attributes that the class has, and no others."""

    def __init__(self, name: str, **values: Any) -> None:
        fields = INTERFACE["classes"][name]["fields"].split()
        if unknown := values.keys() - set(fields):
            raise TypeError(f"{name} has no {', '.join(sorted(unknown))}")
        self.__dict__.update(values)


def next_token(prompt: Sequence[int], position: int) -> int:
    """The rule by which it writes."""
    return 10 + (sum(prompt) + position) % 50


class Engine(Recorded):
    """``LLMEngine``: prompts of a step are those that fit, one token each."""

    def __init__(self, config: Any, most: int) -> None:
        super().__init__("LLMEngine", vllm_config=config, model_config=config.model_config)
        self.most = most
        self.waiting: list[tuple[str, list[int], Any, list[int]]] = []

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        given = bound("LLMEngine", "add_request", *args, **kwargs)
        prompt = given["prompt"]["prompt_token_ids"]
        self.waiting.append((given["request_id"], prompt, given["params"], []))
        return str(given["request_id"])

    def step(self) -> list[Any]:
        outputs = []
        for request_id, prompt, parameters, ids in self.waiting[: self.most]:
            ids.append(next_token(prompt, len(ids)))
            completion = Recorded("CompletionOutput", token_ids=list(ids))
            ended = len(ids) >= parameters.max_tokens
            output = {"request_id": request_id, "outputs": [completion], "finished": ended}
            outputs.append(Recorded("RequestOutput", **output))
        self.waiting = [each for each in self.waiting if len(each[3]) < each[2].max_tokens]
        return outputs


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    dtype: str | None = None,
    quantization: str | None = None,
    parts: Sequence[Any] = (),
    methods: Sequence[str] = ("fp8", "fp8_per_tensor"),
) -> list[dict[str, Any]]:
    """Put the modules where imports find them; return the arguments of each ``LLM`` that is made.

    It computes in ``dtype`` with this quantization, whatever it is asked for; ``parts`` are the
    parameters of the loaded model, ``methods`` the quantizations that it knows (0.33's, in short).
    """
    made: list[dict[str, Any]] = []

    class Worker:
        def compile_or_warm_up_model(self) -> str:
            manager._active_instance = Recorded(
                "HPUBucketingManager",
                prompt_buckets=[(1, 128, 0), (1, 256, 0)],
                decode_buckets=[(1, 1, 8), (2, 1, 8), (2, 1, 16)],
            )
            return "compiled"

    class Manager:
        _active_instance: Any = None

    manager = Manager

    class LLM(Recorded):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = bound("LLM", "__init__", *args, **kwargs)
            given |= given.pop("kwargs", {})
            extra = given.keys() - {"self", "model"}
            unknown = extra - set(INTERFACE["classes"]["EngineArgs"]["fields"].split())
            if unknown:
                raise TypeError(f"EngineArgs has no {', '.join(sorted(unknown))}")
            assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
            made.append(given)
            if given.get("quantization") == "fp8" and "fp8_per_tensor" in methods:
                raise ValueError("The `fp8` quantization method no longer supports online …")
            asked = f"torch.{given['dtype']}"
            real = "torch.bfloat16" if asked in INTERFACE["replaced_dtypes"] else asked
            stored = given.get("quantization") if quantization is None else quantization
            config = Recorded(
                "VllmConfig",
                model_config=Recorded(
                    "ModelConfig",
                    dtype=f"torch.{dtype}" if dtype else real,
                    max_model_len=given["max_model_len"],
                    quantization=stored or None,
                    hf_config=types.SimpleNamespace(eos_token_id=2, architectures=["Recorded"]),
                ),
                cache_config=Recorded("CacheConfig", block_size=INTERFACE["block_tokens"]),
            )
            assert sys.modules[HPU_WORKER].HPUWorker().compile_or_warm_up_model() == "compiled"
            super().__init__("LLM", llm_engine=Engine(config, given["max_num_seqs"]))

        def apply_model(self, func: Any) -> list[Any]:
            return [func(types.SimpleNamespace(parameters=lambda: iter(parts)))]

    class SamplingParams(Recorded):
        def __init__(self, **values: Any) -> None:
            super().__init__("SamplingParams", **values)

    contents = {
        "vllm": {"LLM": LLM, "SamplingParams": SamplingParams},
        HPU_WORKER: {"HPUWorker": Worker},
        "vllm_gaudi.extension.bucketing.common": {"HPUBucketingManager": Manager},
    }
    contents["vllm.model_executor.layers.quantization"] = {"QUANTIZATION_METHODS": list(methods)}
    for name in list(contents):
        for parent in map(str, PurePosixPath(name.replace(".", "/")).parents):
            if parent != ".":
                contents.setdefault(parent.replace("/", "."), {})
    for name, members in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(members, __path__=[], __spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    return made


HPU_WORKER = "vllm_gaudi.v1.worker.hpu_worker"
