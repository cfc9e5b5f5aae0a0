"""Models whose coverage must say something: for them "correct" without a word is wrong.

A judge that looks at softmaxes cannot know that their result is changed before it is
used, or that a layer attends without one. These models are known to do so.
"""

CHANGED = "weights change after the softmax"
NO_SOFTMAX = "it attends without a softmax"

MUST_TELL = {
    # mixed over heads, or with another matrix
    "timm/cait_xxs24_224": CHANGED,
    "timm/convit_tiny": CHANGED,
    "vit-pytorch/cait": CHANGED,
    "vit-pytorch/deepvit": CHANGED,
    "x-transformers/talking-heads": CHANGED,
    "x-transformers/cog-signed": CHANGED,  # times the signs of the scores
    "slot-attention/SlotAttention": CHANGED,  # normalised again, over the keys
    # linear, additive, by hand or over the edges of a graph
    "timm/efficientvit_b0": NO_SOFTMAX,
    "timm/swiftformer_xs": NO_SOFTMAX,
    "torch/written-hidden": NO_SOFTMAX,
    "x-transformers/sigmoid": NO_SOFTMAX,
    "diffusers/sana": NO_SOFTMAX,
    "performer-pytorch/PerformerLM": NO_SOFTMAX,
    "performer-pytorch/PerformerLM-local": NO_SOFTMAX,
    "reformer-pytorch/ReformerLM": NO_SOFTMAX,
    "h-transformer-1d/HTransformer1D": NO_SOFTMAX,
    "mega-pytorch/Mega-laplacian": NO_SOFTMAX,
    "ring-attention-pytorch/RingTransformer-buckets": NO_SOFTMAX,
    "torch-geometric/gat": NO_SOFTMAX,
    "torch-geometric/gatv2": NO_SOFTMAX,
    "torch-geometric/gat-net": NO_SOFTMAX,
    "torch-geometric/super-gat": NO_SOFTMAX,
    "torch-geometric/transformer": NO_SOFTMAX,
    "torch-geometric/gps": NO_SOFTMAX,  # its convolution; its attention has one
}
