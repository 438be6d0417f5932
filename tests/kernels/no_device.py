"""A driver of Triton for a target that is not there."""

from triton.backends.compiler import GPUTarget


class NoDevice:
    """Names the target; nothing can be launched on it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0
