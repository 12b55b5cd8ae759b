"""
Train a GPT on what prepare.py wrote.

    python train.py                                              # two minutes on two CPU cores
    python train.py config/gpt2.toml --n_layer=6 --out_dir=out-gpt2
    python train.py out/config.toml --resume                     # go on where a run stopped, exactly
    python train.py --init_from=out/best.pt --out_dir=out-mine   # fine-tune

writes to out_dir: last.pt (to resume), best.pt (to sample from), log.jsonl, loss.png and config.toml.

Micro-batch i of a run is a function of (seed, i) alone, and so is its dropout. So nothing random needs
saving, and a resumed run repeats the uninterrupted one to the last bit.

AdamW   Loshchilov & Hutter 2017, https://arxiv.org/abs/1711.05101
WSD     Hu et al. 2024, https://arxiv.org/abs/2404.06395
"""

import json
import math
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from config import narrow, run, to_toml
from model import GPT, GPTConfig, save
from prepare import data_path, load_data
from sample import (IGNORE, TextStream, generate, load_trained, metrics, pick_device, pick_dtype, prompt_ids,
                    score)


@dataclass
class TrainConfig(GPTConfig):
    vocab_size: int = 0  # 0: as many as the data's tokenizer has; more only pad the matrix, for speed on GPUs
    # files
    data_dir: str = "data"  # what prepare.py wrote
    out_dir: str = "out"  # the folder of this run
    init_from: str = ""  # a checkpoint to start from (fine-tuning); its model settings replace those here
    resume: bool = False  # go on from out_dir/last.pt
    overwrite: bool = False  # delete the run in out_dir and start anew
    eval_only: bool = False  # score init_from, or out_dir/best.pt, on the whole validation split, and end
    # batches
    batch_size: int = 8  # B: sequences in a micro-batch, one forward pass
    gradient_accumulation_steps: int = 1  # micro-batches in a step
    max_iters: int = 1800  # steps: updates of the weights
    # optimizer
    learning_rate: float = 4e-3  # at its peak, after the warm-up
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"  # how it falls after the warm-up
    warmup_iters: int = 100  # steps of warm-up, in which it rises
    min_lr_frac: float = 0.1  # where it ends, as a fraction of the peak
    decay_frac: float = 0.2  # wsd: the share of all steps in which it falls, after being constant
    weight_decay: float = 0.1  # of matrices; vectors, such as biases, do not decay
    beta1: float = 0.9  # AdamW: how long the mean of the gradient remembers
    beta2: float = 0.99  # AdamW: how long that of its square does; 0.95 where a step has many tokens
    grad_clip: float = 1.0  # the largest norm of the gradient; 0: any
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

    def __post_init__(self):
        super().__post_init__()
        for name in "batch_size", "gradient_accumulation_steps", "max_iters", "log_interval":
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("vocab_size", "learning_rate", "warmup_iters", "weight_decay", "grad_clip", "seed",
                     "eval_interval", "eval_iters", "eval_sample", "checkpoint_interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        for name in "min_lr_frac", "decay_frac", "beta1", "beta2":
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be between 0 and 1")
        if not self.causal:
            raise ValueError("causal = false: this version trains causal models only")


ORDERS = ("resume", "overwrite", "eval_only")  # what to do with a run; the other settings make it what it is
# of those, what a resumed run may change
FREE = {"out_dir", "max_iters", "eval_interval", "eval_iters", "eval_sample", "checkpoint_interval",
        "log_interval", "device", "compile"}


# ------------------------------------------------------------------------------- batches

def rng(seed, i):
    """The randomness of micro-batch i. (seed + i would give the next seed the same batches, one later.)"""
    return np.random.default_rng((seed, i))


def get_batch(path, dtype, i, cfg):
    """Micro-batch i: inputs x and targets y, (B, T) each. y is x one token later: y[b, t] = x[b, t + 1].

    A window needs T + 1 tokens. Of N tokens it can start at 0 … N - T - 1, which `integers(N - T)` draws.
    """
    T = cfg.block_size
    ids = np.memmap(path, dtype, mode="r")  # opened anew: a map kept open collects all pages it ever read
    starts = rng(cfg.seed, i).integers(len(ids) - T, size=cfg.batch_size)
    rows = np.stack([ids[s:s + T + 1] for s in starts]).astype(np.int64)  # (B, T + 1)
    return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])


