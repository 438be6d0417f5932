"""Questions whose right answers are known: an engine in this process gave them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cli.bench.schedule import PROMPT_IDS
from engine.engine import Engine
from text.incremental import IncrementalText
from wire.pb import inference_pb2 as pb
from wire.sampling import SamplingParams

_BATCH = 32
_STOP_LEN = 2


@dataclass(frozen=True)
class Question:
    """A prompt, how it is to be answered, and the right answer.

    also: the right answers of other models, amid a roll from one to another.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams
    token_ids: tuple[int, ...]
    text: str
    stop_string: str | None = None
    also: tuple["Question", ...] = ()

    def request(self) -> pb.GenerateRequest:
        """As a client sends it."""
        sampling = pb.SamplingParams(
            temperature=self.sampling.temperature,
            max_tokens=self.sampling.max_tokens,
            seed=self.sampling.seed,
            ignore_eos=self.sampling.ignore_eos,
            stop=self.sampling.stop,
        )
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=self.prompt), sampling_params=sampling)


def make_questions(model: str, number: int, prompt_len: int, max_tokens: int, seed: int) -> list[Question]:
    """Greedy, seeded, greedy with a stop string, seeded, and so on; all prompts differ. Runs the model for each."""
    engine = Engine.load(model, dtype="float32", num_blocks=_BATCH * (prompt_len + max_tokens) // 16 + 2 * _BATCH)
    draw = random.Random(seed)
    prompts = [tuple(draw.choices(PROMPT_IDS, k=prompt_len)) for _ in range(number)]
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=seed)
    answers = [
        *_answer(engine, prompts[::2], greedy),
        *_answer(engine, prompts[1::2], replace(greedy, temperature=1.0)),
    ]
    answers.sort(key=lambda question: prompts.index(question.prompt))
    return [with_stop(one, engine) if index % 4 == 2 else one for index, one in enumerate(answers)]


def with_stop(question: Question, engine: Engine) -> Question:
    """The same with a stop string that comes up half-way; unchanged if there is no readable text there."""
    stop = _readable(question.text[len(question.text) // 2 :])
    if stop is None:
        return question
    text = IncrementalText(engine.tokenizer, (stop,))
    piece = text.feed(question.token_ids)
    taken = question.token_ids[: piece.num_tokens]
    return replace(
        question, sampling=replace(question.sampling, stop=(stop,)), token_ids=taken, text=piece.text, stop_string=stop
    )


def _readable(text: str) -> str | None:
    """The first characters in a row that are whole ones of ASCII."""
    for start in range(len(text) - _STOP_LEN + 1):
        part = text[start : start + _STOP_LEN]
        if part.isascii() and part.isprintable():
            return part
    return None


def _answer(engine: Engine, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> Iterator[Question]:
    for start in range(0, len(prompts), _BATCH):
        for completion in engine.generate(prompts[start : start + _BATCH], sampling):
            [choice] = completion.choices
            yield Question(completion.prompt_ids, sampling, tuple(choice.token_ids), choice.text)
