#!/usr/bin/env python3
"""Compare the signatures of BigDL 2.x with the current ones.

python scripts/compare_signatures.py            # a table of the differences, in Markdown
python scripts/compare_signatures.py --write    # puts it into docs/compat.md

Signatures of 2.x stand in python-tests/common/signatures_2x.txt, which says how to read it.
"""

import argparse
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigdl.common.dropped import DroppedModuleError

ROOT = Path(__file__).resolve().parents[1]
SIGNATURES = ROOT / "python-tests" / "common" / "signatures_2x.txt"
PAGE = ROOT / "docs" / "compat.md"
BEGIN = "<!-- signatures: what scripts/compare_signatures.py --write puts here -->"
END = "<!-- end of signatures -->"

_CALLABLE = re.compile(r"(?P<name>\w+(?:\(\))?(?:\.\w+(?:\(\))?)*)\((?P<arguments>.*)\)")
_NOTE = re.compile(r"\s+(?P<kind>version|keywords|because|dropped)(?P<names>( \w+)*): (?P<text>.+)")
# What defaults of 2.x are written with.
_NAMES = {"logging": logging, "sys": sys}
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class Note:
    """Note about some arguments of a signature, or about all of it."""

    kind: str
    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Difference:
    """Difference between an argument in 2.x and now."""

    argument: str
    old: str
    here: str


@dataclass
class Published:
    """Callable of BigDL 2.x, as listed in the file.

    Attributes
    ----------
    name : str
        Its import path.
    signature : inspect.Signature, optional
        None if only the name is known.
    notes : list of Note
        The indented lines below it.
    """

    name: str
    signature: inspect.Signature | None
    notes: list[Note] = field(default_factory=list)

    def texts(self, kind: str) -> list[str]:
        """Return the texts of the notes of a type."""
        return [note.text for note in self.notes if note.kind == kind]

    @property
    def title(self) -> str:
        """Name, with the version if the line has one."""
        return " ".join([self.name, *(f"({text})" for text in self.texts("version"))])

    def notes_on(self, difference: Difference) -> list[Note]:
        """Return the notes with the reasons of a difference."""
        return [
            note
            for note in self.notes
            if note.kind == "because" and (not note.names or difference.argument in note.names)
        ]


def read(path: Path = SIGNATURES) -> list[Published]:
    """Return the callables listed in the file, in order."""
    listed: list[Published] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if note := _NOTE.fullmatch(line):
            names = tuple(note["names"].split())
            listed[-1].notes.append(Note(note["kind"], names, note["text"]))
        elif published := _CALLABLE.fullmatch(line):
            listed.append(Published(published["name"], signature_of(published["arguments"])))
        else:
            raise SystemExit(f"{path.name}:{number} is neither a signature nor a note: {line}")
    return listed


def signature_of(arguments: str) -> inspect.Signature | None:
    if arguments == "...":
        return None
    space: dict[str, Any] = {}
    exec(f"def published({arguments}): ...", dict(_NAMES), space)
    return inspect.signature(space["published"])


class NotThereError(Exception):
    """Error for a name that cannot be imported."""


def signature_here(name: str) -> inspect.Signature:
    """Return the current signature of a name.

    Parameters
    ----------
    name : str
        Import path; ``f()`` stands for what ``f`` returns.

    Raises
    ------
    NotThereError
        If there is no such name.
    """
    module, steps = _module_of(re.findall(r"\w+|\(\)", name))
    owner, value = None, module
    for step in steps:
        if step == "()":
            value = value if isinstance(value, type) else _returned_by(value)
            continue
        try:
            owner, value = value, getattr(value, step)
        except AttributeError:
            raise NotThereError(name) from None
    signature = inspect.signature(value)
    if isinstance(owner, type) and inspect.isfunction(inspect.getattr_static(owner, steps[-1])):
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # no self
    return signature


def _module_of(steps: list[str]) -> tuple[Any, list[str]]:
    """Return the innermost module of a path and the remaining path."""
    module = None
    for count in range(1, len(steps)):
        path = ".".join(steps[:count])
        try:
            module = importlib.import_module(path)
        except DroppedModuleError as error:
            raise NotThereError(path) from error
        except ModuleNotFoundError as error:
            if error.name != path:  # a package that BigDL imports
                raise
            if module is not None and hasattr(module, steps[count - 1]):
                return module, steps[count - 1 :]
            raise NotThereError(path) from None
    return module, steps[-1:]


def _returned_by(function: Any) -> Any:
    annotation = inspect.signature(function).return_annotation
    if isinstance(annotation, str):
        annotation = eval(annotation, vars(sys.modules[function.__module__]))
    return annotation


def differences(published: Published) -> list[Difference]:
    """Return the arguments of a 2.x callable that do not work as before."""
    try:
        here = signature_here(published.name)
    except NotThereError:
        return [Difference("", "exists", "removed")]
    return [] if published.signature is None else list(differences_of(published.signature, here))


