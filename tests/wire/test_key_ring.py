import json
from dataclasses import replace
from typing import Any

import pytest

from wire.errors import ConfigError, PermissionDenied, Unauthenticated
from wire.trust.key_ring import ANYONE, NO_KEYS, Allowance, Key, KeyList, KeyRing, Scope, make_key
from wire.typed_reader import from_json, to_json

KEY, TEXT = make_key("acme", [Scope.GENERATE], Allowance(requests_per_minute=5))
OTHER, OTHER_TEXT = make_key("beta", [Scope.METRICS, Scope.OPERATE], Allowance())
LISTED = KeyList((KEY, OTHER))
SHOWN = f"Bearer {TEXT}"
HEAD = TEXT.rpartition("-")[0]
WRONG: dict[str, list[str]] = {
    "none": [],
    "empty": [""],
    "no scheme": [TEXT],
    "another scheme": [f"Basic {TEXT}"],
    "scheme only": ["Bearer "],
    "two spaces": [f"Bearer  {TEXT}"],
    "a space behind": [f"{SHOWN} "],
    "a line behind": [f"{SHOWN}\r\nx: y"],
    "cut": [SHOWN[:-1]],
    "longer": [f"{SHOWN}0"],
    "another secret": [f"Bearer {HEAD}-{'0' * 64}"],
    "the secret of another": [f"Bearer {HEAD}-{OTHER_TEXT.rpartition('-')[2]}"],
    "an id that is none": [f"Bearer baton-00000000-{TEXT.rpartition('-')[2]}"],
    "capitals": [f"Bearer {TEXT.upper()}"],
    "its digest": [f"Bearer {HEAD}-{KEY.digest}"],
    "not ASCII": [f"Bearer {HEAD}-{'é' * 64}"],
    "a megabyte": [f"Bearer {'a' * (1 << 20)}"],
    "twice": [SHOWN, SHOWN],
    "right, then wrong": [SHOWN, "Bearer x"],
}


def test_a_key_is_256_random_bits_and_kept_as_a_digest() -> None:
    assert len(TEXT.rpartition("-")[2]) == 64
    assert TEXT.rpartition("-")[2] not in to_json(LISTED)
    assert len({make_key("a", [], Allowance())[1] for _ in range(100)}) == 100


def test_a_right_key_tells_its_tenant_and_allowance() -> None:
    ring = KeyRing(LISTED)
    assert ring.admit([SHOWN], Scope.GENERATE) == KEY
    assert ring.admit([f"bearer {OTHER_TEXT}"], Scope.OPERATE).tenant == "beta"


@pytest.mark.parametrize("shown", WRONG)
@pytest.mark.parametrize("scope", Scope)
def test_every_other_is_refused_in_the_same_words(shown: str, scope: Scope) -> None:
    with pytest.raises(Unauthenticated) as refused:
        KeyRing(LISTED).admit(WRONG[shown], scope)
    assert (refused.value.message, refused.value.ids) == ("a valid key is wanted, as `authorization: Bearer KEY`", {})


@pytest.mark.parametrize("shown", ["none", "another secret", "an id that is none", "not ASCII"])
def test_each_refusal_compares_one_digest_of_full_length(shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []

    def compare(given: str, kept: str) -> bool:
        compared.append((given, kept))
        return given == kept

    monkeypatch.setattr("wire.trust.key_ring.hmac.compare_digest", compare)
    with pytest.raises(Unauthenticated):
        KeyRing(LISTED).admit(WRONG[shown], Scope.GENERATE)
    [(given, kept)] = compared
    assert (len(given), len(kept)) == (64, 64)


def test_a_scope_that_the_key_has_not() -> None:
    with pytest.raises(PermissionDenied) as refused:
        KeyRing(LISTED).admit([SHOWN], Scope.METRICS)
    assert refused.value.ids == {"scope": "metrics"}


def test_without_keys_every_caller_is_the_default_tenant_and_no_operator() -> None:
    ring = KeyRing()
    assert ring.admit([], Scope.GENERATE) is ring.admit(["Bearer sk-x"], Scope.METRICS) is ANYONE
    assert ANYONE.tenant == "default"
    with pytest.raises(Unauthenticated):
        ring.admit([], Scope.OPERATE)


def test_a_revoked_key_opens_nothing_and_the_last_one_leaves_the_door_shut() -> None:
    ring = KeyRing(LISTED)
    ring.replace(KeyList(tuple(replace(key, is_revoked=True) for key in LISTED.keys)))
    for shown in ([SHOWN], []):
        with pytest.raises(Unauthenticated):
            ring.admit(shown, Scope.GENERATE)
    ring.replace(NO_KEYS)
    assert ring.admit([], Scope.GENERATE) is ANYONE


def test_a_file_gives_back_what_was_written() -> None:
    assert from_json(KeyList, to_json(LISTED), "keys") == LISTED


@pytest.mark.parametrize(
    "spoilt",
    [
        {"tenant": "a/b"},
        {"tenant": ""},
        {"tenant": "A"},
        {"digest": "é"},
        {"scopes": ["all"]},
        {"allowance": {"requests_per_minute": 0}},
        {"allowance": {"arena_share": 1.5}},
        {"allowance": {"arena_share": 0.0}},
        {"allowance": {"weight": 0.0}},
        {"allowance": {"weight": 1001.0}},
        {"secret": "x"},
    ],
    ids=str,
)
def test_a_file_that_is_wrong(spoilt: dict[str, Any]) -> None:
    raw = {"id": "00000000", "digest": "0" * 64, "tenant": "a"} | spoilt
    with pytest.raises(ConfigError):
        from_json(KeyList, to_json_of(raw), "keys")


def to_json_of(raw: object) -> str:
    return json.dumps({"keys": [raw]})


def test_a_tenants_share_is_the_smallest_of_its_keys() -> None:
    def key(tenant: str, share: float | None) -> Key:
        return make_key(tenant, [], Allowance(arena_share=share))[0]

    listed = KeyList((key("a", 0.5), key("a", 0.25), key("a", None), key("b", None), key("c", 1.0)))
    assert listed.shares == {"a": 0.25, "c": 1.0}


def test_no_id_is_given_twice_among_a_tenants_keys() -> None:
    taken: set[str] = set()
    for _ in range(2000):
        key, _ = make_key("acme", [Scope.GENERATE], Allowance(), taken)
        assert key.id not in taken
        taken.add(key.id)
    assert len({one[:4] for one in taken}) == 1
