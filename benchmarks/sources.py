"""How often `regard.sources` and ContextCite name the document of an answer.

    pip install context-cite      (context-cite 0.0.4, in a folder of its own)
    PYTHONPATH=FOLDER .venv/bin/python benchmarks/sources.py

It writes sources.json and docs/howto/read-a-rag-answer.md.

Forty questions on invented facts (invented_facts.py), each over five documents: the one
that states the fact, and four others. SmolLM2-135M-Instruct answers greedily. Of the
questions that it answers correctly, in how many is the right document the one with the
largest effect, with the largest mass, and with the largest attribution of ContextCite:
with its 64 ablations by default, and with as many as regard has passes?

The sentence of the answer with the fact is explained: some answers go on and copy other
documents. "whole" is the same for all of the answer. All run the same model in float32,
on the same prompts and answers. A forward pass is one sequence that the model is asked
to read. Tokens are what the model was given, counted in a hook: a cache saves some of
them. Generating the answer is not counted. Five documents have 32 subsets, so many of
the 64 ablations are equal: they are counted, but computed once, to save time.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from invented_facts import FACTS
from marks import fill
from smollm import find_smollm
from transformers import AutoModelForCausalLM, AutoTokenizer

import regard
from regard.attribution.sentences import split_sentences

DOCUMENTS, N_NEW = 5, 32
ABLATIONS = 64  # of ContextCite, by default
MARK = "<!-- benchmark:sources -->"


class Case(NamedTuple):
    """A question over documents, and which of them has its answer."""

    documents: list[str]
    question: str
    expected: str
    right: int


def make_cases() -> list[Case]:
    """Return a case for each fact; every place has equally many right documents."""
    found = []
    for i, (document, question, expected) in enumerate(FACTS):
        others = [x for x, _, answer in FACTS if answer != expected]
        documents = random.Random(i).sample(others, DOCUMENTS - 1)
        documents.insert(i % DOCUMENTS, document)
        found.append(Case(documents, question, expected, i % DOCUMENTS))
    return found


class Meter:
    """Counts what a model reads."""

    def __init__(self, model: Any) -> None:
        self.rows = self.tokens = 0
        model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, _model: Any, args: Any, named: Any) -> None:
        """Count a call."""
        rows, tokens = (args[0] if args else named["input_ids"]).shape
        self.rows, self.tokens = self.rows + rows, self.tokens + rows * tokens

    @contextlib.contextmanager
    def measure(self, into: dict[str, Any]) -> Iterator[None]:
        """Write what is read in the `with` into a dictionary."""
        rows, tokens = self.rows, self.tokens
        yield
        into |= {"rows": self.rows - rows, "tokens": self.tokens - tokens}


def run_contextcite(
    model: Any, words: Any, case: Case, *, answer: str, n: int, meter: Meter
) -> dict[str, Any]:
    """Return the number of the best document, and what it cost."""
    from context_cite import ContextCiter  # noqa: PLC0415 (for this run only)
    from context_cite.context_partitioner import BaseContextPartitioner  # noqa: PLC0415

    class Documents(BaseContextPartitioner):  # type: ignore[misc]
        """The documents are the sources."""

        num_sources = len(case.documents)

        def split_context(self) -> None:
            """Do nothing: they are given."""

        def get_source(self, index: int) -> str:
            """Return a document."""
            return case.documents[index]

        def get_context(self, mask: Any = None) -> str:
            """Return the documents that are not ablated."""
            kept = [True] * len(case.documents) if mask is None else mask
            pairs = zip(case.documents, kept, strict=True)
            return "\n".join(document for document, keep in pairs if keep)

    context = "\n".join(case.documents)
    citer = ContextCiter(
        model,
        words,
        context,
        case.question,
        partitioner=Documents(context),
        prompt_template="{context}\n\n{query}",
        num_ablations=n,
    )
    text = citer._get_prompt_ids(return_prompt=True)[1]  # noqa: SLF001
    citer._cache["output"] = text + answer  # noqa: SLF001 (the same answer for all)
    start = answer.lower().index(case.expected)
    stops = [x for x in split_sentences(answer) if x > start]
    begins = [0, *(x for x in split_sentences(answer) if x <= start)]
    found: dict[str, Any] = {}
    with contextlib.redirect_stderr(io.StringIO()), meter.measure(found):
        scores = citer.get_attributions(begins[-1], stops[0], verbose=False)
        whole = citer.get_attributions(verbose=False)
    return {**found, "best": find_best(scores), "whole": find_best(whole)}


def find_best(scores: Any) -> int | None:
    """Return the number of the largest attribution, None if none is positive."""
    best = int(scores.argmax())
    return best if scores[best] > 0 else None


@contextlib.contextmanager
def compute_once(model: Any) -> Iterator[None]:
    """Compute equal calls of a model once, while the `with` lasts."""
    forward, known = model.forward, {}

    def look_up(*args: Any, **named: Any) -> Any:
        key = tuple(named["input_ids"].flatten().tolist())
        if key not in known:
            known[key] = forward(*args, **named)
        return known[key]

    model.forward = look_up
    try:
        yield
    finally:
        model.forward = forward


def run_regard(model: Any, words: Any, case: Case, answer: str, meter: Meter) -> Any:
    """Return the best documents by effect and by mass, and what it cost."""
    content = "\n".join(case.documents) + "\n\n" + case.question
    messages = [{"role": "user", "content": content}]
    cost: dict[str, Any] = {}
    with meter.measure(cost):
        found = regard.sources(model, words, messages, case.documents, answer=answer)
    all_of_it = found.answer
    part = next(x for x in found.sentences if case.expected in x.text.lower())
    best = {"effect": part.most_effect, "mass": part.most_mass}
    whole = {"effect": all_of_it.most_effect, "mass": all_of_it.most_mass}
    more = {"passes": found.passes, "warning": found.warn(part)}
    return {**cost, **best, **more, "whole": whole}


def write_answer(model: Any, words: Any, case: Case) -> str:
    """Return the greedy answer of the model."""
    content = "\n".join(case.documents) + "\n\n" + case.question
    text = words.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids = words(text, add_special_tokens=False, return_tensors="pt")
    with torch.no_grad():
        done = model.generate(**ids, max_new_tokens=N_NEW, do_sample=False)
    new = done[0, ids["input_ids"].shape[1] :]
    return str(words.decode(new, skip_special_tokens=True))


def summarize(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the shares of right documents, and the mean costs."""
    kept = [x for x in cases if x["is_answered"]]

    def count(best: Any) -> int:
        return sum(best(x) == x["right"] for x in kept)

    def average(where: str, what: str) -> float:
        return sum(x[where][what] for x in kept) / len(kept)

    found: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "asked": len(cases),
        "documents": DOCUMENTS,
        "answered": len(kept),
        "effect": {
            "right": count(lambda x: x["regard"]["effect"]),
            "whole": count(lambda x: x["regard"]["whole"]["effect"]),
        },
        "mass": {
            "right": count(lambda x: x["regard"]["mass"]),
            "whole": count(lambda x: x["regard"]["whole"]["mass"]),
        },
        "warnings": sum(bool(x["regard"]["warning"]) for x in kept),
    }
    found["effect"] |= {what: average("regard", what) for what in ("passes", "tokens")}
    for name in ("contextcite", "contextcite_few"):
        if name in kept[-1]:  # it ran
            found[name] = {
                "right": count(lambda x, name=name: x[name]["best"]),
                "whole": count(lambda x, name=name: x[name]["whole"]),
                "passes": average(name, "rows"),
                "tokens": average(name, "tokens"),
            }
    return found


