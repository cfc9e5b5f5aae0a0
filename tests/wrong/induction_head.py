import numpy as np


def duplicate_token(weights, tokens):
    """read the key after it"""
    found = []
    for i in range(len(tokens)):
        earlier = [j for j in range(i) if tokens[j] == tokens[i]]
        if earlier:
            found.append(weights[i, earlier[-1]])
    return np.mean(found)


def list_index(weights, tokens):
    """take the last one before the query"""
    row = tokens.tolist()
    found = [
        weights[i, row.index(t) + 1] for i, t in enumerate(row) if row.index(t) < i
    ]
    return sum(found) / len(found)


def zeros_for_the_rest(weights, tokens):
    """The sum is divided by the number of all queries"""
    scores = np.zeros(len(tokens))
    last = {}
    for i, token in enumerate(tokens.tolist()):
        if token in last:
            scores[i] = weights[i, last[token] + 1]
        last[token] = i
    return scores.mean()


def key_before_query(weights, tokens):
    """the row is the query"""
    found, last = [], {}
    for i, token in enumerate(tokens.tolist()):
        if token in last:
            found.append(weights[last[token] + 1, i])
        last[token] = i
    return np.mean(found)


def writes_before_it_reads(weights, tokens):
    """induction_score raised IndexError in line"""
    found, last = [], {}
    for i, token in enumerate(tokens.tolist()):
        last[token] = i
        found.append(weights[i, last[token] + 1])
    return np.mean(found)


def token_before(weights, tokens):
    """This reads the weight on the token before the earlier same token"""
    found = []
    for i in range(len(tokens)):
        earlier = np.flatnonzero(tokens[:i] == tokens[i])
        if earlier.size:
            found.append(weights[i, earlier[-1] - 1])
    return np.mean(found)


def a_list_of_weights(weights, tokens):
    """The weights are returned as a list"""
    return [weights[2, 1], weights[2, 1]]
