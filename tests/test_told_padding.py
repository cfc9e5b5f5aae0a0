"""What an attention_mask hides is recorded, shown, and compared with what is known."""

from dataclasses import replace

import pytest
import torch
import transformers
from families import quiet

import regard
from regard.audit.told_padding import MASK
from regard.recording.hidden_tokens import ToldTokens, describe_hidden, list_told
from regard.seen import Seen, watch

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
SHARED = SIZES | {"num_key_value_heads": 2}
GPT2 = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
ENCODERS = {
    "Bert": SIZES,
    "Roberta": SIZES,
    "Electra": SIZES | {"embedding_size": 32},
    "Albert": SIZES | {"embedding_size": 32},
    "DistilBert": {"vocab_size": 100, "dim": 32, "hidden_dim": 64, "n_heads": 4},
    "MPNet": SIZES,
}
DECODERS = {
    "Llama": SIZES,
    "Mistral": SHARED,
    "Qwen2": SHARED,
    "Gemma": SHARED | {"head_dim": 8},
    "GPTNeoX": SIZES,
    "GPT2": GPT2,
    "OPT": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"vocab_size": 100, "hidden_size": 32, "n_layer": 2, "n_head": 4},
}
FAMILIES = ENCODERS | DECODERS
EAGER = {"MPNet", "Bloom"}  # these have no other kernel
N = 8


