"""Encoders, encoder-decoders, vision, audio, multi-modal models."""

import numpy as np
import torch
import transformers as tf
from families import SMALL, V, build, compare_steps, logged_forward, padded, text
from oracle import Log, main, report, situation, spread, watched

ENC = dict(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
           num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3,
           pad_token_id=0)
VIS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
           num_attention_heads=4, image_size=16, patch_size=4, initializer_range=0.3)


def pixels(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def bart(cls="BartForConditionalGeneration", config="BartConfig", **more):
    return build(cls, config, **dict(
        vocab_size=V, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.3, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=None) | more)


def t5(cls="T5ForConditionalGeneration", config="T5Config", **more):
    return build(cls, config, **dict(
        vocab_size=V, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
        initializer_factor=2.0, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0) | more)


def whisper():
    return build("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=V,
                 num_mel_bins=8, encoder_layers=2, decoder_layers=2,
                 encoder_attention_heads=4, decoder_attention_heads=4, d_model=32,
                 encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=12,
                 max_target_positions=32, init_std=0.3, pad_token_id=0, bos_token_id=1,
                 eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None,
                 begin_suppress_tokens=None)


def seq2seq(name, make, **inputs):
    def forward():
        model = make()
        ids, mask = padded([9, 6], "right")
        dec, dmask = padded([5, 3], "right")
        dec[dec == 0] = 5
        return logged_forward(
            model, lambda m: m(input_ids=ids, attention_mask=mask,
                               decoder_input_ids=dec).logits, {9: mask})

    def generate():
        model = make()
        ids, mask = padded([9, 6], "right")

        def run(m):
            return m.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=0,
                              min_new_tokens=6, num_beams=1)

        with Log(model) as log:
            run(model)
        seen, out, bad = watched(model, run)
        report(seen)
        return bad + seq_steps(seen, log, mask)

    forward.__name__, generate.__name__ = f"forward_{name}", f"generate_{name}"
    situation(forward)
    situation(generate)


def seq_steps(seen, log, mask, heads=4):
    """Compare every layer: encoder and cross keys by mask, decoder by steps."""
    bad, steps = [], {}
    for name, w in log.calls:
        steps.setdefault(name, []).append(w)
    for name, ws in steps.items():
        if name not in seen.layers:
            bad.append(f"{name} is not recorded")
            continue
        for b in range(len(ws[0])):
            r = seen.layer(name, sequence=b)
            got = np.asarray(r.weights())
            nk = max(w.shape[-1] for w in ws)
            parts = []
            for w in ws:
                x = w[b].numpy()
                parts.append(np.pad(x, ((0, 0), (0, 0), (0, nk - x.shape[-1]))))
            want = np.concatenate(parts, 1)
            if mask is not None and nk == mask.shape[1]:
                real = np.flatnonzero(mask[b].numpy())
                want = want[:, :, real]
                if want.shape[1] == nk and len(ws) == 1:
                    want = want[:, real]
            if got.shape != want.shape:
                bad.append(f"{name}/{b}: {got.shape} for {want.shape}")
                continue
            off = np.abs(got - want).max()
            if not off < 1e-3:
                bad.append(f"WRONG {name}/{b} by {off:.3g}")
    return bad


for _n, _m in {
    "t5": t5,
    "umt5": lambda: t5("UMT5ForConditionalGeneration", "UMT5Config"),
    "bart": bart,
    "marian": lambda: bart("MarianMTModel", "MarianConfig", decoder_vocab_size=V),
    "pegasus": lambda: bart("PegasusForConditionalGeneration", "PegasusConfig"),
    "m2m_100": lambda: bart("M2M100ForConditionalGeneration", "M2M100Config"),
    "blenderbot": lambda: bart("BlenderbotForConditionalGeneration",
                               "BlenderbotConfig"),
    "t5gemma_bert2bert": lambda: tf.EncoderDecoderModel(
        config=tf.EncoderDecoderConfig.from_encoder_decoder_configs(
            tf.BertConfig(**ENC), tf.BertConfig(
                **ENC, is_decoder=True, add_cross_attention=True),
            decoder_start_token_id=1, pad_token_id=0)).eval(),
}.items():
    seq2seq(_n, _m)


@situation
def whisper_generate():
    model = whisper()
    x = pixels(2, 8, 24)
    dec = torch.tensor([[3, 7], [3, 8]])

    def run(m):
        return tf.GenerationMixin.generate(
            m, x, decoder_input_ids=dec, max_new_tokens=5, do_sample=False,
            min_new_tokens=5, pad_token_id=0)

    with Log(model) as log:
        run(model)
    seen, out, bad = watched(model, run)
    report(seen)
    return bad + seq_steps(seen, log, None)


