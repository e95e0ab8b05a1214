"""The promises of the floor plan that a machine can hold: imports point one way, files stay small, nothing is
executed.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "terrazzo"
FILES = sorted(SOURCE.rglob("*.py"))
MAXIMUM_LINES = 500

# From the ground up. A part may import from the parts below its own line, and from its neighbours on the line as long
# as they do not import it back.
FLOORS = (
    {"ir"},
    {"rewrite", "hw"},
    {"rules", "targets", "interp"},
    {"pipelines", "reproduce"},
    {"tune", "run"},
    {"front", "bench", "view", "check"},
    {"cli"},
)
FLOOR = {part: number for number, parts in enumerate(FLOORS) for part in parts}
# These may be imported from anywhere, so they import nothing but each other.
ANYWHERE = {"collector", "errors", "options", "progress"}

# What would let a file or a cache entry run code.
EXECUTING_CALLS = {"eval", "exec", "__import__"}
EXECUTING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def place(file: Path) -> str:
    return str(file.relative_to(SOURCE.parent))


def part_of(file: Path) -> str:
    """The first name below the package: `ir` for ir/node.py, `pipelines` for pipelines.py, "" for the package's own
    faces.
    """
    name = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "" if name in ("__init__", "__main__", "api") else name


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything the file imports, wherever in the file it does so."""
    package = ("terrazzo", *file.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = (
                ".".join([*package[: len(package) - node.level + 1], node.module or ""]) if node.level else node.module
            )
            yield from ((node.lineno, f"{str(origin).rstrip('.')}.{name.name}") for name in node.names)


def dependencies() -> Iterator[tuple[str, str, str]]:
    """(part, part it imports from, where), for the imports that cross from one part of the package to another."""
    for file in FILES:
        for line, name in imports(file):
            words = name.split(".")
            if words[0] == "terrazzo" and len(words) > 1 and words[1] != part_of(file):
                yield part_of(file), words[1], f"{place(file)}:{line}"


def test_every_part_has_its_floor() -> None:
    assert {part_of(file) for file in FILES} <= FLOOR.keys() | ANYWHERE | {""}


def test_imports_point_one_way() -> None:
    crossing = set(dependencies())
    # The package itself (`terrazzo.compile`) stands on top of everything.
    inside = {(part, used, where) for part, used, where in crossing if part}
    beside = {(part, used) for part, used, _ in inside}
    wrong = [
        f"{where}: {part} imports {used}"
        for part, used, where in sorted(inside)
        if used not in ANYWHERE
        and (
            part in ANYWHERE
            or FLOOR.get(used, len(FLOORS)) > FLOOR[part]
            or (FLOOR.get(used) == FLOOR[part] and (used, part) in beside)
        )
    ]
    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    """Only `cli/` and `options.py`; a setting that is read elsewhere could not be seen in the `Options`."""
    wrong = []
    for file in FILES:
        if part_of(file) in ("cli", "options"):
            continue
        names = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
        wrong += [f"{place(file)}:{line}" for line, name in imports(file) if name in names]
        wrong += [
            f"{place(file)}:{node.lineno}"
            for node in ast.walk(tree(file))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in names
        ]
    assert wrong == []


def test_no_file_is_long() -> None:
    lines = {place(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: count for name, count in lines.items() if count > MAXIMUM_LINES} == {}


def test_no_text_and_no_file_is_executed() -> None:
    wrong = []
    for file in FILES:
        if place(file).endswith("front/code.py"):
            continue  # `-c CODE` is the user's own Python, from his command line: the one thing that is run
        wrong += [
            f"{place(file)}:{line}: {name}" for line, name in imports(file) if name.split(".")[0] in EXECUTING_MODULES
        ]
        for node in ast.walk(tree(file)):
            # `x.eval()` is a method, `eval(x)` is not.
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXECUTING_CALLS:
                wrong.append(f"{place(file)}:{node.lineno}: {node.func.id}")
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                wrong.append(f"{place(file)}:{node.value.lineno}: allow_pickle")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "builtins.exec",
                "builtins.eval",
            ):
                wrong.append(f"{place(file)}:{node.lineno}: {ast.unparse(node.func)}")
    assert wrong == []


def test_what_is_imported_is_there() -> None:
    """Also inside functions, and in scripts that no test runs: those for a machine with a GPU."""
    wrong = []
    for file in sorted([*FILES, *Path(__file__).parent.rglob("*.py")]):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "terrazzo":
                module = importlib.import_module(str(node.module))
                parts = {part.name for part in pkgutil.iter_modules(getattr(module, "__path__", []))}
                wrong += [
                    f"{file.name}:{node.lineno}: {n.name}"
                    for n in node.names
                    if n.name not in parts and not hasattr(module, n.name)
                ]
    assert wrong == []


def test_schedules_are_chosen_without_catching_errors() -> None:
    """Whether a candidate can be derived is asked (`lower.derived`), and not tried: who catches an error may hide
    others. Where a kernel is taken as it is pinned, asking would be no shorter.
    """
    asking = {"pinned.py"}
    wrong = [
        f"{place(file)}:{node.lineno}"
        for file in FILES
        if "loop_to_tile" in file.parts and file.name not in asking
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Try) or (isinstance(node, ast.With) and "suppress" in ast.unparse(node.items[0]))
    ]
    assert wrong == []


