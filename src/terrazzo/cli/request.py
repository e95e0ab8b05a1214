"""What is to be compiled and how: the arguments that `compile`, `run` and `explain` share."""

from __future__ import annotations

import functools
import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from terrazzo.errors import UserError
from terrazzo.ir.places import Places
from terrazzo.options import Options

_WHAT = "What to compile"
_MODEL = "Models"
_HOW = "How"


@dataclass(frozen=True)
class Request:
    """The arguments, checked against each other. Exactly one of `model`, `code` and `file` is given."""

    model: str | None
    code: str | None
    file: tuple[str, Path] | None
    sizes: dict[str, Any]
    allow_fallback: bool
    options: Options
    places: tuple[Places, ...] = field(default_factory=lambda: (Places(),))
    """Where everything stands in `file`, once that is read, and in the files of schedules."""

    @contextmanager
    def told(self) -> Iterator[None]:
        """Has errors from inside say where in these files they arose."""
        with ExitStack() as stack:
            for places in self.places:
                stack.enter_context(places.told())
            yield


def request(
    model: Annotated[
        str | None, typer.Argument(help="A Hugging Face id, such as openai-community/gpt2.", show_default=False)
    ] = None,
    code: Annotated[
        str | None,
        typer.Option(
            "-c",
            "--code",
            help="Torch code; its last expression is compiled.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            "--from",
            metavar="IR FILE",
            help="A stage's text: torch, tensor, loop, tile or kernel IR.",
            rich_help_panel=_WHAT,
            show_default=False,
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Only this layer of the model.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in a sequence.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Sequences in a batch.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="f32, bf16, f16 or f64.", rich_help_panel=_MODEL, show_default=False)
    ] = None,
    random_weights: Annotated[
        bool,
        typer.Option(
            "--random-weights", help="Random weights of the model's shapes: nothing is fetched.", rich_help_panel=_MODEL
        ),
    ] = False,
    target: Annotated[
        str, typer.Option(envvar="TERRAZZO_TARGET", help="See `terrazzo targets`.", rich_help_panel=_HOW)
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            envvar="TERRAZZO_THREADS", help="Threads a kernel may use.", rich_help_panel=_HOW, show_default=False
        ),
    ] = None,
    compiler: Annotated[
        str | None,
        typer.Option(envvar="TERRAZZO_COMPILER", help="The C++ compiler.", rich_help_panel=_HOW, show_default=False),
    ] = None,
    materialize: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Write this buffer to memory: undo its fusion. Repeatable.", rich_help_panel=_HOW
        ),
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="This input is a constant: what depends on such alone is computed once. Repeatable.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    updated: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="This input gets a new value: the last results are those, in this order. Repeatable.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    schedule: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Schedules that take the place of chosen ones. Repeatable.", rich_help_panel=_HOW
        ),
    ] = None,
    graph: Annotated[
        bool,
        typer.Option(
            "--graph", help="On a GPU, launch kernels as CUDA graphs from the first call on.", rich_help_panel=_HOW
        ),
    ] = False,
    libraries: Annotated[
        str,
        typer.Option(
            help="auto: call an op of PyTorch where its library is faster (on a GPU by the model). never: do not.",
            rich_help_panel=_HOW,
        ),
    ] = "auto",
    spills: Annotated[
        bool, typer.Option("--spills", help="Accept kernels that spill registers.", rich_help_panel=_HOW)
    ] = False,
    fp32: Annotated[
        str,
        typer.Option(
            metavar="WAY", help="Products in float32 on a GPU: auto, exact, split, tf32 or bf16.", rich_help_panel=_HOW
        ),
    ] = "auto",
    tf32: Annotated[
        bool,
        typer.Option(
            "--tf32/--no-tf32",
            help="Convolutions in float32 on a GPU may be in TF32, as PyTorch's switch has it by default.",
            rich_help_panel=_HOW,
        ),
    ] = True,
    fuse: Annotated[
        bool,
        typer.Option("--fuse/--no-fuse", help="Without fusion, every operation is a kernel.", rich_help_panel=_HOW),
    ] = True,
    allow_fallback: Annotated[
        bool,
        typer.Option("--allow-fallback", help="Let PyTorch run the ops that are not supported.", rich_help_panel=_HOW),
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            help="-v: every rule, -vv: with its diff.",
            rich_help_panel=_HOW,
            show_default=False,
        ),
    ] = 0,
    dump: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write every stage, the kernels and the events there.", rich_help_panel=_HOW),
    ] = None,
) -> Request:
    """The request that these arguments make; UserError where they do not go together."""
    given = [name for name, value in (("MODEL", model), ("-c", code), ("--from", source)) if value is not None]
    if len(given) != 1:
        raise UserError(f"give one of MODEL, -c CODE and --from IR FILE; got {' and '.join(given) or 'none'}")
    least = {"layer": (layer, 0), "seq_len": (seq_len, 1), "batch": (batch, 1)}
    for name, (number, smallest) in least.items():
        if number is not None and number < smallest:
            raise UserError(f"--{name.replace('_', '-')} {number}: it must be at least {smallest}")
    sizes: dict[str, Any] = {
        "layer": layer,
        "seq_len": seq_len,
        "batch": batch,
        "dtype": dtype,
        "random_weights": random_weights or None,
    }
    sizes = {name: value for name, value in sizes.items() if value is not None}
    if sizes and model is None:
        raise UserError(f"--{next(iter(sizes)).replace('_', '-')} is for models, and {given[0]} names none")
    target = here() if target == "auto" else target
    chosen = {
        "target": target,
        "threads": threads,
        "libraries": libraries,
        "compiler": compiler,
        "fp32": fp32,
        "tf32": tf32 and target.startswith("sm_"),
        "fuse": fuse,
        "verbose": verbose,
        "dump": dump,
    }
    read = [_read(path) for path in schedule or ()]
    texts = tuple(places.text for places in read)
    options = Options.from_mapping(
        {
            **chosen,
            "materialize": materialize or (),
            "frozen": frozen or (),
            "updated": updated or (),
            "schedules": texts,
            "graph": graph or None,
            "spills": spills,
        }
    )
    return Request(model, code, source, sizes, allow_fallback, options, (Places(), *read))


def _read(path: Path) -> Places:
    """A file of schedules (with or without plans), which must be readable as such."""
    from terrazzo.ir.parse_plan import parse_pinned

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    places = Places()
    parse_pinned(text, str(path), places)
    return places


def here() -> str:
    """The target of this machine: its GPU, where PyTorch sees one, else its processor."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    from terrazzo.run.cuda import architecture, devices

    return architecture() if devices() else "cpu"


def with_request(command: Callable[..., None]) -> Callable[..., None]:
    """`command(request, ...)` as a command line whose arguments are those of `request` and its own."""
    shared = inspect.signature(request, eval_str=True).parameters
    own = dict(list(inspect.signature(command, eval_str=True).parameters.items())[1:])

    @functools.wraps(command)
    def run(**given: Any) -> None:
        asked = request(**{name: given.pop(name) for name in shared})
        with asked.told():
            command(asked, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*shared.values(), *own.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__
    return run


Json = Annotated[bool, typer.Option("--json", help="Print JSON, for a script.")]
