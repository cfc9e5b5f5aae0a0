"""Heads as matrices: factors against dense formulas, and against what a model does."""

import pytest
import torch
from intervened_models import stir, tokens
from torch.nn.functional import layer_norm
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

import regard
from regard.ablate.circuits import (
    read_circuit,
    read_vocabulary,
    score_composition,
    score_copying,
)
from regard.errors import OptionError
from regard.nn.decoder import CausalTransformer
from regard.plain.config import Config
from regard.recording.head_outputs import compute_outputs

SIZES = {"vocabulary": 50, "context": 32, "width": 24, "layers": 2, "heads": 4}
KINDS = {
    "gpt2": Config(**SIZES, bias=False),
    "untied": Config(**SIZES, bias=False, tied=False),
    "last": Config(**SIZES, bias=False, norm_first=False),
    "llama": Config(
        **SIZES, kv_heads=2, norm="rms", position="rotary", bias=False, tied=False
    ),
    "yarn": Config(**SIZES, norm="rms", position="rotary", bias=False, gain=1.3),
}


@pytest.fixture(params=KINDS)
def model(request):
    torch.manual_seed(0)
    return stir(CausalTransformer(KINDS[request.param]), 0.3).double().eval()


def normalise(model, x):
    """Return what a norm gives without its gain."""
    if model.config.norm == "rms":
        return x / (x.pow(2).mean(-1, keepdim=True) + model.config.eps).sqrt()
    return layer_norm(x, x.shape[-1:], eps=model.config.eps)


def read_densely(model, layer, head):
    """Return scale · W_QK and W_OV of a head, and the unembedding, with the norms."""
    config, block = model.config, model.blocks[layer]
    d, eye = config.head, torch.eye(config.width, dtype=torch.float64)
    q, k, v = block.attention.qkv.weight.detach().split(
        [config.heads * d, config.shared * d, config.shared * d]
    )
    read = read_last = eye
    out = model.embed.weight if config.tied else model.head.weight
    if config.norm_first:
        middle = eye - (config.norm == "layer") / config.width
        read = block.attention_norm.weight.diag() @ middle
        read_last = model.norm.weight.diag() @ middle
    write = (
        eye - 1 / config.width if config.norm_first and config.norm == "layer" else eye
    )
    group = head // (config.heads // config.shared)
    mine, theirs = (slice(x * d, (x + 1) * d) for x in (head, group))
    scale = d**-0.5 * (config.gain**2 if config.position == "rotary" else 1.0)
    qk = scale * (q[mine] @ read).mT @ (k[theirs] @ read)
    ov = write @ block.attention.out.weight[:, mine] @ v[theirs] @ read
    return qk.detach(), ov.detach(), (out @ read_last).detach()


def list_scores(model):
    """Return every score of a model in one row."""
    vocabulary, found = read_vocabulary(model), []
    for head in range(4):
        first, second = (read_circuit(model, layer, head) for layer in (0, 1))
        found += [score_copying(x, vocabulary) for x in (first, second)]
        found += [score_composition(first, second, by=by) for by in "qkv"]
        for values in (second.ov_eigenvalues, second.qk_eigenvalues):
            found += [float(values.real.sum()), float(values.abs().sum())]
    return torch.tensor(found, dtype=torch.float64)


def test_the_factors_are_those_of_dense_matrices_with_the_norms_in_them(model):
    norm = torch.linalg.matrix_norm
    vocabulary = read_vocabulary(model)
    for head in range(4):
        circuit = read_circuit(model, 1, head)
        qk, ov, out = read_densely(model, 1, head)
        for dense, found in (
            (qk, circuit.scale * circuit.q.mT @ circuit.k),
            (ov, circuit.o @ circuit.v),
            (model.embed.weight.detach().mT @ out, vocabulary.through),
        ):
            assert float((dense - found).abs().max()) < 1e-10
        _, earlier, _ = read_densely(model, 0, head)
        found = score_composition(read_circuit(model, 0, head), circuit, by="k")
        right = float(norm(qk @ earlier) / (norm(qk) * norm(earlier)))
        assert abs(found - right) < 1e-10


