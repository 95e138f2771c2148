"""Catalogue files, as text, into a `Catalogue`. Does not know where they lie."""

import tomllib
from collections.abc import Iterable

import msgspec

from perdure.errors import ConfigError
from perdure.vocab.fault import Fault


class _File(msgspec.Struct, forbid_unknown_fields=True):
    fault: list[Fault]


class Catalogue(msgspec.Struct, frozen=True):
    """Every fault that is known, by id."""

    faults: dict[str, Fault]

    def __getitem__(self, fault: str) -> Fault:
        return self.faults[fault]


def parse_catalogue(texts: Iterable[str]) -> Catalogue:
    """The catalogue in TOML `texts`. Raises ConfigError naming what is wrong; a fault may be defined once."""
    faults: dict[str, Fault] = {}
    for text in texts:
        try:
            entries = msgspec.convert(tomllib.loads(text), _File).fault
        except (tomllib.TOMLDecodeError, msgspec.ValidationError) as problem:
            raise ConfigError(f"a catalogue file cannot be read: {problem}") from None
        for entry in entries:
            if entry.id in faults:
                raise ConfigError(f"the catalogue defines {entry.id} twice")
            faults[entry.id] = entry
    return Catalogue(faults)
