"""The dashboard and the alert rules: each metric and label in them is one that a run exports."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.model.hash_model import HashModel
from tests.gateway.local_gateway import LocalDoor
from tests.harness.local_cluster import LocalCluster
from wire.errors import BatonError
from wire.journal import GATES
from wire.layout import KVLayout
from wire.trust.key_ring import NO_KEYS

FOLDER = Path("deploy/observability")
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
GROUPS = yaml.safe_load((FOLDER / "prometheus-alerts.yaml").read_text())["groups"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
VARIABLE = re.compile(r"label_values\((\w+), (\w+)\)")
SELECTOR = re.compile(r"\b(baton_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=|!=|=~|!~)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|ignoring) \(([^)]*)\)")
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
MODEL = HashModel(LAYOUT, 300)


@dataclass(frozen=True)
class Exported:
    """The names of a run's metrics, and the values of each of their labels."""

    labels: dict[str, dict[str, set[str]]]

    @classmethod
    def of(cls, page: str) -> "Exported":
        labels: dict[str, dict[str, set[str]]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                of_metric = labels.setdefault(sample.name, {})
                for name, value in sample.labels.items():
                    of_metric.setdefault(name, set()).add(value)
        return cls(labels)

    @property
    def values(self) -> set[str]:
        return {value for of_metric in self.labels.values() for values in of_metric.values() for value in values}


def expressions() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each expression."""
    for panel in PANELS:
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def faults(place: str, expression: str, exported: Exported) -> Iterator[str]:
    """Yields metrics, labels and values of an expression that the run does not export."""
    names = set()
    for name, matchers in SELECTOR.findall(expression):
        names.add(name)
        if name not in exported.labels:
            yield f"{place}: {name} is not exported"
            continue
        for label, operator, value in MATCHER.findall(matchers):
            if label not in exported.labels[name]:
                yield f"{place}: {name} has no label {label}"
            elif label == "outcome":
                yield from (f"{place}: no outcome is {one}" for one in value.split("|") if one not in outcomes())
            elif operator == "=" and value not in exported.labels[name][label]:
                yield f"{place}: no {label} of {name} is {value}"
    for labels in GROUPING.findall(expression):
        known = {label for name in names for label in exported.labels.get(name, {})}
        yield from (f"{place}: no metric has the label {one}" for one in labels.split(", ") if one not in known)


def outcomes() -> set[str]:
    """Returns the gRPC statuses of all errors."""
    found, kinds = {"OK"}, [BatonError]
    while kinds:
        kind = kinds.pop()
        found.add(kind.status.grpc)
        kinds += kind.__subclasses__()
    return found


async def page_of(cluster: LocalCluster, door: LocalDoor) -> str:
    """Reads the metrics of a gateway and of the router behind it."""
    await cluster.router.watch.read()
    return (await door.get("/metrics")).body.decode() + generate_latest(cluster.router.metrics_page).decode()


async def test_a_run_exports_all_that_dashboard_and_alerts_read() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        door = LocalDoor(cluster.router, NO_KEYS)
        for prompt in ("hello, world, hello", "hello, world, hello"):
            answer = await door.post("/v1/completions", {"model": "twin", "prompt": prompt, "max_tokens": 3})
            assert answer.status == 200
        exported = Exported.of(await page_of(cluster, door))
        found = [fault for place, expression in expressions() for fault in faults(place, expression, exported)]
        assert found == []
        metric, label = VARIABLE.fullmatch(DASHBOARD["templating"]["list"][1]["query"]).groups()  # type: ignore[union-attr]
        assert label in exported.labels[metric]
        await door.client.close()
    dashed = [*faults("x", 'sum by (tier) (baton_pool_size{role="x"}) + baton_lost', exported)]
    assert dashed == [
        "x: no role of baton_pool_size is x",
        "x: baton_lost is not exported",
        "x: no metric has the label tier",
    ]


async def test_no_text_of_a_client_becomes_a_label() -> None:
    async with LocalCluster.running(MODEL, 1, 1) as cluster:
        door = LocalDoor(cluster.router, NO_KEYS)

        async def ask(number: int) -> None:
            odd = f"odd{number}"
            await door.get(f"/{odd}")
            await door.send(odd.upper(), "/v1/models", b"", {})
            await door.post("/v1/completions", {"model": odd, "prompt": odd, "user": odd})
            await door.post("/v1/completions", {"model": "twin", "prompt": odd, "max_tokens": 1}, x_request_id=odd)

        await ask(0)
        await page_of(cluster, door)
        before = Exported.of(await page_of(cluster, door)).values
        for number in range(1, 6):
            await ask(number)
        page = await page_of(cluster, door)
        assert Exported.of(page).values - before <= set(GATES)
        assert "odd" not in page
        await door.client.close()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_a_rule_has_what_prometheus_wants(rule: dict[str, Any]) -> None:
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].endswith(".")


def test_panels_stand_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
