"""The site of the documents: it builds without a warning, and asks nobody for anything."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlparse

import pytest

import regard
from regard import ablate, engine, masks, stats
from regard.lens import adapters

pytestmark = pytest.mark.slow  # the site is built
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")
LOADS = {"img": "src", "script": "src", "link": "href", "source": "srcset"}
LIMIT = 1_200  # words of "all of regard on one page"

SPEC = importlib.util.spec_from_file_location("claims", ROOT / "benchmarks/claims.py")
claims = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(claims)


class Page(HTMLParser):
    """What a page links to, what it loads, and the places one can link to."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids = [], [], set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, pairs):
        found = dict(pairs)
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if found.get(LOADS.get(tag)):
            self.loads.append(found[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as a reader would, with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-E"]
    done = subprocess.run(
        [*command, "-d", str(folder / "trees"), str(DOCS), str(folder / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = (folder / "html").rglob("*.html")
    return {path: Page(path) for path in pages}


def test_every_page_is_built(site):
    built = {path.name for path in site}
    assert {path.stem + ".html" for path in DOCS.rglob("*.md")} <= built


def test_the_site_loads_nothing_from_elsewhere(site):
    root = min(site, key=lambda path: len(path.parts)).parent
    for path, page in site.items():
        assert page.loads
        for address in page.loads:
            place = urlparse(address)
            assert not place.scheme or place.scheme == "data", (path.name, address)
            assert not place.netloc, (path.name, address)
            if not place.scheme:
                assert (path.parent / unquote(place.path)).exists(), (
                    path.name,
                    address,
                )
    for path in root.rglob("*.css"):  # fonts and pictures of a style
        text = path.read_text("utf-8")
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", text), path.name
        assert "@import" not in text, path.name


def test_every_link_inside_of_the_site_leads_somewhere(site):
    n = 0
    for path, page in site.items():
        for link in page.links:
            address, place = urldefrag(link)
            if urlparse(address).scheme:
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            assert target.exists(), (path.name, link)
            if place and target in site:
                assert unquote(place) in site[target].ids, (path.name, link)
                n += 1
    assert n > 100


def test_every_public_name_is_in_the_api(site):
    (api,) = (page for path, page in site.items() if path.name == "api.html")
    for module in (regard, ablate, adapters, engine, masks, stats):
        for name in set(module.__all__) - {"published"}:
            places = {f"{module.__name__}.{name}", f"regard.{name}"}
            assert places & api.ids, f"{module.__name__}.{name}"


def test_all_of_regard_is_one_page():
    text = (DOCS / "all.md").read_text("utf-8")
    words = re.findall(r"\S*\w\S*", text)  # code and output are read as well
    assert 600 < len(words) <= LIMIT


def test_every_file_of_the_readers_path_is_annotated():
    start = README.index("## Read the source")
    path = README[start : README.index("\n## ", start + 1)]
    names = re.findall(r"\[([a-z_]+/[a-z_]+)\]\(src/regard/", path)
    assert len(names) >= 5
    annotated = (DOCS / "reading.md").read_text("utf-8")
    missing = [x for x in names if not re.search(rf"(?<![\w/]){x}\b", annotated)]
    assert missing == []  # a path to quote from is not enough


def find_unexplained(path, sections):
    """Yield names that a file of the path imports, and that were not explained before it."""
    known = set()
    for name in path:
        tree = ast.parse((ROOT / "src/regard" / f"{name}.py").read_text("utf-8"))
        known |= set(re.findall(r"`(\w+)", sections[name]))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("regard."):
                yield from (
                    f"{name}: {x.name}" for x in node.names if x.name not in known
                )
        for node in tree.body:  # what later files may use
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                known.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                found = (x for x in ast.walk(node) if isinstance(x, ast.Name))
                known |= {x.id for x in found if isinstance(x.ctx, ast.Store)}


def test_the_readers_path_is_short_and_explains_every_name():
    start = README.index("## Read the source")
    text = README[start : README.index("A transformer in plain arrays")]
    path = re.findall(r"\[([a-z_]+/[a-z_]+)\]\(src/regard/", text)
    files = [ROOT / "src/regard" / f"{name}.py" for name in path]
    assert sum(len(x.read_text("utf-8").splitlines()) for x in files) < 2_000
    page = (DOCS / "reading.md").read_text("utf-8")
    found = re.findall(
        r"^## ([a-z_]+/[a-z_]+):(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL
    )
    assert [name for name, _ in found] == path
    sections = dict(found)
    assert list(find_unexplained(path, sections)) == []
    sections["stats/rows"] = sections["stats/rows"].replace("`NamedArray`", "")
    assert list(find_unexplained(path, sections)) == ["stats/rows: NamedArray"]


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: claim.says[:40])
def test_a_claim_of_the_readme_is_what_was_found(claim):
    assert claims.write_sentence(claim) in " ".join(read_prose().split())
    assert (ROOT / claim.script).exists()
    assert (ROOT / claim.result).exists()


def read_prose(*, tables=True):
    """Return the README without code, and links as their words."""
    text = re.sub(r"```(\w*)\n(.*?)```", keep_comments, README, flags=re.DOTALL)
    if not tables:  # a test of their own holds those to their results
        marked = r"<!-- benchmark:(\w+) -->.*<!-- benchmark:\1 -->"
        text = re.sub(marked, "", text, flags=re.DOTALL)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)


def keep_comments(block):
    """Return what is said beside commands."""
    return "\n".join(
        re.findall(r"(?<= )# (.*)", block[2] if block[1] == "bash" else "")
    )


def test_the_peers_of_the_readme_were_measured():
    assert claims.render_beside() in README
    assert claims.render_beside() in (DOCS / "related.md").read_text("utf-8")


def test_every_number_of_the_readme_is_a_claim():
    # numbers of two digits and more, as words of their own: no names, no versions
    pattern = r"(?<![\w.,-])\d[\d,]*\d(?![\w-]|\.\d)"
    claimed = {
        x for c in claims.CLAIMS for x in re.findall(pattern, claims.write_sentence(c))
    }
    prose = re.sub(r"`[^`]*`", "", read_prose(tables=False))
    found = set(re.findall(pattern, prose))
    assert found <= claimed, (
        f"the README has {sorted(found - claimed)}: add where it comes from to CLAIMS of "
        "benchmarks/claims.py, and run it"
    )


def test_the_results_are_dated_as_they_are():
    known = json.loads((ROOT / "benchmarks/claims.json").read_text("utf-8"))
    assert claims.date_results(known, "today") == known, "run benchmarks/claims.py"


def test_a_result_that_changed_gets_a_new_date():
    known = json.loads((ROOT / "benchmarks/claims.json").read_text("utf-8"))
    known["masks.json"] = {"sha256": "another", "date": "1999-01-01"}
    dated = claims.date_results(known, "2001-02-03")
    assert dated["masks.json"]["date"] == "2001-02-03"
    assert dated["lens.json"] == known["lens.json"]


def test_every_result_is_on_the_page():
    page = (DOCS / "benchmarks.md").read_text("utf-8")
    for path in (ROOT / "benchmarks").glob("*.json"):
        assert path.stem == "claims" or f"`benchmarks/{path.name}`" in page
