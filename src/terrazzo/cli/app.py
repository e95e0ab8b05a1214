"""The commands together, and what becomes of their errors."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from terrazzo.cli import bench, bisect, cache, check, compile_, doctor, explain, opt, run, sim, targets, tune
from terrazzo.cli.output import complain, say
from terrazzo.errors import CompilerBug, Limitation, TerrazzoError, UserError

EXIT_CODES = {UserError: 2, Limitation: 3, CompilerBug: 70}
"""What a command ends with, by the kind of error. 1 means that a check failed, 130 is Ctrl-C."""


class Commands(TyperGroup):
    """Tells errors on stderr and makes exit codes of them; `--debug` lets the traceback through."""

    def invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
            return done
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:  # whoever reads our output has seen enough, as in `terrazzo ... | head`
            _drop_output()
            raise typer.Exit(0) from None
        except (OSError, MemoryError) as error:
            if ctx.params["debug"]:
                raise
            _drop_output()  # what could not be written must not be tried again when the process ends
            complain(_LABELS[UserError], _machine(error))
            raise typer.Exit(EXIT_CODES[UserError]) from error
        except TerrazzoError as error:
            if ctx.params["debug"]:
                raise
            kind = next(k for k in EXIT_CODES if isinstance(error, k))
            complain(_LABELS[kind], f"{error}{_report() if kind is CompilerBug else ''}")
            raise typer.Exit(EXIT_CODES[kind]) from error
        except Exception as error:
            if _is_out_of_memory(error) and not ctx.params["debug"]:
                complain(_LABELS[UserError], _machine(MemoryError(str(error).splitlines()[0])))
                raise typer.Exit(EXIT_CODES[UserError]) from error
            # Usage errors and exits of the command line itself have an exit code; anything else is our fault.
            if ctx.params["debug"] or hasattr(error, "exit_code") or isinstance(error, typer.Abort):
                raise
            complain(_LABELS[CompilerBug], f"{type(error).__name__}: {error}{_report()}")
            raise typer.Exit(EXIT_CODES[CompilerBug]) from error


_LABELS = {UserError: "error", Limitation: "not supported", CompilerBug: "compiler bug"}


def _machine(error: OSError | MemoryError) -> str:
    """What the machine lacks: memory, disk space, permissions."""
    if isinstance(error, MemoryError):
        return f"not enough memory{f': {error}' if str(error) else ''}"
    return f"{error.filename or 'output'}: {error.strerror or error}"


def _is_out_of_memory(error: Exception) -> bool:
    """Whether PyTorch ran out of memory, on the processor or a GPU: it raises a RuntimeError then."""
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or type(error).__name__ == "OutOfMemoryError"
    )


def _drop_output() -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report() -> str:
    """What a report of a bug needs."""
    return (
        f"\nPlease report this with the output of:\n    terrazzo --debug {shlex.join(sys.argv[1:])}\n"
        f"({_version()}, Python {platform.python_version()}, {platform.machine()})"
    )


def _version() -> str:
    try:
        return f"terrazzo {version('terrazzo')}"
    except PackageNotFoundError:
        return "terrazzo from source"


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def globally(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error. May stand anywhere.")] = False,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """A small glass-box compiler from PyTorch models to kernels."""
    if show_version:
        say(_version())
    elif ctx.invoked_subcommand is None:
        say(ctx.get_help())


app.command("compile")(compile_.compile_)
app.command("run")(run.run)
app.command("check")(check.check)
app.command("bisect")(bisect.bisect)
app.command("explain")(explain.explain)
app.command("opt")(opt.opt)
app.command("sim")(sim.sim)
app.command("tune")(tune.tune)
app.command("targets")(targets.targets)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
