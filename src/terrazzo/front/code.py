"""`-c CODE`: a few lines of torch, whose last expression is compiled.

Calls that make tensors or modules out of no tensors (`torch.randn(...)`, `torch.nn.Linear(...)`) run now, once: their
results are the inputs and the parameters. Everything that consumes them is what gets compiled. The code is the user's
own, from his command line, and is run as Python; nothing else in Terrazzo is.
"""

from __future__ import annotations

import ast
from typing import Any

from terrazzo.errors import UserError

FILENAME = "<code>"
_CHANGES = ("bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "train", "type")
"""The methods by which a module changes itself, or its parameters."""


def load(code: str) -> tuple[Any, tuple[Any, ...]]:
    """A module whose forward computes the last expression, and its inputs. UserError where the code does not run."""
    import torch

    try:
        tree = ast.parse(code, FILENAME)
    except SyntaxError as e:
        line = (e.text or code).rstrip("\n")
        raise UserError(f"the code does not parse: {e.msg}\n    {line}\n    {' ' * ((e.offset or 1) - 1)}^") from None
    if not tree.body or not isinstance(tree.body[-1], ast.Expr):
        raise UserError("the code must end with an expression, which is what gets compiled")
    making = _Making(code)
    body = [making.statement(s) for s in tree.body]
    kept = [s for s in body if s is not None]
    last = kept[-1]
    assert isinstance(last, ast.Expr)
    kept[-1] = ast.copy_location(ast.Return(last.value), last)
    names = list(making.inputs)
    function = ast.FunctionDef(
        name="forward",
        args=ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, []),
        body=kept,
        decorator_list=[],
    )
    making.run(
        ast.fix_missing_locations(ast.Module([ast.copy_location(function, tree.body[0])], [])), "exec", tree.body[-1]
    )

    class Code(torch.nn.Module):  # type: ignore[misc]
        """The code as a module, so that what it constructs has parameters."""

    module = Code()
    for name, made in making.modules.items():
        setattr(module, name, made)
    module.forward = making.scope["forward"]
    return module, tuple(making.inputs.values())


class _Making(ast.NodeTransformer):
    """Runs the calls that make inputs and modules, and puts names in their place."""

    def __init__(self, code: str) -> None:
        import math

        import torch

        self.code = code
        self.scope: dict[str, Any] = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math}
        self.inputs: dict[str, Any] = {}
        self.modules: dict[str, Any] = {}
        self.live: set[str] = set()  # names of what depends on tensors
        self.hint = ""

    def statement(self, s: ast.stmt) -> ast.stmt | None:
        """The statement for the compiled function; None where it is done already."""
        if isinstance(s, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            self.run(ast.Module([s], []), "exec", s)
            return None
        target = s.targets[0] if isinstance(s, ast.Assign) and len(s.targets) == 1 else None
        self.hint = target.id if isinstance(target, ast.Name) else ""
        new: ast.stmt = self.visit(s)
        if isinstance(new, ast.Assign) and not self._depends(new.value):
            self.run(ast.fix_missing_locations(ast.Module([new], [])), "exec", s)  # plain numbers and the like
            return None
        if (
            isinstance(new, ast.Assign)
            and isinstance(new.value, ast.Name)
            and isinstance(target, ast.Name)
            and new.value.id == target.id
        ):
            return None  # the input has the name of the variable
        self.live |= {n.id for n in ast.walk(new) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return new

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Children first; then the call itself, where nothing in it depends on tensors."""
        import torch

        hint, self.hint = self.hint, ""
        new = self.generic_visit(node)
        if isinstance(new, ast.Call) and (changed := self._changed_module(new)) is not None:
            return changed
        if self._depends(new) and not self._makes_a_module_of_modules(new):
            return new
        made = self.run(ast.fix_missing_locations(ast.Expression(new)), "eval", node)  # type: ignore[arg-type]
        if isinstance(made, torch.Tensor):
            return self._named(node, hint or "x", made, self.inputs)
        if isinstance(made, torch.nn.Module):
            given = {m for known in self.modules.values() for m in known.modules()}  # these are as the code left them
            for m in set(made.modules()) - given:
                m.training = False
            self.scope.setdefault(name := self._free(hint or type(made).__name__.lower(), self.modules), made)
            self.modules[name] = made
            self.live.add(name)
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        return new

    def _changed_module(self, call: ast.Call) -> ast.expr | None:
        """The module, where a call such as `.bfloat16()` or `.to(...)` changes it in place: that happens now, once."""
        import torch

        match call.func:
            case ast.Attribute(value=where, attr=attr) if attr in _CHANGES and self._names_a_module(where):
                if any(self._depends(x) for x in (*call.args, *call.keywords)):
                    return None
                module = self.run(ast.fix_missing_locations(ast.Expression(where)), "eval", call)
                if isinstance(module, torch.nn.Module):
                    self.run(ast.fix_missing_locations(ast.Expression(call)), "eval", call)
                    return where
        return None

    def _makes_a_module_of_modules(self, call: ast.AST) -> bool:
        """Whether this is a call such as `nn.Sequential(linear, relu)`, of modules that were made."""
        import torch

        if not isinstance(call, ast.Call) or self._depends(call.func):
            return False
        if any(isinstance(n, ast.Name) and n.id in self.live - set(self.modules) for n in ast.walk(call)):
            return False
        kind = self.run(ast.fix_missing_locations(ast.Expression(call.func)), "eval", call)
        return isinstance(kind, type) and issubclass(kind, torch.nn.Module)

    def _names_a_module(self, where: ast.AST) -> bool:
        """Whether this is a module that was made, or what it has or holds (`model.layers[0]`)."""
        match where:
            case ast.Name(id=name):
                return name in self.modules
            case ast.Attribute(value=inner) | ast.Subscript(value=inner, slice=ast.Constant()):
                return self._names_a_module(inner)
        return False

    def _named(self, node: ast.AST, hint: str, made: Any, into: dict[str, Any]) -> ast.AST:
        name = self._free(hint, into)
        into[name] = made
        self.live.add(name)
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def _free(self, hint: str, into: dict[str, Any]) -> str:
        name, k = hint, 0
        while name in into or name in self.scope or name in self.live:
            k += 1
            name = f"{hint}_{k}"
        return name

    def _depends(self, node: ast.AST) -> bool:
        return any(isinstance(n, ast.Name) and n.id in self.live for n in ast.walk(node))

    def run(self, tree: ast.AST, mode: str, where: ast.AST) -> Any:
        """Run a piece of the user's code; its errors are the user's."""
        try:
            compiled = compile(tree, FILENAME, mode)  # type: ignore[call-overload]
            return eval(compiled, self.scope)
        except Exception as e:
            line = self.code.splitlines()[getattr(where, "lineno", 1) - 1]
            column = getattr(where, "col_offset", 0)
            message = f"the code fails: {type(e).__name__}: {e}"
            raise UserError(f"{message}\n    {line}\n    {' ' * column}^") from None
