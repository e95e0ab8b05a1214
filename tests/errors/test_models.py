"""Folders of models that are damaged, hostile, foreign or too large: the user's error, or a limitation, and no bug."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Terrazzo

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file
load_file = pytest.importorskip("safetensors.torch").load_file

TENSORS = "model.safetensors"
INDEX = TENSORS + ".index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small layers, as transformers writes it."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32, max_position_embeddings=16)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def begins_with(header: bytes) -> Callable[[Path], Any]:
    """A file of tensors that begins with this, and goes on as before."""
    return lambda folder: (folder / TENSORS).write_bytes(header + (folder / TENSORS).read_bytes()[len(header) :])


def cut_to(size: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:size])


def index_of(text: str) -> Callable[[Path], Any]:
    """The tensors in a file of another name, and this for their index; FILE is that name."""

    def write(folder: Path) -> None:
        (folder / TENSORS).rename(folder / "a.safetensors")
        every = dict.fromkeys(load_file(folder / "a.safetensors"), "FILE")
        (folder / INDEX).write_text(text.replace("EVERY", json.dumps(every).replace("FILE", "a.safetensors")))

    return write


def reshaped(folder: Path) -> None:
    tensors = load_file(folder / TENSORS)
    tensors = {n: x[:8].clone() if "q_proj" in n else x for n, x in tensors.items()}
    save_file(tensors, folder / TENSORS, {"format": "pt"})


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (cut_to(0), "model.safetensors is damaged"),
    "less than a header": (cut_to(5), "model.safetensors is damaged"),
    "cut": (cut_to(3000), "model.safetensors is damaged"),
    "a header of 2**62 bytes": (begins_with((2**62).to_bytes(8, "little")), "model.safetensors is damaged"),
    "no JSON": (begins_with((20).to_bytes(8, "little") + b"{" * 20), "model.safetensors is damaged"),
    "no UTF-8": (begins_with((20).to_bytes(8, "little") + b"\xff" * 20), "model.safetensors is damaged"),
    "none": (lambda folder: (folder / TENSORS).unlink(), "has no *.safetensors"),
    "other shapes": (reshaped, "config.json asks for"),
    "an index cut": (index_of('{"weight_map": {'), f"{INDEX} cannot be read: JSONDecodeError"),
    "an index of nothing": (index_of("{}"), f"{INDEX} cannot be read: KeyError: 'weight_map'; fetch the model again"),
    "an index that is a list": (index_of('{"weight_map": []}'), "weight_map is no table of tensors"),
    "an index out of the folder": (
        index_of('{"metadata": {}, "weight_map": {"lm_head.weight": "../sound/model.safetensors"}}'),
        "lm_head.weight lies in '../sound/model.safetensors', which is no file of this folder",
    ),
    "an index of a file that is not there": (
        index_of('{"metadata": {}, "weight_map": {"lm_head.weight": "b.safetensors"}}'),
        "lm_head.weight lies in b.safetensors, and there is no such file",
    ),
    "an index of a tensor that is not there": (
        index_of('{"metadata": {}, "weight_map": {"other": "a.safetensors"}}'),
        "other lies in a.safetensors, which has no such tensor",
    ),
}


@pytest.mark.parametrize("layer", [(), ("--layer", "0")], ids=["whole", "layer"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(name: str, layer: tuple[str, ...], terrazzo: Terrazzo, model: Path) -> None:
    damage, message = DAMAGE[name]
    damage(model)
    told = terrazzo("compile", str(model), "--seq-len", "8", *layer, code=2).stderr
    assert re.search(rf"^error: {model}.*{re.escape(message)}", told, re.MULTILINE), told


@pytest.mark.parametrize("layer", [(), ("--layer", "1")], ids=["whole", "layer"])
def test_a_sound_folder_and_a_sound_index(layer: tuple[str, ...], terrazzo: Terrazzo, model: Path) -> None:
    terrazzo("compile", str(model), "--seq-len", "8", *layer)
    index_of('{"metadata": {}, "weight_map": EVERY}')(model)
    terrazzo("compile", str(model), "--seq-len", "8", *layer)


LARGE = {"hidden_size": 1 << 20, "intermediate_size": 1 << 22}
CODE = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M", "AutoModel": "modeling_x.M"}

CONFIGS: dict[str, tuple[dict[str, Any], int, str]] = {
    "an unknown type": ({"model_type": "flurb"}, 2, "has model type `flurb` but Transformers does not recognize"),
    "no type": ({"model_type": None}, 2, "Should have a `model_type` key in its config.json"),
    "code of its own": ({"model_type": "mine", "auto_map": CODE}, 2, "it comes with code of its own, which is never"),
    "a word for a number": ({"hidden_size": "many"}, 2, "Field 'hidden_size' expected int, got str"),
    "no heads": ({"num_attention_heads": 0}, 2, "ZeroDivisionError: integer modulo by zero"),
    "an unknown function": ({"hidden_act": "flurb"}, 2, "cannot be loaded: KeyError: 'flurb'"),
    "too large": (LARGE, 2, "GB of memory left. Take a smaller model, or one layer of a large one (--layer 0)"),
    "larger than numbers go": ({"hidden_size": 1 << 40, "num_attention_heads": 1 << 20}, 2, "size calculation overflo"),
    "something else": ({"model_type": "wav2vec2"}, 3, "In Python, load it with transformers and call terrazzo.compile"),
    "text and pictures": ({"model_type": "clip"}, 3, "In Python, load it with transformers and call terrazzo.compile"),
}


@pytest.mark.parametrize("layer", [(), ("--layer", "0")], ids=["whole", "layer"])
@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_nothing_can_be_made_of(
    name: str, layer: tuple[str, ...], terrazzo: Terrazzo, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, code, message = CONFIGS[name]
    config = {**json.loads((model / "config.json").read_text()), "architectures": None, **changes}
    (model / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    # On a terminal, transformers would ask whether to run the model's code.
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked the user"))
    told = terrazzo("compile", str(model), "--seq-len", "8", "--random-weights", *layer, code=code).stderr
    assert message in told


def test_code_that_comes_with_a_model_of_a_known_type_is_not_run(terrazzo: Terrazzo, model: Path) -> None:
    (model / "modeling_x.py").write_text("raise SystemExit('run')")
    config = {**json.loads((model / "config.json").read_text()), "auto_map": {"AutoModelForCausalLM": "modeling_x.M"}}
    (model / "config.json").write_text(json.dumps(config))
    terrazzo("compile", str(model), "--seq-len", "8")


def test_tensors_too_large_for_the_memory_are_no_bug(terrazzo: Terrazzo, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr("terrazzo.cli.subject.load", fails)
    told = terrazzo("compile", "-c", "torch.ones(2)", code=2).stderr
    assert told.startswith("error: not enough memory: ") and "can't allocate memory" in told
