"""
A GPT in one file: token ids in, logits out.

    idx (B, T) → wte → n_layer × [x + attn(ln_1(x)), x + mlp(ln_2(x))] → ln_f → lm_head → (B, T, V)

    model = GPT(GPTConfig(vocab_size=65))
    logits = model(torch.randint(65, (1, 8)))

Letters, here and in every other file: B sequences in a batch, T tokens in a sequence, S keys to look at (the
cached ones and the T new ones), C = n_embd channels, H = n_head heads of D = C / H channels, V = vocab_size.

The defaults are the parts of today's small models; config/gpt2.toml has GPT-2's.
GPT-2   Radford et al. 2019, Language Models are Unsupervised Multitask Learners
BERT    Devlin et al. 2018, https://arxiv.org/abs/1810.04805              (causal = false)
"""

import json
import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GPTConfig:
    block_size: int = 128  # T at most: how many tokens the model can see
    vocab_size: int = 1024  # V: how many different tokens
    n_layer: int = 4  # how many blocks
    n_head: int = 4  # H: attention heads in a block
    n_embd: int = 128  # C: channels of the residual stream
    dropout: float = 0.0  # 0 where the text is read about once; 0.1 or more where it is read often
    dropout_of: Literal["channels", "elements"] = "channels"  # channels: a text loses whole ones, which is
    #   fast; elements: each number by itself, and attention's weights too, as in GPT-2
    bias: bool = False  # biases in Linear and LayerNorm
    causal: bool = True  # true: predict the next token from the past (GPT); false: see both sides (BERT)
    pos_emb: Literal["learned", "rope"] = "rope"  # a table of learned vectors, or rotations of q and k
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"  # rmsnorm here has no parameters
    norm_embd: bool = True  # normalise the embedding too, before the first block
    qk_norm: bool = True  # normalise q and k, so that no attention logit can run away
    activation: Literal["gelu", "relu2"] = "relu2"  # of the MLP: GPT-2's tanh form of GELU, or max(x, 0)²
    tie_weights: bool = False  # one matrix for the embedding and the output
    zero_init: bool = True  # start with what writes to the residual stream, and an untied head, at zero
    logit_softcap: float = 15.0  # c: logits become c·tanh(logits / c), none is beyond ±c; 0: no cap

    def __post_init__(self):
        for name in "block_size", "n_layer", "n_head", "n_embd":
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd = {self.n_embd} must be a multiple of n_head = {self.n_head}")
        if self.pos_emb == "rope" and self.n_embd // self.n_head % 2:
            raise ValueError(f"pos_emb = rope turns pairs of channels: n_embd / n_head = "
                             f"{self.n_embd // self.n_head} must be even")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout} must be at least 0 and less than 1")
        if self.logit_softcap < 0:
            raise ValueError(f"logit_softcap = {self.logit_softcap} must not be negative; 0 switches it off")


# ------------------------------------------------------------------------------- positions

def rope(pos, D, base=10000.0):
    """cos and sin of the angles pos · base^(-2i/D), of each position in pos (…) and pair i: (…, D/2) each.

    Su et al. 2021, https://arxiv.org/abs/2104.09864
    """
    theta = base ** (-torch.arange(0, D, 2, device=pos.device) / D)  # (D/2,) from 1 down to about 1/base
    angles = pos[..., None] * theta  # in float32, whatever the model is in: bfloat16 has no 257
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """Turn the pairs of channels (i, i + D/2) of x (B, H, T, D): then q·k depends on how far apart they are.

    y₁ = x₁ cos + x₂ sin    y₂ = x₂ cos - x₁ sin
    """
    x1, x2 = x.chunk(2, dim=-1)  # (B, H, T, D/2)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1).type_as(x)


def drop(x, config, training):
    """Set a share of x (B, T, C) to 0 and scale up the rest, in training: single elements (Srivastava et al.
    2014), or channels along the whole text (Gal & Ghahramani 2016, https://arxiv.org/abs/1512.05287)."""
    if not training or not config.dropout:
        return x
    if config.dropout_of == "elements":
        return F.dropout(x, config.dropout)
    return x * F.dropout(torch.ones_like(x[:, :1]), config.dropout)  # (B, 1, C) random numbers are soon drawn


