"""What the gallery says of itself: the text, a small map, badges, kinds, behaviour."""

import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import HOSTS
from extra_statistic import THIRD
from recordings import HOSTILE, RECORDINGS, make_recording
from test_looks import find_violations

from regard.masks.patterns import causal
from regard.seen import Seen
from regard.stats.registry import find_statistic, list_statistics, registered

SIZE = {"width": 1280, "height": 660, "scheme": "light"}
RARE = replace(THIRD, badge=replace(THIRD.badge, least=1.4e-4))
# the heads below each title
GROUPS = """(cards) => {
  const found = {};
  let name;
  for (const part of cards.children) {
    if (part.matches("h2")) found[(name = part.firstChild.textContent)] = [];
    for (const card of part.querySelectorAll("a.card"))
      found[name].push(/layer (\\d+) head (\\d+)/.exec(card.ariaLabel).slice(1).join("."));
  }
  return found;
}"""
ONE_HOST = pytest.mark.parametrize("host", ["server"])  # looks do not depend on it


def measure(name, dense):
    """Return a statistic of a causal head by its definition."""
    n = len(dense)
    at = np.arange(n)
    return {
        "sink": dense[:, 0].mean(),
        "previous": dense[at[1:], at[:-1]].mean(),
        "local": sum(np.nansum(dense[i, max(0, i - 63) : i + 1]) for i in at) / n,
    }[name]


def list_dense(weights):
    return {
        f"{layer}.{head}": dense
        for (_, layer), heads in weights.items()
        for head, dense in enumerate(heads)
    }


def read_cards(window):
    return window.page.locator("a.card").evaluate_all(
        "(cards) => cards.map((card) => /layer (\\d+) head (\\d+)/.exec(card.ariaLabel).slice(1).join('.'))"
    )


def make_repeats(count, n=120):
    """Return heads that follow `count` repeated tokens, of n, with their weights."""
    seen, _ = make_recording((n, n), layers=1, heads=2, mask=causal(), seed=3)
    found = seen.recording
    (record,) = found.records
    tokens = list(range(n))
    tokens[n - count :] = tokens[:count]  # the target of n - count + i is i + 1
    q, k = record.q.clone(), record.k.clone()
    for i in range(count):
        k[0, i + 1] = 0
        q[0, n - count + i] = 0
        k[0, i + 1, i % 8] = 4.0 + i // 8
        q[0, n - count + i, i % 8] = 6.0
    logits = np.einsum("hid,hjd->hij", q.numpy(), k.numpy()) * record.scale
    logits[:, ~np.tri(n, dtype=bool)] = -np.inf
    lse = np.log(np.exp(logits).sum(-1))
    record = replace(record, q=q, k=k, lse=record.lse.new_tensor(lse))
    recording = replace(found, records=(record,), tokens=(tuple(tokens),))
    weights = np.exp(logits - lse[..., None])
    return Seen(recording), weights, tokens


def measure_induction(dense, tokens):
    """Return the mean weight after the last same token, and of how many queries."""
    last, found = {}, []
    for i, token in enumerate(tokens):
        if token in last:
            found.append(dense[i, last[token] + 1])
        last[token] = i
    return np.mean(found), len(found)


# -- the text, and what a small map shows -----------------------------------------------------


def test_the_text_is_above_the_heads_and_leads_to_all_of_it(open_window):
    window = open_window("causal")
    window.await_text("stripName", "^the text, 257 tokens:$")
    assert window.text("strip").startswith(" the cat sat on the mat because it was")
    assert window.text("strip").endswith(" …")  # of 257 tokens, 120
    assert window.at("strip").locator("bdi").count() == 120
    window.at("readAll").click()
    window.rest()
    assert window.page.get_attribute("body", "data-view") == "text"


def test_tokens_without_spaces_are_kept_apart(open_window):
    window = open_window("pieces")
    window.await_text("strip", "^a b c d e $")


def test_a_picture_is_above_the_heads_of_a_vision_model(open_window):
    window = open_window("vision")
    window.await_text("stripName", "^the picture, 4 × 4 patches:$")
    pixels = window.pixels(window.at("strip").locator("canvas"))
    assert pixels.shape == (32, 32, 4)
    assert pixels[..., :3].std() > 20  # it is random
    assert window.at("readAll").is_hidden()
    assert "vision · 1 layer · layers.0.attention ·" in window.text("cards")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_sample_is_the_first_head_and_its_scale_is_said(open_window, scheme):
    window = open_window("causal", scheme=scheme)
    window.await_gallery(6)
    first = window.page.locator("a.card canvas").first
    same = lambda: bool(  # noqa: E731
        (window.pixels(window.at("sample")) == window.pixels(first)).all()
    )
    window.wait(same, expected=True)
    words = window.text("sampleWords")
    assert "queries from top to bottom, keys from left to right" in words
    assert "from 0.001 (or less) to 1 on a logarithmic scale" in words
    assert "the largest weight of up to 8 × 8 cells" in words  # 257 in 64 pixels
    assert "Grey: the query may not look there." in words
    window.at("low").fill("-5")
    window.await_text("sampleWords", "from 0.00001 |from 1e-5 ")
    window.wait(same, expected=True)


