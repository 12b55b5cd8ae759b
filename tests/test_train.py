"""train.py: batches, schedules, steps, and runs that are exact to the last bit."""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import train
from config import parse
from model import GPT, GPTConfig, load
from prepare import EOT, MASK, PrepareConfig, Tokenizer, data_path, load_data
from prepare import main as prepare_main
from sample import IGNORE, load_trained, metrics, score, windows
from train import (Objective, TrainConfig, corrupt, get_batch, get_lr, make_optimizers, mask_tokens,
                   pad_pairs, plot_log, read_log, rng)

ROOT = Path(__file__).parent.parent
TINY = dict(n_layer=2, n_head=2, n_embd=16, block_size=16, batch_size=4, max_iters=20, eval_interval=10,
            eval_iters=2, log_interval=1, warmup_iters=3, learning_rate=1e-2)


def config(data, out, **kw):
    return TrainConfig(**TINY | dict(data_dir=str(data), out_dir=str(out)) | kw)


def losses(out):
    return dict(zip(*read_log(out, "step", "loss"), strict=True))


def weights(path):
    return load(path)[1]["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def script(*words, cwd=ROOT, **kw):
    return subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=cwd, capture_output=True,
                          text=True, encoding="utf-8", **kw)


def flags(**kw):
    return [f"--{name}={value}" for name, value in kw.items()]


# ------------------------------------------------------------------------------- batches

def test_targets_are_the_inputs_one_later():
    x, y = get_batch(np.arange(100), 50, 8, rng(0, 0))
    assert x.shape == y.shape == (50, 8) and x.dtype == np.int64
    assert (y[:, :-1] == x[:, 1:]).all() and (y == x + 1).all()


def test_every_window_can_be_drawn_and_none_is_too_long():
    x, y = get_batch(np.arange(20), 500, 8, rng(0, 0))
    assert sorted(set(x[:, 0].tolist())) == list(range(12)) and y.max() == 19
    x, y = get_batch(np.arange(9), 500, 8, rng(0, 0))
    assert (x[:, 0] == 0).all() and (y[:, -1] == 8).all(), "block_size + 1 tokens are one window"


def test_a_batch_depends_on_seed_and_number_alone():
    def batch(seed, i):
        return get_batch(np.arange(60000), 4, 8, rng(seed, i))[0]
    assert np.array_equal(batch(1, 2), batch(1, 2))
    first = [batch(1, i) for i in range(20)]
    for j in range(20):
        assert not any(np.array_equal(batch(2, j), x) for x in first), "the next seed has other batches"
    starts = np.concatenate([batch(0, i)[:, 0] for i in range(500)])
    assert abs(starts.mean() / 59992 - 0.5) < 0.03, "uniform: 2,000 draws have a standard error of 0.006"


def test_memory_stays_flat_over_many_batches(char_data, tmp_path):
    if not (status := Path("/proc/self/status")).exists():
        pytest.skip("reads the resident size from /proc")
    run, cfg = make_run(char_data, tmp_path, block_size=64, batch_size=12)
    cfg.data_dir, run.meta["files"]["train"]["name"] = str(tmp_path), "ids.bin"
    with open(tmp_path / "ids.bin", "wb") as f:
        f.truncate(2 * 10**9)  # a sparse file of a billion tokens
    for i in range(100):
        run.train_batch(i, cfg)

    def resident():  # kilobytes
        return int(re.search(r"VmRSS:\s+(\d+)", status.read_text(encoding="utf-8"))[1])
    before = resident()
    for i in range(100, 5000):
        run.train_batch(i, cfg)
    assert resident() - before < 50_000, "60,000 windows touch 240 MB of pages"


# ------------------------------------------------------------------------------- objective

def test_the_loss_is_the_sum_of_minus_log_probabilities():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, block_size=6, n_layer=1, zero_init=False))
    x, y = torch.randint(11, (2, 3, 6))
    y[0, 2] = IGNORE
    nats, count = Objective(model)(x, y)
    by_hand, logits = 0.0, model(x)
    for b in range(3):
        for t in range(6):
            if y[b, t] != IGNORE:
                by_hand -= math.log((logits[b, t].exp()[y[b, t]] / logits[b, t].exp().sum()).item())
    assert nats.item() == pytest.approx(by_hand, rel=1e-5) and count == 17


def test_zero_logits_cost_ln_v():
    for V, expected in (10000, 9.210340), (65, 4.174387), (50257, 10.824905):
        loss = F.cross_entropy(torch.zeros(2, V), torch.tensor([0, V - 1]))
        assert loss.item() == pytest.approx(expected, abs=1e-6) == pytest.approx(math.log(V), abs=1e-6)


def test_metrics():
    found = metrics(1.4697 * 1000, 1000, 1000)
    assert found["ppl"] == pytest.approx(4.348, abs=1e-3) and found["bpb"] == pytest.approx(2.1203, abs=1e-4)
    assert metrics(3.12, 1, 4)["ppl"] == pytest.approx(22.65, abs=0.01)
    assert metrics(1000.0, 1, 1)["ppl"] == math.inf, "no overflow ends a run"
    assert metrics(1 + 3, 2, 1)["ppl"] == pytest.approx(math.exp(2)), "not the mean of two perplexities"


