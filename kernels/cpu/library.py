"""The compiled kernels of this machine: chosen by instruction set, compiled once, loaded by every process.

The library is in the user's cache; its name is the SHA-256 of source, flags and compiler, and it ends with the SHA-256
of its own content. A file of another user, or that others may write, is refused; a damaged file is compiled again.
Libraries beside the source, which `prebuild` makes for machines without a compiler, come first: they are trusted like
the source.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from kernels.user_cache import OTHER_CACHE, locked, own_folder, require_own

SOURCE = Path(__file__).parent
PREBUILT = SOURCE / "prebuilt"
UNITS = (
    "attention.cpp",
    "checksums.cpp",
    "experts.cpp",
    "linear.cpp",
    "packed.cpp",
    "program.cpp",
    "rows.cpp",
    "threads.cpp",
)
COMPILERS = ("g++", "clang++", "c++")
COMMON_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w", "-pthread")
AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512vbmi", "avx2", "fma", "f16c")
AVX2 = ("avx2", "fma", "f16c")
ISA_TO_FEATURES: dict[str, tuple[str, ...]] = {
    "amx": (*AVX512, "amx_tile", "amx_bf16"),
    "reproducible_avx512": AVX512,
    "reproducible_avx2": AVX2,
    "avx512": AVX512,
    "avx2": AVX2,
    "portable": (),
}
"""Instruction sets, best first, with the features that each needs, as /proc/cpuinfo names them."""
REPRODUCIBLE = "reproducible"
"""Kernels of the same bits on each processor with AVX2: in the order of sums of AMX, by the best set that has it."""
IN_BLOCKS = ("amx", "reproducible_avx512", "reproducible_avx2")
"""Instruction sets, best first, with that order of sums."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""The system call, on x86-64, by which a process asks for the tile registers of AMX."""
COMPILE_TIMEOUT_S = 900.0
MAX_REASON_CHARS = 200
SEAL = "SHA-256 at the end"
"""A part of a library's name that changes with the format of its last bytes."""

logger = logging.getLogger(__name__)


class NoKernels(Exception):
    """This machine cannot compile, load or run the kernels; the message says why."""


def best_isa(has_tiles: bool = True) -> str:
    """Returns the best instruction set that this machine has: AMX, or one with an order of sums of its own.

    has_tiles: False where a compiler knows no AMX, or nothing is multiplied.
    """
    isas = (isa for isa in ISA_TO_FEATURES if not isa.startswith(REPRODUCIBLE) and (has_tiles or isa != "amx"))
    return next(filter(can_run, isas))


def reproducible_isa() -> str:
    """Returns the best instruction set of IN_BLOCKS that this machine has. Raises NoKernels if it has none."""
    if isa := next(filter(can_run, IN_BLOCKS), None):
        return isa
    raise NoKernels(f"this machine has no {REPRODUCIBLE} kernels, which need AVX2: it has {best_isa()}")


def numerics(isa: str) -> str:
    """Returns the name of an instruction set's order of sums: sets of one name give one another's bits."""
    return REPRODUCIBLE if isa in IN_BLOCKS else isa


def can_run(isa: str) -> bool:
    """Tells whether this machine has an instruction set, which its system lets this process use."""
    return _features().issuperset(ISA_TO_FEATURES[isa]) and (isa != "amx" or may_use_tiles())


