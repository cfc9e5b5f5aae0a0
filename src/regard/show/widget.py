"""The map in a cell of a notebook: JupyterLab, marimo, VS Code.

    seen.widget()                     the last line of a cell
    seen.widget(address="l=18&h=8")   opens at a head; `address` follows what is shown

    widget.js ─▶ message {id, name, place} ─▶ map_requests.py ─▶ {id, text} and codes

Answers are made in threads, so a map is used while the next cell is written. Where a
notebook shows no widgets, a short recording is there as a page, and a long one says how
to write one.

Next: map_requests.py
"""

from __future__ import annotations

import html
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from regard.errors import OptionError, RegardError
from regard.recording.record import Recording
from regard.show.map_requests import answer
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
SHORT = 2_000_000  # numbers of q and k that make a page of a few MB
INSTEAD = 'This notebook shows no widgets: seen.page("map.html") writes the map.'


class MapWidget(anywidget.AnyWidget):
    """All heads of a recording."""

    _esm = join_modules("widget.js")
    _css = read_asset("map.css")
    body = traitlets.Unicode(read_body()).tag(sync=True)
    address = traitlets.Unicode("").tag(sync=True)
    height = traitlets.Int(640).tag(sync=True)

    def __init__(
        self, recording: Recording, *, address: str = "", height: int = 640
    ) -> None:
        """Show a recording; height is that of the cell, in pixels."""
        self.recording, self.source = recording, MapSource(recording)
        self.pool = ThreadPoolExecutor(THREADS, "answers")
        if not (isinstance(height, int) and height > 0):
            raise OptionError(f"height={height!r}, expected pixels, as 640.")
        super().__init__(address=address, height=height)
        self.source.prepare()
        self.on_msg(lambda _, asked, __: self.pool.submit(self.reply, asked))

    def reply(self, asked: Any) -> None:
        """Answer a message, or say in a sentence why not."""
        number = asked.get("id")
        try:
            found = answer(self.source, asked.get("name"), asked.get("place") or {})
        except RegardError as error:
            self.send({"id": number, "error": str(error)})
        except Exception as error:  # noqa: BLE001 (who asked must hear of it)
            self.send({"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            codes = [found.to_bytes()] if isinstance(found, Sheet) else None
            about = found.describe() if isinstance(found, Sheet) else found
            # as ASCII: a message must not hold halves of an emoji
            self.send({"id": number, "text": json.dumps(about, allow_nan=False)}, codes)

    def close(self) -> None:
        """End all work, and leave the notebook."""
        self.source.close()
        self.pool.shutdown(cancel_futures=True)
        super().close()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle, about = super()._repr_mimebundle_(**options) or ({}, {})
        return bundle | {"text/html": write_instead(self.recording, self.height)}, about


def write_instead(recording: Recording, height: int) -> str:
    """Return what is shown where there are no widgets: a page, if it is short."""
    numbers = sum(
        x.q.shape[-1] * (x.q.shape[1] * 2) * x.heads for x in recording.records
    )
    if not 0 < numbers < SHORT:
        return f"<p>{html.escape(INSTEAD)}</p>"
    text = html.escape(make_page(recording).html.decode(), quote=True)
    style = f"width: 100%; height: {height}px; border: 0"
    frame = f'<iframe title="map" sandbox="allow-scripts" style="{style}"'
    return f'{frame} srcdoc="{text}"></iframe>'
