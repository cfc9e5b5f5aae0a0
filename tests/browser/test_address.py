"""The address holds the view: a reload and a copied link open it again."""

import pytest

VIEW = "l=1&h=2&i=150&j=120&z=24&s=mass&lo=-4.5&t=dark&pin=151&col=119&vs=0.1&cmp=diff"
ONE_HOST = pytest.mark.parametrize("host", ["page"])  # neither knows the address


def look_at(window):
    """Return what a reader sees of the state."""
    window.rest()
    window.await_text("row", "the keys it looks at most")
    window.await_text("column", "the queries that look at it most")
    window.page.wait_for_timeout(300)
    values = ["layer", "head", "how", "low", "compare", "otherLayer", "otherHead"]
    return {
        "address": window.address,
        "theme": window.page.get_attribute("body", "data-theme"),
        "row": window.text("row"),
        "column": window.text("column"),
        "badge": window.text("badge"),
        "picture": window.picture(),
        **{name: window.at(name).input_value() for name in values},
    }


def test_a_link_opens_the_view_that_it_names(open_window):
    window = open_window("causal", VIEW)
    found = look_at(window)
    given = dict(part.split("=") for part in VIEW.split("&"))
    assert found["address"] == given
    assert found["theme"] == "dark"
    assert (found["layer"], found["head"], found["how"]) == ("1", "2", "mass")
    assert (found["otherLayer"], found["otherHead"]) == ("0", "1")
    assert found["row"].startswith("pinned query 151 ")
    assert found["column"].startswith("pinned key 119 ")


def test_a_reload_and_a_copied_link_show_the_same(open_window):
    window = open_window("causal", VIEW)
    before = look_at(window)
    window.page.reload()
    assert look_at(window) == before
    window.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    window.at("copy").click()
    window.await_text("sentence", "^the link is (copied|in the address bar)$")
    link = window.page.url
    if "copied" in window.text("sentence"):
        assert window.page.evaluate("() => navigator.clipboard.readText()") == link
    other = open_window("causal", link.split("#")[1])
    assert look_at(other) == before


@ONE_HOST
def test_a_view_made_by_hand_is_in_its_link(open_window):
    window = open_window("causal", "l=0&h=0")
    window.at("plane").focus()
    window.press("]", "}", "m", "t", "g")
    window.page.keyboard.type("99")
    window.press("Enter", "Shift+Enter", "Escape", "+", "c")
    window.await_address(l=1, h=1, s="mass", t="dark", pin=99, col=99, cmp="side")
    before = look_at(window)
    other = open_window("causal", window.page.url.split("#")[1])
    del before["picture"]  # only one of them has a crosshair
    found = look_at(other)
    assert {name: found[name] for name in before} == before


@ONE_HOST
def test_the_gallery_is_in_the_address_too(open_window):
    window = open_window("causal", "sort=entropy&lo=-5&t=dark")
    window.await_gallery(6)
    assert window.at("sort").input_value() == "entropy"
    assert window.at("low").input_value() == "-5"
    window.page.locator("a.card").nth(2).click()
    window.rest()
    window.await_address(lo=-5, t="dark")


@ONE_HOST
@pytest.mark.parametrize(
    "address",
    [
        "l=99&h=0",
        "l=0&h=99",
        "l=x&h=&z=-5",
        "q=7&l=9&h=0",
        "sort=evil&only=evil&t=pink&lo=zz",
    ],
)
def test_a_head_that_is_not_there_leads_to_the_gallery(open_window, address):
    window = open_window("causal", address)
    window.await_gallery(6)
    window.wait(lambda: window.in_map, expected=False)


@ONE_HOST
def test_odd_numbers_lead_to_the_nearest_view(open_window):
    odd = "l=0&h=0&z=1e9&i=1e9&j=-4&pin=99999999&col=-3&s=evil&cmp=zzz&vs=a.b&lo=9"
    window = open_window("causal", odd)
    window.page.mouse.move(500, 400)
    window.rest()
    window.wait(lambda: window.in_map, expected=True)
    window.await_address(z=64, s=None, cmp=None, lo=-1)
    assert window.text("row").startswith("pinned queryclick")


@ONE_HOST
def test_who_goes_elsewhere_is_not_called_back(open_window):
    """The address is kept a moment later: by then, the reader may be on the way elsewhere."""
    window = open_window("causal", "l=0&h=0&pin=15")
    window.await_text("row", "pinned query 15 ")
    window.page.evaluate(
        """() => {
          const wait = window.setTimeout;
          window.setTimeout = (act, ms) => ms === 250 ? (window.act = act) : wait(act, ms);
        }"""
    )
    window.press("+")
    go = "window.location.hash = '#l=0&h=1&pin=16'"
    window.page.evaluate(f"() => {{ {go}; window.act(); }}")
    window.await_text("row", "pinned query 16 ")
    assert (window.address["h"], window.address["pin"]) == ("1", "16")
