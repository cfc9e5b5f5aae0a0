"""Everything that reads a model or a recording, with the model on the device.

Every number is compared with that of the CPU. Next: ../test_simulated_device.py
"""

import dataclasses
import math
import random

import atlas_model
import numpy as np
import pytest
import torch
import transformers
from families import FAMILIES, quiet
from intervened_models import FAMILIES as DECODERS
from intervened_models import GROUPED, stir
from simulated_device import count
from tiny_models import CHAT, make_tokenizer

import regard
from regard import stats
from regard.ablate import average_outputs, effect, knock_out, patch_heads, search_heads
from regard.arrays import to_numpy
from regard.atlas.job import run_atlas
from regard.atlas.runners import RunnerOptions
from regard.atlas.settings import Settings
from regard.atlas.table import read_table
from regard.judge.convention import Convention
from regard.learn.exercises import without_the_matrix
from regard.nn.decoder import CausalTransformer
from regard.nn.tasks import Copy
from regard.nn.train import Plan, train
from regard.plain.config import Config
from regard.show.map_source import MapSource, Spot
from regard.show.text_request import answer_text
from regard.stats import published
from regard.stats.head_scores import induction_score


def build(name="llama"):
    with quiet():
        return FAMILIES[name].build()


def see(model, inputs, keep="qkv"):
    with regard.watch(model, keep=keep) as seen, torch.no_grad():
        model(**inputs)
    return seen


def check_close(there, here, tolerance=1e-5):
    there, here = (to_numpy(x).astype(float) for x in (there, here))
    np.testing.assert_allclose(there, here, rtol=tolerance, atol=tolerance)


def test_tensors_of_two_devices_are_refused():
    here, there = torch.ones(3), torch.ones(3, device="sim")
    for mix in (
        lambda: there + here,
        lambda: torch.cat([there, here]),
        lambda: there.masked_fill(here > 0, 0),
        lambda: here[there.long()],
        lambda: regard.engine.attend(
            *[x[None, None, :, None] for x in (there, here, here)]
        ),
    ):
        with pytest.raises((RuntimeError, regard.errors.RegardError), match="device"):
            mix()
    assert (there + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a number is welcome
    with pytest.raises(TypeError, match="sim"):
        there.numpy()


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "bloom", "bert", "whisper"])
def test_every_statistic_has_the_numbers_of_the_cpu(name, run_on_both):
    model, inputs = build(name)
    here, there = run_on_both(see, model, inputs)
    a, b = (seen.table().rows for seen in (here, there))
    assert a.dtype == b.dtype
    for column in a.dtype.names:
        if a[column].dtype.kind in "iuf":
            check_close(b[column], a[column], 2e-4)
    assert str(there.audit()) == str(here.audit())
    for one, other in zip(there.attentions, here.attentions, strict=True):
        check_close(one, other)


def list_statistics(record, tokens):
    """Yield everything that regard.stats can tell of a record."""
    n = record.k.shape[1]
    yield stats.cells(record, [3, 5, 9], [0, 5, 2])
    yield stats.mass(record, np.eye(n)[:, :3])
    yield stats.masked_mass(record, regard.window(3))
    yield stats.received(record, rows=slice(4, None))
    yield stats.mean_received(record)
    yield stats.mean_position(record)
    yield stats.offset(record, 2)
    yield stats.span_mass(record, [(0, 3), (3, 9)])
    yield stats.span_pairs(record, [(4, 8)], [(0, 3)], per="query")
    yield stats.read_tile(record, 1, slice(0, 9), slice(0, 9), 4).values
    reducers = (
        stats.ColumnMax(),
        stats.ColumnSums(),
        stats.Entropy(),
        stats.LargestLogit(),
        stats.RowSums(),
        stats.PooledMap(4),
        stats.PooledMap(4, "mass"),
    )
    yield stats.walk(record, *reducers, stats.TopK(3), stats.OffsetProfile())
    yield stats.walk(record, stats.Pyramid(2))
    for name in ("induction_score", "prefix_matching"):
        yield getattr(published, name)(record, tokens)
    for name in published.cache_scores:
        given = {"kvzip": ((0, 5),)}.get(name, ())
        options = {"last": 4} if "snapkv" in name else {}
        yield getattr(published, name)(record, *given, **options)