class Fixed(torch.nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.config = logits, GPTConfig(vocab_size=logits.size(-1))

    def hidden(self, x):
        return self.logits

    def head(self, hidden):
        return hidden


def mean(objective, x, y):
    nats, count = objective(x, torch.as_tensor(y))
    return (nats / count).item()


def test_lecture_c_listing_1_the_loss_and_the_mask():
    """The printed ids, 9.6401, and the mask; without the scale 1/√d softmax saturates: 29.86."""
    torch.manual_seed(0)
    ids = torch.randint(0, 10000, (2, 8))
    assert ids.tolist() == [[6044, 8239, 4933, 3760, 8963, 8379, 5427, 8503],
                            [3497, 5683, 4101, 6866, 2756, 1399, 5878, 376]]
    raw = torch.randn(64, 10000)
    states = torch.randn(2, 8, 64)
    y = torch.cat((ids[:, 1:], torch.full((2, 1), IGNORE)), dim=1)  # the last token has no next one
    for scale, expected in (64 ** -0.5, 9.6401), (1.0, 29.8618):
        assert mean(Objective(Fixed(states @ (raw * scale))), ids, y) == pytest.approx(expected, abs=5e-5)
    blocked = torch.triu(torch.ones(8, 8), diagonal=1).bool()
    assert torch.equal(~blocked, sees(8, causal=True)), "the note's True is what PyTorch's mask calls False"


def test_lecture_c_listing_2_the_masked_inputs_and_labels():
    """The note's independent draws, then our corrupt: its printed inputs and labels."""
    torch.manual_seed(0)
    ids = torch.randint(5, 10000, (4, 8))
    chosen, dice = torch.rand(ids.shape) < 0.15, torch.rand(ids.shape)
    x, y = corrupt(ids.numpy(), chosen.numpy(), dice.numpy(), np.full((4, 8), 7), mask_id=4)
    assert x.tolist() == [[5204, 2004, 1563, 4, 4038, 1729, 6142, 8873],
                          [3747, 5448, 1846, 2736, 4, 674, 1908, 2231],
                          [546, 5688, 2644, 2328, 4196, 3114, 2756, 7514],
                          [3304, 4, 5969, 7334, 179, 400, 4686, 9647]]
    labels = np.full((4, 8), IGNORE)
    labels[0, 3], labels[1, 3], labels[1, 4], labels[3, 1] = 7715, 2736, 2941, 1766
    assert np.array_equal(y, labels)


def sees(T, causal):
    """Which positions (columns) change the logits of which (rows), found by changing them: (T, T)."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=9, block_size=T, n_layer=1, n_head=1, n_embd=8, causal=causal))
    for p in model.parameters():
        p.data.normal_(0, 0.5)
    idx = torch.zeros(1, T, dtype=torch.int64)
    seen = torch.zeros(T, T, dtype=torch.bool)
    for j in range(T):
        other = idx.clone()
        other[0, j] = 5
        seen[:, j] = (model(other) != model(idx))[0].any(dim=1)
    return seen


def test_lecture_c_listing_3_what_each_position_sees():
    assert [row.nonzero().flatten().tolist() for row in sees(6, causal=True)] == [
        [0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert [row.nonzero().flatten().tolist() for row in sees(6, causal=False)] == [[0, 1, 2, 3, 4, 5]] * 6
    assert sees(4, causal=True).tolist() == [[j <= i for j in range(4)] for i in range(4)]


def test_lecture_c_exercise():
    """[A, B, C, D, E] with B masked and E replaced by X: [A, [MASK], C, D, X], scored at 1 and 4 only."""
    A, B, C, D, E, X, MASK_ID = range(7)
    x, y = corrupt(np.array([[A, B, C, D, E]]), np.array([[0, 1, 0, 0, 1]], bool),
                   np.array([[0, 0.79, 0, 0, 0.85]]), np.full((1, 5), X), MASK_ID)
    assert x.tolist() == [[A, MASK_ID, C, D, X]] and y.tolist() == [[IGNORE, B, IGNORE, IGNORE, E]]
    kept, _ = corrupt(np.array([[A]]), np.array([[True]]), np.array([[0.9]]), np.array([[X]]), MASK_ID)
    assert kept.tolist() == [[A]]


def masked_tokenizer():
    """300 ids, of which 256 is end-of-text, 257 … 298 are no tokens, and 299 is the mask."""
    spec = dict(kind="byte", special={EOT: 256, "<|other|>": 298})
    return train.with_mask(Tokenizer(spec))


def test_masking_a_million_tokens():
    """Exactly k a row; 80/10/10 within three sigma; special ids neither chosen nor drawn; -100 elsewhere."""
    tokenizer, g = masked_tokenizer(), rng(0, 0)
    ids = g.integers(256, size=(10000, 100))
    ids[:, ::10] = 256
    x, y = mask_tokens(ids, tokenizer, 0.15, g)
    chosen = y != IGNORE
    assert (chosen.sum(axis=1) == 15).all() and not chosen[:, ::10].any()
    assert (y[chosen] == ids[chosen]).all() and (x[~chosen] == ids[~chosen]).all()
    assert tokenizer.special[MASK] == 299 and set(x[chosen]) <= {*range(256), 299}
    n, masked = chosen.sum(), (x[chosen] == 299).sum()
    changed = ((x != ids) & chosen).sum() - masked
    for found, p in (masked, 0.8), (changed, 0.1 * 255 / 256):  # noise is the token itself once in 256 times
        assert abs(found - n * p) < 3 * math.sqrt(n * p * (1 - p))
    places = chosen.sum(axis=0)[np.arange(100) % 10 > 0] / 10000
    assert abs(places - 15 / 90).max() < 5 * math.sqrt(1 / 6 * 5 / 6 / 10000), "every place is as likely"


def test_a_row_has_a_target_unless_it_is_all_special():
    tokenizer = masked_tokenizer()
    _, y = mask_tokens(np.array([[1, 256, 256], [256, 256, 256], [1, 2, 3]]), tokenizer, 0.01, rng(0, 0))
    assert (y != IGNORE).sum(axis=1).tolist() == [1, 0, 1] and y[0, 0] == 1
    _, y = mask_tokens(np.array([[1, 256, 256], [1, 2, 3]]), tokenizer, 1.0, rng(0, 0))
    assert y.tolist() == [[1, IGNORE, IGNORE], [1, 2, 3]]


def test_label_smoothing():
    """(1 - ε) of the target and ε/V of each: by hand, by PyTorch, and its floor for V = 65, ε = 0.1."""
    torch.manual_seed(0)
    logits, y = torch.randn(1, 50, 65), torch.randint(65, (1, 50))
    q = 0.9 * F.one_hot(y, 65) + 0.1 / 65
    by_hand = -(q * logits.log_softmax(-1)).sum(-1).mean().item()
    assert mean(Objective(Fixed(logits), label_smoothing=0.1), y, y) == pytest.approx(by_hand, rel=1e-5)
    one = torch.zeros(1, 1, dtype=torch.int64)
    for V, floor, tolerance in (65, 0.7312, 5e-5), (50257, 1.4075, 3e-4):  # float32 adds up 50,257 terms
        best = Fixed((0.9 * F.one_hot(one, V) + 0.1 / V).log())
        assert mean(Objective(best, label_smoothing=0.1), one, one) == pytest.approx(floor, abs=tolerance)


def test_training_temperature_divides_the_logits():
    logits, y = torch.tensor([[[2.0, 1.0, 0.0]]]), torch.zeros(1, 1, dtype=torch.int64)
    for T, p in (0.5, 0.8668), (1.0, 0.6652), (2.0, 0.5065):
        assert mean(Objective(Fixed(logits), temperature=T), y, y) == pytest.approx(-math.log(p), abs=1e-4)


def test_distillation():
    """By hand for one token; zero for a teacher that agrees; only scored targets count."""
    student, teacher = torch.tensor([[[1.0, 0.0, -1.0]]]), torch.tensor([[[0.0, 2.0, 0.0]]])
    y = torch.tensor([[2]])
    p, q = ((z / 2).softmax(-1).flatten().tolist() for z in (teacher, student))
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    ce = -student.log_softmax(-1)[0, 0, 2].item()
    found = mean(Objective(Fixed(student), teacher=Fixed(teacher), alpha=0.3, tau=2.0), y, y)
    assert found == pytest.approx(0.7 * ce + 0.3 * 4 * kl, rel=1e-5)
    agreed = Objective(Fixed(student), teacher=Fixed(student), alpha=1.0)
    assert mean(agreed, y, y) == pytest.approx(0, abs=1e-6)
    padded = Fixed(torch.cat((teacher, torch.full((1, 1, 5), 9.0)), dim=-1))
    assert mean(Objective(Fixed(student), teacher=padded, alpha=0.3), y, y) == pytest.approx(found, rel=1e-5)
    nats, count = Objective(Fixed(student), teacher=Fixed(teacher))(y, torch.full_like(y, IGNORE))
    assert nats == 0 and count == 0


def test_tau_squared_keeps_the_gradients_size():
    """Logits of standard deviation 0.1: with τ² within 1 % over τ = 1, 2, 5, so without it as 1/τ²."""
    torch.manual_seed(0)
    student, teacher = 0.1 * torch.randn(2, 1, 200, 50)
    y, sizes = torch.zeros(1, 200, dtype=torch.int64), {}
    for tau in 1.0, 2.0, 5.0:
        logits = student.clone().requires_grad_()
        Objective(Fixed(logits), teacher=Fixed(teacher), alpha=1.0, tau=tau)(y, y)[0].backward()
        sizes[tau] = logits.grad.norm().item()
    assert max(sizes.values()) < 1.01 * min(sizes.values()), sizes
    for tau in 2.0, 5.0:
        logits = student.clone().requires_grad_()
        F.kl_div((logits / tau).log_softmax(-1), (teacher / tau).log_softmax(-1), reduction="sum",
                 log_target=True).backward()
        assert logits.grad.norm().item() == pytest.approx(sizes[1.0] / tau ** 2, rel=0.02)


def test_log_sum_exp():
    """ō + ln Σ e^(x - ō): what PyTorch does inside, and what a plain exp cannot."""
    x = torch.tensor([1000.0, 1001.0, 999.0])
    assert x.exp().sum().log() == math.inf and (-x).exp().sum().log() == -math.inf
    for z, expected in (x, 1001.4076), (-x, -998.5924):
        top = z.max()
        assert (top + (z - top).exp().sum().log()).item() == pytest.approx(expected, abs=1e-4)
        assert z.logsumexp(0).item() == pytest.approx(expected, abs=1e-4)
        loss = mean(Objective(Fixed(z.view(1, 1, 3))), torch.zeros(1, 1, dtype=torch.int64), [[2]])
        assert loss == pytest.approx(expected - z[2].item(), abs=1e-4)


def test_three_ways_to_write_cross_entropy():
    torch.manual_seed(0)
    z, y = torch.randn(1, 20, 9), torch.randint(9, (1, 20))
    ours = mean(Objective(Fixed(z)), y, y)
    logp, flat = z[0].log_softmax(dim=-1), y[0]
    assert F.nll_loss(logp, flat) == F.cross_entropy(z[0], flat) == pytest.approx(ours, rel=1e-6)
    assert -logp[range(20), flat].mean().item() == pytest.approx(ours, rel=1e-6)
    by_lse = (z[0].logsumexp(dim=1) - z[0][range(20), flat]).mean()
    assert by_lse.item() == pytest.approx(ours, rel=1e-6)


def test_perplexity_of_the_perfect_and_of_the_uniform_model():
    y = torch.tensor([[3, 1, 4]])
    sure = Fixed(200.0 * F.one_hot(y, 9).float())
    assert mean(Objective(sure), y, y) == 0 and metrics(0.0, 3, 3)["ppl"] == 1
    loss = mean(Objective(Fixed(torch.zeros(1, 3, 9))), y, y)
    assert metrics(3 * loss, 3, 3)["ppl"] == pytest.approx(9, rel=1e-6)
    assert math.exp(mean(Objective(Fixed(-9.0 * F.one_hot(y, 9).float())), y, y)) > 9, "V is no upper bound"


def test_the_two_paths_of_a_tied_matrix():
    """Its gradient is the sum of that through the embedding and that through the head."""
    torch.manual_seed(0)
    cfg = dict(vocab_size=13, block_size=8, n_layer=1, n_head=2, n_embd=16, zero_init=False)
    tied, untied = GPT(GPTConfig(tie_weights=True, **cfg)), GPT(GPTConfig(**cfg))
    untied.load_state_dict(tied.state_dict())
    x, y = torch.randint(13, (2, 4, 8))
    for model in tied, untied:
        Objective(model)(x, y)[0].backward()
    parts = untied.transformer.wte.weight.grad, untied.lm_head.weight.grad
    torch.testing.assert_close(tied.lm_head.weight.grad, sum(parts), atol=1e-5, rtol=1e-5)
    assert all(part.norm() > 0 for part in parts)
    one_hot = F.one_hot(x, 13).float() @ tied.transformer.wte.weight
    assert torch.equal(one_hot, tied.transformer.wte(x)), "a lookup is a product with one-hot rows"


def test_cheating_pays():
    """The same tiny model and text, 300 steps: with the mask, without it, and without the shift by one."""
    text = b"".join((ROOT / name).read_bytes() for name in ("README.md", "model.py", "train.py"))
    ids, found = np.frombuffer(bytes(byte for byte in text if byte < 128), dtype=np.uint8), {}
    for name, causal, shift in ("honest", True, 1), ("no mask", False, 1), ("no shift", True, 0):
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=128, block_size=32, n_layer=2, n_head=2, n_embd=64, causal=causal))
        [optimizer] = make_optimizers(model, TrainConfig(weight_decay=0.0, learning_rate=3e-3))
        for i in range(300):
            x, y = map(torch.from_numpy, get_batch(ids, 16, 32, rng(0, i)))
            nats, count = Objective(model)(x, y if shift else x)
            (nats / count).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (nats / count).item()
    assert found["honest"] > 1.5 and found["no mask"] < 0.5 and found["no shift"] < 0.05, found


def test_a_padded_batch_is_its_rows_alone():
    """Sum and count over the batch equal those over the pairs one by one, and only responses are targets."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, block_size=16, n_head=2, n_embd=16, zero_init=False)).double()
    ids, rows = rng(0, 0).integers(11, size=30), np.array([0, 3, 5, 6, 16, 18, 30])
    x, y = pad_pairs(ids, rows, [0, 2, 1])
    assert x.shape == (3, 13) and (y != IGNORE).sum(axis=1).tolist() == [2, 12, 10]
    assert y[0].tolist() == [IGNORE] * 2 + ids[3:5].tolist() + [IGNORE] * 9, "the prompt's last one predicts"
    nats, count = Objective(model)(torch.from_numpy(x), torch.from_numpy(y))
    alone = [Objective(model)(*map(torch.from_numpy, pad_pairs(ids, rows, [i]))) for i in range(3)]
    assert nats.item() == pytest.approx(sum(n.item() for n, _ in alone), rel=1e-6)
    assert count == sum(c for _, c in alone) == 24


@pytest.mark.parametrize("kw", [{}, dict(label_smoothing=0.1, temperature=0.7), dict(teacher=True)], ids=str)
def test_a_head_in_parts_is_the_head(kw):
    """Loss and every gradient, with ignored targets and a last part that is shorter: 1e-5, rounding alone."""
    torch.manual_seed(0)
    model, teacher = (GPT(GPTConfig(vocab_size=50, block_size=16, zero_init=False)) for _ in range(2))
    kw = kw | dict(teacher=teacher.requires_grad_(False)) if "teacher" in kw else kw
    x, y = torch.randint(50, (2, 5, 16))
    y[1, 3:9] = IGNORE
    found = []
    for most in 2 ** 25, 50 * 7:
        objective = Objective(model, **kw)
        objective.most = most
        nats, count = objective(x, y)
        model.zero_grad()
        nats.backward()
        found.append((nats.item(), [p.grad.clone() for p in model.parameters()]))
        assert count == 74
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- schedules

def test_learning_rates():
    cfg = TrainConfig(learning_rate=1e-3, warmup_iters=10, max_iters=110, min_lr_frac=0.1)
    assert get_lr(0, cfg) == pytest.approx(9.0909e-5, rel=1e-4) and get_lr(10, cfg) == pytest.approx(1e-3)
    assert get_lr(60, cfg) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5)), "the middle of the cosine"
    assert get_lr(110, cfg) == get_lr(10**6, cfg) == pytest.approx(1e-4)
    cfg.schedule = "linear"
    assert get_lr(35, cfg) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.75))
    assert get_lr(110, cfg) == pytest.approx(1e-4)
    cfg.schedule, cfg.decay_frac = "wsd", 0.2
    assert get_lr(88, cfg) == pytest.approx(1e-3)
    assert get_lr(99, cfg) == pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))
    cfg.schedule = "constant"
    assert get_lr(10, cfg) == get_lr(10**6, cfg) == pytest.approx(1e-3)


