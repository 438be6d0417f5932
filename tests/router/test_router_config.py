import json
from typing import Any

import pytest

from router.config import RouterConfig, RouterSettings
from tests.harness.fake_cluster import CONFIG
from wire.errors import ConfigError
from wire.typed_reader import from_json, to_json


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


def read(text: str) -> RouterConfig:
    return from_json(RouterConfig, text, "router")


def test_there_and_back() -> None:
    assert read(to_json(CONFIG)) == CONFIG


def test_what_is_not_given_has_its_default() -> None:
    assert read(changed("settings", None)).settings == RouterSettings()
    given = read(changed("settings", {"max_queued_requests": 7})).settings
    assert given == RouterSettings(max_queued_requests=7)


def test_whole_numbers_are_seconds_too() -> None:
    assert read(changed("settings.max_deadline_s", 5)).settings.max_deadline_s == 5.0


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not JSON"),
        ("[]", "router: must be an object"),
        ("[" * 100_000, "not JSON"),
        (changed("settings", {"max_stall_s": 10**400}), "router.settings.max_stall_s: must be a number"),
        ("{}", "router.cluster: missing"),
        (changed("colour", "red"), "router.colour: unknown"),
        (changed("model.colour", "red"), "router.model.colour: unknown"),
        (changed("model.name", None), "router.model.name: missing"),
        (changed("model.vocab_size", "300"), "router.model.vocab_size: must be a whole number"),
        (changed("model.vocab_size", True), "router.model.vocab_size: must be a whole number"),
        (changed("settings", []), "router.settings: must be an object"),
        (changed("model.fingerprint_hex", "xyz"), "router.model.fingerprint_hex: must be 32 bytes in hex digits"),
        (changed("model.layout_hex", "00"), "router.model.layout_hex: must be an encoded layout"),
        (changed("cluster.secret_hex", "0"), "router.cluster.secret_hex: must be bytes in hex digits"),
    ],
)
def test_what_is_wrong_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(text)
