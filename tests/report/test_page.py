from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from fednet.cli.api import report
from fednet.report import finish, page
from fednet.report.read import open_run
from tests.report.fake_run import jsonl, opened, write


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = [
        write(
            folder / f"{m}-{s}",
            algorithm=m,
            seed=s,
            rounds=12,
            personalised=True,
            drop={t: dict.fromkeys(range(6), "deadline <3 s") for t in (2, 5)},
        )
        for m in ("fedavg", "scaffold")
        for s in (0, 1)
    ]
    return [open_run(p) for p in made]


@pytest.fixture(scope="module")
def pages(runs, tmp_path_factory):
    """The page of one run, and of them all."""
    folder = tmp_path_factory.mktemp("pages")
    return page.write(runs[:1], folder / "one.html"), page.write(runs, folder / "all.html")


def test_a_page_fetches_nothing(pages):
    text = pages[1].read_text()
    fetched = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert fetched
    assert all(f.startswith(("data:", "#")) for f in fetched)
    assert not re.findall(r"url\((?!#)|@import|https?://", text)


def tiles(run):
    """(value, note) of each tile, by its name."""
    found = re.findall(r"<b>(.*?)</b><span>(.*?)</span><em>(.*?)</em>", page.render([run]))
    return {name: (value, note) for value, name, note in found}


def test_who_is_still_at_work_has_not_completed_its_task(tmp_path):
    run = opened(tmp_path / "a", rounds=2, clients=4, share=1.0)
    run.rounds[0].set(completed=[0, 1], dropped={"2": "late"})  # client 3 goes on
    value, note = tiles(run)["tasks completed"]
    assert value == "6 / 8"
    assert note == "1 dropped, 1 not finished or in discarded rounds"


def test_the_header_of_several_runs_names_what_they_differ_in(tmp_path):
    def divided(alpha):
        return {"dataset": "digits", "partition": {"scheme": "dirichlet", "alpha": alpha}}

    made = [("a", {"data": divided(0.3)}), ("b", {"data": divided(1.0)})]
    text = page.render([opened(tmp_path / name, **more) for name, more in made])
    assert "digits, dirichlet alpha=0.3 / dirichlet alpha=1, 6 clients, participation 0.5" in text


def test_what_a_drawing_refers_to_is_its_own(pages):
    text = pages[1].read_text()
    names = re.findall(r' id="([^"]*)"', text)
    assert len(set(names)) == len(names)
    referred = re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', text)
    assert {a or b for a, b in referred} <= set(names)
    assert not re.findall(r"(?:fill|stroke): #", text)  # every colour follows the page


def test_names_from_a_run_cannot_become_markup(tmp_path):
    path = write(tmp_path / "a", drop={1: dict.fromkeys(range(6), "<script>alert(1)</script>")})
    text = page.render([open_run(path)])
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text


def test_characters_that_nobody_sees_are_shown_as_what_they_are(tmp_path):
    """One that turns the direction of the text beside it, and one that no SVG may hold."""
    odd = "gpj\u202e\x1b"
    path = write(tmp_path / "a", drop={1: dict.fromkeys(range(6), odd)})
    partition = json.loads((path / "partition.json").read_text())
    partition["names"] = [f"{odd}{c}" for c in range(partition["classes"])]
    (path / "partition.json").write_text(json.dumps(partition))
    text = page.render([open_run(path)])
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert text.count(r"gpj\u202e\x1b") > 1


def test_one_run_shows_its_numbers_and_the_command_that_repeats_it(runs, pages):
    text = pages[0].read_text()
    assert f"{100 * runs[0].rounds[-1].test_accuracy:.2f} %" in text
    assert f">fednet run {runs[0].dir}/config.yaml<" in text
    assert "Comparison" not in text


def test_several_runs_are_overlaid_with_bands_and_compared(pages):
    text = pages[1].read_text()
    assert "Comparison" in text
    assert (
        text.count('class="series band"') == 2 * 3 * 5 * 2
    )  # two methods, three axes, five quantities, in two sizes
    assert "fedavg (n=2)" in text
    assert "2 more runs" in text


def test_several_runs_are_a_table_of_the_settings_in_which_they_differ(tmp_path):
    made = [
        write(tmp_path / f"r{i}", rounds=1, accuracy=[a], train={"lr": lr, "epochs": 1})
        for i, (lr, a) in enumerate(((0.1, 0.5), (0.02, 0.8)))
    ]
    text = page.render([open_run(p) for p in made])
    table = text.split("<h3>Runs</h3>")[1].split("</table>")[0]
    assert re.findall(r"<button[^>]*>([^<]*)<", table)[:4] == [
        *("run", "train.lr", "final accuracy", "best accuracy"),
    ]
    rows = [re.findall(r"<td>([^<]*)<", row)[:3] for row in table.split("<tr>")[2:]]
    assert rows == [["r0", "0.1", "50.00 %"], ["r1", "0.02", "80.00 %"]]


