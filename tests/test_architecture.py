"""The shape of the package: who may import whom, what must stay light, and one name for one thing.

It is read from the source with `ast`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(__file__).resolve().parents[1] / "hvdtrain"

# A module may import from its own layer and from those above. Names are modules or packages.
LAYERS = (
    "errors",
    "system _torch",
    "job",
    "liveness",
    "transports",
    "optim",
    "hvd",
    "launch",
    "horovod_build",
    "backends",
    "tasks training",
    "compare",
    "doctor",
    "migrate",
    "cli __main__",
)

# Commands that print help, and what they import, must start fast: importing torch takes seconds.
WITHOUT_TORCH = """errors system.files system.signals system.trees system.processes system.commands
    system.provenance job.world job.launcher_watch liveness.failure liveness.peer_sockets
    backends tasks horovod_build horovod_build.install training.config cli
    cli.train job.elastic_world launch.elastic launch.elastic_server
    launch.discovery launch.host_list launch.remote launch.launcher launch.supervisor
    launch.event_loop launch.placement
    cli.launch cli.compare cli.doctor cli.report cli.install_horovod
    cli.evaluate cli.export cli.runs training.run_dir
    job.job_secret compare.proof.parity compare.analysis.table
    compare.report.html_report compare.report.terminal""".split()

PUBLIC = """Backend BackendOptions Callback Checkpoints HvdtrainError Loader Task TrainConfig
    Trainer World detect open_backend run shard_bounds""".split()

CONTRACT = """all_gather_object all_reduce average_gradients barrier broadcast_ broadcast_object
    close describe gradients host_problem launcher_problem open prepare print
    share_errors""".split()
"""The public methods of `Backend`. More would be too many to implement."""

LOOSE = {"__main__", "errors"}
"""The modules that are in no folder."""

SAME_FILE_NAME = {
    "__init__": "every package has one",
    "__main__": "`python -m hvdtrain` and `python -m hvdtrain.hvd`",
}
CYCLES = {
    frozenset({"hvd.ops.allgather", "hvd.ops.allreduce"}): "the gradient of each is the other",
    frozenset({"hvd.ops.handles", "hvd.process_sets", "hvd.basics"}): "Horovod's own modules",
}

SIZE = {
    "_torch": 1_862,
    "backends": 9_901,
    "cli": 9_307,
    "compare": 25_079,
    "doctor": 7_015,
    "horovod_build": 4_951,
    "hvd": 41_976,
    "job": 10_999,
    "launch": 18_739,
    "liveness": 7_999,
    "migrate": 5_416,
    "optim": 6_745,
    "system": 5_138,
    "tasks": 2_660,
    "training": 37_991,
    "transports": 22_289,
    "tests": 233_748,
}
"""The most tokens that each house of the package, and the tests, may have; see `tokens_of`.

