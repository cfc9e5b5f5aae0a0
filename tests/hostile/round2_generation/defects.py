"""The smallest script for each defect: prints what is expected and what is shown."""

import numpy as np
import regard
import torch
from caches import SIZES, V, batch, gen, llama, mistral, text
from hidden import bart
from pieces import QuantizedCache
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

torch.manual_seed(0)


def adapter_off():
    """D1: generate with an adapter, then one pass over the text without it."""
    model = llama()
    q = [x.self_attn.q_proj.weight for x in model.model.layers]
    with regard.watch(model) as alone, torch.no_grad():
        gen(model, text(6, 1)[None], n=3)
    with regard.watch(model) as seen, torch.no_grad():
        out = gen(model, text(6, 1)[None], n=3)
        for x in q:
            x.data *= -1  # another q: as if an adapter is switched off
        model(out)
    a, b = (np.asarray(x.layer(0).weights(slice(0, 8)))[..., :8] for x in (alone, seen))
    print("D1 expected: 2 sequences, the first with the weights of the generation")
    off = np.abs(a - b).max()
    print("   observed:", len(seen.records) // 2, "sequence, off by", off,
          dict(seen.coverage()[0].left_out))


def window_of_before():
    """D2: the cache of a window was filled before the watch."""
    model, cache = mistral(), DynamicCache(config=mistral().config)
    first = gen(model, text(12, 1)[None], n=3, past_key_values=cache)
    with regard.watch(model) as seen:
        gen(model, torch.cat([first, text(2, 5)[None]], 1), n=3, past_key_values=cache)
    print("D2 expected: rows 14-18, keys 9-18")
    print("   observed:", seen.layer(0).q_positions.tolist(),
          seen.layer(0).k_positions.tolist(), seen.coverage()[0].note)


def padded_cache_of_before():
    """D3: a left-padded cache was filled before the watch."""
    model, cache = llama(), DynamicCache()
    ids, mask = batch([6, 3])
    first = gen(model, ids, mask, n=3, past_key_values=cache)
    more = torch.cat([first, torch.stack([text(3, 5), text(3, 6)])], 1)
    mask = torch.cat([mask, torch.ones(2, 6).long()], 1)
    with regard.watch(model) as seen:
        gen(model, more, mask, n=3, past_key_values=cache)
    r = seen.layer(0, sequence=1)
    print("D3 expected: sequence 1 (3 of padding): rows 5-10, 0.32 on its first token")
    print("   observed:", r.q_positions.tolist(), "weight on the first key",
          float(r.weights()[..., 0].max()), "audit:", len(seen.audit().errors)
          if hasattr(seen.audit(), "errors") else str(seen.audit())[:60])


def long_static_mask():
    """D4: attention_mask has the length of the static cache."""
    model, (ids, mask) = llama(), batch([6, 4])
    cache = StaticCache(config=model.config, max_cache_len=16)
    whole = torch.zeros(2, 16).long()
    whole[:, :6] = mask
    with regard.watch(model) as seen, torch.no_grad():
        model(ids, attention_mask=whole, past_key_values=cache,
              position_ids=(mask.cumsum(1) - 1).clamp(0))
    print("D4 expected: sequence 1 has 4 rows, 2 of padding")
    print("   observed:", seen.layer(0, sequence=1).shape, "sink",
          float(seen.table()["sink"][8]), str(seen).splitlines()[-1])


def fp8_left_padded():
    """D5: as D3, in one plain generation, with a quantized cache."""
    model, (ids, mask) = llama(), batch([6, 3])
    with regard.watch(model) as seen:
        gen(model, ids, mask, n=4, past_key_values=QuantizedCache("fp8", model.config))
    print("D5 expected: the new rows of sequence 1 are 3, 4, 5")
    print("   observed:", [r.q_positions.tolist() for r in seen.records
                           if "layers.0" in r.name])


def cross_chunk():
    """D6: cross-attention continues with as many queries as the encoder has."""
    model, ids, dec = bart(), text(3, 1)[None], text(6, 9)[None]
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with regard.watch(model) as seen, torch.no_grad():
        enc = model.get_encoder()(ids)
        for i in (0, 3):
            model(encoder_outputs=enc, decoder_input_ids=dec[:, i : i + 3],
                  past_key_values=cache)
    print("D6 expected: one sequence, cross-attention with rows 0-5")
    print("   observed:", [r.q_positions.tolist() for r in seen.records
                           if r.name.endswith("layers.0.encoder_attn")],
          [x.note for x in seen.coverage() if x.note])


def cross_without_cache():
    """D7: no cache, and the text becomes as long as the encoder's."""
    model, ids = bart(), text(3, 1)[None]
    with regard.watch(model) as seen:
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4,
                       min_new_tokens=4, do_sample=False, use_cache=False)
    x = [x for x in seen.coverage() if "encoder_attn" in x.name][0]
    print("D7 expected: cross-attention is recorded")
    print("   observed:", x.reason, x.rows, x.in_records, dict(x.left_out))


