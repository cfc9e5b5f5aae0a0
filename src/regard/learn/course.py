"""The order of the exercises, from one dot product to a head in a real model.

Each name is a file in exercises/.

Next: exercise.py
"""

ORDER = (
    "one_score",
    "scores",
    "softmax",
    "scaling",
    "attend",
    "causal_mask",
    "masks",
    "batches",
    "heads_split",
    "multi_head",
    "fused_qkv",
    "cross_attention",
    "sinusoidal",
    "rotary",
    "layer_norm",
    "rms_norm",
    "feed_forward",
    "block",
    "decoder_logits",
    "sampling",
    "kv_cache",
    "online_softmax",
    "merge_parts",
    "grouped_heads",
    "mask_algebra",
    "copy_task",
    "induction_head",
    "without_the_matrix",
    "tile_proofs",
    "ring",
    "row_entropy",
    "read_head",
    "ablate_head",
    "find_document",
)
