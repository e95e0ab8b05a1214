"""Each wrong request on the command line has a message of its own, and the exit code of its kind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Terrazzo

RELU = "torch.relu(torch.randn(2, 2))"
KERNEL = """@loop
def f(x: f32[4]):
    with kernel("y", y=f32[4]):
        for a0 in free(4):
            {}
    return (y,)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # what is compiled
        (["compile"], "give one of MODEL, -c CODE and --from IR FILE; got none\n"),
        (["compile", "gpt2", "-c", RELU], "give one of MODEL, -c CODE and --from IR FILE; got MODEL and -c\n"),
        (["compile", "-c", RELU, "--layer", "0"], "--layer is for models, and -c names none\n"),
        (["run", "gpt2", "--random-weights", "--layer", "-1"], "--layer -1: it must be at least 0\n"),
        (["run", "gpt2", "--random-weights", "--seq-len", "0"], "--seq-len 0: it must be at least 1\n"),
        (
            ["compile", "-c", RELU, "--materialize", "rely"],
            "there is no buffer 'rely'; did you mean 'relu'? The known ones are relu.",
        ),
        (["compile", "-c", RELU, "--frozen", "w"], "there is no input 'w'. The known ones are x.\n"),
        # code
        (
            ["compile", "-c", "torch.relu("],
            "the code does not parse: '(' was never closed\n    torch.relu(\n              ^\n",
        ),
        (["compile", "-c", "x = 1"], "the code must end with an expression, which is what gets compiled\n"),
        (
            ["compile", "-c", "torch.rand(two)"],
            "the code fails: NameError: name 'two' is not defined\n    torch.rand(two)\n    ^\n",
        ),
        (["compile", "-c", "1 + 1"], "the results must be tensors; found int"),
        # targets, options
        (
            ["compile", "-c", RELU, "--target", "cpy"],
            "there is no target 'cpy'; did you mean 'cpu'? The known ones are auto, cpu,",
        ),
        (
            ["compile", "-c", RELU, "--threads", "0"],
            "option threads: 0 is not a number of threads; it must be at least 1\n",
        ),
        (
            ["run", "-c", RELU, "--compiler", "/none"],
            "option compiler: '/none' is not a C++ compiler that can build a shared object",
        ),
        # files
        (["compile", "--from", "loop", "none.txt"], "none.txt cannot be read: No such file or directory\n"),
        (["compile", "--from", "kernel", "none.txt"], "none.txt cannot be read: No such file or directory\n"),
        (["opt", "none.txt"], "none.txt cannot be read: No such file or directory\n"),
        (
            ["opt", "none.txt", "-p", "fues"],
            "there is no pass 'fues'; did you mean 'fuse'? The known ones are torch_to_tensor,",
        ),
        (["bench", "cpu", "--json", "x.json"], "--json FILE takes the record of one suite: name it with --suite\n"),
        (["bench", "cpu", "--seconds", "0"], "--seconds 0: it must be a number above 0\n"),
        (["bench", "cpu", "--seconds", "-1"], "--seconds -1: it must be a number above 0\n"),
        (["bench", "cpu", "--seconds", "nan"], "--seconds nan: it must be a number above 0\n"),
        (["bench", "cpu", "--threads", "0"], "option threads: 0 is not a number of threads; it must be at least 1\n"),
        (["run", "-c", RELU, "--compiler", "g++ 'x"], 'option compiler: "g++ \'x" cannot be read as a command: No'),
        (
            ["compile", "-c", RELU, "--target", "sm_90a", "--ir", "cpp"],
            "--ir cpp: C++ is what kernels become for a processor, and the target is sm_90a; write --ir cuda, or",
        ),
    ],
)
def test_user_errors(terrazzo: Terrazzo, words: list[str], message: str) -> None:
    result = terrazzo(*words, code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: " + message)


@pytest.mark.parametrize("code", ["torch.randn(2, 5) @ torch.randn(3, 5)", "torch.ones(2, 3) + torch.ones(2, 5)"])
def test_shapes_that_do_not_match(terrazzo: Terrazzo, code: str) -> None:
    told = terrazzo("compile", "-c", code, code=2).stderr
    assert told.startswith("error: capture failed: RuntimeError: ") and told.count("\n") == 1
    assert "3" in told and "5" in told


@pytest.mark.parametrize(
    "words", [("compile", "--ir", "ptx", "-c", RELU), ("frob",), ("compile", "--frob"), ("cache", "frob")]
)
def test_what_no_command_takes(terrazzo: Terrazzo, words: tuple[str, ...]) -> None:
    told = terrazzo(*words, code=2).stderr
    assert "Usage: terrazzo" in told and ("ptx" in told or "frob" in told)


def test_models(terrazzo: Terrazzo) -> None:
    pytest.importorskip("transformers")
    words = ("compile", "gpt2", "--random-weights", "--layer")
    assert terrazzo(*words, "12", code=2).stderr == "error: --layer 12: the model has layers 0 to 11\n"
    assert terrazzo(*words, "0", "--dtype", "q8", code=2).stderr.startswith(
        "error: unknown dtype 'q8'; known: bool, u8,"
    )
    assert (
        "--seq-len 2000: the model has positions for 1024 tokens"
        in terrazzo(*words, "0", "--seq-len", "2000", code=2).stderr
    )


def test_all_unsupported_operations_are_named_at_once(terrazzo: Terrazzo) -> None:
    code = "x = torch.randn(4, 4)\ny = torch.mode(x, -1, True)[0] + x\nz = torch.fft.fft(y).real\ny + torch.mode(z)[0]"
    for command in ("compile", "run", "explain"):
        result = terrazzo(command, "-c", code, code=3)
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert re.fullmatch(r"not supported: \d operations have no kernel here:", lines[0])
        assert "    aten.mode.default at <code>:2, <code>:4" in lines
        assert "    aten._fft_r2c.default at <code>:3" in lines
        assert lines[-1] == "With --allow-fallback PyTorch runs what is listed."
    assert "check: ok" in terrazzo("run", "-c", code, "--allow-fallback", "--check").stdout


def test_all_operations_that_no_program_can_hold_are_named_at_once(terrazzo: Terrazzo) -> None:
    code = "x = torch.randn(4)\ny = x[x > 0] * 2\nz = x.nonzero() + 1\ny.sum() + z.sum()"
    told = terrazzo("compile", "-c", code, code=3).stderr.splitlines()
    assert told[0] == "not supported: a program cannot hold these operations:"
    assert told[1:3] == [
        "    aten.index.Tensor at <code>:2: its shape depends on the data",
        "    aten.nonzero.default at <code>:3: its shape depends on the data",
    ]
    assert told[3] == 'Under torch.compile(..., backend="terrazzo") PyTorch runs a graph that has them.'


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "torch._linalg_check_errors(torch.zeros((), dtype=torch.int32), 'mine', is_matrix=True)",
            "mine checks data that no op of PyTorch checks by itself",
        ),
        ("x = torch.randn(3)\nx + 1 if torch.equal(x, x) else x", "aten.equal.default gives what depends on the data"),
        ("x = torch.randn(3)\ntorch.where(x > 0)[0]", "aten.nonzero.default at <code>:2: its shape"),
        ("x = torch.randn(3)\nif x.sum() > 0: x = x + 1\nx * 2", "the call branches on its data"),
    ],
)
def test_what_needs_the_data_to_be_traced(terrazzo: Terrazzo, code: str, message: str) -> None:
    assert message in terrazzo("run", "-c", code, code=3).stderr


