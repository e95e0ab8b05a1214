"""Models by their Hugging Face id, or from a folder: whole, or one layer of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from terrazzo.errors import Limitation, UserError
from terrazzo.front.model_configs import ALIASES, CONFIGS
from terrazzo.front.model_files import loading, need_memory, tensors
from terrazzo.ir.torch_types import to_torch_dtype
from terrazzo.ir.types import dtype as named_dtype

BY_HAND = "In Python, load it with transformers and call terrazzo.compile(model, ...)."


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
        _check_whole(model_id, config, random_weights, transformers, torch)
        with loading(model_id):
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
        config = transformers.AutoConfig.for_model(kind, **settings)  # ours, so that what goes wrong is our fault
    elif folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{folder} has no config.json; a model folder has that and *.safetensors")
        with loading(folder):
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    else:
        _require_local(name, transformers)
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    config.auto_map = {}  # names code that comes with the model, about which transformers would ask; it is never run
    config.use_cache = False
    config._attn_implementation = "sdpa"
    return config


def _require_local(name: str, transformers: Any) -> None:
    """UserError unless the hub, or what was fetched from it before, can give us the model's config."""
    try:
        transformers.AutoConfig.from_pretrained(name, local_files_only=not _hub_is_reachable(), trust_remote_code=False)
    except Exception as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise UserError(
            f"{name} cannot be fetched ({reason}). Give a folder with config.json and *.safetensors, "
            f"or use --random-weights with one of the bundled models: {', '.join(ALIASES)}"
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


def _check_whole(model_id: str, config: Any, random_weights: bool, transformers: Any, torch: Any) -> None:
    """UserError for a whole model of damaged files or too large for this machine, Limitation for one that takes neither
    tokens nor an image.
    """
    if _kind(config) == "causal-lm" and type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise Limitation(
            f"{model_id} is of the type {config.model_type}; by name, language models, BERT and ViT are loaded. "
            f"{BY_HAND}"
        )
    if not random_weights:
        tensors(_folder(model_id))
    with loading(model_id), torch.device("meta"):
        need_memory(model_id, _whole(model_id, config, True, transformers))


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
    if not hasattr(config, "vocab_size"):
        raise Limitation(f"a model of the type {config.model_type} takes no tokens. {BY_HAND}")
    longest: int = getattr(config, "max_position_embeddings", 0) or getattr(config, "n_positions", seq_len)
    if seq_len > longest:
        raise UserError(f"--seq-len {seq_len}: the model has positions for {longest} tokens")
    return (torch.randint(0, config.vocab_size, (batch, seq_len)),), {}


def _small(config: Any, transformers: Any, torch: Any, layers: int, device: str) -> Any:
    """The model with few layers, without memory for its weights where `device` is "meta"."""
    import copy

    cut = copy.deepcopy(config)
    cut.num_hidden_layers = layers  # GPT-2 maps this name to its own
    with loading("a model of this config.json"), torch.device(device):
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
    need_memory(f"layer {layer}", layers[layer])
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
    if hasattr(cut, "vocab_size"):
        cut.vocab_size = 128
    model = _small(cut, transformers, torch, 1, "cpu").to(wanted).eval()
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    _, layers = _layers(model, torch)
    handle = layers[0].register_forward_pre_hook(lambda m, a, k: seen.append((a, k)), with_kwargs=True)
    args, kwargs = _inputs(cut, batch, seq_len, torch)
    try:
        with torch.no_grad():
            model(*(a.to(wanted) if a.is_floating_point() else a for a in args), **kwargs)
        given, named = seen[0]
    except Exception as error:  # it wants something else than tokens, or has its layers elsewhere
        raise Limitation(
            f"what a layer of the type {config.model_type} is called with cannot be found by running the model on "
            f"tokens: {type(error).__name__}: {error}. {BY_HAND}"
        ) from error
    handle.remove()
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

    files = tensors(_folder(model_id))
    state = {}
    for key, own in module.state_dict().items():
        full = next((n for n in files if n.endswith(path + key)), None)
        if full is None:
            raise UserError(f"{model_id} has no tensor {path}{key}")
        with safe_open(files[full], "pt") as f:
            state[key] = f.get_tensor(full)
        if state[key].shape != own.shape:
            raise UserError(
                f"{files[full]}: {full} is {list(state[key].shape)}, and config.json asks for {list(own.shape)}"
            )
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
