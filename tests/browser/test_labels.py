"""A map whose tokens have no text says how to add it."""

import re

HOW = "seen.label(tokenizer.decode)"


def test_the_map_says_how_to_label_tokens(open_window):
    window = open_window("pair")
    window.await_text("status", re.escape(HOW))
    window.go("l=0&h=0")
    hint = window.page.locator("[data-at=unlabelled]")
    hint.wait_for(state="visible")
    assert HOW in hint.inner_text()


def test_labelled_tokens_need_no_hint(open_window):
    window = open_window("encoder")
    window.await_text("status", "arrows walk")
    assert HOW not in window.page.locator("[data-at=status]").inner_text()
    window.go("l=0&h=0")
    window.page.locator("[data-at=badge][data-state=exact]").wait_for()
    assert not window.page.locator("[data-at=unlabelled]").is_visible()
