"""The main interface to a recording: `regard.watch`, `regard.open` and `Seen`.

    with regard.watch(model) as seen:
        model.generate(...)
    print(seen)                 coverage: which layers were recorded, and how
    seen.layer(3).q             the record of one layer, for the first sequence
    seen.audit()                find attention where there should be none
    seen.table()                statistics of every head
    seen.show()                 the map of all heads, in a browser
    seen.widget()               the map in a notebook; seen.page(path) in a file

Next: lens/watch.py
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import OptionError
from regard.recording.file import open_recording, save_recording
from regard.recording.hidden_tokens import describe_hidden
from regard.recording.record import Covered, Record, Recording
from regard.recording.spans import Offsets, Span, find_spans
from regard.serving.engine import Capture, match_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from regard.audit.finding import Finding
    from regard.show.page import Page
    from regard.show.widget import MapWidget
    from regard.stats.table import HeadTable


class Seen:
    """A recording with its analyses; complete after the `with` block."""

    def __init__(self, recording: Recording | None = None) -> None:
        self.found = recording

    @property
    def recording(self) -> Recording:
        """The recording; raises OptionError inside the `with` block."""
        if self.found is None:
            raise OptionError(
                "the model is still being watched. Read the results after the `with` "
                "block; run the model inside of it."
            )
        return self.found

    @property
    def records(self) -> tuple[Record, ...]:
        """The records of all layers and sequences, by sequence, then by layer."""
        return self.recording.records

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the recorded layers, in the order in which they were called."""
        return self.recording.layers

    def layer(self, which: int | str, *, sequence: int = 0) -> Record:
        """Return the record of a layer, by number or name, for one sequence."""
        return self.recording.layer(which, sequence=sequence)

    def coverage(self) -> tuple[Covered, ...]:
        """Return the coverage of every attention module."""
        return self.recording.coverage

    def spans(
        self, sections: Any, *, text: str, offsets: Offsets, sequence: int = 0
    ) -> tuple[Span, ...]:
        """Return the tokens of each section of a sequence's text.

        sections: {name: (first character, one past the last)}, or {name: substring}, or
            a list of substrings (documents), or the messages of a chat
        text: the text that was tokenized
        offsets: the character range of each token, without padding, as returned by
            tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
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
        """Return problems found in the recorded attention, errors first.

        valid: (B, N), True for tokens, False for padding
        pad: the id of the padding token, as an alternative to valid
        documents: ids (N,) or (B, N) of packed documents
        expect: a mask, or a mapping from patterns of layer names to masks
        """
        from regard.audit.audit import audit  # noqa: PLC0415 (it needs torch)

        return audit(
            self.recording, valid=valid, pad=pad, documents=documents, expect=expect
        )

    def table(
        self, *, progress: Callable[[int, int], object] | None = None
    ) -> HeadTable:
        """Return entropy, sink, distance, … of every head (stats/table.py).

        progress: called with the number of layers done and the total
        """
        from regard.stats.table import make_table  # noqa: PLC0415 (it needs torch)

        return make_table(self.recording, progress=progress)

    def label(self, decode: Callable[[list[int]], str]) -> Seen:
        """Return a copy with the text of every token, decode([token])."""
        found = self.recording
        texts = tuple(tuple(decode([i]) for i in row) for row in found.tokens)
        return Seen(replace(found, texts=texts))

    def show(self, *, browser: bool = True) -> None:
        """Serve the zoomable map of all heads in a browser, until Ctrl-C."""
        from regard.show.server import serve  # noqa: PLC0415 (it needs starlette)

        serve(self.recording, browser=browser)

    def picture(
        self,
        picture: Any,
        *,
        grid: tuple[int, int] | None = None,
        sequence: int = 0,
    ) -> Seen:
        """Return a copy with the input image of a vision model, shown in the map.

        picture: (H, W), (H, W, 3) or (3, H, W), before or after preprocessing
        grid: rows and columns of patches; default: the largest square that fits
        """
        from regard.show.vision_input import name_patches, note_picture  # noqa: PLC0415

        found = self.recording
        note = note_picture(found.layer(0, sequence=sequence), picture, grid)
        pictures = found.notes.get("pictures", {}) | {str(sequence): note}
        texts = [*found.texts, *[()] * (sequence + 1 - len(found.texts))]
        texts[sequence] = tuple(name_patches(note))
        notes = found.notes | {"pictures": pictures}
        return Seen(replace(found, notes=notes, texts=tuple(texts)))

    def widget(self, *, address: str = "", height: int = 640) -> MapWidget:
        """Return the map as a notebook widget.

        address: the view to open, as after the # in a link to the map: "l=18&h=8"
        height: the height in pixels
        """
        from regard.show.widget import MapWidget  # noqa: PLC0415 (it needs anywidget)

        return MapWidget(self.recording, address=address, height=height)

    def page(
        self, path: str | Path, *, heads: Any = None, limit: int | None = None
    ) -> Page:
        """Write a self-contained HTML file of the map, which needs no server.

        heads: heads by layer, {18: [7, 8]}; default: all heads of all layers
        limit: maximum bytes of the file, by default 15 million; the page states what
            was rounded to stay below it
        """
        from regard.show.page import make_page  # noqa: PLC0415 (it needs torch)

        page = make_page(self.recording, heads=heads, limit=limit)
        page.write(path)
        return page

    def save(self, path: str | Path) -> None:
        """Save the recording to a file."""
        save_recording(Path(path), self.recording)

    def __str__(self) -> str:
        found = self.recording
        layers = [x for x in found.coverage if x.attention]
        kept = [x for x in layers if x.via and not x.reason]
        of = f"{len(kept)} of {len(layers)} attention layers seen"
        count = len(set(found.sequences))
        of = f"{of}, {count} sequence{'' if count == 1 else 's'}"
        lines = [f"{found.model}: {of}"]
        lines += [f"  {x}" for x in describe_hidden(found)]
        for x in layers:
            calls = f"{x.calls} call{'' if x.calls == 1 else 's'}"
            about = f"{x.via}, {calls}, error {x.error:.0e}" if x.via else ""
            name = x.name or "the model itself"
            note = f"({x.note})" if x.note else ""
            said = " ".join(filter(None, (about, x.reason, note)))
            lines.append(f"  {name}: {said}")
        others = sum(x.calls for x in found.coverage if not x.attention)
        if others:
            lines.append(f"  {others} other softmaxes: gates, routers or outputs")
        lines += [
            f"  {x.reason}" for x in found.coverage if not x.attention and not x.via
        ]
        return "\n".join(lines)


@contextmanager
def watch(
    model: Any, *, layers: Collection[str] | None = None, keep: str = "qk"
) -> Iterator[Seen]:
    """Record the attention of a model in a `with` block; read the result after.

    model: a torch.nn.Module, or an engine that serves one (vllm.LLM, llama_cpp.Llama)
    layers: names of the modules to record; default: all
    keep: "qk", or "qkv" to record the values too
    """
    seen, watcher = Seen(), None
    try:
        with find_capture(model)(model, layers=layers, keep=keep) as watcher:
            yield seen
    finally:  # also if an exception leaves the block
        if watcher is not None:
            seen.found = watcher.recording


def find_capture(model: Any) -> Capture:
    """Return the function that watches this kind of model."""
    engine = match_engine(model)
    if engine is not None:
        return engine.capture
    from regard.lens.watch import capture  # noqa: PLC0415 (it needs torch)

    return capture


def open_seen(path: str | Path, *, verify: bool = False) -> Seen:
    """Open a recording that was saved with `seen.save(path)`.

    verify: check all arrays against their checksums, as always done for small files
    """
    return Seen(open_recording(Path(path), verify=verify))