def test_the_timeline_says_who_joined_and_left_and_who_was_dropped_and_why(tmp_path):
    path = write(tmp_path / "a", rounds=1)
    events = [
        {"round": 0, "type": "started", "time": 100.0, "incarnation": 1},
        {"round": 0, "type": "joined", "time": 101.5, "clients": [0, 1, 2, 5], "host": "lab"},
        {"round": 1, "type": "round", "time": 102.0},
        {"round": 1, "client": 2, "type": "dropped", "time": 103.0, "why": "deadline <3 s"},
        {"round": 1, "client": 3, "type": "fault", "time": 103.5, "kind": "crash"},
        {"round": 1, "type": "away", "time": 104.0, "clients": [5], "why": "no heartbeat"},
    ]
    jsonl(path / "events.jsonl", [{"client": -1, "bytes": 0, "elapsed": 0.0, **e} for e in events])
    text = page.render([open_run(path)])
    table = html.unescape(text.split('class="timeline"')[1].split("</table>")[0])
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert rows == [
        ["0.0", "", "", "the server started", "incarnation 1"],
        ["1.5", "", "0-2, 5", "joined", "host lab"],
        ["3.0", "1", "2", "was dropped from the round", "deadline <3 s"],
        ["3.5", "1", "3", "planned fault", "crash"],
        ["4.0", "1", "5", "lost the connection", "no heartbeat"],
    ]


def test_a_loss_that_is_not_finite_leaves_the_pages_numbers_readable(tmp_path):
    run = opened(tmp_path / "a", rounds=2)
    run.rounds[1].train_loss = float("nan")
    found = re.findall(r'data-hover="([^"]*)"', page.render([run]))
    assert found

    def refuse(constant):
        raise AssertionError(constant)

    for text in found:
        json.loads(html.unescape(text), parse_constant=refuse)  # as a browser reads it


def test_a_live_run_says_that_it_is(tmp_path):
    path = write(tmp_path / "a", rounds=3)
    (path / "summary.json").unlink()
    assert "Not finished when this page was written: a." in page.render([open_run(path)])


def test_a_run_that_has_only_begun_has_a_page(tmp_path):
    path = write(tmp_path / "a")
    for name in ("rounds", "clients", "wire"):
        (path / f"{name}.jsonl").write_text("")
    page.render([open_run(path)])
    finish(path)


def test_a_run_says_that_it_draws_and_draws_nothing_where_it_is_told_not_to(tmp_path):
    said: list[str] = []
    display = SimpleNamespace(note=said.append)
    silent = write(tmp_path / "silent", report=False)
    report(silent, display)
    assert said == []
    assert not (silent / "report.html").exists()
    path = write(tmp_path / "a", rounds=1)
    report(path, display)
    assert said == ["writing report.html", str(path / "report.html")]


# -- in a browser, where the machine has one -------------------------------------------------------
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def chromium() -> str:
    found = os.environ.get("CHROME") or next((p for n in NAMES if (p := shutil.which(n))), None)
    if found is None:
        pytest.skip("no chromium on this machine: the page is not looked at in a browser")
    return found