def test_models_with_the_same_logits_have_the_same_scores():
    """LayerNorm removes what is added to every number of the residual stream."""
    torch.manual_seed(0)
    model = stir(CausalTransformer(KINDS["untied"]), 0.3).double().eval()
    text = tokens(6)[:1] % 50
    with torch.no_grad():
        logits, scores = model(text), list_scores(model)
        model.embed.weight += 2
        for block in model.blocks:
            weight = block.attention.out.weight
            weight += torch.linspace(-3, 3, weight.shape[1])
        assert float((model(text) - logits).abs().max()) < 1e-10
    assert float((list_scores(model) - scores).abs().max()) < 1e-10


def sort_values(values):
    """Return complex numbers in an order: by size, then by angle."""
    found = sorted(values.tolist(), key=lambda z: (-round(abs(z), 9), round(z.imag, 9)))
    return torch.tensor(found)


def test_the_matrices_give_the_scores_and_the_writes_of_a_running_model(model):
    """The first layer, whose input is the embedding; a token attends to itself."""
    text = tokens(6)[:1] % 50
    with torch.no_grad(), regard.watch(model, keep="qkv") as seen:
        model(text)
    record = seen.recording.layer(0)
    x = model.embed.weight[text[0]]
    if model.config.position == "learned":
        x = x + model.positions.weight[:6]
    x = normalise(model, x.detach()) if model.config.norm_first else x.detach()
    z = compute_outputs(record)
    for head in range(4):
        circuit = read_circuit(model, 0, head)
        itself = ((x @ circuit.q.mT) * (x @ circuit.k.mT)).sum(-1) * circuit.scale
        assert torch.allclose(itself, record.logits()[head].diagonal())
        written = record.weights()[head] @ (x @ circuit.v.mT @ circuit.o.mT)
        assert torch.allclose(written, z[head] @ circuit.o.mT)


def test_eigenvalues_are_those_of_the_dense_matrices(model):
    for head in range(4):
        circuit = read_circuit(model, 1, head)
        d = len(circuit.q)
        pairs = (
            (circuit.o @ circuit.v, circuit.ov_eigenvalues),
            (circuit.scale * circuit.q.mT @ circuit.k, circuit.qk_eigenvalues),
        )
        for dense, found in pairs:
            right = sort_values(torch.linalg.eigvals(dense))
            assert torch.allclose(sort_values(found), right[:d], atol=1e-8)
            assert float(right[d:].abs().max()) < 1e-8


def test_the_copying_score_is_that_of_the_vocabulary_squared(model):
    vocabulary = read_vocabulary(model)
    for head in range(4):
        circuit = read_circuit(model, 1, head)
        embed, (*_, out) = model.embed.weight, read_densely(model, 1, head)
        dense = out @ circuit.o @ circuit.v @ embed.mT  # (50, 50)
        values = torch.linalg.eigvals(dense.detach())
        right = float(values.real.sum() / values.abs().sum())
        assert score_copying(circuit, vocabulary) == pytest.approx(right, abs=1e-7)


def test_a_head_that_writes_what_it_reads_copies():
    model = stir(CausalTransformer(KINDS["gpt2"]), 0.3).double().eval()
    circuit = read_circuit(model, 0, 0)
    vocabulary = read_vocabulary(model)
    copies = type(circuit)(circuit.q, circuit.k, circuit.v, circuit.v.mT, circuit.scale)
    same = type(vocabulary)(torch.eye(24, dtype=torch.float64))
    assert score_copying(copies, same) == pytest.approx(1)
    turned = type(circuit)(circuit.q, circuit.k, circuit.v, -circuit.v.mT, 1.0)
    assert score_copying(turned, same) == pytest.approx(-1)


def test_composition_scores_are_those_of_the_dense_matrices(model):
    norm = torch.linalg.matrix_norm
    for one in range(4):
        first = read_circuit(model, 0, one)
        ov = first.o @ first.v
        for other in range(4):
            second = read_circuit(model, 1, other)
            qk = second.q.mT @ second.k
            dense = {
                "q": norm(ov.mT @ qk) / (norm(ov) * norm(qk)),
                "k": norm(qk @ ov) / (norm(qk) * norm(ov)),
                "v": norm(second.o @ second.v @ ov)
                / (norm(second.o @ second.v) * norm(ov)),
            }
            for by, right in dense.items():
                found = score_composition(first, second, by=by)
                assert found == pytest.approx(float(right))


SMALL = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"vocab_size": 50, "intermediate_size": 32}


