"""
Write text with a trained model, one token after another.

    python sample.py --start="JULIET:" --temperature=0.8 --top_p=0.95
    python sample.py --ckpt=out/best.pt --start=FILE:prompt.txt --num_samples=4 --stop="ROMEO"
    python sample.py --ckpt=gpt2 --start="The river" --quantize=int8      # OpenAI's weights, 8 bits each
    python sample.py --score="To be, or not to be" --score="To be, to or not be"
    python sample.py --ckpt=out-masked/best.pt --start="To be or [MASK] to be"    # a masked model fills gaps
    echo "reverse stone" | python sample.py --ckpt=out-letters/best.pt --start=-  # a model of pairs answers

The text goes to standard output, all else to standard error.

Top-k       Fan et al. 2018, https://arxiv.org/abs/1805.04833
Top-p       Holtzman et al. 2019, https://arxiv.org/abs/1904.09751
Min-p       Nguyen et al. 2024, https://arxiv.org/abs/2407.01082
Repetition  Keskar et al. 2019, https://arxiv.org/abs/1909.05858
Batching    Yu et al. 2022, Orca: A Distributed Serving System for Transformer-Based Generative Models
"""

import codecs
import json
import math
import sys
from collections import defaultdict, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from config import run
from model import KVCache, change, load, load_hf, save_hf
from prepare import MASK, Tokenizer, ask, download, from_hf_tokenizer, to_hf_tokenizer

GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
HUB = "https://huggingface.co/openai-community"
IGNORE = -100  # a target that is not scored: PyTorch's own default


BEAMS_LEAVE_OUT = dict(num_samples=1, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, stop="")


@dataclass
class SampleConfig:
    ckpt: str = "out/best.pt"  # a checkpoint of train.py, a Hugging Face folder, or gpt2, gpt2-medium,
    #   gpt2-large, gpt2-xl: OpenAI's weights, downloaded
    start: str = ""  # the prompt; FILE:path reads it from a file, LINES:path takes each line of one, - each
    #   line of standard input; empty: start as a document does
    num_samples: int = 1  # texts to write, of each prompt
    max_new_tokens: int = 500  # tokens to write, at most; the text may end before
    temperature: float = 0.8  # divides the logits: below 1 favours likely tokens, 0 takes the likeliest
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens that has the probability p; 1: all
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # above 1: tokens that the text already has become less likely
    num_beams: int = 1  # above 1: beam search for the likeliest text; nothing is random, nothing filtered
    length_penalty: float = 1.0  # beams compare by ln p / length^this: 0 favours short texts, more long ones
    score: list[str] = field(default_factory=list)  # a text, or FILE:path, to score; several are ranked
    stride: int = 0  # of --score: new tokens in each window, the rest is context; 0: block_size
    verbose: bool = False  # of --score: a line for each token
    stop: str = ""  # a text to end before, such as "ROMEO:"
    export: str = ""  # a folder to write the model to, for transformers and others; writes no text then
    seed: int = 1337  # the same seed, the same text
    batch_size: int = 8  # texts written side by side, where there are several
    quantize: Literal["", "int8", "int4"] = ""  # weights of 8 or 4 bits: less memory, faster on a CPU
    kv_cache: bool = True  # keep keys and values of the text so far: the same tokens, sooner
    stream: bool = True  # print a single text as it is written
    device: str = "auto"  # auto: cuda, mps or cpu, the first there is
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 where native on cuda

    def __post_init__(self):
        for name in "num_samples", "num_beams", "batch_size":
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in "max_new_tokens", "temperature", "top_k", "top_p", "min_p", "stride", "seed":
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        for name in "top_p", "min_p":
            if getattr(self, name) > 1:
                raise ValueError(f"{name} = {getattr(self, name)} is a probability: it must be at most 1")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty} must be above 0; 1: no penalty")
        for name, off in BEAMS_LEAVE_OUT.items():
            if self.num_beams > 1 and getattr(self, name) != off:
                raise ValueError(f"{name} = {getattr(self, name)!r} has no part in a beam search: leave it "
                                 f"out, or num_beams = {self.num_beams}")


# ------------------------------------------------------------------------------- filters
# logits (B, V) → logits, with -inf for the tokens ruled out: softmax then shares out what was theirs.

