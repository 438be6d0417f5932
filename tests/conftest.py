import os

import torch

# Kernels run interpreted where there is no GPU. Set here because Triton looks once, when any test first imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
