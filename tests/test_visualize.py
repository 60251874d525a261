"""Pictures: pages of HTML, traces and SVG hold what they are given, whatever it is called, and nothing from outside."""

import base64
import dataclasses
import hashlib
import html.parser
import itertools
import json
import re
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("hypothesis", reason="needs the extra 'dev'")

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import Do, Split, W, X, layer

import dynaflow_jax as df
from dynaflow_jax.timeline import Event, Timeline
from dynaflow_jax.visualize import Node, draw_graph, inline, palette, to_html, to_perfetto
from dynaflow_jax.visualize.layout import arrange
from dynaflow_jax.visualize.rows import place
from dynaflow_jax.visualize.text import duration, plain, shorten

SVG = "{http://www.w3.org/2000/svg}"
ODD = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    "a&amp;b",
    "'\"",
    "\0\x1b\r\n\t",
    "\ud800",
    "\uffff",
    "",
    "${x}`",
    "é漢🙂",
]


def event(name="matmul[0]", stream="compute", start=0.0, end=10.0, **kwargs):
    return Event(name, stream, start, end, **{"flops": 2e9, "bytes": 3e6, "outputs": ("bf16[8,128]",), **kwargs})


def timeline(*events, title="NanoFlow(micro_batches=2)", measured=False, streams=None):
    if streams is None:
        streams = tuple(dict.fromkeys(e.stream for e in events))
    return Timeline(title, "NVIDIA H200", measured, events, streams)


TWO = timeline(
    event("a[0]", start=0.0, end=4.0, micro_batch=0),
    event("b[0]", "network", 4.0, 9.5, bound="network", micro_batch=0),
    event("a[1]", start=4.0, end=8.0, micro_batch=1),
    event("c", start=9.5, end=10.25, bound="memory"),
)
MANY = timeline(
    *(
        event(
            f"layers_{i // 40}/op_{i % 40}[{i % 2}]", f"stream {i % 4}", i * 7.25, i * 7.25 + 28.125, micro_batch=i % 2
        )
        for i in range(5000)
    )
)
TIMELINES = {
    "two": TWO,
    "many": MANY,
    "one": timeline(event()),
    "empty": timeline(),
    "idle stream": timeline(event(), streams=("compute", "network")),
    "unnamed stream": timeline(event(), streams=()),
    "instant": timeline(event(start=0.0, end=0.0)),
    "overlapping": timeline(event(start=0.0, end=9.0), event(start=1.0, end=2.0), event(start=1.5, end=3.0)),
}


