"""One mechanism follows a model for recording and for editing: where the two disagreed."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from intervened_models import stir
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.ablate.knock_out import knock_out
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.run.modules import Run, follow
from regard.run.passes import Pass, State

SIZES = {"vocabulary": 50, "context": 32, "width": 24, "layers": 2, "heads": 4}
SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": 50, "intermediate_size": 32}
TOKENS = torch.arange(3, 11)[None]


def make_llama():
    torch.manual_seed(0)
    return stir(LlamaForCausalLM(LlamaConfig(**SMALL)))


class Attention(nn.Module):
    """Four heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (12, 4)).transpose(1, 2).split(4, 1)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class TwoParts(nn.Module):
    """A model whose encoder is called alone, as in a generation."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Attention())

    def forward(self, x):
        return self.encoder(x).sum()


def test_a_part_that_is_called_alone_has_the_same_layers_in_a_record_and_an_edit():
    torch.manual_seed(0)
    model, x = TwoParts().eval(), torch.randn(1, 5, 16)
    with torch.no_grad(), regard.watch(model) as seen:
        model(x)
        model.encoder(x)
        model.encoder(x + 1)
    assert {x.name for x in seen.records} == {"encoder.0"}
    with torch.no_grad(), knock_out(model, [(0, 1)]):
        for _ in range(2):  # not only the first one
            assert not bool(model.encoder(x)[..., 4:8].any())


def test_a_copy_of_a_model_that_is_edited_is_not():
    model = make_llama()
    with torch.no_grad():
        plain = model(TOKENS).logits
        with knock_out(model, [(1, 2)]):
            other = copy.deepcopy(model)
            assert not torch.equal(model(TOKENS).logits, plain)
            assert torch.equal(other(TOKENS).logits, plain)


def test_padding_that_our_own_models_are_given_is_known_to_a_watch():
    torch.manual_seed(0)
    model = stir(CausalTransformer(Config(**SIZES)))
    valid = torch.ones(2, 8, dtype=torch.bool)
    valid[0, 6:] = False
    text = TOKENS.repeat(2, 1)
    with torch.no_grad(), regard.watch(model) as seen:
        model(text, valid=valid)
    assert [len(x) for x in seen.recording.tokens] == [6, 8]
    for record, number in zip(seen.records, seen.recording.sequences, strict=True):
        assert record.k.shape[-2] == (6, 8)[number]


def test_an_error_of_a_hook_does_not_reach_a_model_that_is_edited(monkeypatch):
    model = make_llama()

    def fail(*_given):
        raise RuntimeError("one of ours")

    with torch.no_grad():
        plain = model(TOKENS).logits
        monkeypatch.setattr("regard.run.modules.read_given", fail)
        with (
            pytest.raises(OptionError, match="RuntimeError: one of ours"),
            knock_out(model, [(1, 2)]),
        ):
            model(TOKENS)
        monkeypatch.undo()
        assert torch.equal(model(TOKENS).logits, plain)


def test_an_error_inside_of_a_module_leaves_it_and_all_around_it():
    model = make_llama()

    def fail(*_given):
        raise KeyError("theirs")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with torch.no_grad(), knock_out(model, [(0, 2)]):
        with pytest.raises(KeyError, match="theirs"):
            model(TOKENS)
        hook.remove()
        once = model(TOKENS).logits
        assert torch.equal(model(TOKENS).logits, once)


class Notes:
    """A client that notes what it is called with."""

    follows_backward = False

    def __init__(self):
        self.log, self.failures = [], []

    def make_mode(self):
        return self

    def __enter__(self):
        self.log.append("mode on")

    def __exit__(self, *_error):
        self.log.append("mode off")

    def flush(self):
        self.log.append("flush")

    def enter(self, name, _args, _named):
        self.log.append(name)
        return name == "encoder.0"

    def choose_hooks(self, _module):
        return None

    def begin(self, now):
        self.log.append(now.state)

    def end(self, out):
        self.log.append(type(out).__name__)

    def fail(self, error):
        self.failures.append(error)


def test_a_client_is_called_in_this_order():
    model, notes = TwoParts().eval(), Notes()
    run = Run(model, notes)
    with follow(run):
        model(torch.randn(1, 5, 16))
        assert (run.here.names, run.here.now.state) == ([], State.IDLE)
    model(torch.randn(1, 5, 16))  # after the block: nobody is called
    inside = ["encoder.0", "mode on", "encoder.0.qkv", "mode off", "flush"]
    log = [State.BEGUN, "", "encoder", *inside, "Tensor"]
    assert notes.log == [*log, "flush"]  # again, when the block is left
    assert not notes.failures
    assert run.ran == {"", "encoder", "encoder.0", "encoder.0.qkv"}


def test_each_thread_has_its_own_pass():
    model, notes = TwoParts().eval(), Notes()
    run, found = Run(model, notes), []

    def look():
        found.append((run.here.now.depth, run.here.name))
        model(torch.randn(1, 5, 16))
        found.append((run.here.now.depth, run.here.name))

    def start(*_given):
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            found.append((run.here.now.depth, run.here.name))

    with follow(run):
        model.encoder[0].qkv.register_forward_hook(start)
        model(torch.randn(1, 5, 16))
    assert found == [(0, ""), (0, ""), (1, "encoder.0")]


def test_layers_of_a_pass_are_numbered_and_those_after_it_begin_again():
    now = Pass()
    assert now.state is State.IDLE
    assert now.begin("", now.given)
    assert [now.name_layer(x) for x in ("a", "b", "a")] == ["a", "b", "a#2"]
    assert not now.begin("lm", now.given)  # a model inside: a layer has attended
    now.end()
    assert now.state is State.RUNNING
    now.end()
    assert (now.state, now.name_layer("a")) == (State.IDLE, "a")


def test_the_intervention_of_the_recipe_is_that_of_edited_weights():
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text("utf-8")
    section = text[text.index("## Add an intervention") :]
    code = section[section.index("```python") + 10 :].partition("```")[0]
    scope = {"__name__": "recipe"}
    exec(compile(code, "recipe", "exec"), scope)
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True).double().eval()
    edited, x = copy.deepcopy(model), torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        edited.self_attn.in_proj_weight[8:16] *= 3
        edited.self_attn.in_proj_bias[8:16] *= 3
        with scope["sharpen_heads"](model, [(0, 1)], factor=3.0):
            found = model(x)
        assert torch.allclose(found, edited(x), atol=1e-12)
        assert not torch.allclose(found, model(x), atol=1e-3)
