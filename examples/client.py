"""A client that prints a streamed answer as it comes. proto/inference.proto has all there is to ask for.

baton up
python examples/client.py "Once upon a time"
"""

import argparse

from baton import Client

parser = argparse.ArgumentParser(description="Print a streamed answer.")
parser.add_argument("prompt")
parser.add_argument("--address", default="127.0.0.1:50051")
parser.add_argument("--max-tokens", type=int, default=100)
options = parser.parse_args()

with Client(options.address, timeout_s=60) as client:
    stream = client.stream(options.prompt, temperature=0, max_tokens=options.max_tokens)
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    usage, timeline = stream.completion.usage, stream.completion.timeline
    print(f"\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {timeline.total_ms:.0f} ms")
