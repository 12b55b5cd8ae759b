"""
Train a GPT on what prepare.py wrote.

    python train.py                                              # two minutes on two CPU cores
    python train.py config/gpt2.toml --n_layer=6 --out_dir=out-gpt2
    python train.py out/config.toml --resume                     # go on where a run stopped, exactly
    python train.py --init_from=out/best.pt --out_dir=out-mine   # fine-tune
    torchrun --nproc_per_node=2 train.py --gradient_accumulation_steps=2   # --fsdp: a model too large for one

writes to out_dir: last.pt (to resume), best.pt (to sample from), log.jsonl, loss.png and config.toml.

Micro-batch i of a run is a function of (seed, i) alone, and so is its dropout. So nothing random needs
saving, a resumed run repeats the uninterrupted one to the last bit, and N processes, which share out the
micro-batches of a step, take the very steps of one.

AdamW             Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101
WSD               Hu et al. 2024, https://arxiv.org/abs/2404.06395
Muon              Jordan et al. 2024, https://kellerjordan.github.io/posts/muon
FSDP              Zhao et al. 2023, https://arxiv.org/abs/2304.11277
Masked LM         Devlin et al. 2018, https://arxiv.org/abs/1810.04805
Label smoothing   Szegedy et al. 2015, https://arxiv.org/abs/1512.00567
Distillation      Hinton et al. 2015, https://arxiv.org/abs/1503.02531
"""

import gc
import json
import math
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from config import narrow, run, to_toml
from model import GPT, GPTConfig, save
from prepare import MASK, Tokenizer, data_path, load_data
from sample import (IGNORE, TextStream, generate, load_trained, metrics, pick_device, pick_dtype, prompt_ids,
                    score, windows)


@dataclass
class TrainConfig(GPTConfig):
    vocab_size: int = 0  # V; 0: that of the data; more only pad the matrix, to a size that GPUs like
    # files
    data_dir: str = "data"  # what prepare.py wrote
    out_dir: str = "out"  # the folder of this run
    init_from: str = ""  # a checkpoint to start from (fine-tuning), whose model settings then count
    resume: bool = False  # go on from out_dir/last.pt
    overwrite: bool = False  # delete the run in out_dir and start anew
    eval_only: bool = False  # score init_from, or out_dir/best.pt, on the whole validation split, and end
    # batches
    batch_size: int = 8  # B: sequences in a micro-batch, one forward pass
    gradient_accumulation_steps: int = 1  # micro-batches in a step
    max_iters: int = 1800  # steps: updates of the weights
    # objective; causal = true: predict the next token, causal = false: predict masked ones
    mlm_probability: float = 0.15  # causal = false: the share of tokens to hide and predict
    label_smoothing: float = 0.0  # ε: the target gets 1 - ε of the probability, all V tokens share the rest
    train_temperature: float = 1.0  # divides the logits in the training loss; for research
    teacher: str = ""  # a checkpoint of the same vocabulary to learn from as well (distillation); empty: none
    distill_alpha: float = 0.5  # α, the weight of the teacher; 1 - α is that of the data
    distill_temperature: float = 2.0  # τ, softens both distributions, to show the unlikely tokens too
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks, adamw for the rest
    learning_rate: float = 4e-3  # at its peak, after the warm-up
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # how it falls after the warm-up
    warmup_iters: int = 100  # steps of warm-up, in which it rises
    min_lr_frac: float = 0.1  # where it ends, as a fraction of the peak
    decay_frac: float = 0.2  # wsd: the share of all steps in which it falls, after being constant
    weight_decay: float = 0.1  # of matrices; vectors, such as biases, do not decay
    beta1: float = 0.9  # AdamW: how long the mean of the gradient remembers (Muon: 0.95)
    beta2: float = 0.99  # AdamW: how long that of its square does; 0.95 where a step has many tokens
    grad_clip: float = 1.0  # the largest norm of the gradient; 0: any
    ema_decay: float = 0.0  # above 0: evaluate, and keep as best.pt, a mean of the weights of all steps, in
    #   which those of n steps ago count ema_decay to the power of n; 0: the weights themselves
    # evaluation
    eval_interval: int = 250  # steps between evaluations; 0: only at the end
    eval_iters: int = 50  # batches of an evaluation, the same ones each time; 0: the whole validation split
    eval_sample: int = 0  # tokens of text to write at each evaluation
    checkpoint_interval: int = 0  # steps between savings of last.pt; 0: at each evaluation
    log_interval: int = 10  # steps between lines of the log
    # system
    seed: int = 1337  # of the first weights, the batches and dropout
    device: str = "auto"  # auto: cuda, mps or cpu, the first there is
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto: bfloat16
    #   where native on cuda, else float16 on cuda, else float32
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile: a wait, then faster; auto: on cuda
    activation_checkpointing: bool = False  # keep a block's input only, and compute it again for the
    #   gradient: a third more time, far less memory
    fsdp: bool = False  # torchrun: share out weights, gradients and optimizer state too, for large models
    peak_tflops: float = 0.0  # what your device can do, in TFLOP/s, to be told how much of it is used (MFU)

    def __post_init__(self):
        super().__post_init__()
        for name in "batch_size", "gradient_accumulation_steps", "max_iters", "log_interval":
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("vocab_size", "learning_rate", "warmup_iters", "weight_decay", "grad_clip", "seed",
                     "eval_interval", "eval_iters", "eval_sample", "checkpoint_interval", "peak_tflops"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        for name in "min_lr_frac", "decay_frac", "beta1", "beta2", "label_smoothing", "distill_alpha":
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be between 0 and 1")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay = {self.ema_decay} must be at least 0 and less than 1")
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"mlm_probability = {self.mlm_probability} must be above 0 and at most 1")
        for name in "train_temperature", "distill_temperature":
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be above 0")
        if self.eval_sample and not self.causal:
            raise ValueError(f"eval_sample = {self.eval_sample}: only causal models write texts")
        for name, value in dict(optimizer="muon", dtype="float16", compile="true").items():
            if self.fsdp and getattr(self, name) == value:
                raise ValueError(f"{name} = {value} does not go together with fsdp = true")
        for name in "eval_sample", "ema_decay":
            if self.fsdp and getattr(self, name):
                raise ValueError(f"{name} = {getattr(self, name)} does not go together with fsdp = true")


