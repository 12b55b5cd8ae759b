"""
Write text with a trained model, one token after another.

    python sample.py --start="JULIET:" --temperature=0.8 --top_p=0.95
    python sample.py --ckpt=out/best.pt --start=FILE:prompt.txt --num_samples=4 --stop="ROMEO"
    python sample.py --ckpt=out-masked/best.pt --start="To be or [MASK] to be"    # a masked model fills gaps
    echo "reverse stone" | python sample.py --ckpt=out-letters/best.pt --start=-  # a model of pairs answers

The text goes to standard output, all else to standard error.

Top-k       Fan et al. 2018, https://arxiv.org/abs/1805.04833
Top-p       Holtzman et al. 2019, https://arxiv.org/abs/1904.09751
Min-p       Nguyen et al. 2024, https://arxiv.org/abs/2407.01082
Repetition  Keskar et al. 2019, https://arxiv.org/abs/1909.05858
"""

import codecs
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from config import run
from model import KVCache, load
from prepare import MASK, Tokenizer, ask

IGNORE = -100  # a target that is not scored: PyTorch's own default


@dataclass
class SampleConfig:
    ckpt: str = "out/best.pt"  # a checkpoint of train.py
    start: str = ""  # the prompt; FILE:path reads it from a file, - takes each line of standard input
    num_samples: int = 1  # texts to write
    max_new_tokens: int = 500  # tokens to write, at most; the text may end before
    temperature: float = 0.8  # divides the logits: below 1 favours likely tokens, 0 takes the likeliest
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of tokens that has the probability p; 1: all
    min_p: float = 0.0  # keep tokens at least min_p times as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # above 1: tokens that the text already has become less likely
    stop: str = ""  # a text to end before, such as "ROMEO:"
    seed: int = 1337  # the same seed, the same text
    kv_cache: bool = True  # keep keys and values of the text so far: the same tokens, sooner
    stream: bool = True  # print a single text as it is written
    device: str = "auto"  # auto: cuda, mps or cpu, the first there is
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 where native on cuda

    def __post_init__(self):
        for name in "num_samples", "max_new_tokens", "temperature", "top_k", "top_p", "min_p":
            if getattr(self, name) < (name == "num_samples"):
                least = "at least 1" if name == "num_samples" else "0 or more"
                raise ValueError(f"{name} = {getattr(self, name)} must be {least}")
        for name in "top_p", "min_p":
            if getattr(self, name) > 1:
                raise ValueError(f"{name} = {getattr(self, name)} is a probability: it must be at most 1")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty = {self.repetition_penalty} must be above 0; 1: no penalty")


# ------------------------------------------------------------------------------- filters
# logits (B, V) → logits, with -inf for the tokens ruled out: softmax then shares out what was theirs.

