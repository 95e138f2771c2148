"""Splits a command line into flags and program as torchrun does, adds PET_ variables, and reads single values.

It does not know what a flag means. argparse is not used to parse: it matches abbreviations in the script's own
arguments too (`train.py --no` ends in "ambiguous option", Python 3.11) and drops a `--` among them; Perdure's
flags would make both worse.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from perdure.cli.flags import FLAGS, Flag
from perdure.errors import ConfigError
from perdure.vocab.units import parse_duration

_HELP = "perdure run --help"
_SPELLINGS: dict[str, Flag] = {}
for _flag in FLAGS:
    for _spelling in (_flag.name, "--" + _flag.dest, _flag.short):
        if _spelling:
            _SPELLINGS[_spelling] = _flag
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
_Number = TypeVar("_Number", int, float)


class HelpRequested(Exception):
    """`-h` or `--help` before the script."""


class CommandLine(msgspec.Struct, frozen=True):
    """What was written, not yet understood."""

    flags: dict[str, str]
    """By dest; a switch has the value "1"."""
    program: tuple[str, ...]
    """Script and its arguments, untouched; empty: none was given."""


def split(argv: Sequence[str]) -> CommandLine:
    """Everything up to the first word that is no flag and no flag's value is flags; the rest is the program.

    A flag may be shortened as far as it means one of torchrun's; Perdure's own must be written out, so that no
    abbreviation means something else here than in torchrun. Of a flag given twice the last counts.
    """
    flags: dict[str, str] = {}
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            return CommandLine(flags, tuple(argv[at:]))
        if not word.startswith("-") or word == "-":
            return CommandLine(flags, tuple(argv[at - 1 :]))
        for flag, value in _read_word(word):
            if value is None and not flag.is_switch:
                if at == len(argv) or _is_flag_like(argv[at]):
                    raise ConfigError(f"{flag.name} needs a value, as in {flag.name} {flag.metavar}; see {_HELP}")
                value = argv[at]
                at += 1
            flags[flag.dest] = "1" if value is None else value
    return CommandLine(flags, ())


def _read_word(word: str) -> list[tuple[Flag, str | None]]:
    """The flags in one word, with the values that are in it."""
    if word in ("-h", "--help"):
        raise HelpRequested
    if not word.startswith("--"):
        return _read_letters(word)
    name, equals, value = word.partition("=")
    flag = _find(name)
    if equals and flag.is_switch:
        raise ConfigError(f"{flag.name} takes no value, but {word!r} gives one; leave out the part from =")
    return [(flag, value if equals else None)]


def _read_letters(word: str) -> list[tuple[Flag, str | None]]:
    """Flags of one letter: `-m`, `-r 3`, `-r3`, `-mr3`."""
    found: list[tuple[Flag, str | None]] = []
    for i, letter in enumerate(word[1:], start=2):
        if letter == "h":
            raise HelpRequested
        flag = _SPELLINGS.get("-" + letter)
        if flag is None:
            raise _unknown(word)
        if not flag.is_switch:
            return [*found, (flag, word[i:].removeprefix("=") or None)]
        found.append((flag, None))
    return found


def _find(name: str) -> Flag:
    if name in _SPELLINGS:
        return _SPELLINGS[name]
    meant = {f.name: f for s, f in _SPELLINGS.items() if s.startswith(name) and not f.is_added}
    if len(meant) == 1:
        return next(iter(meant.values()))
    if meant:
        raise ConfigError(f"{name} can mean {' or '.join(meant)}; write it out")
    raise _unknown(name)


def _unknown(word: str) -> ConfigError:
    near = difflib.get_close_matches(word.replace("_", "-"), [f.name for f in FLAGS], n=1)
    advice = f"did you mean {near[0]}?" if near else f"see {_HELP}; the script's own arguments go after the script"
    return ConfigError(f"perdure run knows no flag {word}; {advice}")


def _is_flag_like(word: str) -> bool:
    # As in argparse: a dash alone, a negative number and words with a space are values.
    return word.startswith("-") and word != "-" and not _NEGATIVE.fullmatch(word) and " " not in word


class Values:
    """The flags' values, from the command line or else from PET_ variables, with sentences that name the source."""

    def __init__(self, flags: Mapping[str, str], environ: Mapping[str, str]) -> None:
        self._given: dict[str, str] = {}
        self._source: dict[str, str] = {}
        for flag in FLAGS:
            variable = flag.variable
            if flag.dest in flags:
                self._given[flag.dest], self._source[flag.dest] = flags[flag.dest], flag.name
            elif variable is not None and variable in environ:
                self._given[flag.dest], self._source[flag.dest] = environ[variable], f"{variable} ({flag.name})"

    def source(self, dest: str) -> str:
        """How the user gave it, for a sentence."""
        return self._source.get(dest, "--" + dest.replace("_", "-"))

    def wrong(self, dest: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.source(dest)} is {self._given[dest]!r}, but must be {expected}")

    def text(self, dest: str) -> str | None:
        """None where it was not given."""
        return self._given.get(dest)

    def switch(self, dest: str) -> bool:
        """As torchrun's check_env: a PET_ variable must be a whole number, and 0 is off."""
        value = self._given.get(dest)
        return value is not None and self._number(dest, value, int, "1 (on) or 0 (off)") != 0

    def integer(self, dest: str, low: int, high: int | None = None) -> int | None:
        value = self._given.get(dest)
        if value is None:
            return None
        expected = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        number = self._number(dest, value, int, expected)
        if number < low or (high is not None and number > high):
            raise self.wrong(dest, expected)
        return number

    def positive(self, dest: str) -> float | None:
        value = self._given.get(dest)
        if value is None:
            return None
        number = self._number(dest, value, float, "a number of seconds above 0")
        if not 0 < number < float("inf"):
            raise self.wrong(dest, "a number of seconds above 0")
        return number

    def duration(self, dest: str) -> float | None:
        value = self._given.get(dest)
        if value is None:
            return None
        try:
            return parse_duration(value)
        except ConfigError as error:
            raise ConfigError(f"{self.source(dest)}: {error}") from None

    def choice(self, dest: str, choices: Sequence[str]) -> str | None:
        value = self._given.get(dest)
        if value is not None and value not in choices:
            raise self.wrong(dest, f"one of {', '.join(choices)}")
        return value

    def _number(self, dest: str, value: str, kind: Callable[[str], _Number], expected: str) -> _Number:
        try:
            return kind(value)
        except ValueError:
            raise self.wrong(dest, expected) from None
