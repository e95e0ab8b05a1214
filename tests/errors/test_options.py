"""Each way to ask for something that does not exist has its own message."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from terrazzo import targets
from terrazzo.errors import UserError
from terrazzo.options import MODES, TARGETS, Options, default_cache_directory


def test_defaults_are_valid_and_frozen() -> None:
    options = Options()
    assert options.target == "auto"
    assert options.fuse
    with pytest.raises(FrozenInstanceError):
        options.target = "interpreter"  # type: ignore[misc]


def test_a_mapping_is_converted_field_by_field() -> None:
    options = Options.from_mapping(
        {
            "target": "interpreter",
            "threads": 2,
            "cache_dir": "/x",
            "dump": Path("d"),
            "materialize": ["a", "b"],
            "fuse": False,
        }
    )
    assert (options.target, options.threads, options.fuse) == ("interpreter", 2, False)
    assert (options.cache_dir, options.dump, options.materialize) == (Path("/x"), Path("d"), ("a", "b"))
    assert Options.from_mapping({"threads": None}).threads is None


@pytest.mark.parametrize("name", [f.name for f in fields(Options)])
def test_every_option_names_itself_when_its_type_is_wrong(name: str) -> None:
    with pytest.raises(UserError, match=f"option {name}: expected .*, got 1.5 of type float"):
        Options.from_mapping({name: 1.5})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"treads": 2},
            r"no option 'treads'; did you mean 'threads'\? "
            r"The known ones are target, graph, libraries, schedules, fp32, tf32, freezing, frozen, updated, tune,",
        ),
        ({"zzz": 2}, r"no option 'zzz'\. The known ones are target"),
        ({"target": "cpy"}, r"no target 'cpy'; did you mean 'cpu'\? The known ones are auto, cpu, interpreter, sm_75"),
        ({"fp32": "spilt"}, r"option fp32: there is no 'spilt'; did you mean 'split'\? The known ones are auto,"),
        ({"threads": True}, "option threads: expected a whole number, got True of type bool"),
        ({"threads": 0}, "option threads: 0 is not a number of threads"),
        ({"fuse": 1}, "option fuse: expected True or False, got 1"),
        ({"materialize": "buffer"}, "option materialize: expected a list of names, got 'buffer'"),
        ({"cache_limit": -1}, "option cache_limit: -1 is negative"),
        ({"verbose": -1}, "option verbose: -1 is negative"),
        ({"libraries": "always"}, "option libraries: it is auto or never, not 'always'"),
        ({"target": None}, "option target: expected a string, got None"),
    ],
)
def test_messages(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Options.from_mapping(mapping)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_of_torch_compile_is_accepted(mode: str) -> None:
    options = Options.from_mode(mode)
    assert options.target == "auto"
    graph = {"reduce-overhead": True, "max-autotune": True, "max-autotune-no-cudagraphs": False}
    assert options.graph is graph.get(mode)  # as PyTorch's own


def test_an_unknown_mode_lists_the_known_ones() -> None:
    with pytest.raises(
        UserError, match=r"no mode 'max_autotune'; did you mean 'max-autotune'\?.* default, reduce-overhead"
    ):
        Options.from_mode("max_autotune")


def test_the_targets_are_those_that_exist() -> None:
    """The options name them themselves, because they may not import the compiler."""
    assert ("auto", *targets.TARGETS) == TARGETS


def test_where_the_cache_lies() -> None:
    home = Path.home() / ".cache" / "terrazzo"
    assert default_cache_directory({}) == home
    assert default_cache_directory({"TERRAZZO_CACHE_DIR": "", "XDG_CACHE_HOME": ""}) == home
    assert default_cache_directory({"XDG_CACHE_HOME": "relative"}) == home
    assert default_cache_directory({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/terrazzo")
    assert default_cache_directory({"TERRAZZO_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}) == Path("/own")
    assert default_cache_directory({"TERRAZZO_CACHE_DIR": "~/own"}) == Path.home() / "own"