class Page(html.parser.HTMLParser):
    """A page's elements, and what each script and style holds; raises where tags do not match."""

    VOID = frozenset({"meta", "input", "img", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.raw, self.texts = [], [], {"script": [], "style": []}, []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag in self.raw:
            self.raw[tag].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in self.raw:
            self.raw[self.open[-1]][-1] += data
        elif data.strip():
            self.texts.append(data.strip())

    def having(self, **attrs):
        return [found for _, found in self.tags if attrs.items() <= found.items()]

    @property
    def data(self):
        return json.loads(self.raw["script"][0])


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TIMELINES)
def test_page_holds_every_event(case):
    given_ = TIMELINES[case]
    page = Page(to_html(given_))
    assert [tag for tag, _ in page.tags].count("h1") == 1
    assert len(page.having(role="application")) == bool(given_.events)
    (data,) = page.data["timelines"]
    assert {len(data[column]) for column in ("name", "start", "end", "stream", "row", "bound", "batch", "shape")} == {
        len(given_.events)
    }
    for i, e in enumerate(sorted(given_.events, key=lambda e: (e.start_us, e.end_us))):
        assert data["names"][data["name"][i]] == e.name
        assert data["streams"][data["stream"][i]] == e.stream
        assert (data["start"][i], data["end"][i]) == (e.start_us, e.end_us)
        assert (data["flops"][i], data["bytes"][i], data["batch"][i]) == (e.flops, e.bytes, e.micro_batch)
        assert page.data["bounds"][data["bound"][i]] == e.bound
        assert data["shapes"][data["shape"][i]] == "bf16[8,128]"


def test_page_says_the_totals():
    texts = Page(to_html(TWO)).texts
    for term, value in {
        "Step time": "10.2 µs",
        "Overlap": "4 µs (39%)",
        "Idle": "0 µs (0%)",
        "Steps": "4",
        "compute": "85% busy",
        "network": "54% busy",
    }.items():
        assert value in texts[texts.index(term, texts.index("Predicted")) + 1 :][:1]


def test_measured_stands_below_predicted():
    measured = dataclasses.replace(
        TWO, measured=True, events=tuple(dataclasses.replace(e, end_us=e.end_us * 1.2) for e in TWO.events)
    )
    page = Page(to_html(TWO, measured))
    assert [t["label"] for t in page.data["timelines"]] == ["Predicted", "Measured"]
    assert [found["data-shows"] for found in page.having(type="checkbox")] == ["timeline-0", "timeline-1"]
    assert "12.3 µs (1.20 × predicted)" in page.texts
    assert not Page(to_html(TWO)).having(type="checkbox")
    labels = [t["label"] for t in Page(to_html(TWO, dataclasses.replace(TWO, title="other"))).data["timelines"]]
    assert labels == ["Predicted: NanoFlow(micro_batches=2)", "Predicted: other"]


def test_page_has_a_legend_of_micro_batches():
    texts = Page(to_html(timeline(*(event(micro_batch=i) for i in range(22))))).texts
    assert {"micro-batch 0, 4, 8, 12 …", "micro-batch 3, 7, 11, 15 …"} <= set(texts)
    assert {"micro-batch 0", "micro-batch 1"} <= set(Page(to_html(TWO)).texts)
    assert not any("micro-batch" in text for text in Page(to_html(timeline(event()))).texts)


@pytest.mark.parametrize("case", TIMELINES)
def test_page_needs_nothing_else(case):
    """No address anywhere, and a policy under which browsers run and load only what is in it."""
    text = to_html(TIMELINES[case])
    page = Page(text)
    assert not re.search(r"(?i)https?:|//[a-z]|url\(|@import|\bimport\b|fetch\(|XMLHttpRequest", text)
    assert not [attrs for _, attrs in page.tags if {"src", "href", "style", "srcset", "action"} & set(attrs)]
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    (policy,) = page.having(**{"http-equiv": "Content-Security-Policy"})
    for kind, text in (("style", page.raw["style"][0]), ("script", page.raw["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy["content"]
    assert policy["content"].startswith("default-src 'none'")


def test_page_is_small_and_always_the_same():
    assert len(to_html(timeline()).encode()) < 36_000
    assert len(to_html(MANY).encode()) < 36_000 + 110 * len(MANY.events)
    assert to_html(MANY) == to_html(dataclasses.replace(MANY, events=tuple(MANY.events)))


names = st.text(st.characters(exclude_categories=()), max_size=30) | st.sampled_from(ODD)


@settings(max_examples=60)
@given(name=names, stream=names, title=names, device=names, shape=names)
def test_odd_names(name, stream, title, device, shape):
    """What is shown is the name, or what of it XML can hold; nothing of it is ever read as HTML or JSON."""
    plainly = to_html(timeline(event()))
    odd = Timeline(title, device, False, (event(name, stream, outputs=(shape,)),), (stream,))
    text = to_html(odd)
    text.encode()
    page = Page(text)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in Page(plainly).tags]
    (data,) = page.data["timelines"]
    assert (data["names"], data["streams"], data["shapes"]) == ([plain(name)], [plain(stream)], [plain(shape)])
    trace = to_perfetto(odd)
    trace.encode("ascii")
    assert [e["name"] for e in json.loads(trace)["traceEvents"] if e["ph"] == "X"] == [plain(name)]
    root = ET.fromstring(draw_graph([Node(name, "memory", shape, title)], stream).encode())
    assert [t.text or "" for t in root.iter(f"{SVG}title")] == _read([stream, title or name])
    assert len(Page(inline(text, title, 100)).tags) == 1


def _read(texts):
    """Texts as XML parsers give them: with the ends of lines that XML has."""
    return [plain(text).replace("\r\n", "\n").replace("\r", "\n") for text in texts]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"end_us": -1.0}, "'gemm' cannot be drawn: it runs from 0.0 to -1.0 µs"),
        ({"end_us": float("nan")}, "'gemm' cannot be drawn"),
        ({"flops": float("inf")}, "'gemm' cannot be drawn"),
        ({"bound": "disk"}, "'gemm' has the bound 'disk'; there are compute, memory, network"),
    ],
)
@pytest.mark.parametrize("draw", [to_html, to_perfetto])
def test_events_that_cannot_be_drawn(draw, change, match):
    with pytest.raises(ValueError, match=match):
        draw(timeline(dataclasses.replace(event("gemm"), **change)))


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.sampled_from("ab")), max_size=30)


