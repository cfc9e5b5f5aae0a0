"""The table of head statistics in other formats: Arrow, pandas, polars, Parquet, JSON.

    table.to_pandas()               pandas.DataFrame
    table.to_polars()               polars.DataFrame; so does polars.DataFrame(table)
    pyarrow.table(table)            and all else that reads the Arrow PyCapsule protocol
    duckdb.sql("from table")        reads it, too

A statistic without a value is null. NaN stays NaN where queries have NaN, which the
column nan_rows counts; pandas writes NaN for both. Each library is imported when it is
asked for.

Next: registry.py
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from regard.errors import OptionError
from regard.stats.registry import LOST

Rows = np.ndarray[Any, np.dtype[Any]]


def load_library(name: str, what: str) -> Any:
    """Return a library that is not needed otherwise, or say how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError:
        package = name.partition(".")[0]
        raise OptionError(
            f"{what} needs {package}: pip install {package}. numpy.asarray(table) and "
            "table.to_json(path) need nothing."
        ) from None


def find_null(rows: Rows, name: str) -> Rows | None:
    """Return which rows have no value in a column, None if it has no missing values."""
    if rows.dtype[name].kind != "f":
        return None
    missing: Rows = np.isnan(rows[name]) & (rows[LOST] == 0)
    return missing


def make_arrow(rows: Rows, what: str = "Arrow") -> Any:
    """Return a pyarrow.Table."""
    pa = load_library("pyarrow", what)
    names = rows.dtype.names or ()
    return pa.table(
        {
            x: pa.array(rows[x], mask=find_null(rows, x), from_pandas=False)
            for x in names
        }
    )


def make_pandas(rows: Rows) -> Any:
    """Return a pandas.DataFrame."""
    pd = load_library("pandas", "to_pandas()")
    names = rows.dtype.names or ()
    return pd.DataFrame({x: np.ascontiguousarray(rows[x]) for x in names})


def make_polars(rows: Rows) -> Any:
    """Return a polars.DataFrame."""
    pl = load_library("polars", "to_polars()")
    columns = {}
    for name in rows.dtype.names or ():
        column, missing = rows[name], find_null(rows, name)
        text = column.dtype.kind == "U"
        series = pl.Series(
            name, column.tolist() if text else np.ascontiguousarray(column)
        )
        if missing is not None:
            series = pl.select(pl.when(~pl.Series(missing)).then(series).alias(name))
            series = series.to_series()
        columns[name] = series
    return pl.DataFrame(columns)


def write_parquet(rows: Rows, path: Any) -> None:
    """Write a Parquet file."""
    table = make_arrow(rows, "a Parquet file")
    load_library("pyarrow.parquet", "a Parquet file").write_table(table, path)
