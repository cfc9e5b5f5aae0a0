"""The shape of the project: who imports whom, the public names, the sizes."""

import ast
import importlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import regard
from regard import masks

SOURCE = Path(regard.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

EVERYONES = {"errors", "arguments"}  # errors, and the decorators that raise them

# package: (may import, besides itself and those; third party)   see docs/architecture.md
RULES = {
    "errors": (set(), set()),
    "other_names": (set(), set()),
    "arguments": ({"other_names"}, set()),
    "atomic_file": (set(), set()),
    "student": (set(), set()),
    "threads": (set(), {"torch"}),
    "find_model": (set(), {"huggingface_hub"}),
    "arrays": (set(), {"array_api_compat", "numpy"}),
    "display": (set(), {"numpy"}),
    "masks": ({"arrays", "display"}, {"numpy", "click", "rich"}),
    "definition": ({"masks", "arrays", "display"}, {"numpy"}),
    "plain": ({"definition", "masks", "arrays"}, {"numpy"}),
    "engine": ({"definition", "masks", "arrays", "threads"}, {"numpy", "torch"}),
    "nn": (
        {"plain", "engine", "definition", "masks", "arrays", "atomic_file"},
        {"numpy", "torch", "safetensors", "gguf", "tokenizers", "jinja2", "rich"},
    ),
    "recording": (
        {"definition", "masks", "arrays", "atomic_file", "display"},
        {"numpy", "safetensors", "torch"},
    ),
    "run": ({"masks"}, {"torch"}),
    "serving": (  # vllm only in its plugin and its worker
        {"lens", "run", "recording", "engine", "definition", "masks", "arrays"},
        {"numpy", "torch", "vllm"},
    ),
    "seen": (
        {"recording", "lens", "serving", "stats", "audit", "show", "definition"}
        | {"arrays", "display"},
        {"numpy"},
    ),
    "lens": (
        {"run", "recording", "engine", "definition", "masks", "arrays"},
        {"numpy", "torch"},
    ),
    "ablate": (
        {"run", "lens", "recording", "stats", "masks", "display", "student"},
        {"torch"},
    ),
    "kernels": ({"masks", "arrays"}, {"numpy", "torch", "triton"}),
    "stats": (
        {"recording", "engine", "kernels", "definition", "masks", "arrays", "display"}
        | {"threads"},
        {"numpy", "torch", "rich", "scipy"},
    ),
    "audit": (
        {"stats", "recording", "definition", "masks", "arrays", "display"},
        {"numpy", "torch"},
    ),
    "show": (
        {"lens", "stats", "recording", "definition", "masks", "arrays", "display"}
        | {"threads"},
        {
            "numpy",
            "torch",
            "matplotlib",
            "fontTools",  # comes with matplotlib
            "starlette",
            "uvicorn",
            "anywidget",
            "traitlets",
            "rich",
        },
    ),
    "judge": (
        {"show", "definition", "masks", "arrays", "display"},
        {"numpy", "array_api_compat", "rich", "pytest"},
    ),
    "learn": (
        {"judge", "show", "definition", "arrays", "terminal", "atomic_file"}
        | {"nn", "plain"},  # in practice_models, inside functions, as torch is
        {"numpy", "rich", "click", "pytest", "markdown_it", "torch"},
    ),
    "exercises": (  # of learn; torch only in functions, for those that say so
        {"plain", "definition", "masks", "arrays", "seen", "stats", "ablate", "learn"},
        {"numpy", "torch"},
    ),
    "models": (  # transformers: only for models that nn does not know
        {"nn", "seen", "plain", "arrays", "find_model"},
        {"numpy", "torch", "transformers", "PIL"},
    ),
    "attribution": (
        {"models", "nn", "seen", "ablate", "stats", "show", "recording", "arrays"}
        | {"display", "atomic_file"},
        {"numpy", "torch"},
    ),
    "atlas": (
        {"nn", "models", "stats", "seen", "recording", "show", "arrays", "terminal"}
        | {"atomic_file", "find_model", "threads", "ablate", "display", "student"},
        {"numpy", "torch", "pyarrow", "ray", "click", "rich"},
    ),
    "doctor": (  # transformers: for the families that it watches
        {"seen", "engine", "definition", "masks", "arrays", "nn", "plain", "stats"}
        | {"judge", "recording", "ablate"},
        {"torch", "transformers"},
    ),
    "terminal": ({"stats"}, {"click", "rich"}),  # stats: the names, for help
    "commands": (
        {"terminal", "nn", "stats", "plain", "seen", "show", "judge", "models"}
        | {"find_model", "recording", "attribution", "doctor"},
        {"click", "torch"},
    ),
    "__main__": ({"commands", "terminal", "learn", "atlas"}, {"click"}),
}
SINGLE = {
    "errors",
    "arguments",
    "other_names",
    "find_model",
    "arrays",
    "atomic_file",
    "student",
    "threads",
    "display",
    "seen",
    "terminal",
}  # files, not packages
FACES = {
    ("ablate", "lens"): 15
}  # by what one package imports from another, and how much
ONLY_IN = {
    "matplotlib": {"loss_curve", "figure", "scaling_demo", "training", "patch_overlay"}
    | {
        "notebook_figure",
        "journal",
        "journal_figure",
        "column_width",
        "tinted_text",
        "head_scatter",
    }
    | {"layer_bars", "head_grid", "token_arcs", "sound_map"},
    "fontTools": {"journal_figure"},
    "click": {"__main__", "terminal", "generate", "show", "check", "compare", "train"}
    | {"recordings", "why", "doctor"},
    "rich": {"__main__", "terminal", "train", "table", "server", "report", "workspace"}
    | {"comparison"},
    "pytest": {"plugin"},
    "markdown_it": {"build_site"},
    "starlette": {"server"},
    "uvicorn": {"server"},
    "anywidget": {"widget"},
    "traitlets": {"widget"},
    "scipy": {"attention_flow"},
    "pyarrow": {"corpus", "corpus_files", "store"},
    "ray": {"runners"},
    "safetensors": {"array_file", "checkpoint", "weights"},
    "transformers": {"from_transformers", "watched_families"},
    "huggingface_hub": {"find_model"},
    "PIL": {"inputs"},
    "triton": {"weigh_tile", "row_kernel", "column_kernel"},
}
LIMITS = {  # lines of Python, without exercises; they only go down
    "__init__": 81,
    "__main__": 42,
    "ablate": 4_074,
    "arguments": 265,
    "arrays": 166,
    "atlas": 4_907,
    "atomic_file": 40,
    "attribution": 845,
    "audit": 1_238,
    "commands": 1_140,
    "definition": 1_190,
    "display": 240,
    "doctor": 1_186,
    "engine": 2_169,
    "errors": 40,
    "find_model": 290,
    "judge": 6_210,
    "kernels": 838,
    "learn": 3_130,
    "lens": 6_315,
    "masks": 1_632,
    "models": 1_105,
    "nn": 3_280,
    "other_names": 230,
    "plain": 1_240,
    "recording": 2_843,
    "run": 1_553,
    "seen": 400,
    "serving": 2_850,
    "show": 8_440,
    "stats": 5_376,
    "student": 29,
    "terminal": 270,
    "threads": 220,
}
NAMES = [
    "attention",
    "causal",
    "check",
    "compare",
    "explain",
    "load",
    "merge",
    "open",
    "padding",
    "read",
    "same",
    "sources",
    "watch",
    "where",
    "window",
]


def package_of(path):
    parts = path.relative_to(SOURCE).parts
    return parts["exercises" in parts].removesuffix(".py")  # a rule of their own


def find_imports(path):
    """Yield the dotted name of every module that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_file_keeps_the_import_rule(path):
    package = package_of(path)
    if package == "__init__":
        return
    friends, libraries = RULES[package]
    libraries = {n for n in libraries if path.stem in ONLY_IN.get(n, {path.stem})}
    for name in find_imports(path):
        root, *rest = name.split(".")
        if root == "regard":
            assert rest, f"{path.name} imports its own package"
            assert rest[0] in friends | {package} | EVERYONES, f"{path.name}: {name}"
            is_face = find_file(name).name == "__init__.py" and rest[0] not in SINGLE
            expected = (package, rest[0]) in FACES
            assert is_face == expected, f"{path.name} imports {name}"
        else:
            assert root in libraries | sys.stdlib_module_names, f"{path.name}: {name}"


@pytest.mark.parametrize(("package", "other"), FACES)
def test_a_package_takes_little_from_another_and_through_its_face(package, other):
    names = set()
    for path in (SOURCE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if getattr(node, "module", None) == f"regard.{other}":
                names |= {x.name for x in node.names}
    face = importlib.import_module(f"regard.{other}")
    assert names == {*face.__all__}
    assert len(names) <= FACES[package, other]


def test_the_import_rule_can_fail(tmp_path):
    guilty = tmp_path / "guilty.py"
    guilty.write_text(
        "def f():\n    import torch.nn\n    from regard.engine import flex\n"
    )
    assert list(find_imports(guilty)) == ["torch.nn", "regard.engine"]


def find_cycles(edges):
    """Return the nodes that are on a cycle, or that only nodes on a cycle reach."""
    left = {name: set(needs) - {name} for name, needs in edges.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def draw_graph(key):
    """Return who imports whom, wherever in a file the import stands."""
    edges = {}
    for path in FILES:
        names = (x for x in find_imports(path) if x.startswith("regard."))
        edges.setdefault(key(path), set()).update(map(key, map(find_file, names)))
    return edges


def find_file(name):
    path = SOURCE.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_no_file_imports_in_a_cycle_not_even_lazily():
    edges = draw_graph(key=lambda path: path.relative_to(SOURCE).as_posix())
    assert "show/server.py" in edges["seen.py"]  # lazy ones are edges, too
    assert "serving/paged_transformers.py" in edges["serving/find_capture.py"]
    assert not find_cycles(edges)


def test_no_package_imports_in_a_cycle():
    assert not find_cycles(draw_graph(key=package_of))


def test_the_tests_of_cycles_can_fail():
    edges = draw_graph(key=package_of)
    edges["show"].add("seen")
    assert {"show", "seen"} <= set(find_cycles(edges))
    edges = draw_graph(key=lambda path: path.relative_to(SOURCE).as_posix())
    edges["masks/tiles.py"].add("masks/algebra.py")
    assert "masks/tiles.py" in find_cycles(edges)


def load(code):
    """Return the modules that a fresh interpreter has loaded after some code."""
    code += "; import json, sys; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(run.stdout)}


HEAVY = {
    "torch",
    "jax",
    "matplotlib",
    "transformers",
    "rich",
    "click",
    "scipy",
    "triton",
}


def test_the_bare_import_loads_nothing_heavy():
    assert not load("import regard; import regard.masks") & HEAVY


@pytest.mark.slow
def test_the_test_of_the_bare_import_can_fail():
    assert load("import regard.terminal") & HEAVY


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import regard; regard.engine", "regard.engine"),
        ("from regard.seen import Seen; Seen().table()", "table()"),
        ("from regard.seen import Seen; Seen().audit(pad=0)", "audit()"),
    ],
)
def test_a_missing_torch_is_named_with_what_to_install(code, name):
    code = f"import sys; sys.modules['torch'] = None; {code}"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    words = f'ImportError: {name} needs torch: pip install "regard[torch]"'
    assert run.stderr.splitlines()[-1] == words


IMPORTS = """
import sys, torch, regard
from torch import nn
places = (torch.nn.functional, torch.Tensor, nn.Module, nn.MultiheadAttention)
before = [dict(vars(place)) for place in places]
assert "regard.engine.choose" not in sys.modules
regard.engine.attend
assert "regard.engine.choose" in sys.modules
import regard.masks, regard.engine.flex, regard.ablate
for place, names in zip(places, before):
    assert all(vars(place)[n] is names[n] for n in names)
assert "transformers" not in sys.modules

# a watch loads torch's compiler only if something is compiled during it
model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.ones(1, 3, 8)
with regard.watch(model) as seen:
    model(x, x, x)
assert len(seen.records) == 1
assert "torch._dynamo" not in sys.modules
compiler = torch.compile
with regard.watch(model) as seen:
    torch.compile(model, fullgraph=True)(x, x, x)
    torch.compile(model)(x, x, x)
assert len(seen.records) == 2
assert torch.compile is compiler
assert torch._dynamo.eval_frame._stance.stance == "default"
"""


@pytest.mark.slow
def test_importing_patches_nothing_and_what_is_large_is_loaded_when_it_is_used():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


def test_the_public_names_are_these():
    assert regard.__all__ == NAMES
    assert masks.__all__ == sorted(masks.__all__)
    assert regard.engine.__all__ == [
        "attend",
        "block_mask",
        "choose",
        "sdpa_arguments",
    ]
    for module in (regard, masks, regard.engine, regard.plain, regard.nn):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


def test_there_are_no_grab_bags():
    bags = {"utils", "util", "misc", "common", "helpers", "helper"}
    assert not [p for p in FILES if p.stem in bags]


def test_files_and_functions_stay_small():
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert not {p: n for p, n in lines.items() if n > 500}
    many = {"attention", "explain", "attend", "choose"}  # the definition, its mirrors
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                given = [argument for argument in given if argument.arg != "self"]
                assert len(given) <= 8 or node.name in many, f"{path.name}: {node.name}"


def test_packages_only_get_smaller():
    sizes = Counter()
    for path in FILES:
        if path.parent.name != "exercises":  # texts for learners, not code
            sizes[package_of(path)] += len(path.read_text("utf-8").splitlines())
    assert sizes.keys() == LIMITS.keys()
    assert not {name: n for name, n in sizes.items() if n > LIMITS[name]}
    # a limit that is far above the size limits nothing: lower it
    assert not {name: n for name, n in sizes.items() if n < LIMITS[name] - 100}


def count_branches(function):
    """Return how many branches a function has, without functions defined in it."""
    branches, waiting = 0, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        kinds = ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler
        branches += isinstance(node, kinds | ast.match_case)
        if isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
        if isinstance(node, ast.comprehension):
            branches += len(node.ifs)
        waiting += ast.iter_child_nodes(node)
    return branches


def test_functions_of_the_lens_have_few_branches():
    many = {
        f"{path.stem}.{node.name}"
        for path in FILES
        if package_of(path) in {"lens", "ablate"}
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and count_branches(node) > 10
    }
    assert not many


def test_branches_are_counted():
    text = """
def f(x):
    if x and x > 1 or x < 0:       # 1, and 2 words
        return [y for y in x if y]  # 1
    for y in x:                     # 1
        try:
            y = 1 if x else 2       # 1
        except ValueError:          # 1
            def g():
                if y: pass          # of g
"""
    assert count_branches(ast.parse(text).body[0]) == 7


def find_shared_names(files):
    """Return the top-level functions and classes whose name several files define."""
    where = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                where[node.name].append(path)
    shared = {name: paths for name, paths in where.items() if len(paths) > 1}
    return sum(map(len, shared.values())) / sum(map(len, where.values())), shared


def test_a_name_is_defined_in_one_file():
    """grep finds it: at most 5 % of the definitions share their name with another."""
    code = [p for p in FILES if p.parent.name != "exercises"]  # one interface for all
    share, shared = find_shared_names(code)
    assert share <= 0.05, sorted(shared)
    assert (
        find_shared_names(FILES)[0] > 0.05
    )  # it can fail: exercises have one interface


def find_next(path):
    """Return the file that the docstring of a file ends with."""
    last = ast.get_docstring(ast.parse(path.read_text("utf-8"))).splitlines()[-1]
    assert last.startswith("Next: "), last
    target = last.removeprefix("Next: ").split()[0]
    beside = path.parent / target
    return beside if beside.exists() else SOURCE / target


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_file_says_what_it_is_and_what_comes_next(path):
    text = path.read_text(encoding="utf-8")
    assert find_next(path).exists()
    for forbidden in ("hasattr(", "**kwargs"):
        assert forbidden not in text


def test_the_files_of_the_readers_path_lead_from_one_to_the_next():
    text = (SOURCE.parent.parent / "README.md").read_text("utf-8")
    path = text.partition("## Read the source")[2].partition(" A transformer")[0]
    names = re.findall(r"\]\(src/regard/([\w/]+\.py)\)", path)
    assert len(names) == 9
    met, file = [], SOURCE / names[0]
    while file not in met:
        met.append(file)
        file = find_next(file)
    places = [met.index(SOURCE / name) for name in names]
    assert places == sorted(places)
