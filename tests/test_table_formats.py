"""The table of head statistics as columns, rows and dataframes of other libraries."""

import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from regard.errors import OptionError
from regard.stats.registry import LOST, PLACE, STATISTICS
from regard.stats.table import HeadTable, make_fields

NAMES = ("model.layers.0", "model.layers.1")


@pytest.fixture(scope="module")
def table():
    """Two layers of two heads: one value is missing, and one is NaN."""
    rows = np.zeros(4, make_fields(NAMES))
    rows["layer"], rows["head"] = [0, 0, 1, 1], [0, 1, 0, 1]
    rows["name"] = np.repeat(NAMES, 2)
    rng = np.random.default_rng(0)
    for name in STATISTICS:
        rows[name] = rng.normal(size=4)
    rows["induction"][1] = np.nan  # nothing is repeated: no value
    rows["entropy"][2], rows[LOST][2] = np.nan, 3  # computed
    return HeadTable(rows)


def test_columns_and_rows_are_found_as_in_a_dataframe(table):
    np.testing.assert_array_equal(table["sink"], table.rows["sink"])
    both = table[["layer", "sink"]]
    assert both.dtype.names == ("layer", "sink")
    np.testing.assert_array_equal(both["sink"], table.rows["sink"])
    some = table[table["sink"] > 0]
    np.testing.assert_array_equal(some["sink"], [x for x in table["sink"] if x > 0])
    assert isinstance(some, HeadTable)
    for index in ([3, 0], slice(None, None, -1), np.array([1]), range(2)):
        at = np.asarray(index) if not isinstance(index, slice) else index
        np.testing.assert_array_equal(table[index]["sink"], table.rows["sink"][at])
    last = table[np.int64(-1)]
    assert last["name"] == NAMES[1] and last["sink"] == table.rows["sink"][3]
    assert list(last) == list(table.columns)
    assert [row["head"] for row in table] == [0, 1, 0, 1]


def test_a_wrong_column_or_row_is_named(table):
    words = "there is no column 'entropie', expected one of sequence, layer, name"
    for wrong in ("entropie", ["sink", "entropie"]):
        with pytest.raises(OptionError, match=words):
            table[wrong]
    with pytest.raises(OptionError, match="there is no row 4, expected 0 to 3 or -4"):
        table[4]


def test_pandas_has_the_same_columns(table):
    frame = table.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert tuple(frame.columns) == table.columns
    for name in table.columns:
        np.testing.assert_array_equal(frame[name].to_numpy(), table.rows[name])
    assert frame["layer"].dtype == np.int32 and frame["name"][3] == NAMES[1]
    mean = frame.groupby("layer")["sink"].mean()
    assert mean[1] == pytest.approx(table.rows["sink"][2:].mean())


@pytest.mark.parametrize(
    "read", [pa.table, lambda x: x.to_arrow(), pd.DataFrame.from_arrow]
)
def test_arrow_tells_what_is_missing_from_what_is_nan(table, read):
    found = read(table)
    found = found if isinstance(found, pa.Table) else pa.Table.from_pandas(found)
    assert tuple(found.column_names[: len(table.columns)]) == table.columns
    assert found["name"].to_pylist() == [NAMES[0]] * 2 + [NAMES[1]] * 2
    np.testing.assert_array_equal(found["sink"].to_numpy(), table.rows["sink"])
    assert found["induction"].null_count == 1 and found["induction"][1].as_py() is None
    if read != pd.DataFrame.from_arrow:  # pandas has one word for both
        assert found["entropy"].null_count == 0 and np.isnan(
            found["entropy"][2].as_py()
        )


def test_the_interchange_protocol_has_the_same_columns(table):
    found = table.__dataframe__()
    assert tuple(found.column_names()) == table.columns
    assert found.num_rows() == 4
    assert found.get_column_by_name("induction").null_count == 1


def test_polars_has_the_same_columns(table):
    pl = pytest.importorskip("polars", reason="NOT TESTED: pip install polars")
    for frame in (table.to_polars(), pl.DataFrame(table)):
        assert tuple(frame.columns) == table.columns
        for name in ("layer", "name", "sink"):
            np.testing.assert_array_equal(frame[name].to_list(), table.rows[name])
        assert frame["induction"].is_null().to_list() == [False, True, False, False]
        assert frame["entropy"].is_nan().to_list() == [False, False, True, False]
        assert frame["head"].dtype == pl.Int32 and frame["sink"].dtype == pl.Float64


def test_a_missing_library_is_named_with_what_to_do(table, monkeypatch, tmp_path):
    for name in ("pandas", "polars", "pyarrow"):
        monkeypatch.setitem(sys.modules, name, None)
    for ask, words in (
        (table.to_pandas, r"to_pandas\(\) needs pandas: pip install pandas"),
        (table.to_polars, r"to_polars\(\) needs polars: pip install polars"),
        (table.to_arrow, "Arrow needs pyarrow: pip install pyarrow"),
        (lambda: table.to_parquet(tmp_path / "x"), "a Parquet file needs pyarrow"),
    ):
        with pytest.raises(OptionError, match=words):
            ask()


def test_an_empty_table_is_one_too():
    table = HeadTable(np.zeros(0, make_fields([])))
    assert len(table.to_pandas()) == len(table.to_arrow()) == len(table) == 0
    assert list(table) == [] and table.columns[: len(PLACE)] == PLACE
