from itertools import islice

import pytest

from wire import ids
from wire.ids import (
    AttemptId,
    QualifiedId,
    agreed_version,
    attempt_id,
    attempt_numbers,
    incarnation_of,
    is_attempt_id,
    request_of,
)

REQUEST = QualifiedId("acme/1")


def of_a_router(num_attempts: int) -> list[AttemptId]:
    return [attempt_id(REQUEST, number) for number in islice(attempt_numbers(), num_attempts)]


def test_two_routers_make_different_attempts_at_one_request_id() -> None:
    one, other = of_a_router(3), of_a_router(3)
    assert len({*one, *other}) == 6
    assert len(set(map(incarnation_of, one))) == len(set(map(incarnation_of, other))) == 1
    assert incarnation_of(one[0]) != incarnation_of(other[0])
    for attempt in (*one, *other):
        assert is_attempt_id(attempt)
        assert request_of(attempt) == REQUEST


@pytest.mark.parametrize(
    ("own", "theirs", "agreed"),
    [
        ((4, 4), (4, 4), 4),
        ((4, 5), (4, 4), 4),
        ((4, 4), (4, 5), 4),
        ((4, 6), (3, 5), 5),
        ((5, 6), (4, 4), None),
        ((4, 4), (5, 6), None),
        ((4, 4), (0, 0), None),
        ((4, 4), (5, 4), None),
    ],
)
def test_two_releases_speak_the_lower_of_their_newest_versions_where_their_ranges_meet(
    own: tuple[int, int], theirs: tuple[int, int], agreed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ids, "OLDEST_PROTOCOL_VERSION", own[0])
    monkeypatch.setattr(ids, "PROTOCOL_VERSION", own[1])
    assert agreed_version(*theirs) == agreed
