"""Rows as the bytes of a Parquet file, and the file's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.results import fragments

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestrator.domain.measurement import Measurement

_FEW_ROWS = 64


def row_file(measurements: Sequence[Measurement]) -> tuple[str, bytes]:
    """Name and content of a file of rows that are written together."""
    from orchestrator.results.tables import to_table

    # Descriptions of columns would be half of it; compacted files have them.
    data = parquet(to_table(measurements, documented=False), use_dictionary=False)
    if len(measurements) == 1:
        job_id = measurements[0].job_id
    else:
        job_id = fragments.TOGETHER
        for each in measurements:
            fragments.refuse_unnameable(each.job_id, each.attempt_number)
    number = max(each.attempt_number for each in measurements)
    return fragments.fragment_name(job_id, number, data), data


def parquet(table: pa.Table, *, use_dictionary: bool) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    # A hundred columns of few values each: setting up zstd for them takes longer than all the rest.
    codec = "zstd" if table.num_rows > _FEW_ROWS else "snappy"
    pq.write_table(
        table, sink, compression=codec, write_statistics=False, use_dictionary=use_dictionary
    )
    return sink.getvalue().to_pybytes()