def probe(page: Path, folder: Path, script: str, width: int, *flags: str) -> tuple[str, list[str]]:
    """Opens a copy of the page that runs `script` once loaded, which calls `say(text)`.

    Returns what it said, and the lines on the console.
    """
    tail = (
        "<pre id=said></pre><script>addEventListener('load', () => {"
        "const said = document.getElementById('said'), say = t => said.textContent += t + '\\n';"
        f"try {{ {script} }} catch (e) {{ say('error ' + e) }} }});</script>"
    )
    copy = folder / f"probe-{width}.html"
    copy.write_text(
        page.read_text(encoding="utf-8").replace("</body>", tail + "</body>"), encoding="utf-8"
    )
    run = subprocess.run(
        [
            chromium(),
            *QUIET,
            *flags,
            "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},900",
            "--dump-dom",
            copy.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    said = re.search(r'<pre id="said">(.*?)</pre>', run.stdout, re.S)
    assert said, "the page did not load"
    return said[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"), [
        x for x in run.stderr.splitlines() if ":CONSOLE" in x
    ]


LOOK = """
say('wide ' + document.documentElement.scrollWidth + ' of ' + innerWidth);
const box = e => e.getBoundingClientRect(), all = q => [...document.querySelectorAll(q)];
const over = all('main *').filter(
  e => !e.closest('svg,.scroll,.plot,pre') && box(e).right > innerWidth + 1);
say('outside ' + over.map(e => e.tagName + '.' + e.className).join(' '));
const cut = all('.tile b, button, h1, h2, h3').filter(
  e => e.clientWidth && e.scrollWidth > e.clientWidth + 1);
say('cut ' + cut.map(e => e.textContent).join('|'));
const seen = all('.pane:not([hidden]) svg, .cards .plot svg').filter(e => box(e).width);
const low = seen.filter(e => box(e).height < 80);
const scrolled = all('.plot').filter(e => e.scrollWidth > e.clientWidth + 1);
say('scrolled ' + scrolled.length);
const beyond = (e, svg) => box(e).left < box(svg).left - 1 || box(e).right > box(svg).right + 1;
const lost = all('.plot text').filter(e => box(e).width && beyond(e, e.closest('svg')));
say('beyond ' + lost.map(e => e.textContent).join('|'));
const main = seen[0], card = main.closest('.card');
say('share ' + (box(main).width / box(card).width).toFixed(2));
const text = all('.plot text').filter(e => box(e).width);
const scale = e => Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b);
const pixels = e => scale(e) * parseFloat(getComputedStyle(e).fontSize);
say('smallest ' + Math.min(...text.map(pixels)).toFixed(2));
const bands = all('.band [clip-path]');
const within = e => document.getElementById(e.getAttribute('clip-path').slice(5, -1));
say('bands ' + bands.length + ' loose ' + bands.filter(e => !within(e)).length);
say('flat ' + low.length + ' charts ' + document.querySelectorAll('.cards .plot svg').length);
"""
POINT = """
const tip = document.getElementById('tip');
const point = (e, x, y) => {
  const r = e.getBoundingClientRect();
  const at = {clientX: r.left + x * r.width, clientY: r.top + y * r.height};
  e.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, ...at}));
};
point(document.querySelector('.pane:not([hidden]) svg'), 0.97, 0.5);
say('line ' + tip.textContent.replace(/\\n/g, ' / '));
const grid = document.querySelectorAll('.cards .plot svg')[3].querySelector('image');
for (let client = 0; client < 6; client++) {
  point(grid, 1.5 / 12, (client + 0.5) / 6);
  say('drop ' + tip.textContent.replace(/\\n/g, ' / '));
}
const log = document.querySelector('[data-log]'), smooth = document.querySelector('[data-smooth]');
const shown = e => box(e).width + box(e).height > 0, box = e => e.getBoundingClientRect();
const pane = document.querySelector('.pane:not([hidden]) .wide');
const own = () => [...pane.querySelectorAll('path.own[fill=none]')];
const ys = e => e.getAttribute('d').slice(1).split('L').map(p => +p.split(' ')[1]);
log.click();
const plain = own().map(ys);
say('log ' + own().length + ' ' + [...pane.querySelectorAll('.series')].some(shown));
const texts = [...pane.querySelectorAll('text.own')];
const ticks = texts.map(t => [+t.textContent, +t.getAttribute('y')]);
const steps = ticks.slice(1).map(([v, y], i) => (ticks[i][1] - y) / Math.log(v / ticks[i][0]));
say('even ' + (steps.length > 1 && Math.max(...steps) - Math.min(...steps) < 0.01));
log.click();
// What was measured, from the exponential means: m[k] = w m[k - 1] + (1 - w) a[k].
const measured = w => {
  smooth.value = w; smooth.oninput();
  return own().flatMap(e => ys(e).slice(1).map((m, k) => (m - w * ys(e)[k]) / (1 - w)));
};
const half = measured(0.5), slow = measured(0.8);
say('smooth ' + half.length + ' ' + Math.max(...half.map((a, k) => Math.abs(a - slow[k]))));
smooth.value = 0; smooth.oninput();
say('again ' + own().length + ' ' + [...pane.querySelectorAll('.series')].some(shown));
// Enlarges the right half of a chart: from the middle of its axes to beyond their end.
const drag = (svg, d) => {
  const screen = x => svg.createSVGPoint().matrixTransform(svg.getScreenCTM().translate(x, 0)).x;
  const y = box(svg).top + 40, send = (kind, x) => svg.dispatchEvent(
    new PointerEvent(kind, {bubbles: true, button: 0, clientX: screen(x), clientY: y}));
  send('pointerdown', (d[2] + d[3]) / 2); send('pointermove', d[3] - 9);
  send('pointermove', d[3] + 50); send('pointerup', d[3] + 50);
};
const twice = svg => svg.dispatchEvent(new MouseEvent('dblclick', {bubbles: true, clientX: 0}));
const chart = pane.querySelector('svg');
drag(chart, hovers[0]);
const xs = () => [...chart.querySelectorAll('text.own[text-anchor=middle]')];
const axis = xs().map(t => [+t.textContent, +t.getAttribute('x')]);
say('zoom ' + own().length + ' ' + [...pane.querySelectorAll('.series')].some(shown));
say('rounds ' + axis.map(([v]) => v).join(' '));
const [x0, x1, from, to] = hovers[0], middle = (x0 + x1) / 2;
const off = ([v, x]) => Math.abs(from + (v - middle) / (x1 - middle) * (to - from) - x);
say('places ' + Math.max(...axis.map(off)).toFixed(2));
say('marked ' + document.querySelectorAll('rect.own').length);
twice(chart);
say('whole ' + own().length + ' ' + xs().length);
say('lines ' + [...pane.querySelectorAll('.series')].some(shown));
const cells = grid.closest('svg'), plain_box = box(grid);
drag(cells, hovers[1]);
const wide = box(grid);
say('stretched ' + (wide.width / plain_box.width).toFixed(2));
say('right ends ' + (wide.right - plain_box.right).toFixed(1));
point(grid, 0.51, 0.1); say('pointed ' + tip.textContent.split(',')[0]);
point(grid, 0.99, 0.1); say('pointed ' + tip.textContent.split(',')[0]);
dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}));
say('escaped ' + (box(grid).width / plain_box.width).toFixed(2));
const body = document.querySelector('.sortable tbody');
const column = i => [...body.rows].map(r => r.cells[i].textContent);
const heads = [...document.querySelectorAll('.sortable th button')], last = heads.length - 4;
heads[last].click(); say('up ' + column(last).join(' '));
heads[last].click(); say('down ' + column(last).join(' '));
document.querySelector('[data-x="1"]').click();
say('pane ' + document.querySelector('.pane:not([hidden])').dataset.pane);
document.querySelector('[data-toggle="0"]').click();
say('hidden ' + document.querySelectorAll('.series.off').length);
const before = getComputedStyle(document.body).backgroundColor;
document.getElementById('theme').click();
say('theme ' + (before !== getComputedStyle(document.body).backgroundColor));
"""


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("many", [False, True], ids=["one run", "several runs"])
def test_in_a_browser_nothing_overflows_and_the_console_is_clean(pages, tmp_path, width, many):
    said, console = probe(pages[many], tmp_path, LOOK, width)
    assert console == []
    wide = re.search(r"wide (\d+) of (\d+)", said)
    assert wide
    assert int(wide[1]) <= int(wide[2])
    assert "outside \n" in said
    assert "cut \n" in said
    smallest = re.search(r"smallest ([\d.]+)", said)
    assert smallest
    assert float(smallest[1]) >= 9  # pixels, also on a telephone
    assert f"bands {60 if many else 0} loose 0" in said
    assert "scrolled 0\n" in said  # no part of a chart is out of sight
    assert "beyond \n" in said
    share = re.search(r"share ([\d.]+)", said)
    assert share
    assert float(share[1]) > 0.85  # of its card
    assert f"flat 0 charts {16 if many else 8}" in said


def test_in_a_browser_pointing_tells_the_numbers_and_the_reasons(runs, pages, tmp_path):
    text = pages[1].read_text()
    found = [json.loads(html.unescape(d)) for d in re.findall(r'data-hover="([^"]*)"', text)]
    (grid, *_) = [d for d in found if "words" in d]
    axes = f"const hovers = {json.dumps([found[0]['x'], grid['x']])};"
    said, console = probe(pages[1], tmp_path, axes + POINT, 1280)
    assert console == []
    last = [
        sum(r.rounds[-1].test_accuracy for r in runs if r.algorithm == m) / 2
        for m in ("fedavg", "scaffold")
    ]
    assert "line round 12 / " in said
    for value in last:
        assert f"{value:.5g}".rstrip("0")[:6] in said
    assert re.search(r"drop round 2, client \d / dropped: deadline <3 s", said)
    assert "log 2 false" in said  # its own two lines, instead of those of the drawing
    assert "even true" in said  # the ticks of a logarithmic axis
    smooth = re.search(r"smooth (\d+) ([\d.e-]+)", said)
    assert smooth
    assert int(smooth[1]) == 2 * 11
    assert float(smooth[2]) < 0.2  # of a point; a path has two digits
    assert "again 0 true" in said
    # Rounds 1 to 12 with margins of half a round: the right half is from 6.5 on.
    assert "zoom 2 false" in said
    assert "rounds 8 10 12" in said
    assert "places 0.00" in said
    assert "marked 0" in said
    assert "whole 0 0" in said
    assert "lines true" in said
    assert "stretched 2.00" in said
    assert re.search(r"right ends -?0\.0\n", said)
    assert "pointed round 7" in said
    assert "pointed round 12" in said
    assert "escaped 1.00" in said
    finals = sorted(f"{100 * r.rounds[-1].test_accuracy:.2f} %" for r in runs)
    assert f"up {' '.join(finals)}" in said
    assert f"down {' '.join(finals[::-1])}" in said
    assert "pane 0-1" in said
    assert "hidden 60" in said  # a line and a band, on three axes, of five quantities, in two sizes
    assert "theme true" in said
