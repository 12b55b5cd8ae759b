"""What several test files need: a small text that is ours, and data sets made from it."""

import random
import sys

import pytest

import prepare
from config import run

NAMES = ["ANNA", "BRUNO", "CLARA", "DAVID"]
WORDS = ("the a my your this that old new green small river stone garden window letter bread morning light "
         "sings falls waits turns carries opens watches under over beside without and but so").split()


def make_text(n_lines, seed=0):
    """A play by a bag of words: enough structure to learn from, and written by nobody."""
    rng = random.Random(seed)
    lines = []
    for _ in range(n_lines):
        words = rng.choices(WORDS, k=rng.randint(3, 9))
        lines.append(f"{rng.choice(NAMES)}:\n{' '.join(words).capitalize()}{rng.choice('.!?')}\n")
    return "\n".join(lines)


@pytest.fixture(scope="session")
def text():
    return make_text(600)


@pytest.fixture(scope="session")
def char_data(tmp_path_factory, text):
    """A prepared data set of characters: its folder."""
    folder = tmp_path_factory.mktemp("char_data")
    (folder / "play.txt").write_text(text, encoding="utf-8", newline="")
    prepare.main(prepare.PrepareConfig([str(folder / "play.txt")], str(folder), "char"))
    return folder


@pytest.fixture(scope="session")
def bpe_data(tmp_path_factory, text):
    """A prepared data set of subwords: its folder."""
    folder = tmp_path_factory.mktemp("bpe_data")
    (folder / "play.txt").write_text(text, encoding="utf-8", newline="")
    prepare.main(prepare.PrepareConfig([str(folder / "play.txt")], str(folder), "bpe", 300))
    return folder


@pytest.fixture
def mistake(monkeypatch, capsys):
    """mistake(main, cls, words, folder): the one line on standard error that a script ends with, exit code 2.

    As if it were started in that folder with these words, but in this process, where torch is loaded already.
    """
    def start(main, cls, words, folder):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run(main, cls)
        out, err = capsys.readouterr()
        assert end.value.code == 2 and "Traceback" not in err and out == ""
        message = err.splitlines()[-1]
        assert message.startswith("error: ")
        return message, err
    return start
