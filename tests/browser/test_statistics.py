"""A statistic that is registered at run time, on the map and on the page of an atlas."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import HOSTS
from extra_statistic import THIRD
from recordings import RECORDINGS

from regard.atlas.page import write_page
from regard.atlas.table import AtlasTable
from regard.atlas.tally import merge_tallies, tally_document
from regard.stats.registry import list_statistics, registered

SIZE = {"width": 1280, "height": 660, "scheme": "light"}
FEWEST = replace(THIRD, ascending=True)
ORDER = "(cards) => cards.map((card) => /layer (\\d+) head (\\d+)/.exec(card.ariaLabel).slice(1).join('.'))"


def test_it_is_in_the_menus_the_badges_and_the_numbers_of_the_map(
    open_url, host, tmp_path
):
    seen, weights = RECORDINGS["causal"]()
    third = {
        f"{layer}.{head}": np.nan_to_num(dense[:, 2]).mean()  # masked cells are NaN
        for (_, layer), heads in weights.items()
        for head, dense in enumerate(heads)
    }
    order = sorted(third, key=third.get)
    chosen = [name for name in order if third[name] >= FEWEST.badge.least]
    with registered(FEWEST), HOSTS[host](seen, tmp_path) as url:
        window = open_url(url, "v=heads", **SIZE)
        window.page.locator("a.card .tag.third").first.wait_for()
        options = window.at("sort").locator("option")
        labels = [x.label or x.name for x in list_statistics()]
        assert options.all_text_contents() == ["layer and head", "behaviour", *labels]
        assert window.at("plotX").locator("option").all_text_contents() == labels
        told = f"third key: {FEWEST.summary}: at least 0.001 · {len(chosen)} of 6 heads"
        window.await_text("badgeKey", f"3rd {told}$")
        window.at("sort").select_option(label="third key")
        cards = window.page.locator("a.card")
        window.wait(lambda: cards.evaluate_all(ORDER), order)  # the smallest first
        shown = window.page.locator("a.card .value").all_text_contents()
        expected = [third[name] for name in order]
        assert [float(x) for x in shown] == pytest.approx(expected, rel=6e-3, abs=1e-9)
        tag = window.page.locator("a.card .tag.third").first
        assert tag.text_content() == "3rd"
        colour = "(tag) => getComputedStyle(tag).backgroundColor"
        assert tag.evaluate(colour) == "rgb(18, 52, 86)"
        window.at("theme").click()
        window.wait(lambda: tag.evaluate(colour), "rgb(254, 220, 186)")
        window.at("only").select_option("third")
        window.wait(lambda: cards.evaluate_all(ORDER), chosen)
        window.go("l=1&h=1")
        name = window.at("numbers").locator("dt", has_text="third")
        assert name.get_attribute("title") == "weight on the third key, in weight"
        value = name.evaluate("(name) => name.nextSibling.textContent")
        assert float(value) == pytest.approx(third["1.1"], rel=6e-3)
        window.page.goto("about:blank")  # it still fetches, and its server ends here
    with HOSTS[host](seen, tmp_path) as url:
        window = open_url(url, "sort=third&only=third", **SIZE)  # an old address
        window.wait(lambda: window.at("sort").input_value(), "layer")
        assert window.at("only").input_value() == ""
        window.page.goto("about:blank")


def test_it_is_in_the_menu_and_the_words_of_an_atlas(open_url, tmp_path):
    values = [{"third": np.full((3, 4), [[0.3], [0.1], [0.2]])}]
    with registered(FEWEST):
        tallies = [tally_document(["x"], values, ["third"], document=n) for n in (0, 1)]
        table = AtlasTable({}, merge_tallies(tallies, keep=1), {})
        write_page(tmp_path / "atlas.html", [table], names=["x"])
    window = open_url((tmp_path / "atlas.html").as_uri(), "", **SIZE)
    assert window.at("statistic").locator("option").all_text_contents() == ["third"]
    assert window.text("told").startswith("third: weight on the third key, mean over")
    assert window.text("order").startswith("smallest third")
    heads = window.at("order").locator("button.link").all_text_contents()
    assert heads == ["L0 h1", "L0 h2", "L0 h0"]
