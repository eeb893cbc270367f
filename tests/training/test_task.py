"""Finding the user's task, and saying what is wrong where it is not found."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hvdtrain.errors import InputError
from hvdtrain.training.task import load_task

SOURCE = """
from torch import nn
from torch.optim import SGD
from hvdtrain.training.task import Task

class Mine(Task):
    answer = {answer}

    def __init__(self, width: int = 3, names=(), text="x") -> None:
        self.width, self.names, self.text = width, names, text

    def model(self):
        return nn.Linear(self.width, 1)

    def optimizer(self, model):
        return SGD(model.parameters(), lr=0.1)

    def datasets(self):
        return [1, 2], None

    def loss(self, net, batch):
        return net(batch).mean()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder of a user with a task file; what loading it adds to Python goes again."""
    modules, path = dict(sys.modules), list(sys.path)
    (tmp_path / "mine_task.py").write_text(SOURCE.format(answer=1))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - set(modules):
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    sys.path[:] = path


def test_a_file(folder: Path) -> None:
    for named in ("mine_task.py", "./mine_task.py", f"{folder}/mine_task.py"):
        task = load_task(f"{named}:Mine")
        assert type(task).__name__ == "Mine"
        assert task.model().in_features == 3


def test_values_are_literals_or_else_strings(folder: Path) -> None:
    texts = ("a=b, not a literal", "__import__('os')")
    values = {"['a', (1, 2.5)]": ["a", (1, 2.5)], "None": None, "'5'": "5"}
    for text, value in {**dict(zip(texts, texts, strict=True)), **values}.items():
        assert load_task("mine_task.py:Mine", (f"text={text}",)).text == value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("named", "setting", "said"),
    [
        ("mine_task.py:Mine", "width", "is not name=value"),
        ("mine_task.py:Mine", "=5", "is not name=value"),
        ("mine_task.py:Mine", "a b=5", "is not name=value"),
        ("mine_task.py:Mine", "widht=5", "did you mean 'width'.* takes: width, names, text"),
        ("mine_task.py:Yours", "", "no Task subclass named 'Yours'; it has: Mine"),
        ("mine_task.py:nn", "", "no Task subclass named 'nn'"),  # there, but no Task
        ("json:x", "", "json has no Task subclass named 'x'; it has: none"),
        ("mine_task.py:", "", "--task 'mine_task.py:' is not module:Class or file.py"),
        ("other.py:Mine", "", "no task file 'other.py' in /"),
        ("no_such_module:Mine", "", "no module named 'no_such_module'"),
    ],
)
def test_what_names_no_task(folder: Path, named: str, setting: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_task(named, (setting,) * bool(setting))


def test_a_missing_import_in_the_task_keeps_its_traceback(folder: Path) -> None:
    (folder / "needy_task.py").write_text("import not_installed_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        load_task("needy_task.py:Mine")


def test_a_sibling_is_imported(folder: Path) -> None:
    package = folder / "project"
    package.mkdir()
    (package / "sibling_of_task.py").write_text("ANSWER = 42\n")
    source = SOURCE.format(answer="ANSWER")
    (package / "near_task.py").write_text(f"from sibling_of_task import ANSWER\n{source}")
    assert load_task("project/near_task.py:Mine").answer == 42  # type: ignore[attr-defined]


def test_two_files_of_one_name_are_not_mixed_up(folder: Path) -> None:
    for name, answer in (("one", 1), ("two", 2)):
        (folder / name).mkdir()
        (folder / name / "same_task.py").write_text(SOURCE.format(answer=answer))
    assert load_task("one/same_task.py:Mine").answer == 1  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="two/same_task.py.*rename the file"):
        load_task("two/same_task.py:Mine")


def test_a_file_named_like_another_module_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever imports `random` later would get the task. The second was not imported from a file,
    as `__main__` of `python -c`.
    """
    monkeypatch.setitem(sys.modules, "in_memory", ModuleType("in_memory"))
    for name, origin in {"random": "/", "in_memory": "elsewhere"}.items():
        shutil.copy("mine_task.py", f"{name}.py")
        with pytest.raises(InputError, match=f"imports from {origin}.*; rename the file"):
            load_task(f"{name}.py:Mine")
    assert hasattr(sys.modules["random"], "randint")


def test_a_loader_process_can_import_what_a_task_file_defines(folder: Path) -> None:
    """One that was not forked, as under MPI, unpickles the dataset by its module's name."""
    pickled = pickle.dumps(load_task("mine_task.py:Mine"))
    code = (
        f"import sys, pickle; sys.path[:] = {sys.path!r}; print(pickle.loads({pickled!r}).answer)"
    )
    command = [sys.executable, "-c", code]  # what multiprocessing starts has our sys.path, too
    assert subprocess.run(command, capture_output=True, text=True, cwd="/").stdout == "1\n"
