"""The page and its files: traced to the results, escaped, whole, and readable by themselves."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command import assert_refused, residency
from conftest import tiny_engine
from made_results import bench, write, write_sweep

from residency.reports.contests import contests_of
from residency.reports.measures import DECODE, At
from residency.reports.reading import read_folders
from residency.reports.replays import drawn_of
from residency.reports.report import report_on
from residency.reports.units import ms

HOSTILE = "<script>alert(1)</script>"
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """Every element with its attributes; raises where tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""
        self.cells = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append([dict(attrs).get("title"), ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "td" in self.open:
            self.cells[-1][1] += data

    def named(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def page_of(folder):
    return Page((folder / "index.html").read_text())


def resolve(tree, pointer):
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]
    return tree


def test_every_number_of_the_data_is_where_it_says(sweep, made):
    rows = list(csv.DictReader((made / "data.csv").read_text().splitlines()))
    for row in rows:
        tree = json.loads((made / row["file"]).read_text())
        assert resolve(tree, row["pointer"]) == float(row["value"])
    assert {row["job"] for row in rows} == set("0123")
    assert {row["number"] for row in rows} >= {"median", "least", "most", "floor", "hit rate"}


def test_every_time_on_the_page_is_that_of_the_job_it_names(sweep, made):
    cells = [cell for cell in page_of(made).cells if cell[0]]
    assert len(cells) > 4 * 3  # each job at two lengths and in decode, and the winners
    for title, text in cells:
        job, pointer = title.removeprefix("job ").split(", ")
        tree = json.loads((sweep / job / "result.json").read_text())
        assert text.split(" (")[0] == ms(resolve(tree, pointer))


def test_sources_lead_to_the_results(sweep, made):
    links = [a["href"] for a in page_of(made).named("a") if a["href"].endswith("result.json")]
    assert [(made / link).resolve() for link in links] == [
        (sweep / str(n) / "result.json").resolve() for n in range(4)
    ]


def test_what_is_pointed_at_is_there(made):
    page = page_of(made)
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(set(ids)) == len(ids)
    for link in (a["href"] for a in page.named("a")):
        assert link.removeprefix("#") in ids if link.startswith("#") else (made / link).exists()


def test_the_page_loads_nothing(made):
    page = page_of(made)
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "object"}
    images = page.named("img")
    assert images and all(image["src"].startswith("data:image/png;base64,") for image in images)
    assert all(len(image["alt"]) > 20 for image in images)
    assert "url(" not in (made / "index.html").read_text()
    assert (made / "index.html").stat().st_size < 2e6


def test_what_was_not_measured_is_shown_with_its_reason(made):
    page = page_of(made)
    for word in (
        "device memory: too little <b>here</b>",
        "Traceback",
        "running, or killed while it ran",
        "still to run",
        "no <slots>; mend it with cache=lru",
        "cache=lru cache.slots=33%: as job 0",
        "4 measured, 1 failed",
        "3 of 7 jobs have no result",
    ):
        assert word in page.text
    assert not page.named("b")


def test_the_answer_comes_before_the_pictures(made):
    text = page_of(made).text
    assert text.index("Which of 4 configurations") < text.index("(job ") < text.index("Pictures")
    assert text.index("The machine") < text.index("What was not measured")


def test_axes_are_labelled_with_units(sweep):
    report = report_on(read_folders([sweep]))
    names = [picture.name.partition("-")[0] for picture in report.pictures]
    assert names == ["ttft", "decode", "curves", "bytes", "hits"]
    units = ("(ms)", "(tokens)", "(MB)", "(%)", "(slots", "layer", "configuration")
    for picture in report.pictures:
        for axes in picture.figure.axes:
            label = axes.get_xlabel() + axes.get_ylabel()
            assert any(unit in label for unit in units), (picture.name, label)
        assert picture.caption and picture.alt
        assert picture.png.startswith(b"\x89PNG")


def test_heat_maps_are_left_out_where_no_counters_are(tmp_path):
    write(tmp_path / "0", bench({4: [1, 2]}, [1, 2]))
    names = [picture.name for picture in report_on(read_folders([tmp_path])).pictures]
    assert names == ["ttft-1"]


def test_a_run_lies_on_the_curve_of_its_own_recording(sweep, tmp_path):
    one = json.loads((sweep.parent / "runs" / "one" / "result.json").read_text())
    jobs = write_sweep(tmp_path / "s", [("cache=lru", {"result.json": one})])
    config = (sweep.parent / "runs" / "one" / "config.yaml").read_text()
    (jobs / "0" / "config.yaml").write_text(config)
    tree = json.loads((jobs / "sweep.json").read_text())
    tree["jobs"][0]["routes"] = "0.safetensors"
    (jobs / "0.safetensors").write_bytes((sweep / "routes" / "0.safetensors").read_bytes())
    (jobs / "sweep.json").write_text(json.dumps(tree))
    ((drawn,), missing) = drawn_of(contests_of(read_folders([jobs]))[0])
    assert missing == []
    ((name, slots, miss),) = drawn.live
    curves = {line.name: dict(line.points) for line in drawn.lines}
    assert curves[name][slots] == pytest.approx(miss) and 0 < miss < 1
    for size, ratio in curves[name].items():
        assert curves["belady"][size] <= ratio


@pytest.mark.parametrize("kind", ["a run of one prompt", "prefill modes", "a replay"])
def test_other_kinds_are_shown(kind, sweep, tmp_path):
    folder, words = tmp_path / "replay", ("Miss ratio", "0.safetensors")
    if kind == "a replay":
        routes = sweep / "routes" / "0.safetensors"
        residency("replay", f"trace={routes}", "slots=8,16", "--out", folder)
    elif kind == "a run of one prompt":
        folder, words = sweep.parent / "runs", ("single run", "One configuration", "decode")
    else:
        folder = Path(__file__).parents[2] / "benchmarks" / "results" / "qwen-modes-even"
        words = ("made up", "warm pool", "prefill=in_place", "Crossings", "routes are made up")
    done = residency("report", folder, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    text = page_of(tmp_path / "out").text
    for word in words:
        assert word in text


def test_a_batch_is_shown_with_its_decode_and_its_first_prompt(checkpoint, tmp_path):
    with tiny_engine(checkpoint, "cache.slots=12", "workload.prompts=[a,b]") as engine:
        prompts = [[3, 4, 5, 6], [7, 8, 9]]
        report = engine.generate_batch(prompts, max_new_tokens=6, ignore_eos=True)
    write(tmp_path / "one", report.as_dict())
    (section,) = report_on(read_folders([tmp_path])).sections
    (entrant,) = section.contest.entrants
    assert [at.text for at in entrant.measures] == ["TTFT at 4 tokens", "decode"]
    assert entrant.measures[At(DECODE)].median == report.tpot_s
    assert [picture.name for picture in section.pictures] == ["ttft-1", "bytes-1", "hits-1"]


def test_hostile_texts_and_paths_are_shown_as_they_are(tmp_path):
    folder = tmp_path / f"{HOSTILE.replace('/', ':')} & javascript:x"
    result = bench({4: [1, 2]}, [1, 2], notes=[f"routing: {HOSTILE}", "=1+1"], title=HOSTILE)
    result["environment"] = result["environment"] | {"device_name": HOSTILE, "commit": HOSTILE}
    result["config"]["cache"]["scope"] = f'"{HOSTILE}$x_'
    other = json.loads(json.dumps(result))
    other["config"]["cache"]["scope"] = "=cmd|' /C calc'!A0"
    failure = {"version": 1, "kind": "failure", "error": HOSTILE, "detail": HOSTILE}
    jobs = [(HOSTILE, {"result.json": r}) for r in (result, other)]
    write_sweep(folder, [*jobs, (HOSTILE, {"failure.json": failure})])
    done = residency("report", folder, "--against", folder)
    assert done.exit_code == 0, done.output
    page = page_of(folder / "report")
    assert HOSTILE in page.text and not page.named("script")
    assert all("javascript" not in a["href"].partition(":")[0] for a in page.named("a"))
    assert "<script" not in (folder / "report" / "report.md").read_text()
    rows = csv.reader((folder / "report" / "data.csv").read_text().splitlines())
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "@", "+"))]


