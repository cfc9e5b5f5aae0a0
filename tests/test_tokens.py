"""Tokenizers: against transformers, against the definition, and as a stream."""

import json
import random
import re
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Core
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from regard.errors import FileError, OptionError
from regard.models.inputs import decode_token
from regard.nn.gguf_file import open_gguf
from regard.nn.tokens import Tokenizer, build_gguf_tokenizer, read_folder_tokenizer

ROOT = Path(__file__).parent.parent
HI = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "1 + 1?\n\n2 + 2?"},
    {"role": "assistant", "content": "  2, 4 <|im_end|>"},
    {"role": "user", "content": "Schön 🙂"},
]


def gather_texts():
    """Return a few hundred texts of all kinds."""
    rng = random.Random(0)
    words = """Hello world don't I'LL naïve Straße e\u0301 日本語 한국어 مرحبا שלום हिन्दी 🙂
        👩‍👩‍👧‍👦 🇩🇪 \u200b ﬁ ½ ² Ⅷ ٣ 七 <|im_start|> <|im_end|> <|endoftext|> <file_sep> <|im_
        </s> def f(x): {1:'a'} #!/bin/sh a_b-c.d https://a.b/c?d=1 0 42 3.14 1,000 0x1F
        2024-01-31 ... !!! ? — “q” \0 \x7f"""
    spaces = ["\t", "\n", "\n\n", " ", "  ", "    ", "\r\n", "\u3000", "\u00a0"]
    pieces = [*words.split(), *spaces]
    texts = ["", " ", "\n", *pieces]
    for _ in range(200):
        joint = rng.choice(["", " ", "  ", "\n", "\n\n"])
        texts.append(joint.join(rng.choices(pieces, k=rng.randint(2, 12))))
    texts += [
        rng.randbytes(rng.randint(1, 60)).decode("utf-8", errors="replace")
        for _ in range(60)
    ]
    for _ in range(40):
        points = (rng.randrange(0x110000) for _ in range(20))
        texts.append("".join(chr(p) for p in points if not 0xD800 <= p < 0xE000))
    for name in ("LICENSE", "README.md", "src/regard/nn/tokens.py"):
        texts += (ROOT / name).read_text(encoding="utf-8").split("\n\n")[:40]
    return texts


TEXTS = gather_texts()


@pytest.fixture(scope="module")
def settings(smollm):
    return open_gguf(smollm).settings


@pytest.fixture(scope="module")
def ours(settings):
    return build_gguf_tokenizer(settings)


@pytest.fixture(scope="module")
def theirs(smollm):
    return AutoTokenizer.from_pretrained(smollm.parent, gguf_file=smollm.name)


def has_number(text):
    return any(unicodedata.category(c).startswith("N") for c in text)


# --- SmolLM2 -------------------------------------------------------------------------


def test_texts_without_digits_are_cut_as_in_transformers(ours, theirs):
    texts = [text for text in TEXTS if not has_number(text)]
    assert len(texts) > 200
    check_same(texts, ours, theirs)


def check_same(texts, ours, theirs):
    vocabulary = ours.core.get_vocab()
    for text in texts:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids), text
        assert ours.decode(ids) == text or not spell(text) <= vocabulary.keys()


def spell(text):
    """Return the bytes of a text as tokens; 21 bytes are not in the vocabulary."""
    pieces = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return {byte for piece, _ in pieces for byte in piece}


def test_digits_are_cut_off_first_as_the_model_was_trained(ours, theirs):
    """transformers 5.22 does not know the way "smollm", and takes that of GPT-2.

    The original definition is Digits, then ByteLevel. The vocabulary shows it: of 49152
    tokens none joins a digit with anything, as nothing stood beside a digit in training.
    So two line feeds before a digit were one token, as they are before the end.
    """
    tokens = [ours.decode([i]) for i in range(49_152)]
    assert sum(len(token) > 1 for token in tokens) > 48_000
    assert not [token for token in tokens if len(token) > 1 and has_number(token)]
    one, two = ours.encode("\n"), ours.encode("\n\n")
    assert len(one) == len(two) == 1
    assert ours.encode("a\n\n1")[1:-1] == two
    assert theirs.encode("a\n\n1")[1:-1] == one + one

    theirs.backend_tokenizer.pre_tokenizer, wrong = (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                ByteLevel(add_prefix_space=False),
            ]
        ),
        theirs.backend_tokenizer.pre_tokenizer,
    )
    try:
        check_same(TEXTS, ours, theirs)
    finally:
        theirs.backend_tokenizer.pre_tokenizer = wrong