@situation
def whisper_forward_teacher():
    x = pixels(2, 8, 24)
    return logged_forward(whisper(), lambda m: m(
        x, decoder_input_ids=text(2, 5), attention_mask=None).logits)


@situation
def encoder_once_then_two_generations():
    """The encoder's output is computed once and given to two generations."""
    model = bart()
    ids, mask = padded([9, 6], "right")

    def run(m):
        with torch.no_grad():
            enc = m.get_encoder()(ids, attention_mask=mask)
        outs = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            outs.append(m.generate(encoder_outputs=enc, attention_mask=mask,
                                   max_new_tokens=4, min_new_tokens=4, do_sample=True))
        return outs

    with Log(model) as log:
        run(model)
    seen, out, bad = watched(model, run)
    report(seen)
    if len(seen.recording.sequences) and False:
        return bad
    # the decoder's texts, in order
    for g in range(2):
        for b in range(2):
            for i in range(2):
                for part in ("self_attn", "encoder_attn"):
                    name = f"model.decoder.layers.{i}.{part}"
                    ws = log.of(name)[4 * g : 4 * g + 4]
                    try:
                        r = seen.layer(name, sequence=2 * g + b)
                    except Exception as e:
                        bad.append(f"{name} of {2 * g + b}: {e}"[:160])
                        continue
                    got = np.asarray(r.weights())
                    nk = ws[-1].shape[-1]
                    want = np.concatenate([np.pad(
                        w[b].numpy(), ((0, 0), (0, 0), (0, nk - w.shape[-1])))
                        for w in ws], 1)
                    if part == "encoder_attn":
                        want = want[..., mask[b].numpy() > 0]
                    if got.shape != want.shape or np.abs(got - want).max() > 1e-3:
                        bad.append(f"WRONG {name} generation {g} sequence {b}: "
                                   f"{got.shape} for {want.shape}")
    return bad


def encoder(name, make, side="right", **more):
    def f():
        ids, mask = padded([9, 5], side)
        return logged_forward(
            make(), lambda m: m(input_ids=ids, attention_mask=mask, **more)[0],
            {9: mask})

    f.__name__ = f"encoder_{name}"
    situation(f)


encoder("bert", lambda: build("BertModel", "BertConfig", **ENC))
encoder("bert_left", lambda: build("BertModel", "BertConfig", **ENC), "left")
encoder("roberta", lambda: build("RobertaModel", "RobertaConfig", **ENC))
encoder("deberta_v2", lambda: build(
    "DebertaV2Model", "DebertaV2Config", **ENC, relative_attention=True,
    pos_att_type=["c2p", "p2c"], position_buckets=4, share_att_key=True))
encoder("deberta", lambda: build(
    "DebertaModel", "DebertaConfig", **ENC, relative_attention=True,
    pos_att_type=["c2p", "p2c"], max_relative_positions=8))
encoder("distilbert", lambda: build(
    "DistilBertModel", "DistilBertConfig", vocab_size=V, dim=32, n_layers=2, n_heads=4,
    hidden_dim=48, max_position_embeddings=64, initializer_range=0.3))
encoder("albert", lambda: build("AlbertModel", "AlbertConfig", **ENC,
                                embedding_size=16))
encoder("modernbert", lambda: build(
    "ModernBertModel", "ModernBertConfig", **ENC | dict(
        num_hidden_layers=3, local_attention=4, global_attn_every_n_layers=3,
        cls_token_id=1, sep_token_id=2)))
encoder("mpnet", lambda: build("MPNetModel", "MPNetConfig", **ENC))
encoder("xlnet", lambda: build(
    "XLNetModel", "XLNetConfig", vocab_size=V, d_model=32, n_layer=2, n_head=4,
    d_inner=48, initializer_range=0.3))
encoder("electra", lambda: build("ElectraModel", "ElectraConfig", **ENC,
                                 embedding_size=16))
encoder("squeezebert", lambda: build(
    "SqueezeBertModel", "SqueezeBertConfig", **ENC, embedding_size=32, q_groups=2,
    k_groups=2, v_groups=2))
encoder("esm", lambda: build("EsmModel", "EsmConfig", **ENC,
                             position_embedding_type="rotary", mask_token_id=3,
                             token_dropout=False))
encoder("funnel", lambda: build(
    "FunnelModel", "FunnelConfig", vocab_size=V, block_sizes=[1, 1],
    num_decoder_layers=1, d_model=32, n_head=4, d_head=8, d_inner=48))
encoder("mega_roformer", lambda: build("RoFormerModel", "RoFormerConfig", **ENC))


@situation
def vit():
    x = pixels(2, 3, 16, 16)
    return logged_forward(build("ViTModel", "ViTConfig", **VIS), lambda m: m(x)[0])


