"""What was seen of a model, and what one can ask of it.

    with regard.watch(model) as seen:
        model.generate(...)
    print(seen)                 which layers were seen, through which door
    seen.layer(3).q             what one layer did with the first sequence
    seen.audit()                is there weight where none belongs?
    seen.table()                what every head did, in numbers
    seen.show()                 the map of all heads, in a browser
    seen.widget()               the same in a notebook; seen.page(path) in a file

Next: lens/watch.py
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import OptionError
from regard.record import Covered, Record, Recording
from regard.recording import open_recording, save_recording
from regard.spans import Offsets, Span, find_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from regard.audit.finding import Finding
    from regard.show.page import Page
    from regard.show.widget import MapWidget
    from regard.stats.table import Table


class Seen:
    """A recording, complete once its `with` is left."""

    def __init__(self, recording: Recording | None = None) -> None:
        self.found = recording

    @property
    def recording(self) -> Recording:
        """Everything that was caught."""
        if self.found is None:
            raise OptionError(
                "the model is still being watched. Ask after the `with`, or after a "
                "pass through the model if nothing was run in it."
            )
        return self.found

    @property
    def records(self) -> tuple[Record, ...]:
        """What every layer did with every sequence, by sequence, then by layer."""
        return self.recording.records

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers, in the order in which they were called."""
        return self.recording.layers

    def layer(self, which: int | str, *, sequence: int = 0) -> Record:
        """Return the record of a layer, by number or name, for one sequence."""
        return self.recording.layer(which, sequence=sequence)

    def coverage(self) -> tuple[Covered, ...]:
        """Return what became of every attention module."""
        return self.recording.coverage

    def spans(
        self, sections: Any, *, text: str, offsets: Offsets, sequence: int = 0
    ) -> tuple[Span, ...]:
        """Return which tokens of a sequence are a part of its text.

        sections: {name: (first character, one past the last)}, or {name: piece of the
            text}, or a list of pieces (documents), or the messages of a chat
        text: what was tokenised
        offsets: the characters of each token of it, without padding; tokenizers give
            them: tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        """
        sizes = [
            int(record.k_positions.shape[0])
            for record, number in zip(
                self.recording.records, self.recording.sequences, strict=True
            )
            if number == sequence
        ]
        if not sizes:
            raise OptionError(f"there is no sequence {sequence}.")
        known = self.recording.tokens[sequence : sequence + 1]
        n = len(known[0]) if known and known[0] else max(sizes)
        return find_spans(sections, text, [(a, b) for a, b in offsets], n)

    def audit(
        self,
        *,
        valid: Any = None,
        pad: int | None = None,
        documents: Any = None,
        expect: Any = None,
    ) -> tuple[Finding, ...]:
        """Return what is wrong with the attention that was seen, errors first.

        valid: (B, N), True for tokens, False for padding
        pad: the id of the padding token instead
        documents: ids (N,) or (B, N) of packed documents
        expect: a mask, or a mapping from patterns of layer names to masks
        """
        from regard.audit.audit import audit  # noqa: PLC0415 (it needs torch)

        return audit(
            self.recording, valid=valid, pad=pad, documents=documents, expect=expect
        )

    def table(self, *, progress: Callable[[int, int], object] | None = None) -> Table:
        """Return entropy, sink, distance, … of every head (stats/table.py).

        progress: called with the layers done, and all of them
        """
        from regard.stats.table import make_table  # noqa: PLC0415 (it needs torch)

        return make_table(self.recording, progress=progress)

    def label(self, decode: Callable[[list[int]], str]) -> Seen:
        """Return the same with the text of every token, as decode([token]) gives it."""
        found = self.recording
        texts = tuple(tuple(decode([i]) for i in row) for row in found.tokens)
        return Seen(replace(found, texts=texts))

    def show(self, *, browser: bool = True) -> None:
        """Show the zoomable map of all heads in a browser, until Ctrl-C."""
        from regard.show.server import serve  # noqa: PLC0415 (it needs starlette)

        serve(self.recording, browser=browser)

    def picture(
        self,
        picture: Any,
        *,
        grid: tuple[int, int] | None = None,
        sequence: int = 0,
    ) -> Seen:
        """Return the same with the picture of a vision model, for its map.

        picture: (H, W), (H, W, 3) or (3, H, W), as the model saw it or before
        grid: rows and columns of patches; unless given, the largest square that fits
        """
        from regard.show.picture import name_patches, note_picture  # noqa: PLC0415

        found = self.recording
        note = note_picture(found.layer(0, sequence=sequence), picture, grid)
        pictures = found.notes.get("pictures", {}) | {str(sequence): note}
        texts = [*found.texts, *[()] * (sequence + 1 - len(found.texts))]
        texts[sequence] = tuple(name_patches(note))
        notes = found.notes | {"pictures": pictures}
        return Seen(replace(found, notes=notes, texts=tuple(texts)))

    def widget(self, *, address: str = "", height: int = 640) -> MapWidget:
        """Return the map for a cell of a notebook.

        address: what to open, as a link to the map has it after the #: "l=18&h=8"
        height: of the cell, in pixels
        """
        from regard.show.widget import MapWidget  # noqa: PLC0415 (it needs anywidget)

        return MapWidget(self.recording, address=address, height=height)

    def page(
        self, path: str | Path, *, heads: Any = None, limit: int | None = None
    ) -> Page:
        """Write one HTML file that shows the heads without a server or a network.

        heads: numbers by layer, {18: [7, 8]}; all of all layers unless given
        limit: bytes of the file, 15 million unless given; what is rounded to keep it,
            the page says
        """
        from regard.show.page import make_page  # noqa: PLC0415 (it needs torch)

        page = make_page(self.recording, heads=heads, limit=limit)
        page.write(path)
        return page

    def save(self, path: str | Path) -> None:
        """Write the recording into one file."""
        save_recording(Path(path), self.recording)

    def __str__(self) -> str:
        found = self.recording
        kept = [x for x in found.coverage if x.door and not x.reason]
        of = f"{len(kept)} of {len(found.coverage)} attention layers seen"
        count = len(set(found.sequences))
        of = f"{of}, {count} sequence{'' if count == 1 else 's'}"
        lines = [f"{found.model}: {of}"]
        for x in found.coverage:
            calls = f"{x.calls} call{'' if x.calls == 1 else 's'}"
            about = f"{x.door}, {calls}, error {x.error:.0e}" if x.door else ""
            name = x.name or "the model itself"
            lines.append(f"  {name}: {' '.join(filter(None, (about, x.reason)))}")
        return "\n".join(lines)


@contextmanager
def watch(
    model: Any, *, layers: Collection[str] | None = None, keep: str = "qk"
) -> Iterator[Seen]:
    """Record the attention of a torch model inside a `with`; read the result after it.

    layers: names of the modules to record; all unless given
    keep: "qk", or "qkv" to keep the values too
    """
    from regard.lens.watch import capture  # noqa: PLC0415 (it needs torch)

    seen = Seen()
    with capture(model, layers=layers, keep=keep) as watcher:
        yield seen
    seen.found = watcher.recording


def open_seen(path: str | Path, *, verify: bool = False) -> Seen:
    """Open a recording that was saved with `seen.save(path)`.

    verify: hold all numbers against their checksums, as is always done in small files
    """
    return Seen(open_recording(Path(path), verify=verify))