def test_any_tokens_are_decoded_as_in_transformers(ours, theirs):
    rng = random.Random(0)
    for _ in range(300):
        ids = rng.choices(range(49_152), k=rng.randint(0, 20))
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("messages", [HI, TALK, TALK[:1]], ids=len)
def test_a_chat_is_written_as_in_transformers(messages, ours, theirs):
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours.chat(messages) == expected
    assert ours.chat(HI).endswith("user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_are_whole_and_stop(ours):
    assert ours.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert ours.decode([1, 4093, 2]) == "<|im_start|>user<|im_end|>"
    assert ours.stop == {2}
    assert ours.encode("Hello") == ours.encode("Hello", whole=False)  # no bos
    assert ours.names["bos_token"] == "<|im_start|>"


# --- streams -------------------------------------------------------------------------


def test_a_stream_never_splits_a_character_and_says_the_same(ours):
    rng = random.Random(0)
    streams = [ours.encode(text) for text in TEXTS]
    streams += [rng.choices(range(49_152), k=20) for _ in range(200)]
    # single bytes, so that characters come in parts, whole and broken
    single = [i for i in range(49_152) if len(ours.core.id_to_token(i)) == 1]
    streams += [rng.choices(single, k=20) for _ in range(200)]
    for ids in streams:
        pieces = list(ours.stream(iter(ids)))
        assert "".join(pieces) == ours.decode(ids)
        assert all(pieces)
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])


def test_a_stream_gives_out_what_is_complete_at_once(ours):
    ids = ours.encode("a🙂b")
    assert len(ids) > 3  # the face is several tokens
    given = []  # after how many tokens each piece came

    def feed():
        for n, i in enumerate(ids, 1):
            given.append(n)
            yield i

    pieces = [(given[-1], piece) for piece in ours.stream(feed())]
    assert pieces == [(1, "a"), (len(ids) - 1, "🙂"), (len(ids), "b")]


def test_a_stream_is_exact_for_decoders_that_trim_the_start():
    """Llama 2 takes one space off the text, not one off every piece."""
    vocabulary = {
        "▁": 0,
        "▁a": 1,
        "b": 2,
        "<0xF0>": 3,
        "<0x9F>": 4,
        "<0x99>": 5,
        "<0x82>": 6,
    }
    core = Core(models.BPE(vocabulary, []))
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = Tokenizer(core)
    rng = random.Random(0)
    assert list(tokenizer.stream([0, 1, 0, 1, 2])) == [" a", " ", " a", "b"]
    assert list(tokenizer.stream([1, 3, 4, 5, 6, 2])) == ["a", "🙂", "b"]
    for _ in range(500):
        ids = rng.choices(range(7), k=rng.randint(0, 10))
        assert "".join(tokenizer.stream(ids)) == tokenizer.decode(ids), ids


# --- other ways to cut ---------------------------------------------------------------


def build(settings, **changes):
    """Build the tokenizer of SmolLM2's vocabulary with other settings."""
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return build_gguf_tokenizer({**settings, **changed})


def split_merges(settings):
    return [tuple(merge.split(" ")) for merge in settings["tokenizer.ggml.merges"]]


