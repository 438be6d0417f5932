"""What `baton usage` prints of the answers of routers."""

import json
from types import SimpleNamespace

import pytest

from cli.operate import usage
from wire.errors import Unavailable
from wire.pb import cluster_pb2

FIRST = cluster_pb2.UsageReport(
    usage=[
        cluster_pb2.TenantUsage(tenant="b", key="12345678", requests=1, computed_tokens=10, worker_s=0.5),
        cluster_pb2.TenantUsage(tenant="a", requests=2, cached_tokens=1000, generated_tokens=7),
    ]
)
SECOND = cluster_pb2.UsageReport(usage=[cluster_pb2.TenantUsage(tenant="a", requests=3, cached_tokens=234)])


def answering(monkeypatch: pytest.MonkeyPatch, **answers: cluster_pb2.UsageReport | None) -> None:
    monkeypatch.setattr(usage, "find_cluster", lambda name: name)
    monkeypatch.setattr(usage, "call_each", lambda *_: answers)


def run(as_json: bool = False) -> int:
    return usage.run(SimpleNamespace(name="default", json=as_json))  # type: ignore[arg-type]


def test_usage_is_summed_over_routers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answering(monkeypatch, one=FIRST, two=SECOND)
    assert run() == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "-", "5", "0", "1,234", "7", "0"] in rows
    assert ["b", "12345678", "1", "10", "0", "0", "0"] in rows
    assert run(as_json=True) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed[1] == {
        "tenant": "b",
        "key": "12345678",
        "requests": 1,
        "computed_tokens": 10,
        "cached_tokens": 0,
        "generated_tokens": 0,
        "worker_s": 0.5,
    }


def test_a_router_that_does_not_answer_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answering(monkeypatch, one=cluster_pb2.UsageReport(), two=None)
    assert run() == 0
    told = capsys.readouterr()
    assert told.out == "no request is over yet\n"
    assert "the router at two does not answer" in told.err
    answering(monkeypatch, one=None)
    with pytest.raises(Unavailable):
        run()