# ------------------------------------------------------------------------------- objective, optimizer, step

class Objective(nn.Module):
    """(x, y) → the summed loss in nats and the number of targets that it sums over.

    Next-token prediction: -Σ ln p(y[b, t] | x[b, :t + 1]). Sums and counts add up over micro-batches and
    processes; means of means would not.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, y):
        logits = self.model(x).float()  # (B, T, V)
        nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum")
        return nats, (y != IGNORE).sum()


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


def make_optimizer(model, cfg):
    """AdamW. Matrices and embeddings decay; biases and the gains of norms, which are vectors, do not."""
    params = [p for p in model.parameters() if p.requires_grad]  # a tied matrix comes once
    groups = [dict(params=[p for p in params if p.dim() >= 2], weight_decay=cfg.weight_decay),
              dict(params=[p for p in params if p.dim() < 2], weight_decay=0.0)]
    fused = all(p.device.type in ("cpu", "cuda") for p in params)
    return torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=(cfg.beta1, cfg.beta2), fused=fused)


# ------------------------------------------------------------------------------- log and curves

def write_log(out_dir, **record):
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


def plot_log(out_dir, vocab_size, unigram_entropy):
    """Draw loss and perplexity, of training and validation, into out_dir/loss.png; returns the figure."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axis, ppl_axis = figure.subplots(1, 2)
    for axis, f in (loss_axis, lambda x: x), (ppl_axis, lambda x: np.exp(np.minimum(x, 700))):
        for name, label, style in ("loss", "training", "-"), ("val_loss", "validation", "o-"):
            steps, losses = read_log(out_dir, "step", name)
            axis.plot(steps, f(np.array(losses, dtype=float)), style, label=label, markersize=4, linewidth=1)
        axis.axhline(f(math.log(vocab_size)), color="gray", linestyle=":", label="knowing nothing (ln V, V)")
        axis.axhline(f(unigram_entropy), color="gray", linestyle="--", label="knowing tokens' frequencies")
        axis.set_xlabel("step")
        axis.legend()
    loss_axis.set_ylabel("loss (nats per token)")
    ppl_axis.set(ylabel="perplexity = exp(loss)", yscale="log")
    figure.savefig(Path(out_dir, "loss.png"), dpi=120)
    return figure


# ------------------------------------------------------------------------------- checkpoints

