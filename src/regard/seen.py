"""The main interface to a recording: `regard.watch`, `regard.open` and `Seen`.

    with regard.watch(model) as seen:
        model.generate(...)
    print(seen)                 coverage: which layers were recorded, and how
    seen.layer(3).q             the record of one layer, for the first sequence
    seen.weights()              (layers, heads, queries, keys)
    seen.attentions             the tuple of a transformers model
    seen.audit()                find attention where there should be none
    seen.table()                statistics of every head
    seen.show()                 the map of all heads, in a browser
    seen.widget()               the map in a notebook; seen.page(path) in a file

Next: lens/watch.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, overload

import numpy as np

from regard.arguments import expect_function, expect_with, find_words, suggest
from regard.arrays import Array, to_numpy
from regard.definition.contract import ALL
from regard.display import Displayed
from regard.errors import OptionError
from regard.recording.coverage import Coverage
from regard.recording.dense_weights import list_attentions, stack_weights
from regard.recording.file import open_recording, save_recording
from regard.recording.indices import Index
from regard.recording.record import Record, Recording
from regard.recording.recording_text import (
    describe_recording,
    print_recording,
    write_recording,
)
from regard.recording.spans import Offsets, Span, find_spans
from regard.recording.token_texts import label_tokens
from regard.serving.find_capture import find_capture

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from regard.audit.finding import Findings
    from regard.show.page import Page
    from regard.show.widget import MapWidget
    from regard.stats.comparison import HeadComparison
    from regard.stats.table import HeadTable


class Seen(Displayed):
    """A recording with its analyses; complete after the `with` block."""

    def __init__(self, recording: Recording | None = None) -> None:
        self.found = recording

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"Seen has no .{name}. {find_words(Seen)}")

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

    @overload
    def layer(self, which: int | str, *, sequence: int = 0) -> Record: ...

    @overload
    def layer(self, which: Any, *, sequence: int = 0) -> tuple[Record, ...]: ...

    @suggest
    def layer(self, which: Any, *, sequence: int = 0) -> Any:
        """Return the record of a layer, by number or name, for one sequence.

        which: a list, a slice or an array of them gives a tuple of records
        """
        return self.recording.layer(which, sequence=sequence)

    def weights(
        self,
        layers: Index = ALL,
        *,
        heads: Index = ALL,
        rows: Index = ALL,
        keys: Index = ALL,
        sequence: int = 0,
    ) -> Array:
        """Return the weights of a sequence, (layers, heads, rows, keys).

        layers: a number or a name, or several of them
        heads, rows, keys: an int, a slice, a list or an array; an int leaves out
            its axis

        Raises ShapeError if the layers differ in shape; warns about more than a GB.
        """
        return stack_weights(
            self.recording, layers, heads=heads, rows=rows, keys=keys, sequence=sequence
        )

    @property
    def attentions(self) -> tuple[Array, ...]:
        """The weights as a transformers model returns them: (B, H, Nq, Nk) by layer.

        They equal model(..., output_attentions=True).attentions, except that rows of
        padding are 0. Of an encoder-decoder, these are the layers of the encoder, then
        self- and cross-attention of each layer of the decoder in turn. A generation is
        one array for all of its steps. Sequences of different length from several
        calls are filled up with zeros. Computed at every access.
        """
        return list_attentions(self.recording)

    def to(self, library: Any) -> Seen:
        """Return a copy with arrays of "numpy", "torch" or "jax", or of a module."""
        found = self.recording
        records = tuple(record.to(library) for record in found.records)
        return Seen(replace(found, records=records))

    def coverage(self) -> Coverage:
        """Return the coverage of every attention module, a tuple of Covered."""
        return Coverage(self.recording.coverage)

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
        sequence = self.recording.find_sequence(sequence)
        sizes = [x.shape[2] for x in self.layer(ALL, sequence=sequence)]
        known = self.recording.tokens[sequence : sequence + 1]
        n = len(known[0]) if known and known[0] else max(sizes, default=0)
        return find_spans(sections, text, [(a, b) for a, b in offsets], n)

    def mark(self, spans: Iterable[Span], *, sequence: int = 0) -> Seen:
        """Return a copy whose text view has these spans as blocks with their names.

        seen.mark(seen.spans(sections, text=text, offsets=offsets))
        """
        from regard.show.text_blocks import mark_spans  # noqa: PLC0415

        return Seen(mark_spans(self.recording, spans, sequence))

    @suggest
    def audit(
        self,
        *,
        valid: Any = None,
        pad: int | None = None,
        documents: Any = None,
        expect: Any = None,
    ) -> Findings:
        """Return problems found in the recorded attention, errors first.

        valid: (B, N), True for tokens, False for padding
        pad: the id of the padding token, as an alternative to valid
        documents: ids (N,) or (B, N) of packed documents
        expect: a mask, or a mapping from patterns of layer names to masks
        """
        from regard.audit.audit import audit  # noqa: PLC0415 (it needs torch)
        from regard.audit.finding import Findings  # noqa: PLC0415

        found = self.recording
        return Findings(
            audit(found, valid=valid, pad=pad, documents=documents, expect=expect)
        )

    @suggest
    def table(
        self, *, progress: Callable[[int, int], object] | None = None
    ) -> HeadTable:
        """Return entropy, sink, distance, … of every head (stats/table.py).

        progress: called with the number of layers done and the total
        """
        from regard.stats.table import make_table  # noqa: PLC0415 (it needs torch)

        return make_table(self.recording, progress=progress)

    @suggest
    def label(self, decode: Callable[[list[int]], str]) -> Seen:
        """Return a copy with the text of every token, decode([token])."""
        expect_function("decode", decode, "tokens")
        return Seen(label_tokens(self.recording, decode))

    @suggest
    def show(
        self, *, browser: bool = True, host: str | None = None, port: int = 0
    ) -> None:
        """Serve the zoomable map of all heads in a browser, until Ctrl-C.

        host: the address to listen on; 127.0.0.1 by default, for this machine only
        port: 0 for any free port
        """
        from regard.show.server import serve  # noqa: PLC0415 (it needs starlette)

        serve(self.recording, browser=browser, host=host, port=port)

    def picture(
        self,
        picture: Any,
        *,
        grid: tuple[int, int] | None = None,
        tokens: Any = None,
        sequence: int = 0,
    ) -> Seen:
        """Return a copy with an image that the model read, shown in the map.

            seen.picture(pixels[0], grid=(24, 24), tokens=ids[0] == image_token_id)

        picture: (H, W), (H, W, 3) or (3, H, W); as the processor cropped it
        grid: rows and columns of patches; default: the largest square that fits
        tokens: of an image-text model, the positions of the image's tokens, row by
            row, or which tokens they are; the image is shown beside the text
        """
        from regard.show.vision_input import add_picture  # noqa: PLC0415

        note: Any = {"grid": grid, "tokens": tokens, "sequence": sequence}
        return Seen(add_picture(self.recording, picture, **note))

    def sound(
        self,
        sound: Any,
        seconds: float,
        *,
        until: float | None = None,
        words: Sequence[str] = (),
        sequence: int = 0,
    ) -> Seen:
        """Return a copy with the sound that an audio model heard, shown on a time axis.

        sound: (features, frames), the spectrogram, or (samples,), of all the seconds
        seconds: that the keys of the encoder cover: 30 for Whisper
        until: the end of the time axis, where the sound ends
        words: a text for each token of the decoder, to align with the time
        """
        from regard.show.sound_input import add_sound  # noqa: PLC0415

        note: Any = {"until": until, "words": words, "sequence": sequence}
        return Seen(add_sound(self.recording, sound, seconds, **note))

    @suggest
    def beside(
        self, other: Any, *, names: tuple[str, str] = ("A", "B"), spans: Any = None
    ) -> Seen:
        """Return both runs as one, to be shown together with their difference.

            before.beside(after, names=("before", "after")).page("two.html")

        other: what `watch` or `open` returned, or the path of a saved recording
        names: what the two are called
        spans: (spans of self, spans of other), to align tokens inside of these only
        """
        from regard.show.compare_recordings import join_recordings  # noqa: PLC0415

        found = read_recording(other)
        return Seen(join_recordings(self.recording, found, names=names, spans=spans))

    def widget(self, *, address: str = "", height: int = 640) -> MapWidget:
        """Return the map as a notebook widget.

        address: the view to open, as after the # in a link to the map: "l=18&h=8"
        height: the height in pixels
        """
        from regard.show.widget import MapWidget  # noqa: PLC0415 (it needs anywidget)

        return MapWidget(self.recording, address=address, height=height)

    @suggest
    def page(
        self, path: str | Path, *, heads: Any = None, limit: int | None = None
    ) -> Page:
        """Write a self-contained HTML file of the map, which needs no server.

        heads: heads by layer, {18: [7, 8], 3: None}; default: all heads of all layers
        limit: maximum bytes of the file, by default 15 million; the page states what
            was rounded to stay below it, or that it is an overview with the cells of
            the strongest heads
        """
        from regard.show.page import make_page  # noqa: PLC0415 (it needs torch)

        page = make_page(self.recording, heads=heads, limit=limit)
        page.write(path)
        return page

    @suggest
    def save(self, path: str | Path) -> None:
        """Save the recording to a file."""
        save_recording(Path(path), self.recording)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the weights as a NumPy array, (layers, H, Nq, Nk)."""
        weights = to_numpy(stack_weights(self.recording))
        return np.asarray(weights, dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return print_recording(self.recording)

    def describe(self) -> str:
        """Return the first line of print(seen): the model, its layers and sequences."""
        return describe_recording(self.recording)

    def to_html(self) -> str:
        """Return the coverage as a table, and what to do next."""
        return write_recording(self.recording)


@expect_with
@suggest
def watch(
    model: Any,
    *,
    layers: Collection[int | str] | None = None,
    keep: str = "qk",
    store: str = "device",
) -> Iterator[Seen]:
    """Record the attention of a model in a `with` block; read the result after.

    model: a torch.nn.Module, a vllm.LLM or a llama_cpp.Llama
    layers: numbers in the order in which layers attend, or names of modules that are
        or contain them; default: all
    keep: "qk", or "qkv" to record the values too
    store: "host" moves what is recorded off the device of a torch model as it arrives
    """
    if keep not in ("qk", "qkv"):
        raise OptionError(f'keep="{keep}", expected "qk" or "qkv".')
    seen, watcher = Seen(), None
    try:
        capture = find_capture(model, store)
        with capture(model, layers=layers, keep=keep) as watcher:
            yield seen
    finally:  # also if an exception leaves the block
        if watcher is not None:
            seen.found = watcher.recording


@suggest
def open_seen(path: str | Path, *, verify: bool = False) -> Seen:
    """Open a recording that was saved with `seen.save(path)`.

    verify: check all arrays against their checksums, as always done for small files
    """
    if not isinstance(path, str | Path):
        raise OptionError(
            f"open() got a {type(path).__name__}, expected the path of a recording "
            "that was saved with seen.save(path)."
        )
    return Seen(open_recording(Path(path), verify=verify))


@suggest
def compare_seen(one: Any, other: Any, *, spans: Any = None) -> HeadComparison:
    """Compare the heads of two recordings: two checkpoints, or two prompts.

        print(regard.compare(before, after).sort("moved").head())

    one, other: what `watch` or `open` returned, or the path of a saved recording
    spans: (spans of one, spans of other), to compare the mass between named spans;
        by default different prompts are aligned by a diff of their tokens
    """
    from regard.stats.comparison import compare_heads  # noqa: PLC0415 (it needs torch)

    return compare_heads(read_recording(one), read_recording(other), spans=spans)


def read_recording(x: Any) -> Recording:
    """Return a recording, from what a user has of it."""
    if isinstance(x, str | Path):
        return open_seen(x).recording
    if isinstance(x, Seen):
        return x.recording
    if isinstance(x, Recording):
        return x
    raise OptionError(
        f"compare() got a {type(x).__name__}, expected two recordings: what "
        "`with regard.watch(model) as seen:` returned, or regard.open(path)."
    )
