"""
A dataclass as a command line: each field is a setting, and the comment beside it is the setting's help.

    python train.py config/mine.toml --n_layer=4 --learning_rate 3e-3 --resume

A value comes from the class's default, then from the TOML files in the order given, then from the flags;
the later one wins. A misspelt name or a value of the wrong type ends the program before any work is done.
"""

import argparse
import difflib
import inspect
import json
import math
import os
import re
import sys
import tomllib
from dataclasses import asdict, fields
from typing import get_args, get_origin, get_type_hints


def parse(cls, argv=None):
    """Build a `cls` from the command line, or from the list of words `argv` in notebooks and tests.

    Fields may be int, float, bool, str, Literal["a", "b"] or list[str] (a TOML array, or the flag repeated).
    Raises ValueError, in one sentence, for whatever the user got wrong; --help prints and exits.
    """
    kinds, notes = get_type_hints(cls), comments(cls)
    parser = Parser(usage="%(prog)s [FILE.toml ...] [--name=value ...]", allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter,
                    description=inspect.getmodule(cls).__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE.toml", help="settings, one `name = value` a line")
    for name, default in asdict(cls()).items():
        note = f"{notes.get(name, '')} (default: {json.dumps(default, ensure_ascii=False)})"
        action = "append" if get_origin(kinds[name]) is list else "store"
        parser.add_argument(f"--{name}", metavar=kind_name(kinds[name]), default=argparse.SUPPRESS,
                            help=note.replace("%", "%%"), action=action)
    if argv is None:  # whatever the locale is, what was typed is UTF-8
        argv = [os.fsencode(word).decode("utf-8", errors="replace") for word in sys.argv[1:]]
    # a bare switch means true, and never takes the next word
    argv = [word + "=true" if word[:2] == "--" and is_switch(kinds.get(word[2:])) else word for word in argv]
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError(unknown_name(unknown[0].lstrip("-").partition("=")[0], kinds))

    values = {}
    for path in given.files:
        for name, value in read_toml(path, kinds).items():
            values[name] = check(name, value, kinds, f" in {path}")
    for name, value in vars(given).items():
        if name != "files":
            values[name] = check(name, from_text(value, kinds[name]), kinds)
    return cls(**values)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print the whole usage and exit
        raise ValueError(message)


def run(main, cls):
    """What a script does when it is started: parse, then `main(settings)`.

    A mistake of the user reaches this place as ValueError, OSError or ImportError, and becomes one line on
    standard error and exit code 2. In a notebook or a test, call `main` itself to see the traceback.
    """
    for stream in sys.stdout, sys.stderr:
        stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        main(parse(cls))
    except BrokenPipeError:  # the reader has seen enough: python sample.py | head -1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        sys.exit(130)  # the shell's code for Ctrl-C
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        stop(f"{name}{error.strerror or error}")
    except (ValueError, ImportError) as error:
        stop(error)


def stop(message):
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)


def read_toml(path, kinds):
    """{name: value} of a TOML file."""
    name = path.partition("=")[0].lstrip("-")
    if name in kinds and not os.path.exists(path):
        raise ValueError(f"{path!r} is no TOML file; write --{name}=VALUE for the setting")
    try:
        with open(path, "rb") as f:
            return tomllib.load(f)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a TOML file: its bytes are not UTF-8 text") from None


def from_text(text, kind):
    """A flag's text as a value of its field's type; `check` complains about what could not be read."""
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError, TypeError, AttributeError):  # Literal and list[str] come as they are
        return text


def check(name, value, kinds, where=""):
    """Return the value if the field `name` exists and takes it; raise ValueError if not."""
    if name not in kinds:
        raise ValueError(unknown_name(name, kinds) + where)
    kind, shown = kinds[name], json.dumps(value, ensure_ascii=False, default=str)
    if choices := get_args(kind) if get_origin(kind) is not list else ():
        value = str(value).lower() if isinstance(value, bool) else value  # TOML's true for "true"
        good = value in choices
    elif kind is float and type(value) is int:
        value, good = float(value), True
    elif get_origin(kind) is list:
        value = [value] if isinstance(value, str) else value
        good = isinstance(value, list) and all(isinstance(item, str) for item in value)
    else:  # not isinstance: True is an int in Python, and no layer count
        good = type(value) is kind and (kind is not float or math.isfinite(value))
    if not good:
        off = "" if str(value).lower() not in ("none", "null", "off") else (
            f"; --{name}= switches it off" if "" in choices else "; 0 switches it off")
        raise ValueError(f"{name} = {shown}{where} must be {kind_name(kind)}{off}")
    return value


def is_switch(kind):
    return kind is bool or "true" in get_args(kind)


def kind_name(kind):
    """How messages and --help call a type: int, float, true|false, adamw|muon, str. No word for ""."""
    choices = [choice for choice in get_args(kind) if choice] if get_origin(kind) is not list else ()
    return "|".join(choices) or {bool: "true|false", int: "int", float: "float"}.get(kind, "str")


def unknown_name(name, kinds):
    close = difflib.get_close_matches(name, kinds, n=1)
    return f"there is no setting {name!r}" + (f"; did you mean --{close[0]}?" if close else "; see --help")


def comments(cls):
    """{field: the comment beside it, and its further lines}, from the source of the class and its parents."""
    source = "\n".join(inspect.getsource(c) for c in reversed(cls.__mro__[:-1]))
    found = re.findall(r"^    (\w+): .*?  # (.*(?:\n    #   .*)*)", source, re.MULTILINE)
    return {name: note.replace("\n    #  ", "") for name, note in found}


def to_toml(cfg, skip=()):
    """The inverse of `parse`: a file that makes the same run again; `skip` names fields to leave out."""
    return "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
                   for name, value in asdict(cfg).items() if name not in skip)


def narrow(cfg, cls):
    """The `cls` part of a config whose class inherits from `cls`."""
    return cls(**{field.name: getattr(cfg, field.name) for field in fields(cls)})
