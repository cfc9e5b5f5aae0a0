"""Follow a running model: which module, which pass, and what it was given.

Two packages do so: lens records what they observe, ablate edits it.

    with follow(Run(model, client)):
        model(...)                      client.enter(…), client.begin(…), client.end(…)

Next: modules.py
"""
