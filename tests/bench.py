"""
Measure this project, beside others where they are at hand.

    python tests/bench.py                                # the default parts, within ten minutes
    python tests/bench.py generate quantize              # these parts
    python tests/bench.py race --nanogpt=../nanoGPT --json=race.json

What is compared takes turns within one run, so that a machine that slows down slows both; a ratio is the
median of those of the pairs. transformers has rows of its own, and so has a nanoGPT checkout that is named.
Times are wall-clock seconds on this machine; nothing here passes or fails.
"""

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import prepare  # noqa: E402
import sample  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

GPT2 = tomllib.loads((ROOT / "config/gpt2.toml").read_text(encoding="utf-8"))
CHAR_6X384 = dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65)
GPT2_124M = dict(n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257)
NANOGPT_LOSS = 1.898  # nats per character on the whole validation split, where nanoGPT's CPU recipe ends
PRESETS = {  # text, tokenizer and settings of what a CPU trains in minutes
    "the default": ("the plays", "bpe", []),
    "gpt2 + nanogpt_cpu": ("Tiny Shakespeare", "char", ["config/gpt2.toml", "config/nanogpt_cpu.toml"]),
    "nanogpt_cpu + modern_cpu": ("Tiny Shakespeare", "char",
                                 ["config/nanogpt_cpu.toml", "config/modern_cpu.toml"]),
    "cpu_race": ("Tiny Shakespeare", "bpe", ["config/cpu_race.toml"]),
    "cpu_5min": ("Tiny Shakespeare", "bpe", ["config/cpu_5min.toml"]),
}
ABLATION_BASE = ["--max_iters=400", "--eval_interval=0", "--compile=false"]
ABLATIONS = {  # one setting changed at a time
    "as it is": [],
    "another seed": ["--seed=1338"],
    "learned positions": ["--pos_emb=learned"],
    "LayerNorm": ["--norm=layernorm"],
    "no norm of the embedding": ["--norm_embd=false"],
    "no norm of q and k": ["--qk_norm=false"],
    "GELU": ["--activation=gelu"],
    "tied head": ["--tie_weights"],
    "no zero init": ["--zero_init=false"],
    "no soft-cap": ["--logit_softcap=0"],
    "512 tokens": ["bpe_vocab_size=512"],
    "2048 tokens": ["bpe_vocab_size=2048"],
    "half the batch, twice the steps": ["--batch_size=6", "--max_iters=800", "--warmup_iters=200"],
    "cosine to a tenth": ["--schedule=cosine", "--min_lr_frac=0.1"],
    "constant": ["--schedule=constant"],
    "constant, averaged weights": ["--schedule=constant", "--ema_decay=0.98"],
    "linear to a tenth, averaged weights": ["--min_lr_frac=0.1", "--ema_decay=0.98"],
    "half the learning rate": ["--learning_rate=2e-3"],
    "twice the learning rate": ["--learning_rate=8e-3"],
    "Muon": ["--optimizer=muon"],
    "decay 0.1": ["--weight_decay=0.1"],
    "no dropout": ["--dropout=0"],
    "dropout of elements": ["--dropout_of=elements"],
    "one block": ["--n_layer=1"],
    "six blocks": ["--n_layer=6"],
}


def gpt2(**sizes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**GPT2 | sizes))


# ------------------------------------------------------------------------------- taking turns

def turns(functions, rounds=3):
    """{name: function} → {name: [figure, …]}: each is called once a round, in turn, and returns one."""
    values = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            values[name].append(function())
    return values


def rows(part, what, unit, values, base=None):
    """Table rows from `turns`: each median, and its ratio to `base`, the median over the rounds."""
    for name, found in values.items():
        ratio = None
        if base and name != base:
            ratio = statistics.median(x / y for x, y in zip(found, values[base], strict=True))
        yield dict(part=part, what=what, who=name, value=statistics.median(found), unit=unit, ratio=ratio,
                   to=base, all=found)


def seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def script(name, *words, **kw):
    return subprocess.run([sys.executable, str(ROOT / name), *words], check=True, capture_output=True,
                          text=True, encoding="utf-8", **kw)


PEAK = """
try:  # not ru_maxrss, which on Linux starts at what the parent had
    status = open("/proc/self/status", encoding="utf-8").read()
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)
except OSError:
    import resource, sys
    unit = 1024 ** 2 if sys.platform == "darwin" else 1024
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit)
"""


def peak_megabytes(code):
    """The most memory that Python code, run in a process of its own, ever had."""
    env = os.environ | dict(PYTHONPATH=str(ROOT), PYTHONIOENCODING="utf-8")
    end = subprocess.run([sys.executable, "-c", f"{code}\n{PEAK}"], capture_output=True, text=True, env=env,
                         encoding="utf-8")
    if end.returncode:
        raise RuntimeError(end.stderr)
    return float(end.stdout.split()[-1])


def nanogpt(path, sizes):
    """nanoGPT's model from a checkout, with random weights."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path, "model.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        return module.GPT(module.GPTConfig(dropout=0.0, **sizes))


# ------------------------------------------------------------------------------- generation

def ours(model, prompt_length, n, B=1):
    """`theirs` for this project, with B texts together."""
    def generate(idx, n):
        return list(sample.generate(model, idx.tolist(), n, model.config.vocab_size, batch_size=B,
                                    temperature=0.8, top_k=200))
    return theirs(generate, prompt_length, n, B)


def theirs(generate, prompt_length, n, B=1):
    """A function that measures tokens per second behind the first, which takes the reading of the prompt."""
    @torch.inference_mode()
    def speed():
        idx = torch.ones(B, prompt_length, dtype=torch.long)
        first = seconds(lambda: generate(idx, 1))
        return B * (n - 1) / (seconds(lambda: generate(idx, n)) - first)
    return speed


def others(options, sizes, prompt_length, n):
    """nanoGPT and transformers at the same sizes, with random weights."""
    found = {}
    if options.nanogpt:
        nano = nanogpt(options.nanogpt, dict(bias=True, **sizes)).eval()
        found["nanoGPT"] = theirs(lambda idx, n: nano.generate(idx, n, temperature=0.8, top_k=200),
                                  prompt_length, n)
    with contextlib.suppress(ImportError):
        from transformers import GPT2Config, GPT2LMHeadModel
        hf = GPT2LMHeadModel(GPT2Config(
            vocab_size=sizes["vocab_size"], n_positions=sizes["block_size"], n_layer=sizes["n_layer"],
            n_head=sizes["n_head"], n_embd=sizes["n_embd"], bos_token_id=None, eos_token_id=None)).eval()

        def generate(idx, n):
            hf.generate(idx, attention_mask=torch.ones_like(idx), max_new_tokens=n, min_new_tokens=n,
                        do_sample=True, temperature=0.8, top_k=200, pad_token_id=0)
        found["transformers"] = theirs(generate, prompt_length, n)
    return found


def generate_part(options):
    """Tokens per second, one text and many."""
    cases = [("6 × 384, first 256 tokens", CHAR_6X384, 1, 255), ("124M, first 128 tokens", GPT2_124M, 1, 127),
             ("124M, at context 512", GPT2_124M, 512, 17)]
    for what, sizes, prompt_length, n in cases:
        model = gpt2(**sizes).eval()
        functions = dict(ours=ours(model, prompt_length, n)) | others(options, sizes, prompt_length, n)
        for function in functions.values():  # the first call is slower: it finds its memory
            function()
        yield from rows("generate", what, "tokens/s", turns(functions), "ours")
    for what, sizes, n in ("6 × 384", CHAR_6X384, 200), ("124M", GPT2_124M, 48):
        model = gpt2(**sizes).eval()
        functions = {f"{B} at once": ours(model, 1, n, B) for B in (1, 16)}
        yield from rows("generate", f"{what}, texts together", "tokens/s", turns(functions), "1 at once")


def quantize_part(options):
    """Tokens per second and megabytes with small weights."""
    for what, sizes, n in ("6 × 384", CHAR_6X384, 255), ("124M", GPT2_124M, 64):
        models = {kind: gpt2(**sizes).eval() for kind in ("float32", "int8", "int4")}
        for kind in "int8", "int4":
            sample.quantize(models[kind], kind)
        functions = {kind: ours(model, 1, n) for kind, model in models.items()}
        for function in functions.values():
            function()
        yield from rows("quantize", f"{what}, {n} tokens", "tokens/s", turns(functions), "float32")
        sizes = {kind: [sample.megabytes(model)] for kind, model in models.items()}
        yield from rows("quantize", f"{what}, weights", "MB", sizes, "float32")


def start_part(options):
    """Seconds from the start of sample.py to its first token, beside `import torch`."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "data"), Path(folder, "out")
        text = Path(folder, "text.txt")
        text.write_text("The river turns, and the stone waits.\n" * 200, encoding="utf-8")
        script("prepare.py", f"--text={text}", "--tokenizer=char", f"--data_dir={data}")
        script("train.py", f"--data_dir={data}", f"--out_dir={out}", "--max_iters=2", "--block_size=32")
        words = [f"--ckpt={out}/best.pt", "--start=The", "--max_new_tokens=1"]
        functions = {
            "import torch": lambda: seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"])),
            "sample.py, one token": lambda: seconds(lambda: script("sample.py", *words))}
        yield from rows("start", "from the command to the end", "s", turns(functions, 5), "import torch")


