"""Reports in a real browser, headless: no script errors, and the pictures are there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from swiftapex.figures.reproduce import reproduce
from swiftapex.figures.spec import load_figure
from swiftapex.run_experiment import main as run_experiment

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
_FIGURES = Path(__file__).resolve().parents[1] / "experiments"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The browser of this machine: none is downloaded."""
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser on the PATH; looked for {', '.join(_BROWSERS)}")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a figure with runs, measured here: with so many requests that a fast machine has some left
    for the traced iterations, and for so long that a busy one has generated something."""
    path = _FIGURES / "apex" / "fig6a.yaml"
    settings = [
        "experiment.workload.num_requests=600",
        "experiment.workload.window.measure_s=1.5",
        "experiment.engine.cpu.threads=1",
        "points=[{x: OSC, set: {workload.input_len: osc, workload.output_len: osc}}]",
    ]
    figure = load_figure(path, "cpu", settings)
    folder, complete = reproduce(figure, path, tmp_path_factory.mktemp("out"))
    assert complete, (folder / "figure.txt").read_text()
    unfinished = [
        p["num_unfinished"] for p in json.loads((folder / "figure.json").read_text())["points"]
    ]
    assert min(unfinished) > 0, "no request was left to trace"
    return folder / "report.html"


def test_the_report_opens_with_its_figures(browser: Any, report: Path) -> None:
    errors: list[str] = []
    requested: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: requested.append(request.url))
    page.goto(report.as_uri())
    assert errors == []
    assert requested == [report.as_uri()]  # everything is in the file
    figure = page.locator("figure.paper svg")
    assert figure.count() == 1
    size = figure.bounding_box()
    assert size is not None and size["width"] > 300 and size["height"] > 150
    for name in ("GPU-only", "NEO", "APEX"):
        assert figure.get_by_text(name, exact=True).count() >= 1
    assert page.locator("figure.pipeline svg").count() >= 1  # what the trace showed
    rows = page.locator("#paper-against-measured tr")
    assert rows.count() == 6
    assert "+84 .. +96 %" in rows.nth(1).inner_text()
    assert "not measured" not in rows.nth(1).inner_text()
    assert "usable_threads" in page.locator("pre").first.inner_text()  # the environment
    page.close()


def test_a_long_name_leaves_the_page_its_width(browser: Any, tmp_path: Path, capsys: Any) -> None:
    names = ["a" * 99 + end for end in "xy"]
    runs = ", ".join(f"{{name: {name}, policy: gpu_only}}" for name in names)
    (tmp_path / "exp.yaml").write_text(
        f"name: {'n' * 100}\nmodel: {{architecture: tiny, weights: dummy}}\n"
        f"engine: {{device: reference, gpu: {{kv_tokens: 4096}}, cpu: {{kv_tokens: 0}}}}\n"
        f"runs: [{runs}]\n"
        "workload: {kind: synthetic, num_requests: 5, input_len: 4, output_len: 6}\n"
    )
    arguments = [str(tmp_path / "exp.yaml"), "--out", str(tmp_path / "out")]
    assert run_experiment(arguments, lambda plan, trace: FakeEngine()) == 0  # type: ignore[arg-type, return-value]
    folder = Path(capsys.readouterr().out.splitlines()[-1])
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    page.goto((folder / "report.html").as_uri())
    width = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width[0] <= width[1]
    for table in page.locator(".scroll").all():
        first = table.locator("td").first.bounding_box()
        assert first is not None and first["width"] < 400
    assert page.locator("td", has_text=names[0]).count() >= 1  # the full name, wrapped
    for axes in page.locator("svg").all():
        assert axes.get_by_text(names[0]).count() == 0
    page.close()
