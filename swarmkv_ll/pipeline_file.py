"""A pipeline's TOML file: read, checked, and every problem told with its line. Needs no engine.

`docs/pipeline-file.md` has the schema.
"""

from __future__ import annotations

import codecs
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from .errors import PipelineError, PipelineFileError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Key = tuple[str, ...]
"""Where a value stands in the file: ``("agents", "audit", "prompt")``."""

DEFAULT_MAX_TOKENS = 64
"""Tokens of an answer at most, where neither agent nor file says."""

Strategy = Literal["shared", "snapshot"]
STRATEGIES: tuple[Strategy, ...] = ("shared", "snapshot")

# ── what a file says ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class DocumentSpec:
    """A document.

    Attributes
    ----------
    name, text : str
        Line ends are ``\\n``, wherever the text came from.
    time_limit : float or None
        Seconds.
    """

    name: str
    text: str
    time_limit: float | None = None


@dataclass(frozen=True)
class AgentSpec:
    """An agent.

    Attributes
    ----------
    name : str
    depends_on : tuple of str
        First the document or agent whose KV state it continues, then those whose answers it reads as text. One or
        more; whether they are there, and free of cycles, is not checked here.
    prompt : str
        As written, placeholders and all; each of those is in `depends_on`.
    required_prefix_tokens : int or None
        So much of the document has to be prefilled before the agent starts; None for all of it.
    max_tokens : int
        Tokens of its answer at most.
    sampling : dict of str to float or int
        Arguments for `Sampler`: those that the agent or the file gives.
    priority : float
    time_limit : float or None
        Seconds.
    """

    name: str
    depends_on: tuple[str, ...]
    prompt: str
    required_prefix_tokens: int | None = None
    max_tokens: int = DEFAULT_MAX_TOKENS
    sampling: dict[str, float | int] = field(default_factory=dict)
    priority: float = 1.0
    time_limit: float | None = None


@dataclass(frozen=True)
class PipelineSpec:
    """What a pipeline's file says.

    Attributes
    ----------
    path : str
        The file.
    model : str or None
        A model's file; None for the default model.
    strategy : "shared" or "snapshot"
    chat : bool or None
        None: if the model has a chat template.
    n_ctx, n_parallel : int or None
        None where the file does not say.
    documents : tuple of DocumentSpec
    agents : tuple of AgentSpec
        Both in the file's order, one or more each.
    lines : mapping of key to int
        Where each key and table stands, for `line_of`. Two specs that differ only in it are equal.
    """

    path: str
    model: str | None
    strategy: Strategy
    chat: bool | None
    n_ctx: int | None
    n_parallel: int | None
    documents: tuple[DocumentSpec, ...]
    agents: tuple[AgentSpec, ...]
    lines: Mapping[Key, int] = field(default_factory=dict, repr=False, compare=False)

    def line_of(self, *key: str) -> int | None:
        """The line where a key stands, or else the nearest table around it; None if none of them is in the file."""
        return _line_of(self.lines, key)


# ── placeholders ─────────────────────────────────────────────────────────────────────────────────────

NAME = "[A-Za-z_][A-Za-z0-9_-]*"
"""A regular expression for names of nodes."""

_PLACEHOLDER = re.compile(rf"\{{\{{({NAME})\}}\}}|\{{({NAME})\}}")


def placeholders(prompt: str) -> list[str]:
    """The names in ``{name}``, each once, in order."""
    return list(dict.fromkeys(found[2] for found in _PLACEHOLDER.finditer(prompt) if found[2]))


def fill(prompt: str, texts: Mapping[str, str]) -> str:
    """Put texts in the place of ``{name}``.

    ``{{name}}`` becomes ``{name}``. All other braces, and names without a text, stay as they are: a prompt may hold
    JSON or code. What is put in is not looked through again.
    """
    return _PLACEHOLDER.sub(lambda found: f"{{{found[1]}}}" if found[1] else texts.get(found[2], found[0]), prompt)


# ── numbers and their ranges ─────────────────────────────────────────────────────────────────────────

_INT_MAX = 2**31 - 1
_FLOAT_MAX = sys.float_info.max  # integers of a TOML file have no limit: what is above has no float

