"""README.md: its commands parse, its files exist, its links lead somewhere."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

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