@settings(max_examples=60)
@given(spans)
def test_overlapping_events_lie_in_rows(found):
    """Within a row no two events overlap, and there are as many rows as overlap at most."""
    given_ = timeline(*(event(stream=s, start=a / 4, end=(a + n) / 4) for a, n, s in found))
    streams, placed = place(given_)
    assert sorted(map(id, given_.events)) == sorted(id(e) for e, _ in placed)
    for stream in streams:
        own = [(e, row) for e, row in placed if e.stream == stream]
        for (a, i), (b, j) in itertools.combinations(own, 2):
            assert i != j or a.end_us <= b.start_us
        long = [e for e, _ in own if e.duration_us]
        depth = max((sum(o.start_us <= e.start_us < o.end_us for o in long) for e in long), default=1)
        assert {row for _, row in own if _.duration_us} <= set(range(depth))


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 µs"), (-1e-14, "0 µs"), (0.5, "0.5 µs"), (12.345, "12.3 µs"), (1234, "1.23 ms"), (2.5e6, "2.5 s")],
)
def test_durations(us, text):
    assert duration(us) == text


def test_shortened_at_the_start():
    assert shorten("layers/mlp[1]", 13) == "layers/mlp[1]"
    assert shorten("layers/mlp[1]", 7) == "…mlp[1]"


# -- traces --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", TIMELINES)
def test_trace_keeps_the_format(case):
    """The rules of the trace event format: known phases, their fields, threads that are named and do not overlap."""
    given_ = TIMELINES[case]
    trace = json.loads(to_perfetto(given_, dataclasses.replace(given_, measured=True)))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert trace["displayTimeUnit"] in ("ns", "ms")
    threads, named = {}, set()
    for e in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "args"} <= set(e)
        assert isinstance(e["pid"], int)
        assert isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            (value,) = e["args"].values()
            assert set(e["args"]) == {e["name"].partition("_")[2]}
            assert isinstance(value, str if e["name"].endswith("_name") else int)
            named.add((e["name"], e["pid"], e["tid"]))
        elif e["ph"] == "X":
            assert e["ts"] >= 0
            assert e["dur"] >= 0
            assert isinstance(e["cat"], str)
            threads.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        else:
            assert e["ph"] == "C"
            assert all(isinstance(value, int) and value >= 0 for value in e["args"].values())
    assert {("process_name", 1, 0), ("process_name", 2, 0)} <= named
    assert sum(map(len, threads.values())) == 2 * len(given_.events)
    for (pid, tid), events in threads.items():
        assert ("thread_name", pid, tid) in named
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(events))


def test_trace_says_what_a_step_does():
    events = json.loads(to_perfetto(TWO))["traceEvents"]
    (network,) = [e for e in events if e["name"] == "b[0]"]
    assert (network["ts"], network["dur"], network["cat"]) == (4.0, 5.5, "network")
    args = {"bound": "network", "flops": 2e9, "bytes": 3e6, "micro_batch": 0, "outputs": "bf16[8,128]"}
    assert args.items() <= network["args"].items()
    assert network["args"]["GB/s"] == pytest.approx(3e6 / 5.5e-6 / 1e9)
    assert network["args"]["GFLOP/s"] == pytest.approx(2e9 / 5.5e-6 / 1e9)
    names = [e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]]
    assert names == ["NVIDIA H200, predicted: NanoFlow(micro_batches=2)", "compute", "network"]
    busy = [(e["ts"], e["args"]["streams"]) for e in events if e["ph"] == "C"]
    assert busy == [(0.0, 1), (4.0, 2), (8.0, 1), (9.5, 1), (10.25, 0)]


