"""The engine inside a program: no server, no Ray.

python examples/in_process.py [CHECKPOINT_OR_HUB_NAME]
"""

import sys

from baton import Engine, SamplingParams
from demo_model import CHECKPOINT

engine = Engine.load(sys.argv[1] if len(sys.argv) > 1 else str(CHECKPOINT))
prompts = ["The sun rises in the", "Once upon a time"]
completions = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=32))
for prompt, completion in zip(prompts, completions, strict=True):
    print(prompt + completion.choices[0].text)
