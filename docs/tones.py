"""A small Whisper that learned to name tones, for the picture of a sound.

Next: paper_figures.py
"""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import WhisperConfig, WhisperForConditionalGeneration

import regard
from regard.seen import Seen

NAMES = ("do", "re", "mi", "fa", "so", "la", "ti")
START, FRAMES, BINS, TONES = 8, 100, 16, 6
STEPS = 300


def hear_tones() -> tuple[Seen, list[str], Tensor]:
    """Return what was seen of a new sound, its tones, and its spectrogram."""
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "d_model": 64, "vocab_size": 16}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": BINS}
    sizes |= {"max_source_positions": FRAMES // 2, "max_target_positions": 8}
    tokens = {"bos_token_id": 8, "pad_token_id": 9, "eos_token_id": 10}
    tokens |= {"decoder_start_token_id": START}
    config = WhisperConfig(**sizes, **tokens, init_std=0.1, dropout=0.0)
    model = WhisperForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(STEPS):
        sounds, tones = draw_tones(32)
        logits = model(**make_inputs(sounds, tones)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tones.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.manual_seed(5)
    sounds, tones = draw_tones(1)
    with regard.watch(model.eval()) as seen, torch.inference_mode():
        model(**make_inputs(sounds, tones))
    return seen, [NAMES[i] for i in tones[0].tolist()], sounds[0]


def make_inputs(sounds: Tensor, tones: Tensor) -> dict[str, Tensor]:
    """Return a sound and the tones that were named before each."""
    before = F.pad(tones[:, :-1], (1, 0), value=START)
    return {"input_features": sounds, "decoder_input_ids": before}


def draw_tones(n: int) -> tuple[Tensor, Tensor]:
    """Return spectrograms of six tones of different lengths, and the tones."""
    tones = torch.randint(len(NAMES), (n, TONES))
    sounds = torch.rand(n, BINS, FRAMES) * 0.4
    for sound, row in zip(sounds, tones.tolist(), strict=True):
        ends = (torch.rand(TONES) + 0.5).cumsum(0)
        stops = (ends / ends[-1] * FRAMES).round().long().tolist()
        for tone, first, last in zip(row, [0, *stops], stops, strict=False):
            sound[2 * tone + 1 : 2 * tone + 3, first + 1 : last - 1] += 1
    return sounds, tones
