"""A recording as print() and a notebook show it: its model, and what was recorded.

    LlamaForCausalLM: 3 of 3 attention layers seen, 1 sequence
      model.layers.0.self_attn: sdpa, 1 call, error 4e-07

Next: coverage.py
"""

from __future__ import annotations

from regard.display import write_code, write_line
from regard.recording.coverage import Coverage
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
    others = Coverage(found.coverage).describe_others()
    return "\n".join([*lines, *(f"  {x}" for x in others)])


def write_recording(found: Recording) -> str:
    """Return a recording as HTML: its coverage as a table, and what to do next."""
    parts = [write_line(describe_recording(found), strong=True)]
    parts += map(write_line, describe_hidden(found))
    parts.append(Coverage(found.coverage).to_html())
    if any(found.tokens) and not any(found.texts):
        label = "seen = seen.label(tokenizer.decode)"
        parts.append(write_code("The tokens have no text:", label, "adds it."))
    calls = "seen.widget(), seen.table(), seen.audit(), seen.layer(0), seen.weights()"
    return "".join([*parts, write_code("Next:", calls)])
