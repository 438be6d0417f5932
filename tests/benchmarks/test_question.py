"""Right answers, and their form when a stop string ends them."""

from pathlib import Path

import pytest

from benchmarks.question import Question, make_questions
from engine.engine import Engine
from tests.harness.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_checkpoint("llama-gqa", Path(tmp_path_factory.mktemp("model"))))


@pytest.fixture(scope="module")
def questions(model: str) -> list[Question]:
    return make_questions(model, number=8, prompt_len=20, max_tokens=60, seed=3)


def test_answers_equal_the_engines(model: str, questions: list[Question]) -> None:
    engine = Engine.load(model)
    for question in questions:
        [completion] = engine.generate([question.prompt], question.sampling)
        [choice] = completion.choices
        assert tuple(choice.token_ids) == question.token_ids
        assert (choice.text, choice.matched_stop) == (question.text, question.stop_string)


def test_there_is_one_of_every_kind(questions: list[Question]) -> None:
    assert {question.sampling.is_greedy for question in questions} == {True, False}
    stopped = [question for question in questions if question.stop_string is not None]
    assert stopped
    assert all(0 < len(question.token_ids) < 60 and question.sampling.stop for question in stopped)
    assert len({question.prompt for question in questions}) == len(questions)


def test_a_request_asks_the_same(questions: list[Question]) -> None:
    request = questions[2].request()
    assert tuple(request.token_ids.ids) == questions[2].prompt
    assert tuple(request.sampling_params.stop) == questions[2].sampling.stop
    assert request.sampling_params.max_tokens == 60
