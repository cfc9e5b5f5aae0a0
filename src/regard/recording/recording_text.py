"""A recording as print() and a notebook show it: its model, and what was recorded.

    LlamaForCausalLM: 3 of 3 attention layers seen, 1 sequence
      model.layers.0.self_attn: sdpa, 1 call, error 4e-07
      …
      certified: 96 rows sampled (every head of every call), 0 failed, 0 cannot tell;
      3 of 3 layers, 24 of 24 rows kept

Next: coverage.py
"""

from __future__ import annotations

from collections import Counter

from regard.display import write_code, write_line
from regard.recording.coverage import Coverage
from regard.recording.evidence import Certificate
from regard.recording.hidden_tokens import describe_hidden
from regard.recording.record import Recording


def describe_recording(found: Recording) -> str:
    """Return the first line: the model, its layers and sequences."""
    layers = [x for x in found.coverage if x.attention]
    kept = [x for x in layers if x.via and not x.reason]
    count = len(set(found.sequences))
    of = f"{len(kept)} of {len(layers)} attention layers seen"
    return f"{found.model}: {of}, {count} sequence{'' if count == 1 else 's'}"


def print_recording(found: Recording) -> str:
    """Return a recording as text, a line for each layer."""
    lines = [describe_recording(found), *(f"  {x}" for x in describe_hidden(found))]
    lines += [f"  {x}" for x in found.coverage if x.attention]
    others = Coverage(found.coverage).describe_others() + describe_certificates(found)
    return "\n".join([*lines, *(f"  {x}" for x in others)])


def describe_certificates(found: Recording) -> list[str]:
    """Return a line about what was checked; none if nothing was recorded."""
    layers: dict[str, list[Certificate | None]] = {}
    for record in found.records:
        if record.shape[1]:  # of padding alone, there is nothing to check
            layers.setdefault(record.name, []).append(record.certificate)
    if not layers:
        return []
    kept = {x.name: x for x in found.coverage if x.attention and x.name in layers}
    rows, in_records = (
        sum(getattr(x, name) for x in kept.values()) for name in ("rows", "in_records")
    )
    told = [x for several in layers.values() for x in several if x is not None]
    whole = sum(None not in several for several in layers.values())
    if not told:
        return ["not certified: nothing is known of these rows but the record itself"]
    count, failed, unknown = (
        sum(getattr(x, name) for x in told) for name in ("rows", "failed", "unknown")
    )
    left = Counter[str]()
    for x in kept.values():
        left.update(x.left_out)
    also = "".join(f", {n:,} {why}" for why, n in left.items())
    line = (
        f"certified: {count:,} rows sampled (every head of every call), {failed:,} "
        f"failed, {unknown:,} cannot tell; {whole} of {len(layers)} layers, "
        f"{in_records:,} of {rows:,} rows kept{also}"
    )
    return [line]


def write_recording(found: Recording) -> str:
    """Return a recording as HTML: its coverage as a table, and what to do next."""
    parts = [write_line(describe_recording(found), strong=True)]
    parts += map(write_line, describe_hidden(found))
    parts.append(Coverage(found.coverage).to_html())
    parts += map(write_line, describe_certificates(found))
    if any(found.tokens) and not any(found.texts):
        label = "seen = seen.label(tokenizer.decode)"
        parts.append(write_code("The tokens have no text:", label, "adds it."))
    calls = "seen.widget(), seen.table(), seen.audit(), seen.layer(0), seen.weights()"
    return "".join([*parts, write_code("Next:", calls)])
