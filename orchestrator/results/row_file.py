"""Rows as bytes: the record that an append writes, and Parquet files."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from orchestrator.results import fragments

if TYPE_CHECKING:
    import pyarrow as pa

    from orchestrator.domain.measurement import Measurement

_FEW_ROWS = 64
#: A length of zero: no message follows.
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


@lru_cache(maxsize=1)
def _stream_begin() -> bytes:
    """The schema as an Arrow IPC message, which is the same for every record."""
    from orchestrator.results.schema import undocumented_schema

    return bytes(undocumented_schema().serialize())


def record_of(measurements: Sequence[Measurement]) -> tuple[str, bytes]:
    """Name and content of a record: rows that are written together, as an Arrow IPC stream."""
    from orchestrator.results.tables import to_batch

    batch = to_batch(measurements, documented=False)
    data = b"".join((_stream_begin(), batch.serialize(), _STREAM_END))
    for each in measurements:
        fragments.refuse_unnameable(each.job_id, each.attempt_number)
    job_id = measurements[0].job_id if len(measurements) == 1 else fragments.TOGETHER
    number = max(each.attempt_number for each in measurements)
    return fragments.record_name(job_id, number, data), data


def parquet(table: pa.Table, *, use_dictionary: bool) -> bytes:
    """A table as the bytes of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    # A hundred columns of few values each: setting up zstd for them takes longer than all the rest.
    codec = "zstd" if table.num_rows > _FEW_ROWS else "snappy"
    pq.write_table(
        table, sink, compression=codec, write_statistics=False, use_dictionary=use_dictionary
    )
    return sink.getvalue().to_pybytes()