def differences_of(old: inspect.Signature, here: inspect.Signature) -> Iterator[Difference]:
    ours = here.parameters
    positional = [name for name, each in ours.items() if each.kind in _BY_POSITION]
    rest = {each.kind: str(each.replace(annotation=_NO_DEFAULT)) for each in ours.values()}
    star, stars = (
        rest.get(kind) for kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    )
    in_order = True
    matched = set()
    for index, (name, each) in enumerate(old.parameters.items()):
        if each.kind is each.VAR_POSITIONAL:
            if star is None:
                yield Difference(name, f"`*{name}`", "not taken")
        elif each.kind is each.VAR_KEYWORD:
            if stars is None:
                yield Difference(name, f"`**{name}`", "not taken")
        elif each.kind is each.POSITIONAL_ONLY:  # its name is not known
            if index < len(positional):
                matched.add(positional[index])
                yield from _defaults(name, each, ours[positional[index]])
            elif star is None:
                yield Difference(name, f"argument {index + 1}", "not taken")
        elif name not in ours:
            others = ", ".join(f"`{kind}`" for kind in (star, stars) if kind)
            yield Difference(name, _written(each), f"in {others}" if stars else "not taken")
        else:
            matched.add(name)
            if ours[name].kind is each.POSITIONAL_ONLY:
                yield Difference(name, _written(each), "by position only")
            elif each.kind in _BY_POSITION and name not in positional:
                yield Difference(name, _written(each), f"`{name}=` by keyword only")
            elif in_order and each.kind in _BY_POSITION and positional.index(name) != index:
                in_order = False
                yield Difference(name, _at(name, index), _at(name, positional.index(name)))
            yield from _defaults(name, each, ours[name])
    for name, each in ours.items():
        required = each.default is _NO_DEFAULT and each.kind not in (
            each.VAR_POSITIONAL,
            each.VAR_KEYWORD,
        )
        if required and name not in matched:
            yield Difference(name, "", f"`{name}` is required")


def _defaults(name: str, old: inspect.Parameter, here: inspect.Parameter) -> Iterator[Difference]:
    if old.default is _NO_DEFAULT:  # all calls gave it
        return
    if here.default is _NO_DEFAULT:
        yield Difference(name, _written(old), f"`{here.name}` is required")
    elif old.default is not ... and not _same(old.default, here.default):
        yield Difference(name, _written(old), _written(here))


def _at(name: str, index: int) -> str:
    return f"`{name}` as argument {index + 1}"


def _same(old: Any, here: Any) -> bool:
    if old in ([], {}) and here is None:  # which stands for an empty one
        return True
    if isinstance(old, list | tuple) and isinstance(here, list | tuple):
        return list(old) == list(here)
    return isinstance(old, bool) == isinstance(here, bool) and bool(old == here)


def _written(parameter: inspect.Parameter) -> str:
    if parameter.default is _NO_DEFAULT:
        return f"`{parameter.name}`"
    if parameter.default is ...:
        default = "..."
    elif isinstance(parameter.default, str):
        default = f'"{parameter.default}"'
    else:
        default = repr(parameter.default)
    return f"`{parameter.name}={'(unset)' if ' at 0x' in default else default}`"


def mistakes(published: Published, differences: list[Difference]) -> list[str]:
    """Return differences without a reason and reasons without a difference."""
    if published.texts("dropped"):
        return (
            [] if _is_missing(differences) else [f"{published.title} is there, and called dropped"]
        )
    wrong = [
        f"{published.title}: {each.old or 'nothing'} in 2.x, here {each.here}"
        for each in differences
        if not published.notes_on(each)
    ]
    used = {note for each in differences for note in published.notes_on(each)}
    return wrong + [
        f"{published.title} does not differ, as this says: {note.text}"
        for note in published.notes
        if note.kind == "because" and note not in used
    ]


def _is_missing(differences: list[Difference]) -> bool:
    return any(not each.argument for each in differences)


def table(compared: list[tuple[Published, list[Difference]]]) -> str:
    """Return a summary sentence and the table of differences, in Markdown."""
    compared = [(each, differences) for each, differences in compared if not each.texts("dropped")]
    equal = sum(not differences for _, differences in compared)
    with_arguments = sum(each.signature is not None for each, _ in compared)
    lines = [
        f"{len(compared)} names of BigDL 2.x are compared, {with_arguments} of them with their"
        f" arguments. {equal} are unchanged or have additional optional arguments.",
        "",
        "| Name | 2.x | BigDL 3 | Reason |",
        "|---|---|---|---|",
    ]
    for published, differences in compared:
        rows: dict[tuple[Note, ...], list[Difference]] = {}
        for each in differences:
            rows.setdefault(tuple(published.notes_on(each)), []).append(each)
        lines += [_row(published.title, notes, group) for notes, group in rows.items()]
    return "\n".join(lines)


def _row(title: str, notes: tuple[Note, ...], group: list[Difference]) -> str:
    name, _, version = title.partition(" ")
    old = ", ".join(each.old for each in group if each.old)
    here = dict.fromkeys(each.here for each in group)  # each text once
    why = "; ".join(note.text for note in notes)
    cells = [f"`{name}` {version}".strip(), old, ", ".join(here), why]
    return "| " + " | ".join(cells) + " |"


def with_table(page: str, text: str) -> str:
    """Return a page with `text` between the two markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def main() -> None:
    """Print the table, or write it to the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/compat.md")
    options = parser.parse_args()
    compared = [(each, differences(each)) for each in read()]
    if problems := [line for each in compared for line in mistakes(*each)]:
        raise SystemExit("\n".join(problems))
    if options.write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), table(compared)), "utf-8")
    else:
        print(table(compared))


if __name__ == "__main__":
    main()
