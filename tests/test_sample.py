"""sample.py: filters against their definitions and transformers', generation, streams, the command."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

import conftest
import prepare
import sample
import train
from model import GPT, GPTConfig, save, save_hf
from prepare import EOT, MASK, Tokenizer, load_data
from sample import (TextStream, beam_search, fill, generate, keep_min_p, keep_top_p, next_token,
                    penalize, prompt_ids, quantize, windows)

ROOT = Path(__file__).parent.parent
GPT2 = dict(pos_emb="learned", norm="layernorm", norm_embd=False, qk_norm=False, activation="gelu", bias=True,
            tie_weights=True, logit_softcap=0.0)
BYTE = Tokenizer(dict(kind="byte", special={EOT: 256}))


def make(seed=0, V=29, **kw):
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**dict(block_size=12, vocab_size=V, n_layer=2, n_head=2, n_embd=16) | kw)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.5)
    return model.eval()


def random_logits(ties=False, seed=0):
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits / 2).round() * 2 if ties else logits


def kept(logits):
    return logits.isfinite()


# ------------------------------------------------------------------------------- filters

@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("p", [0.0, 1e-9, 0.3, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_with_mass_p(p, ties):
    logits = random_logits(ties).double()
    out, probs = keep_top_p(logits, p), logits.softmax(1)
    for row, stays in zip(probs, kept(out), strict=True):
        chosen = row[stays].sort().values
        assert len(chosen) >= 1 and (chosen.sum() >= p - 1e-12 or len(chosen) == 50)
        assert len(chosen) == 1 or chosen[1:].sum() < p, "without its least likely token it has less than p"
        assert (row[~stays] <= chosen[0] + 1e-15).all()


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough(min_p):
    probs = random_logits().double().softmax(1)
    expected = probs >= min_p * probs.amax(1, keepdim=True) * (1 - 1e-12)
    assert torch.equal(kept(keep_min_p(random_logits().double(), min_p)), expected)


def test_the_penalty_counts_each_token_once():
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0, -1.0]])
    seen = torch.tensor([[True, True, True, False, False]])
    assert penalize(logits, seen, 2.0).tolist() == [[1.0, -4.0, 0.0, 4.0, -1.0]]
    assert torch.equal(penalize(logits, seen, 1.0), logits)


@pytest.mark.parametrize("ties", [False, True])
def test_filters_equal_transformers_processors(ties):
    from transformers import (MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper,
                              TopPLogitsWarper)
    logits = random_logits(ties)
    idx = torch.randint(50, (200, 9), generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(200, 50, dtype=torch.bool).scatter_(1, idx, True)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(idx, logits.clone())
    torch.testing.assert_close(penalize(logits, seen, 1.3), theirs, atol=1e-6, rtol=0)
    assert torch.equal(keep_min_p(logits, 0.1), MinPLogitsWarper(0.1)(idx, logits))
    if not ties:  # theirs keeps more than k where the k-th is tied, and cuts ties by another order
        for k in 1, 5, 50:
            expected = TopKLogitsWarper(k)(idx, logits).softmax(1)
            torch.testing.assert_close(shares(logits, 2000, top_k=k), expected, atol=2 / 2000, rtol=0)
        for p in 0.1, 0.5, 0.95:
            assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(idx, logits))


# ------------------------------------------------------------------------------- choosing a token

GRID = 20_000  # evenly spaced u hit a token of probability p in p · GRID places, give or take one


def shares(logits, grid=GRID, **kw):
    """How often next_token draws each token, over all u: (B, V) for logits (B, V)."""
    u = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    return torch.stack([next_token(row.expand(grid, -1), u, **kw).bincount(minlength=len(row)) / grid
                        for row in logits])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 2, 7, 50, 99])
def test_top_k_draws_exactly_the_k_likeliest(k, ties):
    """… in proportion to their probabilities, also where more than k are as likely as the k-th."""
    for row in random_logits(ties)[:8] / 4:
        share = shares(row[None], top_k=k)[0]
        drawn = share > 0
        assert drawn.sum() == min(k, 50), "none is so unlikely that the grid could miss it"
        assert row[~drawn].max() <= row[drawn].min() if k < 50 else drawn.all()
        expected = row.masked_fill(~drawn, -math.inf).softmax(0)
        torch.testing.assert_close(share, expected, atol=2 / GRID, rtol=0)


def draws(logits, n, **kw):
    u = torch.from_numpy(np.random.default_rng(0).random(n))
    return next_token(logits.expand(n, -1), u, **kw)


def test_20_000_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0])
    for T, expected in ((0.5, (0.8668, 0.1173, 0.0159)), (1.0, (0.6652, 0.2447, 0.0900)),
                        (2.0, (0.5065, 0.3072, 0.1863))):
        found = torch.bincount(draws(logits, 20000, temperature=T), minlength=3) / 20000
        for f, p in zip(found.tolist(), expected, strict=True):
            assert abs(f - p) < 4 * math.sqrt(p * (1 - p) / 20000) + 1e-4, "four standard errors"


def test_filters_renormalise_one_after_another():
    """The order of transformers: penalty, temperature, top-k, top-p, min-p. Of the two that k = 2 leaves
    (0.731 and 0.269), p = 0.7 keeps one; of all three it would keep two."""
    logits = torch.tensor([2.0, 1.0, 0.0])
    assert draws(logits, 1000, top_k=2, top_p=0.7).unique().tolist() == [0]
    assert draws(logits, 1000, top_p=0.7).unique().tolist() == [0, 1]
    assert draws(logits, 1000, top_k=1, top_p=0.8).unique().tolist() == [0]


@pytest.mark.parametrize("choice", [
    dict(temperature=0), dict(temperature=1e-6), dict(temperature=1e-45), dict(top_k=1), dict(top_p=0.0),
    dict(top_p=1e-9), dict(min_p=1.0)], ids=str)
def test_what_leaves_only_the_likeliest_is_greedy(choice):
    logits = random_logits()
    u = torch.from_numpy(np.random.default_rng(0).random(200))
    assert torch.equal(next_token(logits, u, **choice), logits.argmax(1))


def test_a_ruled_out_token_is_never_drawn():
    """Whatever u is: 0, the largest double below 1, or a boundary of the distribution function."""
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    for u, expected in (0.0, 1), (0.5, 3), (np.nextafter(0.5, 0), 1), (np.nextafter(1, 0), 3):
        assert next_token(logits, torch.tensor([u])).item() == expected


# ------------------------------------------------------------------------------- generation

def run(model, idx, n, V=29, **kw):
    """The tokens written behind each of the prompts, (B, n)."""
    out = [[] for _ in idx]
    for i, token in generate(model, [list(map(int, row)) for row in idx], n, V, **kw):
        out[i].append(token)
    return torch.tensor(out)


@pytest.mark.parametrize("parts", [{}, GPT2, dict(tie_weights=True), dict(pos_emb="learned")], ids=str)
@pytest.mark.parametrize("length", [1, 5, 12, 30])
def test_cache_on_and_off_give_the_same_tokens(parts, length):
    """Before and far past the context; prompts shorter, as long and longer than it."""
    model = make(**parts)
    idx = torch.randint(29, (3, length), generator=torch.Generator().manual_seed(3))
    for choice in dict(temperature=0), dict(top_k=9), dict(repetition_penalty=1.5, top_p=0.9):
        on, off = (run(model, idx, 40, kv_cache=on, **choice) for on in (True, False))
        assert torch.equal(on, off) and on.shape == (3, 40)


def test_generation_is_the_loop_that_the_docstring_tells():
    """Greedy, by hand: the whole window each time, its newer half when it has outgrown block_size."""
    for size in 1, 2, 5, 12:
        model, window, expected = make(block_size=size), [3], []
        for _ in range(30):
            token = model(torch.tensor([window]))[0, -1].argmax().item()
            expected.append(token)
            window.append(token)
            if len(window) > size:
                window = window[-max(size // 2, 1):]
        assert run(model, torch.tensor([[3]]), 30, temperature=0)[0].tolist() == expected


def test_seeds():
    model, idx = make(), torch.ones(2, 3, dtype=torch.int64)
    assert torch.equal(run(model, idx, 30, seed=5), run(model, idx, 30, seed=5))
    assert not torch.equal(run(model, idx, 30, seed=5), run(model, idx, 30, seed=6))
    greedy = [run(model, idx, 30, seed=s, temperature=0) for s in (1, 2)]
    assert torch.equal(*greedy)


def test_rows_draw_for_themselves():
    """Sixteen samples of one prompt differ from the first token on, and do not depend on each other."""
    model = make()
    many = run(model, torch.ones(16, 3, dtype=torch.int64), 20, temperature=2.0)
    assert len(many[:, 0].unique()) > 1
    assert torch.equal(run(model, torch.ones(3, 3, dtype=torch.int64), 20, temperature=2.0), many[:3])


def test_ids_that_only_pad_the_matrix_are_never_chosen():
    model = make(V=64)
    for choice in dict(temperature=2.0), dict(temperature=0), dict(repetition_penalty=2.0):
        assert run(model, torch.ones(20, 1, dtype=torch.int64), 100, V=40, **choice).max() < 40


def test_the_penalty_counts_the_prompt_and_what_was_written():
    model = make(V=8)
    text = run(model, torch.tensor([[1, 2, 3]]), 5, V=8, temperature=0, repetition_penalty=1e9)[0].tolist()
    positive_ruled_out = len(set(text + [1, 2, 3]))
    assert positive_ruled_out == 8, "a penalty this high writes every token before it repeats one"


@pytest.mark.parametrize("parts", [{}, GPT2], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_prompts_of_unlike_length_together_are_each_alone(parts, batch_size):
    """Sixteen prompts of 1 to 30 tokens, the longer ones beyond the context, through fewer rows."""
    model, g = make(**parts), np.random.default_rng(0)
    prompts = [g.integers(29, size=n).tolist() for n in g.integers(1, 30, size=16)]
    for choice in dict(temperature=0), dict(temperature=1.0), dict(repetition_penalty=1.3):
        together = [[] for _ in prompts]
        for i, token in generate(model, prompts, 20, 29, batch_size=batch_size, **choice):
            together[i].append(token)
        for i, prompt in enumerate(prompts):
            if choice.get("temperature") == 0:
                assert together[i] == run(model, [prompt], 20, **choice)[0].tolist(), i
        pairs = list(generate(model, prompts, 20, 29, batch_size=batch_size, kv_cache=False, **choice))
        assert together == [[token for j, token in pairs if j == i] for i in range(16)]


def test_a_text_that_ended_makes_room_for_the_next():
    """40 prompts through 8 rows: each stops at its own length, never are more than 8 under way."""
    model, counts, open_texts, most = make(), [0] * 40, set(), 0
    wanted = np.random.default_rng(1).integers(1, 9, size=40)
    prompts = [[i % 29] for i in range(40)]
    for i, _ in generate(model, prompts, 50, 29, ended=lambda i: counts[i] >= wanted[i]):
        counts[i] += 1
        open_texts.add(i)
        open_texts -= {j for j in open_texts if counts[j] >= wanted[j] and j != i}
        most = max(most, len(open_texts))
    assert counts == wanted.tolist() and most <= 8
    assert list(generate(model, [[1], [2]], 0, 29)) == [] and list(generate(model, [], 5, 29)) == []


# ------------------------------------------------------------------------------- beams

def exhaustive(model, ids, n, V, end, length_penalty):
    """All continuations of up to n tokens, scored by the definition: [(score, ids), …], the best first."""
    found = []

    def grow(written, total):
        logp = model(torch.tensor([ids + written]))[0, -1, :V].log_softmax(-1)
        for token in range(V):
            text, value = [*written, token], total + logp[token].item()
            if token == end or len(text) == n:
                found.append((value / len(text) ** length_penalty, text))
            else:
                grow(text, value)
    with torch.no_grad():
        grow([], 0.0)
    return sorted(found, reverse=True)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("end", [2, None])
def test_beams_enough_for_all_are_exhaustive_search(length_penalty, end):
    model = make(V=5)
    expected = exhaustive(model, [1, 3], 3, 4, end, length_penalty)
    for cache in True, False:
        found = beam_search(model, [1, 3], 3, 4, 64, length_penalty, end, cache)
        assert [text for _, text in found[:10]] == [text for _, text in expected[:10]]
        assert found[0][0] == pytest.approx(expected[0][0], abs=1e-5)


def test_one_beam_is_greedy_and_more_find_what_is_likelier():
    model = make()
    for start in range(5):
        greedy = run(model, [[start]], 20, temperature=0)[0].tolist()
        [(score, text)] = beam_search(model, [start], 20, 29, num_beams=1)
        assert text == greedy
        assert beam_search(model, [start], 20, 29, num_beams=8)[0][0] >= score - 1e-6
        on, off = (beam_search(model, [start], 20, 29, 3, kv_cache=cache)[0] for cache in (True, False))
        assert on[1] == off[1] and on[0] == pytest.approx(off[0], abs=1e-5)


class Chain(torch.nn.Module):
    """A model whose next token depends on the last one only, by a table of probabilities."""

    def __init__(self, table):
        super().__init__()
        self.config = GPTConfig(block_size=16, vocab_size=len(table), n_layer=1, n_head=1, n_embd=2)
        self.lm_head = torch.nn.Linear(1, 1)
        self.logits = torch.tensor(table).log()

    def hidden(self, idx, cache=None):
        return self.logits[idx]

    def head(self, x):
        return x


def test_beams_rank_as_by_hand():
    """Token 2 ends. From 0: end at once with p = 0.4, or 1 (0.6), which ends (0.55) or goes on with 1 (0.45).

    ln p: [2] -0.916; [1, 2] ln 0.33 = -1.109; [1, 1, 2] ln 0.1485 = -1.907. Length penalty 0: as they are, so
    [2]. 1: -0.916, -0.554, -0.636, so [1, 2]. 2: -0.916, -0.277, -0.212, so [1, 1, 2].
    """
    model = Chain([[1e-9, 0.6, 0.4], [1e-9, 0.45, 0.55], [1 / 3, 1 / 3, 1 / 3]])
    for penalty, text, score in (0.0, [2], -0.9163), (1.0, [1, 2], -0.5543), (2.0, [1, 1, 2], -0.2119):
        found = beam_search(model, [0], 3, 3, 4, penalty, end=2, kv_cache=False)
        assert found[0][1] == text and found[0][0] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("parts", [{}, GPT2], ids=str)
def test_beams_equal_transformers(tmp_path, parts):
    import transformers
    model = make(V=29, block_size=32, zero_init=False, **parts).float()
    save_hf(tmp_path, model)
    name = "GPT2LMHeadModel" if parts else "NanoChatForCausalLM"
    theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
    g, ended = np.random.default_rng(0), 0
    for n in range(24):
        prompt, K, penalty = g.integers(29, size=1 + n % 5).tolist(), 2 + n % 3, [0.0, 0.6, 1.0, 2.0][n % 4]
        end = beam_search(model, prompt, 12, 29, K, penalty)[0][1][n % 6]  # a token that does come
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, num_beams=K, do_sample=False,
                              attention_mask=torch.ones(1, len(prompt)), eos_token_id=end, pad_token_id=0,
                              length_penalty=penalty, early_stopping="never")
        expected = out[0, len(prompt):].tolist()
        expected = expected[:expected.index(end) + 1] if end in expected else expected
        assert beam_search(model, prompt, 12, 29, K, penalty, end)[0][1] == expected, n
        ended += len(expected) < 12
    assert ended >= 5, "some texts must end before the limit"


# ------------------------------------------------------------------------------- scores

def test_the_probabilities_of_all_strings_sum_to_one():
    model = make(V=5)
    total = 0.0
    for string in itertools.product(range(5), repeat=3):
        ids = np.array([0, *string])
        total += math.exp(-sample.score(model, windows(ids, 12), Tokenizer(dict(kind="byte", special={})))[0])
    assert total == pytest.approx(1, abs=1e-6)


def test_the_command_scores_and_ranks(trained):
    end = command(trained, "--score=ANNA:\nThe river.", "--score=xqzj#k wvq", "--stride=4", "--verbose")
    *table, first, second = end.stdout.splitlines()
    assert "'ANNA:" in first and "xqzj" in second and "bits per byte" in first and len(table) > 8
    model, tokenizer, _ = sample.load_trained(trained / "out/best.pt")
    ids = tokenizer.encode("ANNA:\nThe river.")
    logp = model.eval()(torch.tensor(ids[None].astype(np.int64)))[0].log_softmax(-1)
    total = sum(logp[t, ids[t + 1]].item() for t in range(len(ids) - 1))
    assert f"ln p {total:.4f}, {len(ids) - 1} tokens" in first
    shown = sum(float(line.split()[0]) for line in table[:len(ids) - 1])
    assert shown == pytest.approx(-total, abs=1e-3)


def test_lines_come_out_in_their_order(trained, tmp_path):
    (tmp_path / "p.txt").write_text("\n".join(f"ANNA {i}" for i in range(11)), encoding="utf-8")
    words = [f"--start=LINES:{tmp_path}/p.txt", "--max_new_tokens=30", "--temperature=0"]
    end = command(trained, *words, "--batch_size=4", "--stop=:")
    texts = end.stdout.split("-" * 15 + "\n")[:-1]
    assert [text[:len(f"ANNA {i}")] for i, text in enumerate(texts)] == [f"ANNA {i}" for i in range(11)]
    alone = command(trained, "--start=ANNA 3", *words[1:], "--stop=:").stdout
    assert texts[3].rstrip("\n") == alone.rstrip("\n")
    words = ["--start=ANNA", "--num_beams=3", "--max_new_tokens=10"]
    beams = command(trained, *words)
    assert beams.returncode == 0 and beams.stdout.startswith("ANNA")
    assert beams.stdout == command(trained, *words, "--kv_cache=false", "--seed=9").stdout


# ------------------------------------------------------------------------------- streams

def feed(stream, ids):
    return [stream.feed(i) for i in ids]


def test_a_stream_never_breaks_a_character():
    for text in "😀", "今天天气很好", "a😀b", "é":
        stream = TextStream(BYTE)
        parts = feed(stream, text.encode())
        assert "".join(parts) + stream.finish() == text and "\ufffd" not in "".join(parts)
    stream = TextStream(BYTE)
    assert feed(stream, "😀".encode()[:2]) == ["", ""] and stream.finish() == "\ufffd"
    assert feed(TextStream(BYTE), b"\xff a") == ["\ufffd", " ", "a"]


def test_a_stream_ends_at_end_of_text():
    stream = TextStream(BYTE)
    assert "".join(feed(stream, [65, 66, 256, 67, 68])) == "AB" and stream.done and stream.finish() == ""


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4))
def test_a_stream_ends_before_the_stop_text(text, stop):
    """Whatever the stop text, what is printed is the text before it, and nothing of it slips out early."""
    stream = TextStream(BYTE, stop)
    shown = "".join(feed(stream, text.encode())) + stream.finish()
    assert shown == text.partition(stop)[0] and stream.done


# ------------------------------------------------------------------------------- small weights

def linear(rows=70, columns=192, seed=0):
    torch.manual_seed(seed)
    layer = nn.Linear(columns, rows)
    layer.weight.data *= torch.linspace(0.1, 30, rows)[:, None]  # rows of very unlike size
    layer.weight.data[3] = 0
    return layer.requires_grad_(False)


@pytest.mark.parametrize("seed", range(5))
def test_int8_is_within_half_a_step(seed):
    layer = linear(seed=seed)
    small = sample.Int8Linear(layer, kernel=False)
    step = small.scale[:, None] * small.use
    assert ((small.weight() - layer.weight).abs() <= step * (0.5 + 1e-4)).all()  # 1e-4: float32 of 127 steps
    assert (layer.weight.abs() <= step * 127.5).all(), "and none is cut off"
    used = small.q.abs().amax(1)
    assert ((used == 127) | (layer.weight == 0).all(1)).all(), "the steps are no wider than the weights need"
    assert torch.equal(small.use, layer.weight.abs().amax(0))


needs_vnni = pytest.mark.skipif(not sample.Int8Linear.bytewise, reason="needs VNNI")


@pytest.mark.parametrize("bytewise", [False, pytest.param(True, marks=needs_vnni)])
def test_an_input_on_another_scale_changes_no_bit_of_int8(bytewise, monkeypatch):
    """A channel 128 times as large, of which the weights make 128 times less: else it would leave the other
    channels one bit of eight."""
    monkeypatch.setattr(sample.Int8Linear, "bytewise", bytewise)
    layer, x = linear(), torch.randn(3, 192, generator=torch.Generator().manual_seed(1))
    before = sample.Int8Linear(layer, kernel=True)(x)
    x[:, 7] *= 128
    layer.weight[:, 7] /= 128
    assert torch.equal(sample.Int8Linear(layer, kernel=True)(x), before)


@needs_vnni
@pytest.mark.parametrize("shape", [(192,), (1, 192), (3, 1, 192), (2, 40, 192)])
def test_products_of_bytes_are_off_by_half_a_step_of_each_input(shape):
    """… at most: |Δy| ≤ Σ |w| · step / 2, where a row's step is max |x · use| / 127. And whole numbers add
    up exactly, whatever the machine does in between: the extremes of 8 bits."""
    layer, x = linear(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    layer.bias = None
    small = sample.Int8Linear(layer, kernel=True)
    x.view(-1, 192)[1:2] = 0
    w, use = small.weight().double(), small.use.double()
    step = (x.double() * use).abs().amax(-1, keepdim=True) / 127
    bound = step / 2 * (w.abs() / use).sum(1)
    off = (small(x) - x.double() @ w.T).abs()
    assert (off <= bound * 1.001 + 1e-6).all() and off.max() > 0
    ends = torch.tensor([[127] * 64, [-127] * 64], dtype=torch.int8)
    most = torch.full((2, 64), 255, dtype=torch.uint8)
    assert torch._int_mm(most, ends.T).tolist() == 2 * [[64 * 255 * 127, -64 * 255 * 127]]


@pytest.mark.parametrize("group", [64, 32])
def test_int4_is_within_half_a_step_of_its_group(group):
    layer = linear()
    small = sample.Int4Linear(layer, kernel=False, group=group)
    w = layer.weight.unflatten(1, (-1, group))
    step = ((w.amax(2) - w.amin(2)) / 15)[..., None]
    # scale and zero are rounded to 8 bits, so that the ends of a group can be 2⁻⁸ of 15 steps further off
    assert ((small.weight().unflatten(1, (-1, group)) - w).abs() <= step * (0.5 + 15 / 256) + 1e-30).all()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(192,), (1, 192), (3, 1, 192), (2, 40, 192)])
def test_the_packed_kernel_multiplies_by_the_unpacked_weights(kind, shape, monkeypatch):
    """bfloat16 rounds inputs, scales and outputs to 8 bits, by 2⁻⁹ at most: six deviations of the sum."""
    monkeypatch.setattr(sample.Int8Linear, "bytewise", False)
    monkeypatch.setattr(sample.Int8Linear, "few", 32)
    layer, x = linear(), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    plain, packed = (sample.SMALL[kind][0](layer, kernel) for kernel in (False, True))
    expected = torch.nn.functional.linear(x, plain.weight(), layer.bias)
    torch.testing.assert_close(plain(x), expected)
    size = (x.square() @ plain.weight().square().T).sqrt() + layer.bias.abs()
    y = packed(x)
    assert y.shape == expected.shape and y.dtype == torch.float32
    assert ((y - expected).abs() <= size * 2 ** -9 * 6 + expected.abs() * 2 ** -8).all()
    packed.bias = nn.Parameter(layer.bias.bfloat16(), requires_grad=False)
    half = packed(x.bfloat16())
    assert half.dtype == torch.bfloat16 and ((half - y).abs() <= (size + y.abs()) * 2 ** -9 * 6).all()


@pytest.mark.parametrize("parts", [{}, GPT2], ids=str)
@pytest.mark.parametrize("packed", [True, False])
def test_small_weights_take_what_the_formula_says(parts, packed):
    C, V, T = 64, 29, 12
    for kind in "int8", "int4":
        model = make(n_embd=C, **parts).float()
        before = model.transformer.wte.weight.clone()
        rest = sum(p.numel() for name, p in model.named_parameters() if p.dim() < 2 or "wpe" in name) + V * C
        assert quantize(model, kind, packed=packed) == packed
        matrices = 2 * [(3 * C, C), (C, C), (4 * C, C), (C, 4 * C)] + [(V, C)]
        if kind == "int8":
            size = sum(out * inputs + 8 * out + 4 * inputs for out, inputs in matrices)
        else:  # 4 bits, and 32 for each group of 64; the kernel's outputs come by the 16
            size = sum((out + (-out % 16 if packed else 0)) * inputs * 4.5 / 8 for out, inputs in matrices)
        assert sample.megabytes(model) == (4 * rest + size) / 1e6
        assert torch.equal(model.transformer.wte.weight, before), "a tied embedding stays as it was"
        idx = torch.arange(T)[None]
        full = make(n_embd=C, **parts).float()
        full.lm_head.weight = nn.Parameter(full.lm_head.weight.detach().clone())  # untie
        for name, module in model.named_modules():
            if hasattr(module, "q"):
                w = sample.SMALL[kind][0](full.get_submodule(name), kernel=False).weight()
                full.get_submodule(name).weight.data = w
        logits, expected = model(idx), full(idx)
        # with inputs of 8 bits: a part in 2⁸ of the logits' size, through two blocks
        assert (logits - expected).abs().max() < (0.05 if packed else 1e-4) * expected.abs().max()


def test_float16_keeps_the_scales():
    model = make(n_embd=64).float()
    quantize(model, "int8", torch.float16)
    assert model.transformer.wte.weight.dtype == torch.float16 and model.lm_head.scale.dtype == torch.float32


def test_small_weights_cost_little(trained):
    """Bits per byte of a trained model, through the command: by less than 0.5 % (int8) and 4 % (int4)."""
    words = [f"--score=FILE:{trained / 'play.txt'}", "--stream=false"]
    (trained / "play.txt").write_text(conftest.make_text(120, seed=9), encoding="utf-8")
    nats = {}  # as many as the bits per byte, but for a factor, and with more digits
    for kind in "", "int8", "int4":
        end = command(trained, *words, f"--quantize={kind}")
        assert end.returncode == 0 and ("; through " in end.stderr) == bool(kind)
        assert not kind or f"; through {sample.SMALL[kind][0].way}" in end.stderr
        nats[kind] = -float(end.stdout.split()[2].rstrip(","))
    assert nats[""] != nats["int8"] < 1.005 * nats[""] and nats["int4"] < 1.04 * nats[""]
    text = command(trained, "--quantize=int4", "--start=ANNA:", "--max_new_tokens=40").stdout
    assert text.startswith("ANNA:\n") and len(text) > 60


# ------------------------------------------------------------------------------- the command

@pytest.fixture(scope="module")
def trained(bpe_data, tmp_path_factory):
    """A folder in which a small model was trained: out/best.pt."""
    folder = tmp_path_factory.mktemp("trained")
    train.main(train.TrainConfig(
        n_layer=2, n_head=2, n_embd=64, block_size=32, data_dir=str(bpe_data), out_dir=str(folder / "out"),
        max_iters=150, warmup_iters=10, eval_interval=150, eval_iters=5, learning_rate=1e-2))
    return folder


def command(folder, *words, **kw):
    return subprocess.run([sys.executable, str(ROOT / "sample.py"), *words], cwd=folder, capture_output=True,
                          text=True, encoding="utf-8", **kw)


def test_the_command_writes_text_to_stdout_and_facts_to_stderr(trained):
    end = command(trained, "--start=ANNA:", "--max_new_tokens=80", "--seed=3")
    assert end.returncode == 0 and end.stdout.startswith("ANNA:\n") and end.stdout.count("\n") > 3
    for fact in "out/best.pt", "step 150", "val loss", "nats per token", "tokenizer bpe with 300 tokens":
        assert fact in end.stderr
    again = [command(trained, "--start=ANNA:", "--max_new_tokens=80", *words).stdout for words in
             (["--seed=3"], ["--seed=3", "--kv_cache=false"], ["--seed=3", "--stream=false"], ["--seed=4"])]
    assert again[:3] == [end.stdout] * 3 and again[3] != end.stdout


def test_prompts(trained, tmp_path):
    (tmp_path / "prompt.txt").write_text("BRUNO:\nThe", encoding="utf-8")
    (tmp_path / "none.txt").write_text("", encoding="utf-8")
    end = command(trained, f"--start=FILE:{tmp_path}/prompt.txt", "--max_new_tokens=5")
    assert end.stdout.startswith("BRUNO:\nThe")
    empty = command(trained, "--start=", "--max_new_tokens=30")
    assert empty.returncode == 0 and len(empty.stdout) > 20
    assert command(trained, f"--start=FILE:{tmp_path}/none.txt", "--max_new_tokens=30").stdout == empty.stdout
    long = "ANNA:\nThe river. " * 40
    end = command(trained, f"--start={long}", "--max_new_tokens=100")
    assert end.returncode == 0 and end.stdout.startswith(long) and len(end.stdout) > len(long) + 100
    assert command(trained, "--start=123", "--max_new_tokens=0").stdout == "123\n"


def test_an_empty_prompt_starts_as_a_document_does(char_data):
    assert prompt_ids("", BYTE) == [256]
    assert prompt_ids("", load_data(char_data)[1]) == [0] and load_data(char_data)[1].tokens[0] == b"\n"
    assert prompt_ids("", Tokenizer(dict(kind="char", chars="abc", special={}))) == [0]


def test_several_samples_and_a_stop_text(trained):
    end = command(trained, "--start=ANNA:", "--max_new_tokens=120", "--num_samples=3", "--stop=:\n")
    texts = end.stdout.split("-" * 15 + "\n")[:-1]
    assert len(texts) == 3 and len(set(texts)) == 3
    assert all(text.startswith("ANNA:") and ":\n" not in text[5:-1] for text in texts)
    assert "tokens" in end.stderr, "a progress bar"
    single = command(trained, "--start=ANNA:", "--max_new_tokens=120", "--stop=:\n")
    assert single.stdout == texts[0], "sample b is the same with more samples beside it"


def test_a_closed_pipe_ends_quietly(trained):
    words = [sys.executable, str(ROOT / "sample.py"), "--start=a", "--max_new_tokens=3000"]
    process = subprocess.Popen(words, cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read() and process.wait() == 0


def test_ctrl_c_keeps_what_there_is(trained):
    words = [sys.executable, str(ROOT / "sample.py"), "--start=abc", "--max_new_tokens=999999"]
    process = subprocess.Popen(words, cwd=trained, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(10)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and len(out) > 10 and b"stopped" in err and b"Traceback" not in err


def test_any_locale_will_do(trained):
    env = os.environ | dict(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    end = command(trained, "--start=😀中", "--max_new_tokens=1", env=env)
    assert end.returncode == 0 and end.stdout.startswith("😀中")


@pytest.mark.parametrize("words, names", [
    (["--temperature=-1"], ["temperature = -1.0"]), (["--top_k=-1"], ["top_k = -1"]),
    (["--top_p=1.5"], ["top_p = 1.5"]), (["--min_p=2"], ["min_p = 2.0"]),
    (["--num_samples=0"], ["num_samples = 0"]), (["--num_beams=0"], ["num_beams = 0"]),
    (["--score=a"], ["score", "at least two"]), ([f"--start=a {MASK} b"], ["is a causal model", MASK]),
    (["--num_beams=3", "--top_k=5"], ["top_k = 5", "num_beams = 3"]),
    (["--num_beams=3", "--stop=x"], ["stop = 'x'", "beam search"]),
    (["--repetition_penalty=0"], ["repetition_penalty = 0.0"]),
    (["--ckpt=no.pt"], ["no.pt", "out/best.pt"]),
    (["--start=FILE:foreign.pt"], ["foreign.pt is not UTF-8 text"]), (["--seed=-1"], ["seed = -1"]),
    (["--ckpt=foreign.pt"], ["foreign.pt is damaged"]), (["--ckpt=bare.pt"], ["bare.pt", "no tokenizer"]),
    (["--ckpt=char.pt", "--start=abé"], ["'é'"]), (["--start=FILE:nowhere.txt"], ["nowhere.txt"]),
    (["--top_k=none"], ["top_k", "0 switches it off"]),
    (["--quantize=none"], ["quantize", "int8|int4", "--quantize= switches it off"]),
    (["--ckpt=char.pt", "--quantize=int4"], ["quantize = int4", "n_embd = 8", "--quantize=int8"]),
])
def test_a_mistake_is_one_line(trained, mistake, words, names):
    (trained / "foreign.pt").write_bytes(b"hello \xff")
    small = dict(n_layer=1, n_head=1, n_embd=8)
    char = dict(kind="char", chars="abc", special={})
    save(trained / "bare.pt", GPT(GPTConfig(**small)))
    save(trained / "char.pt", GPT(GPTConfig(vocab_size=3, **small)), tokenizer=char)
    message, _ = mistake(sample.main, sample.SampleConfig, words, trained)
    assert all(name in message for name in names), message


# ------------------------------------------------------------------------------- other layouts of the data

@pytest.fixture(scope="module")
def others(tmp_path_factory, bpe_data):
    """Runs of a masked model, of one of pairs and of one of reversed text, in out-masked, out-pairs, …"""
    folder = tmp_path_factory.mktemp("others")
    sizes = dict(n_layer=2, n_head=2, n_embd=32, block_size=32, max_iters=60, eval_interval=60, eval_iters=2,
                 warmup_iters=5, learning_rate=1e-2)
    prepare.main(prepare.PrepareConfig(["letters"], str(folder / "letters"), "char"))
    play = [str(bpe_data / "play.txt")]
    prepare.main(prepare.PrepareConfig(play, str(folder / "reverse"), "char", reverse=True))
    for name, data, kw in (("masked", bpe_data, dict(causal=False)), ("pairs", folder / "letters", {}),
                           ("reverse", folder / "reverse", {})):
        train.main(train.TrainConfig(data_dir=str(data), out_dir=str(folder / f"out-{name}"), **sizes | kw))
    return folder


def test_a_masked_model_fills_its_gaps(others):
    ckpt, start = "--ckpt=out-masked/best.pt", "--start=The [MASK] river [MASK] stone."
    end = command(others, ckpt, start)
    assert end.returncode == 0 and "masked loss" in end.stderr and MASK not in end.stdout
    assert end.stdout.startswith("The") and " river" in end.stdout and end.stdout.endswith(" stone.\n")
    assert command(others, ckpt, start).stdout == end.stdout
    many = command(others, ckpt, start, "--num_samples=8", "--temperature=2").stdout
    many = many.split("-" * 15 + "\n")[:-1]
    assert len(many) == 8 and len(set(many)) > 1 and all(text.endswith(" stone.\n") for text in many)
    other = command(others, ckpt, start, "--num_samples=8", "--temperature=2", "--seed=1338").stdout
    assert set(other.split("-" * 15 + "\n")[:-1]) != set(many), "the next seed is no shift of this one"


@torch.no_grad()
def test_fill_takes_the_surest_gap_first_and_never_the_mask():
    model = make(V=30, causal=False)
    model.lm_head.weight.data[29] = 100.0  # the mask would win everywhere
    idx = torch.tensor([[1, 29, 5, 29, 29, 7]])
    expected = idx.clone()
    for _ in range(3):
        probs = model(expected)[0, :, :29].softmax(-1)
        gap = max((t for t in range(6) if expected[0, t] == 29), key=lambda t: probs[t].max())
        expected[0, gap] = probs[gap].argmax()
    found = fill(model, idx, 29, temperature=0)
    assert torch.equal(found, expected) and (idx == 29).sum() == 3, "what was given stays as it was"
    rows = torch.tensor([[29, 5, 29], [3, 29, 4], [3, 3, 3]])
    assert torch.equal(fill(model, rows, 29, temperature=0)[1:2], fill(model, rows[1:2], 29, temperature=0))
    assert fill(model, rows, 29)[2].tolist() == [3, 3, 3] and fill(model, rows, 29).max() < 29


def test_a_model_of_pairs_answers_line_by_line(others):
    words = ["--ckpt=out-pairs/best.pt", "--temperature=0"]
    end = command(others, *words, "--start=-", input="last abc\nsort bca\n")
    single = [command(others, *words, f"--start={line}").stdout for line in ("last abc", "sort bca")]
    assert end.returncode == 0 and end.stdout == "".join(single) and EOT not in end.stdout
    assert prompt_ids("ab", Tokenizer(dict(kind="byte", special={EOT: 256}, pairs=True))) == [97, 98, 10]


def test_reversed_text_is_printed_the_right_way_round(others):
    end = command(others, "--ckpt=out-reverse/best.pt", "--start=falls.", "--max_new_tokens=40")
    assert end.returncode == 0 and end.stdout.endswith("falls.\n") and len(end.stdout) == 47
    spec = dict(kind="byte", special={EOT: 256})
    assert prompt_ids("abc", Tokenizer(spec | dict(reverse=True))) == [99, 98, 97]
    assert prompt_ids("abc", Tokenizer(spec | dict(bos=True))) == [256, 97, 98, 99]
    assert prompt_ids("", Tokenizer(spec | dict(bos=True))) == [256]


@pytest.mark.parametrize("words, names", [
    (["--ckpt=out-masked/best.pt", "--start=no gap"], ["out-masked/best.pt is a masked model", MASK]),
    (["--ckpt=out-masked/best.pt", f"--start={MASK * 40}"], ["start has 40 tokens", "block_size = 32"]),
])
def test_what_a_masked_model_cannot_do(others, mistake, words, names):
    message, _ = mistake(sample.main, sample.SampleConfig, words, others)
    assert all(name in message for name in names), message


# ------------------------------------------------------------------------------- Hugging Face

@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_an_exported_model_is_the_model(kind, tmp_path, text, capsys):
    """Read by transformers: the same ids for any text, the same logits; read by us: the same text."""
    import transformers
    (tmp_path / "play.txt").write_text(text + "Straße, 今天 😀", encoding="utf-8")
    data = tmp_path / "data"
    prepare.main(prepare.PrepareConfig([str(tmp_path / "play.txt")], str(data), kind, 300, bos=kind == "bpe"))
    train.main(train.TrainConfig(n_layer=1, n_head=2, n_embd=16, block_size=16, max_iters=5, eval_iters=1,
                                 data_dir=str(data), out_dir=str(tmp_path / "out")))
    folder, ckpt = str(tmp_path / "hf"), str(tmp_path / "out/best.pt")
    sample.main(sample.SampleConfig(ckpt=ckpt, export=folder))
    (model, tokenizer, _), (again, copy, _) = sample.load_trained(ckpt), sample.load_trained(folder)
    assert copy.spec == tokenizer.spec and (kind != "bpe" or copy.spec["bos"])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    for line in (*text.splitlines()[:40], "Straße,  今天 😀\n\n ", "a\n", ""):
        ids = tokenizer.encode(line).tolist() if set(line) <= set(text + "Straße, 今天 😀") else []
        if ids:
            assert theirs(line)["input_ids"] == ids, line
            assert theirs.decode(ids, clean_up_tokenization_spaces=False) == line
    if tokenizer.eot is not None:
        assert theirs(EOT)["input_ids"] == [tokenizer.eot]
    idx = torch.tensor([[1, 5, 9, 2]])
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(hf(idx, attention_mask=torch.ones_like(idx)).logits, model.eval()(idx),
                               atol=2e-5, rtol=2e-5)
    assert torch.equal(again.eval()(idx), model(idx))
    capsys.readouterr()
    texts = []
    for path in ckpt, folder:
        sample.main(sample.SampleConfig(ckpt=path, start="The", max_new_tokens=20))
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("The")
    train.main(train.TrainConfig(init_from=folder, data_dir=str(data), out_dir=str(tmp_path / "tuned"),
                                 max_iters=2, block_size=16, eval_iters=1))
    assert (tmp_path / "tuned/best.pt").exists()


def test_gpt2_comes_from_the_hub_with_its_own_tokenizer(tmp_path, monkeypatch, capsys, mistake):
    """From a stand-in for the hub with a small model of GPT-2's parts, in the layout of OpenAI's files."""
    from transformers import GPT2Config, GPT2Model
    ids = prepare.train_bpe(["the river turns and the stone waits " * 9], 20)
    spec = dict(kind="bpe", pattern=prepare.GPT2_PATTERN, ranks=prepare.ranks_text(ids),
                special={EOT: len(ids)})
    hub = tmp_path / "hub/gpt2/resolve/main"
    hub.mkdir(parents=True)
    torch.manual_seed(0)
    theirs = GPT2Model(GPT2Config(vocab_size=len(ids) + 1, n_positions=16, n_embd=16, n_layer=2, n_head=2))
    theirs.save_pretrained(hub)  # without "transformer." and without a head, as OpenAI's
    data = prepare.to_hf_tokenizer(Tokenizer(spec))
    data["model"]["vocab"][EOT] = len(ids)  # theirs lists it there as well
    data["pre_tokenizer"] = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True)
    (hub / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    monkeypatch.setattr(sample, "HUB", (tmp_path / "hub").as_uri())
    monkeypatch.chdir(tmp_path)
    model, tokenizer, _ = sample.load_trained("gpt2")
    assert tokenizer.spec == spec
    idx = torch.tensor([[3, 1, 4]])
    expected = theirs.eval()(idx, attention_mask=torch.ones_like(idx))[0] @ theirs.wte.weight.T
    torch.testing.assert_close(model.eval()(idx), expected, atol=2e-5, rtol=2e-5)
    sample.main(sample.SampleConfig(ckpt="gpt2", start="the", max_new_tokens=5))
    assert "gpt2: tokenizer bpe" in capsys.readouterr().err
    monkeypatch.setattr(sample, "HUB", (tmp_path / "nowhere").as_uri())
    message, _ = mistake(sample.main, sample.SampleConfig, ["--ckpt=gpt2-xl"], tmp_path)
    assert "cannot download" in message and "--ckpt=FOLDER" in message and "tokenizer.json" in message
    weights = (hub / "model.safetensors").read_bytes()
    (hub / "model.safetensors").write_bytes(b"hello")
    message, _ = mistake(sample.main, sample.SampleConfig, [f"--ckpt={hub}"], tmp_path)
    assert "model.safetensors does not fit" in message
    for name, content in ("tokenizer.json", "{"), ("tokenizer.json", '{"model": {}}'), ("config.json", "[]"):
        old = (hub / name).read_bytes()
        (hub / "model.safetensors").write_bytes(weights)
        (hub / name).write_text(content, encoding="utf-8")
        message, _ = mistake(sample.main, sample.SampleConfig, [f"--ckpt={hub}"], tmp_path)
        assert "holds no model that can be read here" in message
        (hub / name).write_bytes(old)
    (hub / "tokenizer.json").unlink()
    message, _ = mistake(sample.main, sample.SampleConfig, [f"--ckpt={hub}"], tmp_path)
    assert "tokenizer.json is missing" in message


def test_devices_and_dtypes(monkeypatch):
    assert sample.pick_device("cpu").type == "cpu"
    assert sample.pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert sample.pick_dtype("auto", torch.device("mps"), otherwise="float16") == torch.float32
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **kw: True)
    assert sample.pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **kw: False)
    assert sample.pick_dtype("auto", torch.device("cuda"), otherwise="float16") == torch.float16
    assert sample.pick_dtype("auto", torch.device("cuda")) == torch.float32