_RANGES: dict[str, tuple[type, str, Callable[[Any], bool]]] = {
    "n_ctx": (int, "1 to 2147483392", lambda n: 1 <= n <= 2**31 - 256),
    "n_parallel": (int, "1 to 255", lambda n: 1 <= n <= 255),
    "max_tokens": (int, "1 to 2147483647", lambda n: 1 <= n <= _INT_MAX),
    "required_prefix_tokens": (int, "1 to 2147483647", lambda n: 1 <= n <= _INT_MAX),
    "temperature": (float, "a finite number, 0 or more", lambda x: 0 <= x <= _FLOAT_MAX),
    "top_k": (int, "0 to 2147483647", lambda n: 0 <= n <= _INT_MAX),
    "top_p": (float, "above 0, at most 1", lambda x: 0 < x <= 1),
    "min_p": (float, "0 to 1", lambda x: 0 <= x <= 1),
    "seed": (int, "0 to 4294967295", lambda n: 0 <= n < 2**32),
    "priority": (float, "a finite number above 0", lambda x: 0 < x <= _FLOAT_MAX),
    "time_limit": (float, "a finite number of seconds above 0", lambda x: 0 < x <= _FLOAT_MAX),
}
"""By key: its type, its range in words, and whether a number is in it (NaN never is)."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")
_DEFAULTS = ("max_tokens", *_SAMPLING, "time_limit")  # at the top of a file they hold for every agent
_FILE_KEYS = ("model", "strategy", "chat", "n_ctx", "n_parallel", *_DEFAULTS, "documents", "agents")
_DOCUMENT_KEYS = ("file", "text", "time_limit")
_AGENT_KEYS = ("depends_on", "prompt", "prompt_file", "required_prefix_tokens", *_DEFAULTS, "priority")

# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


def read_pipeline(path: str | os.PathLike[str]) -> PipelineSpec:
    """Read a pipeline's file and the files that it names.

    Raises
    ------
    PipelineFileError
        Something in it is wrong, or it cannot be read.
    PipelineError
        Several things are: `problems` holds a `PipelineFileError` for each.
    """
    name = os.fspath(path)
    try:
        toml = _read_text(name)
        values = _parse(toml)
    except _UnreadableError as unreadable:
        raise PipelineFileError(name, unreadable.line, None, str(unreadable)) from None
    file = _File(name, _key_lines(toml), [])
    spec = _spec(file, _Table(file, (), values))
    if file.problems:
        in_order = sorted(file.problems, key=lambda problem: problem.line or 0)
        raise PipelineError.of(in_order)
    return spec


def _spec(file: _File, top: _Table) -> PipelineSpec:
    top.check_keys(_FILE_KEYS)
    model = top.text("model")
    if model is not None:
        model = file.beside(model)
        if not os.path.isfile(model):  # unlike Path.is_file, this is False for every name that no file has
            top.problem("model", f"{model} is not a file")
    strategy = top.text("strategy")
    if strategy is not None and strategy not in STRATEGIES:
        top.problem("strategy", f'should be "shared" or "snapshot", is "{strategy}"{_hint(strategy, STRATEGIES)}')
    defaults = {key: top.number(key) for key in _DEFAULTS}
    documents = {table.key[-1]: table for table in top.tables("documents", "document")}
    agents = {table.key[-1]: table for table in top.tables("agents", "agent")}
    for twice in agents.keys() & documents.keys():
        line = _line_of(file.lines, documents[twice].key)
        agents[twice].problem(None, f"a document has this name too (line {line})")
    return PipelineSpec(
        path=file.path,
        model=model,
        strategy="snapshot" if strategy == "snapshot" else "shared",
        chat=top.boolean("chat"),
        n_ctx=top.integer("n_ctx"),
        n_parallel=top.integer("n_parallel"),
        documents=tuple(_document(table) for table in documents.values()),
        agents=tuple(_agent(table, defaults, documents) for table in agents.values()),
        lines=file.lines,
    )


def _document(table: _Table) -> DocumentSpec:
    table.check_keys(_DOCUMENT_KEYS)
    return DocumentSpec(table.key[-1], table.text_or_file("text", "file")[1], table.number("time_limit"))


def _agent(table: _Table, defaults: Mapping[str, float | None], documents: Mapping[str, object]) -> AgentSpec:
    table.check_keys(_AGENT_KEYS)
    depends_on = table.names("depends_on")
    key, prompt = table.text_or_file("prompt", "prompt_file")
    for name in placeholders(prompt):
        if name in documents:
            table.problem(
                key,
                f"{{{name}}} is a document: only agents' answers are put into prompts, a document is read by being "
                f"first in depends_on; for the braces themselves write {{{{{name}}}}}",
            )
        elif depends_on and name not in depends_on:
            table.problem(
                key,
                f"{{{name}}} is not in depends_on{_hint(name, depends_on)}; "
                f"for the braces themselves write {{{{{name}}}}}",
            )
    given = {name: table.number(name) for name in _DEFAULTS}
    own = {name: defaults[name] if value is None else value for name, value in given.items()}
    priority = table.number("priority")
    return AgentSpec(
        name=table.key[-1],
        depends_on=depends_on,
        prompt=prompt,
        required_prefix_tokens=table.integer("required_prefix_tokens"),
        max_tokens=int(own["max_tokens"] or DEFAULT_MAX_TOKENS),
        sampling={name: value for name in _SAMPLING if (value := own[name]) is not None},
        priority=1.0 if priority is None else priority,
        time_limit=own["time_limit"],
    )


@dataclass(frozen=True)
class _File:
    """A file that is being read, and what has been found wrong in it."""

    path: str
    lines: Mapping[Key, int]
    problems: list[PipelineFileError]

    def problem(self, key: Key, message: str) -> None:
        self.problems.append(PipelineFileError(self.path, _line_of(self.lines, key), _dotted(key), message))

    def beside(self, name: str) -> str:
        """The path of a file that this one names."""
        return str(Path(self.path).parent / name)


@dataclass(frozen=True)
class _Table:
    """One table of a file. A value that is not there, or not as it should be, is None or empty; the latter is told."""

    file: _File
    key: Key
    values: Mapping[str, Any]

    def problem(self, name: str | None, message: str) -> None:
        self.file.problem(self.key if name is None else (*self.key, name), message)

    def check_keys(self, known: Sequence[str]) -> None:
        for name in self.values:
            if name not in known:
                self.problem(name, f"there is no such key{_hint(name, known)}")

    def get(self, name: str, kind: type, wanted: str) -> Any:
        value = self.values.get(name)
        if value is None or type(value) is kind:  # by type(): a bool is no integer here
            return value
        self.problem(name, f"should be {wanted}, is {_kind(value)}")
        return None

    def text(self, name: str) -> str | None:
        value: str | None = self.get(name, str, "a string")
        if value is not None and not value.strip():
            self.problem(name, "is empty")
            return None
        return value

    def boolean(self, name: str) -> bool | None:
        value: bool | None = self.get(name, bool, "true or false")
        return value

    def number(self, name: str) -> float | None:
        """A number in its range: an int for a key of integers, else a float."""
        kind, wanted, in_range = _RANGES[name]
        whole = kind is int or type(self.values.get(name)) is int  # an integer will do for a float
        value = self.get(name, int if whole else float, "an integer" if kind is int else "a number")
        if value is not None and not in_range(value):
            self.problem(name, f"should be {wanted}, is {_shown(value)}")
            return None
        number: float | None = None if value is None else kind(value)
        return number

    def integer(self, name: str) -> int | None:
        value = self.number(name)
        return None if value is None else int(value)

    def names(self, name: str) -> tuple[str, ...]:
        """One name, or an array of them; has to be there."""
        value = self.values.get(name)
        if value is None:
            self.problem(name, "is missing: what does the agent continue?")
            return ()
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list):
            wrong: str | None = f"is {_kind(value)}"
        elif not names:
            wrong = "holds none"
        else:
            kinds = (
                "an empty string" if item == "" else _kind(item)
                for item in names
                if item == "" or type(item) is not str
            )
            wrong = next((f"holds {kind}" for kind in kinds), None)
        if wrong:
            self.problem(name, f"should be a name or an array of names, {wrong}")
            return ()
        return tuple(names)

    def text_or_file(self, text: str, file: str) -> tuple[str, str]:
        """Exactly one of two keys, the one with a text or the one that names its file: which, and the text."""
        if text in self.values and file in self.values:
            self.problem(file, f"only one of {text} and {file} can be given")
            return text, ""
        if text in self.values:
            return text, self.text(text) or ""
        if file not in self.values:
            self.problem(None, f"{text} or {file} is missing")
            return text, ""
        name = self.text(file)
        if name is None:
            return file, ""
        try:
            found = _read_text(self.file.beside(name))
        except _UnreadableError as error:
            self.problem(file, f"{name} {error}")
            return file, ""
        if not found.strip():
            self.problem(file, f"{name} is empty")
        return file, found

    def tables(self, name: str, what: str) -> list[_Table]:
        """The tables in a table, one or more; those that are none, or have no name, are told."""
        found: dict[str, Any] | None = self.get(name, dict, f"tables, [{name}.NAME]")
        if not found and (found is not None or name not in self.values):
            self.problem(name, f"there is no {what}: at least one [{name}.NAME] is needed")
        tables = []
        for inner, values in (found or {}).items():
            table = _Table(self.file, (*self.key, name, inner), values)
            if not re.fullmatch(NAME, inner):
                table.problem(None, "a name should be letters, digits, _ and -, and not begin with a digit or -")
            if isinstance(values, dict):
                tables.append(table)
            else:
                table.problem(None, f"should be a table, [{name}.{inner}], is {_kind(values)}")
        return tables


def _hint(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array", dict: "a table"}
    return names.get(type(value), "a date or time")


def _shown(value: float) -> str:
    """A number for a message. Python refuses to write out integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length():,} bits"
    return str(value)