def make_theirs(kind):
    """Return a model of transformers, and its q, k, v, o, gain and centring by layer."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 50}
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model = stir(GPT2LMHeadModel(config)).double().eval()
        block = model.transformer.h[1]
        q, k, v = block.attn.c_attn.weight.mT.split(24)
        return model, (q, k, v, block.attn.c_proj.weight.mT), block.ln_1, 4
    if kind == "neox":
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = stir(GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL, **ends))).double().eval()
        block = model.gpt_neox.layers[1]
        parts = block.attention.query_key_value.weight.view(4, 3, 6, 24)
        q, k, v = (parts[:, i].reshape(24, 24) for i in range(3))
        return model, (q, k, v, block.attention.dense.weight), block.input_layernorm, 4
    config = GraniteConfig(
        **SMALL,
        num_key_value_heads=2,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        attn_implementation=kind,
    )
    model = stir(GraniteForCausalLM(config)).double().eval()
    block = model.model.layers[1]
    own = block.self_attn
    q, k, v = (x.weight for x in (own.q_proj, own.k_proj, own.v_proj))
    return model, (q, k, v, own.o_proj.weight * 0.3), block.input_layernorm, 2


@pytest.mark.parametrize("kind", ["gpt2", "neox", "sdpa", "eager"])
def test_the_factors_of_other_models_are_their_weights(kind):
    model, (q, k, v, o), norm, shared = make_theirs(kind)
    for parameter in model.parameters():
        parameter.requires_grad_(requires_grad=False)
    is_centred = isinstance(norm, torch.nn.LayerNorm)

    def centre(x):
        return x - x.mean(-1, keepdim=True) if is_centred else x

    for head in range(4):
        circuit = read_circuit(model, 1, head)
        mine, theirs = (slice(x * 6, x * 6 + 6) for x in (head, head * shared // 4))
        pairs = [
            (circuit.o.mT, centre(o[:, mine].mT)),
            (circuit.q, centre(q[mine] * norm.weight)),
        ]
        pairs += [
            (circuit.k, centre(k[theirs] * norm.weight)),
            (circuit.v, centre(v[theirs] * norm.weight)),
        ]
        for found, right in pairs:
            assert float((found - right.detach()).abs().max()) < 1e-12
    assert circuit.scale == (0.2 if shared == 2 else 6**-0.5)
    assert not any(x.requires_grad for x in model.parameters())
    last = model.get_output_embeddings().weight
    ends = {
        "gpt2": lambda: model.transformer.ln_f,
        "neox": lambda: model.gpt_neox.final_layer_norm,
    }
    gain = ends.get(kind, lambda: model.model.norm)().weight
    right = model.get_input_embeddings().weight.mT @ centre(last * gain)
    assert float((read_vocabulary(model).through - right.detach()).abs().max()) < 1e-12


def test_what_has_no_such_matrices_is_refused():
    model = CausalTransformer(KINDS["gpt2"])
    with pytest.raises(OptionError, match="the model is in training mode"):
        read_circuit(model, 1, 0)
    model = model.eval()
    with pytest.raises(OptionError, match="there is no layer 2; traced were"):
        read_circuit(model, 2, 0)
    with pytest.raises(OptionError, match="has 4 heads, there is no head 4"):
        read_circuit(model, 1, 4)
    with pytest.raises(OptionError, match="a Linear cannot read 4 tokens"):
        read_circuit(torch.nn.Linear(2, 2).eval(), 0, 0)
    with pytest.raises(OptionError, match="normalises q and k"):
        read_circuit(CausalTransformer(Config(**SIZES, qk_norm=True)).eval(), 0, 0)
    layer_norms = StableLmConfig(**SMALL, num_key_value_heads=4, qk_layernorm=True)
    with pytest.raises(OptionError, match="normalises q and k"):
        read_circuit(StableLmForCausalLM(layer_norms).eval(), 1, 0)
    with pytest.raises(OptionError, match="a BertModel predicts no tokens"):
        read_vocabulary(BertModel(BertConfig(**SMALL)).eval())
    bloom = BloomConfig(hidden_size=24, n_layer=2, n_head=4, vocab_size=50)
    with pytest.raises(OptionError, match="a softmax of its own"):
        read_circuit(BloomForCausalLM(bloom).eval(), 1, 0)
    with pytest.raises(OptionError, match="by='o', expected 'q', 'k' or 'v'"):
        circuit = read_circuit(model, 0, 0)
        score_composition(circuit, circuit, by="o")