class KVCache:
    """The keys and values of the tokens read so far: a new token then costs one step, not a pass over all.

    Rows may hold unlike numbers of tokens: `lengths`. These are the host's integers, to set at will: with
    lengths[b] = 0 row b starts anew. `size` is how many tokens a row can hold, at most block_size.
    """

    def __init__(self, config, B, device=None, dtype=None, size=None):
        H, D = config.n_head, config.n_embd // config.n_head
        shape = (config.n_layer, B, H, min(size or config.block_size, config.block_size), D)
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.lengths = [0] * B

    def keep(self, rows):
        """Keep these rows, in this order: beam search moves its beams about, and texts end."""
        self.k, self.v, self.lengths = self.k[:, rows], self.v[:, rows], [self.lengths[b] for b in rows]

    def put(self, rows, other):
        """Fill the rows with those of another cache, all of one length."""
        T = max(other.lengths)
        self.k[:, rows, :, :T], self.v[:, rows, :, :T] = other.k[:, :, :, :T], other.v[:, :, :, :T]
        for b, length in zip(rows, other.lengths, strict=True):
            self.lengths[b] = length

    def append(self, layer, k, v, pos):
        """Store k and v (B, H, T, D) at the positions pos; return what the layer holds: (B, H, S, D) each."""
        past = max(self.lengths)
        S = past + k.size(2)  # keys to look at
        held = self.k[layer, :, :, :S], self.v[layer, :, :, :S]
        for store, new in zip(held, (k, v), strict=True):
            if pos.dim() == 1:
                store[:, :, past:] = new
            else:  # each row at its own place
                rows = torch.arange(len(pos), device=pos.device)[:, None]
                store[rows, :, pos] = new.transpose(1, 2)
        return held


def positions(T, cache, device):
    """Where T new tokens stand: (T,), or (B, T) where a cache's rows are of unlike length."""
    lengths = cache.lengths if cache else [0]
    pos = torch.arange(T, device=device)
    if len(set(lengths)) == 1:
        return pos + lengths[0]
    return pos + torch.tensor(lengths, device=device)[:, None]


# ------------------------------------------------------------------------------- the model

def make_norm(config):
    if config.norm == "rmsnorm":  # x / √(mean(x²) + ε), Zhang & Sennrich 2019, https://arxiv.org/abs/1910.07467
        return nn.RMSNorm(config.n_embd, eps=1e-6, elementwise_affine=False)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class SelfAttention(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        C = config.n_embd
        self.c_attn = nn.Linear(C, 3 * C, bias=config.bias)  # q, k and v of all heads in one product
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.config, self.layer = config, layer

    def forward(self, x, pos, turn, mask, cache=None):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.config.n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, D) each
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        if self.config.qk_norm:  # Henry et al. 2020, https://arxiv.org/abs/2010.04245
            q, k = F.rms_norm(q, q.shape[-1:], eps=1e-6), F.rms_norm(k, k.shape[-1:], eps=1e-6)
        if cache is not None:
            k, v = cache.append(self.layer, k, v, pos)  # (B, H, S, D)

        # y = softmax(q kᵀ / √D + mask) v
        p = self.config.dropout if self.training and self.config.dropout_of == "elements" else 0.0
        y = F.scaled_dot_product_attention(q, k, v, None if mask == "causal" else mask, p,
                                           is_causal=mask == "causal")  # (B, H, T, D)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side again
        return drop(self.c_proj(y), self.config, self.training)


class MLP(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.config = config

    def forward(self, x):
        x = self.c_fc(x)  # (B, T, 4C)
        if self.config.activation == "relu2":
            x = F.relu(x).square()  # So et al. 2021, https://arxiv.org/abs/2109.08668
        else:
            x = F.gelu(x, approximate="tanh")  # the form that GPT-2's weights were trained with
        return drop(self.c_proj(x), self.config, self.training)  # (B, T, C)


class Block(nn.Module):

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = SelfAttention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, pos, turn, mask, cache=None):
        x = x + self.attn(self.ln_1(x), pos, turn, mask, cache)  # tokens look at each other
        return x + self.mlp(self.ln_2(x))  # each token by itself