@dataclass
class Run:
    """What a step changes, and what it works with."""
    model: nn.Module  # the bare model, which is what gets saved
    objective: nn.Module  # what is trained: the model in its objective, compiled perhaps
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    dtype: torch.dtype  # of matrix products
    meta: dict  # of the data
    tokenizer: object
    device: torch.device
    step: int = 0  # updates so far
    best: float = math.inf  # the lowest validation loss so far

    def amp(self):
        """Matrix products in dtype; what needs the range (norms, softmax, the loss) stays in float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def train_batch(self, i, cfg):
        """Micro-batch i, on the device."""
        x, y = get_batch(data_path(cfg.data_dir, self.meta, "train"), self.meta["dtype"], i, cfg)
        return x.to(self.device), y.to(self.device)


def settings_of(cfg):
    return {name: value for name, value in asdict(cfg).items() if name not in ORDERS}


def save_last(run, cfg):
    """last.pt: all that is needed to go on, the optimizer's state by the parameters' names."""
    names = {p: name for name, p in run.model.named_parameters()}
    save(Path(cfg.out_dir, "last.pt"), run.model, step=run.step, best=run.best, settings=settings_of(cfg),
         tokenizer=run.tokenizer.spec, data=run.meta["files"], scaler=run.scaler.state_dict(),
         optimizer={names[p]: state for p, state in run.optimizer.state.items()})


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
        print("changed since the run began:", "; ".join(changed.values()))
    return last


def restore(run, last):
    """Put a run back where save_last left it. Nothing random needs restoring."""
    run.model.load_state_dict(last["model"])
    params = dict(run.model.named_parameters())
    for name, state in last["optimizer"].items():
        run.optimizer.state[params[name]] = {key: value.to(run.device) for key, value in state.items()}
    run.scaler.load_state_dict(last["scaler"])
    run.step, run.best = last["step"], last["best"]


# ------------------------------------------------------------------------------- the run

def build_model(cfg, tokenizer):
    """A new model, or that of init_from. Raises ValueError if its vocabulary does not fit the data's."""
    if not cfg.init_from:
        if cfg.vocab_size and cfg.vocab_size < tokenizer.vocab_size:
            raise ValueError(f"vocab_size = {cfg.vocab_size} is less than the {tokenizer.vocab_size} tokens "
                             f"of the data in {cfg.data_dir}; 0 takes as many")
        torch.manual_seed(cfg.seed)
        model_cfg = narrow(cfg, GPTConfig)
        model_cfg.vocab_size = cfg.vocab_size or tokenizer.vocab_size
        return GPT(model_cfg)
    model, theirs, _ = load_trained(cfg.init_from, dropout=cfg.dropout, block_size=cfg.block_size)
    if theirs.spec != tokenizer.spec:
        kinds = [f"{t.spec['kind']}, {t.vocab_size} tokens" for t in (theirs, tokenizer)]
        raise ValueError(f"init_from = {cfg.init_from!r} has another vocabulary ({kinds[0]}) than the data "
                         f"in {cfg.data_dir} ({kinds[1]}): prepare with --tokenizer=FOLDER of its data")
    replaced = {name: value for name, value in asdict(model.config).items()
                if name != "vocab_size" and getattr(cfg, name) != value}
    if replaced:
        print(f"from {cfg.init_from}:", ", ".join(f"{name} = {value}" for name, value in replaced.items()))
    return model


def check_data(cfg, meta):
    for split, facts in meta["splits"].items():
        if facts["tokens"] < cfg.block_size + 1:
            fits = max(1, min(facts["tokens"] for facts in meta["splits"].values()) - 1)
            raise ValueError(f"{split} split in {cfg.data_dir} has {facts['tokens']} tokens, block_size = "
                             f"{cfg.block_size} needs {cfg.block_size + 1}: more text or --block_size={fits}")


def make_run(cfg, meta, tokenizer):
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device, otherwise="float16")
    if device.type == "cpu" and dtype == torch.float16:
        print("warning: float16 is slow on a CPU; --dtype=float32 is meant for it", file=sys.stderr)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: products of float32 with 10 bits after the point
    model = build_model(cfg, tokenizer).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    run = Run(model, Objective(model), make_optimizer(model, cfg), scaler, dtype, meta, tokenizer, device)
    if cfg.compile == "true" or cfg.compile == "auto" and device.type == "cuda":
        run.objective = compiled(run, cfg)
    return run


def compiled(run, cfg):
    """The objective through torch.compile; as it is, with a warning, where that does not work."""
    try:
        objective = torch.compile(run.objective)
        with run.amp():
            objective(*run.train_batch(0, cfg))[0].backward()
        return objective
    except Exception as error:  # a compiler may be missing or fail in many ways; none should stop a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        print(f"warning: torch.compile does not work here, going on without ({reason})", file=sys.stderr)
        return run.objective
    finally:
        run.optimizer.zero_grad(set_to_none=True)


def describe(run, cfg):
    """Print what is going to happen."""
    per_step = cfg.batch_size * cfg.block_size * cfg.gradient_accumulation_steps
    total, tokens = cfg.max_iters * per_step, run.meta["splits"]["train"]["tokens"]
    parameters = run.model.num_params()
    print(f"device {run.device}, {run.dtype}, {parameters:,} parameters, {per_step:,} tokens a step")
    print(f"{cfg.max_iters:,} steps read {total:,} tokens, the {tokens:,} of the training split "
          f"{total / tokens:.2f} times; loss starts near ln V = {math.log(run.model.config.vocab_size):.2f}")