@pytest.mark.parametrize(
    ("way", "kind"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)]
)
def test_other_ways_equal_the_classes_of_transformers(way, kind, settings):
    ours = build(settings, pre=way)
    vocabulary = {x: i for i, x in enumerate(settings["tokenizer.ggml.tokens"])}
    theirs = kind(vocab=vocabulary, merges=split_merges(settings))
    special = [AddedToken(ours.core.id_to_token(i), special=True) for i in range(17)]
    theirs.add_tokens(special, special_tokens=True)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_llama_bpe_takes_known_words_whole_and_begins_with_bos(settings):
    ours = build(settings, pre="llama-bpe")
    del (without := dict(settings))["tokenizer.ggml.add_bos_token"]
    assert build(without, pre="llama-bpe").encode("Hi") == [1, *ours.encode("Hi")]
    assert build(without, pre="llama-bpe").encode("Hi", whole=False) == ours.encode(
        "Hi"
    )
    words = [
        w
        for w, _ in ours.core.pre_tokenizer.pre_tokenize_str("It'LL cost 12345 $\n\n x")
    ]
    assert words == ["It", "'LL", "Ġcost", "Ġ", "123", "45", "Ġ$ĊĊ", "Ġx"]
    assert ours.core.model.ignore_merges
    assert not build(settings, pre="qwen2").core.model.ignore_merges


def test_the_default_way_is_that_of_llama_cpp(settings):
    ours = build(settings, pre="default")
    words = [
        w for w, _ in ours.core.pre_tokenizer.pre_tokenize_str("a+b's 12345 (x)  y")
    ]
    assert words == [
        "a",
        "+",
        "b",
        "'",
        "s",
        "Ġ",
        "123",
        "45",
        "Ġ",
        "(",
        "x",
        ")",
        "Ġ",
        "Ġy",
    ]


def test_bos_and_eos_are_added_if_the_file_says_so(settings):
    ours = build(settings, add_bos_token=True, add_eos_token=True)
    assert ours.encode("Hi") == [1, *ours.encode("Hi", whole=False), 2]


def test_all_tokens_that_end_an_answer_stop(settings):
    assert build(settings, eot_token_id=5, eom_token_id=7).stop == {2, 5, 7}


