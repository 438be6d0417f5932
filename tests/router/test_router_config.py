import json
from typing import Any

import pytest

from router.config import AdmissionBounds, Listeners, RouterConfig
from tests.harness.fake_cluster import CONFIG
from wire.errors import ConfigError
from wire.typed_reader import to_json


def changed(path: str, value: Any) -> str:
    """CONFIG as JSON with one value set, or taken out if it is None."""
    raw = json.loads(to_json(CONFIG))
    *parents, name = path.split(".")
    place = raw
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[name]
    else:
        place[name] = value
    return json.dumps(raw)


def test_there_and_back() -> None:
    assert RouterConfig.from_json(to_json(CONFIG)) == CONFIG


def test_what_is_not_given_has_its_default() -> None:
    config = RouterConfig.from_json(changed("listeners", None))
    assert config.listeners == Listeners(host="127.0.0.1", grpc_port=0, operator_port=0)
    assert RouterConfig.from_json(changed("admission", {"max_queued_requests": 7})).admission == AdmissionBounds(
        max_queued_requests=7
    )


def test_whole_numbers_are_seconds_too() -> None:
    assert RouterConfig.from_json(changed("streams.max_deadline_s", 5)).streams.max_deadline_s == 5.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("[]", "router: must be an object"),
        ("[" * 100_000, "not JSON"),
        (changed("streams", {"max_stall_s": 10**400}), "router.streams.max_stall_s: must be a number"),
        ("{}", "router.cluster: missing"),
        (changed("colour", "red"), "router.colour: unknown"),
        (changed("model.colour", "red"), "router.model.colour: unknown"),
        (changed("model.name", None), "router.model.name: missing"),
        (changed("model.vocab_size", "300"), "router.model.vocab_size: must be a whole number"),
        (changed("model.vocab_size", True), "router.model.vocab_size: must be a whole number"),
        (changed("listeners", []), "router.listeners: must be an object"),
        (changed("model.fingerprint_hex", "xyz"), "not what it claims"),
        (changed("model.layout_hex", "00"), "not what it claims"),
        (changed("cluster.secret_hex", "0"), "not what it claims"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        RouterConfig.from_json(text)
