"""A gRPC client that prints a streamed answer as it comes. proto/inference.proto has all there is to ask for.

baton up
python examples/client.py "Once upon a time"
"""

import argparse

import grpc

from wire.pb import inference_pb2 as pb
from wire.pb import inference_pb2_grpc as pb_grpc

parser = argparse.ArgumentParser(description="Print a streamed answer.")
parser.add_argument("prompt")
parser.add_argument("--address", default="127.0.0.1:50051")
parser.add_argument("--max-tokens", type=int, default=100)
options = parser.parse_args()

sampling = pb.SamplingParams(temperature=0, max_tokens=options.max_tokens)
request = pb.GenerateRequest(text=options.prompt, sampling_params=sampling)
with grpc.insecure_channel(options.address) as channel:
    for response in pb_grpc.InferenceStub(channel).Generate(request, timeout=60):
        if response.HasField("chunk"):
            print(response.chunk.text, end="", flush=True)
        else:
            usage, timeline = response.complete.usage, response.complete.timeline
            print(f"\n{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {timeline.total_ms:.0f} ms")
