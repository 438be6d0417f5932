from itertools import islice

from wire.ids import AttemptId, QualifiedId, attempt_id, attempt_numbers, incarnation_of, is_attempt_id, request_of

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
