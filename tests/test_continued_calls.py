"""Which calls continue a run of their layer, and which begin another text."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import regard


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Layer(nn.Module):
    """Embeddings and two heads; `attend` is given q, k and v."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(50, 16), nn.Linear(16, 48)

    def project(self, ids):
        x = self.qkv(self.embed(ids))
        return [y.unflatten(-1, (2, 8)).transpose(1, 2) for y in x.chunk(3, -1)]


class FixedCache(Layer):
    """A cache of fixed size, written by hand, as in gpt-fast."""

    def __init__(self, room):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 3, 2, room, 8))
        self.register_buffer("past", torch.ones(room, room).tril().bool())

    def forward(self, ids, at):
        q, k, v = self.project(ids)
        n = len(ids)
        self.cache[0, :n, :, at], self.cache[1, :n, :, at] = k, v
        k, v = self.cache[:, :n]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.past[at])

    def generate(self, prompt, new):
        n, steps = prompt.shape[1], []
        self(prompt, torch.arange(n))
        for i in range(new):
            steps.append(torch.full((len(prompt), 1), i))
            self(steps[-1], torch.tensor([n + i]))
        return torch.cat([prompt, *steps], 1)

    def find_weights(self, ids):
        q, k, _ = self.project(ids)
        scores = q @ k.mT / 8**0.5
        past = torch.ones(scores.shape[-2:]).tril().bool()
        return scores.masked_fill(~past, -torch.inf).softmax(-1)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("room", [12, 32])
def test_a_prompt_in_a_cache_of_fixed_size_twice_is_two_texts(room, batch):
    model, prompt = FixedCache(room), torch.randint(50, (batch, 8))
    longer = torch.randint(50, (batch, 10))
    longer[:, :8] = prompt
    with regard.watch(model) as seen:
        texts = [model.generate(x, new=2) for x in (prompt, prompt, longer)]
    expected = [w for ids in texts for w in model.find_weights(ids)]
    assert len(seen.records) == len(expected)
    for record, weights in zip(seen.records, expected, strict=True):
        assert torch.allclose(record.weights(), weights, atol=1e-6)


class Prefix(Layer):
    """Learnt keys before those of the text."""

    def __init__(self):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 1, 2, 4, 8))

    def forward(self, ids):
        q, k, v = self.project(ids)
        before = self.keys.expand(-1, len(ids), -1, -1, -1)
        k, v = (torch.cat([x, y], 2) for x, y in zip(before, (k, v), strict=True))
        past = torch.ones(q.shape[2], k.shape[2]).tril(4).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=past)


def test_texts_that_share_learnt_keys_do_not_erase_each_other():
    model, longest = Prefix(), torch.randint(50, (1, 9))
    with regard.watch(model) as seen:
        for n in (6, 9, 5, 5):
            model(torch.randint(50, (1, n)))
        model(longest[:, :6])
        model(longest)
    assert [r.shape[1] for r in seen.records] == [6, 9, 5, 5, 6, 9]


def test_guesses_that_a_cache_written_by_hand_rejects_are_taken_back():
    class Cached(Layer):
        keys = values = torch.zeros(1, 2, 0, 8)

        def forward(self, ids, n):
            q, k, v = self.project(ids)
            k, v = (
                torch.cat([x[:, :, :n], y], 2)
                for x, y in ((self.keys, k), (self.values, v))
            )
            self.keys, self.values = k, v
            past = torch.ones(q.shape[2], k.shape[2]).tril(n).bool()
            return F.scaled_dot_product_attention(q, k, v, attn_mask=past)

    model = Cached()
    with regard.watch(model) as seen:
        model(torch.randint(50, (1, 6)), 0)
        model(torch.randint(50, (1, 4)), 6)  # a token and three guesses
        model(torch.randint(50, (1, 4)), 8)  # one of them was right
    (record,) = seen.records
    assert record.shape[1] == 12
    assert torch.equal(record.k[None], model.keys)