@cache
def may_use_tiles() -> bool:
    """Asks the system for this process's tile registers, once: threads inherit them. Logs a refusal."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*map(ctypes.c_long, (ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA))) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    logger.warning("the system refuses this process the tile registers of AMX (%s)", reason)
    return False


def _features() -> set[str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return set(next((line for line in lines if line.startswith("flags")), "").split())
    return set()


def source_version() -> str:
    """Returns a digest of the kernels' source and flags: results may differ between versions."""
    digest = hashlib.sha256("\0".join(COMMON_FLAGS).encode())
    for path in sorted((*SOURCE.glob("*.h"), *SOURCE.glob("*.cpp"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load_library(isa: str) -> ctypes.CDLL:
    """Loads the kernels of an instruction set, compiling them at first use, which blocks for seconds.

    Raises NoKernels if the machine lacks the instruction set or a compiler, or if the cache is not writable or another
    user's.
    """
    if not can_run(isa):
        raise NoKernels(f"this machine has no {isa}: it has {best_isa()}")
    if (prebuilt := _prebuilt(isa)).exists():
        return _load_prebuilt(prebuilt)
    return load_units(unit_paths(), compiler_flags(isa), source_version())


def load_unit(isa: str, unit: str) -> ctypes.CDLL:
    """Loads the prebuilt kernels, or one of their units, compiled by itself in a second or two. Raises NoKernels."""
    if (prebuilt := _prebuilt(isa)).exists():
        return _load_prebuilt(prebuilt)
    version = hashlib.sha256((SOURCE / unit).read_bytes()).hexdigest()
    return load_units([SOURCE / unit], compiler_flags(isa), version)


def prebuild() -> None:
    """Compiles the kernels of all instruction sets beside their source, readable for all. Raises NoKernels, OSError."""
    PREBUILT.mkdir(exist_ok=True)
    for isa in ISA_TO_FEATURES:
        _compile(_find_compiler(), unit_paths(), compiler_flags(isa), _prebuilt(isa))
        _prebuilt(isa).chmod(0o755)


def _prebuilt(isa: str) -> Path:
    """Returns the path of a prebuilt library, which depends on sources and flags."""
    return PREBUILT / f"{isa}-{source_version()}.so"


def _load_prebuilt(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoKernels(f"the prebuilt kernels cannot be loaded ({error})") from error


def unit_paths() -> list[Path]:
    """Returns the sources that are compiled, each by itself."""
    return [SOURCE / unit for unit in UNITS]


def compiler_flags(isa: str) -> tuple[str, ...]:
    """Returns the flags of an instruction set."""
    return (*COMMON_FLAGS, *map(_flag, ISA_TO_FEATURES[isa]), *(["-DBATON_BLOCKS"] if isa in IN_BLOCKS else []))


def _flag(feature: str) -> str:
    return f"-m{feature.replace('amx_', 'amx-').replace('_', '')}"


def load_units(units: Sequence[Path], flags: Sequence[str], version: str) -> ctypes.CDLL:
    """Loads the library of C++ units; compiles it if the cache lacks this version. Raises NoKernels."""
    try:
        return ctypes.CDLL(str(compiled(units, flags, version)))  # in a folder that only this user may write
    except OSError as error:
        raise NoKernels(f"the compiled kernels cannot be loaded ({error}): {OTHER_CACHE}") from error


def compiled(units: Sequence[Path], flags: Sequence[str], version: str) -> Path:
    """Returns the library of C++ units in the user's cache; compiles it if the cache lacks it. Raises NoKernels."""
    compiler = _find_compiler()
    try:
        folder = own_folder("kernels")
        name = hashlib.sha256("\0".join((SEAL, version, *flags, _version_of(compiler))).encode()).hexdigest()
        path = folder / f"{name}.so"
        if not _is_whole(path):
            with locked(folder, COMPILE_TIMEOUT_S):
                if not _is_whole(path):  # nobody has made it while this process waited
                    if path.exists():
                        logger.warning("%s is damaged, and compiled again", path)
                    _compile(compiler, units, flags, path)
        return path
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise NoKernels(
            f"the compiler or the cache of compiled kernels cannot be used ({error}): {OTHER_CACHE}"
        ) from error


def _find_compiler() -> str:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        raise NoKernels("there is no C++ compiler: install g++")
    return compiler


def _version_of(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30.0, check=False).stdout


def _compile(compiler: str, units: Sequence[Path], flags: Sequence[str], path: Path) -> None:
    """Compiles the units in parallel into a temporary folder, then renames the library: readers see it whole."""
    logger.warning("compiling kernels for this machine, once, about a minute (%s)", path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, ThreadPoolExecutor() as threads:
        objects = [Path(folder) / f"{unit.name}.o" for unit in units]
        commands = [
            [compiler, *flags, "-c", str(unit), "-o", str(made)] for unit, made in zip(units, objects, strict=True)
        ]
        list(threads.map(_run, commands))
        output = Path(folder) / path.name
        _run([compiler, *flags, "-shared", *map(str, objects), "-o", str(output)])
        with output.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
        output.chmod(0o700)
        output.replace(path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise NoKernels(f"{command[0]} did not end within {COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode:
        reason = (done.stderr.decode(errors="replace").strip() or "it does not say why").splitlines()[0]
        raise NoKernels(f"{command[0]} failed: {reason[:MAX_REASON_CHARS]}")


def _is_whole(path: Path) -> bool:
    """Returns whether an intact library is there. Raises OSError for another user's file and for links."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    with open(descriptor, "rb") as file:
        require_own(os.fstat(descriptor), path)
        library = file.read()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(library[:-size]).digest() == library[-size:]
