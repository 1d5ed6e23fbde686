"""Tests which folders and libraries a module of the package may import."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fairseq_tutel

PACKAGE = Path(__file__).parents[2] / "fairseq_tutel"

# Files of the package's root folder that every other folder may import.
BASE = ("files", "option")
# Folders of the package in import order: a folder may import only earlier folders.
CORE = (*BASE, "kernels", "parallel", "plans", "moe", "checkpoint", "inference", "vision")
EDGE = ("plugin", "models", "tasks", "tools", "convert", "")
LEVEL = {folder: level for level, folder in enumerate((*CORE, *EDGE))}

# Files of the package's root folder that may import fairseq.
COMMANDS = {"train.py", "run.py"}


def folder_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem if path.stem in BASE else ""


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


# In some Python versions, pathlib does not follow the symbolic link to kernels/.
FILES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")})
IMPORTS = {path: imported_names(path) for path in FILES}


def top_names(path: Path) -> set[str]:
    return {name.split(".")[0] for name in IMPORTS[path]}


def own_folders(path: Path) -> set[str]:
    """Return the folders of this package from which a file imports modules."""
    own = {name for name in IMPORTS[path] if name.split(".")[0] == "fairseq_tutel"}
    own -= {"fairseq_tutel.__version__"}
    return {part if (part := name.split(".")[1]) in LEVEL else "" for name in own}


def against(path: Path) -> set[str]:
    here = folder_of(path)
    return {there for there in own_folders(path) - {here} if LEVEL[there] >= LEVEL[here]}


def test_every_folder_of_the_package_is_in_the_import_order():
    assert {folder_of(path) for path in FILES} == set(LEVEL)


def test_a_folder_imports_only_folders_before_it_in_the_import_order():
    assert {str(path.relative_to(PACKAGE)): against(path) for path in FILES if against(path)} == {}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of this package that a file imports, including imports inside functions."""
    names = {name for name in IMPORTS[path] if name != "fairseq_tutel.__version__"}
    found = {name if name in modules else name.rpartition(".")[0] for name in names}
    around = module_of(path) + "."
    for name in list(found):
        parts = name.split(".")
        packages = {".".join(parts[:n]) for n in range(1, len(parts))}
        found |= {each for each in packages if not around.startswith(each + ".")}
    return found & modules


def test_no_import_cycle_exists():
    """Imports inside functions count, except in kernels/, where backends import each other."""
    paths = {module_of(path): path for path in FILES if folder_of(path) != "kernels"}
    root = paths.pop("fairseq_tutel")  # fairseq_tutel/__init__.py imports lazily from all folders
    assert IMPORTS[root]
    graph = {name: imported_modules(path, set(paths)) for name, path in paths.items()}
    assert graph["fairseq_tutel.parallel.all_to_all"] > {"fairseq_tutel.parallel.collectives"}
    TopologicalSorter(graph).prepare()  # prepare() raises a CycleError if a cycle exists


IMPORT_EACH = """
import importlib, multiprocessing, sys
import fairseq.trainer
for name in sys.argv[1:]:
    process = multiprocessing.get_context("fork").Process(target=importlib.import_module, args=(name,))
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{name} cannot be imported first")
"""


@pytest.mark.long
def test_every_module_can_be_imported_first():
    """Import each module in a fork of a new process that has imported only torch and fairseq."""
    subprocess.run([sys.executable, "-c", IMPORT_EACH, *map(module_of, FILES)], check=True)


def test_the_core_never_imports_fairseq():
    core = {*CORE, ""}
    edge = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}
    found = {path.name for path in FILES if folder_of(path) in core and top_names(path) & edge}
    assert found <= COMMANDS


def test_only_the_folder_kernels_imports_triton():
    assert {folder_of(path) for path in FILES if "triton" in top_names(path)} == {"kernels"}