@pytest.mark.parametrize("mask", ["causal", "past", "all", None])
def test_a_text_that_grows_is_computed_again_only_if_it_is_causal(mask):
    class Uncached(Layer):
        def forward(self, ids):
            q, k, v = self.project(ids)
            cells = torch.ones(ids.shape[1], ids.shape[1]).bool()
            cells = {"past": cells.tril(), "all": cells}.get(mask)
            causal = mask == "causal"
            return F.scaled_dot_product_attention(q, k, v, cells, is_causal=causal)

    model, ids = Uncached(), torch.randint(50, (2, 9))
    with regard.watch(model) as seen:
        for n in range(4, 10):
            model(ids[:, :n])
    grown = [n for n in range(4, 10) for _ in "ab"]
    sizes = [9, 9] if mask in {"causal", "past"} else grown
    assert [r.shape[1] for r in seen.records] == sizes


@pytest.mark.parametrize("ways", ["beams", "samples"])
def test_an_encoded_text_has_the_number_of_the_first_sequence_that_reads_it(ways):
    config = T5Config(
        vocab_size=60,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        initializer_factor=3.0,
        attn_implementation="eager",
    )
    model = T5ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 60, (3, 7))
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    how = {"num_beams": 2} if ways == "beams" else {"do_sample": True}
    how |= {"num_return_sequences": 2, "max_new_tokens": 6, "min_new_tokens": 6}
    with regard.watch(model) as seen:
        model.generate(ids, attention_mask=mask, **how)
    encoded = model.encoder(ids, attention_mask=mask, output_attentions=True)
    found = zip(seen.recording.sequences, seen.records, strict=True)
    records = [(n, x) for n, x in found if x.name.startswith("encoder.block.1")]
    assert [n for n, _ in records] == [0, 2, 4]
    for (n, x), weights in zip(records, encoded.attentions[1], strict=True):
        real = mask[n // 2].bool()
        torch.testing.assert_close(x.weights(), weights[:, real][:, :, real])
    crossed = [x for x in seen.records if "EncDec" in x.name]
    encoder = {n: x.shape[2] for n, x in records}
    assert [x.shape[2] for x in crossed] == [
        encoder[n // 2 * 2] for n in range(6) for _ in range(2)
    ]
    for x in seen.coverage():
        assert x.rows == x.in_records + sum(x.left_out.values())
        ended = x.left_out.get("of sequences that ended", 0)
        assert (ended > 0) == (ways == "beams" and x.name.startswith("decoder"))


SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "eos_token_id": None,
}
STEPS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def make_bart():
    config = BartConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        init_std=0.3,
        eos_token_id=None,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config).eval()


def find_rows(seen, name):
    return [r.q_positions.tolist() for r in seen.records if name in r.name]


class Perceiver(nn.Module):
    """Learnt queries; their product with a clamp is stored as logits."""

    def __init__(self):
        super().__init__()
        self.z, self.k = nn.Parameter(torch.randn(5, 12)), nn.Linear(12, 12)

    def forward(self, x):
        return (self.z @ self.k(x).mT).clamp(-2, 2).softmax(-1) @ x


def test_texts_that_are_stored_as_logits_are_not_joined():
    model = Perceiver()
    some = [torch.randn(1, 6, 12) for _ in "abc"]
    with regard.watch(model) as seen:
        for x in some:
            model(x)
    assert [r.shape for r in seen.records] == [(1, 5, 6)] * 3
    for record, x in zip(seen.records, some, strict=True):
        weights = (model.z @ model.k(x).mT).clamp(-2, 2).softmax(-1)
        torch.testing.assert_close(record.weights(), weights)