@given(st.sampled_from(["cosine", "linear", "wsd", "constant"]), st.integers(0, 50), st.integers(1, 50),
       st.floats(0, 1), st.floats(0, 1))
def test_schedules_stay_within_their_bounds(schedule, warmup, max_iters, floor, decay):
    cfg = TrainConfig(schedule=schedule, warmup_iters=warmup, max_iters=max_iters, min_lr_frac=floor,
                      decay_frac=decay, learning_rate=1.0)
    rates = [get_lr(step, cfg) for step in range(3 * max_iters + warmup)]
    assert rates[0] > 0 or warmup == 0 and floor == 0
    assert all(math.isfinite(rate) and 0 <= rate <= 1 + 1e-12 for rate in rates)
    assert all(rate >= floor - 1e-12 for rate in rates[warmup:])
    falling = rates[warmup:]
    assert all(b <= a + 1e-12 for a, b in zip(falling, falling[1:], strict=False)), "it never rises again"


# ------------------------------------------------------------------------------- optimizer and step

@pytest.mark.parametrize("tie", [True, False])
def test_matrices_decay_and_vectors_do_not(tie):
    model = GPT(GPTConfig(n_layer=2, norm="layernorm", bias=True, tie_weights=tie))
    decayed, spared = make_optimizers(model, TrainConfig(weight_decay=0.1))[0].param_groups
    assert decayed["weight_decay"] == 0.1 and spared["weight_decay"] == 0.0
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in spared["params"]} == {1}
    assert sum(p.numel() for group in (decayed, spared) for p in group["params"]) == model.num_params()