class _UnreadableError(Exception):
    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(message)


def _read_text(path: str) -> str:
    """A file's text, without a byte order mark and with ``\\n`` as line ends."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise _UnreadableError("cannot be read: not a regular file")
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror}") from None
    except ValueError:  # a NUL, or what the file system's encoding does not have
        raise _UnreadableError("cannot be read: no file can have this name") from None
    try:
        return data.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _UnreadableError(f"is not UTF-8: byte {data[error.start]:#04x} in line {line}", line) from None


# ── TOML, and where its keys stand ───────────────────────────────────────────────────────────────────


def _parse(toml: str) -> dict[str, Any]:
    try:
        values: dict[str, Any] = tomllib.loads(toml)
        return values
    except RecursionError:
        raise _UnreadableError("is not TOML that can be read: nested too deeply") from None
    except ValueError as error:  # tomllib's own, or of an integer of thousands of digits
        told = re.search(r"\(at (?:line (\d+)|end of document)", str(error))
        line = None if told is None else int(told[1]) if told[1] else toml.rstrip("\n").count("\n") + 1
        raise _UnreadableError(f"is not TOML: {error}", line) from None


_TOKEN = re.compile(r"""\"{3}|'{3}|["'\n=\[\]{},.]|\#[^\n]*|[^\s"'\#=\[\]{},.]+""")
_STRING_ENDS = {  # what ends a string that is begun so, or an escape in it, which does not
    '"': re.compile(r'\\.|"', re.DOTALL),
    "'": re.compile("'"),
    '"""': re.compile(r'\\.|"{3,5}', re.DOTALL),
    "'''": re.compile("'{3,5}"),
}


