"""Record the interface of vLLM and vllm-gaudi that the engine ``vllm-gaudi`` uses, from sources.

    python -m tools.record_vllm_gaudi VLLM VLLM_GAUDI > tests/workloads/vllm_gaudi_interface.json

with the directories of the two packages. Nothing of them is imported: signatures, fields and
attributes are read from the syntax tree, and so are the two rules that change what a job asks for
(the data types that are replaced, the size of a block of the key/value cache).
"""

from __future__ import annotations

import ast
import copy
import json
import sys
from pathlib import Path
from typing import Any

#: Package, file, class -> the methods of it that are called.
USED = {
    ("vllm", "entrypoints/llm.py", "LLM"): ("__init__",),
    ("vllm", "v1/engine/llm_engine.py", "LLMEngine"): (
        *("add_request", "step", "has_unfinished_requests"),
    ),
    ("vllm", "engine/arg_utils.py", "EngineArgs"): (),
    ("vllm", "sampling_params.py", "SamplingParams"): (),
    ("vllm", "outputs.py", "RequestOutput"): ("__init__",),
    ("vllm", "outputs.py", "CompletionOutput"): (),
    ("vllm", "config/model.py", "ModelConfig"): (),
    ("vllm", "config/cache.py", "CacheConfig"): (),
    ("vllm", "config/vllm.py", "VllmConfig"): (),
    ("vllm_gaudi", "v1/worker/hpu_worker.py", "HPUWorker"): ("compile_or_warm_up_model",),
    ("vllm_gaudi", "extension/bucketing/common.py", "HPUBucketingManager"): (),
}


def described(tree: ast.Module, name: str, methods: tuple[str, ...]) -> dict[str, Any]:
    """Fields and attributes of a class, and the parameters of some of its methods."""
    (found,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    functions = [node for node in found.body if isinstance(node, ast.FunctionDef)]
    kept = {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    kept |= {
        target.id
        for node in found.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in (inner for function in functions for inner in ast.walk(function)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        kept |= {
            each.attr
            for each in targets
            if isinstance(each, ast.Attribute)
            and isinstance(each.value, ast.Name)
            and each.value.id == "self"
        }
    return {
        "fields": " ".join(sorted(kept)),
        "methods": {each.name: _parameters(each) for each in functions if each.name in methods},
    }


def _parameters(function: ast.FunctionDef) -> str:
    """The parameters as they stand in a lambda, without annotations; each default is ``...``."""
    given = copy.deepcopy(function.args)
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [None if each is None else ast.Constant(...) for each in given.kw_defaults]
    return ast.unparse(given)


def replaced_dtypes(platform: ast.Module) -> list[str]:
    """Data types in place of which the plugin takes bfloat16."""
    return [
        ast.unparse(each)
        for node in ast.walk(platform)
        if isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In)
        and ast.unparse(node.left).endswith("model_config.dtype")
        and isinstance(node.comparators[0], ast.Tuple)
        for each in node.comparators[0].elts
    ]


def block_tokens(platform: ast.Module) -> int:
    """Tokens of a block of the key/value cache where nobody asks for another size."""
    sizes = [
        node.value.value
        for node in ast.walk(platform)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "cache_config.block_size"
        and isinstance(node.value, ast.Constant)
    ]
    return int(sizes[0])  # type: ignore[arg-type]


def main(vllm: str, vllm_gaudi: str) -> None:
    """Print the record."""
    roots = {"vllm": Path(vllm), "vllm_gaudi": Path(vllm_gaudi)}
    platform = ast.parse((roots["vllm_gaudi"] / "platform.py").read_text())
    record = {
        "versions": {name: _version(root) for name, root in roots.items()},
        "replaced_dtypes": replaced_dtypes(platform),
        "block_tokens": block_tokens(platform),
        "classes": {
            name: described(ast.parse((roots[package] / file).read_text()), name, methods)
            for (package, file, name), methods in USED.items()
        },
    }
    print(json.dumps(record, indent=1))


def _version(root: Path) -> str:
    found = ast.parse((root / "_version.py").read_text())
    texts = [node.value for node in ast.walk(found) if isinstance(node, ast.Constant)]
    return next(text for text in texts if isinstance(text, str) and text[:1].isdigit())


if __name__ == "__main__":
    main(*sys.argv[1:])
