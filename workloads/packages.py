"""Packages that single jobs need beside their engine's: of a precision, a setting, a checkpoint.

A job asks for them when it loads (``require_package``, ``precision.require``); a plan asks the
nodes before, by import name. No torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from workloads.base import JobDescription
from workloads.devices.base import installed_version
from workloads.models.attention import PACKAGES as OF_ATTENTIONS
from workloads.models.catalog import known_config
from workloads.models.precision import support
from workloads.models.rules import READERS, method_of
from workloads.registry import ENGINES, WorkloadSpec
from workloads.training.methods import base_precision
from workloads.training.parallel.layout import ZERO
from workloads.training.techniques.optimization import PACKAGES as OF_OPTIMIZERS

#: Import names -> what pip installs.
INSTALLED_BY = {
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "nncf": "nncf",
    "neural_compressor": "neural-compressor-pt",  # part of Habana's PyTorch image
    "deepspeed": "deepspeed",  # on Gaudi HabanaAI's fork
    "flash_attn": "flash-attn",
    "xformers": "xformers",
    "liger_kernel": "'liger-kernel>=0.8.5,<0.9'",
    **{reader.module: reader.package for reader in READERS.values() if reader.module},
}
_OF_SETTINGS = {
    "attention": OF_ATTENTIONS,
    "optimizer": OF_OPTIMIZERS,
    "strategy": dict.fromkeys(ZERO, "deepspeed"),
    "fused_kernels": {"liger": "liger-kernel"},
}
#: Abilities that load a model in its job's precision.
_LOADING = ("generate", "encode", "train")


@dataclass(frozen=True, slots=True)
class PackageNeed:
    """A package that a job imports, and the reason."""

    module: str  # import name, a key of ``INSTALLED_BY``
    reason: str  # such as "precision int8"

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {INSTALLED_BY[self.module]}"


def package_needs(spec: WorkloadSpec, job: JobDescription) -> Iterator[PackageNeed]:
    """Packages that a job needs on the device that computes it, beside those of its engine."""
    engine = ENGINES.get(job.engine)
    if spec.ability in _LOADING and engine is not None:
        method = str(job.parameters.get("method", ""))
        precision = base_precision(method, job.precision)
        # Engines with loaders of their own need only what they declare.
        if engine.default or (precision, job.device) in engine.precisions:
            reason = f"precision {precision}" if precision == job.precision else f"method {method}"
            for module in support(precision, job.device, job.engine).packages:
                yield PackageNeed(module, reason)
        reader = READERS.get(method_of(known_config(job.model) or {})) if engine.default else None
        if reader is not None and reader.module:
            yield PackageNeed(reader.module, f"the checkpoint {job.model}")
    for setting, packages in _OF_SETTINGS.items():
        value = job.parameters.get(setting)
        if package := packages.get(value) if isinstance(value, str) else None:
            yield PackageNeed(package.replace("-", "_"), f"{setting} {value}")


def packages_of_jobs() -> tuple[tuple[str, str], ...]:
    """Import name and version of each such package on this host; an empty version: it is absent.
    Imports nothing."""
    versions = []
    for module, package in INSTALLED_BY.items():
        version = ""
        if importlib.util.find_spec(module) is not None:  # of another build no version is known
            version = installed_version(package.strip("'").partition(">")[0]) or "unknown"
        versions.append((module, version))
    return tuple(versions)