BELOW = ("rules/loop", "rules/loop_to_tile", "rules/tile", "rules/tile_to_kernel", "targets", "hw", "interp/kernel")
"""What never hears of PyTorch's ops."""
OPS = re.compile(r"aten|attention|flash|sdpa|softmax|matmul|\bb?mm\b|layer_norm|conv2d|linear|embedding")


def _asked(file: Path) -> Iterator[tuple[int, str]]:
    """The text that a file compares something with, in whatever way; and what names of kernels are compared with."""
    for node in ast.walk(tree(file)):
        inside: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            inside = [node.left, *node.comparators]
            named = [x for x in inside if ast.unparse(x) in ("kernel.name", "s.name", "step.name", "kernel.source")]
            for x in inside if named else ():
                if isinstance(x, ast.Constant):
                    yield node.lineno, f"{ast.unparse(named[0])} against a constant"
        elif isinstance(node, ast.MatchValue):
            inside = [node.value]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("startswith", "endswith", "re.match")):
            inside = [*node.args]
        texts = (y for x in inside for y in ast.walk(x) if isinstance(y, ast.Constant) and isinstance(y.value, str))
        yield from ((y.lineno, y.value) for y in texts if OPS.search(y.value))


def test_nothing_below_tensors_goes_by_names_of_ops_or_kernels() -> None:
    """What a kernel is, is found in its terms: there is no branch for attention, nor for anything else by its name."""
    below = [file for file in FILES if file.relative_to(SOURCE).as_posix().startswith(BELOW)]
    library = {"library.py"}  # what PyTorch's own kernels reach, by what they compute
    assert len(below) > 100
    assert [f"{place(f)}:{line}: {what}" for f in below if f.name not in library for line, what in _asked(f)] == []


def test_the_writer_refuses_nothing() -> None:
    """What cannot be written is no plan: rules and the verifier say so (`rules/tile/loops.py`). `lower.py` names errors
    because it raises those of plans again, and says what is over a machine's budget.
    """
    wrong = [
        f"{place(file)}:{node.lineno}: {ast.unparse(node)}"
        for file in FILES
        if "tile_to_kernel" in file.parts
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Raise)
        or (isinstance(node, ast.Name) and node.id in ("UserError", "Limitation", "need") and file.name != "lower.py")
    ]
    assert [x for x in wrong if "CompilerBug(" not in x and "lower.py" not in x] == []


def test_no_files_import_each_other_in_a_circle() -> None:
    """Not even inside functions; what is imported for annotations only does not count."""
    names = {".".join(("terrazzo", *file.relative_to(SOURCE).with_suffix("").parts)): file for file in FILES}
    names = {name.removesuffix(".__init__"): file for name, file in names.items()}
    below: dict[str, set[str]] = {}
    for name, file in names.items():
        annotations = {
            line for n in ast.walk(tree(file)) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
            for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)
        }  # fmt: skip
        used = {word for line, word in imports(file) if line not in annotations}
        below[name] = {x if x in names else x.rpartition(".")[0] for x in used} & names.keys() - {name}
    while free := [name for name, used in below.items() if not used & below.keys()]:
        for name in free:
            del below[name]
    assert {name: sorted(used & below.keys()) for name, used in below.items()} == {}
