"""Forms of one model: those that a run made of a model, with size, quality and speed of each.

Jobs whose ``quality_of`` names the same model compare their texts with its own, so their rows stand
in one table, however each form was made.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.analysis.summary import Summary
from orchestrator.core.measurement import Measurement
from orchestrator.report import cells
from orchestrator.report.finding import Finding
from orchestrator.util import format as units
from workloads.quality_metrics import METRICS

#: What a step does to a model, as its settings say.
_MADE_BY = ("method", "sparsity", "sparsity_share", "numbers", "student_layers", "student_hidden")
#: The figures of quality that are shown.
_QUALITY = ("quality_top1_agreement", "quality_kl", "answer_loss")
#: What an engine does to one.
_CHOSEN = ("graph_optimization", "calibration", "fusions")


def forms(summary: Summary) -> Finding:
    """The measured rows that are held against another model's texts, grouped by that model."""
    saved = {str(name): row for row in summary.rows if (name := row.parameters.get("save_model"))}
    rows = [row for row in summary.joined.rows if row.parameters.get("quality_of")]
    shown = [
        (
            row.model,
            _made(row, saved),
            " ".join([row.precision, row.engine, *_settings(row, _CHOSEN)]),
            units.size(row.weight_bytes),
            *(units.number(row.reported(name)) for name in _QUALITY),
            f"{cells.figure(row)} {cells.plus_minus(row)}".strip(),
        )
        for row in sorted(rows, key=lambda row: str(row.parameters["quality_of"]))
        if row.metrics.throughput is not None
    ]
    titles = [next(one.title for one in METRICS if one.name == name) for name in _QUALITY]
    models = sorted({str(row.parameters["quality_of"]) for row in rows})
    return Finding(
        title="Forms of one model",
        head=("model", "made by", "run in", "weights", *titles, "tokens/s"),
        rows=tuple(shown),
        numbers=(3, 4, 5, 6, 7),
        note=f"Quality: against the texts of {units.listed(models)} in fp32." if shown else "",
    )


def _made(row: Measurement, saved: Mapping[str, Measurement]) -> str:
    step = saved.get(row.model)
    if step is None:
        return ""
    return f"{step.workload} of {step.model}: {', '.join(_settings(step, _MADE_BY))}"


def _settings(row: Measurement, names: tuple[str, ...]) -> list[str]:
    given = ((name, row.parameters.get(name)) for name in names)
    return [
        f"{name.replace('_', ' ')} {value}"
        for name, value in given
        if value not in (None, False, "none")
    ]