@pytest.mark.parametrize("tie", [True, False])
def test_muon_gets_the_matrices_of_the_blocks(tie):
    """Its first update: singular values near 1, times the scale that gives the size of Adam's updates."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, norm="layernorm", bias=True, tie_weights=tie, zero_init=False))
    cfg = TrainConfig(optimizer="muon", learning_rate=1e-3, weight_decay=0.0)
    muon, adamw = make_optimizers(model, cfg)
    matrices = [p for block in model.transformer.h for p in block.parameters() if p.dim() == 2]
    theirs = muon.param_groups[0]["params"]
    assert len(theirs) == 8 and all(p is q for p, q in zip(theirs, matrices, strict=True))
    rest = [p for group in adamw.param_groups for p in group["params"]]
    assert len(theirs) + len(rest) == len(list(model.parameters()))
    before = [p.detach().clone() for p in matrices]
    Objective(model)(*torch.randint(1024, (2, 2, 64)))[0].backward()
    muon.step()
    for p, old in zip(matrices, before, strict=True):
        values = torch.linalg.svdvals(old - p.detach()) / (1e-3 * 0.2 * max(p.shape) ** 0.5)
        assert values.max() < 1.3 and values[:len(values) // 2].min() > 0.6, "five steps in bfloat16"


def make_run(data, out, **kw):
    cfg = config(data, out, **kw)
    meta, tokenizer = load_data(data)
    return train.make_run(cfg, meta, tokenizer), cfg


def one_step(run, cfg, grad_clip=0.0, batches=None):
    batches = batches or [run.train_batch(i, cfg) for i in range(cfg.gradient_accumulation_steps)]
    targets = sum(int((y != IGNORE).sum()) for _, y in batches)
    return train.train_step(run, batches, targets, range(len(batches)), 1e-2, grad_clip)


def test_four_accumulated_batches_are_one_of_four_times_the_size(char_data, tmp_path):
    """Also where the micro-batches have unlike numbers of targets: sums and counts, no mean of means."""
    found = []
    for A in 4, 1:
        run, cfg = make_run(char_data, tmp_path, zero_init=False)
        parts = [(x, y.clone()) for x, y in (run.train_batch(i, cfg) for i in range(4))]
        for n, (_, y) in enumerate(parts):
            y[:n] = IGNORE
        whole = [tuple(torch.cat(part) for part in zip(*parts, strict=True))]
        loss, norm = one_step(run, cfg, batches=parts if A == 4 else whole)
        found.append((loss.item(), norm.item()))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_activation_checkpointing_computes_the_same(char_data, tmp_path):
    """With dropout: what is computed again draws the same noise. Bitwise, for the operations are the same."""
    found = []
    for on in False, True:
        run, cfg = make_run(char_data, tmp_path, zero_init=False, dropout=0.2, activation_checkpointing=on)
        loss, norm = one_step(run, cfg)
        found.append((loss, norm, run.model.state_dict()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert all(torch.equal(w, found[1][2][name]) for name, w in found[0][2].items())


def test_flops_are_counted_as_pytorch_counts_them():
    """PyTorch counts products as they run; it sees the CPU's attention in its plain form only."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode
    for kw in dict(tie_weights=True), dict(n_layer=3, n_head=2, n_embd=48, block_size=24, vocab_size=101):
        model = GPT(GPTConfig(**dict(vocab_size=70, block_size=32) | kw))
        x, y = torch.randint(70, (2, 3, model.config.block_size))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            Objective(model)(x, y)[0].backward()
        assert counter.get_total_flops() == x.numel() * model.flops_per_token()


def test_mfu_is_logged_when_the_peak_is_known(char_data, tmp_path):
    train.main(config(char_data, tmp_path, peak_tflops=0.5))
    _, speeds, shares = read_log(tmp_path, "step", "tokens_per_s", "mfu")
    flops = load(tmp_path / "last.pt")[0].flops_per_token()
    assert shares == pytest.approx([speed * flops / 0.5e12 for speed in speeds], rel=1e-3)  # rounded


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried …"), MemoryError(),
                                   RuntimeError("[…] DefaultCPUAllocator: can't allocate memory: you …")])
def test_out_of_memory_says_what_to_set(char_data, tmp_path, monkeypatch, error):
    def fail(*_):
        raise error
    monkeypatch.setattr(train, "train_step", fail)
    cfg = config(char_data, tmp_path, batch_size=12, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="--batch_size=6 with --gradient_accumulation_steps=4"):
        train.main(cfg)
    cfg.batch_size, cfg.overwrite = 1, True
    with pytest.raises(ValueError, match="--activation_checkpointing"):
        train.main(cfg)
    monkeypatch.setattr(train, "train_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train.main(cfg)


def test_gradients_do_not_pile_up(char_data, tmp_path):
    run, cfg = make_run(char_data, tmp_path, learning_rate=0.0)
    batches = [run.train_batch(0, cfg)]
    norms = [train.train_step(run, batches, 64, [0], 0.0, 0.0)[1].item() for _ in range(5)]
    assert norms == [norms[0]] * 5


def test_clipping_bounds_the_gradient_that_the_optimizer_sees(char_data, tmp_path, monkeypatch):
    run, cfg = make_run(char_data, tmp_path, zero_init=False, dtype="float16")
    seen, step = [], run.scaler.step
    monkeypatch.setattr(run.scaler, "step", lambda optimizer: seen.append(
        math.sqrt(sum(p.grad.square().sum().item() for p in run.model.parameters()))) or step(optimizer))
    _, norm = one_step(run, cfg, grad_clip=0.01)
    assert norm > 0.01 and seen[0] == pytest.approx(0.01, rel=1e-3), "unscaled first, then clipped"


@pytest.mark.parametrize("grad_clip", [0.0, 1e-3, 1e3])
def test_a_gradient_is_clipped_as_pytorch_does_it(char_data, tmp_path, grad_clip):
    run, _ = make_run(char_data, tmp_path)
    Objective(run.model)(*torch.randint(8, (2, 4, 8)))[0].backward()
    ours, theirs = list(run.model.parameters()), list(deepcopy(run.model).parameters())
    for p, q in zip(ours, theirs, strict=True):
        q.grad = p.grad.clone()
    norm = train.clip(run, grad_clip)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, grad_clip or math.inf)) and norm > 1e-3
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours, theirs, strict=True))


def test_float16_skips_an_update_that_overflows_and_goes_on(char_data, tmp_path, capsys):
    run, cfg = make_run(char_data, tmp_path, zero_init=False, dtype="float16")
    one_step(run, cfg)
    before, scale = [p.clone() for p in run.model.parameters()], run.scaler.get_scale()
    hook = run.model.lm_head.weight.register_hook(lambda grad: grad * math.inf)
    one_step(run, cfg)
    assert all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))
    assert run.scaler.get_scale() == scale / 2 and "overflowed" in capsys.readouterr().out
    hook.remove()
    one_step(run, cfg)
    assert not all(torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True))


# ------------------------------------------------------------------------------- the evaluation protocol