@pytest.mark.parametrize("layer", [0, 1])
def test_every_function_of_stats_has_the_numbers_of_the_cpu(layer, run_on_both):
    model, inputs = build("mistral")
    here, there = (seen.layer(layer) for seen in run_on_both(see, model, inputs))
    tokens = inputs["input_ids"][0].tolist()
    pairs = zip(
        *(flatten(list_statistics(x, tokens)) for x in (there, here)), strict=True
    )
    for x, y in pairs:
        check_close(x, y, 2e-4)


def flatten(found):
    """Yield the arrays of results, which may hold others."""
    for x in found:
        if isinstance(x, torch.Tensor | np.ndarray):
            yield x
        elif isinstance(x, tuple | list | dict):
            yield from flatten(x.values() if isinstance(x, dict) else x)
        elif dataclasses.is_dataclass(x):
            yield from flatten(vars(x).values())


def test_a_table_makes_a_constant_number_of_host_copies_per_layer():
    """They do not grow with the length, and a forward pass under watch makes few."""
    made = []
    for n in (40, 160):
        model, _ = build()
        tokens = torch.arange(n, device="sim")[None] % 50
        model.to("sim")
        model.config.max_position_embeddings = 512
        with count() as watching:
            seen = see(model, {"input_ids": tokens}, keep="qk")
        with count() as tabulating:
            seen.table()
        made.append((watching.to_host, tabulating.to_host))
    assert made[0] == made[1]
    assert made[0][0] <= 3  # one of them for the certificates of alike records
    assert made[0][1] <= 60 * len(seen.records)


def test_heads_are_cut_and_patched_as_on_the_cpu(run_on_both):
    model, inputs = DECODERS["llama"].build(), DECODERS["llama"].inputs()
    other = {"input_ids": (inputs["input_ids"] * 7 + 3) % 50}

    def intervene(model, inputs, other):
        def read():
            with torch.no_grad():
                return model(**inputs).logits

        found = [read()]
        with knock_out(model, [(0, 1), (1, 2)]):
            found.append(read())
        with knock_out(model, keys=slice(1, 3), queries=slice(5, None)):
            found.append(read())
        seen = see(model, other)
        with patch_heads(model, seen, [(1, 0)]):
            found.append(read())
        with patch_heads(model, average_outputs(seen), layers=[0]):
            found.append(read())
        done = effect(model, lambda m: m(**inputs), [(0, 1)])
        first = {"input_ids": inputs["input_ids"][:1]}
        source = see(model, {"input_ids": other["input_ids"][:1]})
        search = search_heads(model, first, source, lambda x: x[:, -1, 5])
        return found, done, search

    (a, one, few), (b, two, many) = run_on_both(intervene, model, inputs, other)
    for x, y in zip(a, b, strict=True):
        assert y.device.type == "sim"
        check_close(y, x)
    assert not torch.equal(a[0], a[1])
    assert str(one) == str(two)
    check_close(many.values, few.values)


def test_the_map_is_drawn_from_records_on_the_device(run_on_both):
    def draw(model, inputs):
        source = MapSource(see(model, inputs).recording)
        spot = Spot(0, 1, 2)
        try:
            tiles = [
                source.tile(spot, level=0, x=0, y=0, how=x) for x in ("max", "mass")
            ]
            asked = {"sequence": 0, "first": 2, "last": 5}
            texts = [
                answer_text(source, asked | {"by": by, "show": show})
                for by in ("weight", "value", "rollout")
                for show in ("attended", "attending")
            ]
            sheets = [*tiles, *texts, source.gallery(0, 1), source.sketch(0, 1)]
            lines = source.row(spot, 9), source.column(spot, 3)
            return [x.codes.astype(int) for x in sheets], lines, source.table()
        finally:
            source.close()

    (here, *others), (there, *same) = run_on_both(draw, *build())
    for x, y in zip(there, here, strict=True):
        assert np.abs(x - y).max() <= 1  # the last digit of a code
    assert str(same) == str(others)


