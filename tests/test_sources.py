"""The sources of an answer: exact mass, and effects as a loop with 4-d masks has them."""

import os
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
import transformers
from tiny_models import CHAT, make_tokenizer
from torch.nn import functional as F  # noqa: N812

import regard
from regard.ablate.knock_out import knock_out
from regard.attribution import AnswerPart, SourceDocument, Sources, hidden_documents
from regard.attribution.sentences import find_sentences, split_sentences
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.nn.tokens import Tokenizer
from regard.nn.weights import load
from regard.recording.spans import Span

SIZES = {"vocab_size": 17, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **SIZES,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {**SIZES, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
DOCUMENTS = ["the cat sat on the mat .", "a dog ran .", "the dog sat on a cat : mat"]
QUESTION = "the mat :"
MESSAGES = [{"role": "user", "content": "\n".join([*DOCUMENTS, QUESTION])}]
ANSWER = " the dog ran . a cat sat ."


def build_llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def build_window():
    """Return a model whose second half of layers attends to the last 6 tokens."""
    more = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA, **more))


def build_gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))


BUILD = {"llama": build_llama, "window": build_window, "gpt2": build_gpt2}


def make_network(build):
    torch.manual_seed(3)
    network = build().double().eval()
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)  # weights that are not uniform
    return network


def make_words(*, is_ours=False, template=CHAT):
    theirs = make_tokenizer(ends=False, template=template)
    if not is_ours:
        return theirs
    core = theirs.backend_tokenizer
    return Tokenizer(core, template=template, stop=frozenset([2]))


def find_places(words):
    """Return the tokens of the prompt and the answer, and those of each document."""
    text = "user : " + MESSAGES[0]["content"] + " . assistant :"
    prompt, answer = text.split(), ANSWER.split()
    places = []
    for document in map(str.split, DOCUMENTS):
        n = len(document)
        (start,) = [i for i in range(len(prompt)) if prompt[i : i + n] == document]
        places.append((start, start + n))
    ids = words.convert_tokens_to_ids
    return ids(prompt), ids(answer), places


def hide_by_hand(network, tokens, place):
    """Return the log-probabilities of all tokens with a 4-d mask that hides some."""
    n = len(tokens)
    q, k = torch.arange(n)[:, None], torch.arange(n)
    may = (k <= q) & ~((place[0] <= k) & (k < place[1]))
    mask = torch.where(may, 0.0, -1e30).double()[None, None]  # -inf: NaN if no key
    network.set_attn_implementation("eager")
    if getattr(network.config, "use_sliding_window", False):
        near = torch.where(may & (q - k < 6), 0.0, -1e30).double()[None, None]
        mask = {"full_attention": mask, "sliding_attention": near}
    with torch.no_grad():
        done = network(
            input_ids=torch.tensor([tokens]),
            attention_mask=mask,
            output_attentions=True,
        )
    network.set_attn_implementation("sdpa")
    logs = F.log_softmax(done.logits[0], -1)
    return logs[:-1].gather(-1, torch.tensor(tokens)[1:, None])[:, 0], done.attentions


@pytest.fixture
def load_ours(tmp_path):
    """Return a function that loads a model of transformers as one of regard."""

    def load_it(network):
        network.save_pretrained(tmp_path)
        make_tokenizer().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
        return load(tmp_path, dtype=torch.float64)[0]

    return load_it


