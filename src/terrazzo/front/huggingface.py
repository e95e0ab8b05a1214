"""Models by their Hugging Face id, or from a folder: whole, or one layer of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrazzo.errors import UserError
from terrazzo.front.model_configs import ALIASES, CONFIGS
from terrazzo.ir.torch_types import to_torch_dtype
from terrazzo.ir.types import dtype as named_dtype


def load(
    model_id: str,
    *,
    layer: int | None = None,
    seq_len: int = 32,
    batch: int = 1,
    dtype: str = "f32",
    random_weights: bool = False,
    seed: int = 0,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """(module, args, kwargs) for a model, in eval mode: the first tensor of its output, or of one layer's.

    `layer` takes only that decoder or encoder layer, with the hidden states, rotary tables and mask it gets in a
    forward pass of `seq_len` tokens. Without `random_weights` the weights come from the hub's cache or from the folder
    `model_id`; of a layer, only its own tensors are read. Weights and inputs are drawn with `seed`.
    """
    torch, transformers = _libraries()
    torch.manual_seed(seed)
    config = _config(model_id, random_weights, transformers)
    wanted = to_torch_dtype(named_dtype(dtype))
    if layer is None:
        module = _whole(model_id, config, random_weights, transformers)
        args, kwargs = _inputs(config, batch, seq_len, torch)
        module = module.to(wanted).eval()
        args = tuple(a.to(wanted) if a.is_floating_point() else a for a in args)
        return _first(module, torch), args, kwargs
    module, path = _layer(config, layer, transformers, torch)
    if not random_weights:
        _read_layer(model_id, path, module)
    args, kwargs = _layer_inputs(config, batch, seq_len, wanted, transformers, torch)
    return _first(module.to(wanted).eval(), torch), args, kwargs


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as e:
        raise UserError(f"models need {e.name}: pip install 'terrazzo[hf]'") from None
    return torch, transformers


def _config(model_id: str, random_weights: bool, transformers: Any) -> Any:
    name = ALIASES.get(model_id.lower(), model_id)
    folder = Path(name)
    if name in CONFIGS and not folder.is_dir():
        if not random_weights:
            _require_local(name, transformers)
        settings = dict(CONFIGS[name])
        kind = settings.pop("model_type")
        settings.pop("architecture")
        config = transformers.AutoConfig.for_model(kind, **settings)
    elif folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json; a model folder has that and *.safetensors")
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    else:
        _require_local(name, transformers)
        config = transformers.AutoConfig.from_pretrained(name)
    config.use_cache = False
    config._attn_implementation = "sdpa"
    return config


def _require_local(name: str, transformers: Any) -> None:
    """UserError unless the hub, or what was fetched from it before, can give us the model's config."""
    try:
        transformers.AutoConfig.from_pretrained(name, local_files_only=not _hub_is_reachable())
    except Exception as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(
            f"{name} cannot be fetched ({reason}). Give a folder with config.json and *.safetensors, or use --random-weights with one "
            f"of the bundled models: {', '.join(ALIASES)}"
        ) from None


def _hub_is_reachable() -> bool:
    """Whether the hub's name resolves; the hub's own client tries for half a minute before it gives up."""
    import socket
    from urllib.parse import urlsplit
    from urllib.request import getproxies

    from huggingface_hub import constants

    try:
        return bool(getproxies()) or bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443))
    except OSError:
        return False


def _kind(config: Any) -> str:
    return str(next((c["architecture"] for c in CONFIGS.values() if c["model_type"] == config.model_type), "causal-lm"))


def _whole(model_id: str, config: Any, random_weights: bool, transformers: Any) -> Any:
    auto = {"causal-lm": transformers.AutoModelForCausalLM}.get(_kind(config), transformers.AutoModel)
    if random_weights:
        return auto.from_config(config, attn_implementation="sdpa")
    model, found = auto.from_pretrained(
        ALIASES.get(model_id.lower(), model_id), config=config, attn_implementation="sdpa", output_loading_info=True
    )
    # What a pooler gives is not looked at, and checkpoints of classifiers have none.
    missing = sorted(name for name in found["missing_keys"] if "pooler" not in name.split("."))
    if missing:
        named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise UserError(f"{model_id}: the checkpoint has no weights for {named}; complete it, or use --random-weights")
    return model


