"""What a page computes in the browser, against what the server answers."""

import json
import math
import re

import numpy as np
import pytest
import torch

import regard
from regard.masks.patterns import causal, per_head, window
from regard.recording.record import Record, Recording
from regard.show.log_codes import NAN, decode
from regard.show.map_source import MapSource, Spot
from regard.show.page import EXACT, make_page

ASK = """async ([about, blobs, name, place]) => {
  const source = new HeldSource(about, (id) => blobs[id]);
  const { codes, ...rest } = await source[name](place);
  if (codes) rest.codes = [...codes];
  return rest;
}"""


def read(page):
    """Return what a page holds."""
    found = re.findall(
        r'<script type="(text/plain|application/json)" id="([^"]+)">([^<]*)</script>',
        page.html.decode(),
    )
    held = {name: text for _, name, text in found}
    return json.loads(held.pop("meta")), held


def draw(n, *, heads=2, shared=1, mask=None, **more):
    """Return a record of random queries and keys, its lse as the definition has it."""
    rng = np.random.default_rng(3)
    q = torch.tensor(rng.normal(size=(heads, n[0], 8)) * 2)
    k = torch.tensor(rng.normal(size=(shared, n[1], 8)) * 2)
    options = {"bias": more.get("bias"), "softcap": more.get("softcap")}
    seen = regard.attention(
        q, k, k, mask, scale=0.4, sink=more.get("sink"), q_start=0, **options
    )
    return Record(
        name="attention",
        q=q,
        k=k,
        lse=seen.lse,
        scale=0.4,
        q_positions=torch.arange(n[0]),
        k_positions=torch.arange(n[1]),
        mask=mask,
        **more,
    )


def bias(n, heads=2):
    return torch.tensor(np.random.default_rng(5).normal(size=(heads, *n)) * 2)


def forbid_some(n):
    allowed = torch.tensor(np.random.default_rng(7).random((1, *n)) < 0.5)
    allowed[:, 3] = False  # a row that sees nothing
    return allowed


def lose(record, key):
    """Return the record with NaN in a key and in the lse of a row."""
    record.k[0, key, 3] = math.nan
    record.lse[0, 7] = math.nan
    return record


RECORDS = {
    "causal": lambda: draw((300, 300), mask=causal()),
    "wide": lambda: draw((20, 301), heads=4, shared=2),
    "window": lambda: draw((270, 270), mask=window(9)),
    "by head": lambda: draw((40, 40), mask=per_head([causal(), window(3, 3)])),
    "array": lambda: draw((40, 60), mask=forbid_some((40, 60))),
    "cap": lambda: draw((40, 40), softcap=3.0),
    "sink": lambda: draw((40, 40), sink=torch.tensor([1.0, 3.0]).double()),
    "bias": lambda: draw((40, 50), bias=bias((40, 50))),
    "bias and cap": lambda: draw(
        (30, 30), bias=bias((30, 30), 1), softcap=2.0, mask=causal()
    ),
    "stored": lambda: draw((1100, 1100), heads=1, mask=causal()),
    "stored, wide": lambda: draw((70, 4100), heads=1),
    "one": lambda: draw((1, 1)),
    "lost": lambda: lose(draw((300, 300), mask=causal()), 290),
    "lost, stored": lambda: lose(draw((1100, 1100), heads=1, mask=causal()), 1090),
    "lost, bias": lambda: lose(draw((40, 50), bias=bias((40, 50))), 45),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_page_answers_what_the_server_answers(module, name):
    record = RECORDS[name]()
    recording = Recording(model="Tiny", records=(record,), sequences=(0,))
    source = MapSource(recording)
    about, blobs = read(make_page(recording))
    assert about["rounded"] is None
    (here,) = about["records"]
    n = record.q.shape[1], record.k.shape[1]
    for head in range(record.heads):
        place = {"sequence": 0, "layer": 0, "head": head}
        spot = Spot(**place)
        for level in range(here["coarsest"] + 1):
            last = [(size - 1) // (256 << level) for size in n]
            for how in ("max", "mass"):
                at = {"level": level, "x": last[1], "y": last[0], "how": how}
                found = module.evaluate(ASK, [about, blobs, "tile", place | at])
                codes = np.array(found["codes"], np.uint16)
                shown = decode(codes.reshape(found["rows"], found["columns"]))
                right = source.tile(spot, **at).codes
                np.testing.assert_array_equal(
                    codes.reshape(right.shape) == NAN, right == NAN
                )
                right = decode(right)
                np.testing.assert_allclose(shown, right, rtol=2 * EXACT, atol=2e-9)
        for kind, at in (("row", {"query": n[0] - 1}), ("column", {"key": n[1] // 2})):
            found = module.evaluate(ASK, [about, blobs, kind, place | at])
            right = getattr(source, kind)(spot, *at.values())
            assert found["nan"] == right["nan"]
            for number in ("total", "entropy"):
                near = right[number]
                if near is not None:  # NaN
                    near = pytest.approx(near, rel=2 * EXACT)
                assert found[number] == near
            pairs = [
                (x["index"], y["index"])
                for x, y in zip(found["top"], right["top"], strict=True)
            ]
            assert all(a == b for a, b in pairs[:3])
    small = module.evaluate(ASK, [about, blobs, "gallery", {"sequence": 0, "layer": 0}])
    right = source.gallery(0, 0).codes
    shown = np.array(small["codes"]).reshape(right.shape)
    assert ((shown == 0) == (right == 0)).all()
    assert ((shown == NAN) == (right == NAN)).all()
    assert (right == NAN).any() == name.startswith("lost")
    assert np.abs(shown.astype(int) - np.maximum(right, 640 * (right > 0))).max() <= 256
