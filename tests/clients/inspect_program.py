"""The inspect-ai package: an evaluation, an answer in a schema, and a forced tool; prints what it read."""

import asyncio
import json
import os
import sys
import tempfile

os.environ |= {"BATON_API_KEY": "none", "BATON_BASE_URL": sys.argv[1], "INSPECT_DISPLAY": "none"}

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import includes
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import json_schema
from pets import Answer, Look

NAME = "openai-api/baton/smollm2"


async def ask(model: Model) -> dict[str, object]:
    """Asks for a plain answer, a typed one, and a call."""
    plain = await model.generate("hello", config=GenerateConfig(max_tokens=6, seed=1))
    schema = ResponseSchema(name="answer", json_schema=json_schema(Answer), strict=True)
    typed = await model.generate("hello", config=GenerateConfig(max_tokens=200, response_schema=schema))
    parameters = ToolParams(**{name: json_schema(Look).model_dump()[name] for name in ("properties", "required")})
    tool = ToolInfo(name="look", description="Looks at a pet.", parameters=parameters)
    called = await model.generate("hello", tools=[tool], tool_choice="any", config=GenerateConfig(max_tokens=200))
    calls = [(one.function, one.arguments) for one in called.message.tool_calls or []]
    return {"chat": plain.completion, "typed": json.loads(typed.completion), "calls": calls}


with tempfile.TemporaryDirectory() as folder:
    samples = [Sample(input="What is the capital of France?", target="Paris")]
    task = Task(dataset=samples, scorer=includes(), config=GenerateConfig(temperature=0, max_tokens=16))
    [log] = eval(task, model=NAME, log_dir=folder, display="none")
    scored = [one.scores["includes"].value for one in log.samples or []]
answered = asyncio.run(ask(get_model(NAME)))
print(json.dumps({**answered, "status": log.status, "scored": scored}))
