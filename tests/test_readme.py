"""README.md: its commands parse, its files exist, its links lead somewhere."""

import json
import math
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import bench
import prepare
import sample
import train
from config import parse

ROOT = Path(__file__).parent.parent
CLASSES = {"prepare.py": prepare.PrepareConfig, "train.py": train.TrainConfig,
           "sample.py": sample.SampleConfig}
READMES = sorted(ROOT.glob("README*.md"))
FILES = [*READMES, *ROOT.glob("*.py"), *ROOT.glob("config/*.toml")]


def blocks(path, mark=""):
    """The shell code blocks of a README, or the one after a comment `<!-- mark -->`."""
    before = f"<!-- {mark} -->\n" if mark else ""
    return re.findall(before + r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def command_lines(path):
    """(script, words) for each of our commands in a README, in a config file or in a script's docstring."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"[# ]*python (prepare|train|sample)\.py(.*)", line):
            yield f"{found[1]}.py", shlex.split(found[2], comments=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_command_parses(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for script, words in command_lines(path):
        words = [word for word in words if not re.match(r"out\S*/config.toml", word)]  # made by a run
        assert isinstance(parse(CLASSES[script], words), CLASSES[script])


def test_there_are_commands_to_parse():
    assert all(len(list(command_lines(path))) >= 8 for path in READMES)
    assert all(len(list(command_lines(ROOT / name))) >= 2 for name in CLASSES)


@pytest.mark.parametrize("path", READMES, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_ci_runs_the_test_command():
    [block] = blocks(ROOT / "README.md", "test")
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    picked = re.search(r"command=\$\((.*)\)", script)[1]
    found = subprocess.run(["bash", "-c", picked], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert found.stdout == block and "pytest" in block and "requirements-dev.txt" in block


@pytest.mark.parametrize("path", READMES, ids=lambda p: p.name)
def test_the_table_is_what_the_bench_measured(path):
    assert bench.table() in path.read_text(encoding="utf-8")


def test_results_tell_where_they_come_from(monkeypatch):
    monkeypatch.chdir(ROOT)
    for path in (ROOT / "notebooks/results").glob("*.json"):
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert re.fullmatch(r"python tests/bench.py (\w+) --store", stored["command"])[1] == path.stem
        for name, run in stored["runs"].items():
            assert run["command"].startswith("python train.py") and run["seconds"] > 0
            assert run["nats_per_byte"] == pytest.approx(run["bits_per_byte"] * math.log(2)), name
            assert parse(train.TrainConfig, shlex.split(run["command"])[2:])
    assert set(stored_runs("ablations")) == set(bench.ABLATIONS)
    assert set(stored_runs("presets")) == set(bench.PRESETS)


def stored_runs(name):
    return json.loads((ROOT / f"notebooks/results/{name}.json").read_text(encoding="utf-8"))["runs"]


def test_the_bench_takes_turns_and_compares_pairs():
    calls = []
    functions = {"a": lambda: calls.append("a") or len(calls), "b": lambda: calls.append("b") or 8}
    values = bench.turns(functions, 3)
    assert "".join(calls) == "ababab" and values == {"a": [1, 3, 5], "b": [8, 8, 8]}
    first, second = bench.rows("part", "what", "unit", values, base="b")
    assert (first["value"], first["ratio"], second["ratio"]) == (3, 3 / 8, None)
    peaks = [bench.peak_megabytes(code) for code in ("x = b'x' * 300_000_000", "")]
    assert peaks[0] - peaks[1] == pytest.approx(300, abs=20)


def test_training_speeds_are_of_the_same_steps(monkeypatch):
    speeds = [100] * 10 + [7680] * 4 + [500, 7680] + [9000] * 4
    records = [dict(step=10 * n, tokens_per_s=speed) for n, speed in enumerate(speeds, 1)]
    records.append(dict(step=200, val_loss=3.0))
    monkeypatch.setattr(bench, "trained", lambda words, folder: (records, 0))
    times = [60] + 100 * [7] + 40 * [0.1] + 30 * [0.2, 0.0, 0.1]  # the first one evaluates
    monkeypatch.setattr(bench, "nanogpt_times", lambda *_: times)
    assert bench.our_speed([], "") == 7680 == pytest.approx(bench.their_speed("", "", False))


@pytest.mark.parametrize("words, message", [(["nothing"], "there is no part 'nothing'"),
                                            (["--nanogpt=nowhere"], "--nanogpt=nowhere is no checkout")])
def test_what_the_bench_cannot_do(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        bench.main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err