def penalize(logits, seen, penalty):
    """Make the tokens that seen (B, V) marks less likely: positive logits / penalty, negative · penalty."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_p(logits, p):
    """The smallest set with probability ≥ p, at least one: a token stays if those before it have less."""
    best, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = best.softmax(dim=-1)
    drop = probs.cumsum(dim=-1) - probs >= p
    drop[..., 0] = False
    return logits.masked_fill(drop.scatter(-1, ids, drop), -math.inf)


def keep_min_p(logits, min_p):
    """p ≥ min_p · p_max, that is z ≥ z_max + ln min_p."""
    return logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + math.log(min_p), -math.inf)


def next_token(logits, u, seen=None, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    """Choose one of the tokens for each row of logits (B, V): ids (B,).

    u (B,) holds a random number from [0, 1) for each row. The token drawn is the first whose cumulative
    probability exceeds it (inverse transform sampling). seen (B, V) marks the tokens that the text has.
    """
    if repetition_penalty != 1:
        logits = penalize(logits, seen, repetition_penalty)
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k:  # exactly k, also where several are as likely as the k-th; the rest is done with these alone
        logits, ids = logits.topk(min(top_k, logits.size(-1)))  # (B, k) each
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # ≤ 0: what overflows becomes -inf
    if top_p < 1:
        logits = keep_top_p(logits, top_p)
    if min_p:
        logits = keep_min_p(logits, min_p)
    total = logits.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # 50,000 terms add up
    place = torch.searchsorted(total, u[:, None].to(total) * total[:, -1:], right=True)  # (B, 1)
    return (ids.gather(1, place) if top_k else place)[:, 0]


# ------------------------------------------------------------------------------- generation

@dataclass
class Row:
    """A text that is being written, in one row of the batch."""
    i: int  # the number of its prompt
    window: list[int]  # the context: what the next token is predicted from
    left: int  # tokens to write yet
    stream: np.random.Generator  # its random numbers
    seen: torch.Tensor  # (V,): which tokens the text has


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, vocab_size, seed=1337, kv_cache=True, batch_size=8,
             ended=lambda i: False, **choice):
    """Continue the prompts, lists of ids of any lengths: yields (i, id), the next token of prompt i.

    batch_size texts are written side by side. One that has max_new_tokens, or whose ended(i) is true, makes
    room for a waiting prompt (continuous batching). Text i draws from the random stream (seed, i), so it does
    not depend on its neighbours. When a context outgrows block_size its newer half is read anew, with or
    without cache. Ids from vocab_size on only pad the matrix and are never chosen. `choice` are the settings
    of next_token.
    """
    size, any_weight, waiting = model.config.block_size, next(model.parameters()), deque(enumerate(prompts))
    B, longest = min(batch_size, len(prompts)), max(map(len, prompts), default=0) + max_new_tokens
    cache = KVCache(model.config, B, any_weight.device, any_weight.dtype, longest) if kv_cache else None

    def start(i, ids):
        seen = torch.zeros(vocab_size, dtype=torch.bool)
        seen[ids] = True
        return Row(i, list(ids[-size:]), max_new_tokens, np.random.default_rng((seed, i)), seen)

    rows = [start(*waiting.popleft()) for _ in range(B)]
    while rows:
        for b, row in enumerate(rows):
            while (not row.left or ended(row.i)) and waiting:
                rows[b] = row = start(*waiting.popleft())
                if cache:
                    cache.lengths[b] = 0
        alive = [b for b, row in enumerate(rows) if row.left and not ended(row.i)]
        if len(alive) < len(rows):
            rows = [rows[b] for b in alive]
            if cache:
                cache.keep(alive)
            continue
        logits = next_logits(model, rows, cache, any_weight.device)[:, :vocab_size].float()  # (B, V)
        if any_weight.device.type == "mps":  # which has no float64
            logits = logits.cpu()
        u = torch.tensor([row.stream.random() for row in rows], dtype=torch.float64, device=logits.device)
        seen = None  # which only the penalty asks for
        if choice.get("repetition_penalty", 1) != 1:
            seen = torch.stack([row.seen for row in rows]).to(logits.device)
        for b, token in enumerate(next_token(logits, u, seen, **choice).tolist()):
            row = rows[b]
            row.left, row.seen[token] = row.left - 1, True
            row.window.append(token)
            if len(row.window) > size:
                row.window = row.window[-max(size // 2, 1):]
                if cache:
                    cache.lengths[b] = 0
            yield row.i, token


def next_logits(model, rows, cache, device):
    """The logits behind the windows of the rows: (B, V). All but the last token of each may be in the cache.

    What is missing there is read first, rows of one length together; then all rows decode one token together.
    """
    if not cache:
        return torch.cat([model.head(model.hidden(torch.tensor([row.window], device=device))[:, -1])
                          for row in rows])
    unread = defaultdict(list)
    for b, row in enumerate(rows):
        if cache.lengths[b] < len(row.window) - 1:
            unread[len(row.window) - 1].append(b)
    for T, group in unread.items():
        new = KVCache(model.config, len(group), device, cache.k.dtype, size=T)
        model.hidden(torch.tensor([rows[b].window[:T] for b in group], device=device), new)
        cache.put(group, new)
    last = torch.tensor([[row.window[-1]] for row in rows], device=device)  # (B, 1)
    return model.head(model.hidden(last, cache)[:, -1])


@torch.inference_mode()
def beam_search(model, ids, max_new_tokens, vocab_size, num_beams=4, length_penalty=1.0, end=None,
                kv_cache=True):
    """The likeliest continuations of ids that K = num_beams beams find: [(score, ids), …], the best first.

    score = Σ ln p / n^length_penalty over the n tokens written, the token `end` included.
    Of the 2K best continuations of the beams, those that end are kept in a pool if they are
    among the first K; the K best others go on, until none of them can come to more than the pool has.
    """
    K, size, pool = num_beams, model.config.block_size, []
    any_weight, longest = next(model.parameters()), len(ids) + max_new_tokens
    device = any_weight.device
    cache = KVCache(model.config, 1, device, any_weight.dtype, longest) if kv_cache else None
    window = torch.tensor([ids[-size:]], device=device)  # (beams, T); the first step has one beam
    beams, sums = [[]], torch.zeros(1, device=device)
    for n in range(1, max_new_tokens + 1):
        new = window[:, cache.lengths[0]:] if cache else window
        logits = model.head(model.hidden(new, cache)[:, -1])[:, :vocab_size]
        sums = (sums[:, None] + F.log_softmax(logits.float(), dim=-1)).flatten()  # (beams · V,)
        best, places = sums.topk(min(2 * K, len(sums)))
        found = [(total, place // logits.size(1), place % logits.size(1))
                 for total, place in zip(best.tolist(), places.tolist(), strict=True)]
        ends = [token == end or n == max_new_tokens for _, _, token in found]
        pool += [(total / n ** length_penalty, [*beams[parent], token])
                 for (total, parent, token), ended in zip(found[:K], ends, strict=False) if ended]
        pool = sorted(pool, key=lambda pair: -pair[0])[:K]
        alive = [candidate for candidate, ended in zip(found, ends, strict=True) if not ended][:K]
        if not alive:
            break
        length = max_new_tokens if length_penalty > 0 else n  # where the sum counts least
        if len(pool) == K and alive[0][0] / length ** length_penalty <= pool[-1][0]:
            break
        sums = torch.tensor([total for total, _, _ in alive], device=device)
        parents = [parent for _, parent, _ in alive]
        beams = [[*beams[parent], token] for _, parent, token in alive]
        last = torch.tensor([beam[-1:] for beam in beams], device=device)  # (beams, 1)
        window = torch.cat((window[parents], last), dim=1)
        if cache:
            cache.keep(parents)
        if window.size(1) > size:
            window = window[:, -max(size // 2, 1):]
            if cache:
                cache.lengths = [0] * len(beams)
    return pool


class TextStream:
    """Token ids in, text out, as far as it is certain.

    Held back are the first bytes of a character that is not complete, and what may be the start of the stop
    text. After the end-of-text token or the stop text it is `done`.
    """

    def __init__(self, tokenizer, stop=""):
        self.tokenizer, self.stop, self.done, self.held = tokenizer, stop, False, ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token):
        """The text that the id `token` makes certain."""
        if self.done or token == self.tokenizer.eot:
            return self.finish()
        text = self.held + self.decoder.decode(self.tokenizer.tokens[token])
        if self.stop and self.stop in text:
            self.done = True
            return text.partition(self.stop)[0]
        keep = max((n for n in range(len(self.stop)) if text.endswith(self.stop[:n])), default=0)
        self.held = text[len(text) - keep:]
        return text[:len(text) - keep]

    def finish(self):
        """What was held back, when no more comes: half a character becomes U+FFFD."""
        text = "" if self.done else self.held + self.decoder.decode(b"", final=True)
        self.held, self.done = "", True
        return text


@torch.inference_mode()
def fill(model, idx, mask_id, seed=1337, **choice):
    """Replace the masks in the texts idx (B, T), each time the one that the model is surest of.

    Row b chooses with the random stream (seed, b); temperature = 0 takes the likeliest token. The mask itself
    is never chosen. `choice` are the settings of next_token.
    """
    idx = idx.clone()
    streams = [np.random.default_rng((seed, b)) for b in range(len(idx))]
    while (gaps := idx == mask_id).any():
        logits = model(idx)[:, :, :mask_id].float()  # (B, T, V)
        sure = logits.softmax(dim=-1).amax(dim=-1).masked_fill(~gaps, -1)  # (B, T)
        rows, places = torch.arange(len(idx), device=idx.device), sure.argmax(dim=1)
        u = torch.tensor([stream.random() for stream in streams], dtype=torch.float64)
        seen = torch.zeros(len(idx), mask_id + 1, dtype=torch.bool, device=idx.device).scatter_(1, idx, True)
        token = next_token(logits[rows, places].cpu(), u, seen[:, :mask_id].cpu(), **choice)
        idx[rows, places] = torch.where(gaps.any(dim=1), token.to(idx.device), idx[rows, places])
    return idx


# ------------------------------------------------------------------------------- small weights
# A step of generation reads every weight once, and that takes its time: smaller weights, faster text.

class SmallLinear(nn.Module):
    """y = x Wᵀ + b. Up to `few` rows of x go through one of torch's kernels; more rows are worth unpacking
    the weights, for one large product."""

    def forward(self, x):
        rows = x.reshape(-1, x.size(-1))
        if not self.kernel or len(rows) > self.few:
            return F.linear(x, self.weight().type_as(x), self.bias)
        y = self.product(rows).type_as(x).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def multiplies_bytes():
    """Whether torch has products of unsigned by signed bytes that are fast and exact: newer versions, on x86
    processors with VNNI."""
    try:
        torch._int_mm(torch.ones(8, 8, dtype=torch.uint8), torch.ones(8, 8, dtype=torch.int8))
    except RuntimeError:
        return False
    return torch.cpu._is_vnni_supported()


class Int8Linear(SmallLinear):
    """A Linear with 8 bits a weight: w ≈ scale · q · use, a scale for each output and a use for each input.

    use = max |w| of an input's weights. What they make little of may be large itself, and would leave few
    bits for the others; x · use is as large as it counts (SmoothQuant: Xiao et al. 2022,
    https://arxiv.org/abs/2211.10438, with α = 0). Then scale = max |w / use| / 127 and
    q = round(w / use / scale): no weight is off by more than half a step, scale · use / 2.

    A processor with VNNI multiplies bytes faster than they come from memory, unsigned ones by signed ones.
    There the rows of x become bytes too, each with a scale of its own, x · use ≈ scale · (p - 128), and the
    sums of products are exact integers: Σ (p - 128) q = Σ p q - 128 Σ q.
    """
    bytewise = multiplies_bytes()
    few = math.inf if bytewise else 32
    way = "products of bytes" if bytewise else "torch's packed kernel"

    def __init__(self, linear, kernel):
        super().__init__()
        w = linear.weight.float()  # (out, in)
        self.register_buffer("use", w.abs().amax(dim=0).clamp(min=1e-30))  # (in,)
        w = w / self.use
        self.register_buffer("scale", w.abs().amax(dim=1).clamp(min=1e-30) / 127)  # (out,)
        self.register_buffer("q", (w / self.scale[:, None]).round().to(torch.int8))  # (out, in)
        self.register_buffer("shift", 128 * self.q.sum(dim=1, dtype=torch.int32))  # (out,)
        self.bias, self.kernel = linear.bias, kernel

    def weight(self):
        return self.scale[:, None] * self.q * self.use

    def product(self, rows):
        rows = rows * self.use
        if not self.bytewise:
            return torch._weight_int8pack_mm(rows.bfloat16(), self.q, self.scale.bfloat16())
        scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127  # (rows, 1)
        p = (rows / scale + 128.5).to(torch.uint8)  # rounded, for the conversion cuts off
        return (torch._int_mm(p, self.q.t()) - self.shift) * scale * self.scale


class Int4Linear(SmallLinear):
    """A Linear with 4 bits a weight, two weights to a byte: w ≈ scale · (q - 8) + zero, q in 0 … 15.

    Each `group` of neighbours in a row has a scale and a zero: its least weight becomes q = 0, its greatest
    q = 15. With 16 bits for each of the two that makes 4 + 32 / group bits a weight.
    """
    few = math.inf  # the kernel's order of the weights is its own
    way = "torch's packed kernel"

    def __init__(self, linear, kernel, group=64):
        super().__init__()
        self.bias, self.kernel, self.group, self.out = linear.bias, kernel, group, linear.out_features
        rows = -self.out % 16 if kernel else 0  # the kernel takes outputs by the 16
        w = F.pad(linear.weight.float(), (0, 0, 0, rows)).unflatten(1, (-1, group))  # (out, groups, group)
        least, most = w.aminmax(dim=2, keepdim=True)
        scale = ((most - least) / 15).clamp(min=1e-30).bfloat16()
        zero = (least + 8 * scale.float()).bfloat16()
        q = ((w - zero.float()) / scale.float() + 8).round().clamp(0, 15).flatten(1).to(torch.uint8)
        self.register_buffer("scale_zero", torch.cat((scale, zero), dim=2).transpose(0, 1).contiguous())
        self.register_buffer("q", torch._convert_weight_to_int4pack_for_cpu(q.int(), 1) if kernel else
                             q[:, ::2] | q[:, 1::2] << 4)  # (out, in / 2)

    def weight(self):
        q = torch.stack((self.q & 15, self.q >> 4), dim=2).flatten(1).unflatten(1, (-1, self.group))
        scale, zero = self.scale_zero.float().transpose(0, 1).split(1, dim=2)  # (out, groups, 1) each
        return (scale * (q.float() - 8) + zero).flatten(1)

    def product(self, rows):
        y = torch._weight_int4pack_mm_for_cpu(rows.bfloat16(), self.q, self.group, self.scale_zero)
        return y[:, :self.out]


SMALL = dict(int8=(Int8Linear, "_weight_int8pack_mm"), int4=(Int4Linear, "_weight_int4pack_mm_for_cpu"))


def quantize(model, kind, dtype=torch.float32, packed=True):
    """Give a float32 model's Linears small weights, int8 or int4, in place; the rest of it becomes dtype.

    Embeddings stay as they are, a tied one too: looking a row up reads no more than that row. Returns whether
    torch's kernels do the products of few rows; elsewhere, or unless `packed`, each product unpacks the
    weights. Raises ValueError for a model whose rows int4 cannot cut into groups of 64.
    """
    small, kernel = SMALL[kind]
    if kind == "int4" and model.config.n_embd % 64:
        raise ValueError(f"quantize = int4 takes groups of 64 weights, but n_embd = {model.config.n_embd} "
                         "is no multiple of 64; --quantize=int8 takes any")
    packed = packed and next(model.parameters()).device.type == "cpu" and hasattr(torch, kernel)
    new = {name: small(linear, packed) for name, linear in model.named_modules()
           if isinstance(linear, nn.Linear)}
    model.to(dtype)
    for name, module in new.items():
        model.set_submodule(name, module)
    return packed


def megabytes(model):
    """What the weights take, a tied matrix counted once."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 1e6


# ------------------------------------------------------------------------------- scoring

def windows(ids, size, batch_size=32, stride=0, max_windows=0):
    """The evaluation protocol: batches (x, y), (B, T) each, in which each of ids (N,) but the first is a
    target once.

    Windows of `size` tokens stand side by side, the last one is shorter. With a `stride` below size they
    overlap, and what is new in each is a target, with more context. max_windows takes an even sample of
    them, always the same.
    """
    stride = min(stride or size, size)
    starts = np.arange(0, max(len(ids) - 1 - size + stride, 1), stride)
    full = starts[starts + size < len(ids)]
    if max_windows and len(full) > max_windows:
        starts = full = full[np.linspace(0, len(full) - 1, max_windows).round().astype(int)]
    groups = [full[i:i + batch_size] for i in range(0, len(full), batch_size)]
    groups += [starts[i:i + 1] for i in range(len(full), len(starts))]  # the shorter one at the end
    for group in groups:
        rows = np.stack([ids[i:i + size + 1] for i in group]).astype(np.int64)  # (B, T + 1)
        y = rows[:, 1:].copy()
        y[group > 0, :size - stride] = IGNORE
        yield rows[:, :-1], y


@torch.inference_mode()
def score(model, batches, tokenizer, amp=None):
    """(nats, tokens, bytes), summed over the targets of the batches. Bytes are those of the raw text."""
    device, nats, tokens, num_bytes = next(model.parameters()).device, 0.0, 0, 0
    for x, y in batches:
        with amp or nullcontext():
            logits = model(torch.from_numpy(x).to(device)).float()  # (B, T, V)
        y = y.ravel()
        nats += F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(y).to(device), reduction="sum").item()
        tokens += len(y := y[y != IGNORE])
        num_bytes += int(tokenizer.num_bytes[y].sum())
    return nats, tokens, num_bytes