def test_a_model_that_cannot_be_fetched(terrazzo: Terrazzo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def unknown(*where: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    told = terrazzo("compile", "gpt2", "--layer", "0", code=2).stderr
    assert told.startswith("error: openai-community/gpt2 cannot be fetched") and "or use --random-weights" in told
    assert time.monotonic() - start < 10, "the hub's client must not be left to try again and again"


@pytest.mark.parametrize(
    ("statement", "column", "problem"),
    [
        ("y[a0] = x[a0 + 1]", 21, "the load x[a0 + 1] may leave dimension 0 of f32[4]"),
        ("y[a0] = x[a0 - 1]", 21, "the load x[a0 - 1] may leave dimension 0 of f32[4]"),
        ("y[0] = x[a0]", 13, "the store to y does not cover dimension 0"),
    ],
)
def test_a_program_that_reads_but_is_not_valid(
    terrazzo: Terrazzo, tmp_path: Path, statement: str, column: int, problem: str
) -> None:
    file = tmp_path / "loop.txt"
    file.write_text(KERNEL.format(statement))
    for words in (("opt", str(file)), ("compile", "--from", "loop", str(file)), ("run", "--from", "loop", str(file))):
        assert terrazzo(*words, code=2).stderr.startswith(f"error: {file}, line 5, column {column}: {problem}\n")


def test_files_that_are_something_else(terrazzo: Terrazzo, tmp_path: Path) -> None:
    file = tmp_path / "loop.txt"
    file.write_text(KERNEL.format("y[a0] = exp(x[a0])"))
    assert (
        terrazzo("compile", "--from", "torch", str(file), code=2).stderr
        == f"error: {file}, line 1, column 2: this is loop IR, not torch IR\n    @loop\n     ^\n"
    )
    assert terrazzo("compile", "--from", "loop", str(file), "--ir", "torch", code=2).stderr == (
        "error: --ir torch: the input is loop IR, which is further down\n"
    )
    assert terrazzo("opt", str(file), "-p", "tensor_to_loop", code=2).stderr == (
        "error: pass tensor_to_loop takes tensor IR; here the program is loop IR\n"
    )
    file.write_bytes(b"@loop\n\x7fELF\xff\xfe\x00")
    assert (
        f"{file}, line 2, column 5: this is no text: invalid start byte at byte 10"
        in terrazzo("opt", str(file), code=2).stderr
    )
    assert "cannot be read: Is a directory" in terrazzo("opt", str(tmp_path), code=2).stderr


def test_what_does_not_fit_memory(terrazzo: Terrazzo, tmp_path: Path) -> None:
    file = tmp_path / "loop.txt"
    file.write_text("@loop\ndef f(x: f32[99999999, 99999999]):\n    return (x,)\n")
    assert (
        terrazzo("run", "--from", "loop", str(file), code=2).stderr
        == "error: not enough memory: input x is f32[99999999, 99999999]\n"
    )


def test_an_operator_that_pytorch_does_not_have(terrazzo: Terrazzo, tmp_path: Path) -> None:
    file = tmp_path / "torch.txt"
    file.write_text("@torch\ndef f(x: f32[4]):\n    y: f32[4] = aten.frob.default(x)\n    return (y,)\n")
    words = ("--from", "torch", str(file))
    for command in ("compile", "run", "check"):
        told = terrazzo(command, *words, code=2).stderr
        assert told.startswith(f"error: {file}, line 3, column 17: PyTorch has no operator aten.frob.default\n")
