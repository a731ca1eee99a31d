"""Reports in a real browser, headless: no script errors, and the pictures are there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftapex.figures.reproduce import reproduce
from swiftapex.figures.spec import load_figure

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
    """Of a figure with runs, measured here."""
    path = _FIGURES / "apex" / "fig6a.yaml"
    settings = [
        "experiment.workload.num_requests=30",
        "experiment.workload.window.measure_s=0.5",
        "points=[{x: OSC, set: {workload.input_len: osc, workload.output_len: osc}}]",
    ]
    figure = load_figure(path, "cpu", settings)
    folder, complete = reproduce(figure, path, tmp_path_factory.mktemp("out"))
    assert complete
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
    assert rows.count() == 5
    assert "+84 .. +96 %" in rows.nth(1).inner_text()
    assert "not measured" not in rows.nth(1).inner_text()
    assert "usable_threads" in page.locator("pre").first.inner_text()  # the environment
    page.close()