@pytest.mark.parametrize("is_ours", [False, True])
@pytest.mark.parametrize("name", BUILD)
def test_mass_and_effect_are_those_of_dense_weights_and_of_masks_by_hand(
    name, is_ours, load_ours
):
    network, words = make_network(BUILD[name]), make_words()
    given = (network, words)
    if is_ours:
        given = (load_ours(network), make_words(is_ours=True))
        assert isinstance(given[0], CausalTransformer)
    found = regard.sources(*given, MESSAGES, DOCUMENTS, answer=ANSWER)
    prompt, answer, places = find_places(words)
    tokens, first = [*prompt, *answer], len(prompt) - 1
    whole, weights = hide_by_hand(network, tokens, (0, 0))
    weights = torch.stack(weights)[:, 0]  # (layers, heads, queries, keys)
    ranges = [(0, 8), (0, 4), (4, 8)]
    assert [x.tokens for x in (found.answer, *found.sentences)] == ranges
    for part, (start, stop) in zip(found.parts, ranges, strict=True):
        rows = slice(first + start, first + stop)
        for i, place in enumerate(places):
            mass = weights[:, :, rows, slice(*place)].sum(-1).mean()
            assert abs(part.mass[i] - float(mass)) < 1e-6
            hidden, _ = hide_by_hand(network, tokens, place)
            effect = float((whole[rows] - hidden[rows]).sum())
            assert abs(part.effect[i] - effect) < 1e-5
            assert abs(effect) > 1e-3  # the mask does something
        assert abs(part.logprob - float(whole[rows].sum())) < 1e-5
    assert found.passes == 1 + len(DOCUMENTS)


def test_batches_of_any_size_and_models_without_a_cache_give_the_same(monkeypatch):
    network, words = make_network(build_llama), make_words()
    found = regard.sources(network, words, MESSAGES, DOCUMENTS, answer=ANSWER)
    monkeypatch.setattr(hidden_documents, "MOST", 1)  # one document at a time
    again = regard.sources(network, words, MESSAGES, DOCUMENTS, answer=ANSWER)
    np.testing.assert_allclose(again.answer.effect, found.answer.effect, atol=1e-9)
    monkeypatch.undo()

    class Bare(torch.nn.Module):
        """A model that takes tokens and returns logits."""

        def __init__(self):
            super().__init__()
            self.inner = network

        def forward(self, tokens):
            return self.inner(tokens, use_cache=False).logits

    bare = regard.sources(Bare(), words, MESSAGES, DOCUMENTS, answer=ANSWER)
    np.testing.assert_allclose(bare.answer.effect, found.answer.effect, atol=1e-9)
    np.testing.assert_allclose(bare.answer.mass, found.answer.mass, atol=1e-9)
    assert bare.passes == found.passes == again.passes == 4

    class Old(Bare):
        """A model with a cache that cannot be copied for several sequences."""

        def forward(self, input_ids, past_key_values=None, use_cache=False):
            logits = super().forward(input_ids)
            return SimpleNamespace(logits=logits, past_key_values=past_key_values)

    old = regard.sources(Old(), words, MESSAGES, DOCUMENTS, answer=ANSWER)
    np.testing.assert_allclose(old.answer.effect, found.answer.effect, atol=1e-9)
    np.testing.assert_allclose(old.answer.mass, found.answer.mass, atol=1e-9)
    assert old.passes == 5


@pytest.mark.parametrize("name", BUILD)
def test_every_sequence_of_a_padded_batch_has_its_own_hidden_keys(name):
    """Left padding does not move the keys: positions count real tokens."""
    network, words = make_network(BUILD[name]), make_words()
    prompt, answer, places = find_places(words)
    tokens = [*prompt, *answer]
    rows = torch.tensor([[0] * i + tokens[: len(tokens) - i] for i in range(3)])
    valid = torch.tensor([[0] * i + [1] * (len(tokens) - i) for i in range(3)])
    spans = [Span("", *places[1]), None, slice(*places[0])]
    at = (valid.cumsum(1) - 1).clamp(min=0)
    with knock_out(network, keys=spans), torch.no_grad():
        logits = network(rows, attention_mask=valid, position_ids=at).logits
    for i, place in enumerate([places[1], (0, 0), places[0]]):
        expected, _ = hide_by_hand(network, tokens, place)
        logs = F.log_softmax(logits[i, i:-1], -1)
        found = logs.gather(-1, rows[i, i + 1 :, None])[:, 0]
        late = slice(places[0][1], len(found))  # rows of a hidden document are nobody's
        assert (found[late] - expected[: len(found)][late]).abs().max() < 1e-5


