"""The shape of the package: who may import whom, what must stay light, and one name for one thing.

All of it is read from the source with `ast`; nothing is imported.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

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
    "cli": 9_140,
    "compare": 24_963,
    "doctor": 7_015,
    "horovod_build": 4_951,
    "hvd": 41_983,
    "job": 10_999,
    "launch": 18_739,
    "liveness": 7_999,
    "migrate": 5_416,
    "optim": 6_745,
    "system": 5_138,
    "tasks": 2_660,
    "training": 37_992,
    "transports": 22_289,
    "tests": 259_823,
}
"""The most tokens that each house of the package, and the tests, may have; see `tokens_of`.

A house that shrinks lowers its row. A row rises only in a commit that says why.
"""


@dataclass
class Module:
    """One file: what it imports when it is imported, and what it imports in functions."""

    name: str
    path: Path
    tree: ast.Module
    at_once: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)


@cache
def modules() -> dict[str, Module]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        if "shim" in parts:  # another package, `horovod`
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name, path, ast.parse(path.read_text()))
    for module in found.values():
        _read_imports(module, module.tree.body, found, False)
    return found


def _read_imports(
    module: Module, body: list[ast.stmt], known: dict[str, Module], later: bool
) -> None:
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            _read_imports(module, node.orelse, known, later)
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in whole]
        (module.later if later else module.at_once).update(names)
        inside = later or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                statements = [item for item in value if isinstance(item, ast.stmt)]
                for handler in value:
                    if isinstance(handler, ast.ExceptHandler):
                        statements += handler.body
                _read_imports(module, statements, known, inside)


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
        for other in module.at_once | module.later
        if other.startswith("hvdtrain.") and layer_of(other) > layer_of(module.name) >= 0
    ]
    assert not wrong


def test_no_module_imports_itself_through_others() -> None:
    """Imports in functions count: they hide a cycle, they do not remove it."""
    graph = {
        module.name: {o for o in module.at_once | module.later if o in modules()} - {module.name}
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
    assert _assigned(modules()["hvdtrain"], "__all__") == PUBLIC


def test_the_contract_of_a_backend() -> None:
    classes = dict(classes_of(modules()["hvdtrain.backends.base"]))
    functions = [n for n in classes["Backend"].body if isinstance(n, ast.FunctionDef)]
    assert sorted(n.name for n in functions if n.name[0] != "_") == CONTRACT


def test_backends_alone_ask_which_backend_it_is() -> None:
    asks = re.compile(r"\bbackend(\.name)? (==|!=) ")
    found = [m.name for m in modules().values() if asks.search(m.path.read_text())]
    assert [name for name in found if not name.startswith("hvdtrain.backends")] == []


def test_callbacks_see_the_public_trainer_alone() -> None:
    private = re.compile(r"\btrainer\._")
    files = [*(ROOT / "training" / "callbacks").glob("*.py"), *(ROOT / "training").glob("*.py")]
    assert [path.name for path in files if private.search(path.read_text())] == []


def test_one_name_for_one_file() -> None:
    files = [m.path.stem for m in modules().values() if m.path.stem not in SAME_FILE_NAME]
    assert twice(files) == []


def test_one_name_for_one_class() -> None:
    """Private ones may repeat: nothing outside their module names them."""
    assert twice([n for m in modules().values() for n, _ in classes_of(m) if n[0] != "_"]) == []


@pytest.mark.parametrize("house", SIZE)
def test_no_house_grows(house: str) -> None:
    folder = ROOT.parent / "tests" if house == "tests" else ROOT / house
    size = sum(tokens_of(path.read_text()) for path in folder.rglob("*.py"))
    assert size <= SIZE[house], f"{house} has {size:,} tokens: at most {SIZE[house]:,}"


def test_every_house_has_a_size() -> None:
    houses = {path.name for path in ROOT.iterdir() if any(path.glob("*.py"))}
    assert houses == SIZE.keys() - {"tests"}


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


def test_tokens_are_code_and_not_its_layout() -> None:
    plain = "def f(a):\n    return a + 1\n"
    spread = 'def f(\n    a\n):\n    """Add one."""\n\n    return a + 1  # one\n'
    assert tokens_of(plain) == tokens_of(spread) == 10


def twice(names: list[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def classes_of(module: Module) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the classes of a module, but not those inside functions."""
    return ((n.name, n) for n in module.tree.body if isinstance(n, ast.ClassDef))


def _assigned(module: Module, name: str) -> object:
    for node in module.tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module.name} has no {name}")
