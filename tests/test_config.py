"""config/__init__.py: a dataclass as a command line."""

import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from config import narrow, parse, to_toml


@dataclass
class Base:
    n_layer: int = 2  # how many blocks, 100 % of them


@dataclass
class Settings(Base):
    learning_rate: float = 1e-3  # the peak
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile
    optimizer: Literal["adamw", "muon"] = "adamw"  # which
    start: str = ""  # the prompt
    resume: bool = False  # go on
    text: list[str] = field(default_factory=lambda: ["plays"])  # sources


def test_defaults_files_and_flags_in_this_order(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('n_layer = 3\nlearning_rate = 1\ncompile = true\ntext = ["a", "b"]\n', encoding="utf-8")
    second.write_text("n_layer = 4\n", encoding="utf-8")
    cfg = parse(Settings, [str(first), str(second), "--learning_rate", "2e-3", "--start=a=b"])
    assert cfg == Settings(4, 2e-3, "true", "adamw", "a=b", False, ["a", "b"])
    assert type(parse(Settings, [str(first)]).learning_rate) is float, "an int in a file is a float here"


@pytest.mark.parametrize("words, expected", [
    (["--resume", "--n_layer=1"], dict(resume=True, n_layer=1)),
    (["--resume=false"], dict(resume=False)),
    (["--compile", "--start", "x"], dict(compile="true", start="x")),
    (["--start=123"], dict(start="123")),
    (["--start", "to be, or not"], dict(start="to be, or not")),
    (["--start="], dict(start="")),
    (["--text=a", "--text", "b c"], dict(text=["a", "b c"])),
])
def test_flags(words, expected):
    assert asdict(parse(Settings, words)) == asdict(Settings()) | expected


@pytest.mark.parametrize("words, names", [
    (["--n_layr=4"], ["n_layr", "--n_layer"]),
    (["--n_layer=four"], ["n_layer", "four", "int"]),
    (["--n_layer=true"], ["n_layer", "true", "int"]),
    (["--n_layer=4.0"], ["n_layer", "4.0", "int"]),
    (["--n_layer"], ["n_layer"]),
    (["--n_layer=none"], ["n_layer", "none", "0 switches it off"]),
    (["--learning_rate=nan"], ["learning_rate", "NaN"]),
    (["--resume=yes"], ["resume", "yes", "true|false"]),
    (["--optimizer=sgd"], ["optimizer", "sgd", "adamw|muon"]),
    (["n_layer=4"], ["--n_layer=VALUE"]),
    (["-n_layer=4"], ["n_layer"]),
    (["nowhere.toml"], ["nowhere.toml"]),
])
def test_mistakes_name_the_setting_the_value_and_the_fix(words, names):
    with pytest.raises((ValueError, OSError)) as error:
        parse(Settings, words)
    assert all(name in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize("toml, names", [
    ("n_layr = 4", ["n_layr", "--n_layer", "mine.toml"]),
    ("n_layer = true", ["n_layer = true", "int", "mine.toml"]),
    ('n_layer = "4"', ["n_layer", "int"]),
    ("n_layer = ", ["mine.toml is not valid TOML"]),
    ("[model]\nn_layer = 1", ["model", "mine.toml"]),
    ("text = [1]", ["text", "[1]"]),
])
def test_mistakes_in_a_file(tmp_path, toml, names):
    path = tmp_path / "mine.toml"
    path.write_text(toml, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        parse(Settings, [str(path)])
    assert all(name in str(error.value) for name in names), str(error.value)


def test_help_shows_type_choices_default_and_comment(capsys):
    with pytest.raises(SystemExit) as end:
        parse(Settings, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    for part in ["--n_layer int how many blocks, 100 % of them (default: 2)",
                 "--optimizer adamw|muon which (default: \"adamw\")",
                 "--resume true|false go on (default: false)"]:
        assert part in text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f")),
       st.floats(allow_nan=False, allow_infinity=False),
       st.lists(st.text("ab\"'\\\n", max_size=4), min_size=1))
def test_to_toml_is_the_inverse_of_parse(tmp_path_factory, start, rate, text):
    path = tmp_path_factory.mktemp("toml") / "mine.toml"
    cfg = Settings(start=start, learning_rate=rate, text=text)
    path.write_text(to_toml(cfg), encoding="utf-8", newline="")
    assert parse(Settings, [str(path)]) == cfg
    assert "n_layer" not in to_toml(cfg, skip=["n_layer"])


def test_narrow_keeps_the_base_part():
    assert narrow(Settings(n_layer=7), Base) == Base(7)


def script(tmp_path, body):
    path = tmp_path / "script.py"
    path.write_text("from dataclasses import dataclass\nfrom config import run\n"
                    "@dataclass\nclass Settings:\n    n: int = 1  # a number\n"
                    f"def main(cfg):\n    {body}\nrun(main, Settings)\n", encoding="utf-8")
    return [sys.executable, str(path)]


@pytest.mark.parametrize("body, words, code, message", [
    ("pass", ["--n=x"], 2, 'error: n = "x" must be int\n'),
    ("raise ValueError('two\\nlines')", [], 2, "error: two lines\n"),
    ("open('no/such/file', encoding='utf-8')", [], 2, "error: no/such/file: No such file or directory\n"),
    ("import no_such_module", [], 2, "error: No module named 'no_such_module'\n"),
    ("raise KeyboardInterrupt", [], 130, ""),
    ("pass", [], 0, ""),
])
def test_run_ends_in_one_line_and_exit_code_2(tmp_path, monkeypatch, body, words, code, message):
    monkeypatch.setenv("PYTHONPATH", ".")
    end = subprocess.run(script(tmp_path, body) + words, capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (code, message)
