"""A number that too few queries have is said to be one, wherever it is shown."""

from dataclasses import replace

import numpy as np
import pytest

import regard
from regard.commands.show import print_table
from regard.masks.patterns import causal
from regard.recording.record import Record, Recording
from regard.seen import Seen
from regard.show.map_source import MapSource
from regard.show.page_overview import leave_out_few
from regard.stats.few_queries import FewQueries
from regard.stats.registry import find_statistic
from regard.stats.table import find_tokens, make_table

N = 120


def make_seen(*counts, n=N):
    """Return a recording of a sequence for each count of repeated tokens."""
    rng = np.random.default_rng(0)
    records, tokens = [], []
    for count in counts:
        q, k = (rng.normal(size=(2, n, 4)) for _ in range(2))
        lse = np.asarray(regard.attention(q, k, k, causal(), scale=0.5).lse)
        at = np.arange(n)
        records.append(
            Record(
                name="layer",
                q=q,
                k=k,
                lse=lse,
                scale=0.5,
                q_positions=at,
                k_positions=at,
                mask=causal(),
            )
        )
        ids = list(range(n))
        ids[n - count :] = ids[:count]
        tokens.append(tuple(ids))
    found = Recording(
        model="Tiny",
        records=tuple(records),
        sequences=tuple(range(len(counts))),
        tokens=tuple(tokens),
    )
    return Seen(found)


def count_repeats(tokens):
    return sum(token in tokens[:i] for i, token in enumerate(tokens))


@pytest.mark.parametrize("count", [0, 1, 3, 24, 25, 60])
def test_the_table_says_how_many_queries_have_a_number(count):
    seen = make_seen(count)
    table = seen.table()
    assert count_repeats(seen.recording.tokens[0]) == count
    line = f"induction: tokens repeat too rarely to tell: {count} of 120 queries, 25 needed"
    enough = count >= find_statistic("induction").enough
    assert enough is (count >= 25)
    assert (str(table).splitlines()[-1] == line) is not enough
    assert (line in str(table)) is not enough
    assert (line in table.to_html()) is not enough
    assert np.isnan(table["induction"]).all() == (count == 0)  # the number stays
    expected = () if enough else (FewQueries(0, 0, "induction", count, 120),)
    assert table.few == expected


def test_sequences_are_named_if_there_are_several():
    table = make_seen(3, 60, 24).table()
    assert table.list_few() == [
        "induction of sequence 0: tokens repeat too rarely to tell: 3 of 120 queries, 25 needed",
        "induction of sequence 2: tokens repeat too rarely to tell: 24 of 120 queries, 25 needed",
    ]
    some = table[table["sequence"] == 2]
    assert some.list_few() == [
        "induction: tokens repeat too rarely to tell: 24 of 120 queries, 25 needed"
    ]
    assert table[table["sequence"] == 1].list_few() == []
    assert table.sort("induction").head(6).list_few() == table.list_few()
    assert table.by_layer().list_few() == table.list_few()


def test_the_worst_standard_error_is_the_threshold_of_the_badge():
    entry = find_statistic("induction")
    assert 0.5 / np.sqrt(entry.enough) == pytest.approx(entry.badge.least)


def test_regard_show_names_no_head_by_a_number_of_too_few(capsys):
    seen = make_seen(3)
    print_table(seen, seen.table())
    said = capsys.readouterr().out.splitlines()
    told = "tokens repeat too rarely to tell: 3 of 120 queries, 25 needed"
    assert said[-1] == f"most induction: {told}"
    assert f"induction: {told}" in said
    seen = make_seen(3, 60)
    table = seen.table()
    print_table(seen, table)
    rows = table[table["sequence"] == 1]
    best = int(rows["induction"].argmax())
    value = rows["induction"][best]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"most induction: layer 0 head {best}, {value:.3f}"


def test_the_map_gets_the_counts_and_an_overview_does_not_rank_by_them():
    source = MapSource(make_seen(3, 60).recording)
    assert source.meta()["few"] == []  # as long as the table is not known
    for key in source.records:
        source.tabulate(*key)
    found = source.meta()["few"]
    assert found == [
        {
            "sequence": 0,
            "layer": 0,
            "statistic": "induction",
            "count": 3,
            "queries": 120,
        }
    ]
    rows = leave_out_few(source.meta())
    assert [row["induction"] is None for row in rows] == [True, True, False, False]
    assert all(row["sink"] is not None for row in rows)


def test_a_decoders_queries_are_not_the_tokens_of_its_encoder():
    seen = make_seen(60)
    found = replace(seen.recording, notes={"decoders": ["layer"]})
    (record,) = found.records
    assert find_tokens(seen.recording, record, 0) == found.tokens[0]
    assert find_tokens(found, record, 0) == ()
    assert find_tokens(found, record, 7) == ()
    table = make_table(found)
    assert np.isnan(table["induction"]).all()
    assert table.few == ()  # the layer does not have the number at all
    assert np.isfinite(seen.table()["induction"]).all()


def test_a_comparison_does_not_use_them_either():
    one, other = make_seen(60), make_seen(60)
    notes = {"decoders": ["layer"]}
    both = [Seen(replace(x.recording, notes=notes)) for x in (one, other)]
    assert np.isfinite(regard.compare(one, other)["induction"]).all()
    assert np.isnan(regard.compare(*both)["induction"]).all()
