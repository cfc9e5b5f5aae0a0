"""The map in a notebook cell: JupyterLab, marimo, VS Code.

    seen.widget()                     the last line of a cell
    seen.widget(address="l=18&h=8")   opens at a head; `address` follows what is shown

    widget.js ─▶ message {id, name, place} ─▶ map_requests.py ─▶ {id, text} and codes

Threads answer requests, so the map works while the next cell is written. If a
notebook shows no widgets, a short recording is shown as a page, and a long one as a
hint on how to write a page.

Next: map_requests.py
"""

from __future__ import annotations

import html
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from regard.errors import OptionError, RegardError
from regard.recording.record import Recording
from regard.show.map_requests import WHOLE, answer
from regard.show.map_source import MapSource
from regard.show.page import make_page
from regard.show.script_bundle import join_modules, read_asset, read_body
from regard.show.zoom_levels import Sheet

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as missing:
    raise ImportError(
        f'the map in a notebook needs {missing.name}: pip install "regard[notebook]"'
    ) from missing

THREADS = 8  # most of them wait for a pass
SHORT = 2_000_000  # fewer numbers in q and k make a page of a few MB
INSTEAD = 'This notebook shows no widgets: seen.page("map.html") writes the map.'


class MapWidget(anywidget.AnyWidget):
    """A widget that shows all heads of a recording."""

    _esm = join_modules("widget.js")
    _css = read_asset("map.css")
    body = traitlets.Unicode(read_body()).tag(sync=True)
    address = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(640).tag(sync=True)

    def __init__(
        self, recording: Recording, *, address: str = "", height: int = 640
    ) -> None:
        """Show a recording; height: of the cell, in pixels."""
        self.recording, self.source = recording, MapSource(recording)
        self.pool = ThreadPoolExecutor(THREADS, "answers")
        if not (isinstance(height, int) and height > 0):
            raise OptionError(f"height={height!r}, expected pixels, as 640.")
        super().__init__(address=address, height=height)
        self.on_msg(lambda _, asked, __: self.pool.submit(self.reply, asked))

    def reply(self, asked: Any) -> None:
        """Answer a message, or send an error message."""
        number = asked.get("id")
        if asked.get("name") in WHOLE:
            self.source.prepare()
        try:
            found = answer(self.source, asked.get("name"), asked.get("place") or {})
        except RegardError as error:
            self.send({"id": number, "error": str(error)})
        except Exception as error:  # noqa: BLE001 (sent to the page)
            self.send({"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            codes = [found.to_bytes()] if isinstance(found, Sheet) else None
            about = found.describe() if isinstance(found, Sheet) else found
            # ASCII JSON, as a message must not contain lone surrogates
            self.send({"id": number, "text": json.dumps(about, allow_nan=False)}, codes)

    def close(self) -> None:
        """Stop all jobs and close the widget."""
        self.source.close()
        self.pool.shutdown(cancel_futures=True)
        super().close()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle, about = super()._repr_mimebundle_(**options) or ({}, {})
        return bundle | {"text/html": write_instead(self.recording, self.height)}, about


def write_instead(recording: Recording, height: int) -> str:
    """Return the HTML shown without widgets: a page if it is short, or a hint."""
    numbers = sum(
        x.q.shape[-1] * (x.q.shape[1] * 2) * x.heads for x in recording.records
    )
    if not 0 < numbers < SHORT:
        return f"<p>{html.escape(INSTEAD)}</p>"
    text = html.escape(make_page(recording).html.decode(), quote=True)
    style = f"width: 100%; height: {height}px; border: 0"
    frame = f'<iframe title="map" sandbox="allow-scripts" style="{style}"'
    return f'{frame} srcdoc="{text}"></iframe>'