def crop_at_the_end():
    """D8: guesses that were rejected last stay in the record."""
    for name, embeds in (("tokens", False), ("inputs_embeds", True)):
        model, cache, ids = llama(), DynamicCache(), text(5, 2)[None]
        with regard.watch(model) as seen, torch.no_grad():
            if embeds:
                model(inputs_embeds=model.get_input_embeddings()(ids),
                      past_key_values=cache)
            else:
                model(ids, past_key_values=cache)
            cache.crop(-2)
        print("D8 expected: 3 rows, observed with", name, seen.layer(0).shape[1])
    model, ids = bart(), text(7, 1)[None]
    with regard.watch(model) as seen:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9,
                             min_new_tokens=9, do_sample=False,
                             prompt_lookup_num_tokens=3)
    print("D8 expected, prompt lookup with BART:", out.shape[1] - 1, "rows, observed",
          seen.layer("model.decoder.layers.0.self_attn").shape[1])


def half_precision_eager():
    """D9: half precision with eager attention is not traced."""
    for spread in (0.02, 0.1, 0.3):
        model = llama(initializer_range=spread).to(torch.bfloat16)
        model.set_attn_implementation("eager")
        with regard.watch(model) as seen:
            gen(model, text(20, 1)[None], n=3)
        print("D9 expected: 1 sequence; initializer_range", spread, "observed:",
              len(seen.records) // 2, "sequences,", seen.coverage()[0].note[:45])


def hidden_sequence():
    """D10: a sequence that attention_mask hides: weights and attentions raise."""
    model, (ids, mask) = llama(), batch([6, 4])
    mask[1] = 0
    with regard.watch(model) as seen, torch.no_grad():
        model(ids, attention_mask=mask)
    print("D10 expected: empty arrays, and the attention of sequence 0")
    for f in (lambda: seen.layer(0, sequence=1).weights(), lambda: seen.attentions):
        try:
            print("   observed:", type(f()))
        except Exception as e:
            print("   observed:", type(e).__name__, str(e)[:80])


def falcon_new():
    """D11: Falcon with grouped heads: a generation is two sequences."""
    from families import DECODERS
    model = DECODERS["falcon_new"]()
    with regard.watch(model) as seen:
        gen(model, text(6, 1)[None], n=4)
    print("D11 expected: 1 sequence of 9 rows")
    print("   observed:", [(r.shape, tuple(r.k.shape)) for r in seen.records
                           if ".0." in r.name])


def copies_of_a_watched_model():
    """D12: a model that is pickled in a watch needs regard to be loaded."""
    import pickle
    model = llama()
    with regard.watch(model):
        data = pickle.dumps(model)
    print("D12 expected: no trace of regard in the file, observed:",
          b"regard" in data, b"regard" in pickle.dumps(model))


def switched():
    """D13: another attention implementation, after a generation in the same watch."""
    model = llama()
    with regard.watch(model) as seen:
        gen(model, text(6, 1)[None], n=3)
        model.set_attn_implementation("eager")
        gen(model, text(7, 2)[None], n=3)
    print("D13 expected: 2 sequences, observed:", len(seen.records) // 2,
          seen.coverage()[0].note[:45])


def ablation_with_a_long_mask():
    """D4b: as D4, knock_out hides another token, without a message."""
    model, (ids, mask) = llama(), batch([6, 4])
    whole = torch.zeros(2, 16).long()
    whole[:, :6] = mask
    pos = (mask.cumsum(1) - 1).clamp(0)

    def run(m):
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            return model(ids, attention_mask=m, past_key_values=cache,
                         position_ids=pos).logits[:, -1]
    with regard.knock_out(model, keys=[1]):
        got = run(whole)
    hide = whole.clone()
    hide[0, 1] = hide[1, 3] = 0  # token 1 of each sequence; the second has 2 of padding
    print("D4b expected: equal logits in both sequences, and others than without")
    print("   observed: off by", (got - run(hide)).abs().amax(1).tolist(),
          "from no ablation", (got - run(whole)).abs().amax(1).tolist())


def repeated_rows():
    """D14: the count of rows, if a cache is repeated."""
    model, cache = llama(), DynamicCache()
    with regard.watch(model) as seen, torch.no_grad():
        model(text(6, 1)[None], past_key_values=cache)
        cache.batch_repeat_interleave(4)
        model(torch.stack([text(1, i) for i in range(4)]), past_key_values=cache)
    print("D14 expected: at most all rows are kept, observed:",
          str(seen).splitlines()[-1].split(";")[-1])


def evicted_keys():
    """D15: keys were evicted from the middle, position_ids go on."""
    model, cache, keep = llama(), DynamicCache(), [0, 1, 6, 7, 8, 9]
    with regard.watch(model) as seen, torch.no_grad():
        model(text(10, 1)[None], past_key_values=cache)
        for x in cache.layers:
            x.keys, x.values = x.keys[:, :, keep], x.values[:, :, keep]
        model(text(1, 2)[None], past_key_values=cache,
              position_ids=torch.tensor([[10]]))
    r = seen.layer(0, sequence=1)
    print("D15 expected: row 10, keys", [*keep, 10], "or a note that they are unknown")
    print("   observed:", r.q_positions.tolist(), r.k_positions.tolist(),
          seen.coverage()[0].note)


if __name__ == "__main__":
    for f in (
        adapter_off, window_of_before, padded_cache_of_before, long_static_mask,
        ablation_with_a_long_mask, fp8_left_padded, cross_chunk, cross_without_cache,
        crop_at_the_end, half_precision_eager, hidden_sequence, falcon_new,
        copies_of_a_watched_model, switched, repeated_rows, evicted_keys,
    ):
        f()