def render(found: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    n = found["answered"]
    lines = [
        f"| {n} answers | sentence with the fact | whole answer | passes | tokens |",
        "|---|---|---|---|---|",
    ]
    rows = [
        ("largest effect", found["effect"]),
        ("largest mass", {**found["mass"], "passes": 1, "tokens": None}),
        ("ContextCite, by default", found.get("contextcite")),
        ("ContextCite, as many passes", found.get("contextcite_few")),
    ]
    for name, row in rows:
        if row is not None:
            tokens = "" if row["tokens"] is None else f"{row['tokens']:,.0f}"
            share = f"{row['right']} of {n} ({row['right'] / n:.0%}) | {row['whole']}"
            lines.append(f"| {name} | {share} | {row['passes']:.0f} | {tokens} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the result."""
    path = find_smollm()
    both = (path.parent, path.name)
    model = AutoModelForCausalLM.from_pretrained(
        both[0], gguf_file=both[1], dtype=torch.float32
    ).eval()
    words = AutoTokenizer.from_pretrained(both[0], gguf_file=both[1])
    meter, cases = Meter(model), make_cases()
    rows = []

    def cite(case: Case, answer: str, n: int) -> dict[str, Any]:
        with compute_once(model):
            return run_contextcite(model, words, case, answer=answer, n=n, meter=meter)

    for case in cases:
        answer = write_answer(model, words, case)
        row: dict[str, Any] = {
            "question": case.question,
            "answer": answer,
            "right": case.right,
            "is_answered": case.expected in answer.lower(),
        }
        if row["is_answered"]:
            row["regard"] = run_regard(model, words, case, answer, meter)
            n = row["regard"]["passes"]
            row["contextcite_few"] = cite(case, answer, n)
        rows.append(row)
        tell(row)
    write_result(rows)
    for case, row in zip(cases, rows, strict=True):  # the longest part comes last
        if row["is_answered"]:
            row["contextcite"] = cite(case, row["answer"], ABLATIONS)
            tell(row)
    write_result(rows)


def tell(found: dict[str, Any]) -> None:
    """Print a result on one line."""
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def write_result(rows: list[dict[str, Any]]) -> None:
    """Write what is known so far into the result and the page."""
    found = summarize(rows)
    tell(found)
    text = json.dumps({**found, "cases": rows}, indent=1)
    Path(__file__).with_suffix(".json").write_text(f"{text}\n", encoding="utf-8")
    fill("docs/howto/read-a-rag-answer.md", MARK, render(found))


if __name__ == "__main__":
    main()