A house that shrinks lowers its row. A row rises only in a commit that says why.
"""


@dataclass(frozen=True)
class Module:
    """One file, and what it imports: when it is imported, and in its functions too."""

    name: str
    path: Path
    tree: ast.Module
    at_once: set[str]
    ever: set[str]

    @property
    def classes(self) -> list[ast.ClassDef]:
        """The classes, without those inside functions."""
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]


@cache
def modules() -> dict[str, Module]:
    paths = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if "shim" not in parts:  # another package, `horovod`
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for name, path in paths.items():
        tree = ast.parse(path.read_text())
        imported = [_imports(tree, {*paths}, in_functions) for in_functions in (False, True)]
        found[name] = Module(name, path, tree, *imported)
    return found


def _imports(tree: ast.Module, known: set[str], in_functions: bool) -> set[str]:
    found: set[str] = set()
    left: list[ast.AST] = [tree]
    for node in left:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in whole}
        elif in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            left += ast.iter_child_nodes(node)
    return found


def layer_of(name: str) -> int:
    part = (name.split(".") + [""])[1]
    return next((k for k, layer in enumerate(LAYERS) if part in layer.split()), -1)


def test_every_module_has_a_layer() -> None:
    assert not [name for name in modules() if layer_of(name) < 0 and name != "hvdtrain"]


def test_no_module_is_loose() -> None:
    loose = {
        name.partition(".")[2]
        for name, module in modules().items()
        if name.count(".") == 1 and module.path.stem != "__init__"
    }
    assert loose == LOOSE


def test_imports_point_one_way() -> None:
    wrong = [
        f"{module.name} imports {other}"
        for module in modules().values()
        for other in module.ever
        if other.startswith("hvdtrain.") and layer_of(other) > layer_of(module.name) >= 0
    ]
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions count: they hide a cycle, they do not remove it."""
    graph = {
        module.name: {o for o in module.ever if o in modules()} - {module.name}
        for module in modules().values()
    }
    for known in CYCLES:
        names = {f"hvdtrain.{name}" for name in known}
        for name in names:
            graph[name] = graph.get(name, set()) - names
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_light_modules_import_no_torch() -> None:
    heavy = [
        f"{name} imports {other}"
        for name in WITHOUT_TORCH
        for other in at_import(f"hvdtrain.{name}")
        if other.split(".")[0] == "torch"
    ]
    assert not heavy


def at_import(name: str) -> set[str]:
    """Return what importing a module imports, directly or not; its packages are imported too."""
    found: set[str] = set()
    left = [name]
    while left:
        part = left.pop()
        if part in found:
            continue
        found.add(part)
        if part in modules():
            left += modules()[part].at_once
        if "." in part:
            left.append(part.rpartition(".")[0])
    return found


def test_public_names() -> None:
    assert hvdtrain.__all__ == PUBLIC


def test_the_contract_of_a_backend() -> None:
    (backend,) = (n for n in modules()["hvdtrain.backends.base"].classes if n.name == "Backend")
    functions = [n.name for n in backend.body if isinstance(n, ast.FunctionDef)]
    assert sorted(name for name in functions if name[0] != "_") == CONTRACT


@pytest.mark.parametrize(
    ("what", "inside", "outside"),
    [
        # Backends alone ask which backend it is.
        (r"\bbackend(\.name)? (==|!=) ", "hvdtrain.", "hvdtrain.backends"),
        # Callbacks see the public Trainer alone.
        (r"\btrainer\._", "hvdtrain.training.", "-"),
    ],
    ids=["which backend", "private names of the trainer"],
)
def test_what_a_module_must_not_name(what: str, inside: str, outside: str) -> None:
    found = [m.name for m in modules().values() if re.search(what, m.path.read_text())]
    assert [n for n in found if n.startswith(inside) and not n.startswith(outside)] == []


def test_one_name_for_one_file() -> None:
    files = [m.path.stem for m in modules().values() if m.path.stem not in SAME_FILE_NAME]
    assert twice(files) == []


def test_one_name_for_one_class() -> None:
    """Private ones may repeat: nothing outside their module names them."""
    assert twice([n.name for m in modules().values() for n in m.classes if n.name[0] != "_"]) == []


HOUSES = [path for path in ROOT.iterdir() if any(path.glob("*.py"))]


@pytest.mark.parametrize("house", [*HOUSES, ROOT.parent / "tests"], ids=lambda path: path.name)
def test_no_house_grows(house: Path) -> None:
    size = sum(tokens_of(path.read_text()) for path in house.rglob("*.py"))
    limit = SIZE[house.name]
    assert size <= limit, f"{house.name} has {size:,} tokens: at most {limit:,}"


def tokens_of(text: str) -> int:
    """Count the tokens of a source without comments, docstrings and layout: what a reader must
    hold in mind, and what denser lines do not make fewer.
    """
    layout = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        *(tokenize.ENCODING, tokenize.ENDMARKER),
    }
    docstrings = {
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    return sum(
        token.type not in layout
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def twice(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]