def evaluate(run, cfg, whole=False):
    """metrics of the model on the validation split, or on an even sample of it: eval_iters batches."""
    ids = np.memmap(data_path(cfg.data_dir, run.meta, "val"), run.meta["dtype"], mode="r")
    run.model.eval()
    size = 0 if whole else cfg.eval_iters * cfg.batch_size
    found = metrics(*score(run.model, ids, run.tokenizer, cfg.batch_size, max_windows=size, amp=run.amp()))
    run.model.train()
    return found


def show_metrics(found):
    return (f"loss {found['loss']:.4f} nats per token, perplexity {found['ppl']:.2f}, "
            f"{found['bpb']:.4f} bits per byte")


def evaluate_and_keep(run, cfg, bar):
    """An evaluation while training: into the log and the curves, and best.pt if it is the best so far."""
    found = evaluate(run, cfg)
    write_log(cfg.out_dir, step=run.step, **{f"val_{name}": value for name, value in found.items()})
    bar.write(f"step {run.step}: validation {show_metrics(found)}")
    if found["loss"] < run.best:
        run.best = found["loss"]
        save(Path(cfg.out_dir, "best.pt"), run.model, step=run.step, val_loss=run.best,
             tokenizer=run.tokenizer.spec)
    if cfg.eval_sample:
        bar.write(sample_text(run, cfg))
    plot_log(cfg.out_dir, run.model.config.vocab_size, run.meta["unigram_entropy"])


def sample_text(run, cfg):
    """A text as sample.py would write it."""
    run.model.eval()
    idx = torch.tensor([prompt_ids("", run.tokenizer)[0]], device=run.device)  # (1, 1)
    stream = TextStream(run.tokenizer)
    tokens = generate(run.model, idx, cfg.eval_sample, run.tokenizer.vocab_size, cfg.seed, temperature=0.8)
    text = "".join(stream.feed(token.item()) for token in tokens)
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


def train_step(run, batches, seeds, lr, grad_clip, bar):
    """One update from the micro-batches [(x, y), …]: (nats per target, norm of the gradient), 0-d tensors.

    The scaler multiplies float16's loss, so that small gradients do not vanish, and skips an update whose
    gradients overflow; for other dtypes it does nothing.
    """
    targets = sum(int((y != IGNORE).sum()) for _, y in batches)
    total = torch.zeros((), device=run.device)
    for (x, y), seed in zip(batches, seeds, strict=True):
        torch.manual_seed(seed)  # for dropout
        with run.amp():
            nats, _ = run.objective(x, y)
        run.scaler.scale(nats / targets).backward()  # gradients add up
        total += nats.detach()
    run.scaler.unscale_(run.optimizer)  # clipping must see the true gradients
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), grad_clip or math.inf)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    scale = run.scaler.get_scale()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)
    if (now := run.scaler.get_scale()) < scale:
        bar.write(f"step {run.step + 1}: float16 overflowed, no update; the loss scale is now {now:g}")
        norm = torch.zeros_like(norm)
    return total / targets, norm


def due(step, interval, cfg):
    return step == cfg.max_iters or interval > 0 and step % interval == 0