def penalize(logits, seen, penalty):
    """Make the tokens that seen (B, V) marks less likely: positive logits / penalty, negative · penalty."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits, k):
    """Exactly k tokens stay, also where several are as likely as the k-th."""
    best, ids = logits.topk(min(k, logits.size(-1)))  # (B, k)
    return torch.full_like(logits, -math.inf).scatter(-1, ids, best)


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
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # ≤ 0: what overflows becomes -inf
    if top_k:
        logits = keep_top_k(logits, top_k)
    if top_p < 1:
        logits = keep_top_p(logits, top_p)
    if min_p:
        logits = keep_min_p(logits, min_p)
    total = logits.double().softmax(dim=-1).cumsum(dim=-1)  # (B, V), in float64: 50,000 terms add up
    return torch.searchsorted(total, u[:, None].to(total) * total[:, -1:], right=True)[:, 0]


# ------------------------------------------------------------------------------- generation

@torch.inference_mode()
def generate(model, idx, max_new_tokens, vocab_size, seed=1337, kv_cache=True, **choice):
    """Continue the texts idx (B, T): yields ids (B,), the next token of each row, max_new_tokens times.

    Ids from vocab_size on only pad the matrix and are never chosen. Row b draws from the random stream
    (seed, b), so its text does not depend on the other rows. When the context outgrows block_size its newer
    half is read anew, with or without cache. `choice` are the settings of next_token.
    """
    B, size = len(idx), model.config.block_size
    streams = [np.random.default_rng((seed, b)) for b in range(B)]
    cache = KVCache(model.config, B, idx.device, model.lm_head.weight.dtype) if kv_cache else None
    seen = torch.zeros(B, vocab_size, dtype=torch.bool, device=idx.device).scatter_(1, idx, True)
    window = idx[:, -size:]  # the context, of which the cache has read the first part
    for _ in range(max_new_tokens):
        new = window[:, cache.lengths[0]:] if cache else window
        logits = model.head(model.hidden(new, cache)[:, -1])[:, :vocab_size].float()  # (B, V)
        if logits.device.type == "mps":  # which has no float64
            logits, seen = logits.cpu(), seen.cpu()
        u = torch.tensor([stream.random() for stream in streams], dtype=torch.float64, device=logits.device)
        token = next_token(logits, u, seen, **choice)
        yield token
        seen.scatter_(1, token[:, None], True)
        window = torch.cat((window, token[:, None].to(idx.device)), dim=1)
        if window.size(1) > size:
            window = window[:, -max(size // 2, 1):]
            if cache:
                cache.lengths = [0] * B


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
    device, nats, tokens, num_bytes = model.lm_head.weight.device, 0.0, 0, 0
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
    """(model, tokenizer, checkpoint). Raises ValueError, naming the runs there are, if it is missing."""
    if not Path(path).is_file():
        found = ", ".join(sorted(map(str, Path().glob("*/best.pt")))) or "none; python train.py makes one"
        raise ValueError(f"{path} does not exist; checkpoints here: {found}")
    model, ckpt = load(path, device, **changes)
    if "tokenizer" not in ckpt:
        raise ValueError(f"{path} is no checkpoint of train.py: it holds no tokenizer")
    return model, Tokenizer(ckpt["tokenizer"]), ckpt


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


def write(steps, prompt, tokenizer, cfg):
    """Print the texts, whose tokens (B,) `steps` yields: a single one as it grows, several at the end."""
    streams = [TextStream(tokenizer, cfg.stop) for _ in range(cfg.num_samples)]
    live = cfg.stream and cfg.num_samples == 1
    out = [prompt] * cfg.num_samples

    def add(b, text):
        out[b] += text
        if live:
            print(text, end="", flush=True)

    if live:
        print(prompt, end="", flush=True)
    try:
        for tokens in tqdm(steps, "tokens", cfg.max_new_tokens, disable=live):
            for b, token in enumerate(tokens.tolist()):
                add(b, streams[b].feed(token))
            if all(stream.done for stream in streams):
                break
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    for b, stream in enumerate(streams):
        add(b, stream.finish())
        show("" if live else out[b], cfg)


def show(text, cfg):
    print(text)
    if cfg.num_samples > 1:
        print("-" * 15)


def write_reversed(steps, ids, tokenizer, cfg):
    """Print texts that a model of reversed text wrote from their ends to their starts."""
    rows = [[] for _ in range(cfg.num_samples)]
    for tokens in tqdm(steps, "tokens", cfg.max_new_tokens):
        for row, token in zip(rows, tokens.tolist(), strict=True):
            row.append(token)
    for row in rows:
        row = row[:row.index(tokenizer.eot)] if tokenizer.eot in row else row
        show(tokenizer.decode([i for i in (ids + row)[::-1] if i != tokenizer.eot]), cfg)


def prompts(start):
    """The texts to continue: one, or with - each line of standard input."""
    if start == "-":
        return (line.rstrip("\n") for line in sys.stdin)
    return [Path(start[5:]).read_text(encoding="utf-8") if start.startswith("FILE:") else start]


def respond(model, tokenizer, prompt, cfg, device):
    """Write cfg.num_samples texts that go on from, or fill the gaps of, a prompt."""
    choice = {name: getattr(cfg, name) for name in
              ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")}
    ids = prompt_ids(prompt, tokenizer)
    idx = torch.tensor([ids] * cfg.num_samples, device=device)  # (B, T)
    if not model.config.causal:
        if len(ids) > model.config.block_size:
            raise ValueError(f"start has {len(ids)} tokens, but block_size = {model.config.block_size}")
        if cfg.num_samples == 1:  # one text: the likeliest
            choice["temperature"] = 0
        for row in fill(model, idx, tokenizer.special[MASK], **choice).tolist():
            show(tokenizer.decode(row), cfg)
        return
    steps = generate(model, idx, cfg.max_new_tokens, tokenizer.vocab_size, kv_cache=cfg.kv_cache, **choice)
    if tokenizer.spec.get("reverse"):
        write_reversed(steps, ids, tokenizer, cfg)
    else:
        write(steps, "" if tokenizer.spec.get("pairs") else prompt, tokenizer, cfg)


def main(cfg):
    device = pick_device(cfg.device)
    model, tokenizer, ckpt = load_trained(cfg.ckpt, device)
    if not model.config.causal and not (cfg.start == "-" or MASK in "".join(prompts(cfg.start))):
        raise ValueError(f"{cfg.ckpt} is a masked model: it fills gaps, as in --start='a {MASK} b', and "
                         "cannot continue a text")
    model.eval().to(pick_dtype(cfg.dtype, device))
    loss = ckpt.get("val_loss", math.nan)
    what = "loss" if model.config.causal else "masked loss"
    print(f"{cfg.ckpt}: step {ckpt.get('step')}, val {what} {loss:.4f} nats per token, "
          f"tokenizer {tokenizer.spec['kind']} with {tokenizer.vocab_size:,} tokens, "
          f"{model.num_params():,} parameters, on {device}", file=sys.stderr)
    for prompt in prompts(cfg.start):
        respond(model, tokenizer, prompt, cfg, device)


if __name__ == "__main__":
    run(main, SampleConfig)