@situation
def clip():
    model = build("CLIPModel", "CLIPConfig", text_config=ENC | dict(
        bos_token_id=1, eos_token_id=2, projection_dim=16), vision_config=VIS,
        projection_dim=16)
    ids, mask = padded([9, 5], "right")
    x = pixels(2, 3, 16, 16)
    return logged_forward(model, lambda m: m(
        input_ids=ids, pixel_values=x, attention_mask=mask).logits_per_image, {9: mask})


@situation
def clip_more_texts_than_images():
    model = build("CLIPModel", "CLIPConfig", text_config=ENC | dict(
        bos_token_id=1, eos_token_id=2, projection_dim=16), vision_config=VIS,
        projection_dim=16)
    ids, mask = padded([9, 5, 7], "right")
    x = pixels(1, 3, 16, 16)
    return logged_forward(model, lambda m: m(
        input_ids=ids, pixel_values=x, attention_mask=mask).logits_per_image, {9: mask})


@situation
def siglip():
    model = build("SiglipModel", "SiglipConfig", text_config=ENC, vision_config=VIS)
    ids, x = text(2, 9), pixels(2, 3, 16, 16)
    return logged_forward(model, lambda m: m(
        input_ids=ids, pixel_values=x).logits_per_image)


def windows(seen_name, cls, config):
    def f():
        model = build(cls, config, image_size=16, patch_size=2, embed_dim=16,
                      depths=[2, 2], num_heads=[2, 4], window_size=4)
        x = pixels(2, 3, 16, 16)
        return logged_forward(model, lambda m: m(x)[0])
    f.__name__ = seen_name
    situation(f)


windows("swin_shifted_windows", "SwinModel", "SwinConfig")
windows("swinv2_shifted_windows", "Swinv2Model", "Swinv2Config")


@situation
def wav2vec2_padded():
    model = build("Wav2Vec2Model", "Wav2Vec2Config", **{
        k: v for k, v in ENC.items() if k not in ("max_position_embeddings",)},
        conv_dim=(8, 8), conv_stride=(4, 2), conv_kernel=(4, 2),
        num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer")
    x = pixels(2, 80)
    mask = torch.ones(2, 80).long()
    mask[1, 56:] = 0
    frames = torch.zeros(2, 10).long()
    frames[0], frames[1, :7] = 1, 1
    return logged_forward(model, lambda m: m(x, attention_mask=mask)[0], {10: frames})


@situation
def llava_generate_padded():
    model = build("LlavaForConditionalGeneration", "LlavaConfig",
                  text_config=tf.LlamaConfig(**SMALL, num_key_value_heads=2),
                  vision_config=tf.CLIPVisionConfig(**VIS, projection_dim=16),
                  image_token_index=59, vision_feature_layer=-1)
    ids = text(2, 24) % 57 + 2
    ids[:, 4:20] = 59
    mask = torch.ones_like(ids)
    ids[1, :3], mask[1, :3] = 0, 0
    x = pixels(2, 3, 16, 16)

    def run(m):
        return m.generate(input_ids=ids, attention_mask=mask, pixel_values=x,
                          max_new_tokens=4, do_sample=False, pad_token_id=0,
                          suppress_tokens=[0, 59])

    with Log(model) as log:
        run(model)
    seen, out, bad = watched(model, run)
    report(seen)
    log.calls = [c for c in log.calls if "language_model" in c[0]]
    return bad + compare_steps(seen, log, mask, 24)


@situation
def perceiver_cross():
    model = build("PerceiverModel", "PerceiverConfig", num_latents=6, d_latents=16,
                  d_model=32, num_blocks=1, num_self_attends_per_block=2,
                  num_self_attention_heads=4, num_cross_attention_heads=2,
                  qk_channels=16, v_channels=16)
    x = pixels(2, 9, 32)
    mask = torch.ones(2, 9).long()
    mask[1, 6:] = 0
    return logged_forward(model, lambda m: m(x, attention_mask=mask)[0], {9: mask})


@situation
def detr_like_table():
    model = build("TimesformerModel", "TimesformerConfig", image_size=8, patch_size=4,
                  num_frames=3, hidden_size=32, num_hidden_layers=2,
                  num_attention_heads=4, intermediate_size=48)
    x = pixels(2, 3, 3, 8, 8)
    return logged_forward(model, lambda m: m(x)[0])


@situation
def longformer_global():
    model = build("LongformerModel", "LongformerConfig", **ENC, attention_window=4)
    ids, mask = text(1, 12), torch.ones(1, 12).long()
    return logged_forward(model, lambda m: m(ids, attention_mask=mask)[0])


if __name__ == "__main__":
    main()