class GPT(nn.Module):
    """model(idx) = head(hidden(idx)): ids (B, T) to logits (B, T, V). It knows no objective."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(dict(  # the names in GPT-2's checkpoints
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            h=nn.ModuleList(Block(config, layer) for layer in range(config.n_layer)),
            ln_f=make_norm(config),
        ))
        if config.pos_emb == "learned":
            self.transformer.wpe = nn.Embedding(config.block_size, config.n_embd)
        if config.norm_embd:
            self.transformer.ln_e = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:  # logits are then inner products with the embeddings
            self.lm_head.weight = self.transformer.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """N(0, 0.02²), biases 0. The 2·n_layer projections into the residual stream get 0.02 / √(2·n_layer),
        so that the variance of their sum does not grow with depth (GPT-2, section 2.3), or 0: zero_init."""
        for name, p in self.named_parameters():
            residual = name.endswith("c_proj.weight")
            if name.endswith("bias") or self.config.zero_init and (residual or name == "lm_head.weight"):
                p.zero_()
            elif p.dim() == 2:
                p.normal_(0.0, 0.02 / (2 * self.config.n_layer) ** 0.5 if residual else 0.02)

    def hidden(self, idx, cache=None):
        """ids (B, T) → what the head reads, (B, T, C). Tokens in the cache count as standing before idx.

        Raises ValueError for more tokens than block_size.
        """
        T, config = idx.size(1), self.config
        past = max(cache.lengths) if cache else 0
        if past + T > config.block_size:
            raise ValueError(f"{past + T} tokens do not fit in block_size = {config.block_size}")
        pos = positions(T, cache, idx.device)  # (T,) or (B, T)
        mask = self.mask(pos, past, T)
        turn = None
        x = self.transformer.wte(idx)  # (B, T, C)
        if config.pos_emb == "learned":
            x = x + self.transformer.wpe(pos)  # (T, C) or (B, T, C)
        else:
            turn = rope(pos[:, None] if pos.dim() == 2 else pos, config.n_embd // config.n_head)
        if config.norm_embd:
            x = self.transformer.ln_e(x)
        x = drop(x, config, self.training)
        for block in self.transformer.h:
            x = block(x, pos, turn, mask, cache)
        if cache is not None:
            cache.lengths = [length + T for length in cache.lengths]
        return self.transformer.ln_f(x)

    def mask(self, pos, past, T):
        """Which keys a query may see: None (all), "causal" (PyTorch's triangle), or True where it may.

        PyTorch's triangle starts at the top left, which is right only where queries and keys are the same.
        """
        if not self.config.causal or T == 1 and pos.dim() == 1:
            return None
        if past == 0:
            return "causal"
        keys = torch.arange(past + T, device=pos.device)
        mask = keys <= pos[..., None]  # (T, S) or (B, T, S)
        return mask if pos.dim() == 1 else mask[:, None]  # the same for all heads

    def head(self, x):
        """(…, C) → logits (…, V)."""
        logits = self.lm_head(x)
        if c := self.config.logit_softcap:  # Gemma 2, https://arxiv.org/abs/2408.00118
            logits = c * torch.tanh(logits.float() / c)
        return logits

    def forward(self, idx, cache=None):
        return self.head(self.hidden(idx, cache))

    def num_params(self):
        """Parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Floating-point operations to train with one token, of block_size in a sequence.

        A weight in a product takes 2 of them forward and 4 backward. Attention's two products take 4·C·T
        forward and 8·C·T backward in each layer, for all T keys, masked or not, as is usual (Chowdhery et al.
        2022, PaLM, https://arxiv.org/abs/2204.02311, appendix B). What is computed twice counts once.
        """
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * self.config.n_layer * self.config.n_embd * self.config.block_size


# ------------------------------------------------------------------------------- files

def save(path, model, weights=None, **rest):
    """Write a checkpoint: the weights, the config to build the model from, and what else `rest` has.

    `weights` are given where the model has only a part of its own.
    The old file is replaced only when the new one is safely on the disk.
    """
    part = f"{path}.tmp"
    with open(part, "wb") as f:
        torch.save(dict(model=weights or model.state_dict(), model_config=asdict(model.config), **rest), f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)


def load(path, device="cpu", **changes):
    """(the model of a checkpoint, the whole checkpoint). `changes` are to its config: dropout, block_size.

    Reading a checkpoint never runs code from it. Raises OSError if there is no such file, ValueError if it is
    damaged or no checkpoint of ours, or if the changes do not fit.
    """
    with open(path, "rb") as f:
        try:
            ckpt = torch.load(f, map_location="cpu", weights_only=True)
            model = GPT(GPTConfig(**ckpt["model_config"]))
            model.load_state_dict(ckpt["model"])
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, LookupError, TypeError,
                ValueError) as error:
            reason = f"{type(error).__name__} {error}"[:200]
            raise ValueError(f"{path} is damaged or no checkpoint of train.py ({reason})") from None
    if changes:
        model = change(model, **changes)
    return model.to(device), ckpt


def change(model, **changes):
    """The same weights under a config with `changes`. Raises ValueError if they do not fit it."""
    config = GPTConfig(**asdict(model.config) | changes)
    if config.block_size > model.config.block_size:
        raise ValueError(f"block_size = {config.block_size} is more than the {model.config.block_size} that "
                         "the model was trained with")
    weights = model.state_dict()
    if config.pos_emb == "learned":
        weights["transformer.wpe.weight"] = weights["transformer.wpe.weight"][:config.block_size]
    model = GPT(config)
    model.load_state_dict(weights)
    return model


# ------------------------------------------------------------------------------- Hugging Face

GPT2_PARTS = dict(causal=True, bias=True, pos_emb="learned", norm="layernorm", norm_embd=False, qk_norm=False,
                  activation="gelu", logit_softcap=0.0)
MODERN_PARTS = dict(causal=True, bias=False, pos_emb="rope", norm="rmsnorm", norm_embd=True, qk_norm=True,
                    activation="relu2", logit_softcap=15.0)
# GPT-2's code keeps these matrices as (in, out), nn.Linear as (out, in)
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
NANOCHAT_NAMES = {"transformer.wte": "model.embed_tokens", "transformer.h": "model.layers",
                  "attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj",
                  "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2", "lm_head": "lm_head"}


def to_hf(model):
    """(config.json as a dict, {name: tensor}) for GPT2LMHeadModel or NanoChatForCausalLM.

    Raises ValueError for a mixture of parts, which has no class there.
    """
    c, out = model.config, {}
    sizes = dict(vocab_size=c.vocab_size, tie_word_embeddings=c.tie_weights)
    if GPT2_PARTS.items() <= asdict(c).items():
        out = {name: w.T if name.endswith(TRANSPOSED) else w for name, w in model.state_dict().items()}
        kind, sizes = "GPT2LMHeadModel", sizes | dict(
            model_type="gpt2", n_positions=c.block_size, n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd,
            activation_function="gelu_new")
    elif MODERN_PARTS.items() <= asdict(c).items():
        for name, w in model.state_dict().items():
            for ours, theirs in NANOCHAT_NAMES.items():
                name = name.replace(ours, theirs)
            for letter, part in zip("qkv", w.chunk(3), strict=True) if "qkv" in name else [("qkv", w)]:
                out[name.replace("qkv", letter)] = part
        kind, sizes = "NanoChatForCausalLM", sizes | dict(
            model_type="nanochat", max_position_embeddings=c.block_size, num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head, num_key_value_heads=c.n_head, hidden_size=c.n_embd,
            intermediate_size=4 * c.n_embd, final_logit_softcapping=c.logit_softcap, rms_norm_eps=1e-6)
    else:
        raise ValueError("only GPT-2's parts or the modern ones, unmixed, have a Hugging Face class")
    if c.tie_weights:
        del out["lm_head.weight"]
    return dict(architectures=[kind], dtype="float32", **sizes), out


def from_hf(config, weights):
    """The model of (config.json as a dict, {name: tensor}); the inverse of to_hf.

    Raises ValueError for another class, or other sizes than ours can have.
    """
    get, tied = config.get, config.get("tie_word_embeddings")
    if get("model_type") == "gpt2":
        sizes = dict(block_size=get("n_positions"), n_layer=get("n_layer"), n_head=get("n_head"),
                     n_embd=get("n_embd"), tie_weights=tied is not False, zero_init=False,
                     dropout_of="elements", **GPT2_PARTS)
        renamed = {}
        for name, w in weights.items():
            name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
            if not name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask, in old files
                renamed[name] = w.T if name.endswith(TRANSPOSED) else w
    elif get("model_type") == "nanochat":
        sizes = dict(block_size=get("max_position_embeddings"), n_layer=get("num_hidden_layers"),
                     n_head=get("num_attention_heads"), n_embd=get("hidden_size"), tie_weights=bool(tied),
                     **MODERN_PARTS | dict(logit_softcap=get("final_logit_softcapping") or 0.0))
        if get("num_key_value_heads") not in (None, sizes["n_head"]):
            raise ValueError(f"num_key_value_heads = {get('num_key_value_heads')}: all heads must have keys")
        if get("intermediate_size") != 4 * sizes["n_embd"]:
            raise ValueError(f"intermediate_size = {get('intermediate_size')} must be 4 * hidden_size")
        renamed = dict(weights)
        for name in [name for name in weights if "q_proj" in name]:
            parts = [renamed.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
            renamed[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        for ours, theirs in NANOCHAT_NAMES.items():
            renamed = {name.replace(theirs, ours): w for name, w in renamed.items()}
    else:
        raise ValueError(f"model_type = {get('model_type')!r} must be gpt2 or nanochat")
    if sizes["tie_weights"]:
        renamed["lm_head.weight"] = renamed["transformer.wte.weight"]
    model = GPT(GPTConfig(vocab_size=get("vocab_size"), **sizes))
    model.load_state_dict(renamed)
    return model


def save_hf(folder, model, **rest):
    """Write config.json, with `rest` in it, and model.safetensors, as transformers and others read them."""
    from safetensors.torch import save_file
    config, weights = to_hf(model)
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_file({name: w.contiguous() for name, w in weights.items()}, Path(folder, "model.safetensors"),
              metadata=dict(format="pt"))
    Path(folder, "config.json").write_text(json.dumps(config | rest, indent=1), encoding="utf-8")


def load_hf(config_file, weights_file):
    """(the model, config.json as a dict) of two such files. Raises OSError or ValueError for a misfit."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    config = json.loads(Path(config_file).read_text(encoding="utf-8"))
    try:
        return from_hf(config, load_file(weights_file)), config
    except (SafetensorError, RuntimeError, LookupError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ValueError(f"{weights_file} does not fit {config_file} ({reason})") from None