def _tokens(toml: str) -> Iterator[tuple[str, int]]:
    """Cut TOML, which has to be valid, into strings, brackets, words and line ends: each with the line it begins on."""
    at, line = 0, 1
    while found := _TOKEN.search(toml, at):
        begin, at = found.span()
        if found[0] in _STRING_ENDS:
            ends = _STRING_ENDS[found[0]].finditer(toml, at)
            at = next((end.end() for end in ends if end[0][0] != "\\"), len(toml))
        token = toml[begin:at]
        if token[0] != "#":
            yield token, line
        line += token.count("\n")


def _key_lines(toml: str) -> dict[Key, int]:
    """The line of every key and table of valid TOML; a table's is its header, or else the first that is in it.

    tomllib does not tell. One pass over the text, which for all but keys only needs to know where a value ends.
    """
    told: dict[Key, int] = {}
    implied: dict[Key, int] = {}
    header: Key = ()
    key: Key = ()
    open_in: list[Key | None] = []  # by open bracket of a value: the key of that inline table, None for an array
    in_key, parts = True, list[str]()

    for token, line in _tokens(toml):
        if in_key and token == "[":
            header = ()
        elif in_key and token in ("=", "]"):
            key = (*((open_in[-1] or ()) if open_in else header), *parts)
            header = key if token == "]" else header
            told.setdefault(key, line)
            for n in range(1, len(key)):
                implied.setdefault(key[:n], line)
            in_key = False
        elif token == "{":
            open_in.append(key)
            in_key, parts = True, []
        elif token == "[":
            open_in.append(None)
        elif token in ("]", "}"):
            if open_in:  # not so at the second bracket of [[header]]
                open_in.pop()
            in_key = False
        elif token == "\n":
            if not open_in:
                in_key, parts = True, []
        elif token == ",":
            if open_in[-1] is not None:
                in_key, parts = True, []
        elif in_key and token != ".":
            parts.append(_unquoted(token))
    return implied | told


def _unquoted(part: str) -> str:
    """A part of a key, as it is meant."""
    return next(iter(tomllib.loads(f"{part} = 0"))) if part[0] in "\"'" else part


def _line_of(lines: Mapping[Key, int], key: Key) -> int | None:
    return next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)


def _dotted(key: Key) -> str:
    """A key as TOML writes it."""
    return ".".join(part if re.fullmatch("[A-Za-z0-9_-]+", part) else _quoted(part) for part in key)


def _quoted(part: str) -> str:
    return '"' + part.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
