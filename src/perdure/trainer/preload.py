"""Which installed libraries a program imports at its top, found by parsing it and its own modules, not by running them.

What is the user's own (not in site-packages, dist-packages or the standard library) is parsed too but not imported: it
may read RANK at import. Knows the import system; knows nothing of forking.
"""

import ast
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import NamedTuple

_STDLIB = os.path.dirname(os.__file__) + os.sep
_MOST_FILES = 300
"""Of the user's own modules that are parsed; parsing takes about 1 ms a file, and a project of more names its libraries
early."""

# torch imports these at the first optimizer, DDP or compile call (torch 2.13: torch._dynamo takes 1.2 to 1.5 s on
# 2 cores, measured 2026-11), so that a worker would pay for them on its way to the first step.
TORCH_LATER = ("torch.distributed", "torch.nn.parallel", "torch._dynamo")


class Import(NamedTuple):
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...]


class Source(NamedTuple):
    """A file of the user's own and the package that its relative imports start from."""

    path: str
    package: str


def top_imports(text: str | bytes, package: str = "") -> Iterator[Import]:
    """Imports at the top of a module, also inside top-level if, try and with. Raises SyntaxError, ValueError."""
    yield from _imports(ast.parse(text).body, package)


def _imports(body: Iterable[ast.stmt], package: str) -> Iterator[Import]:
    for statement in body:
        match statement:
            case ast.Import(names=names):
                yield from (Import(alias.name, ()) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(module, level, package)
                if base and base != "__future__":
                    yield Import(base, tuple(alias.name for alias in names))
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(statement.orelse, package)
            case ast.If():
                yield from _imports((*statement.body, *statement.orelse), package)
            case ast.Try():
                handled = (s for handler in statement.handlers for s in handler.body)
                yield from _imports((*statement.body, *handled, *statement.orelse, *statement.finalbody), package)
            case ast.With():
                yield from _imports(statement.body, package)


def _absolute(module: str | None, level: int, package: str) -> str:
    if level == 0:
        return module or ""
    parts = package.split(".") if package else []
    if level - 1 >= len(parts):
        return ""  # beyond the top: the worker will show the error
    base = ".".join(parts[: len(parts) - level + 1])
    return f"{base}.{module}" if module else base


def _specs(module: str) -> list[ModuleSpec]:
    """Of each part of a dotted name, as far as they are found, without importing any."""
    found: list[ModuleSpec] = []
    path: list[str] | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, path)
            locations = None if spec is None else spec.submodule_search_locations
            path = None if locations is None else list(locations)
        except KeyError:  # a namespace package asks its parent, which is not imported, for its path
            path = [folder for entry in path or () if os.path.isdir(folder := os.path.join(entry, part))]
            continue
        if spec is None:
            return found
        found.append(spec)
        if path is None:
            return found
    return found


def is_library(module: str) -> bool:
    """The top package of `module` is installed or of the standard library."""
    top = module.partition(".")[0]
    if top == "perdure":
        return True
    specs = _specs(top)
    if not specs:
        return top in sys.stdlib_module_names  # built in or frozen
    places = [specs[0].origin, *(specs[0].submodule_search_locations or ())]
    return any(place and _is_installed(place) for place in places)


def _is_installed(path: str) -> bool:
    parts = path.split(os.sep)
    return "site-packages" in parts or "dist-packages" in parts or path.startswith(_STDLIB)


def _own_sources(module: str) -> Iterator[Source]:
    """The user's files that importing `module` runs."""
    for spec in _specs(module):
        if spec.origin and spec.origin.endswith(".py"):
            is_package = spec.submodule_search_locations is not None
            yield Source(spec.origin, spec.name if is_package else spec.name.rpartition(".")[0])


def entry_sources(kind: str, target: str) -> list[Source]:
    """The file(s) that run first; sys.path must be as the program will have it."""
    if kind == "script":
        path = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
        return [Source(os.path.abspath(path), "")]
    sources = list(_own_sources(target))
    return [*sources, *_own_sources(f"{target}.__main__")]


def libraries(kind: str, target: str) -> list[Import]:
    """What the program imports from installed libraries at its top and at the top of its own modules, in order.

    A file that is missing or does not parse is passed over: the worker will show the error. The top package of a
    module that is run by -m counts as the user's own wherever it lies.
    """
    own_top = target.partition(".")[0] if kind == "module" else ""
    waiting = deque(entry_sources(kind, target))
    seen: set[str] = set()
    found: dict[Import, None] = {}
    while waiting and len(seen) < _MOST_FILES:
        source = waiting.popleft()
        if source.path in seen:
            continue
        seen.add(source.path)
        for wanted in _read(source):
            if wanted.module.partition(".")[0] != own_top and is_library(wanted.module):
                found[wanted] = None
            else:
                waiting.extend(_own_sources(wanted.module))
                for name in wanted.names:
                    waiting.extend(_own_sources(f"{wanted.module}.{name}"))
    return list(found)


def _read(source: Source) -> list[Import]:
    try:
        with open(source.path, "rb") as file:
            return list(top_imports(file.read(), source.package))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []


def bring_in(wanted: Iterable[Import], *, optional: bool) -> tuple[list[str], list[str]]:
    """Import what is wanted: names of what was, one sentence for each that failed.

    What is `optional` and not installed is no failure: scripts try imports that need not be there.
    """
    done: dict[str, None] = {}
    notes = []
    for module, names in wanted:
        try:
            __import__(module, fromlist=names)
            done[module] = None
        except (Exception, SystemExit) as error:  # a library may raise anything; the worker meets it again and shows it
            if not (optional and isinstance(error, ModuleNotFoundError)):
                notes.append(f"importing {module} failed in the fork server: {type(error).__name__}: {error}")
    return list(done), notes