# Modules that predict times without torch, so that `fairseq-tutel plan` starts fast.
PREDICTION = {"cost.py", "links.py", "machine.py", "strategy.py", "search.py"}


def test_modules_that_predict_times_do_not_import_torch():
    predicting = {path for path in (PACKAGE / "parallel").glob("*.py") if path.name in PREDICTION}
    assert len(predicting) == len(PREDICTION)
    found = {path for path in FILES if folder_of(path) == "plans"} | predicting
    parents = {path.parent.name for path in found if "torch" in top_names(path)}
    assert parents == {"executors"}


def test_only_three_modules_call_collectives_of_torch_distributed():
    call = re.compile(r"dist\.(all_|reduce|broadcast|gather|scatter|barrier|send|recv|i?send|batch_)")
    found = {str(path.relative_to(PACKAGE)) for path in FILES if call.search(path.read_text())}
    assert found == {"parallel/collectives.py", "plans/executors/two_sided.py", "parallel/world.py"}


def test_type_checkers_and_programs_see_the_same_public_names():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = {
        alias.asname: (node.module, alias.name) for node in block.body for alias in node.names
    }  # fmt: skip
    public = {name: (f"fairseq_tutel.{module}", name) for name, module in fairseq_tutel._MODULES.items()}
    assert typed == public
    assert fairseq_tutel.__all__ == [*public]


def test_kernels_are_not_imported_as_a_top_level_package():
    assert [path for path in FILES if "kernels" in top_names(path)] == []


WITHOUT = """
import sys
sys.modules["fairseq"] = sys.modules["triton"] = sys.modules["safetensors"] = None
import torch
import fairseq_tutel as ft
layer = ft.MoELayer(ft.MoEConfig(model_dim=4, hidden_dim=8, num_experts=2))
y, output = layer(torch.ones(3, 4))
(y.sum() + output.balance_loss).backward()
assert "omegaconf" not in sys.modules
assert not {"fairseq_tutel.convert", "fairseq_tutel.tools"} & sys.modules.keys()
try:
    ft.from_checkpoint("model.pt")
except ImportError as error:
    assert str(error).startswith("fairseq is not installed; run `pip install"), error
else:
    raise AssertionError("fairseq is needed")
"""


def test_the_core_works_with_torch_and_numpy_alone():
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# Packages that pip installs together with fairseq.
BROUGHT = {"fairseq_cli", "hydra", "omegaconf"}
# The import names of packages whose import name differs from the package name.
IMPORTED_AS = {"pillow": "PIL"}


def test_every_imported_package_is_a_declared_dependency():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras.keys() - {"test", "dev"})]
    named = {re.match(r"[\w-]+", entry)[0] for entries in lists for entry in entries}
    named |= {IMPORTED_AS[name] for name in named & IMPORTED_AS.keys()}
    imported = set().union(*map(top_names, FILES)) - sys.stdlib_module_names
    assert imported - BROUGHT - {"fairseq", "fairseq_tutel"} <= named
    assert "fairseq-fixed" in named


# Files with classes whose attributes other modules must not set.
CLOSED = ("moe/layer.py", "moe/expert_stack.py", "moe/experts.py", "moe/balance.py",
          "moe/gates.py", "plugin/feed_forward.py")  # fmt: skip


def assigned_attributes(path: Path) -> set[tuple[str, str]]:
    """Return the pair (owner, attribute) for every assignment `owner.attribute = …` in a file."""
    stored = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return {(ast.unparse(n.value), n.attr) for n in stored if isinstance(n.ctx, ast.Store)}


def test_attributes_of_layers_are_set_only_in_their_methods():
    of_layers = {name for file in CLOSED for owner, name in assigned_attributes(PACKAGE / file)
                 if owner == "self"}  # fmt: skip
    found = {
        f"{path.relative_to(PACKAGE)}: {owner}.{name}"
        for path in FILES
        for owner, name in assigned_attributes(path)
        if owner != "self" and name in of_layers
    }
    assert found == set()