def train(run, cfg):
    """The loop. Returns the number of the signal that ended it early, or 0.

    Raises ValueError if loss or gradient stop being finite; last.pt then is from before.
    """
    A, saved, begun = cfg.gradient_accumulation_steps, run.step, time.perf_counter()
    lost = torch.zeros((), device=run.device)  # nan from the first loss on that is not finite
    often = 0.5 if sys.stderr.isatty() else 10  # seconds
    bar = tqdm(total=cfg.max_iters, initial=run.step, unit="step", mininterval=often)
    with stop_signals() as asked, bar:
        clock, counted = time.perf_counter(), run.step
        while run.step < cfg.max_iters and not asked:
            micro, lr = range(run.step * A, (run.step + 1) * A), get_lr(run.step, cfg)
            batches = [run.train_batch(i, cfg) for i in micro]
            seeds = [int(rng(cfg.seed, i).integers(2**32)) for i in micro]
            loss, norm = train_step(run, batches, seeds, lr, cfg.grad_clip, bar)
            run.step += 1
            lost = lost + 0 * loss + 0 * norm
            bar.update()
            evaluating = due(run.step, cfg.eval_interval, cfg)
            saving = evaluating or due(run.step, cfg.checkpoint_interval, cfg)
            logging = run.step == 1 or due(run.step, cfg.log_interval, cfg)
            if (saving or logging) and not torch.isfinite(lost):
                raise ValueError(f"loss or gradient is not finite at step {run.step}: --overwrite it "
                                 f"with a learning_rate below {cfg.learning_rate}, or with --dtype=float32; "
                                 f"the checkpoints in {cfg.out_dir} are good, last.pt is of step {saved}")
            if logging:
                now = time.perf_counter()
                speed = A * cfg.batch_size * cfg.block_size * (run.step - counted) / (now - clock)
                write_log(cfg.out_dir, step=run.step, loss=loss.item(), lr=lr, grad_norm=norm.item(),
                          tokens_per_s=round(speed), seconds=round(now - begun, 3))
                bar.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s", refresh=False)
            if saving:  # before the evaluation, which may fail
                save_last(run, cfg)
                saved = run.step
            if evaluating:
                evaluate_and_keep(run, cfg, bar)
            if logging or saving:
                clock, counted = time.perf_counter(), run.step
        if asked and saved != run.step:
            save_last(run, cfg)
    return asked[0] if asked else 0


def finish(run, cfg):
    """Score best.pt, and the last weights if they are others, on the whole validation split."""
    best, _, ckpt = load_trained(Path(cfg.out_dir, "best.pt"), run.device)
    last = run.model
    if ckpt["step"] != run.step:
        found = evaluate(run, cfg, whole=True)
        print(f"last.pt (step {run.step}) on the whole validation split: {show_metrics(found)}")
    run.model = best
    found = evaluate(run, cfg, whole=True)
    run.model = last
    final = {f"final_{name}": value for name, value in found.items()}
    write_log(cfg.out_dir, step=run.step, best_step=ckpt["step"], **final)
    print(f"best.pt (step {ckpt['step']}) on the whole validation split: {show_metrics(found)}")
    print(f"write with it: python sample.py --ckpt={Path(cfg.out_dir, 'best.pt').as_posix()}")


def start_folder(cfg):
    """An out_dir without anything of an older run."""
    Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
    for name in "last.pt", "best.pt", "log.jsonl", "loss.png":
        Path(cfg.out_dir, name).unlink(missing_ok=True)


def main(cfg):
    meta, tokenizer = load_data(cfg.data_dir)
    check_data(cfg, meta)
    if cfg.eval_only:
        cfg.init_from = cfg.init_from or str(Path(cfg.out_dir, "best.pt"))
        found = evaluate(make_run(cfg, meta, tokenizer), cfg, whole=True)
        print(f"{cfg.init_from} on the whole validation split: {show_metrics(found)}")
        return
    last = read_last(cfg, meta)
    if last and not cfg.resume:
        print(f"{cfg.out_dir} holds this run already, finished at step {last['step']}: nothing to do")
        return
    run = make_run(cfg, meta, tokenizer)
    if last:
        restore(run, last)
    else:
        start_folder(cfg)
    Path(cfg.out_dir, "config.toml").write_text(to_toml(cfg, skip=ORDERS), encoding="utf-8")
    describe(run, cfg)
    run.model.train()
    if number := train(run, cfg):
        print(f"stopped at step {run.step}; go on with: python train.py {cfg.out_dir}/config.toml --resume")
        sys.exit(128 + number)
    finish(run, cfg)


if __name__ == "__main__":
    run(main, TrainConfig)
