"""What the coverage says about a layer: why it is missing, or what to know about it.

Next: tally.py
"""

EARLIER = (
    "its first keys were there before its queries: cached before the watch, or learnt; "
    "positions count from the first of them, which may be padding"
)
PIECES = (
    "its first keys are not those of an earlier call: they were cached before the "
    "watch, or its generation is in pieces"
)
PLACE = "where its queries stand among its keys could not be told"
PACKED = "several sequences are packed into one, and are not told apart"
PAGED = "its requests, batched with a paged cache, could not be told apart"
FOLDED = (
    "its heads seem to be counted as queries: its projections have {} times as many "
    "heads"
)
SILENT = "it ran, but no softmax was heard in it"
SAMPLES = "vmap runs it once per sample, and its samples are not alike"
ALTERED = "an intervention changed what heads output; they are recorded without it"
EMPTY = "calls without queries or keys are not kept"
TAKEN_BACK = "taken back"  # guesses that were rejected, and what was cropped
AGAIN = "computed again"
ENDED = "of sequences that ended"
PADDING = "of padding"
FAILED = (
    "its records contradict the model: {} of {} checked rows are off by up to {:.2g}, "
    "where rounding explains {:.1g}"
)
LOST = "{} of its {} rows are in no record"
NEW = "modules were added or replaced: what they attend to has another name, or none"
MISSED = (
    "{} softmaxes or attention calls ran no operator that could be observed: they were "
    "replaced by something else, or by another function"
)
UNSEEN = (
    "in {} of its passes no call was observed: it did not attend, or not in the way "
    "that it did before"
)
COMPILED = "compiled code runs uncompiled while it is watched; its last bits may differ"