def test_every_token_but_the_first_is_scored_once():
    """Against a loop over the windows, token by token; block 7, 40 ids: five windows and a rest of four."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=11, block_size=7, n_layer=1, zero_init=False)).eval()
    ids = np.random.default_rng(0).integers(11, size=40)
    tokenizer = type("T", (), dict(num_bytes=np.arange(11)))()
    for stride, batch in (0, 2), (7, 100), (3, 2), (1, 5):
        nats, step = 0.0, stride or 7
        for target in range(1, 40):
            start = 0 if target <= 7 else (target - 7 + step - 1) // step * step
            logits = model(torch.tensor(ids[None, start:target]))[0, -1]
            nats -= torch.log_softmax(logits, -1)[ids[target]].item()
        found = score(model, windows(ids, 7, batch, stride), tokenizer)
        assert found[0] == pytest.approx(nats, abs=1e-4) and found[1:] == (39, ids[1:].sum()), stride
    few = [list(windows(ids, 7, max_windows=2)) for _ in range(2)]
    assert np.array_equal(few[0], few[1]) and few[0][0][1].size == 14, "always the same windows"
    assert [sum(y.size for _, y in windows(ids[:n], 7)) for n in (2, 8, 9)] == [1, 7, 8]


# ------------------------------------------------------------------------------- whole runs

@pytest.fixture(scope="module")
def run_20(char_data, tmp_path_factory):
    """An uninterrupted run of 20 steps, with dropout."""
    out = tmp_path_factory.mktemp("run") / "out"
    train.main(config(char_data, out, dropout=0.1, gradient_accumulation_steps=2))
    return out


def test_what_a_run_leaves(run_20, capsys):
    names = {path.name for path in run_20.iterdir()}
    assert names == {"last.pt", "best.pt", "log.jsonl", "loss.png", "config.toml"}
    lines = [json.loads(line) for line in (run_20 / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    for names in ({"step", "loss", "lr", "grad_norm", "tokens_per_s", "seconds"},
                  {"step", "val_loss", "val_ppl", "val_bpb"}):
        assert any(names == set(line) for line in lines)
    assert list(losses(run_20)) == list(range(1, 21)), "max_iters = 20 makes 20 updates"
    V = load(run_20 / "last.pt")[0].config.vocab_size
    assert losses(run_20)[1] == pytest.approx(math.log(V), abs=1e-5)
    assert losses(run_20)[20] < losses(run_20)[1] - 0.3
    assert (run_20 / "loss.png").read_bytes()[:4] == b"\x89PNG"
    settings = tomllib.loads((run_20 / "config.toml").read_text(encoding="utf-8"))
    assert settings["n_embd"] == 16 and "resume" not in settings
    _, last = load(run_20 / "last.pt")
    assert last["step"] == 20 and set(last["optimizer"]) == set(last["model"])


@pytest.mark.parametrize("dtype, ema_decay", [("float32", 0.9), ("bfloat16", 0), ("float16", 0)])
def test_kill_and_resume_is_the_uninterrupted_run(char_data, tmp_path, dtype, ema_decay):
    """20 steps = 10 steps, kill -9, resume, 10 steps: losses and weights to the last bit."""
    words = flags(**TINY, data_dir=char_data, dtype=dtype, dropout=0.1, gradient_accumulation_steps=2,
                  ema_decay=ema_decay)
    assert script(*words, f"--out_dir={tmp_path}/whole").returncode == 0
    # the killed one sleeps in the log line of step 13, some steps behind its last checkpoint
    code = ("import sys, time, train, config\nwrite = train.write_log\n"
            "def slow(out, **record):\n    write(out, **record)\n"
            "    time.sleep(100 * (record['step'] == 13))\n"
            "train.write_log = slow\ntrain.main(config.parse(train.TrainConfig))")
    out = tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", code, *words, f"--out_dir={out}"], cwd=ROOT,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "log.jsonl").exists() or 13 not in losses(out):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert load(out / "last.pt")[1]["step"] == 10
    end = script(str(out / "config.toml"), "--resume")
    assert end.returncode == 0, end.stderr
    assert losses(out) == losses(tmp_path / "whole")
    for name in "last.pt", "best.pt":
        assert same(weights(out / name), weights(tmp_path / "whole" / name))
    ours, theirs = load(out / "last.pt")[1], load(tmp_path / "whole/last.pt")[1]
    assert ours["scaler"] == theirs["scaler"] and bool(ours["scaler"]) == (dtype == "float16")
    assert all(same(ours["optimizer"][name], theirs["optimizer"][name]) for name in ours["model"])
    assert not ema_decay or same(ours["average"], theirs["average"])


def test_averaged_weights_are_what_is_scored_and_kept(char_data, run_20, tmp_path, monkeypatch):
    """d²⁰ w₀ + (1 - d) Σ dᵐ w, with m steps since w; the steps themselves are those of a run without."""
    d, steps, average_in = 0.8, [], train.average_in

    def spy(run, share):
        for kept in (run.average, run.model) if not steps else (run.model,):
            steps.append({name: p.detach().double() for name, p in kept.named_parameters()})
        average_in(run, share)
    monkeypatch.setattr(train, "average_in", spy)
    train.main(config(char_data, tmp_path, dropout=0.1, gradient_accumulation_steps=2, eval_interval=20,
                      ema_decay=d))
    assert losses(tmp_path) == losses(run_20) and len(steps) == 21
    shares = [d ** 20] + [(1 - d) * d ** m for m in reversed(range(20))]
    best, last = weights(tmp_path / "best.pt"), load(tmp_path / "last.pt")[1]
    for name, kept in best.items():
        expected = sum(share * step[name] for share, step in zip(shares, steps, strict=True))
        torch.testing.assert_close(kept.double(), expected, atol=1e-6, rtol=0)  # 20 sums of float32 below 1
    assert same(last["average"], best) and same(last["model"], weights(run_20 / "last.pt"))
    model, tokenizer, _ = load_trained(tmp_path / "best.pt")
    ids = np.fromfile(data_path(char_data, load_data(char_data)[0], "val"), load_data(char_data)[0]["dtype"])
    found = metrics(*score(model.eval(), windows(ids, 16), tokenizer))
    assert read_log(tmp_path, "final_loss")[0][0] == pytest.approx(found["loss"], rel=1e-6)


def test_evaluation_leaves_training_alone(char_data, run_20, tmp_path):
    train.main(config(char_data, tmp_path, dropout=0.1, gradient_accumulation_steps=2, eval_interval=3,
                      eval_iters=5, eval_sample=5, checkpoint_interval=4, log_interval=1))
    assert losses(tmp_path) == losses(run_20)
    assert same(weights(tmp_path / "last.pt"), weights(run_20 / "last.pt"))


def test_best_and_last_are_kept_apart(char_data, tmp_path, monkeypatch):
    found = iter([3.0, 1.0, 2.0, 9.0, 9.0])
    monkeypatch.setattr(train, "evaluate", lambda *_, **kw: dict(loss=next(found), ppl=1.0, bpb=1.0))
    train.main(config(char_data, tmp_path, max_iters=6, eval_interval=2))
    assert load(tmp_path / "best.pt")[1]["step"] == 4 and load(tmp_path / "last.pt")[1]["step"] == 6


def test_a_resumed_run_knows_what_was_best(char_data, tmp_path, monkeypatch):
    """Steps 2, 4 | 6, 8 with a stop between: the lowest loss, of step 2, stays in best.pt."""
    found = iter([1.0, 2.0, 9.0, 9.0, 3.0, 2.5, 9.0, 9.0])
    monkeypatch.setattr(train, "evaluate", lambda *_, **kw: dict(loss=next(found), ppl=1.0, bpb=1.0))
    for max_iters, resume in (4, False), (8, True):
        train.main(config(char_data, tmp_path, max_iters=max_iters, eval_interval=2, resume=resume))
        assert load(tmp_path / "best.pt")[1]["step"] == 2
    assert load(tmp_path / "last.pt")[1]["step"] == 8


def test_best_survives_a_kill_at_its_own_step(char_data, tmp_path, monkeypatch):
    """Killed behind the first evaluation, whose loss last.pt, saved before it, cannot know."""
    losses, write = iter([1.0, 5.0, 9.0, 9.0]), train.write_log
    monkeypatch.setattr(train, "evaluate", lambda *_, **kw: dict(loss=next(losses), ppl=1.0, bpb=1.0))

    def killed(out_dir, **record):
        write(out_dir, **record)
        if record["step"] == 3:
            raise KeyboardInterrupt
    monkeypatch.setattr(train, "write_log", killed)
    with pytest.raises(KeyboardInterrupt):
        train.main(config(char_data, tmp_path, max_iters=4, eval_interval=2))
    monkeypatch.setattr(train, "write_log", write)
    train.main(config(char_data, tmp_path, max_iters=4, eval_interval=2, resume=True))
    assert load(tmp_path / "best.pt")[1]["step"] == 2 and load(tmp_path / "last.pt")[1]["step"] == 4


def test_a_failing_evaluation_loses_nothing(char_data, tmp_path, monkeypatch):
    def fail(*args, **kw):
        raise RuntimeError("disk on fire")
    monkeypatch.setattr(train, "evaluate", fail)
    with pytest.raises(RuntimeError):
        train.main(config(char_data, tmp_path, max_iters=5))
    assert load(tmp_path / "last.pt")[1]["step"] == 5
    monkeypatch.undo()
    train.main(config(char_data, tmp_path, max_iters=5, resume=True))
    assert load(tmp_path / "best.pt")[1]["step"] == 5 and read_log(tmp_path, "final_loss")[0]


def test_a_finished_run_says_so_and_other_runs_are_not_overwritten(char_data, run_20, capsys):
    kw = dict(dropout=0.1, gradient_accumulation_steps=2)
    before = {path: path.stat().st_mtime_ns for path in run_20.iterdir()}
    train.main(config(char_data, run_20, **kw))
    assert "finished at step 20: nothing to do" in capsys.readouterr().out
    for changes, names in [(dict(n_layer=3), ["n_layer = 3", "was 2", "--overwrite", "--resume"]),
                           (dict(max_iters=30), ["stopped at step 20", "--resume", "--overwrite"]),
                           (dict(resume=True, learning_rate=1.0), ["learning_rate = 1.0", "--init_from"]),
                           (dict(resume=True, n_embd=32), ["n_embd = 32"])]:
        with pytest.raises(ValueError) as error:
            train.main(config(char_data, run_20, **kw | changes))
        assert all(name in str(error.value) for name in names), str(error.value)
    assert {path: path.stat().st_mtime_ns for path in run_20.iterdir()} == before


def test_a_resumed_run_may_be_made_longer(char_data, tmp_path, capsys):
    train.main(config(char_data, tmp_path))
    train.main(config(char_data, tmp_path, max_iters=25, resume=True))
    assert "max_iters = 25, which was 20" in capsys.readouterr().out
    assert load(tmp_path / "last.pt")[1]["step"] == 25 and list(losses(tmp_path)) == list(range(1, 26))
    train.main(config(char_data, tmp_path, max_iters=3, overwrite=True))
    assert load(tmp_path / "last.pt")[1]["step"] == 3 and list(losses(tmp_path)) == [1, 2, 3]


def test_changed_data_is_noticed_on_resume(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for cut in 0, 1:
        (tmp_path / "a.txt").write_text(text[cut:], encoding="utf-8")
        prepare_main(PrepareConfig([str(tmp_path / "a.txt")], str(tmp_path / "data"), "char"))
        cfg = config(tmp_path / "data", tmp_path / "out", resume=bool(cut), max_iters=5 + cut)
        if not cut:
            train.main(cfg)
    with pytest.raises(ValueError, match="the data, which was prepared anew"):
        train.main(cfg)


def test_weights_only_cannot_be_resumed(char_data, tmp_path):
    train.main(config(char_data, tmp_path, max_iters=3))
    os.replace(tmp_path / "best.pt", tmp_path / "last.pt")
    with pytest.raises(ValueError, match="weights only.*--init_from"):
        train.main(config(char_data, tmp_path, max_iters=6, resume=True))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_and_says_how_to_go_on(char_data, tmp_path, number):
    words = flags(**TINY | dict(max_iters=10**6, eval_interval=0), data_dir=char_data, out_dir=tmp_path)
    process = subprocess.Popen([sys.executable, "train.py", *words], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, encoding="utf-8")
    while not (tmp_path / "log.jsonl").exists():
        time.sleep(0.05)
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    step = load(tmp_path / "last.pt")[1]["step"]
    assert process.returncode == 128 + number and "Traceback" not in err
    assert f"stopped at step {step}; go on with: python train.py {tmp_path}/config.toml --resume" in out
    end = script(str(tmp_path / "config.toml"), "--resume", f"--max_iters={step + 2}")
    assert end.returncode == 0 and load(tmp_path / "last.pt")[1]["step"] == step + 2


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_checkpoints(char_data, tmp_path, monkeypatch):
    step = train.train_step

    def poisoned(run, *args):
        if run.step == 14:
            run.model.lm_head.weight.data.fill_(math.nan)
        return step(run, *args)
    monkeypatch.setattr(train, "train_step", poisoned)
    with pytest.raises(ValueError, match="not finite at step 15.*learning_rate.*last.pt is of step 10"):
        train.main(config(char_data, tmp_path))
    for name in "last.pt", "best.pt":
        model, ckpt = load(tmp_path / name)
        assert ckpt["step"] == 10 and all(p.isfinite().all() for p in model.parameters())


def test_fine_tuning_starts_from_the_given_weights(char_data, run_20, tmp_path, capsys, monkeypatch):
    cfg = config(char_data, tmp_path, init_from=str(run_20 / "best.pt"), n_layer=7, block_size=8, max_iters=2,
                 learning_rate=0.0)
    train.main(cfg)
    assert "n_layer = 2" in capsys.readouterr().out
    model, ckpt = load(tmp_path / "last.pt")
    assert model.config.block_size == 8 and same(ckpt["model"], weights(run_20 / "best.pt"))
    assert losses(tmp_path)[1] < losses(run_20)[1] - 0.5
    cfg = config(char_data, tmp_path, init_from=cfg.init_from, n_layer=7, block_size=8, max_iters=3,
                 learning_rate=0.0, resume=True)
    monkeypatch.setattr(train, "load_fitting", None)  # to go on, the first weights are not needed any more
    train.main(cfg)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="block_size = 32 is more than the 16"):
        train.main(config(char_data, tmp_path / "b", init_from=str(run_20 / "best.pt"), block_size=32))
    assert not (tmp_path / "b").exists()


def test_another_vocabulary_is_refused(bpe_data, char_data, run_20, tmp_path):
    with pytest.raises(ValueError, match="another vocabulary .char. .* .bpe."):
        train.main(config(bpe_data, tmp_path / "out", init_from=str(run_20 / "best.pt")))
    with pytest.raises(ValueError, match="vocab_size = 5 is less than"):
        train.main(config(char_data, tmp_path / "out", vocab_size=5))
    assert not (tmp_path / "out").exists()


def test_eval_only_scores_the_whole_split(char_data, run_20, capsys):
    train.main(config(char_data, run_20, eval_only=True))
    meta, tokenizer = load_data(char_data)
    ids = np.fromfile(train.data_path(char_data, meta, "val"), meta["dtype"])
    found = score(load(run_20 / "best.pt")[0].eval(), windows(ids, 16), tokenizer)
    assert found[1] == len(ids) - 1
    assert f"loss {metrics(*found)['loss']:.4f} nats per token" in capsys.readouterr().out
    final = read_log(run_20, "final_loss")[0][-1]
    assert final == pytest.approx(metrics(*found)["loss"], rel=1e-6)


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("parts", ["gpt2", "modern"])
def test_compiled_and_plain_runs_are_interchangeable(char_data, tmp_path, parts, capsys):
    """Three steps compiled and two plain, or the reverse, are five plain ones. 1e-4: sums round otherwise."""
    kw = tomllib.loads((ROOT / "config/gpt2.toml").read_text(encoding="utf-8")) if parts == "gpt2" else {}
    kw = kw | dict(zero_init=False)
    for name, first, then in ("plain", "false", "false"), ("on", "true", "false"), ("off", "false", "true"):
        train.main(config(char_data, tmp_path / name, max_iters=3, compile=first, **kw))
        train.main(config(char_data, tmp_path / name, max_iters=5, compile=then, resume=True, **kw))
    assert "warning" not in capsys.readouterr().err
    plain = read_log(tmp_path / "plain", "step", "loss", "grad_norm")
    for name in "on", "off":
        for ours, theirs in zip(read_log(tmp_path / name, "step", "loss", "grad_norm"), plain, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)


def test_compile_falls_back_with_one_warning(char_data, tmp_path, monkeypatch, capsys):
    def broken(module):
        raise RuntimeError("no compiler\nat all")
    monkeypatch.setattr(torch, "compile", broken)
    train.main(config(char_data, tmp_path, compile="true", max_iters=2))
    assert "torch.compile does not work here" in capsys.readouterr().err
    assert "lm_head.weight" in weights(tmp_path / "last.pt")


def test_a_source_of_known_entropy_is_learnt(tmp_path):
    """A Markov chain of 6 letters: loss - the source's log-loss on the same tokens ends in [-0.001, 1 %]."""
    g = rng(0, 0)
    p = g.dirichlet(np.ones(6) * 0.5, size=6)
    chain = [0]
    for u in g.random(120_000):
        chain.append(min(int((p[chain[-1]].cumsum() < u).sum()), 5))
    (tmp_path / "chain.txt").write_text("".join("abcdef"[i] for i in chain), encoding="utf-8")
    prepare_main(PrepareConfig([str(tmp_path / "chain.txt")], str(tmp_path), "char"))
    train.main(config(tmp_path, tmp_path / "out", max_iters=400, batch_size=64, n_layer=1, n_embd=32,
                      eval_interval=0, min_lr_frac=0.0))
    val = np.array(chain[int(len(chain) * 0.9):])
    source = -np.log(p[val[:-1], val[1:]]).mean()
    excess = read_log(tmp_path / "out", "final_loss")[0][-1] - source
    assert -0.001 <= excess <= 0.01 * source, (excess, source)


