"""Compilation of Triton's kernels before their first launch: the signatures that launches need, and their compilers.

A signature is a kernel as a launch specializes it. A compiler is a child process: it needs no device, and its end frees
what a compiler that fails or hangs holds. Its result lies in Triton's cache, where the launch finds it.
"""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver

from kernels.cpu.library import NoKernels
from kernels.user_cache import OTHER_CACHE

COMPILATION_S = 120.0
"""Bound on the compilation of one kernel, with the start of its process; 2 to 10 s are usual."""
UNWRITABLE = 3
"""The status of a child that cannot write the cache."""
_OF_A_CACHE = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOTDIR)


@dataclass(frozen=True)
class Signature:
    """A kernel and its specialization: types, constants, arguments that are 1 or multiples of 16, and options.

    kernel: module and name. target: kind, architecture and lanes of a warp. data: Triton's own description, JSON.
    """

    kernel: str
    target: tuple[str, int | str, int]
    data: str

    @property
    def name(self) -> str:
        """Names the kernel and its constants, for people."""
        described = json.loads(self.data)
        names = list(described["signature"])
        constants = zip(described["constant_keys"], described["constant_vals"], strict=True)
        given = [f"{names[place]}={value}" for (place, *_), value in constants if names[place].isupper()]
        return f"{self.kernel}({', '.join(given)})"

    @property
    def digest(self) -> str:
        """Digests all that the compiled kernel follows from, Triton's version and the kernel's source included."""
        parts = (triton.__version__, self.load_kernel().cache_key, str(self.target), self.data)
        return sha256("\0".join(parts).encode()).hexdigest()

    def load_kernel(self) -> Any:
        module, _, name = self.kernel.rpartition(".")
        return getattr(import_module(module), name)

    def compile(self) -> Any:
        """Compiles for the target into Triton's cache, and returns Triton's kernel.

        Blocks for seconds; raises whatever the compiler raises.
        """
        described = json.loads(self.data)
        keys = [[tuple(one) for one in described[f"{kind}_keys"]] for kind in ("constant", "attrs")]
        constants = dict(zip(keys[0], map(_constant, described["constant_vals"]), strict=True))
        attributes = dict(zip(keys[1], described["attrs_vals"], strict=True))
        kernel = self.load_kernel()
        kind = GluonASTSource if kernel.is_gluon() else ASTSource
        source = kind(kernel, described["signature"], constants, attributes)
        options = {name: _with_tuples(value) for name, value in described["options"].items()}
        return triton.compile(source, target=GPUTarget(*self.target), options=options)


class Launches:
    """Signatures of launches, in order of their first one."""

    def __init__(self) -> None:
        self.signatures: dict[Signature, None] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes the signatures of kernels that are not compiled yet, in place of their compilation and launch.

        Results of operations are undefined meanwhile. Triton has one such hook: no two threads may use it.
        """
        earlier, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, self._note
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = earlier

    def _note(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        target = driver.active.get_current_target()
        kernel, data = f"{fn.module}.{fn.name}", compile["specialization_data"]
        self.signatures[Signature(kernel, (target.backend, target.arch, target.warp_size), data)] = None
        return True


class Compilations:
    """The kernels that this process has compiled, or loaded, since the watch began: each has delayed a launch."""

    def __init__(self) -> None:
        self.num = 0
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, **_: object) -> None:
        self.num += 1


@dataclass(frozen=True)
class Compilers:
    """Child processes that compile signatures side by side. command: the program of a child.

    deadline_s: bound on each compilation.
    """

    command: Sequence[str] = (sys.executable, "-m", "engine.warm.compiling")
    num_children: int = len(os.sched_getaffinity(0))
    deadline_s: float = COMPILATION_S

    def compile(self, signatures: Sequence[Signature], report: Callable[[int], None] = lambda num_done: None) -> None:
        """Compiles what an earlier call, in any process, has not compiled. report: called with the number done.

        Blocks. Raises NoKernels, naming the kernel, for a compiler that fails or passes its deadline, and for a cache
        folder that cannot be written.
        """
        missing = [one for one in signatures if not _mark(one).exists()]
        report(len(signatures) - len(missing))
        with ThreadPoolExecutor(max(1, self.num_children)) as children:
            tasks = [children.submit(self._compile, one) for one in missing]
            try:
                for num_done, task in enumerate(as_completed(tasks), len(signatures) - len(missing) + 1):
                    task.result()
                    report(num_done)
            finally:
                children.shutdown(wait=False, cancel_futures=True)

    def _compile(self, signature: Signature) -> None:
        order = json.dumps([signature.kernel, signature.target, signature.data])
        left_out = ("TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
        try:
            ended = subprocess.run(
                self.command,
                input=order,
                env=environment,
                capture_output=True,
                text=True,
                timeout=self.deadline_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NoKernels(f"{signature.name} was not compiled within {self.deadline_s:g} s") from error
        reason = (ended.stderr.strip().splitlines() or [f"the compiler ended with {ended.returncode}"])[-1]
        if ended.returncode == UNWRITABLE:
            raise NoKernels(f"the cache of compiled kernels cannot be used ({reason}): {OTHER_CACHE}")
        if ended.returncode:
            raise NoKernels(f"{signature.name} cannot be compiled: {reason}")


def _mark(signature: Signature) -> Path:
    """Returns the path of the file that says that a signature is compiled, beside the compiled kernels."""
    return Path(knobs.cache.dir) / f"compiled-{signature.digest}"


def _constant(value: Any) -> Any:
    if isinstance(value, str) and tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict):
        return tl.constexpr(_with_tuples(value["constexpr"]))
    return _with_tuples(value)


def _with_tuples(value: Any) -> Any:
    """JSON has lists in place of tuples."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def main() -> None:
    """Compiles the signature of standard input, and marks it as compiled."""
    kernel, target, data = json.load(sys.stdin)
    signature = Signature(kernel, tuple(target), data)
    try:
        signature.compile()
        _mark(signature).touch()
    except OSError as error:
        if error.errno not in _OF_A_CACHE:
            raise
        sys.stderr.write(str(error))
        sys.exit(UNWRITABLE)


if __name__ == "__main__":
    main()