def test_keys_whose_first_numbers_are_alike_are_not_taken_for_each_other():
    class Pool(nn.Linear):
        def forward(self, x):
            asked = super().forward(x.amax(1, keepdim=True))
            return (asked @ x.mT).softmax(-1) @ x

    model = Pool(12, 12)
    code = torch.eye(8)[:1].expand(1, 6, 8)
    x = torch.cat([code, torch.randn(1, 6, 4)], -1)
    with regard.watch(model) as seen:
        model(x), model(x.flip(1))
    assert [r.shape for r in seen.records] == [(1, 1, 6)] * 2
    first, second = (r.weights() for r in seen.records)
    torch.testing.assert_close(second, first.flip(-1))


def test_a_window_whose_keys_differ_behind_their_fingerprint_does_not_slide():
    class Window(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k)

    model, k = Window(), torch.randn(1, 2, 6, 32)
    later = torch.cat([k[:, :, 2:], torch.randn(1, 2, 1, 32)], 2)
    later[:, 1, :2, :4] = later[:, 1, :2, :4].flip(1)
    with regard.watch(model) as seen:
        model(torch.randn(1, 2, 6, 32), k)
        model(torch.randn(1, 2, 1, 32), later)
    assert [r.shape for r in seen.records] == [(2, 6, 6), (2, 1, 5)]


def test_a_model_that_scores_what_another_generated_has_a_record_of_its_own():
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    prompt = torch.randint(60, (1, 6))
    with regard.watch(model) as alone:
        model.generate(prompt, **STEPS)
    with regard.watch(model) as seen:
        out = model.generate(prompt, **STEPS)
        for layer in model.model.layers:  # as if an adapter was switched off
            layer.self_attn.q_proj.weight.data *= -1
        model(out)
    assert [r.shape for r in seen.records] == [(4, 9, 9)] * 2 + [(4, 10, 10)] * 2
    for mine, other in zip(seen.records, alone.records, strict=False):
        torch.testing.assert_close(mine.weights(), other.weights())


def test_a_mask_as_long_as_its_cache_names_the_padding():
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids, mask = torch.randint(60, (2, 6)), torch.ones(2, 16).long()
    mask[1, :2] = mask[:, 6:] = 0
    cache = StaticCache(config=model.config, max_cache_len=16)
    given = {"attention_mask": mask, "position_ids": mask[:, :6].cumsum(1) - 1}
    with regard.watch(model) as seen:
        model(ids, past_key_values=cache, **given)
    assert [r.shape for r in seen.records] == [(4, 6, 6)] * 2 + [(4, 4, 4)] * 2


@pytest.mark.parametrize("cached", [True, False])
def test_a_text_longer_than_the_encoded_one_asks_it_as_one_sequence(cached):
    model, ids = make_bart(), torch.randint(3, 60, (1, 3))
    with regard.watch(model) as seen:
        if cached:
            encoded = model.get_encoder()(ids)
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            for part in torch.randint(3, 60, (2, 1, 3)):
                some = {"encoder_outputs": encoded, "past_key_values": cache}
                model(decoder_input_ids=part, **some)
        else:
            model.generate(ids, use_cache=False, **STEPS)
    rows = [*range(6 if cached else 4)]
    assert find_rows(seen, "encoder_attn") == [rows] * 2
    assert find_rows(seen, "decoder.layers.0.self_attn") == [rows]


@pytest.mark.parametrize("embedded", [True, False])
def test_tokens_that_are_cropped_last_are_taken_back(embedded):
    model, cache = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), DynamicCache()
    ids = torch.randint(60, (1, 5))
    given = {"inputs_embeds": model.get_input_embeddings()(ids)}
    given = given if embedded else {"input_ids": ids}
    with regard.watch(model) as seen:
        model(**given, past_key_values=cache)
        cache.crop(-2)
    assert find_rows(seen, "") == [[0, 1, 2]] * 2
    assert [x.left_out for x in seen.coverage()] == [{"taken back": 2}] * 2