COMPILER = {"cpp.use_decompose_tanh": True}  # on CPUs GELU's tanh is made of exp: a step is a tenth faster
ORDERS = ("resume", "overwrite", "eval_only")  # what to do with a run; the other settings make it what it is
# of those, what a resumed run may change
FREE = {"out_dir", "max_iters", "eval_interval", "eval_iters", "eval_sample", "checkpoint_interval",
        "log_interval", "device", "compile", "activation_checkpointing", "fsdp", "peak_tflops"}


# ------------------------------------------------------------------------------- processes

def place():
    """(our number among the processes that torchrun started, how many they are); (0, 1) without it."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def total(numbers):
    """The numbers, each summed over all processes; a GPU works on meanwhile."""
    if not dist.is_initialized():
        return numbers
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def whole(tensor):
    """A tensor as it is, or put together from the parts that the processes have (FSDP); all must ask."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part_like(p, tensor):
    """The inverse: what this process has of a whole tensor that is shared out as the parameter p is."""
    if not hasattr(p, "full_tensor"):
        return tensor.to(p.device)
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements)


def say(text, file=None):
    """Print it once, whatever the number of processes, and above the progress bar."""
    if place()[0] == 0:
        tqdm.write(text, file=file or sys.stdout)


@contextmanager
def processes(cfg):
    """Join the processes that torchrun started, if it did: nccl for what is on a GPU, gloo for the rest."""
    if not dist.is_torchelastic_launched():
        if cfg.fsdp:
            raise ValueError("fsdp = true shares a model out among processes: start them with torchrun "
                             "--nproc_per_node=2 train.py …, or leave it out")
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if pick_device(cfg.device).type == "cuda" else "gloo")
    try:
        if cfg.gradient_accumulation_steps % place()[1]:
            raise ValueError(f"gradient_accumulation_steps = {cfg.gradient_accumulation_steps} must be a "
                             f"multiple of the {place()[1]} processes that share them")
        yield
    finally:
        gc.collect()  # DDP, which refers to itself, holds gloo's threads; they must not outlive Python
        dist.destroy_process_group()


# ------------------------------------------------------------------------------- batches

def rng(seed, i):
    """The randomness of micro-batch i. (seed + i would give the next seed the same batches, one later.)"""
    return np.random.default_rng((seed, i))


def get_batch(ids, B, T, g):
    """Inputs x and targets y, (B, T) each, from random places in ids (N,): y[b, t] = x[b, t + 1].

    A window needs T + 1 tokens. Of N tokens it can start at 0 … N - T - 1, which `integers(N - T)` draws.
    """
    starts = g.integers(len(ids) - T, size=B)
    rows = np.stack([ids[s:s + T + 1] for s in starts], dtype=np.int64)  # (B, T + 1), the only copy
    return rows[:, :-1], rows[:, 1:]


def pad_pairs(ids, rows, picked):
    """The pairs `picked` as x and y, (B, T) each, padded to the longest: only the responses are targets.

    rows holds where each pair's prompt and response start: prompt 0, response 0, prompt 1, … With a causal
    mask no token sees the padding behind it.
    """
    parts = [ids[rows[2 * i]:rows[2 * i + 2]] for i in picked]
    T = max(map(len, parts)) - 1
    x = np.zeros((len(picked), T), dtype=np.int64)
    y = np.full((len(picked), T), IGNORE, dtype=np.int64)
    for b, (i, part) in enumerate(zip(picked, parts, strict=True)):
        response = rows[2 * i + 1] - rows[2 * i]
        x[b, :len(part) - 1] = part[:-1]
        y[b, response - 1:len(part) - 1] = part[response:]
    return x, y


def corrupt(ids, chosen, dice, noise, mask_id):
    """BERT's inputs and targets for ids (B, T): of the chosen tokens 80 % are masked, 10 % noise, 10 % stay.

    The targets are the chosen ones as they were. dice (B, T) are uniform in [0, 1), noise (B, T) random ids.
    """
    x = np.where(chosen & (dice < 0.8), mask_id, ids)
    x = np.where(chosen & (dice >= 0.8) & (dice < 0.9), noise, x)
    return x, np.where(chosen, ids, IGNORE)


def mask_tokens(ids, tokenizer, mlm_probability, g):
    """corrupt with the random numbers of g: k = round(p·T) tokens of each row, at least one, as BERT does.

    Special tokens are neither chosen nor drawn as noise: they have no text, num_bytes = 0.
    """
    ordinary = np.flatnonzero(tokenizer.num_bytes)
    order = np.where(tokenizer.num_bytes[ids] > 0, g.random(ids.shape), 2.0)  # special ones come last
    k = max(1, round(mlm_probability * ids.shape[1]))
    chosen = (order.argsort(axis=1).argsort(axis=1) < k) & (order < 2)
    noise = ordinary[g.integers(len(ordinary), size=ids.shape)]
    return corrupt(ids, chosen, g.random(ids.shape), noise, tokenizer.special[MASK])