# ------------------------------------------------------------------------------- preparing

def words_of(size):
    """A text of about `size` characters from a bag of made-up words, by Zipf's law."""
    g = np.random.default_rng(0)
    syllables = [a + b for a in "bcdfglmnprst" for b in ("a", "e", "i", "o", "u", "ar", "en", "is")]
    words = np.array(["".join(g.choice(syllables, g.integers(1, 5))) for _ in range(20_000)])
    weights = 1 / np.arange(1, len(words) + 1)
    lines = g.choice(words, (size // 70, 12), p=weights / weights.sum())
    return "".join(f"{' '.join(line).capitalize()}.\n" for line in lines)


def prepare_part(options):
    """Megabytes a second into GPT-2's tokens, beside one call of tiktoken, and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        text, small = Path(folder, "text.txt"), Path(folder, "small.txt")
        content = words_of(20_000_000)
        text.write_text(content, encoding="utf-8")
        small.write_text(content[:len(content) // 10], encoding="utf-8")
        tokenizer = prepare.Tokenizer(prepare.tiktoken_spec("gpt2"))
        size = len(content) / 1e6

        def whole():
            return size / seconds(lambda: tokenizer.bpe.encode_ordinary(content))

        def by_prepare():
            cfg = prepare.PrepareConfig([str(text)], str(Path(folder, "data")), "gpt2")
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                spent = seconds(lambda: prepare.main(cfg))
            for file in Path(folder, "data").iterdir():
                file.unlink()
            return size / spent

        functions = {"tiktoken in one call": whole, "prepare.py": by_prepare}
        yield from rows("prepare", f"{size:.0f} MB, GPT-2's tokens", "MB/s", turns(functions),
                        "tiktoken in one call")
        code = "import prepare\nprepare.main(prepare.PrepareConfig([{!r}], {!r}, 'gpt2'))"
        peaks = {f"{path.stat().st_size / 1e6:.0f} MB":
                 [peak_megabytes(code.format(str(path), f"{path}.data"))] for path in (small, text)}
        yield from rows("prepare", "peak memory of a text of", "MB", peaks)


# ------------------------------------------------------------------------------- training

def steps_part(options):
    """Training tokens per second at the shape of nanoGPT's CPU recipe, 4 × 128, 12 × 64 characters: each
    project's train.py, reading its data."""
    text = words_of(300_000)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text(text, encoding="utf-8")
        script("prepare.py", f"--text={folder}/text.txt", "--tokenizer=char", f"--data_dir={folder}/data")
        functions = {}
        for compiled in False, True:
            for name, files in {"GPT-2's parts": ("gpt2", "nanogpt_cpu"),
                                "modern parts": ("nanogpt_cpu", "modern_cpu")}.items():
                words = [*(f"{ROOT}/config/{file}.toml" for file in files), f"--data_dir={folder}/data",
                         f"--compile={str(compiled).lower()}", "--eval_interval=0", "--eval_iters=1"]
                functions[name, compiled] = functools.partial(our_speed, words, folder)
            if options.nanogpt:
                functions["nanoGPT", compiled] = functools.partial(their_speed, options.nanogpt, text,
                                                                   compiled)
        found = turns({f"{name}, {'compiled' if compiled else 'eager'}": function
                       for (name, compiled), function in functions.items()})
    base = "nanoGPT, eager" if options.nanogpt else "GPT-2's parts, eager"
    yield from rows("steps", "4 × 128, batch 12 × 64", "tokens/s", found, base)


def our_speed(words, folder):
    """Tokens per second of train.py behind the warm-up: the median of what it logs every ten steps."""
    records, _ = trained([*words, "--max_iters=200", "--log_interval=10"], folder)
    return statistics.median(record["tokens_per_s"] for record in records
                             if "tokens_per_s" in record and record["step"] > 100)


def their_speed(path, text, compiled):
    times = nanogpt_times(path, text, 200, compiled)
    return statistics.median(10 * 12 * 64 / sum(times[i:i + 10]) for i in range(101, 201, 10))


STEP = """
import torch
{build}
x, y = torch.randint(50257, (2, 4, 1024), generator=torch.Generator().manual_seed(0))
for _ in range(2):
    loss(x, y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""
OURS = """
import train
from model import GPT, GPTConfig
from tests.bench import GPT2, GPT2_124M
train.keep_memory()
cfg = train.TrainConfig(activation_checkpointing={saving})
model = GPT(GPTConfig(**GPT2, **GPT2_124M))
train.save_activations(model) if {saving} else None
objective = train.Objective(model)
if not {saving}:
    objective.most = 2 ** 40
loss = lambda x, y: objective(x, y)[0] / y.numel()
[optimizer] = train.make_optimizers(model, cfg)
"""
THEIRS = """
from tests.bench import GPT2_124M, nanogpt
model = nanogpt({path!r}, dict(bias=True, **GPT2_124M)).train()
loss = lambda x, y: model(x, y)[1]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
"""


def memory_part(options):
    """Peak memory of two training steps of GPT-2 124M, 4 windows of 1,024 tokens, float32."""
    found = {}
    for name, saving in ("plain", False), ("activation_checkpointing, head in parts", True):
        found[name] = [peak_megabytes(STEP.format(build=OURS.format(saving=saving))) / 1000]
    if options.nanogpt:
        build = THEIRS.format(path=str(Path(options.nanogpt).resolve()))
        found["nanoGPT"] = [peak_megabytes(STEP.format(build=build)) / 1000]
    yield from rows("memory", "124M, batch 4 × 1024, float32", "GB", found, "plain")


# ------------------------------------------------------------------------------- whole runs

def trained(words, folder):
    """Run train.py in a process of its own; returns the records of its log and its peak memory."""
    out = Path(folder, f"out{time.monotonic_ns()}")
    peak = peak_megabytes("import train\nfrom config import parse\n"
                          f"train.main(parse(train.TrainConfig, {[*words, f'--out_dir={out}']!r}))")
    return [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()], peak


def train_words(words, folder):
    """Run train.py in a process of its own; returns the facts of the run."""
    records, peak = trained(words, folder)
    last, final = [record for record in records if "seconds" in record][-1], records[-1]
    return dict(command="python train.py " + " ".join(words), steps=last["step"],
                seconds=round(last["seconds"], 1), loss=final["final_loss"],
                bits_per_byte=final["final_bpb"], nats_per_byte=final["final_bpb"] * math.log(2),
                peak_gb=round(peak / 1000, 2))


def nanogpt_times(path, text, steps, compiled=False):
    """Train nanoGPT's CPU recipe on a text, in a copy of the checkout; returns the seconds of each step, the
    first with an evaluation."""
    words = (f"config/train_shakespeare_char.py --device=cpu --compile={compiled} --eval_iters=1 "
             "--log_interval=1 --eval_interval=100000 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 "
             f"--n_embd=128 --max_iters={steps} --lr_decay_iters=2000 --dropout=0.0").split()
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(path, Path(folder, "nanoGPT"),
                               ignore=shutil.ignore_patterns(".*", "venv", "out*", "*.bin", "input.txt"))
        data = copy / "data/shakespeare_char"
        (data / "input.txt").write_text(text, encoding="utf-8")
        subprocess.run([sys.executable, "prepare.py"], cwd=data, check=True, capture_output=True)
        end = subprocess.run([sys.executable, "train.py", *words], cwd=copy, check=True, capture_output=True,
                             text=True)
    return [float(ms) / 1000 for ms in re.findall(r"iter \d+: loss .*, time ([\d.]+)ms", end.stdout)]


def race_part(options):
    """Training seconds to the loss that nanoGPT's CPU recipe ends with, on Tiny Shakespeare, in pairs."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data_dir={folder}/data"
        script("prepare.py", f"--text={options.text}", data)
        meta, tokenizer = prepare.load_data(f"{folder}/data")
        text = "".join(tokenizer.decode(np.fromfile(prepare.data_path(f"{folder}/data", meta, split),
                                                    meta["dtype"])) for split in ("train", "val"))
        runs = []

        def race():
            runs.append(train_words(["config/cpu_race.toml", data], folder))
            return runs[-1]["seconds"]
        functions = {"ours": race}
        if options.nanogpt:
            functions = {"nanoGPT": lambda: sum(nanogpt_times(options.nanogpt, text, 2000)[1:])} | functions
        base = "nanoGPT" if options.nanogpt else None
        yield from rows("race", "training time", "s", turns(functions), base)
        losses = {"ours": [run["nats_per_byte"] for run in runs], "nanoGPT's, to reach": [NANOGPT_LOSS]}
        yield from rows("race", "loss on the whole validation split", "nats/char", losses)


def presets_part(options):
    """Train each preset that a CPU can; --store keeps the facts for the README's table."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name, (text, tokenizer, files) in PRESETS.items():
            text = options.text if text == "Tiny Shakespeare" else "shakespeare"
            data = Path(folder, f"{text}-{tokenizer}".replace("/", "-"))
            script("prepare.py", f"--text={text}", f"--tokenizer={tokenizer}", f"--data_dir={data}")
            runs[name] = train_words([*files, f"--data_dir={data}"], folder) | dict(
                command=" ".join(["python train.py", *files]))
            yield from rows("presets", name, "nats/byte", {"loss": [runs[name]["nats_per_byte"]]})
            yield from rows("presets", name, "s", {"training time": [runs[name]["seconds"]]})
            yield from rows("presets", name, "GB", {"peak memory": [runs[name]["peak_gb"]]})
    if options.store:
        keep("presets.json", "python tests/bench.py presets --store", runs)


def ablations_part(options):
    """Change the five-minute preset one setting at a time, on a slice held out of the training text."""
    with tempfile.TemporaryDirectory() as folder:
        script("prepare.py", f"--text={options.text}", "--tokenizer=byte", f"--data_dir={folder}/all")
        meta, tokenizer = prepare.load_data(f"{folder}/all")
        ids = np.fromfile(prepare.data_path(f"{folder}/all", meta, "train"), meta["dtype"])
        Path(folder, "train.txt").write_text(tokenizer.decode(ids), encoding="utf-8", newline="")
        runs = {}
        for name, flags in ABLATIONS.items():
            size = 1024
            if flags and flags[0].startswith("bpe_vocab_size="):
                size, flags = int(flags[0].partition("=")[2]), flags[1:]
            data = Path(folder, f"data{size}")
            if not data.exists():
                script("prepare.py", f"--text={folder}/train.txt", f"--bpe_vocab_size={size}",
                       f"--data_dir={data}")
            words = ["config/cpu_5min.toml", *ABLATION_BASE, *flags]
            runs[name] = train_words([*words, f"--data_dir={data}"], folder) | dict(
                command="python train.py " + " ".join(words), bpe_vocab_size=size)
            print(f"{name}: {runs[name]['nats_per_byte']:.4f} nats per byte, {runs[name]['seconds']} s",
                  file=sys.stderr)
            yield from rows("ablations", name, "nats/byte", {"loss": [runs[name]["nats_per_byte"]]})
            if options.store:
                keep("ablations.json", "python tests/bench.py ablations --store", runs)


def keep(name, command, runs):
    """Store results for the course: with the command that made them, and on what."""
    facts = dict(command=command, torch=torch.__version__, cores=os.cpu_count(), machine=platform.machine())
    text = json.dumps(facts | dict(runs=runs), indent=1, ensure_ascii=False)
    (ROOT / "notebooks/results").mkdir(exist_ok=True)
    (ROOT / "notebooks/results" / name).write_text(text + "\n", encoding="utf-8")


def table_part(options):
    """The README's table, from what `presets --store` measured."""
    print(table())
    return ()


def table():
    stored = json.loads((ROOT / "notebooks/results/presets.json").read_text(encoding="utf-8"))["runs"]
    lines = ["| preset | text | nats per byte | bits per byte | training | memory |", "|---" * 6 + "|"]
    for name, run in stored.items():
        lines.append(f"| {name} | {PRESETS[name][0]}, {PRESETS[name][1]} | {run['nats_per_byte']:.3f} | "
                     f"{run['bits_per_byte']:.3f} | {run['seconds']:.0f} s | {run['peak_gb']:.1f} GB |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------- the command

PARTS = {function.__name__[:-5]: function for function in (
    start_part, generate_part, quantize_part, steps_part, memory_part, prepare_part, table_part, race_part,
    presets_part, ablations_part)}
DEFAULT = list(PARTS)[:7]


def show(row):
    ratio = "" if row["ratio"] is None else f"{row['ratio']:7.2f} × {row['to']}"
    name = f"{row['part']:9} {row['what']:36} {row['who']:40}"
    print(f"{name} {row['value']:10.4g} {row['unit']:9} {ratio}", flush=True)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="; ".join(
        f"{name}: {function.__doc__.splitlines()[0]}" for name, function in PARTS.items()))
    parser.add_argument("--json", default="", help="a file to write all figures to")
    parser.add_argument("--nanogpt", default="", help="a checkout of nanoGPT to compare with")
    parser.add_argument("--text", default="tinyshakespeare", help="Tiny Shakespeare, as prepare.py's --text")
    parser.add_argument("--store", action="store_true", help="keep what presets and ablations find, in "
                        "notebooks/results")
    options = parser.parse_args(words)
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}")
    if options.nanogpt and not Path(options.nanogpt, "model.py").exists():
        parser.error(f"--nanogpt={options.nanogpt} is no checkout of nanoGPT: it has no model.py")
    found = []
    for name in options.parts or DEFAULT:
        for row in PARTS[name](options):
            show(row)
            found.append(row)
            if options.json:
                facts = dict(torch=torch.__version__, threads=torch.get_num_threads(), rows=found)
                Path(options.json).write_text(json.dumps(facts, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