def test_recordings_are_saved_and_opened_and_become_pages(run_on_both, tmp_path):
    here, there = run_on_both(see, *build())
    for name, seen in {"here": here, "there": there}.items():
        seen.save(tmp_path / name)
        seen.page(tmp_path / f"{name}.html")
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    opened = regard.open(tmp_path / "there")
    assert str(opened.table()) == str(here.table())
    assert str(there) == str(here)
    assert there.layer(0).to_html() == here.layer(0).to_html()
    check_close(there.to("numpy").layer(1).weights(), here.layer(1).weights())


def make_on_device():
    """Return the model of atlases, on the device."""
    model = atlas_model.make()
    model.network.to("sim")
    return model


def test_an_atlas_has_the_same_table(tmp_path):
    rng = random.Random(0)
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(6):
        words = rng.choices(
            ["the", "key", "is", "a", "small", "cat", "of", "red"], k=12
        )
        (texts / f"{i}.txt").write_text(" ".join(words))
    tables = []
    for device, model in (
        ("cpu", "atlas_model:make"),
        ("sim", f"{__name__}:make_on_device"),
    ):
        plan = Settings(
            model=model, corpus=(str(texts),), length=32, device=device, batch=2
        )
        folder = tmp_path / device
        run_atlas(folder, crew=RunnerOptions(runner="loop"), plan=plan)
        tables.append(read_table(folder))
    here, there = tables
    assert there.about["documents"] == here.about["documents"] == 6
    for name in here.statistics:
        check_close(there.mean(name), here.mean(name))


def attend_fused(q, k, v, causal=False):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def test_check_judges_an_implementation_on_the_device():
    report = regard.check(
        attend_fused,
        convention=Convention(library="torch", device="sim", causal="causal"),
        level="basic",
    )
    assert report.ok, str(report)


def test_the_last_exercise_reads_a_model_on_the_device(run_on_both):
    """induction_from_keys on what a watch recorded, against regard.stats."""
    model, _ = build()
    tokens = torch.arange(40)[None] % 13

    def score(model, tokens):
        seen = see(model, {"input_ids": tokens})
        record = seen.layer(1)
        expected = induction_score(record, tokens[0].tolist())
        plain = record.to("numpy")
        scale = record.scale * math.sqrt(record.q.shape[-1])
        group = record.heads // record.k.shape[0]
        mine = [
            without_the_matrix.reference(
                plain.q[h] * scale,
                plain.k[h // group],
                plain.lse[h],
                tokens[0].cpu().numpy(),
            )
            for h in range(record.heads)
        ]
        return mine, to_numpy(expected.values)

    (here, _), (there, expected) = run_on_both(score, model, tokens)
    check_close(there, here)
    check_close(there, expected)


def test_sources_of_an_answer_are_those_of_the_cpu(run_on_both):
    tokenizer = make_tokenizer(ends=False, template=CHAT)
    with quiet():
        config = transformers.LlamaConfig(**{**GROUPED, "vocab_size": len(tokenizer)})
        model = stir(transformers.LlamaForCausalLM(config))
    documents = ["the cat sat on the mat .", "a dog ran ."]
    messages = [{"role": "user", "content": "\n".join([*documents, "the mat :"])}]

    def ask(model):
        with quiet():
            answer = " the dog ran ."
            return regard.sources(model, tokenizer, messages, documents, answer=answer)

    here, there = run_on_both(ask, model)
    assert str(there) == str(here)


def test_training_on_the_device_has_the_losses_of_the_cpu(run_on_both, tmp_path):
    torch.manual_seed(0)
    task = Copy()
    config = Config(
        vocabulary=task.vocabulary, context=task.length, width=16, layers=1, heads=2
    )
    plan = Plan(steps=3, batch=4, warmup=1, save_every=1)

    def learn(model):
        folder = tmp_path / model.embed.weight.device.type
        return train(model, task, plan, folder, show=False)

    here, there = run_on_both(learn, CausalTransformer(config))
    check_close(np.array(there), np.array(here), 1e-4)