def test_lists_of_keys_fit_the_batch():
    network = make_network(build_llama)
    words = "called with a batch of 3, but keys= or queries= is a list for 2 sequences"
    cut = knock_out(network, keys=[slice(0, 2), None])
    with pytest.raises(OptionError, match=words), torch.no_grad(), cut:
        network(torch.ones(3, 5, dtype=torch.long))
    cut = knock_out(network, keys=[slice(0, 2), None], queries=[slice(1, 2)])
    words = "keys= of 2 sequences and queries= of 1, expected lists of the same length"
    with pytest.raises(OptionError, match=words), cut:
        pass


# --- recordings ----------------------------------------------------------------------


def test_a_recording_of_a_generation_has_the_same_mass_and_no_effect():
    network, words = make_network(build_llama), make_words()
    found = regard.sources(network, words, MESSAGES, DOCUMENTS, n_new=7)
    prompt, _, _ = find_places(words)
    with regard.watch(network) as seen:
        network.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)
    told = regard.sources(seen, words, MESSAGES, DOCUMENTS)
    assert told.answer.tokens == (0, 6)  # nobody read the last token
    shorter = regard.sources(network, words, MESSAGES, DOCUMENTS, n_new=6)
    np.testing.assert_allclose(told.answer.mass, shorter.answer.mass, atol=1e-9)
    assert told.answer.effect is None
    assert told.answer.logprob is None
    assert told.answer.most_effect is None
    assert told.passes == 0
    assert "no effects: a recording has no model to run." in str(told)
    assert "no effects" not in str(found)
    with pytest.raises(OptionError, match="with a recording, which has its own answer"):
        regard.sources(seen, words, MESSAGES, DOCUMENTS, answer="x")
    other = [{"role": "user", "content": "the mat " + MESSAGES[0]["content"]}]
    with pytest.raises(OptionError, match="expected the 29 tokens of the prompt"):
        regard.sources(seen, words, other, DOCUMENTS)


# --- prompts -------------------------------------------------------------------------


def test_the_answer_is_the_greedy_one(load_ours):
    network, words = make_network(build_llama), make_words()
    found = regard.sources(network, words, MESSAGES, DOCUMENTS, n_new=5)
    prompt, _, _ = find_places(words)
    done = network.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
    assert found.answer.text == words.decode(done[0, len(prompt) :])
    ours = (load_ours(network), make_words(is_ours=True))
    again = regard.sources(*ours, MESSAGES, DOCUMENTS, n_new=5)
    assert again.answer.text == found.answer.text
    np.testing.assert_allclose(again.answer.effect, found.answer.effect, atol=1e-5)


def test_a_text_and_a_model_without_a_template():
    network, words = make_network(build_gpt2), make_words(template=None)
    text = MESSAGES[0]["content"]
    plain = regard.sources(network, words, text, DOCUMENTS, answer=ANSWER)
    chat = regard.sources(network, words, MESSAGES, DOCUMENTS, answer=ANSWER)
    assert plain == chat
    assert plain.documents[0].span.start == 0  # its own tokens then see nothing at all
    assert np.isfinite(plain.answer.effect).all()


def test_names_of_documents_are_kept():
    network, words = make_network(build_llama), make_words()
    named = dict(zip("abc", DOCUMENTS, strict=True))
    found = regard.sources(network, words, MESSAGES, named, answer=ANSWER)
    assert [x.name for x in found.documents] == ["a", "b", "c"]
    assert [x.text.split() for x in found.documents] == [x.split() for x in DOCUMENTS]


