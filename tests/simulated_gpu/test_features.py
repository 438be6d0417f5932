"""What an engine can do beside plain decoding, on a simulated GPU: the tokens of a CPU, and no race on the way."""

from pathlib import Path

import pytest

from engine.engine import Engine, EngineCompletion
from engine.model.decoder import Decoder
from engine.schedule.continuous_batcher import ContinuousBatcher
from tests.harness.checkpoints import choose_prompt, make_checkpoint
from tests.harness.engines import drive, make_core, request
from tests.harness.oracle_proposer import oracle_drafts
from tests.pairs import RUNS_ALL
from tests.simulated_gpu.device import SIM, commands
from wire.sampling import SamplingParams

LENGTHS = (17, 40, 300)
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=2)
BIASED = SamplingParams(temperature=0, max_tokens=8, min_tokens=4, logit_bias=((5, 2.0), (7, -100.0)))
CUT = SamplingParams(temperature=1.3, seed=1, top_k=20, top_p=0.9, min_p=0.02, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama-gqa"))


@pytest.fixture(autouse=True, params=[False, True] if RUNS_ALL else [True], ids=lambda is_lazy: f"lazy={is_lazy}")
def schedule(request: pytest.FixtureRequest, devices: None) -> None:
    commands().set_lazy(request.param)


def generate(
    folder: Path, name: str, sampling: SamplingParams, kv_policy: str = "full", num_blocks: int = 64
) -> list[EngineCompletion]:
    engine = Engine.load(
        str(folder),
        dtype="float32",
        kv_policy=kv_policy,
        device=name,
        num_blocks=num_blocks,
        batcher=ContinuousBatcher(max_step_tokens=64, max_running=8),
    )
    prompts = [choose_prompt(folder, length).prompt_ids for length in LENGTHS]
    return [*engine.generate(prompts, sampling), *engine.generate(prompts, sampling)]  # then with hits


@pytest.mark.parametrize("kv_policy", ["sinks=4+28", "snapkv=25%", "h2o=25%"])
def test_policies_of_kv_keep_the_tokens_of_a_cpu(folder: Path, kv_policy: str) -> None:
    assert generate(folder, "sim", GREEDY, kv_policy) == generate(folder, "cpu", GREEDY, kv_policy)


@pytest.mark.parametrize("sampling", [SCORED, BIASED, CUT], ids=["scored", "biased", "cut"])
def test_samples_are_a_cpus(folder: Path, sampling: SamplingParams) -> None:
    assert generate(folder, "sim", sampling) == generate(folder, "cpu", sampling)


def test_preempted_requests_go_on(folder: Path) -> None:
    assert generate(folder, "sim", GREEDY, num_blocks=23) == generate(folder, "cpu", GREEDY)


def test_guesses_change_no_token(folder: Path) -> None:
    prompts = [choose_prompt(folder, length).prompt_ids for length in LENGTHS]
    expected = [list(choose_prompt(folder, length).token_ids[: GREEDY.max_tokens]) for length in LENGTHS]
    speculator = oracle_drafts({one: [output] for one, output in zip(prompts, expected, strict=True)}, 0.3)
    core = make_core(Decoder.load(folder, "float32", SIM, 16), speculator=speculator)
    runs = drive(core, [request(prompt, GREEDY) for prompt in prompts])
    assert [run.outputs[0] for run in runs] == expected
    assert core.stats().num_guessed_tokens > 0
