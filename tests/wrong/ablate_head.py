import torch
from torch.nn.functional import cross_entropy

import regard


def measure(model, tokens, reduction="mean"):
    x = torch.tensor(tokens)
    with torch.inference_mode():
        logits = model(x[None])[0]
    return float(cross_entropy(logits[:-1], x[1:], reduction=reduction))


def not_shifted(model, tokens, layer, head):
    """the logits at i predict tokens[i + 1]"""
    x, found = torch.tensor(tokens), []
    for heads in ([], [(layer, head)]):
        with torch.inference_mode():
            if heads:
                with regard.knock_out(model, heads=heads):
                    logits = model(x[None])
            else:
                logits = model(x[None])
        found.append(cross_entropy(logits[0], x))
    return tuple(found)


def summed(model, tokens, layer, head):
    """This is the sum of the losses"""
    whole = measure(model, tokens, "sum")
    with regard.knock_out(model, heads=[(layer, head)]):
        return whole, measure(model, tokens, "sum")


def outside(model, tokens, layer, head):
    """layer 0 was not seen attending, so nothing was cut from it"""
    with regard.knock_out(model, heads=[(layer, head)]):
        pass
    return measure(model, tokens), measure(model, tokens)


def layer_instead(model, tokens, layer, head):
    """This removes all heads of the layer"""
    whole = measure(model, tokens)
    with regard.knock_out(model, layers=[layer]):
        return whole, measure(model, tokens)


def the_rise(model, tokens, layer, head):
    """The second number is the rise of the loss"""
    whole = measure(model, tokens)
    with regard.knock_out(model, heads=[(layer, head)]):
        return whole, measure(model, tokens) - whole


def other_order(model, tokens, layer, head):
    """the whole model comes first"""
    with regard.knock_out(model, heads=[(layer, head)]):
        without = measure(model, tokens)
    return without, measure(model, tokens)


def another_head(model, tokens, layer, head):
    """The head after it is removed"""
    whole = measure(model, tokens)
    with regard.knock_out(model, heads=[(layer, (head + 1) % model.config.heads)]):
        return whole, measure(model, tokens)


def not_a_with(model, tokens, layer, head):
    """must run inside the with block"""
    whole = measure(model, tokens)
    regard.knock_out(model, heads=[(layer, head)])
    return whole, measure(model, tokens)


def one_number(model, tokens, layer, head):
    """it returned 1 values, expected 2"""
    with regard.knock_out(model, heads=[(layer, head)]):
        return measure(model, tokens)