REFUSED = [
    (
        {"model": "bert"},
        r"model='bert' with pre='smollm': expected 'llama' .*'gpt2'.*read_weights",
    ),
    ({"model": "llama"}, "tokenizer.ggml.scores has 0 numbers, expected a finite one"),
    ({"pre": "tekken"}, "pre='tekken': expected .*'smollm', 'llama-bpe', 'qwen2'"),
    ({"pre": None}, "pre='None'"),
    ({"add_space_prefix": True}, "no space prefix"),
    ({"tokens": None}, r"tokenizer.ggml.tokens is missing"),
    ({"tokens": ["a", "b", "a"]}, "3 tokens, but only 2 different ones"),
    ({"merges": ["a b c"]}, "the tokenizer of the file cannot be built"),
    ({"merges": ["qqqqqq b"]}, "cannot be built .*: .*qqqqqq.* out of vocabulary"),
    ({"merges": None}, "the tokenizer of the file cannot be built"),
    ({"token_type": [1, 2]}, "the tokenizer of the file cannot be built"),
    (
        {"eos_token_id": 49_152},
        r"tokenizer.ggml.eos_token_id is 49152, expected 0 … 49151",
    ),
    ({"bos_token_id": -1}, "bos_token_id is -1"),
    ({"bos_token_id": "x"}, "bos_token_id is 'x'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=str)
def test_a_tokenizer_that_would_be_wrong_is_refused(changes, message, settings):
    with pytest.raises(FileError, match=message):
        build(settings, **changes)


# --- SentencePiece in GGUF -----------------------------------------------------------


@pytest.fixture(scope="module")
def pieces():
    """Return a vocabulary and encodings that the sentencepiece library made."""
    path = Path(__file__).parent / "sentencepiece.json"
    return json.loads(path.read_text("utf-8"))


def build_pieces(pieces, **changes):
    own = {x: pieces[x] for x in ("tokens", "scores", "token_type")}
    own |= {"model": "llama", "bos_token_id": 1, "eos_token_id": 2, **changes}
    own = {k: v for k, v in own.items() if v is not None}
    return build_gguf_tokenizer({f"tokenizer.ggml.{k}": v for k, v in own.items()})


def cut_by_definition(text, pieces):
    """Merge the neighbours with the highest score until none is a token."""
    score = {
        token: score
        for token, score, kind in zip(
            pieces["tokens"], pieces["scores"], pieces["token_type"], strict=True
        )
        if kind == 1
    }
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [a + b for a, b in pairwise(parts)]
        known = [i for i, pair in enumerate(pairs) if pair in score]
        if not known:
            break
        at = max(known, key=lambda i: (score[pairs[i]], -i))
        parts[at : at + 2] = [pairs[at]]
    ids = {token: i for i, token in enumerate(pieces["tokens"])}
    found = []
    for part in parts:
        in_bytes = [f"<0x{byte:02X}>" for byte in part.encode()]
        found += [ids[x] for x in ([part] if part in score else in_bytes)]
    return found


def test_scores_are_merged_as_by_sentencepiece(pieces):
    ours = build_pieces(pieces)
    for text, ids in pieces["texts"]:
        if not re.search("</?s>|<.user.>", text):  # special tokens are whole
            assert ours.encode(text, whole=False) == ids, text
            assert ours.encode(text) == [1, *ids]
            assert ours.decode(ids) == text.replace("▁", " ")
    assert sum(len(ids) for _, ids in pieces["texts"]) > 1_500


def test_scores_are_merged_as_by_the_definition(pieces):
    ours = build_pieces(pieces)
    texts = [x for x in TEXTS if not re.search("</?s>", x)]
    for text in texts[::3]:
        assert ours.encode(text, whole=False) == cut_by_definition(text, pieces), text


def test_scores_are_merged_as_by_transformers(pieces):
    """It puts no space before a text that begins with one; sentencepiece does."""
    vocabulary = {token: i for i, token in enumerate(pieces["tokens"])}
    scores = dict(zip(pieces["tokens"], pieces["scores"], strict=True))
    theirs = LlamaTokenizer(vocabulary, generate_merges(vocabulary, scores))
    ours = build_pieces(pieces)
    texts = [x for x in TEXTS if x[:1] not in (" ", "▁", "") and "s>" not in x]
    for text in texts[::3]:
        wanted = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, whole=False) == wanted, text
        assert ours.decode(wanted) == theirs.decode(wanted)


def test_settings_of_a_sentencepiece_vocabulary_are_kept(pieces):
    ours = build_pieces(pieces)
    bare = build_pieces(pieces, add_space_prefix=False, add_bos_token=False)
    ends = build_pieces(pieces, add_eos_token=True)
    the = ours.encode("the", whole=False)
    assert pieces["tokens"][the[0]] == "▁the"
    assert bare.encode(" the") == the
    assert bare.encode("the") != the
    assert bare.decode(the) == " the"
    assert ours.decode(the) == "the"
    assert ends.encode("the") == [1, *the, 2]
    user = pieces["tokens"].index("<|user|>")
    assert ours.encode("<|user|>the</s>") == [1, user, *the, 2]
    assert "".join(ours.stream(ours.encode("the cat € sat", whole=False))) == (
        "the cat € sat"
    )
    assert decode_token(ours, the[0]) == " the"
    assert decode_token(ours, 1) == "<s>"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [0.0]}, "scores has 1 numbers, expected a finite one for each"),
        ({"scores": None}, "scores has 0 numbers"),
        ({"token_type": None}, "token_type has 0 numbers"),
        ({"precompiled_charsmap": [1]}, "charsmap=.1., but only None is supported"),
        ({"remove_extra_whitespaces": True}, "whitespaces=True, but only False"),
        ({"token_type": [1] * 700}, "neither 256 byte tokens nor an unknown token"),
    ],
)
def test_a_sentencepiece_vocabulary_that_would_be_wrong_is_refused(
    changes, message, pieces
):
    with pytest.raises(FileError, match=message):
        build_pieces(pieces, **changes)


# --- folders -------------------------------------------------------------------------


@pytest.fixture
def folder(ours, tmp_path):
    ours.core.enable_truncation(4)  # as some files have it, and nobody wants it
    ours.core.enable_padding(length=9)
    ours.core.save(str(tmp_path / "tokenizer.json"))
    ours.core.no_truncation()
    ours.core.no_padding()
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    return tmp_path


