"""What the pages of the documentation say is true: examples run and print what is shown, and what is named is there."""

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

import dynaflow_jax as df
from examples.benchmarks import tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *(ROOT / "docs" / f"{name}.md" for name in ("guide", "dispatcher", "kernels", "measured"))]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)


def text_of(page):
    return page.read_text(encoding="utf-8")


def fences(text):
    """``(language, body, whether it follows the fence before it directly, line)`` of every fence."""
    end = 0
    for match in FENCE.finditer(text):
        adjacent = not text[end : match.start()].strip()
        yield match["language"], match["body"], adjacent, text[: match.start()].count("\n") + 1
        end = match.end()


def examples(page):
    """``(code, expected output or None, line)`` of every Python example."""
    found = []
    for language, body, adjacent, line in fences(text_of(page)):
        if language == "python":
            found.append([body, None, line])
        elif language == "text" and adjacent and found:
            found[-1][1] = body
    return found


def section(page, title):
    """The text under a heading."""
    match = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^## |\Z)", text_of(page), re.DOTALL | re.MULTILINE)
    assert match, f"{page.name} has no section {title!r}"
    return match[1]


def anchors(page):
    """What a link can name after ``#``."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def trimmed(text):
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def test_every_example_runs_and_prints_what_is_shown():
    """Page after page: each goes on from what the README has defined."""
    namespace = {"__name__": "pages"}
    shown = 0
    for page in PAGES:
        for code, expected, line in examples(page):
            printed = io.StringIO()
            compiled = compile("\n" * line + code, page.name, "exec")  # tracebacks have the page's line numbers
            with contextlib.redirect_stdout(printed), warnings.catch_warnings():
                warnings.simplefilter("error", df.RuleWarning)
                exec(compiled, namespace)
            assert trimmed(printed.getvalue()) == trimmed(expected or ""), f"{page.name}:{line} prints otherwise"
            shown += expected is not None
    assert shown >= 8, "the pages show what their examples print"


def test_the_first_example_stands_alone_in_twenty_lines():
    code, expected, _ = examples(README)[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert expected
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_errors_of_the_table_are_those_of_the_library():
    named = re.findall(r"^\| `(\w+)` \|", section(ROOT / "docs" / "guide.md", "Errors"), re.MULTILINE)
    kinds = {
        name for name, value in vars(df.errors).items() if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(named) == kinds
    for name in named:
        assert issubclass(getattr(df.errors, name), (df.DynaFlowError, UserWarning))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_library_exist(page):
    for name in set(re.findall(r"`df\.(\w+(?:\.\w+)*)", text_of(page))):
        found = df
        for part in name.split("."):
            assert hasattr(found, part), f"df.{name} is not there"
            found = getattr(found, part)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", text_of(page)):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), f"{page.name} names {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} names {link}"


def test_every_page_is_linked_from_the_readme():
    linked = re.findall(r"\]\(([^)#]+)[^)]*\)", text_of(README))
    assert {page.relative_to(ROOT).as_posix() for page in PAGES[1:]} <= set(linked)
    assert {page.stem for page in PAGES[1:]} == {page.stem for page in (ROOT / "docs").glob("*.md")}


def test_rooms_exist_and_import_one_way():
    """Nothing that the README lists imports what it lists below it."""
    listed = section(README, "How it is built")
    rooms = re.findall(r"^(\w+/\w*/?) +\S", listed, re.MULTILINE)
    assert len(rooms) > 30
    for path in rooms:
        assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), f"the README names {path}"
    chain = re.findall(r"^dynaflow_jax/(\w+)", listed, re.MULTILINE)
    rank = {room: i for i, room in enumerate(chain)}
    for room in chain:
        path = ROOT / "dynaflow_jax" / room
        for file in [*path.glob("**/*.py")] or [path.with_suffix(".py")]:
            for imported in re.findall(
                r"^from dynaflow_jax(?:\.(\w+))?.* import (\w+)", file.read_text(), re.MULTILINE
            ):
                below = imported[0] or imported[1]
                assert rank.get(below, -1) <= rank[room], f"{file.name} imports {below}"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_results(page):
    assert tables.render(text_of(page), tables.load(tables.RESULTS)) == text_of(page)


def test_every_table_has_a_place():
    places = [name for page in PAGES for name in re.findall(r"^<!-- (\w+) -->$", text_of(page), re.MULTILINE)]
    assert sorted(places) == sorted(tables.TABLES)


@pytest.mark.parametrize(("kind", "name"), [("tensor", "tp_overlap"), ("expert", "ep_overlap")])
def test_the_gains_it_claims_are_those_of_the_results(kind, name):
    (data,) = tables.load(tables.RESULTS)[name]
    gains = [row["best_xla_us"] / row["ours_us"] for row in data["rows"]]
    claimed = re.search(rf"{kind}-parallel layers (?:are )?(\d\.\d\d) to (\d\.\d\d) times", text_of(README))
    assert claimed
    assert [float(number) for number in claimed.groups()] == [
        int(100 * gain) / 100 for gain in (min(gains), max(gains))
    ]