def _inputs(config: Any, batch: int, seq_len: int, torch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if _kind(config) == "vision":
        return (torch.randn(batch, config.num_channels, config.image_size, config.image_size),), {}
    longest: int = getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", seq_len)
    if seq_len > longest:
        raise UserError(f"--seq-len {seq_len}: the model has positions for {longest} tokens")
    return (torch.randint(0, config.vocab_size, (batch, seq_len)),), {}


def _small(config: Any, transformers: Any, torch: Any, layers: int, device: str) -> Any:
    """The model with few layers, without memory for its weights where `device` is "meta"."""
    import copy

    cut = copy.deepcopy(config)
    cut.num_hidden_layers = layers  # GPT-2 maps this name to its own
    with torch.device(device):
        return transformers.AutoModel.from_config(cut, attn_implementation="sdpa")


def _layers(model: Any, torch: Any) -> tuple[str, Any]:
    """The longest list of modules: the decoder's or encoder's layers; with its path."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    if not found:
        raise UserError(f"{type(model).__name__} has no list of layers; leave out --layer")
    return max(found, key=lambda x: len(x[1]))


def _layer(config: Any, layer: int, transformers: Any, torch: Any) -> tuple[Any, str]:
    """Layer number `layer` with random weights (its projections of norm 0.02, its norms near one), and its path in the
    model.
    """
    count = config.num_hidden_layers
    if not 0 <= layer < count:
        raise UserError(f"--layer {layer}: the model has layers 0 to {count - 1}")
    path, layers = _layers(_small(config, transformers, torch, min(layer + 1, count), "meta"), torch)
    module = layers[layer].to_empty(device="cpu")
    with torch.no_grad():
        for name, p in module.named_parameters():
            norm = p.dim() == 1 and "bias" not in name
            p.copy_(1 + 0.1 * torch.randn_like(p) if norm else 0.02 * torch.randn_like(p))
        for name, b in module.named_buffers():
            if b.is_meta:
                raise UserError(f"layer {layer} has a buffer {name} that random weights cannot stand for")
    return module, f"{path}.{layer}."


def _layer_inputs(config: Any, batch: int, seq_len: int, wanted: Any, transformers: Any, torch: Any) -> Any:
    """What a layer is called with in a forward pass: seen by a hook on a model of one layer and little width."""
    import copy

    _inputs(config, batch, seq_len, torch)  # checks seq_len
    cut = copy.deepcopy(config)
    cut.num_hidden_layers = 1
    if hasattr(cut, "vocab_size"):
        cut.vocab_size = 128
    model = transformers.AutoModel.from_config(cut, attn_implementation="sdpa").to(wanted).eval()
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    _, layers = _layers(model, torch)
    handle = layers[0].register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    args, kwargs = _inputs(cut, batch, seq_len, torch)
    with torch.no_grad():
        model(*(a.to(wanted) if a.is_floating_point() else a for a in args), **kwargs)
    handle.remove()
    given, named = seen[0]
    hidden = torch.randn_like(given[0] if given else named["hidden_states"])
    named = {
        k: v for k, v in named.items() if k != "hidden_states" and v is not None and v is not False and not _is_cache(v)
    }
    return (hidden, *given[1:]), named


def _is_cache(value: Any) -> bool:
    return type(value).__name__.endswith("Cache")


def _read_layer(model_id: str, path: str, module: Any) -> None:
    """Fill the module from the model's safetensors files, reading only the tensors below `path`."""
    from safetensors import safe_open

    folder = _folder(model_id)
    index = folder / "model.safetensors.index.json"
    names: Mapping[str, str]
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
    else:
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(f"{folder} has no *.safetensors")
        names = {}
        for file in files:
            with safe_open(file, "pt") as f:
                names = {**names, **dict.fromkeys(f.keys(), file.name)}
    state = {}
    for key in module.state_dict():
        full = next((n for n in names if n.endswith(path + key)), None)
        if full is None:
            raise UserError(f"{folder} has no tensor {path}{key}")
        with safe_open(folder / names[full], "pt") as f:
            state[key] = f.get_tensor(full)
    module.load_state_dict(state)


def _folder(model_id: str) -> Path:
    if Path(model_id).is_dir():
        return Path(model_id)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(ALIASES.get(model_id.lower(), model_id), allow_patterns=["*.json", "*.safetensors"]))


def _first(module: Any, torch: Any) -> Any:
    """The module, giving only the first tensor of its output."""

    class First(torch.nn.Module):  # type: ignore[misc]
        """Logits, last hidden state, or the layer's hidden states."""

        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = self.model(*args, **kwargs)
            return out if isinstance(out, torch.Tensor) else out[0]

    return First()