def metrics(nats, tokens, num_bytes):
    """Nats per token; perplexity, exp of that; bits per byte, to compare models of unlike tokenizers."""
    loss = nats / max(tokens, 1)
    ppl = math.exp(loss) if loss < 700 else math.inf
    return dict(loss=loss, ppl=ppl, bpb=nats / math.log(2) / max(num_bytes, 1))


# ------------------------------------------------------------------------------- the command

def pick_device(name):
    """A torch.device; auto is the first of cuda, mps, cpu. Raises ValueError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device = {name!r} is not to be had here; try --device=auto") from None


def pick_dtype(name, device, otherwise="float32"):
    """A torch.dtype; auto is bfloat16 where CUDA has it natively, else `otherwise`; float32 elsewhere."""
    if name == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        name = "bfloat16" if native else otherwise if device.type == "cuda" else "float32"
    return getattr(torch, name)


def load_trained(path, device="cpu", **changes):
    """(model, tokenizer, checkpoint) of train.py's file, a Hugging Face folder, or a name in GPT2_NAMES.

    Raises ValueError, naming the runs there are, if it is missing.
    """
    if Path(path).is_dir() or path in GPT2_NAMES:
        model, tokenizer = load_folder(path)
        return (change(model, **changes) if changes else model).to(device), tokenizer, {}
    if not Path(path).is_file():
        found = ", ".join(sorted(map(str, Path().glob("*/best.pt")))) or "none; python train.py makes one"
        raise ValueError(f"{path} does not exist; checkpoints here: {found}")
    model, ckpt = load(path, device, **changes)
    if "tokenizer" not in ckpt:
        raise ValueError(f"{path} is no checkpoint of train.py: it holds no tokenizer")
    return model, Tokenizer(ckpt["tokenizer"]), ckpt


def load_folder(path):
    """(model, tokenizer) in Hugging Face's three files, from a folder or from its hub."""
    names = "config.json", "model.safetensors", "tokenizer.json"
    if Path(path).is_dir():
        files = [Path(path, name) for name in names]
        if missing := [file.name for file in files if not file.exists()]:
            raise ValueError(f"{path} is no Hugging Face folder that can be read: {missing[0]} is missing")
    else:
        otherwise = f"with the others of {', '.join(names)}, in a folder, and give --ckpt=FOLDER"
        files = [download(f"{HUB}/{path}/resolve/main/{name}", otherwise=otherwise) for name in names]
    try:
        model, config = load_hf(*files[:2])
        tokenizer = from_hf_tokenizer(json.loads(files[2].read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no model that can be read here ({type(error).__name__}: {error}); "
                         "GPT-2's class and nanochat's can, with a byte-level BPE") from None
    if model.config.vocab_size < tokenizer.vocab_size:
        raise ValueError(f"{path} holds a model of {model.config.vocab_size} tokens, but a tokenizer of "
                         f"{tokenizer.vocab_size}")
    return model, Tokenizer(tokenizer.spec | config.get("text_layout", {}))


def export(folder, model, tokenizer):
    """Write Hugging Face's three files; load_folder reads them, and so does transformers."""
    layout = {name: True for name in ("bos", "reverse", "pairs") if tokenizer.spec.get(name)}
    save_hf(folder, model, text_layout=layout, eos_token_id=tokenizer.eot, bos_token_id=tokenizer.eot)
    Path(folder, "tokenizer.json").write_text(json.dumps(to_hf_tokenizer(tokenizer), ensure_ascii=False),
                                              encoding="utf-8")
    print(f"wrote {folder}: config.json, model.safetensors and tokenizer.json; "
          f"python sample.py --ckpt={folder} reads them", file=sys.stderr)


def prompt_ids(text, tokenizer):
    """The ids that a text to continue starts with; an empty one starts as documents do."""
    spec, start = tokenizer.spec, [tokenizer.eot] if tokenizer.eot is not None else None
    if spec.get("pairs"):
        text = ask(text)
    if MASK in tokenizer.special:  # the mask between the parts of the text
        subwords = spec["kind"] not in ("byte", "char")  # whose tokens hold the space before a word
        parts = text.replace(f" {MASK}", MASK).split(MASK) if subwords else text.split(MASK)
        parts = [tokenizer.encode(part).tolist() for part in parts]
        return sum(([tokenizer.special[MASK]] + part for part in parts[1:]), parts[0])
    ids = tokenizer.encode(text).tolist()
    if spec.get("reverse"):
        ids.reverse()
    elif spec.get("bos"):
        ids = start + ids
    return ids or start or ([tokenizer.tokens.index(b"\n")] if b"\n" in tokenizer.tokens else [0])


def write(steps, heads, streams, cfg):
    """Print the texts that begin with `heads`: a single one as it grows, several in order, once done."""
    live = cfg.stream and len(heads) == 1
    texts, counts, shown = list(heads), [0] * len(heads), 0

    def add(i, text):
        texts[i] += text
        if live:
            print(text, end="", flush=True)

    if live:
        print(heads[0], end="", flush=True)
    try:
        for i, token in tqdm(steps, "tokens", len(heads) * cfg.max_new_tokens, disable=live):
            add(i, streams[i].feed(token))
            counts[i] += 1
            while not live and shown < len(heads) and (streams[shown].done
                                                       or counts[shown] == cfg.max_new_tokens):
                add(shown, streams[shown].finish())
                show(texts[shown], len(heads))
                shown += 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    for i in range(shown, len(heads)):
        add(i, streams[i].finish())
        show("" if live else texts[i], len(heads))


def show(text, several):
    print(text)
    if several > 1:
        print("-" * 15)


def written(ids, prompt, tokenizer):
    """A whole text from the ids behind a prompt, of which the last may be end-of-text."""
    if tokenizer.spec.get("reverse"):
        return tokenizer.decode(i for i in (prompt_ids(prompt, tokenizer) + ids)[::-1] if i != tokenizer.eot)
    return head(prompt, tokenizer) + tokenizer.decode(i for i in ids if i != tokenizer.eot)


def head(prompt, tokenizer):
    """What is printed of a prompt: nothing where the model answers, or writes from the end to the start."""
    return "" if tokenizer.spec.get("pairs") or tokenizer.spec.get("reverse") else prompt


def read_file(path):
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None


def read_text(text):
    return read_file(text[5:]) if text.startswith("FILE:") else text


def prompts(start):
    """The texts to continue, as a list of lists that are written one after another."""
    if start == "-":  # line by line, as they come
        return ([line.rstrip("\n")] for line in sys.stdin)
    if start.startswith("LINES:"):
        return [read_file(start[6:]).splitlines()]
    return [[read_text(start)]]


def respond(model, tokenizer, texts, cfg):
    """Write cfg.num_samples texts that go on from each of the texts, or fill their gaps."""
    choice = {name: getattr(cfg, name) for name in
              ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")}
    texts = [text for text in texts for _ in range(cfg.num_samples)]
    several, device = len(texts), next(model.parameters()).device
    ids = [prompt_ids(text, tokenizer) for text in texts]
    if not model.config.causal:
        if cfg.num_samples == 1:  # the likeliest
            choice["temperature"] = 0
        for row in ids:
            if len(row) > model.config.block_size:
                raise ValueError(f"start has {len(row)} tokens, but block_size = {model.config.block_size}")
        for i in range(0, several, cfg.num_samples):  # the samples of one text together
            idx = torch.tensor(ids[i:i + cfg.num_samples], device=device)  # (B, T)
            for row in fill(model, idx, tokenizer.special[MASK], **choice).tolist():
                show(tokenizer.decode(row), several)
    elif cfg.num_beams > 1:
        for text, row in zip(texts, ids, strict=True):
            found = beam_search(model, row, cfg.max_new_tokens, tokenizer.vocab_size, cfg.num_beams,
                                cfg.length_penalty, tokenizer.eot, cfg.kv_cache)
            show(written(found[0][1] if found else [], text, tokenizer), several)
    else:
        streams = [TextStream(tokenizer, cfg.stop) for _ in texts]
        steps = generate(model, ids, cfg.max_new_tokens, tokenizer.vocab_size, kv_cache=cfg.kv_cache,
                         batch_size=cfg.batch_size, ended=lambda i: streams[i].done, **choice)
        if tokenizer.spec.get("reverse"):  # nothing can be shown before the end, which is the start
            rows = [[] for _ in texts]
            for i, token in tqdm(steps, "tokens", several * cfg.max_new_tokens):
                rows[i].append(token)
                streams[i].feed(token)
            for text, row in zip(texts, rows, strict=True):
                show(written(row, text, tokenizer), several)
        else:
            write(steps, [head(text, tokenizer) for text in texts], streams, cfg)


def score_texts(model, tokenizer, cfg):
    """Print how probable the texts of cfg.score are, the most probable per token first."""
    lines = []
    for text in map(read_text, cfg.score):
        ids = np.array(prompt_ids(text, tokenizer) if text else [])
        if len(ids) < 2:
            raise ValueError(f"score = {text!r} has {len(ids)} tokens, of which the first is not predicted: "
                             "give at least two")
        batches = list(windows(ids, model.config.block_size, stride=cfg.stride))
        sums = score(model, batches, tokenizer)
        found = metrics(*sums)
        lines.append((found["loss"], f"ln p {-sums[0]:.4f}, {sums[1]} tokens, {found['loss']:.4f} nats per "
                      f"token, PPL {found['ppl']:.2f}, {found['bpb']:.4f} bits per byte {text[:50]!r}"))
        if cfg.verbose:
            print_tokens(model, batches, tokenizer)
    for _, line in sorted(lines):
        print(line)


@torch.inference_mode()
def print_tokens(model, batches, tokenizer):
    """A line for each scored token: -ln p, p and its text."""
    for x, y in batches:
        logits = model(torch.from_numpy(x).to(next(model.parameters()).device))
        logp = logits.float().log_softmax(dim=-1).cpu()
        for b, t in zip(*np.nonzero(y != IGNORE), strict=True):
            value = logp[b, t, y[b, t]].item()
            print(f"{-value:8.4f} {math.exp(value):8.4f}  {tokenizer.decode([y[b, t]])!r}")


def shrink(model, quantized, dtype):
    """Bring the model to the size it is asked for, and say what came of it."""
    before = megabytes(model)
    if not quantized:
        model.to(dtype)
        return
    packed = quantize(model, quantized, dtype)
    way = SMALL[quantized][0].way if packed else "unpacking for each product, which saves memory, not time"
    print(f"{quantized} weights: {megabytes(model):.1f} MB, which were {before:.1f} MB; through {way}",
          file=sys.stderr)


def main(cfg):
    device = pick_device(cfg.device)
    model, tokenizer, ckpt = load_trained(cfg.ckpt, device)
    masked = not model.config.causal
    gaps = cfg.start != "-" and MASK in "".join(sum(prompts(cfg.start), []))
    if masked and (cfg.score or not gaps and cfg.start != "-"):
        raise ValueError(f"{cfg.ckpt} is a masked model: it fills gaps, as in --start='a {MASK} b', and "
                         "cannot continue or score a text")
    if gaps and not masked:
        raise ValueError(f"{cfg.ckpt} is a causal model: it continues a text and fills no {MASK}; train one "
                         "that does with causal = false")
    model.eval()
    facts = f"step {ckpt['step']}, " if "step" in ckpt else ""
    if "val_loss" in ckpt:
        facts += f"val {'masked ' * masked}loss {ckpt['val_loss']:.4f} nats per token, "
    print(f"{cfg.ckpt}: {facts}tokenizer {tokenizer.spec['kind']} with {tokenizer.vocab_size:,} tokens, "
          f"{model.num_params():,} parameters, on {device}", file=sys.stderr)
    if cfg.export:
        return export(cfg.export, model, tokenizer)
    shrink(model, cfg.quantize, pick_dtype(cfg.dtype, device))
    if cfg.score:
        return score_texts(model, tokenizer, cfg)
    for texts in prompts(cfg.start):
        respond(model, tokenizer, texts, cfg)


if __name__ == "__main__":
    run(main, SampleConfig)
