"""A window of the browser, used as a reader uses it: pointer, keys and what is shown.

    window.go("l=0&h=1")             the part of the address after #
    window.hover(5, 3)               the pointer on the cell of query 5 and key 3
    window.text("sentence")          what the page says of it

Whatever goes wrong meanwhile is in `troubles`: a console error, an error of the page, a
dialog, a request to anywhere else.
"""

import math
import re
import time
from io import BytesIO
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from matplotlib.image import imread

LEFT, TOP = 88, 80  # room of the axes, as in view.js
FRAMES = """() => new Promise((done) => setTimeout(
  () => requestAnimationFrame(() => requestAnimationFrame(done)), 0))"""
PIXELS = """(canvas) => {
  const { width, height } = canvas;
  const copy = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  return { width, height, data: [...copy.getImageData(0, 0, width, height).data] };
}"""
# the sentence at each of some points of the canvas, a frame for each
SWEEP = """async (canvas, points) => {
  const said = [];
  const frame = () => new Promise(requestAnimationFrame);
  for (const [clientX, clientY] of points) {
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY, pointerId: 9 }));
    await frame(); // it is painted
    said.push(document.querySelector("[data-at=sentence]").textContent);
  }
  return said;
}"""


class Window:
    def __init__(self, page):
        self.page, self.url, self.troubles = page, "about:blank", []
        page.on("console", self.hear)
        page.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        page.on("dialog", self.refuse)
        page.route("**/*", self.guard)
        page.on("popup", lambda _: self.troubles.append("another window"))

    def hear(self, message):
        if message.type in ("error", "warning"):
            self.troubles.append(f"console: {message.text}")

    def refuse(self, dialog):
        self.troubles.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def guard(self, route):
        """Let pass what asks the host of the page itself."""
        if is_own(self.url, route.request.url):
            route.continue_()
        else:
            self.troubles.append(f"request to {route.request.url}")
            route.abort()

    # ---- going

    def go(self, address=""):
        self.page.goto(f"{self.url}#{address}")
        self.rest()

    def rest(self):
        """Wait until what was asked for is painted, exactly."""
        self.page.wait_for_selector(
            "[data-view=map], [data-view=gallery], [data-view=text]"
        )
        self.page.evaluate(FRAMES)
        if self.in_map:
            self.page.wait_for_selector("[data-at=badge][data-state=exact]")
        elif self.page.get_attribute("body", "data-view") == "text":
            self.page.wait_for_selector("[data-at=reading][data-state=exact]")

    def await_gallery(self, heads):
        count = "(n) => document.querySelectorAll('a.card canvas').length === n"
        self.page.wait_for_function(count, arg=heads)

    def press(self, *keys):
        for key in keys:
            self.page.keyboard.press(key)
        self.rest()

    # ---- seeing

    @property
    def in_map(self):
        return self.page.get_attribute("body", "data-view") == "map"

    def at(self, name):
        return self.page.locator(f"[data-at={name}]")

    def text(self, name):
        return self.at(name).text_content()

    @property
    def address(self):
        """What stands after the #, by key."""
        return dict(parse_qsl(urlsplit(self.page.url).fragment))

    def await_address(self, **parts):
        """Wait until the address has these parts; None: it has none."""
        expected = {name: None if x is None else str(x) for name, x in parts.items()}
        self.wait(lambda: {name: self.address.get(name) for name in expected}, expected)

    def await_text(self, name, pattern):
        self.wait(lambda: bool(re.search(pattern, self.text(name))), expected=True)

    def wait(self, look, expected, seconds=60):
        until = time.monotonic() + seconds
        while (found := look()) != expected and time.monotonic() < until:
            self.page.wait_for_timeout(30)
        assert found == expected, (self.text("sentence"), self.page.url)

    def pixels(self, locator):
        """Return the colours of a small canvas, (rows, columns, 4)."""
        found = locator.evaluate(PIXELS)
        shape = found["height"], found["width"], 4
        return np.array(found["data"], np.uint8).reshape(shape)

    def picture(self):
        """Return the map as it is painted now, to be compared as a whole."""
        return self.at("plane").evaluate("(canvas) => canvas.toDataURL()")

    def colour(self, x, y):
        """Return the colour at a point of the page, as it is on the screen."""
        clip = {"x": round(x), "y": round(y), "width": 1, "height": 1}
        with BytesIO(self.page.screenshot(clip=clip)) as file:
            return np.rint(imread(file)[0, 0, :3] * 255).astype(int)

    def overflow(self):
        """Return by how many pixels the page is wider than the window."""
        return self.page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )

    # ---- the map

    def place(self, i, j):
        """Return where the middle of a cell is, on the page."""
        at = {name: float(self.address[name]) for name in "ijz"}
        box = self.at("plane").bounding_box()
        x = LEFT + (box["width"] - LEFT) / 2 + (j + 0.5 - at["j"]) * at["z"]
        y = TOP + (box["height"] - TOP) / 2 + (i + 0.5 - at["i"]) * at["z"]
        return box["x"] + x, box["y"] + y

    def look(self, **address):
        """Go to a place of a head, and wait until the address says where that is."""
        self.go("&".join(f"{name}={x}" for name, x in {**address, "new": 1}.items()))
        self.await_address(new=None)  # kept, 250 ms later: the page knows no "new"
        assert {*"ijz"} <= {*self.address}

    def await_whole(self, n):
        """Wait until the address says that all n × n cells are in sight."""
        box = self.at("plane").bounding_box()
        fit = 0.985 * min((box["width"] - LEFT) / n, (box["height"] - TOP) / n)
        self.wait(
            lambda: abs(float(self.address.get("z", 0)) / fit - 1) < 1e-3, expected=True
        )

    def hover(self, i, j):
        """Point at a cell; return what is said."""
        self.page.mouse.move(*self.place(i, j))
        self.page.evaluate(FRAMES)
        return self.text("sentence")

    def hover_middle(self):
        """Point at whatever is in the middle of the map."""
        box = self.at("plane").bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.evaluate(FRAMES)

    def sweep(self, pixels, side=1):
        """Return what is said of many pixels of side × side cells."""
        box, places = self.at("plane").bounding_box(), []
        size = side * float(self.address["z"])
        inside = 0.6 * size if size > 3 else 0  # of a tiny pixel the first corner
        for row, column in pixels:
            x, y = self.place(row * side - 0.5, column * side - 0.5)
            # a pointer stands on whole pixels
            right = math.ceil(x - box["x"] + inside)
            down = math.ceil(y - box["y"] + inside)
            places.append([box["x"] + right, box["y"] + down])
        return self.at("plane").evaluate(SWEEP, places)


def is_own(url, asked):
    """Tell whether a request goes to where the page came from."""
    mine, other = urlsplit(url), urlsplit(asked)
    if mine.scheme == "file":
        return (other.scheme, other.path) == (mine.scheme, mine.path)
    return (other.scheme, other.netloc) == (mine.scheme, mine.netloc)
