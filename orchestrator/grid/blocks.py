"""The structure of a grid file, as pydantic models: checked before any setting is looked at."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class MeasureBlock(BaseModel):
    """Timing of jobs. A key that is missing keeps its default."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    warmup: int = Field(
        default=1,
        ge=0,
        le=1000,
        description="Untimed repeats before timing starts, at least: warm-up ends when every shape "
        "was met and steps are steady. 0: none at all, and the first meeting is timed.",
    )
    min_repeats: int = Field(default=3, ge=1, le=100_000, description="Timed repeats, at least.")
    max_repeats: int = Field(default=20, ge=1, le=100_000, description="Timed repeats, at most.")
    confidence: float = Field(
        default=0.95, gt=0.5, lt=1, description="Level of the confidence interval of throughput."
    )
    relative_half_width: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="Stop when the interval's half width is within this share of the mean.",
    )
    time_limit_s: float = Field(
        default=120.0, gt=0, le=604_800, description="Most seconds of the timed part of one job."
    )
    warmup_limit_s: float = Field(
        default=1800.0,
        gt=0,
        le=604_800,
        description="Most seconds of warm-up; where they run out the row is flagged as not steady.",
    )
    least_s: float = Field(
        default=0.0,
        ge=0,
        le=604_800,
        description="Fewest seconds of the timed part of text-generation: repeats go on until "
        "then. Energy needs about 1.5 where NVML reads it, and 20 where hl-smi does.",
    )


class ExperimentBlock(BaseModel):
    """The keys of an experiment that are not settings; settings stand beside them."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    name: str = Field(min_length=1, max_length=80, description="Unique in the file.")
    description: str = Field(default="", description="For readers of the report.")
    measure: dict[str, Any] = Field(
        default_factory=dict, description="Overrides the grid's `measure` for this experiment."
    )
    replicates: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="How often each job is run, in a fresh process each time and on different "
        "cards where there are several. The report joins them into one cell.",
    )
    axes: dict[str, Any] = Field(
        default_factory=dict,
        description="Setting: values. The experiment is their product, the last varying fastest. "
        "Values are a list or a range: 1..64 *2, 1..9 +2, 1..8.",
    )
    zip: Any = Field(
        default=None,
        description="Settings that move together: lists of equal length, read in parallel. One "
        "group, or a list of groups.",
    )
    include: list[dict[str, Any]] = Field(
        default_factory=list, description="More points, added after `exclude`."
    )
    exclude: list[dict[str, Any]] = Field(
        default_factory=list,
        description="Points to leave out: those that have all the values of an entry.",
    )


class GridFile(BaseModel):
    """The top level of a grid file."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="Also the name of its run: letters, digits, '.', '_' and '-', at most 64.",
    )
    description: str = Field(default="", description="For readers of the report.")
    results: str = Field(
        default="",
        description="Where runs keep their rows: a directory, such as one that all servers share "
        "(a relative one lies where the command is typed), "
        "or s3://BUCKET/PREFIX or gs://… for a copy there. --results wins.",
    )
    defaults: dict[str, Any] = Field(
        default_factory=dict, description="Settings of every experiment that does not say other."
    )
    measure: dict[str, Any] = Field(default_factory=dict, description="How jobs are timed.")
    experiments: list[dict[str, Any]] = Field(min_length=1, description="What is measured.")
