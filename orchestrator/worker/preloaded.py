"""Modules and tables that most jobs need before they begin, for processes forked after this import.

To be imported before there is any thread or tensor. Otherwise each of sixteen workers would load
and make them again, in the turn of its first job.
"""

import contextlib

import transformers.convert_slow_tokenizer
import transformers.models.auto.tokenization_auto

import orchestrator.planning.implied_jobs  # noqa: F401
import workloads.generation.static_shapes
import workloads.generation.transformers_engine
import workloads.images.metrics
import workloads.models.loading
import workloads.onnx_graphs.calibrations
import workloads.passport
import workloads.tasks.causal_lm
import workloads.tasks.masked_lm
import workloads.tasks.seq2seq_lm
import workloads.tasks.text_to_image
import workloads.text_generation  # noqa: F401
from orchestrator.host.environment import versions
from workloads.data.catalog import load_dataset

versions()
load_dataset("advertisegen-synthetic")
with contextlib.suppress(ImportError):  # of transformers 5
    import transformers.tokenization_utils_tokenizers  # noqa: F401
with contextlib.suppress(ImportError):  # of transformers 5: patterns of all its models
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")