# -- graphs --------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw):
    count = draw(st.integers(0, 25))
    sizes = [(draw(st.sampled_from([20.0, 90.0, 300.0])), draw(st.sampled_from([40.0, 200.0]))) for _ in range(count)]
    reads = [draw(st.lists(st.integers(0, i - 1), max_size=3)) if i else [] for i in range(count)]
    return sizes, reads


@settings(max_examples=100)
@given(graphs())
def test_layout(graph):
    """Boxes lie apart and inside the picture; edges run downwards, from box to box, and pass beside all others."""
    sizes, reads = graph
    layout = arrange(sizes, reads)
    boxes = [(x, y, x + w, y + h) for (x, y), (w, h) in zip(layout.corners, sizes, strict=True)]
    near = 1e-6
    for x, y, right, bottom in boxes:
        assert min(x, y) >= -near
        assert right <= layout.width + near
        assert bottom <= layout.height + near
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] + near or b[2] <= a[0] + near or a[3] <= b[1] + near or b[3] <= a[1] + near
    assert sorted((s, t) for s, t, _ in layout.edges) == sorted({(s, t) for t, own in enumerate(reads) for s in own})
    for source, target, points in layout.edges:
        assert all(a[1] <= b[1] + near for a, b in itertools.pairwise(points))
        assert points[0][1] == pytest.approx(boxes[source][3])
        assert points[-1][1] == pytest.approx(boxes[target][1])
        for (x, top), (_, bottom) in zip(points[:-1:2], points[1::2], strict=True):
            for box in boxes:
                assert x <= box[0] + near or x >= box[2] - near or bottom <= box[1] + near or top >= box[3] - near
    assert arrange(sizes, reads) == layout


def test_chains_are_straight_and_sources_stand_above_their_readers():
    chain = arrange([(100.0, 40.0)] * 5, [[], [0], [1], [2, 0], [3, 1]])
    assert [x for x, _ in chain.corners] == pytest.approx([0.0] * 5, abs=0.1)
    late = arrange([(100.0, 40.0)] * 5, [[], [0], [1], [], [2, 3]])
    assert late.corners[3][1] == late.corners[2][1]


def in_a_loop(w, x):
    x, _ = jax.lax.scan(lambda x, _: (layer(w, x), None), x, None, length=5)
    with df.mark("head"):
        return x @ w


def graph_of(fun, *args):
    return df.dynaflow(fun, scheduler=df.strategies.Sequential(), batch_axes=(None, 0)).graph(*args)


def test_graph_is_valid_svg():
    graph = graph_of(layer, W, X)
    root = ET.fromstring(graph.to_svg())
    assert root.tag == f"{SVG}svg"
    texts = [t.text for t in root.iter(f"{SVG}text")]
    for op in graph:
        assert op.key in texts
        assert any(text.startswith(op.bound) for text in texts)
        assert any((t.text or "").startswith(repr(op)) for t in root.iter(f"{SVG}title"))
    assert len([g for g in root.iter(f"{SVG}path") if g.get("class") == "edge"]) == sum(
        len(op.predecessors) for op in graph
    )
    assert graph.to_svg() == graph_of(layer, W, X).to_svg()
    assert "http" not in graph.to_svg().replace(SVG[1:-1], "")


def test_loop_is_drawn_around_its_body():
    graph = graph_of(in_a_loop, W, X)
    root = ET.fromstring(graph.to_svg())
    edges = {}
    for g in root.iter(f"{SVG}g"):
        if g.get("class") == "node":
            x, y, w, h = (float(g.find(f"{SVG}rect").get(name)) for name in ("x", "y", "width", "height"))
            edges[g.find(f"{SVG}text").text] = (x, y, x + w, y + h)
    (loop,) = [op for op in graph if op.body is not None]
    outer = edges[loop.key]
    for op in loop.body:
        left, top, right, bottom = edges[op.key]
        assert outer[0] < left < right < outer[2]
        assert outer[1] < top < bottom < outer[3]
    assert edges["head"][1] > outer[3]