def test_without_a_mask_no_grey_is_explained(open_window):
    window = open_window("across")
    window.await_text("sampleWords", "queries from top to bottom")
    assert "Grey" not in window.text("sampleWords")


# -- badges -----------------------------------------------------------------------------------


def test_every_badge_has_its_definition_and_its_threshold(open_window):
    _, weights = RECORDINGS["causal"]()
    heads = list_dense(weights)
    window = open_window("causal")
    window.await_text("badgeKey", " of 6 heads")
    items = window.at("badgeKey").locator("li").all_text_contents()
    known = [x for x in list_statistics() if x.badge]
    assert len(items) == len(known)
    for item, statistic in zip(items, known, strict=True):
        badge = statistic.badge
        assert item.startswith(badge.label)
        assert f"{statistic.summary}: at least {badge.least}" in item
        if badge.keys:
            assert f"in texts of at least {badge.keys} keys" in item
        if badge.unless:
            other = find_statistic(badge.unless).badge.label
            assert f"without the badge {other}" in item
        if not statistic.enough:
            count = sum(
                measure(statistic.name, dense) >= badge.least
                for dense in heads.values()
            )
            assert item.endswith(f"· {count} of 6 heads")


def test_a_badge_leaves_its_heads_by_pointer_and_by_key(open_window):
    window = open_window("causal")
    button = window.at("badgeKey").get_by_role("button", name="sink")
    button.click()
    window.wait(lambda: read_cards(window), ["0.1", "1.1"])
    window.await_address(only="sink")
    button = window.at("badgeKey").get_by_role("button", name="sink")
    assert button.get_attribute("aria-pressed") == "true"
    button.focus()
    window.press("Enter")
    window.wait(lambda: len(read_cards(window)), 6)
    window.await_address(only=None)


def test_a_head_with_focus_tells_its_numbers(open_window):
    _, weights = RECORDINGS["causal"]()
    window = open_window("causal")
    window.await_text("badgeKey", " of 6 heads")
    window.page.locator('a.card[aria-label*="layer 1 head 1"]').focus()
    window.await_text("sentence", "^layer 1 head 1, model.layers.1.self_attn: sink 0.8")
    said = window.text("sentence")
    assert "(badge: at least 0.5)" in said
    value = float(re.search(r"sink ([\d.]+)", said)[1])
    assert value == pytest.approx(measure("sink", weights[0, 1][1]), rel=6e-3)
    assert "induction too few" in said


# -- numbers of too few queries ---------------------------------------------------------------


@pytest.mark.parametrize("count", [3, 24, 25, 40])
def test_induction_is_told_only_where_tokens_repeat(open_url, host, tmp_path, count):
    seen, weights, tokens = make_repeats(count)
    value, repeats = measure_induction(weights[0], tokens)
    assert repeats == count
    assert value > 0.15  # above the threshold of the badge
    enough = count >= 25
    with HOSTS[host](seen, tmp_path) as url:
        window = open_url(url, "sort=induction", **SIZE)
        window.await_text("badgeKey", "ind.* · (tokens|[12] of)")
        few = f"tokens repeat too rarely to tell: {count} of 120 queries, 25 needed"
        assert (few in window.text("badgeKey")) is not enough
        assert window.page.locator("a.card .tag.induction").count() == enough
        shown = window.page.locator("a.card .value").all_text_contents()
        if enough:
            assert float(shown[0]) == pytest.approx(value, rel=6e-3)
        else:
            assert shown == ["too few"] * 2
        window.go("l=0&h=0")
        name = window.at("numbers").locator("dt", has_text="induction").first
        number = name.evaluate("(name) => name.nextSibling.textContent")
        assert (number == "too few") is not enough
        assert (few in window.text("numbers")) is not enough
        window.page.goto("about:blank")  # it still fetches, and its server ends here


# -- kinds and behaviour ----------------------------------------------------------------------


