"""Language models: encoders, decoders and both, of two layers at their real widths."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from terrazzo.bench.programs.huggingface import TINY, TINY_DECODER, language, other, tokens
from terrazzo.bench.programs.registry import Made, normal, program, whole

TWO: dict[str, Any] = {"num_hidden_layers": 2}
DECODER: dict[str, Any] = {**TWO, "use_cache": False}
BASE: dict[str, Any] = {**TWO, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}


def unmasked(count: int, length: int) -> dict[str, Tensor]:
    """Tokens, and a mask that hides none of them, of a shape that goes with a score of every landmark: traced,
    transformers makes one of `length` squared of none.
    """
    return {"input_ids": tokens(count, length), "attention_mask": torch.zeros(count, 1, 1, length)}


# Encoders.
language("bert", "BertModel", (16, 512), TINY, training=True, **TWO)
language("distilbert", "DistilBertModel", (16, 384), {"dim": 64, "n_heads": 4, "hidden_dim": 128}, n_layers=2)
language("roberta", "RobertaModel", (16, 512), TINY, max_position_embeddings=514, **TWO)
language("albert", "AlbertModel", (8, 512), {**TINY, "embedding_size": 32}, **BASE)
language("electra", "ElectraModel", (32, 128), {**TINY, "embedding_size": 32}, training=True, **TWO)
language(
    "deberta", "DebertaV2Model", (4, 512), {**TINY, "position_buckets": 16}, **BASE, relative_attention=True,
    position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"],
)  # fmt: skip
language("mpnet", "MPNetModel", (16, 384), TINY, **TWO)
language("fnet", "FNetModel", (8, 512), TINY, dtypes=("f32",), **TWO)  # PyTorch has no fft in bfloat16
language("convbert", "ConvBertModel", (8, 512), {**TINY, "embedding_size": 64}, **TWO)
other(
    "nystromformer", "language", "NystromformerModel", unmasked, (2, 512), (2, 32),
    {**TINY, "num_landmarks": 8, "segment_means_seq_len": 32}, num_hidden_layers=1, segment_means_seq_len=512,
    max_position_embeddings=512, attention="eager", dtypes=("f32",),
)  # fmt: skip
language("xlnet", "XLNetModel", (4, 512), {"d_model": 64, "n_head": 4, "d_inner": 128}, n_layer=2)
language(
    "funnel", "FunnelModel", (4, 512), {"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128},
    block_sizes=[1, 1, 1], num_decoder_layers=1,
)  # fmt: skip
language("bigbird", "BigBirdModel", (4, 1024), {**TINY, "block_size": 4}, attention_type="original_full", **TWO)
language("camembert", "CamembertModel", (16, 256), TINY, **TWO)
language("modernbert", "ModernBertModel", (8, 1024), TINY, reference_compile=False, **TWO)
language("roformer", "RoFormerModel", (8, 1024), {**TINY, "embedding_size": 64}, training=True, **BASE)
language("ibert", "IBertModel", (8, 256), TINY, quant_mode=False, **TWO)
language("squeezebert", "SqueezeBertModel", (16, 384), {**TINY, "embedding_size": 64}, **TWO)
language("mobilebert", "MobileBertModel", (16, 256), {"vocab_size": 200}, **TWO)
language("yoso", "YosoModel", (4, 1024), TINY, use_expectation=True, **TWO)
language("esm", "EsmModel", (8, 512), {**TINY, "vocab_size": 120}, vocab_size=120, mask_token_id=110, pad_token_id=0,
         position_embedding_type="rotary", hidden_size=640, num_attention_heads=20, intermediate_size=2560,
         **TWO)  # fmt: skip

# Decoders.
language("gpt2", "GPT2LMHeadModel", (8, 1024), {"n_embd": 64, "n_head": 4}, training=True, n_layer=2, use_cache=False)
language("gpt_neo", "GPTNeoModel", (4, 1024), {"hidden_size": 64, "num_heads": 4}, num_layers=2, use_cache=False,
         attention_types=[[["global", "local"], 1]])  # fmt: skip
language("gptneox", "GPTNeoXModel", (2, 1024), TINY, training=True, hidden_size=2048, num_attention_heads=16,
         intermediate_size=8192, **DECODER)  # fmt: skip
language("gptj", "GPTJModel", (1, 1024), {"n_embd": 64, "n_head": 4, "rotary_dim": 8}, n_layer=2, use_cache=False)
language("opt", "OPTModel", (4, 1024), {"hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 128,
         "word_embed_proj_dim": 64}, training=True, **DECODER)  # fmt: skip
language("bloom", "BloomModel", (4, 1024), {"hidden_size": 64, "n_head": 4}, n_layer=2, hidden_size=1024, n_head=16,
         use_cache=False)  # fmt: skip
language("falcon", "FalconModel", (1, 1024), TINY, **DECODER)
language("mpt", "MptModel", (2, 1024), {"d_model": 64, "n_heads": 4}, n_layers=2, d_model=2048, n_heads=16,
         use_cache=False)  # fmt: skip
language("codegen", "CodeGenModel", (2, 1024), {"n_embd": 64, "n_head": 4, "rotary_dim": 8}, n_layer=2, n_embd=1024,
         n_head=16, use_cache=False)  # fmt: skip
language("llama", "LlamaForCausalLM", (1, 2048), TINY_DECODER, training=True, hidden_size=4096,
         num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, **DECODER)  # fmt: skip
language("qwen2", "Qwen2Model", (2, 1000), TINY_DECODER, hidden_size=3584, num_attention_heads=28,
         num_key_value_heads=4, intermediate_size=18944, **DECODER)  # fmt: skip
language("qwen3", "Qwen3Model", (2, 1024), {**TINY_DECODER, "head_dim": 16}, hidden_size=2048, num_attention_heads=16,
         num_key_value_heads=8, intermediate_size=6144, training=True, **DECODER)  # fmt: skip
language("gemma", "GemmaModel", (2, 1024), {**TINY_DECODER, "head_dim": 16}, hidden_size=2048, num_attention_heads=8,
         num_key_value_heads=1, intermediate_size=16384, **DECODER)  # fmt: skip
language("gemma2", "Gemma2Model", (1, 2048), {**TINY_DECODER, "head_dim": 16}, attention="eager", hidden_size=2304,
         num_attention_heads=8, num_key_value_heads=4, intermediate_size=9216, **DECODER)  # fmt: skip
language("gemma3", "Gemma3TextModel", (1, 2048), {**TINY_DECODER, "head_dim": 16, "sliding_window": 8},
         hidden_size=2304, num_attention_heads=8, num_key_value_heads=4, intermediate_size=9216, sliding_window=512,
         layer_types=["sliding_attention", "full_attention"], **DECODER)  # fmt: skip
language("mistral", "MistralModel", (1, 2048), {**TINY_DECODER, "sliding_window": 8}, sliding_window=512,
         training=True, **DECODER)  # fmt: skip
language("phi", "PhiModel", (2, 1024), TINY_DECODER, **DECODER)
language("phi3", "Phi3Model", (2, 1024), {**TINY_DECODER, "pad_token_id": 0}, training=True, **DECODER)
language("stablelm", "StableLmModel", (1, 1024), TINY_DECODER, **DECODER)
language("cohere", "CohereModel", (1, 1024), TINY_DECODER, hidden_size=4096, num_attention_heads=32,
         intermediate_size=11008, **DECODER)  # fmt: skip
language("olmo", "OlmoModel", (1, 1024), TINY_DECODER, **DECODER)
language("olmo2", "Olmo2Model", (1, 1024), TINY_DECODER, hidden_size=2048, num_attention_heads=16,
         intermediate_size=8192, **DECODER)  # fmt: skip
language("starcoder2", "Starcoder2Model", (1, 1024), TINY_DECODER, **DECODER)
language("glm", "GlmModel", (1, 1024), {**TINY_DECODER, "head_dim": 16, "pad_token_id": 0}, **DECODER)
language("granite", "GraniteModel", (1, 1024), TINY_DECODER, hidden_size=2048, num_attention_heads=32,
         num_key_value_heads=8, intermediate_size=8192, **DECODER)  # fmt: skip
language("nemotron", "NemotronModel", (1, 1024), {**TINY_DECODER, "head_dim": 16}, hidden_size=3072,
         num_attention_heads=24, num_key_value_heads=8, head_dim=128, intermediate_size=9216, **DECODER)  # fmt: skip
language("mixtral", "MixtralModel", (1, 512), TINY_DECODER, dtypes=("bf16",), num_hidden_layers=1, hidden_size=1024,
         intermediate_size=3584, num_attention_heads=16, num_key_value_heads=8, use_cache=False)  # fmt: skip
language("rwkv", "RwkvModel", (2, 64), {"hidden_size": 64, "attention_hidden_size": 64}, num_hidden_layers=2,
         hidden_size=768, use_cache=False)  # fmt: skip
language("mamba", "MambaModel", (2, 64), {"hidden_size": 32, "state_size": 4}, num_hidden_layers=1,
         use_cache=False)  # fmt: skip
language("mamba2", "Mamba2Model", (2, 256), {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 16,
         "chunk_size": 16, "n_groups": 2}, num_hidden_layers=1, hidden_size=1024, num_heads=32, n_groups=1,
         use_cache=False)  # fmt: skip
language("deepseek_v3_dense", "DeepseekV3Model", (1, 1024), {**TINY_DECODER, "num_key_value_heads": 4,
         "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
         num_hidden_layers=1, hidden_size=2048, num_attention_heads=16, num_key_value_heads=16,
         intermediate_size=8192, q_lora_rank=768, use_cache=False)  # fmt: skip

# Encoders with decoders.
language("t5", "T5Model", (8, 512), {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128}, decoder=128,
         training=True, num_layers=2, num_decoder_layers=2, use_cache=False)  # fmt: skip
SEQUENCES: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2, "use_cache": False}
SHORT: dict[str, Any] = {"d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4}  # fmt: skip
language("bart", "BartModel", (4, 512), SHORT, decoder=128, training=True, **SEQUENCES)
language("pegasus", "PegasusModel", (4, 1024), SHORT, decoder=128, **SEQUENCES)
language("marian", "MarianModel", (8, 256), {**SHORT, "pad_token_id": 0}, decoder=256, **SEQUENCES)
language("mbart", "MBartModel", (4, 512), SHORT, decoder=128, **SEQUENCES)
language("blenderbot", "BlenderbotModel", (4, 128), SHORT, decoder=128, encoder_layers=2, decoder_layers=2,
         use_cache=False)  # fmt: skip


class LatentAttention(nn.Module):
    """Attention whose keys and values are kept in a narrow space (DeepSeek's), without positions."""

    def __init__(self, width: int, heads: int, latent: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, heads * size, bias=False)
        self.down, self.norm = nn.Linear(width, latent, bias=False), nn.RMSNorm(latent)
        self.up = nn.Linear(latent, 2 * heads * size, bias=False)
        self.out = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.up(self.norm(self.down(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        return self.out(f.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@program(small={"count": 2, "length": 32, "width": 64, "heads": 4, "latent": 16, "size": 16}, training=True)
def latent_attention(
    count: int = 4, length: int = 2048, width: int = 2048, heads: int = 16, latent: int = 512, size: int = 128
) -> Made:
    """A layer of latent attention."""
    return LatentAttention(width, heads, latent, size), normal(count, length, width)


class Experts(nn.Module):
    """A mixture of experts in which each sees all tokens, weighted by the `k` largest of a softmax."""

    def __init__(self, width: int, inner: int, experts: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, inner, width) / math.sqrt(inner))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        least = weights.topk(self.k, -1).values[..., -1:]
        weights = torch.where(weights >= least, weights, 0)
        inner = f.silu(torch.einsum("td,edh->eth", x, self.up))
        return torch.einsum("eth,ehd,te->td", inner, self.down, weights)


@program(small={"tokens": 32, "width": 32, "inner": 48, "experts": 4}, training=True)
def experts(tokens: int = 2048, width: int = 1024, inner: int = 2048, experts: int = 8) -> Made:
    """A dense mixture of experts."""
    return Experts(width, inner, experts, 2), normal(tokens, width)


class RetentionLayer(nn.Module):
    """Attention with a decay in place of a softmax (RetNet's), in its parallel form."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.gate, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.GroupNorm(heads, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        distance = place[:, None] - place
        rate = torch.log1p(-(2.0 ** (-5 - torch.arange(self.heads, device=x.device, dtype=torch.float32))))
        decay = torch.where(distance >= 0, torch.exp(distance * rate[:, None, None]), 0.0).to(x.dtype)
        mixed = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) * decay @ v).transpose(1, 2).flatten(2)
        return self.out(f.silu(self.gate(x)) * self.norm(mixed.flatten(0, 1)).view_as(mixed))


@program(small={"count": 2, "length": 24, "width": 32, "heads": 4}, training=True)
def retention(count: int = 8, length: int = 1024, width: int = 1024, heads: int = 8) -> Made:
    """A layer with retention."""
    return RetentionLayer(width, heads), normal(count, length, width)


class LinearAttention(nn.Module):
    """Causal linear attention in chunks: a product within a chunk, a running state between them."""

    def __init__(self, width: int, heads: int, chunk: int) -> None:
        super().__init__()
        self.heads, self.chunk = heads, chunk
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unflatten(1, (-1, self.chunk))
        q, k, v = parts.permute(3, 0, 4, 1, 2, 5)  # by sequence, head, chunk
        q, k = f.elu(q) + 1, f.elu(k) + 1
        state = k.transpose(-1, -2) @ v
        before = state.cumsum(2) - state
        scores = (q @ k.transpose(-1, -2)).tril()
        mixed = (scores @ v + q @ before) / self.chunk
        return self.out(mixed.permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2))


@program(small={"count": 2, "length": 32, "width": 32, "heads": 4, "chunk": 8}, training=True)
def linear_attention(count: int = 4, length: int = 4096, width: int = 1024, heads: int = 16, chunk: int = 128) -> Made:
    """A layer of causal linear attention."""
    return LinearAttention(width, heads, chunk), normal(count, length, width)


class Windows(nn.Module):
    """Attention to the tokens of one's own window and of those beside it (Longformer's)."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q = q.unflatten(2, (-1, self.window))
        k, v = (f.pad(t, (0, 0, self.window, self.window)).unfold(2, 3 * self.window, self.window) for t in (k, v))
        place = torch.arange(x.shape[1], device=x.device)
        padded = f.pad(place, (self.window, self.window), value=-(1 << 30)).unfold(0, 3 * self.window, self.window)
        near = (place.view(-1, self.window, 1) - padded[:, None]).abs() <= self.window
        scores = q @ k / math.sqrt(q.shape[-1])
        weights = torch.softmax(torch.where(near, scores, float("-inf")), -1)
        return self.out((weights @ v.transpose(-1, -2)).flatten(2, 3).transpose(1, 2).flatten(2))


@program(small={"count": 2, "length": 32, "width": 32, "heads": 4, "window": 8}, training=True)
def sliding_windows(count: int = 4, length: int = 4096, width: int = 768, heads: int = 12, window: int = 256) -> Made:
    """A layer of Longformer's attention."""
    return Windows(width, heads, window), normal(count, length, width)


class WordBag(nn.Module):
    """Means of embeddings, and a classifier over them (fastText's)."""

    def __init__(self, words: int, width: int, classes: int) -> None:
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(words, width, mode="mean"), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x))


@program(small={"count": 4, "length": 8, "words": 100, "width": 16})
def word_bag(count: int = 8192, length: int = 128, words: int = 200_000, width: int = 256) -> Made:
    """A bag of words."""
    return WordBag(words, width, 50), whole(words, count, length)
