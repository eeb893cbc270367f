"""The part of `shm` in C: that it is compiled here, and when it is not used."""

from __future__ import annotations

import ctypes
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from hatch_build import compile_page
from hvdtrain.doctor import software
from hvdtrain.transports import page


def test_it_is_compiled_here() -> None:
    """On a newcomer's machine, too, which has a C++ compiler."""
    assert page.unavailable() is None
    assert software.transport("shm").text == "available"


@pytest.mark.parametrize("fault", ["changed", "missing", "of another processor"])
def test_why_it_is_not_used(fault: str, tmp_path: Path) -> None:
    source, library = tmp_path / "page.c", tmp_path / "libpage.so"
    for path in (page.SOURCE, page.LIBRARY, Path(page.__file__)):
        shutil.copy(path, tmp_path)
    if fault == "changed":
        source.write_text(source.read_text() + "\n")
    elif fault == "missing":
        library.unlink()
    else:
        library.write_bytes(b"ELF")
    why = str(runpy.run_path(str(tmp_path / "page.py"))["unavailable"]())
    expected = {
        "changed": "page.c has changed since it was compiled",
        "missing": "it was not compiled at installation, which takes a C compiler",
    }
    assert why.split("; ")[0] == expected.get(fault) or "libpage.so: file too short; " in why
    if fault == "changed":
        new = tmp_path / "new"
        new.mkdir()
        for path in (tmp_path / "page.py", source):
            shutil.copy(path, new)
        assert compile_page(new / "page.c", new / "libpage.so")
        assert runpy.run_path(str(new / "page.py"))["unavailable"]() is None


def test_without_a_compiler_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not compile_page(page.SOURCE, tmp_path / "library")
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    assert not compile_page(page.SOURCE, tmp_path / "library")
    assert [path.name for path in tmp_path.iterdir()] == ["cc"]


def test_doctor_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(page.PURE, "1")
    found = software.transport("shm")
    assert (found.status, found.fix) == ("note", f"unset {page.PURE}")
    assert found.text == f"available, with semaphores instead of C: {page.PURE} is set"


def test_python_and_c_agree_on_what_they_share() -> None:
    """A field that only one of them has would shift those behind it."""
    structs: dict[str, type[ctypes.Structure]] = {"group": page._Group, "call": page.Reduction}
    equal = {
        f"offsetof(struct {kind}, {name})": getattr(struct, name).offset
        for kind, struct in structs.items()
        for name, *_ in struct._fields_
    }
    equal |= {name: getattr(page, name) for name in ("MATCHED", "LATE", "LAST")}
    equal["sizeof(struct page)"] = page.PAGE_BYTES
    checks = "".join(f'_Static_assert({c} == {value}, "{c}");\n' for c, value in equal.items())
    program = f'#include <stddef.h>\n#define PAGE_SOURCE ""\n#include "{page.SOURCE}"\n{checks}'
    compiler = ["c++", "-x", "c", "-fsyntax-only", "-"]
    subprocess.run(compiler, input=program, text=True, check=True)
