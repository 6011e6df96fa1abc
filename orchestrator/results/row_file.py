"""Tables as the bytes of Parquet files."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

_FEW_ROWS = 64


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