@pytest.mark.parametrize(
    ("messages", "documents", "words"),
    [
        (MESSAGES, ["the"], "'0', 'the', occurs 4 times in the prompt, expected once"),
        (MESSAGES, ["a cow"], "'0', 'a cow', does not occur in the prompt"),
        (MESSAGES, [], "documents is [], expected texts that occur"),
        (MESSAGES, "a dog ran .", "documents is 'a dog ran .', expected texts"),
        (MESSAGES, {"x": " "}, "documents is {'x': ' '}, expected texts"),
        (MESSAGES, ["a dog ran .", "dog ran ."], "'0' and '1' share tokens"),
        (7, DOCUMENTS, "messages is 7, expected a text or the messages of a chat"),
    ],
)
def test_documents_that_are_not_in_the_prompt_once_are_refused(
    messages, documents, words
):
    with pytest.raises(OptionError) as error:
        regard.sources(None, make_words(), messages, documents)
    assert words in str(error.value)


def test_what_is_no_decoder_is_refused():
    words = make_words()
    with pytest.raises(OptionError, match=r"sources\(\) got a NoneType, expected"):
        regard.sources(None, words, MESSAGES, DOCUMENTS)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=17, d_model=8, d_kv=4, d_ff=8, num_layers=1)
    )
    with pytest.raises(OptionError, match="documents can be hidden in decoders only"):
        regard.sources(t5, words, MESSAGES, DOCUMENTS)
    with pytest.raises(OptionError, match="n_new=0, expected at least 1"):
        regard.sources(make_network(build_llama), words, MESSAGES, DOCUMENTS, n_new=0)


# --- sentences and the table ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It is 3.5 km. Go!", ["It is 3.5 km. ", "Go!"]),
        ('He said "no." Why?\nSo.', ['He said "no." ', "Why?\n", "So."]),
        ("\n\nOne.\n\n", ["\n\nOne.\n\n"]),
        ("猫。犬！", ["猫。", "犬！"]),
        ("no end", ["no end"]),
    ],
)
def test_sentences_end_at_marks_before_a_space_and_at_line_breaks(text, parts):
    ends = split_sentences(text)
    starts = [0, *ends[:-1]]
    assert [text[a:b] for a, b in zip(starts, ends, strict=True)] == parts


def test_sentences_share_out_all_tokens():
    words = make_words()
    tokens = words("the cat . the dog ran . a")["input_ids"]
    assert find_sentences(words, tokens) == [(0, 3), (3, 7), (7, 8)]
    network = make_network(build_llama)
    found = regard.sources(network, words, MESSAGES, DOCUMENTS, answer=ANSWER)
    total = np.sum([x.effect for x in found.sentences], axis=0)
    np.testing.assert_allclose(total, found.answer.effect, atol=1e-9)


def invent(mass, effect, name="b"):
    part = AnswerPart(
        text="six\n\x1b[2J", tokens=(0, 1), mass=mass, effect=effect, logprob=-1
    )
    documents = tuple(
        SourceDocument(x, "text " * 20, Span(x, 0, 1)) for x in ("a", name)
    )
    return Sources(documents=documents, answer=part, sentences=(part,), passes=3)


def test_the_table_warns_where_mass_and_effect_disagree():
    assert "warning" not in str(invent((0.1, 0.3), (0.5, 2.0)))
    text = str(invent((0.3, 0.1), (0.5, 2.0)))
    assert "\x1b" not in text
    assert text.splitlines() == [
        'answer: "six [2J"   log-probability -1.00',
        "document   mass  effect",
        "a         0.300    0.50   text text text text text text text text…",
        "b         0.100    2.00   text text text text text text text text…",
        "warning: document a has the largest mass, but document b the largest effect. "
        "Trust the effect.",
        "",
        "effect: nats by which the log-probability falls if the document is hidden; 3 "
        "forward passes",
    ]
    text = str(invent((0.3, 0.1), (-0.5, 0.0)))
    assert (
        "warning: no document has a positive effect: the model knew it, or guessed."
        in text
    )
