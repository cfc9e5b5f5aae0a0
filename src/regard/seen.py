"""What was seen of a model, and what one can ask of it.

    with regard.watch(model) as seen:
        model.generate(...)
    print(seen)                 which layers were seen, through which door
    seen.layer(3).q             what one layer did with the first sequence

Next: lens/watch.py
"""

from __future__ import annotations

from pathlib import Path

from regard.errors import OptionError
from regard.record import Covered, Record, Recording
from regard.recording import open_recording, save_recording


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
    def layers(self) -> tuple[str, ...]:
        """The names of the layers that were seen, in the order in which they spoke."""
        return tuple(dict.fromkeys(record.name for record in self.recording.records))

    def layer(self, which: int | str, *, sequence: int = 0) -> Record:
        """Return what a layer, by number or name, did with a sequence."""
        names = self.layers
        if isinstance(which, int) and -len(names) <= which < len(names):
            which = names[which]
        pairs = zip(self.recording.records, self.recording.sequences, strict=True)
        for record, number in pairs:
            if record.name == which and number == sequence:
                return record
        last = max(self.recording.sequences, default=-1)
        raise OptionError(
            f"there is no layer {which!r} with sequence {sequence}; there are "
            f"{len(names)} layers (seen.layers names them) and sequences 0 to {last}."
        )

    def coverage(self) -> tuple[Covered, ...]:
        """Return what became of every attention module."""
        return self.recording.coverage

    def save(self, path: str | Path) -> None:
        """Write the recording into one file."""
        save_recording(Path(path), self.recording)

    def __str__(self) -> str:
        found = self.recording
        seen = [x for x in found.coverage if x.door]
        of = f"{len(seen)} of {len(found.coverage)} attention layers seen"
        lines = [f"{found.model}: {of}, {len(set(found.sequences))} sequences"]
        for x in found.coverage:
            about = f"{x.door}, {x.calls} calls, error {x.error:.0e}" if x.door else ""
            lines.append(f"  {x.name}: {' '.join(filter(None, (about, x.reason)))}")
        return "\n".join(lines)


def open_seen(path: str | Path) -> Seen:
    """Open a recording that was saved with `seen.save(path)`."""
    return Seen(open_recording(Path(path)))