# ------------------------------------------------------------------------------- objective, optimizer, step

class Objective(nn.Module):
    """(x, y) → the summed loss in nats and the number of targets that it sums over.

    Cross-entropy: -Σ ln p(y[b, t] | x), where a causal model sees x[b, :t + 1] only. With a teacher
    (1 - α) · cross-entropy + α τ² KL(teacher_τ ‖ student_τ); the τ² undoes the 1/τ² in KL's gradient.
    Sums and counts add up over micro-batches and processes; means of means would not.

    The logits (B·T, V) of a large vocabulary are larger than all else. They are made in parts, none of which
    is kept: the gradient has each part computed again.
    """
    most = 2 ** 25  # logits at a time: 134 MB of float32

    def __init__(self, model, label_smoothing=0.0, temperature=1.0, teacher=None, alpha=0.5, tau=2.0):
        super().__init__()
        self.model, self.teacher = model, teacher
        self.label_smoothing, self.temperature = label_smoothing, temperature
        self.alpha, self.tau = alpha, tau

    def forward(self, x, y=None):
        if y is None:
            return self.model(x)
        y, theirs = y.flatten(), None
        hidden = self.model.hidden(x).flatten(0, 1)  # (B·T, C)
        if self.teacher:
            with torch.no_grad():
                theirs = self.teacher.hidden(x).flatten(0, 1)
        rows = max(self.most // self.model.config.vocab_size, 1)
        if len(y) <= rows:
            nats = self.nats(hidden, y, theirs)
        else:
            parts = [(hidden[i:i + rows], y[i:i + rows], theirs if theirs is None else theirs[i:i + rows])
                     for i in range(0, len(y), rows)]
            nats = sum(checkpoint(self.nats, *part, use_reentrant=False) for part in parts)
        return nats, (y != IGNORE).sum()

    def nats(self, hidden, y, theirs=None):
        """The loss of rows: hidden (N, C), y (N,), and the teacher's hidden (N, ·)."""
        logits = self.model.head(hidden).float()  # (N, V)
        nats = F.cross_entropy(logits / self.temperature, y, ignore_index=IGNORE, reduction="sum",
                               label_smoothing=self.label_smoothing)
        if theirs is not None:
            with torch.no_grad():
                theirs = self.teacher.head(theirs).float()
            V = min(logits.size(1), theirs.size(1))  # beyond the vocabulary there is padding only
            kl = F.kl_div(F.log_softmax(logits[:, :V] / self.tau, dim=1),
                          F.log_softmax(theirs[:, :V] / self.tau, dim=1), reduction="none", log_target=True)
            nats = (1 - self.alpha) * nats + self.alpha * self.tau ** 2 * kl.sum(dim=1)[y != IGNORE].sum()
        return nats


def get_lr(step, cfg):
    """The learning rate of a step: up in a straight line, then down by the schedule to min_lr_frac of it."""
    if step < cfg.warmup_iters:
        return cfg.learning_rate * (step + 1) / (cfg.warmup_iters + 1)
    decay_iters = cfg.max_iters - cfg.warmup_iters
    if cfg.schedule == "wsd":  # warm-up, stable, decay
        decay_iters = min(decay_iters, round(cfg.decay_frac * cfg.max_iters))
    t = min(max(1 - (cfg.max_iters - step) / max(decay_iters, 1), 0), 1)  # 0 … 1 through the decay
    height = {"cosine": 0.5 * (1 + math.cos(math.pi * t)), "linear": 1 - t, "wsd": 1 - t, "constant": 1.0}
    return cfg.learning_rate * (cfg.min_lr_frac + (1 - cfg.min_lr_frac) * height[cfg.schedule])


def make_optimizers(model, cfg):
    """AdamW, and before it Muon for the matrices of the blocks, if so set. Matrices and embeddings decay;
    biases and the gains of norms, which are vectors, do not.

    Muon makes an update whose singular values are all about 1, scaled to the size that AdamW's have, so that
    one learning rate suits both.
    """
    params = dict(model.named_parameters())  # a tied matrix comes once
    muon = [p for name, p in params.items() if cfg.optimizer == "muon" and ".h." in name and p.dim() == 2]
    rest = [p for p in params.values() if all(p is not q for q in muon)]
    groups = [dict(params=[p for p in rest if p.dim() >= 2], weight_decay=cfg.weight_decay),
              dict(params=[p for p in rest if p.dim() < 2], weight_decay=0.0)]
    fused = all(p.device.type in ("cpu", "cuda") for p in rest)
    optimizers = [torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=fused)]
    if muon:
        optimizers.insert(0, torch.optim.Muon(muon, lr=cfg.learning_rate, weight_decay=cfg.weight_decay,
                                              adjust_lr_fn="match_rms_adamw"))
    return optimizers


# ------------------------------------------------------------------------------- log and curves

def write_log(out_dir, **record):
    if place()[0]:
        return
    with open(Path(out_dir, "log.jsonl"), "a", encoding="utf-8") as f:
        f.write(json.dumps(record) + "\n")


