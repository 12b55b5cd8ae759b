"""The tree and the house style: what a reader may rely on in every file."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = [path for path in (*ROOT.glob("*.py"), ROOT / "config/__init__.py")]
TOP = {"prepare.py", "model.py", "train.py", "sample.py", "config", "notebooks", "tests", "assets",
       "README.md", "README.zh.md", "LICENSE", "requirements.txt", "requirements-dev.txt", "pyproject.toml",
       ".gitignore", ".ci"}


def tracked():
    """The files of the project: those git knows, or in an unpacked archive all that .gitignore would keep."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).exists()]


def functions(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_the_top_of_the_tree():
    assert {path.relative_to(ROOT).parts[0] for path in tracked()} <= TOP


def test_ruff():
    words = [sys.executable, "-m", "ruff", "check", "--no-cache", str(ROOT)]
    end = subprocess.run(words, capture_output=True, text=True)
    assert end.returncode == 0, end.stdout + end.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_functions_are_short_and_lines_readable(path):
    for function in functions(path):
        length = function.end_lineno - function.lineno + 1
        assert length <= 50, f"{path.name}: {function.name} has {length} lines"
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), f"{path.name} does not say what it is for"
    assert not re.search(r"(?<![.\w])(exec|eval)\(|\bglobal |def _[a-z]|TODO|FIXME", text, re.MULTILINE)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_importing_a_script_does_nothing(path):
    """Only definitions, imports and constants stand at the top level."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Expr, ast.If)
        assert isinstance(node, allowed), f"{path.name}:{node.lineno}"
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), f"{path.name}:{node.lineno} runs at import"
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) == "__name__ == '__main__'", f"{path.name}:{node.lineno}"


def test_no_text_file_is_opened_without_an_encoding():
    """On Windows the default is not UTF-8. ruff knows open(); this adds pathlib's methods."""
    for path in tracked():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if path.suffix == ".py" else ():
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("read_text", "write_text"):
                assert any(word.arg == "encoding" for word in node.keywords), f"{path}:{node.lineno}"


def test_who_imports_whom():
    allowed = {"model.py": set(), "__init__.py": set(), "prepare.py": {"config"},
               "sample.py": {"config", "model", "prepare"},
               "train.py": {"config", "model", "prepare", "sample"}}
    for path in SCRIPTS:
        names = set(re.findall(r"^\s*(?:from|import) (config|model|prepare|sample|train)\b",
                               path.read_text(encoding="utf-8"), re.MULTILINE))
        assert names <= allowed[path.name], f"{path.name} imports {names - allowed[path.name]}"