def test_a_folder_gives_the_same_tokenizer(folder, ours):
    read = read_folder_tokenizer(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        assert read.encode(text) == ours.encode(text) == theirs.encode(text)
    assert read.stop == {0, 2, 7, 9}
    assert read.chat(HI) == "<|im_start|>Hi"
    assert read.chat(TALK) == theirs.apply_chat_template(TALK, tokenize=False)


def test_a_template_may_stand_in_a_file_or_in_a_list(folder):
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own["chat_template"] = [
        {"name": "tool_use", "template": "wrong"},
        {"name": "default", "template": "right"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert read_folder_tokenizer(folder).chat(HI) == "right"
    (folder / "chat_template.jinja").write_text("first {{ messages | length }}")
    assert read_folder_tokenizer(folder).chat(HI) == "first 1"


def test_a_folder_may_say_little_but_nothing_broken(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").unlink()
    read = read_folder_tokenizer(folder)
    assert (read.stop, read.template, read.names) == ({9}, None, {})
    (folder / "config.json").write_text("{")
    with pytest.raises(FileError, match=r"config.json cannot be read"):
        read_folder_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match=r"tokenizer.json is damaged"):
        read_folder_tokenizer(folder)


# --- chats ---------------------------------------------------------------------------


def render(template, messages=HI):
    return Tokenizer(Core(models.BPE()), template).chat(messages)


def test_templates_are_set_up_as_in_transformers(folder):
    template = """
    {%- set ns = namespace(n=0) %}
    {% for m in messages %}
        {% if m.role == 'system' %}{% continue %}{% endif %}
        {% set ns.n = ns.n + 1 %}
{{ m | tojson }} {{ m.content | trim | tojson(indent=2) }} {{ tools is none }}
    {% endfor %}
    {% if add_generation_prompt %}{{ ns.n }}{% endif %}
{{ strftime_now('%Y') | length }}"""
    (folder / "chat_template.jinja").write_text(template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=True
    )
    assert read_folder_tokenizer(folder).chat(TALK) == expected
    assert "Schön 🙂" in expected


def test_a_model_without_a_template_says_so():
    with pytest.raises(OptionError, match=r"has no chat template.*Use encode\(text\)"):
        render(None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "the model's chat template fails: Expected"),
        ("{{ raise_exception('take turns') }}", "chat template fails: take turns"),
        (
            "{{ messages[7].content }}",
            "chat template fails: list object has no element 7",
        ),
        ("{{ 1 + 'a' }}", "chat template fails: unsupported operand"),
        ("{{ messages.append(1) }}", "chat template fails: .*append.* is unsafe"),
        ("{{ ''.__class__.__mro__ }}", "chat template fails: .*__class__.* is unsafe"),
        (
            "{{ messages.__class__.__mro__ }}",
            "chat template fails: .*__class__.* is unsafe",
        ),
        ("{{ raise_exception.__globals__.os }}", "chat template fails: .*__globals__"),
        (
            "{% for i in range(10**9) %}{% endfor %}",
            "chat template fails: Range too big",
        ),
        ("{{ namespace(__call__=range)(1) }}", "chat template fails: .*not callable"),
    ],
)
def test_templates_of_strangers_are_kept_in(template, message):
    with pytest.raises(OptionError, match=message):
        render(template)


def test_what_is_no_text_or_token_is_refused(ours):
    for wrong in (b"bytes", 3, "\ud800"):
        with pytest.raises(OptionError, match="encode takes a str of whole characters"):
            ours.encode(wrong)
    with pytest.raises(OptionError, match="tokens are 0 or more, given -1 … 5"):
        ours.decode([5, -1])


def test_accents_are_joined_before_qwen2_cuts(settings):
    """As in its definition; llama.cpp, which has no such step, differs here."""
    qwen2, gpt2 = build(settings, pre="qwen2"), build(settings, pre="gpt-2")
    assert qwen2.encode("e\u0301") == qwen2.encode("\u00e9")
    assert gpt2.encode("e\u0301") != gpt2.encode("\u00e9")