@pytest.fixture(scope="module")
def masked_run(bpe_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("masked") / "out"
    train.main(config(bpe_data, out, causal=False, n_embd=32, max_iters=100))
    return out


def test_a_masked_run(bpe_data, masked_run, capsys):
    """[MASK] is one more id; the same masks at every evaluation; the figure is called masked loss."""
    model, ckpt = load(masked_run / "best.pt")
    assert not model.config.causal and model.config.vocab_size == 301
    assert ckpt["tokenizer"]["special"][MASK] == 300
    names = {name for line in (masked_run / "log.jsonl").read_text(encoding="utf-8").splitlines()
             for name in json.loads(line)}
    assert "val_loss" in names and not names & {"val_ppl", "val_bpb", "final_ppl"}
    cfg = config(bpe_data, masked_run, causal=False, n_embd=32, eval_only=True)
    for _ in range(2):
        train.main(cfg)
    first, second = capsys.readouterr().out.strip().splitlines()[-2:]
    assert first == second and "masked loss" in first and "perplexity" not in first


def test_an_untrained_masked_model_knows_nothing(bpe_data, tmp_path):
    """Its loss is ln V at every evaluation: an evaluation without masks would say about 0."""
    run, cfg = make_run(bpe_data, tmp_path, causal=False)
    losses = [train.evaluate(run, cfg)["loss"] for _ in range(2)]
    assert losses[0] == losses[1] == pytest.approx(math.log(301), abs=1e-5)


def test_kinds_of_models_are_not_mixed(bpe_data, char_data, run_20, masked_run, tmp_path):
    causal = str(run_20 / "best.pt")
    for kw, match in [(dict(causal=False, init_from=causal), "is a causal model.*trains a masked one"),
                      (dict(init_from=str(masked_run / "best.pt")), "is a masked model.*trains a causal"),
                      (dict(teacher=str(masked_run / "best.pt")), "is a masked model"),
                      (dict(causal=False, eval_sample=5), "eval_sample = 5")]:
        with pytest.raises(ValueError, match=match):
            train.main(config(bpe_data if "init_from" not in kw else char_data, tmp_path / "out", **kw))
    with pytest.raises(ValueError, match="teacher.*another vocabulary"):
        train.main(config(bpe_data, tmp_path / "out", teacher=causal))
    with pytest.raises(ValueError, match="block_size = 32 is more than the 16"):
        train.main(config(char_data, tmp_path / "out", teacher=causal, block_size=32))
    assert not (tmp_path / "out").exists()


def test_smoothing_and_teachers_change_training_and_never_evaluation(char_data, run_20, tmp_path):
    """The same weights (learning rate 0) have the same validation loss, whatever the training loss is."""
    kw = dict(init_from=str(run_20 / "best.pt"), learning_rate=0.0, max_iters=2, eval_interval=1)
    seen = {}
    for name, extra in dict(plain={}, smooth=dict(label_smoothing=0.2), hot=dict(train_temperature=2.0),
                            taught=dict(teacher=str(run_20 / "last.pt"), distill_alpha=0.9)).items():
        train.main(config(char_data, tmp_path / name, **kw, **extra))
        seen[name] = losses(tmp_path / name)[1], read_log(tmp_path / name, "val_loss")[0][0]
    trained, scored = map(set, zip(*seen.values(), strict=True))
    assert len(trained) == 4 and len(scored) == 1


def test_pairs(tmp_path, capsys):
    """A run on pairs: whole pairs in each batch, every response token of the split scored once at the end."""
    prepare_main(PrepareConfig(["letters"], str(tmp_path / "data"), "char"))
    cfg = config(tmp_path / "data", tmp_path / "out", block_size=24, eval_iters=1)
    train.main(cfg)
    meta, tokenizer = load_data(tmp_path / "data")
    run = train.make_run(cfg, meta, tokenizer)
    ids = np.fromfile(train.data_path(cfg.data_dir, meta, "val"), meta["dtype"])
    rows = np.fromfile(train.data_path(cfg.data_dir, meta, "val_rows"), np.int64)
    targets = np.concatenate([y[y != IGNORE] for _, y in run.val_batches(cfg, whole=True)])
    expected = np.concatenate([ids[rows[i + 1]:rows[i + 2]] for i in range(0, len(rows) - 1, 2)])
    assert np.array_equal(targets, expected)
    x, y = run.train_batch(3, cfg)
    for inputs, wanted in zip(x.tolist(), y.tolist(), strict=True):
        task, word = tokenizer.decode(inputs).split("\n")[0].split()
        response = tokenizer.decode(i for i in wanted if i != IGNORE)
        assert response.endswith(EOT) and (task != "reverse" or response == word[::-1] + EOT)
    with pytest.raises(ValueError, match="--block_size="):
        train.main(config(tmp_path / "data", tmp_path / "b", block_size=8))
    with pytest.raises(ValueError, match="pairs"):
        train.main(config(tmp_path / "data", tmp_path / "b", causal=False))


def torchrun(*words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | dict(OMP_NUM_THREADS="1")
    return subprocess.run([*command, "train.py", *words], cwd=ROOT, env=env, capture_output=True, text=True,
                          encoding="utf-8", timeout=300)


@pytest.mark.parametrize("kind", ["text", "pairs", "fsdp"])
def test_two_processes_take_the_steps_of_one(char_data, tmp_path, kind):
    """torchrun with gloo: dropout on, accumulation 4, and for pairs unlike numbers of targets per process."""
    data = char_data
    if kind == "pairs":
        data = tmp_path / "letters"
        prepare_main(PrepareConfig(["letters"], str(data), "char"))
    kw = dict(block_size=24, eval_iters=3, dropout=0.1, gradient_accumulation_steps=4, learning_rate=2e-3)
    words = flags(**TINY | kw, data_dir=data)
    env = os.environ | dict(OMP_NUM_THREADS="1")

    one = script(*words, f"--out_dir={tmp_path}/one", env=env)
    more = ["--fsdp", "--activation_checkpointing"] if kind == "fsdp" else []
    two = torchrun(*words, *more, f"--out_dir={tmp_path}/two")
    assert one.returncode == two.returncode == 0, two.stderr[-2000:]
    assert "× 2 processes" in two.stdout and two.stdout.count("best.pt (step") == 1
    for column in "loss", "grad_norm", "val_loss", "final_loss":
        (steps, ours), (_, theirs) = (read_log(tmp_path / name, "step", column) for name in ("one", "two"))
        for step, a, b in zip(steps, ours, theirs, strict=True):
            assert a == pytest.approx(b, rel=1e-6 if step == 1 else 1e-4), (column, step)
    ours, theirs = (weights(tmp_path / name / "last.pt") for name in ("one", "two"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    if kind == "text":
        bad = torchrun(*words, "--gradient_accumulation_steps=3", f"--out_dir={tmp_path}/bad")
        assert "gradient_accumulation_steps = 3 must be a multiple of the 2 processes" in bad.stderr
        assert bad.returncode and not (tmp_path / "bad").exists()


def test_a_run_changes_between_one_process_and_fsdp(char_data, tmp_path):
    """12 steps by one process, 4 by two that share the weights, 4 by one again: 20 as by one alone."""
    kw = dict(dropout=0.1, gradient_accumulation_steps=2, learning_rate=2e-3, tie_weights=True,
              schedule="constant", zero_init=False)
    words = flags(**TINY | kw | dict(eval_interval=4), data_dir=char_data)
    env = os.environ | dict(OMP_NUM_THREADS="1")
    for name, steps in ("straight", 20), ("mixed", 12):
        assert script(*words, f"--out_dir={tmp_path}/{name}", f"--max_iters={steps}", env=env).returncode == 0
    mixed = [*words, f"--out_dir={tmp_path}/mixed", "--resume"]
    two = torchrun(*mixed, "--fsdp", "--max_iters=16")
    assert two.returncode == 0 and "best.pt (step" in two.stdout, two.stderr[-2000:]
    one = script(*mixed, "--max_iters=20", env=env)
    assert one.returncode == 0, one.stderr
    (_, ours), (_, theirs) = (read_log(tmp_path / name, "step", "loss") for name in ("straight", "mixed"))
    assert ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = (weights(tmp_path / name / "last.pt") for name in ("straight", "mixed"))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------- log and curves

def test_the_later_line_of_a_step_counts(tmp_path):
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.5}', '{"step": 2, "val_loss": 2.6}',
             '{"step": 1, "loss": 9.0}', '{"step": 3, "lo']
    (tmp_path / "log.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert read_log(tmp_path, "step", "loss") == [[1, 2], [9.0, 2.5]]
    assert read_log(tmp_path, "step", "val_loss") == [[2], [2.6]]
    assert read_log(tmp_path, "step", "nothing") == [[], []]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lines", [[], [dict(step=1, loss=3.0)], [dict(step=1, val_loss=2.0)],
                                   [dict(step=1, loss=1000.0), dict(step=2, loss=math.inf)]])
def test_curves_of_any_log(tmp_path, lines):
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    figure = plot_log(tmp_path, 65, 3.3)
    loss_axis, ppl_axis = figure.axes
    assert "nats per token" in loss_axis.get_ylabel() and "perplexity" in ppl_axis.get_ylabel()
    heights = [line.get_ydata()[0] for line in loss_axis.lines[2:]]
    assert heights == pytest.approx([math.log(65), 3.3])
    assert [line.get_ydata()[0] for line in ppl_axis.lines[2:]] == pytest.approx([65, math.exp(3.3)])
    assert len(loss_axis.get_legend().get_texts()) == 4


# ------------------------------------------------------------------------------- mistakes

@pytest.mark.parametrize("words, names", [
    (["--n_layr=4"], ["n_layr", "n_layer"]), (["--n_layer=four"], ["n_layer", "four"]),
    (["--n_layer=true"], ["n_layer", "true"]), (["--n_head=5"], ["n_head = 5", "n_embd"]),
    (["bad_key.toml"], ["n_layr", "bad_key.toml"]), (["broken.toml"], ["broken.toml", "TOML"]),
    (["--data_dir=nowhere"], ["nowhere", "prepare.py"]),
    (["--data_dir=small"], ["block_size = 64", "--block_size=3"]),
    (["--data_dir=small", "--block_size=4"], ["val split", "4 tokens"]),
    (["--gradient_accumulation_steps=0"], ["gradient_accumulation_steps = 0"]),
    (["--dropout=1"], ["dropout = 1.0"]), (["--device=tpu"], ["device = 'tpu'"]),
    (["--device=cuda:99"], ["device = 'cuda:99'"]), (["--resume"], ["last.pt", "--resume"]),
    (["--init_from=no.pt"], ["no.pt does not exist"]),
    (["--init_from=foreign.pt"], ["foreign.pt is damaged"]),
    (["--eval_only"], ["best.pt does not exist"]), (["--optimizer=sgd"], ["optimizer", "adamw|muon"]),
    (["--fsdp"], ["fsdp = true", "torchrun"]), (["--fsdp", "--optimizer=muon"], ["fsdp = true", "muon"]),
    (["--fsdp", "--eval_sample=9"], ["fsdp = true", "eval_sample = 9"]),
    (["--fsdp", "--ema_decay=0.9"], ["fsdp = true", "ema_decay = 0.9"]),
    (["--ema_decay=1"], ["ema_decay = 1.0", "less than 1"]),
    (["--peak_tflops=-1"], ["peak_tflops = -1.0"]),
    (["--data_dir=small", "--block_size=3", "--out_dir=file"], ["file"]),
])
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, char_data, mistake, words, names):
    (tmp_path / "bad_key.toml").write_text("n_layr = 4", encoding="utf-8")
    (tmp_path / "broken.toml").write_text("n_layer = = 4", encoding="utf-8")
    (tmp_path / "foreign.pt").write_bytes(b"hello")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "40.txt").write_text("x" * 40, encoding="utf-8")
    prepare_main(PrepareConfig([str(tmp_path / "40.txt")], str(tmp_path / "small"), "byte"))
    before = sorted(tmp_path.rglob("*"))
    defaults = [] if any("data_dir" in word for word in words) else [f"--data_dir={char_data}"]
    message, err = mistake(train.main, TrainConfig, ["--block_size=64", *defaults, *words], tmp_path)
    assert all(name in message for name in names), message
    assert len(err.splitlines()) == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_mistake_in_a_real_process(tmp_path):
    end = script("--n_layr=4", cwd=tmp_path)
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr == "error: there is no setting 'n_layr'; did you mean --n_layer?\n"


def test_help_names_every_setting():
    for name in "prepare", "train", "sample":
        words = [sys.executable, f"{name}.py", "--help"]
        end = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
        module = __import__(name)
        fields = getattr(module, f"{name.title()}Config").__dataclass_fields__
        entries = dict(re.findall(r"^  --(\w+) (.*(?:\n {6,}.*)*)", end.stdout, re.MULTILINE))
        assert end.returncode == 0 and entries.keys() == fields.keys()
        for setting, entry in entries.items():
            entry = " ".join(entry.split())
            assert re.fullmatch(r"(int|float|str|[\w|]+) \S.{8,} \(default: .*\)", entry), (setting, entry)


def test_presets_parse():
    for path in (ROOT / "config").glob("*.toml"):
        assert parse(TrainConfig, [str(path)]), path
