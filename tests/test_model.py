"""model.py: the kernels against the formulas, the cache against no cache, ours against transformers'."""

import math
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from model import (GPT, GPTConfig, KVCache, change, drop, from_hf, load, load_hf, rope, rotate, save, save_hf,
                   to_hf)

ROOT = Path(__file__).parent.parent
GPT2 = tomllib.loads((ROOT / "config/gpt2.toml").read_text(encoding="utf-8"))
SIZES = dict(block_size=16, vocab_size=37, n_layer=2, n_head=2, n_embd=12)
SWITCHES = [{}, GPT2, dict(pos_emb="learned"), dict(norm="layernorm"), dict(norm="layernorm", bias=True),
            dict(bias=True), dict(norm_embd=False), dict(qk_norm=False), dict(activation="gelu"),
            dict(tie_weights=True), dict(logit_softcap=0.0), dict(causal=False), GPT2 | dict(bias=False),
            GPT2 | dict(causal=False)]
CAUSAL = [switches for switches in SWITCHES if switches.get("causal", True)]


def make(seed=0, dtype=torch.float64, **kw):
    """A model with random weights everywhere: zeros would hide mistakes."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SIZES | kw)).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "ln_" in name and name.endswith("weight") else 0.0, 0.3)
    return model.eval()


def ids(*shape, seed=1):
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def explicit(model, idx):
    """The logits by the formulas, one head and one query at a time; no fused kernel, no mask tensor."""
    c, w = model.config, dict(model.named_parameters(remove_duplicate=False))
    H, D = c.n_head, c.n_embd // c.n_head

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def normed(x, name=None):
        if name and c.norm == "layernorm":
            x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
            return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(v, t):  # (D,), position t
        out = v.clone()
        for i in range(D // 2):
            angle = t * 10000 ** (-2 * i / D)
            out[i] = v[i] * math.cos(angle) + v[i + D // 2] * math.sin(angle)
            out[i + D // 2] = v[i + D // 2] * math.cos(angle) - v[i] * math.sin(angle)
        return out

    def attention(x, name):  # (T, C)
        q, k, v = linear(f"{name}.c_attn", x).split(c.n_embd, dim=-1)
        out = torch.zeros_like(q)
        for h in range(H):
            part = slice(h * D, (h + 1) * D)
            qs, ks = ([row[part] for row in z] for z in (q, k))
            if c.pos_emb == "rope":
                qs, ks = ([turned(row, t) for t, row in enumerate(rows)] for rows in (qs, ks))
            if c.qk_norm:
                qs, ks = ([normed(row) for row in rows] for rows in (qs, ks))
            for t in range(len(x)):
                seen = range(t + 1) if c.causal else range(len(x))
                scores = torch.stack([qs[t] @ ks[s] / D ** 0.5 for s in seen])
                p = scores.exp() / scores.exp().sum()
                out[t, part] = sum(p[i] * v[s, part] for i, s in enumerate(seen))
        return linear(f"{name}.c_proj", out)

    def mlp(x, name):
        x = linear(f"{name}.c_fc", x)
        gelu = 0.5 * x * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x ** 3)))
        return linear(f"{name}.c_proj", torch.where(x > 0, x * x, 0.0) if c.activation == "relu2" else gelu)

    rows = []
    for row in idx:
        x = w["transformer.wte.weight"][row]
        if c.pos_emb == "learned":
            x = x + w["transformer.wpe.weight"][:len(row)]
        if c.norm_embd:
            x = normed(x, "transformer.ln_e")
        for i in range(c.n_layer):
            x = x + attention(normed(x, f"transformer.h.{i}.ln_1"), f"transformer.h.{i}.attn")
            x = x + mlp(normed(x, f"transformer.h.{i}.ln_2"), f"transformer.h.{i}.mlp")
        logits = normed(x, "transformer.ln_f") @ w["lm_head.weight"].T
        rows.append(c.logit_softcap * torch.tanh(logits / c.logit_softcap) if c.logit_softcap else logits)
    return torch.stack(rows)


@pytest.mark.parametrize("switches", SWITCHES, ids=str)
@torch.no_grad()
def test_the_kernels_compute_the_formulas(switches):
    """1e-5: RoPE's angles and the soft-cap are in float32 also in a float64 model."""
    model = make(**switches)
    for T in 1, 2, 16:
        torch.testing.assert_close(model(ids(3, T)).double(), explicit(model, ids(3, T)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("switches", CAUSAL, ids=str)
@torch.no_grad()
def test_the_future_never_changes_the_past(switches):
    model, idx = make(**switches, dtype=torch.float32), ids(2, 16)
    before = model(idx)
    for t in range(1, 16):
        other = torch.cat((idx[:, :t], ids(2, 16 - t, seed=t + 5)), dim=1)
        assert (model(other)[:, :t] - before[:, :t]).abs().max() == 0.0
        assert (model(other)[:, t:] - before[:, t:]).abs().max() > 1e-3


@torch.no_grad()
def test_a_bidirectional_model_sees_the_future():
    model, idx = make(causal=False), ids(1, 16)
    other = idx.clone()
    other[0, 15] = (idx[0, 15] + 1) % 37
    assert (model(other)[0, 0] - model(idx)[0, 0]).abs().max() > 1e-3


# ------------------------------------------------------------------------------- the cache

@pytest.mark.parametrize("switches", [{}, GPT2, dict(pos_emb="learned", qk_norm=False)], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
@torch.no_grad()
def test_cached_logits_equal_uncached_for_any_chunks(switches, chunk):
    model, idx = make(**switches, dtype=torch.float32), ids(3, 16)
    cache = KVCache(model.config, 3)
    cached = torch.cat([model(part, cache) for part in idx.split(chunk, dim=1)], dim=1)
    torch.testing.assert_close(cached, model(idx), atol=1e-5, rtol=0)
    assert cache.lengths == [16, 16, 16]


@pytest.mark.parametrize("switches", [{}, GPT2], ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 7])
@torch.no_grad()
def test_rows_of_unlike_length_decode_together(switches, chunk):
    """Each row of the cache at its own length, one of them empty, equals that row alone."""
    model = make(**switches, dtype=torch.float32)
    lengths, cache = [5, 1, 9, 0], KVCache(model.config, 4)
    rows = [ids(1, n + chunk, seed=n) for n in lengths]
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        if n:
            alone = KVCache(model.config, 1)
            model(row[:, :n], alone)
            cache.k[:, b], cache.v[:, b] = alone.k[:, 0], alone.v[:, 0]
    cache.lengths = list(lengths)
    together = model(torch.cat([row[:, n:] for row, n in zip(rows, lengths, strict=True)]), cache)
    for b, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        torch.testing.assert_close(together[b], model(row)[0, n:], atol=1e-5, rtol=0)
    assert cache.lengths == [n + chunk for n in lengths]


@torch.no_grad()
def test_what_an_older_tenant_left_in_a_row_is_never_seen():
    model, idx = make(dtype=torch.float32), ids(2, 6)
    cache = KVCache(model.config, 2)
    model(ids(2, 16, seed=9), cache)
    cache.lengths = [0, 0]
    torch.testing.assert_close(model(idx, cache), model(idx), atol=1e-5, rtol=0)
    cache.lengths = [6, 0]  # row 1 starts anew, row 0 goes on
    new = ids(2, 1, seed=3)
    torch.testing.assert_close(model(new, cache)[1], model(new[1:])[0], atol=1e-5, rtol=0)


def test_more_tokens_than_block_size_are_refused():
    model = make()
    with pytest.raises(ValueError, match="17 tokens do not fit in block_size = 16"):
        model(ids(1, 17))
    cache = KVCache(model.config, 1, dtype=torch.float64)
    model(ids(1, 10), cache)
    with pytest.raises(ValueError, match="17 tokens"):
        model(ids(1, 7), cache)


def test_a_cache_can_be_smaller_than_the_context():
    cache = KVCache(GPTConfig(**SIZES), 1, size=5)
    assert cache.k.shape == (2, 1, 2, 5, 6) and KVCache(GPTConfig(**SIZES), 1, size=99).k.size(3) == 16
    assert KVCache(GPTConfig(**SIZES), 1, dtype=torch.bfloat16).v.dtype == torch.bfloat16


# ------------------------------------------------------------------------------- positions, start, sizes

def test_rope_depends_on_the_distance_only():
    """<R(i) q, R(j) k> is a function of i - j, and the angles are what the paper says."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8)

    def product(i, j):
        return (rotate(q, *rope(torch.tensor([i]), 8)) * rotate(k, *rope(torch.tensor([j]), 8))).sum().item()
    for shift in 1, 5, 100:
        assert product(3 + shift, 1 + shift) == pytest.approx(product(3, 1), abs=1e-4)
    assert abs(product(3, 1) - product(1, 3)) > 1e-2
    cos, sin = rope(torch.tensor([7]), 8)
    expected = [7 * 10000 ** (-i / 4) for i in range(4)]
    assert cos[0].tolist() == pytest.approx([math.cos(a) for a in expected], abs=1e-6)
    assert sin[0].tolist() == pytest.approx([math.sin(a) for a in expected], abs=1e-6)
    assert rope(torch.tensor([257]), 8)[0].dtype == torch.float32


def test_a_bfloat16_model_keeps_its_angles():
    """Positions 257 and 258 are the same number in bfloat16: no buffer that .to(bfloat16) could cast."""
    model = make(block_size=512, dtype=torch.bfloat16)
    assert not list(model.buffers()) and model(ids(1, 400)).isfinite().all()
    cos, sin = rope(torch.arange(512), 6)
    assert cos.dtype == torch.float32 and (cos[257] - cos[258]).abs().max() > 0.1


@pytest.mark.parametrize("vocab_size", [65, 1024])
def test_the_first_loss(vocab_size):
    """modern: ln V, since the head is zero. GPT-2: ln V + ½·0.02²·n_embd, from logits of that variance."""
    for switches, expected, tolerance in ({}, 0.0, 1e-5), (GPT2, 0.5 * 0.02 ** 2 * 256, 0.05):
        torch.manual_seed(0)
        model = GPT(GPTConfig(block_size=64, vocab_size=vocab_size, n_head=4, n_embd=256, **switches))
        idx = torch.randint(vocab_size, (16, 65))
        loss = F.cross_entropy(model(idx[:, :-1]).flatten(0, 1), idx[:, 1:].flatten()).item()
        assert abs(loss - math.log(vocab_size) - expected) < tolerance


def test_initial_sizes_follow_gpt2():
    torch.manual_seed(0)
    weights = dict(GPT(GPTConfig(n_layer=8, **GPT2)).named_parameters())
    assert weights["transformer.h.0.attn.c_attn.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert weights["transformer.h.7.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not weights["transformer.h.3.attn.c_attn.bias"].any()


@pytest.mark.parametrize("sizes, count", [
    (dict(n_layer=12, n_head=12, n_embd=768), 124_439_808),
    (dict(n_layer=24, n_head=16, n_embd=1024), 354_823_168),
])
def test_gpt2_has_the_published_number_of_parameters(sizes, count):
    with torch.device("meta"):
        model = GPT(GPTConfig(block_size=1024, vocab_size=50257, **sizes, **GPT2))
    assert model.num_params() == count
    with torch.device("meta"):
        untied = GPT(GPTConfig(block_size=1024, vocab_size=50257, **sizes, **GPT2 | dict(tie_weights=False)))
    assert untied.num_params() - count == 50257 * sizes["n_embd"]


def test_tied_weights_are_one_matrix(tmp_path):
    model = make(tie_weights=True, dtype=torch.float32)
    save(tmp_path / "tied.pt", model)
    for m in model, load(tmp_path / "tied.pt")[0], change(model, dropout=0.1):
        assert m.lm_head.weight.data_ptr() == m.transformer.wte.weight.data_ptr()
        m(ids(2, 4)).sum().backward()
        torch.optim.AdamW(m.parameters(), lr=0.1).step()
        assert m.lm_head.weight is m.transformer.wte.weight


def test_dropout_of_channels_and_of_elements():
    """A quarter is lost and the rest is scaled up; channels are lost along the whole text, or not at all."""
    x = torch.ones(64, 32, 128)
    for kind in "channels", "elements":
        y = drop(x, GPTConfig(dropout=0.25, dropout_of=kind), training=True)
        assert y.unique().tolist() == pytest.approx([0, 4 / 3])
        assert (y == 0).float().mean() == pytest.approx(0.25, abs=0.02)  # 4 deviations of 8,192 draws
        along = (y == 0).sum(dim=1)
        assert ((along == 0) | (along == 32)).all() == (kind == "channels")
        assert drop(x, GPTConfig(dropout=0.25, dropout_of=kind), training=False) is x


def test_dropout_is_for_training_only():
    model, idx = make(dropout=0.5), ids(1, 8)
    assert torch.equal(model(idx), model(idx))
    model.train()
    assert not torch.equal(model(idx), model(idx))
    assert torch.equal(model.eval()(idx), model(idx)) and not torch.equal(model.train()(idx), model(idx))


@pytest.mark.parametrize("settings, names", [
    (dict(n_embd=100, n_head=3), ["n_embd = 100", "n_head = 3"]), (dict(n_layer=0), ["n_layer = 0"]),
    (dict(n_embd=12, n_head=4), ["12", "even", "rope"][1:]), (dict(dropout=1.0), ["dropout = 1.0"]),
    (dict(block_size=-1), ["block_size = -1"]), (dict(logit_softcap=-1.0), ["logit_softcap = -1.0"]),
])
def test_sizes_that_do_not_fit_are_named(settings, names):
    with pytest.raises(ValueError) as error:
        GPTConfig(**settings)
    assert all(name in str(error.value) for name in names)


# ------------------------------------------------------------------------------- files

@torch.no_grad()
def test_a_checkpoint_gives_the_model_back(tmp_path):
    for switches in {}, GPT2:
        model = make(**switches, dtype=torch.float32)
        save(tmp_path / "a.pt", model, step=3)
        again, ckpt = load(tmp_path / "a.pt")
        assert ckpt["step"] == 3 and again.config == model.config and not list(tmp_path.glob("*.tmp"))
        assert torch.equal(again.eval()(ids(2, 9)), model(ids(2, 9)))
        small = load(tmp_path / "a.pt", block_size=9, dropout=0.1)[0]
        assert torch.equal(small.eval()(ids(2, 9)), model(ids(2, 9))) and small.config.dropout == 0.1
        with pytest.raises(ValueError, match="block_size = 17 .* 16"):
            load(tmp_path / "a.pt", block_size=17)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("payload-ran",)


def test_foreign_damaged_and_hostile_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("good.pt", make(dtype=torch.float32))
    data = Path("good.pt").read_bytes()
    for name, content in ("empty.pt", b""), ("text.pt", b"hello"), ("short.pt", data[:len(data) // 2]):
        Path(name).write_bytes(content)
    torch.save(dict(state_dict={}), "foreign.pt")
    torch.save([1, 2], "list.pt")
    sizes = asdict(GPTConfig(**SIZES))
    torch.save(dict(model_config=sizes | dict(n_layer=3), model=make().state_dict()), "other.pt")
    torch.save(dict(model_config=dict(n_cat=3), model={}), "unknown.pt")
    torch.save(dict(model=Payload()), "hostile.pt")
    for path in set(Path().glob("*.pt")) - {Path("good.pt")}:
        with pytest.raises(ValueError, match=f"{path} is damaged or no checkpoint"):
            load(path)
    assert not Path("payload-ran").exists()
    with pytest.raises(OSError):
        load("nowhere.pt")


def test_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """kill -9, twenty times at random moments of a process that saves again and again."""
    code = ("import sys, torch\nfrom model import GPT, GPTConfig, save\n"
            "model, i = GPT(GPTConfig(n_embd=512)), 0\nwhile True:\n    i += 1\n"
            "    model.lm_head.weight.data.fill_(i)\n    save(sys.argv[1], model, step=i)\n"
            "    print(i, flush=True)")
    rng, path = random.Random(0), tmp_path / "last.pt"
    for _ in range(20):
        words = [sys.executable, "-c", code, str(path)]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE)
        process.stdout.readline()  # one is saved
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        seen = max([1, *map(int, process.communicate()[0].split())])
        model, ckpt = load(path)
        assert ckpt["step"] >= seen and (model.lm_head.weight == ckpt["step"]).all()


# ------------------------------------------------------------------------------- Hugging Face

@pytest.mark.parametrize("switches", [{}, dict(tie_weights=True), GPT2, GPT2 | dict(tie_weights=False)],
                         ids=str)
@torch.no_grad()
def test_logits_equal_transformers(tmp_path, switches):
    """Random weights, exported, read by transformers, read back. 2e-5 is float32's rounding."""
    import transformers
    model = make(**switches, dtype=torch.float32, n_layer=3)
    save_hf(tmp_path, model)
    name = "GPT2LMHeadModel" if switches.get("pos_emb") else "NanoChatForCausalLM"
    theirs, info = getattr(transformers, name).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), "every tensor found its place"
    torch.testing.assert_close(theirs.eval()(ids(2, 16)).logits, model(ids(2, 16)), atol=2e-5, rtol=0)
    again = load_hf(tmp_path / "config.json", tmp_path / "model.safetensors")[0].eval()
    assert torch.equal(again(ids(2, 16)), model(ids(2, 16)))
    assert GPTConfig(**asdict(again.config) | dict(zero_init=model.config.zero_init)) == model.config


def test_old_gpt2_files_with_mask_buffers_load():
    config, weights = to_hf(make(**GPT2, dtype=torch.float32))
    old = {name.removeprefix("transformer."): w for name, w in weights.items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 16, 16), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert torch.equal(from_hf(config, old)(ids(1, 5)), from_hf(config, weights)(ids(1, 5)))


def test_mixtures_and_other_classes_are_refused():
    with pytest.raises(ValueError, match="unmixed"):
        to_hf(make(activation="gelu"))
    with pytest.raises(ValueError, match="model_type = 'llama'"):
        from_hf(dict(model_type="llama"), {})
    config, weights = to_hf(make())
    with pytest.raises(ValueError, match="num_key_value_heads = 1"):
        from_hf(config | dict(num_key_value_heads=1), weights)
    with pytest.raises(ValueError, match="intermediate_size = 7"):
        from_hf(config | dict(intermediate_size=7), weights)