def test_graph_of_many_layers():
    """What 64 layers keep for their backward pass stays beside a straight line of operators."""
    count = 128
    reads = [(i - 1,) * (i > 0) for i in range(count)]
    reads += [(i - 1, 2 * count - 1 - i) for i in range(count, 2 * count)]
    layout = arrange([(150.0, 44.0)] * len(reads), reads)
    assert max(x for x, _ in layout.corners) - min(x for x, _ in layout.corners) < 1
    assert layout.width < 150 + 30 * count
    svg = draw_graph([Node(f"layer {i}", "compute", reads=own) for i, own in enumerate(reads)], "many")
    assert len(svg) < 400_000
    assert len(list(ET.fromstring(svg).iter(f"{SVG}rect"))) == len(reads) + 3


def test_graph_without_operators():
    ET.fromstring(draw_graph([], "nothing"))


# -- from plans, and in notebooks ----------------------------------------------------------------------------------


def two_streams(ctx):
    while ops := ctx.get_ready_ops():
        for op in ops:
            ctx.execute(op, stream="network" if op.name == "b" else "compute")


def test_plan_is_drawn_predicted_and_measured():
    plan = df.dynaflow(layer, scheduler=Do(two_streams, 4, 4), batch_axes=(None, 0)).plan(W, X)
    predicted = plan.simulate("H200")
    assert plan.to_html("H200") == to_html(predicted)
    (data,) = Page(plan.to_html()).data["timelines"]
    assert data["streams"] == ["compute", "network"]
    assert sorted(data["names"][i] for i in data["name"]) == sorted(map(str, plan.steps))
    measured = dataclasses.replace(predicted, measured=True)
    assert plan.to_html("H200", measured) == to_html(predicted, measured)
    loaded = df.Plan.from_json(plan.to_json())
    assert loaded.to_html(timeline=measured) == to_html(measured)
    with pytest.raises(df.PlanError, match="from JSON"):
        loaded.to_html()


def test_shown_in_notebooks():
    flow = df.dynaflow(layer, scheduler=Split(4, 4), batch_axes=(None, 0))
    plan, graph = flow.plan(W, X), flow.graph(W, X)
    for shown, picture in (
        (plan, to_html(plan.simulate())),
        (plan.simulate(), to_html(plan.simulate())),
        (graph, graph.to_svg()),
    ):
        ((tag, attrs),) = Page(shown._repr_html_()).tags
        assert tag == "iframe"
        assert attrs["srcdoc"] == picture
        assert attrs["sandbox"] == "allow-scripts"
        assert attrs["title"]
    assert df.Plan.from_json(plan.to_json())._repr_html_() == f"<pre>{plan.show()}</pre>"
    assert len(plan._repr_html_()) < 50_000


# -- colours -------------------------------------------------------------------------------------------------------


def contrast(a, b):
    """Of two colours, after WCAG 2.2."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return float(jnp.dot(jnp.array([0.2126, 0.7152, 0.0722]), jnp.array(linear)))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [palette.LIGHT, palette.DARK])
def test_colours_can_be_read(theme):
    for ground in ("paper", "lane", *palette.BOUNDS):
        assert contrast(theme["ink"], theme[ground]) >= 4.5
    for ground in ("paper", "lane"):
        assert contrast(theme["soft"], theme[ground]) >= 4.5
        for line in ("focus", *(f"{bound}-edge" for bound in palette.BOUNDS)):
            assert contrast(theme[line], theme[ground]) >= 3


@pytest.mark.parametrize("draw", [to_perfetto, lambda plan: df.compare(plan, plan)], ids=["to_perfetto", "compare"])
def test_what_is_no_timeline_is_said_to_be_none(draw):
    plan = df.dynaflow(jnp.sin, scheduler=df.strategies.Sequential()).plan(jnp.ones(3))
    with pytest.raises(
        df.DynaFlowError, match=r"takes timelines, as plan.simulate\(\) and df.profile.* give them, not Plan"
    ):
        draw(plan)