def build(name, implementation="sdpa"):
    """Return a small model of a family."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name])
    kind = getattr(transformers, f"{name}Model")
    if name in EAGER:
        implementation = "eager"
    with quiet():
        return kind._from_config(config, attn_implementation=implementation).eval()


def draw(side):
    """Return tokens (2, N) and their mask; the second sequence has three of padding."""
    tokens = torch.randint(5, 99, (2, N), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    part = slice(5, None) if side == "right" else slice(3)
    tokens[1, part] = mask[1, part] = 0
    return tokens, mask


def look(model, tokens, mask):
    """Return what is seen of one pass."""
    with quiet(), torch.no_grad(), watch(model) as seen:
        model(input_ids=tokens, attention_mask=mask)
    return seen


def find(seen, **known):
    """Return the findings about the mask: level, name, tokens and sequence."""
    found = [x for x in seen.audit(**known) if x.layer == MASK]
    return [(x.level, x.what, *x.numbers.values()) for x in found]


EMPTY, SWAPPED = "no tokens left", "tokens hidden as padding"
ODD = "one kind of token left"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_inverted_mask_is_found(name, side):
    model, (tokens, mask) = build(name), draw(side)
    right, wrong = look(model, tokens, mask), look(model, tokens, 1 - mask)
    for known in ({}, {"pad": 0}, {"valid": mask.bool()}):
        assert find(right, **known) == []
    expected = [("error", EMPTY, N, 0), ("error", SWAPPED, 5, 1)]
    assert find(wrong, pad=0) == expected
    assert find(wrong, valid=mask.bool()) == expected
    assert find(wrong) == [expected[0], ("warning", ODD, 5, 1)]
    assert "attention_mask hides 3 of 8 tokens of sequence 1\n" in str(right)
    assert "inverted" not in str(right)
    assert str(wrong).count("is attention_mask inverted?") == 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_that_hide_everything_or_nothing(name, side):
    model, (tokens, mask) = build(name), draw(side)
    nothing = look(model, tokens, torch.ones_like(mask))
    assert find(nothing, pad=0) == []
    assert "hides" not in str(nothing)
    padded = [x for x in nothing.audit(pad=0) if x.what == "weight on padding"]
    assert bool(padded) == (name in ENCODERS or side == "left")
    everything = look(model, tokens, torch.zeros_like(mask))
    for known in ({}, {"pad": 0}, {"valid": mask.bool()}):
        ((level, what, _, _),) = find(everything, **known)
        assert (level, what) == ("error", EMPTY)
    assert "hides all 8 tokens of sequence 1" in str(everything)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
@pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2"])
def test_types_and_kernels(name, dtype, implementation):
    model, (tokens, mask) = build(name, implementation), draw("right")
    assert find(look(model, tokens, mask.to(dtype)), pad=0) == []
    wrong = look(model, tokens, (1 - mask).to(dtype))
    assert [x[:2] for x in find(wrong, pad=0)] == [("error", EMPTY), ("error", SWAPPED)]


@pytest.mark.parametrize("inverted", [False, True])
def test_a_mask_with_four_axes(inverted):
    """(B, 1, N, N): a key that no query sees is hidden."""
    model, (tokens, mask) = build("Llama"), draw("right")
    real = (1 - mask if inverted else mask).bool()
    cells = real[:, None, None] & torch.ones(N, N, dtype=torch.bool).tril()
    found = find(look(model, tokens, cells), pad=0)
    assert bool(found) == inverted


def test_an_encoder_and_a_decoder_have_tokens_of_their_own():
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    model, (tokens, mask) = transformers.T5Model(config).eval(), draw("right")
    for given, expected in ((mask, []), (1 - mask, [EMPTY, SWAPPED])):
        with quiet(), torch.no_grad(), watch(model) as seen:
            model(tokens, attention_mask=given, decoder_input_ids=tokens[:, :4])
        assert [x[1] for x in find(seen, pad=0)] == expected


def test_packed_texts_hide_nothing():
    """Two texts in one row see only themselves; no token is padding."""
    model, (tokens, _) = build("Llama"), draw("right")
    texts = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    cells = (texts[:, None] == texts) & torch.ones(N, N, dtype=torch.bool).tril()
    seen = look(model, tokens[:1], cells[None, None])
    assert find(seen, pad=0) == []
    assert seen.audit(documents=texts) == ()
    assert "hides" not in str(seen)


def test_a_word_that_is_hidden_on_purpose_is_a_warning():
    model, (tokens, mask) = build("Bert"), draw("right")
    mask[0, 2] = 0
    assert find(look(model, tokens, mask), pad=0) == [("warning", SWAPPED, 1, 0)]


def test_a_generation_says_what_was_hidden():
    config = transformers.LlamaConfig(**SIZES)
    model, (tokens, mask) = transformers.LlamaForCausalLM(config).eval(), draw("left")
    with quiet(), watch(model) as seen:
        model.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert find(seen, pad=0) == []
    assert "attention_mask hides 3 of 10 tokens of sequence 1\n" in str(seen)


def test_a_saved_recording_says_the_same(tmp_path):
    tokens, mask = draw("left")
    seen = look(build("Bert"), tokens, 1 - mask)
    seen.save(tmp_path / "x.regard")
    opened = regard.open(tmp_path / "x.regard")
    assert str(opened) == str(seen)
    assert find(opened, pad=0) == find(seen, pad=0)


# --- what is printed, and notes of strangers ------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "real", "text"),
    [
        ([7, 8, 9, 0], [1, 1, 1, 0], "hides 1 of 4 tokens of sequence 2"),
        ([7, 8, 9], [0, 0, 0], "hides all 3 tokens of sequence 2: is"),
        ([7, 8, 0, 0], [0, 0, 1, 1], "sequence 2, and keeps only token 0, 2 times: is"),
        ([7, 8, 0], [0, 0, 1], "sequence 2, and keeps only token 0: is"),
        ([7, 0, 0], [1, 0, 0], "hides 2 of 3 tokens of sequence 2"),  # one word
    ],
)
def test_lines(tokens, real, text):
    line = ToldTokens(2, tuple(tokens), tuple(map(bool, real))).describe()
    assert text in line
    assert ("inverted" in line) == text.endswith(": is")


def make_notes(**notes):
    """Return a recording of two sequences with some notes."""
    tokens, mask = draw("right")
    seen = look(build("Bert"), tokens, mask)
    return replace(seen.recording, notes=notes)


@pytest.mark.parametrize(
    "notes",
    [
        {},
        {"valid": 3, "hidden": 4},
        {"valid": [[0] * 9, 1], "hidden": [[[]], "x"]},
        {"valid": [[], [1, 1, 1, 1, 0, 0, 0, 0]], "hidden": [[], [0, 0, 0]]},
        {"valid": [[], [1] * 5 + [0] * 3], "hidden": [[], [0, "a", []]]},
        {"valid": [[], [1] * 5 + [0] * 3]},
    ],
)
def test_notes_that_do_not_fit_say_nothing(notes):
    recording = make_notes(**notes)
    assert list(list_told(recording)) == []
    assert describe_hidden(recording) == []
    assert "hides" not in str(Seen(recording))


def test_odd_sequences_come_first_and_the_rest_is_counted():
    tokens = torch.arange(5, 5 + 6 * N).reshape(6, N)
    mask = torch.ones_like(tokens)
    mask[:, -2:] = 0
    mask[5] = 0
    lines = describe_hidden(look(build("Bert"), tokens, mask).recording)
    assert lines[0].startswith("attention_mask hides all 8 tokens of sequence 5")
    assert lines[1] == "attention_mask hides 2 of 8 tokens of sequence 0"
    assert lines[-1] == "attention_mask hides tokens of 2 more sequences"
    assert len(lines) == 5


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_what_a_mask_hides_is_told_of_embeddings_too(name):
    model = build(name)
    valid = torch.arange(N) < torch.tensor([[5], [N]])
    x = model.get_input_embeddings()(torch.randint(3, 99, (2, N)))
    with watch(model) as right, torch.no_grad():
        model(inputs_embeds=x, attention_mask=valid.long())
    assert "hides 3 of 8 tokens of sequence 0" in str(right)
    assert not right.audit(valid=valid)
    with watch(model) as wrong, torch.no_grad():
        model(inputs_embeds=x, attention_mask=1 - valid.long())
    assert "hides all 8 tokens of sequence 1: is attention_mask inverted?" in str(wrong)
    found = {(x.what, x.numbers["sequence"]) for x in wrong.audit(valid=valid)}
    assert found >= {("tokens hidden as padding", 0), ("no tokens left", 1)}
