"""The Grafana dashboard draws series that a server has."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginecore import EngineConfig
from enginecore.messages import EngineLimits, EngineStats
from enginecore.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "apps" / "serve" / "grafana" / "octavo.json"
BOARD = json.loads(DASHBOARD.read_text())
PANELS = {panel["title"]: panel for panel in BOARD["panels"]}


@pytest.fixture(scope="module")
def series() -> dict[str, set[str]]:
    """The labels of each series of a server, by name."""
    metrics = Metrics("tiny", stats=lambda: {0: EngineStats()})
    metrics.loaded(EngineConfig(model="tiny"), EngineLimits(64, 320, 8, 16))
    metrics.rank_up(0)
    metrics.answered("GET", "/health", 200)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("title", PANELS)
def test_a_panel_asks_for_series_and_labels_that_there_are(title, series):
    for target in PANELS[title]["targets"]:
        expression = target["expr"]
        selectors = re.findall(r"\b((?:octavo|http)_\w+)(?:\{([^}]*)\})?", expression)
        assert selectors
        for name, inside in selectors:
            assert name in series, name
            assert set(re.findall(r"(\w+)=~", inside)) <= series[name]
        grouped = {
            label for labels in re.findall(r"by \(([^)]*)\)", expression) for label in labels.split(", ")
        }
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        for name, _ in selectors:
            assert grouped | shown <= series[name]
        assert expression.count("(") == expression.count(")")


def test_the_variables_are_filled_from_series_that_there_are(series):
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(
                r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"]["query"]
            ).groups()
            assert label in series[name]


def test_panels_lie_beside_each_other():
    places = [tuple(panel["gridPos"].values()) for panel in BOARD["panels"]]
    cells = {(x + dx, y + dy) for x, y, w, h in places for dx in range(w) for dy in range(h)}
    assert len(cells) == sum(w * h for _, _, w, h in places)
    assert max(x + w for x, _, w, _ in places) <= 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)