def test_a_call_with_another_scale_is_not_a_part_of_the_run():
    class Switching(Layer):
        def forward(self, ids, past=None):
            q, k, v = self.project(ids)
            if past is not None:
                k, v = (torch.cat(x, 2) for x in zip(past, (k, v), strict=True))
                out = F.scaled_dot_product_attention(q, k, v, scale=1.2 * 8**-0.5)
                return out, (k, v)
            later = torch.ones(ids.shape[1], ids.shape[1]).bool().triu(1)
            scores = (q @ k.mT * 8**-0.5).masked_fill(later, -torch.inf)
            return scores.softmax(-1) @ v, (k, v)

    model, ids = Switching(), torch.randint(50, (1, 12))
    with regard.watch(model) as seen:
        _, cache = model(ids[:, :9])
        for i in range(9, 12):
            _, cache = model(ids[:, i : i + 1], cache)
    assert [r.shape for r in seen.records] == [(2, 9, 9), (2, 3, 12)]
    for record in seen.records:
        sums = record.weights().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.parametrize("size", [1, 4])
def test_rows_of_rounded_logits_sum_to_1(size, tmp_path):
    class Eager(Layer):
        def forward(self, ids):
            q, k, v = (size * x for x in self.project(ids))
            low = torch.full((9, 9), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
            scores = q @ k.mT * 8**-0.5 + low
            return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v

    model = Eager().to(torch.bfloat16)
    model.qkv.weight.data *= 4
    with regard.watch(model) as seen:
        model(torch.randint(50, (1, 9)))
    weights = seen.records[0].weights().float()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 9), atol=1e-4, rtol=0)
    as_numpy = torch.as_tensor(seen.records[0].to("numpy").weights()).float()
    torch.testing.assert_close(as_numpy, weights, atol=1e-4, rtol=0)
    assert "error" not in str(seen.audit()).lower().replace("no error", "")
    seen.page(tmp_path / "seen.html")


@pytest.mark.parametrize("n", [1, 2])
def test_one_key_beside_a_sink_is_recorded(n):
    """The largest logit is subtracted from the key and from the sink."""

    class WithSink(Layer):
        def forward(self, ids):
            q, k, v = self.project(ids)
            sink = torch.tensor([0.7, -1.2])[None, :, None, None]
            scores = q @ k.mT * 8**-0.5
            scores = torch.cat([scores, sink.expand(1, 2, n, 1)], -1)
            scores = scores - scores.max(-1, keepdim=True).values
            self.weights = scores.softmax(-1)[..., :-1]
            return self.weights @ v

    model = WithSink()
    with regard.watch(model) as seen:
        model(torch.randint(50, (1, n)))
    torch.testing.assert_close(seen.records[0].weights(), model.weights[0])
    assert seen.records[0].certificate.failed == 0


def test_keys_that_are_filled_piece_by_piece_are_recorded_beside_padding():
    """As in MLA: the writes come before the product. Padding sees no key."""

    class Filled(Layer):
        def forward(self, ids, mask):
            q, given, v = self.project(ids)
            k = torch.empty_like(given)
            k[..., :3], k[..., 3:] = given[..., :3], given[..., 3:]
            low = torch.finfo(q.dtype).min
            scores = (q @ k.mT * 8**-0.5).masked_fill(~mask, low)
            self.weights = scores.softmax(-1)
            return self.weights @ v

    model = Filled()
    mask = torch.ones(5, 5).tril().bool()
    mask[:2] = False
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randint(50, (1, 5)), mask)
    torch.testing.assert_close(seen.records[0].weights(), model.weights[0])
    assert "average" in seen.coverage()[0].note


def test_a_softmax_in_float64_is_recorded():
    class Wide(Layer):
        def forward(self, ids):
            q, k, v = self.project(ids)
            self.weights = (q @ k.mT * 8**-0.5).softmax(-1, dtype=torch.float64)
            return self.weights.float() @ v

    model = Wide()
    with regard.watch(model, keep="qkv") as seen:
        model(torch.randint(50, (1, 5)))
    found = torch.as_tensor(seen.records[0].weights())
    torch.testing.assert_close(found, model.weights[0], atol=1e-6, rtol=0)