def test_layers_are_grouped_by_kind_with_their_modules(open_window):
    window = open_window("pair")
    window.await_gallery(12)
    titles = window.at("cards").locator("h2").all_text_contents()
    assert [x.split(" · ")[:3] for x in titles] == [
        ["encoder", "1 layer", "encoder.block.0.layer.0.SelfAttention"],
        ["decoder", "1 layer", "decoder.block.0.layer.0.SelfAttention"],
        ["cross", "1 layer", "decoder.block.0.layer.1.EncDecAttention"],
    ]
    window = open_window("encoder")
    title = window.at("cards").locator("h2").text_content()
    assert title.startswith("encoder · 2 layers · encoder.layer.#.attention.self ·")


def test_a_decoders_queries_do_not_have_the_tokens_of_the_encoder(open_window):
    window = open_window("pair", "l=1&h=0")
    window.await_text("numbers", "sink0")
    name = window.at("numbers").locator("dt", has_text="induction")
    assert name.evaluate("(name) => name.nextSibling.textContent") == "–"
    assert "too rarely" not in window.text("numbers")


def test_behaviour_is_the_badge_furthest_above_its_threshold(open_window):
    _, weights = RECORDINGS["causal"]()
    heads = list_dense(weights)
    names = ("sink", "previous", "local")
    groups = {}
    for place, dense in heads.items():
        values = {name: measure(name, dense) for name in names}
        least = {name: find_statistic(name).badge.least for name in names}
        times = {x: values[x] / least[x] for x in names if values[x] >= least[x]}
        best = max(times, key=times.get) if times else ""
        groups.setdefault(best, []).append((values.get(best, 0), place))
    sink = [place for _, place in sorted(groups["sink"], reverse=True)]
    rest = [place for _, place in groups[""]]
    window = open_window("causal", "sort=behaviour")
    window.wait(lambda: read_cards(window), [*sink, *rest])
    titles = window.at("cards").locator("h2").all_text_contents()
    assert titles == [
        "sink · 2 heads · weight on the first key, mean over queries: at least 0.5",
        "no badge · 4 heads · no number reaches its threshold",
    ]
    assert "largest multiple of its threshold" in window.text("cards")


def test_of_two_badges_the_larger_multiple_counts(open_url, host, tmp_path):
    seen, weights = RECORDINGS["causal"]()
    third = {x: np.nan_to_num(d[:, 2]).mean() for x, d in list_dense(weights).items()}
    sink = {x: measure("sink", d) for x, d in list_dense(weights).items()}
    both = [x for x in sink if sink[x] >= 0.5 and third[x] >= RARE.badge.least]
    first = [x for x in both if sink[x] / 0.5 > third[x] / RARE.badge.least]
    assert (both, first) == (["0.1", "1.1"], ["0.1"])
    with registered(RARE), HOSTS[host](seen, tmp_path) as url:
        window = open_url(url, "sort=behaviour", **SIZE)
        window.page.locator("a.card .tag.third").first.wait_for()
        groups = window.at("cards").evaluate(GROUPS)
        assert [x for x in groups["sink"] if x in both] == first
        assert {*groups["third key"]} >= {*both} - {*first}
        window.page.goto("about:blank")  # it still fetches, and its server ends here


# -- for everyone -----------------------------------------------------------------------------


def test_hostile_tokens_are_text_above_the_heads(open_window):
    window = open_window("hostile", width=390, height=800)
    window.await_text("stripName", f"^the text, {len(HOSTILE)} tokens:$")
    assert "<img src=x onerror=" in window.text("strip")
    assert window.at("strip").locator(":not(bdi)").count() == 0
    assert len(window.text("strip")) < 700
    assert window.overflow() == 0
    assert window.page.evaluate("() => window.hacked") is None


@ONE_HOST
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wrong_with_all_of_it_open(open_window, scheme, width):
    window = open_window("causal", "sort=behaviour&px=sink", width=width, scheme=scheme)
    window.await_text("badgeWait", "")
    window.await_text("plotWords", "6 of 6 heads")
    open_all = (
        "() => { for (const x of document.querySelectorAll('details')) x.open = true; }"
    )
    window.page.evaluate(open_all)
    window.rest()
    assert window.at("plotRows").locator("tr").count() == 7
    assert window.overflow() == 0
    assert find_violations(window) == []


@ONE_HOST
def test_the_guide_is_open_where_there_is_room(open_window):
    window = open_window("causal")
    assert window.at("sampleWords").is_visible()
    window = open_window("causal", width=390)
    assert window.at("sampleWords").is_hidden()
    window.at("guide").locator("summary").focus()
    window.press("Enter")
    assert window.at("sampleWords").is_visible()