def test_a_report_is_written_whole_beside_nothing_else(sweep, tmp_path, monkeypatch):
    write(tmp_path / "in", bench({4: [1, 2]}, [1, 2]))
    before = sorted((tmp_path / "in").iterdir())

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("residency.reports.files.page_html", fail)
    assert residency("report", tmp_path / "in", "--out", tmp_path / "out").exit_code == 130
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    done = residency("report", tmp_path / "in", "--out", tmp_path / "out", "--json")
    told = json.loads(done.stdout)
    assert sorted(told["files"]) == sorted(file.name for file in (tmp_path / "out").iterdir())
    assert told["sources"] == {"0": "../in/result.json"}
    assert sorted((tmp_path / "in").iterdir()) == before
    again = ("report", tmp_path / "in", "--out", tmp_path / "out")
    assert_refused(residency(*again), "there is a report already", "--force")
    (tmp_path / "out" / "hits-9.png").write_bytes(b"of an earlier report")
    (tmp_path / "out" / "mine.png").write_bytes(b"of the user")
    assert residency(*again, "--force").exit_code == 0
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert "mine.png" in names and "hits-9.png" not in names


def test_verdicts_are_printed_as_well(sweep, tmp_path):
    out = ("--out", tmp_path / "out", "--against", sweep)
    shown = residency("report", sweep, *out, env={"COLUMNS": "200"}).stdout
    assert shown.count("within noise") > 12 and "12 within noise" in shown
    assert "Against the base" in page_of(tmp_path / "out").text
    assert "Against the base" in (tmp_path / "out" / "report.md").read_text()
