"""Blocks of Baton's own engine in files: what one process has computed, later ones read.

python examples/engine_store.py FOLDER    # computes the prompt
python examples/engine_store.py FOLDER    # reads its blocks, and prints the same answer
"""

import sys
from functools import partial

from baton import Engine, PrefixStore, SamplingParams, tiers
from demo_model import CHECKPOINT

PROMPT = """Pets: Tom dog, Lucy parrot, Anna cat, Ben horse. Rooms: Ben 19, Anna 48, Clara 77, David 12, Emma 55.
Ages: Ben 30, Anna 41, Lucy 25, Tom 63. Question: which pet has Lucy?"""
SECRET = bytes(32)  # of a store that only this user reads; else secrets.token_bytes(32), kept in a file

in_files = partial(PrefixStore, [tiers.host_memory(64 << 20), tiers.files(sys.argv[1], 1 << 30)], secret=SECRET)
engine = Engine.load(str(CHECKPOINT), store=in_files)
assert engine.store is not None
with engine.store as store:
    [completion] = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=32))
    _, files = store.status()
    print(f"{files.hits} blocks read, {files.written} written: {completion.choices[0].text!r}")