def read_log(out_dir, *names):
    """The columns `names` of a run's log as lists, from the lines that have them all.

    A run that was killed and resumed has some steps twice: the later line counts. A half line, which a
    kill can leave, is passed over.
    """
    records = {}
    for line in Path(out_dir, "log.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if all(name in record for name in names):
            records[record["step"]] = [record[name] for name in names]
    rows = [records[step] for step in sorted(records)]
    return [[row[i] for row in rows] for i in range(len(names))]


def plot_log(out_dir, vocab_size, unigram_entropy, causal=True):
    """Draw loss and perplexity, or a masked model's loss, into out_dir/loss.png; returns the figure."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11 if causal else 6, 4), layout="constrained")
    axes = figure.subplots(1, 1 + causal, squeeze=False)[0]
    for axis, f in zip(axes, (lambda x: x, lambda x: np.exp(np.minimum(x, 700))), strict=False):
        for name, label, style in ("loss", "training", "-"), ("val_loss", "validation", "o-"):
            steps, losses = read_log(out_dir, "step", name)
            axis.plot(steps, f(np.array(losses, dtype=float)), style, label=label, markersize=4, linewidth=1)
        axis.axhline(f(math.log(vocab_size)), color="gray", linestyle=":", label="knowing nothing (ln V, V)")
        axis.axhline(f(unigram_entropy), color="gray", linestyle="--", label="knowing tokens' frequencies")
        axis.set_xlabel("step")
        axis.legend()
    axes[0].set_ylabel("loss (nats per token)" if causal else "masked loss (nats per masked token)")
    if causal:
        axes[1].set(ylabel="perplexity = exp(loss)", yscale="log")
    figure.savefig(Path(out_dir, "loss.png"), dpi=120)
    return figure


# ------------------------------------------------------------------------------- checkpoints

@dataclass
class Run:
    """What a step changes, and what it works with."""
    model: nn.Module  # the bare model, which is what gets saved
    objective: nn.Module  # what is trained: the model in its objective, compiled perhaps
    optimizers: list  # each has its share of the parameters
    scaler: torch.amp.GradScaler
    dtype: torch.dtype  # of matrix products
    meta: dict  # of the data
    tokenizer: object
    device: torch.device
    average: nn.Module | None  # the model with averaged weights, where they are asked for (ema_decay)
    step: int = 0  # updates so far
    best: float = math.inf  # the lowest validation loss so far
    seconds: float = 0.0  # of compiling
    maps: dict = field(default_factory=dict)  # the data set's open files

    def scored(self):
        """The model that is evaluated and kept as best.pt."""
        return self.average or self.model

    def amp(self):
        """Matrix products in dtype; what needs the range (norms, softmax, the loss) stays in float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def file(self, role, cfg, dtype=None, i=0):
        """A file of the data set as an array, for batch i. It is opened anew every hundred batches: an open
        map collects all pages ever read."""
        age = i // 100
        if (role, age) not in self.maps:
            ids = np.memmap(data_path(cfg.data_dir, self.meta, role), dtype or self.meta["dtype"], mode="r")
            self.maps = {key: array for key, array in self.maps.items() if key[1] == age}
            self.maps[role, age] = np.asarray(ids)  # whose slices are cheaper than a memmap's
        return self.maps[role, age]

    def train_batch(self, i, cfg):
        """Micro-batch i, on the host: x and y, (B, T) each."""
        g, ids = rng(cfg.seed, i), self.file("train", cfg, i=i)
        if self.tokenizer.spec.get("pairs"):
            rows = self.file("train_rows", cfg, np.int64, i)
            x, y = pad_pairs(ids, rows, g.integers(len(rows) // 2, size=cfg.batch_size))
        else:
            x, y = get_batch(ids, cfg.batch_size, cfg.block_size, g)
        if not cfg.causal:
            x, y = mask_tokens(x, self.tokenizer, cfg.mlm_probability, g)
        return torch.from_numpy(x), torch.from_numpy(y)

    def val_batches(self, cfg, whole):
        """The whole validation split, or eval_iters batches spread evenly over it: always the same (x, y)."""
        ids, B = self.file("val", cfg), cfg.batch_size
        most = 0 if whole else cfg.eval_iters * B
        if self.tokenizer.spec.get("pairs"):
            rows = self.file("val_rows", cfg, np.int64)
            n = len(rows) // 2
            picked = np.linspace(0, n - 1, min(most or n, n)).round().astype(int)
            yield from (pad_pairs(ids, rows, picked[i:i + B]) for i in range(0, len(picked), B))
            return
        for n, (x, y) in enumerate(windows(ids, self.model.config.block_size, B, max_windows=most)):
            if not cfg.causal:
                g = np.random.default_rng((cfg.seed, n, 1))  # not a stream of training
                x, y = mask_tokens(x, self.tokenizer, cfg.mlm_probability, g)
            yield x, y


def settings_of(cfg):
    return {name: value for name, value in asdict(cfg).items() if name not in ORDERS}


def whole_weights(model):
    """The model's state_dict, put together where processes share it out."""
    weights = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return {name: weights.get(name, weights["transformer.wte.weight"]) for name in model.state_dict()}  # tied


def save_last(run, cfg):
    """last.pt: all that is needed to go on, the optimizer's state by the parameters' names."""
    names = {p: name for name, p in run.model.named_parameters()}
    weights, state = whole_weights(run.model), {}
    for p, values in [pair for optimizer in run.optimizers for pair in optimizer.state.items()]:
        state[names[p]] = {key: whole(value) for key, value in values.items()}
    if place()[0] == 0:
        save(Path(cfg.out_dir, "last.pt"), run.model, weights, step=run.step, settings=settings_of(cfg),
             tokenizer=run.tokenizer.spec, data=run.meta["files"], scaler=run.scaler.state_dict(),
             optimizer=state, average=run.average and run.average.state_dict())


def read_last(cfg, meta):
    """out_dir/last.pt to resume from, None for a new run. Raises ValueError if out_dir holds another run."""
    path, best = Path(cfg.out_dir, "last.pt"), Path(cfg.out_dir, "best.pt")
    if cfg.overwrite:
        return None
    if not path.exists():
        if cfg.resume:
            raise ValueError(f"{path} does not exist: there is nothing to resume; leave out --resume")
        if best.exists():
            raise ValueError(f"{best} exists: choose another --out_dir, or delete it with --overwrite")
        return None
    last = load_trained(path)[2]
    if "optimizer" not in last:
        raise ValueError(f"{path} holds weights only: start a new run from them with --init_from={path}")
    ours, theirs = settings_of(cfg) | dict(data=meta["files"]), last["settings"] | dict(data=last["data"])
    changed = {name: f"{name} = {ours[name]!r}, which was {theirs.get(name)!r}" if name != "data" else
               "the data, which was prepared anew" for name in ours if theirs.get(name) != ours[name]}
    go_on = f"go on with: python train.py {cfg.out_dir}/config.toml --resume"
    for name, what in changed.items():
        if name not in FREE and cfg.resume:
            raise ValueError(f"a resumed run cannot change {what}: {go_on}, or start another run from its "
                             f"weights with --init_from={path}")
        if name not in FREE:
            raise ValueError(f"out_dir = {cfg.out_dir!r} holds another run ({what}): choose another "
                             f"--out_dir, delete that run with --overwrite, or {go_on}")
    if not cfg.resume and last["step"] < cfg.max_iters:
        raise ValueError(f"out_dir = {cfg.out_dir!r} holds this run, stopped at step {last['step']}: go on "
                         "with --resume, or start over with --overwrite")
    if cfg.resume and changed:
        say("changed since the run began: " + "; ".join(changed.values()))
    return last


def restore(run, cfg, last):
    """Put a run, whose model has its weights already, back where save_last left it."""
    names = {p: name for name, p in run.model.named_parameters()}
    for optimizer in run.optimizers:
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            for key, value in last["optimizer"].get(names[p], {}).items():
                alike = value.shape == p.shape  # not so Adam's count of steps
                optimizer.state[p][key] = part_like(p, value) if alike else value.to(run.device)
    run.scaler.load_state_dict(last["scaler"])
    if run.average:
        run.average.load_state_dict(last["average"])
    run.step = last["step"]
    if (best := Path(cfg.out_dir, "best.pt")).exists():  # later than last.pt: its step's evaluation
        run.best = load_trained(best)[2]["val_loss"]


# ------------------------------------------------------------------------------- the run

def build_model(cfg, tokenizer, last):
    """A new model, that of init_from, or one for the weights of `last`. Raises ValueError for a misfit."""
    if last:
        model = GPT(GPTConfig(**last["model_config"]))
        model.load_state_dict(last["model"])
        return model
    if not cfg.init_from:
        if cfg.vocab_size and cfg.vocab_size < tokenizer.vocab_size:
            raise ValueError(f"vocab_size = {cfg.vocab_size} is less than the {tokenizer.vocab_size} tokens "
                             f"of the data in {cfg.data_dir}; 0 takes as many")
        torch.manual_seed(cfg.seed)
        model_cfg = narrow(cfg, GPTConfig)
        model_cfg.vocab_size = cfg.vocab_size or tokenizer.vocab_size
        return GPT(model_cfg)
    model = load_fitting("init_from", cfg, tokenizer, dropout=cfg.dropout, block_size=cfg.block_size)
    replaced = {name: value for name, value in asdict(model.config).items()
                if name != "vocab_size" and getattr(cfg, name) != value}
    if replaced:
        settings = ", ".join(f"{name} = {value}" for name, value in replaced.items())
        say(f"from {cfg.init_from}: {settings}")
    return model


def load_fitting(name, cfg, tokenizer, **changes):
    """The model of the checkpoint that a setting names. Raises ValueError if it is of another kind."""
    path = getattr(cfg, name)
    model, theirs, _ = load_trained(path, **changes)
    if model.config.causal != cfg.causal:
        theirs, ours = ("a causal" if causal else "a masked" for causal in (model.config.causal, cfg.causal))
        raise ValueError(f"{name} = {path!r} is {theirs} model, but causal = {str(cfg.causal).lower()} "
                         f"trains {ours} one")
    ours, theirs = tokenizer.spec, theirs.spec  # the same tokens may have come by another name
    if any(ours.get(key) != theirs.get(key) for key in ("chars", "ranks", "special")):
        raise ValueError(f"{name} = {path!r} has another vocabulary ({theirs['kind']}) than the data "
                         f"in {cfg.data_dir} ({ours['kind']}): prepare with --tokenizer=FOLDER of its data")
    return model


def make_objective(model, cfg, tokenizer):
    """The training objective. Raises ValueError for a teacher that does not fit."""
    teacher = None
    if cfg.teacher:
        teacher = load_fitting("teacher", cfg, tokenizer).eval().requires_grad_(False)
        if teacher.config.block_size < cfg.block_size:
            raise ValueError(f"block_size = {cfg.block_size} is more than the {teacher.config.block_size} "
                             f"that teacher = {cfg.teacher!r} can see")
    return Objective(model, cfg.label_smoothing, cfg.train_temperature, teacher, cfg.distill_alpha,
                     cfg.distill_temperature)


def with_mask(tokenizer):
    """The tokenizer with one more token, [MASK], which no data file has."""
    special = tokenizer.special | {MASK: tokenizer.special.get(MASK, tokenizer.vocab_size)}
    return Tokenizer(tokenizer.spec | dict(special=special))


def check_data(cfg, meta):
    """Raise ValueError if the data cannot be cut into what a batch needs."""
    if meta["tokenizer"].get("pairs"):
        if not cfg.causal:
            raise ValueError(f"causal = false: the pairs in {cfg.data_dir} train causal models, masked "
                             "ones learn from texts")
        rows = np.concatenate([np.fromfile(data_path(cfg.data_dir, meta, f"{split}_rows"), np.int64)[::2]
                               for split in ("train", "val")])
        if (longest := int(np.diff(rows).max()) - 1) > cfg.block_size:
            raise ValueError(f"block_size = {cfg.block_size} is too small for the longest pair, give "
                             f"--block_size={longest}")
        return
    for split, facts in meta["splits"].items():
        if facts["tokens"] < cfg.block_size + 1:
            fits = max(1, min(facts["tokens"] for facts in meta["splits"].values()) - 1)
            raise ValueError(f"{split} split in {cfg.data_dir} has {facts['tokens']} tokens, block_size = "
                             f"{cfg.block_size} needs {cfg.block_size + 1}: more text or --block_size={fits}")


def make_run(cfg, meta, tokenizer, last=None):
    """All that a run needs, as it begins, or with a checkpoint `last` as it was then."""
    device = pick_device(cfg.device)
    if dist.is_initialized() and device.type == "cuda":  # each process has its own card
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    dtype = pick_dtype(cfg.dtype, device, otherwise="float16")
    if device.type == "cpu" and dtype == torch.float16:
        say("warning: float16 is slow on a CPU; --dtype=float32 is meant for it", file=sys.stderr)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: products of float32 with 10 bits after the point
    if device.type == "cpu":
        keep_memory()
    tokenizer = tokenizer if cfg.causal else with_mask(tokenizer)
    model = build_model(cfg, tokenizer, last)
    average = deepcopy(model).requires_grad_(False).eval().to(device) if cfg.ema_decay else None
    if cfg.activation_checkpointing:
        save_activations(model)
    objective = make_objective(model, cfg, tokenizer)
    if cfg.fsdp:
        shard(objective, device)
    objective.to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(model, objective, make_optimizers(model, cfg), scaler, dtype, meta, tokenizer, device, average)
    if last:
        restore(run, cfg, last)
    if not cfg.fsdp and (cfg.compile == "true" or cfg.compile == "auto" and device.type == "cuda"):
        run.objective = compiled(run, cfg)
    if dist.is_initialized() and not cfg.fsdp:
        run.objective = DDP(run.objective)
    return run


def keep_memory():
    """Let the process keep freed blocks of up to 32 MB for its next step. C's library on Linux returns those
    above 128 kB, and the system clears them before it hands them out again, until one as large was freed
    (mallopt(3), M_MMAP_THRESHOLD): an eighth of a small model's step."""
    torch.empty(2 ** 25 - 2 ** 14, dtype=torch.uint8)


def save_activations(model):
    """Keep only what goes into a block; the gradient has the rest computed again (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174)."""
    for block in model.transformer.h:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def shard(objective, device):
    """Share the weights out among the processes: those of a block are together only while it works."""
    from torch.distributed.fsdp import fully_shard  # imports much that nobody else needs
    mesh = dist.init_device_mesh(device.type, place()[1:])
    for block in objective.model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)


def compiled(run, cfg):
    """The objective through torch.compile; as it is, with a warning, where that does not work."""
    begun = time.perf_counter()
    try:
        objective = torch.compile(run.objective, options=COMPILER)
        with run.amp():
            objective(*(part.to(run.device) for part in run.train_batch(0, cfg)))[0].backward()
        return objective
    except Exception as error:  # a compiler may be missing or fail in many ways; none should stop a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        say(f"warning: torch.compile does not work here, going on without ({reason})", file=sys.stderr)
        return run.objective
    finally:
        run.seconds = time.perf_counter() - begun
        run.model.zero_grad(set_to_none=True)


def describe(run, cfg):
    """Print what is going to happen."""
    per_step = cfg.batch_size * cfg.block_size * cfg.gradient_accumulation_steps
    read, tokens = cfg.max_iters * per_step, run.meta["splits"]["train"]["tokens"]
    parameters = run.model.num_params()
    world = f" × {place()[1]} processes" if place()[1] > 1 else ""
    say(f"device {run.device}{world}, {run.dtype}, {parameters:,} parameters, {per_step:,} tokens a step")
    say(f"{cfg.max_iters:,} steps read {read:,} tokens, the {tokens:,} of the training split "
        f"{read / tokens:.2f} times; loss starts near ln V = {math.log(run.model.config.vocab_size):.2f}")


def share(batches):
    """Our share of the batches (x, y). Gathering weights takes all processes, so each gets equally many:
    where they do not divide, one without targets makes up."""
    batches, (rank, world) = iter(batches), place()
    while group := list(islice(batches, world)):
        x, y = group[min(rank, len(group) - 1)]
        yield x, y if rank < len(group) else np.full_like(y, IGNORE)


def evaluate(run, cfg, whole=False):
    """metrics of the model on the validation split, or on an even sample of it: eval_iters batches.

    Never smoothed nor distilled. A masked model has its masked loss alone, which is no text's perplexity.
    """
    run.model.eval()
    model = run.objective if cfg.fsdp else run.scored()  # the objective gathers the weights
    found = metrics(*total(score(model, share(run.val_batches(cfg, whole)), run.tokenizer, run.amp())))
    if cfg.fsdp:  # without a backward pass, which ends it, the embedding and the head would stay gathered
        model.reshard()
    run.model.train()
    return found if cfg.causal else dict(loss=found["loss"])


def show_metrics(found):
    if "ppl" not in found:
        return f"masked loss {found['loss']:.4f} nats per masked token"
    return (f"loss {found['loss']:.4f} nats per token, perplexity {found['ppl']:.2f}, "
            f"{found['bpb']:.4f} bits per byte")


def evaluate_and_keep(run, cfg):
    """An evaluation while training: into the log and the curves, and best.pt if it is the best so far."""
    found = evaluate(run, cfg)
    better, run.best = found["loss"] < run.best, min(found["loss"], run.best)  # the same in every process
    weights = whole_weights(run.scored()) if better else None
    if place()[0]:
        return
    write_log(cfg.out_dir, step=run.step, **{f"val_{name}": value for name, value in found.items()})
    tqdm.write(f"step {run.step}: validation {show_metrics(found)}")
    if better:
        save(Path(cfg.out_dir, "best.pt"), run.model, weights, step=run.step, val_loss=run.best,
             tokenizer=run.tokenizer.spec)
    if cfg.eval_sample:
        tqdm.write(sample_text(run, cfg))
    plot_log(cfg.out_dir, run.model.config.vocab_size, run.meta["unigram_entropy"], cfg.causal)


def sample_text(run, cfg):
    """A text as sample.py would write it."""
    run.model.eval()
    stream, prompt = TextStream(run.tokenizer), prompt_ids("", run.tokenizer)
    V = run.tokenizer.vocab_size
    steps = generate(run.scored(), [prompt], cfg.eval_sample, V, cfg.seed, temperature=0.8)
    text = "".join(stream.feed(token) for _, token in steps)
    run.model.train()
    return text + stream.finish()


@contextmanager
def stop_signals():
    """A list that is empty until Ctrl-C or SIGTERM: the loop then ends after its step. A second one kills."""
    asked = []

    def handle(number, frame):
        asked.append(number)
        for known in old:
            signal.signal(known, old[known])

    old = {}
    if threading.current_thread() is threading.main_thread():  # others may not set handlers
        old |= {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def to_device(batch, device):
    """A batch on its device. From pinned memory a GPU fetches it by itself, while this process goes on."""
    return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch.to(device)


def train_step(run, batches, targets, seeds, lr, grad_clip):
    """One update from our micro-batches [(x, y), …], where all processes together have so many `targets`.

    Returns nats per target and the norm of the gradient, 0-d tensors, which are the same in every process.
    The scaler multiplies float16's loss, so that small gradients do not vanish, and skips an update whose
    gradients overflow; for other dtypes it does nothing.
    """
    loss = torch.zeros((), device=run.device)
    for n, ((x, y), seed) in enumerate(zip(batches, seeds, strict=True), 1):
        if run.model.config.dropout:
            torch.manual_seed(seed)
        if hasattr(run.objective, "set_requires_gradient_sync"):  # FSDP: exchange the sum, once
            run.objective.set_requires_gradient_sync(n == len(batches))
        run.objective.require_backward_grad_sync = n == len(batches)  # DDP likewise
        with run.amp():
            nats, _ = run.objective(to_device(x, run.device), to_device(y, run.device))
        # gradients add up over micro-batches; over processes they are averaged, where we want the sum
        run.scaler.scale(nats / max(targets, 1) * place()[1]).backward()
        loss += nats.detach() / max(targets, 1)
    if dist.is_initialized():
        dist.all_reduce(loss)
    for optimizer in run.optimizers:
        run.scaler.unscale_(optimizer)  # clipping must see the true gradients
    norm = clip(run, grad_clip)
    scale = run.scaler.get_scale()
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        run.scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
    run.scaler.update()
    if (now := run.scaler.get_scale()) < scale:
        say(f"step {run.step + 1}: float16 overflowed, no update; the loss scale is now {now:g}")
        norm = torch.zeros_like(norm)
    return loss, norm


def clip(run, grad_clip):
    """The gradient's norm; a gradient longer than grad_clip is made that long, unless grad_clip is 0."""
    norm = whole(nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None]))
    if grad_clip and (norm.device.type != "cpu" or norm > grad_clip):  # a GPU is not asked, but told
        nn.utils.clip_grads_with_norm_(run.model.parameters(), grad_clip, norm)
    return norm


@torch.no_grad()
def average_in(run, share):
    """average ← (1 - share) · average + share · model, weight by weight, where an average is kept: what steps
    do to and fro cancels out, as it does at a smaller learning rate (Polyak & Juditsky 1992)."""
    if run.average:
        torch._foreach_lerp_(list(run.average.parameters()), list(run.model.parameters()), share)


def mfu(model, tokens_per_s, cfg):
    """Model FLOPs utilisation: the share of the devices' peak that the model's own operations are."""
    if not cfg.peak_tflops:
        return {}
    return dict(mfu=tokens_per_s * model.flops_per_token() / (cfg.peak_tflops * 1e12 * place()[1]))


@contextmanager
def memory_advice(cfg):
    """Turn "out of memory" into a ValueError that says what to set."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and not re.search("out of memory|allocate memory|enough memory", str(error)):
            raise
        if cfg.batch_size > 1:
            advice = (f"--batch_size={cfg.batch_size // 2} with --gradient_accumulation_steps="
                      f"{2 * cfg.gradient_accumulation_steps} makes as large a step in half the memory")
        else:
            advice = "--activation_checkpointing takes less, and so does a smaller block_size or n_embd"
        raise ValueError(f"out of memory at batch_size = {cfg.batch_size}: {advice}") from None


def due(step, interval, cfg):
    return step == cfg.max_iters or interval > 0 and step % interval == 0


def train(run, cfg):
    """The loop. Returns the number of the signal that ended it early, or 0.

    Raises ValueError if loss or gradient stop being finite; last.pt then is from before.
    """
    A, saved, (rank, world) = cfg.gradient_accumulation_steps, run.step, place()
    begun = time.perf_counter() - run.seconds  # moved on by what evaluations take
    lost = torch.zeros((), device=run.device)  # nan from the first loss on that is not finite
    often = 0.5 if sys.stderr.isatty() else 10  # seconds
    bar = tqdm(total=cfg.max_iters, initial=run.step, unit="step", mininterval=often, disable=rank > 0)
    with stop_signals() as asked, bar:
        clock, counted, stop = time.perf_counter(), run.step, 0
        while run.step < cfg.max_iters:
            micro, lr = range(run.step * A + rank, (run.step + 1) * A, world), get_lr(run.step, cfg)
            batches = [run.train_batch(i, cfg) for i in micro]
            seeds = [int(rng(cfg.seed, i).integers(2**32)) if cfg.dropout else 0 for i in micro]
            targets, stop = total([sum(int((y != IGNORE).sum()) for _, y in batches), len(asked)])
            if stop:  # a signal may reach the processes at different steps: all stop at the same
                break
            loss, norm = train_step(run, batches, targets, seeds, lr, cfg.grad_clip)
            run.step += 1
            average_in(run, 1 - cfg.ema_decay)
            lost = lost + 0 * loss + 0 * norm
            bar.update()
            evaluating = due(run.step, cfg.eval_interval, cfg)
            saving = evaluating or due(run.step, cfg.checkpoint_interval, cfg)
            logging = run.step == 1 or due(run.step, cfg.log_interval, cfg)
            if (saving or logging) and not torch.isfinite(lost):
                raise ValueError(f"loss or gradient is not finite at step {run.step}: --overwrite it "
                                 f"with a learning_rate below {cfg.learning_rate}, or with --dtype=float32; "
                                 f"the checkpoints in {cfg.out_dir} are good, last.pt is of step {saved}")
            now = time.perf_counter()
            if logging:
                speed = A * cfg.batch_size * cfg.block_size * (run.step - counted) / (now - clock)
                used = mfu(run.model, speed, cfg)
                write_log(cfg.out_dir, step=run.step, loss=loss.item(), lr=lr, grad_norm=norm.item(),
                          tokens_per_s=round(speed), seconds=round(now - begun, 3), **used)
                bar.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s" + "".join(
                    f", {value:.1%} MFU" for value in used.values()), refresh=False)
            if saving:  # before the evaluation, which may fail
                save_last(run, cfg)
                saved = run.step
            if evaluating:
                evaluate_and_keep(run, cfg)
            if logging or saving:
                begun += (time.perf_counter() - now) * saving
                clock, counted = time.perf_counter(), run.step
        if stop and saved != run.step:
            save_last(run, cfg)
    return (asked or [signal.SIGTERM])[0] if stop else 0


def finish(run, cfg):
    """Score best.pt, and the last weights if they are others, on the whole validation split."""
    if run.best == math.inf:  # the only evaluation was interrupted after last.pt was saved
        evaluate_and_keep(run, cfg)
    total([0])  # best.pt is written
    ckpt = load_trained(Path(cfg.out_dir, "best.pt"))[2]
    found = evaluate(run, cfg, whole=True)
    if ckpt["step"] != run.step:
        say(f"last.pt (step {run.step}) on the whole validation split: {show_metrics(found)}")
        with torch.no_grad():
            for name, p in run.scored().named_parameters():
                p.copy_(part_like(p, ckpt["model"][name]))
        found = evaluate(run, cfg, whole=True)
    final = {f"final_{name}": value for name, value in found.items()}
    write_log(cfg.out_dir, step=run.step, best_step=ckpt["step"], **final)
    say(f"best.pt (step {ckpt['step']}) on the whole validation split: {show_metrics(found)}")
    say(f"write with it: python sample.py --ckpt={Path(cfg.out_dir, 'best.pt').as_posix()}")


def start_folder(cfg, keep):
    """An out_dir with these settings, and of an older run all or nothing."""
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    for name in ("last.pt", "best.pt", "log.jsonl", "loss.png") if not keep else ():
        Path(cfg.out_dir, name).unlink(missing_ok=True)
    Path(cfg.out_dir, "config.toml").write_text(to_toml(cfg, skip=ORDERS), encoding="utf-8")


def main(cfg):
    with processes(cfg):
        start(cfg)


def start(cfg):
    """Begin a run, go on with one, or score one, as the settings say."""
    meta, tokenizer = load_data(cfg.data_dir)
    check_data(cfg, meta)
    if cfg.eval_only:
        cfg.init_from = cfg.init_from or str(Path(cfg.out_dir, "best.pt"))
        found = evaluate(make_run(cfg, meta, tokenizer), cfg, whole=True)
        say(f"{cfg.init_from} on the whole validation split: {show_metrics(found)}")
        return
    last = read_last(cfg, meta)
    if last and not cfg.resume:
        say(f"{cfg.out_dir} holds this run already, finished at step {last['step']}: nothing to do")
        return
    run = make_run(cfg, meta, tokenizer, last)
    total([0])  # all have read what there was
    if place()[0] == 0:
        start_folder(cfg, keep=bool(last))
    describe(run, cfg)
    run.model.train()
    with memory_advice(cfg):
        number = train(run, cfg)
    if number:
        say(f"stopped at step {run.step}; go on with: python train.py {cfg.out_dir}/config.toml --resume")
        sys.exit(128 + number)
    finish(run, cfg)


if __name__ == "__main__":
    run(main, TrainConfig)
