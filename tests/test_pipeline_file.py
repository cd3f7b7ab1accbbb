"""A pipeline's TOML file: what is read from it, and for each mistake the key and line that are told."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmkv_ll import pipeline_file
from swarmkv_ll.errors import PipelineError, PipelineFileError
from swarmkv_ll.pipeline_file import AgentSpec, DocumentSpec, PipelineSpec, fill, placeholders, read_pipeline

MINIMAL = """\
[documents.contract]
text = "One party, and another."

[agents.audit]
depends_on = "contract"
prompt = "List the risks."
"""


def read(folder: Path, toml: str | bytes) -> PipelineSpec:
    path = folder / "pipeline.toml"
    path.write_bytes(toml.encode() if isinstance(toml, str) else toml)
    return read_pipeline(path)


def problems(folder: Path, toml: str | bytes) -> list[tuple[int | None, str | None, str]]:
    """Line, key and message of everything that is wrong with a file."""
    with pytest.raises(PipelineError) as caught:
        read(folder, toml)
    found = []
    for problem in caught.value.problems:
        assert isinstance(problem, PipelineFileError)
        assert problem.path == str(folder / "pipeline.toml")
        start = f"{problem.path}{f', line {problem.line}' if problem.line else ''}: "
        start += f"{problem.key}: " if problem.key else ""
        assert str(problem).startswith(start)
        assert str(problem) in str(caught.value)
        found.append((problem.line, problem.key, str(problem).removeprefix(start)))
    return found


def one(folder: Path, toml: str | bytes) -> tuple[int | None, str | None, str]:
    found = problems(folder, toml)
    assert len(found) == 1, found
    return found[0]


# ── right files ──────────────────────────────────────────────────────────────────────────────────────


def test_what_is_not_said_is_a_default(tmp_path: Path) -> None:
    spec = read(tmp_path, MINIMAL)
    assert spec == PipelineSpec(
        path=str(tmp_path / "pipeline.toml"),
        model=None,
        strategy="shared",
        chat=None,
        n_ctx=None,
        n_parallel=None,
        documents=(DocumentSpec("contract", "One party, and another."),),
        agents=(
            AgentSpec(
                name="audit",
                depends_on=("contract",),
                prompt="List the risks.",
                required_prefix_tokens=None,
                max_tokens=64,
                sampling={},
                priority=1.0,
                time_limit=None,
            ),
        ),
    )


def test_everything_said(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "some.gguf").write_bytes(b"GGUF")
    (tmp_path / "contract.md").write_bytes("\ufeff# Zürich\r\nOne.\r\n".encode())
    (tmp_path / "ask.txt").write_text("Given {audit}, what now?\n", encoding="utf-8")
    spec = read(
        tmp_path,
        """
        model = "models/some.gguf"
        strategy = "snapshot"
        chat = false
        n_ctx = 8192
        n_parallel = 16
        max_tokens = 40
        temperature = 1
        seed = 7
        time_limit = 60

        [documents]
        contract.file = "contract.md"
        notes = { text = 'short' }

        [agents.audit]
        depends_on = ["contract"]
        prompt = "List the risks."
        required_prefix_tokens = 512
        max_tokens = 64
        temperature = 0.5
        top_k = 40
        top_p = 0.9
        min_p = 0.05
        seed = 4294967295
        priority = 2
        time_limit = 1.5

        [agents._sum-up2]
        depends_on = ["notes", "audit"]
        prompt_file = "ask.txt"
        """,
    )
    assert spec.model == str(tmp_path / "models" / "some.gguf")
    assert (spec.strategy, spec.chat, spec.n_ctx, spec.n_parallel) == ("snapshot", False, 8192, 16)
    assert spec.documents == (DocumentSpec("contract", "# Zürich\nOne.\n"), DocumentSpec("notes", "short"))
    sampling = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": 4294967295}
    audit, sum_up = spec.agents
    assert audit == AgentSpec("audit", ("contract",), "List the risks.", 512, 64, sampling, 2.0, 1.5)
    assert sum_up == AgentSpec(
        "_sum-up2", ("notes", "audit"), "Given {audit}, what now?\n", None, 40, {"temperature": 1.0, "seed": 7}, 1.0, 60
    )
    kinds = {name: type(value) for name, value in audit.sampling.items()}
    assert kinds == {"temperature": float, "top_k": int, "top_p": float, "min_p": float, "seed": int}
    assert type(sum_up.sampling["temperature"]) is type(audit.priority) is type(sum_up.time_limit) is float


def test_an_agent_s_own_zero_is_not_the_default(tmp_path: Path) -> None:
    spec = read(tmp_path, "temperature = 0.8\ntop_k = 5\n" + MINIMAL + "temperature = 0\ntop_k = 0\n")
    assert spec.agents[0].sampling == {"temperature": 0.0, "top_k": 0}


def test_paths_are_beside_the_file_wherever_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "contract.md").write_text("Inner.", encoding="utf-8")
    (tmp_path / "inner" / "p.toml").write_text(MINIMAL.replace('text = "One', 'file = "contract.md" #'), "utf-8")
    monkeypatch.chdir(tmp_path)
    assert read_pipeline("inner/p.toml").documents[0].text == "Inner."
    monkeypatch.chdir("inner")
    assert read_pipeline("p.toml").documents[0].text == "Inner."


def test_the_file_s_order_is_kept_and_specs_are_frozen(tmp_path: Path) -> None:
    names = ["z", "m", "a", "q"]
    spec = read(
        tmp_path, MINIMAL + "".join(f'[agents.{name}]\ndepends_on = "contract"\nprompt = "?"\n' for name in names)
    )
    assert [agent.name for agent in spec.agents] == ["audit", *names]
    for part in (spec, spec.documents[0], spec.agents[0]):
        with pytest.raises(dataclasses.FrozenInstanceError):
            part.name = "other"  # type: ignore[misc, union-attr]


def test_who_is_there_is_for_the_graph_to_check(tmp_path: Path) -> None:
    spec = read(tmp_path, MINIMAL.replace('"contract"\n', '["nobody", "audit", "audit"]\n'))
    assert spec.agents[0].depends_on == ("nobody", "audit", "audit")


# ── wrong values ─────────────────────────────────────────────────────────────────────────────────────

WRONG_NUMBERS = [
    ("n_ctx", "0", "should be 1 to 2147483392, is 0"),
    ("n_ctx", "2147483393", "should be 1 to 2147483392, is 2147483393"),
    ("n_ctx", "true", "should be an integer, is a boolean"),
    ("n_ctx", "1.0", "should be an integer, is a float"),
    ("n_parallel", "0", "should be 1 to 255, is 0"),
    ("n_parallel", "256", "should be 1 to 255, is 256"),
    ("max_tokens", "0", "should be 1 to 2147483647, is 0"),
    ("max_tokens", "false", "should be an integer, is a boolean"),
    ("max_tokens", "9223372036854775808", "should be 1 to 2147483647, is 9223372036854775808"),
    ("max_tokens", "0x" + "f" * 5000, "should be 1 to 2147483647, is an integer of 20,000 bits"),
    ("required_prefix_tokens", "0", "should be 1 to 2147483647, is 0"),
    ("required_prefix_tokens", '"512"', "should be an integer, is a string"),
    ("temperature", "-0.1", "should be a finite number, 0 or more, is -0.1"),
    ("temperature", "nan", "should be a finite number, 0 or more, is nan"),
    ("temperature", "inf", "should be a finite number, 0 or more, is inf"),
    ("temperature", "1e999", "should be a finite number, 0 or more, is inf"),
    ("temperature", "0x" + "f" * 5000, "should be a finite number, 0 or more, is an integer of 20,000 bits"),
    ("temperature", "true", "should be a number, is a boolean"),
    ("temperature", '"0"', "should be a number, is a string"),
    ("top_k", "-1", "should be 0 to 2147483647, is -1"),
    ("top_k", "40.0", "should be an integer, is a float"),
    ("top_p", "0", "should be above 0, at most 1, is 0"),
    ("top_p", "1.01", "should be above 0, at most 1, is 1.01"),
    ("min_p", "-0.5", "should be 0 to 1, is -0.5"),
    ("min_p", "[0.5]", "should be a number, is an array"),
    ("seed", "-1", "should be 0 to 4294967295, is -1"),
    ("seed", "4294967296", "should be 0 to 4294967295, is 4294967296"),
    ("priority", "0", "should be a finite number above 0, is 0"),
    ("priority", "-inf", "should be a finite number above 0, is -inf"),
    ("priority", "{}", "should be a number, is a table"),
    ("time_limit", "0.0", "should be a finite number of seconds above 0, is 0.0"),
    ("time_limit", "inf", "should be a finite number of seconds above 0, is inf"),
    ("time_limit", "07:32:00", "should be a number, is a date or time"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_NUMBERS)
def test_numbers_out_of_range_or_of_another_type(tmp_path: Path, name: str, value: str, message: str) -> None:
    if name in pipeline_file._FILE_KEYS:
        assert one(tmp_path, f"\n{name} = {value}\n{MINIMAL}") == (2, name, message)
    if name in pipeline_file._AGENT_KEYS:
        assert one(tmp_path, f"{MINIMAL}{name} = {value}\n") == (7, f"agents.audit.{name}", message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", 1),
        ("n_ctx", 2147483392),
        ("n_parallel", 1),
        ("n_parallel", 255),
        ("max_tokens", 1),
        ("max_tokens", 2147483647),
        ("required_prefix_tokens", 1),
        ("temperature", 0.0),
        ("temperature", 1e308),
        ("top_k", 0),
        ("top_k", 2147483647),
        ("top_p", 1e-300),
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("seed", 0),
        ("seed", 4294967295),
        ("priority", 5e-324),
        ("time_limit", 5e-324),
    ],
)
def test_the_ends_of_the_ranges_are_in_them(tmp_path: Path, name: str, value: float) -> None:
    if name in pipeline_file._FILE_KEYS:
        spec = read(tmp_path, f"{name} = {value!r}\n{MINIMAL}")
    else:
        spec = read(tmp_path, f"{MINIMAL}{name} = {value!r}\n")
    agent = spec.agents[0]
    everything: dict[str, Any] = {**vars(spec), **vars(agent), **agent.sampling}
    assert everything[name] == value


@pytest.mark.parametrize(
    ("line", "key", "message"),
    [
        ('model = "absent.gguf"', "model", "{folder}/absent.gguf is not a file"),
        ('model = "."', "model", "{folder} is not a file"),
        ('model = ""', "model", "is empty"),
        (f'model = "{"m" * 300}"', "model", f"{{folder}}/{'m' * 300} is not a file"),
        ("model = 3", "model", "should be a string, is an integer"),
        (
            'strategy = "snapshots"',
            "strategy",
            'should be "shared" or "snapshot", is "snapshots" (did you mean snapshot?)',
        ),
        ('strategy = "x"', "strategy", 'should be "shared" or "snapshot", is "x"'),
        ("strategy = true", "strategy", "should be a string, is a boolean"),
        ("chat = 1", "chat", "should be true or false, is an integer"),
        ('chat = "true"', "chat", "should be true or false, is a string"),
        ("n_contxt = 1", "n_contxt", "there is no such key (did you mean n_ctx?)"),
        ("something = 1", "something", "there is no such key"),
        ('"a b" = 1', '"a b"', "there is no such key"),
        ("'a\"\\b' = 1", '"a\\"\\\\b"', "there is no such key"),
        ("priority = 1.0", "priority", "there is no such key"),
    ],
)
def test_wrong_at_the_top(tmp_path: Path, line: str, key: str, message: str) -> None:
    assert one(tmp_path, f"# a comment\n{line}\n{MINIMAL}") == (2, key, message.replace("{folder}", str(tmp_path)))


TEXT_LINE, DEPENDS_LINE, PROMPT_LINE = (MINIMAL.splitlines()[i] for i in (1, 4, 5))
NAMES = "should be a name or an array of names, "
LETTERS = "a name should be letters, digits, _ and -, and not begin with a digit or -"
NO_FILE = "cannot be read: No such file or directory"


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "message"),
    [
        (TEXT_LINE, "", 1, "documents.contract", "text or file is missing"),
        ("text =", "file = 'a'\ntext =", 2, "documents.contract.file", "only one of text and file can be given"),
        (TEXT_LINE, 'text = " \\n"', 2, "documents.contract.text", "is empty"),
        (TEXT_LINE, "text = 1", 2, "documents.contract.text", "should be a string, is an integer"),
        (TEXT_LINE, 'file = ""', 2, "documents.contract.file", "is empty"),
        (TEXT_LINE, "file = 'no.md'", 2, "documents.contract.file", f"no.md {NO_FILE}"),
        (TEXT_LINE, "file = '.'", 2, "documents.contract.file", ". cannot be read: not a regular file"),
        (TEXT_LINE, 'file = "\\u0000"', 2, "documents.contract.file", "\0 cannot be read: no file can have this name"),
        ("text =", "txt = 1\ntext =", 2, "documents.contract.txt", "there is no such key (did you mean text?)"),
        (DEPENDS_LINE, "", 4, "agents.audit.depends_on", "is missing: what does the agent continue?"),
        (DEPENDS_LINE, "depends_on = true", 5, "agents.audit.depends_on", f"{NAMES}is a boolean"),
        (DEPENDS_LINE, "depends_on = []", 5, "agents.audit.depends_on", f"{NAMES}holds none"),
        (DEPENDS_LINE, "depends_on = ['a',\n3,\n]", 5, "agents.audit.depends_on", f"{NAMES}holds an integer"),
        (DEPENDS_LINE, "depends_on = ''", 5, "agents.audit.depends_on", f"{NAMES}holds an empty string"),
        (DEPENDS_LINE, "depends_on = ['', 3]", 5, "agents.audit.depends_on", f"{NAMES}holds an empty string"),
        (PROMPT_LINE, "", 4, "agents.audit", "prompt or prompt_file is missing"),
        (
            "prompt =",
            "prompt_file = 'p'\nprompt =",
            6,
            "agents.audit.prompt_file",
            "only one of prompt and prompt_file can be given",
        ),
        (PROMPT_LINE, "prompt = ''", 6, "agents.audit.prompt", "is empty"),
        (PROMPT_LINE, "prompt = ['a']", 6, "agents.audit.prompt", "should be a string, is an array"),
        (PROMPT_LINE, "prompt_file = 'p'", 6, "agents.audit.prompt_file", f"p {NO_FILE}"),
        ("prompt =", "promt = 1\nprompt =", 6, "agents.audit.promt", "there is no such key (did you mean prompt?)"),
        ("prompt =", "sampling.top_k = 3\nprompt =", 6, "agents.audit.sampling", "there is no such key"),
        ("[agents.audit]", "[agents.2nd]", 4, "agents.2nd", LETTERS),
        ("[agents.audit]", '[agents."au dit"]', 4, 'agents."au dit"', LETTERS),
        ("[agents.audit]", '[agents."größe"]', 4, 'agents."größe"', LETTERS),
        ("[agents.audit]", '[agents.""]', 4, 'agents.""', LETTERS),
        ("[agents.audit]", '[agents."a\\n"]', 4, 'agents."a\\n"', LETTERS),
        ("[agents.audit]", "[agents.contract]", 4, "agents.contract", "a document has this name too (line 1)"),
        ("[agents.audit]", "[[agents.audit]]", 4, "agents.audit", "should be a table, [agents.audit], is an array"),
        ("[agents.audit]", "agents.a = 5\n[agents.b]", 4, "documents.contract.agents", "there is no such key"),
        (
            "[agents.audit]",
            "[agents]\na = 5\n[agents.b]",
            5,
            "agents.a",
            "should be a table, [agents.a], is an integer",
        ),
    ],
)
def test_wrong_in_a_table(tmp_path: Path, old: str, new: str, line: int, key: str, message: str) -> None:
    assert old in MINIMAL
    assert one(tmp_path, MINIMAL.replace(old, new)) == (line, key, message)


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (
            "",
            [
                (None, "documents", "there is no document: at least one [documents.NAME] is needed"),
                (None, "agents", "there is no agent: at least one [agents.NAME] is needed"),
            ],
        ),
        (
            "\n[documents]\n[agents]\n",
            [
                (2, "documents", "there is no document: at least one [documents.NAME] is needed"),
                (3, "agents", "there is no agent: at least one [agents.NAME] is needed"),
            ],
        ),
        (
            "documents = 1\nagents = []\n",
            [
                (1, "documents", "should be tables, [documents.NAME], is an integer"),
                (2, "agents", "should be tables, [agents.NAME], is an array"),
            ],
        ),
        (
            "[document.a]\ntext = 'x'\n[agent.b]\n",
            [
                (None, "documents", "there is no document: at least one [documents.NAME] is needed"),
                (None, "agents", "there is no agent: at least one [agents.NAME] is needed"),
                (1, "document", "there is no such key (did you mean documents?)"),
                (3, "agent", "there is no such key (did you mean agents?)"),
            ],
        ),
    ],
)
def test_no_documents_or_agents(tmp_path: Path, toml: str, expected: list[tuple[int | None, str, str]]) -> None:
    assert problems(tmp_path, toml) == expected


def test_all_problems_are_told_in_the_file_s_order(tmp_path: Path) -> None:
    toml = """\
chat = "no"
top_q = 0.5
[agents.one]
prompt = 'Of {two}'
depends_on = ["doc"]
max_tokens = 0

[agents.doc]
prompt_file = "none.txt"
depends_on = "doc"

[documents.doc]
file = "none.md"
"""
    assert [(line, key) for line, key, _ in problems(tmp_path, toml)] == [
        (1, "chat"),
        (2, "top_q"),
        (4, "agents.one.prompt"),
        (6, "agents.one.max_tokens"),
        (8, "agents.doc"),
        (9, "agents.doc.prompt_file"),
        (13, "documents.doc.file"),
    ]


# ── files that cannot be read ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("toml", "line"),
    [
        ("a = 1\nb =\n", 2),
        ("a = 1\r\n\r\n[x\r\n", 3),
        ("a = 1\na = 2\n", 2),
        ('\nx = """abc\n\n', 2),
        ("\n\nx = 'abc", 3),
        ("[a]\n[b]\n[a]\n", 3),
        ("[documents.a]\ntext = 'b'\n[documents.a]\ntext = 'c'\n", 3),
        ("a = " + "9" * 5000, None),
    ],
)
def test_not_toml(tmp_path: Path, toml: str, line: int | None) -> None:
    """The message is tomllib's, which has the line but for the end of a file, and for a number Python does not read."""
    with pytest.raises(ValueError, match=r"\w") as own:
        pipeline_file.tomllib.loads(toml)
    assert one(tmp_path, toml) == (line, None, f"is not TOML: {own.value}")


@pytest.mark.parametrize(
    ("toml", "line", "message"),
    [
        ("a = " + "[" * 100_000, None, "is not TOML that can be read: nested too deeply"),
        (b"a = 1\n\nb = '\xff'\n", 3, "is not UTF-8: byte 0xff in line 3"),
        (b"\xef\xbb\xbfa = 1\nb = '\xe4'\n", 2, "is not UTF-8: byte 0xe4 in line 2"),
    ],
)
def test_not_text_or_not_to_be_parsed(tmp_path: Path, toml: str | bytes, line: int | None, message: str) -> None:
    assert one(tmp_path, toml) == (line, None, message)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("absent.toml", "cannot be read: No such file or directory"),
        (".", "cannot be read: not a regular file"),
        ("pipe", "cannot be read: not a regular file"),
        ("x" * 300, "cannot be read: File name too long"),
        ("a\0b", "cannot be read: no file can have this name"),
    ):
        path = os.path.join(tmp_path, name)
        with pytest.raises(PipelineFileError) as caught:
            read_pipeline(path)
        error = caught.value
        assert (error.path, error.line, error.key) == (path, None, None)
        assert str(error) == f"{path}: {message}"
        assert error.problems == (error,)


def test_files_that_it_names(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin1.md").write_bytes(b"One\nZ\xfcrich\n")
    (tmp_path / "blank.md").write_bytes(b"\xef\xbb\xbf \r\n")
    for name, message in (
        ("pipe", "cannot be read: not a regular file"),
        ("latin1.md", "is not UTF-8: byte 0xfc in line 2"),
        ("blank.md", "is empty"),
    ):
        document = MINIMAL.replace('text = "One party, and another."', f'file = "{name}"')
        assert one(tmp_path, document) == (2, "documents.contract.file", f"{name} {message}")
        prompt = MINIMAL.replace('prompt = "List the risks."', f'prompt_file = "{name}"')
        assert one(tmp_path, prompt) == (6, "agents.audit.prompt_file", f"{name} {message}")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "secret.md").write_text("x", encoding="utf-8")
    (tmp_path / "secret.md").chmod(0)
    toml = MINIMAL.replace('text = "One party, and another."', 'file = "secret.md"')
    assert one(tmp_path, toml) == (2, "documents.contract.file", "secret.md cannot be read: Permission denied")


# ── placeholders ─────────────────────────────────────────────────────────────────────────────────────

TEXT = st.text(st.sampled_from("{}ab_-1 \n\"'é"), max_size=40)
"""Small texts in which braces and names meet often."""

NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_-]*)\}")


@pytest.mark.parametrize(
    ("prompt", "names", "filled"),
    [
        ("plain", [], "plain"),
        ("{a}", ["a"], "A"),
        ("{a}{b}{a}", ["a", "b"], "A{a}{{b}}A"),
        ("{{a}}", [], "{a}"),
        ("{{{a}}}", [], "{{a}}"),
        ("{{a}", ["a"], "{A"),
        ("{a}}", ["a"], "A}"),
        ('{"key": {"inner": [1, {}]}}', [], '{"key": {"inner": [1, {}]}}'),
        ('{"key": {a}}', ["a"], '{"key": A}'),
        ("{ a } {1} {a b} {} {{}} {é} {a:x} {a!r} {a.b} {0}", [], "{ a } {1} {a b} {} {{}} {é} {a:x} {a!r} {a.b} {0}"),
        ("{x} and {a}", ["x", "a"], "{x} and A"),
        ("{a-b_2}", ["a-b_2"], "{a-b_2}"),
    ],
)
def test_filling(prompt: str, names: list[str], filled: str) -> None:
    assert placeholders(prompt) == names
    assert fill(prompt, {"a": "A", "b": "{a}{{b}}"}) == filled


@given(st.text(), st.dictionaries(st.text(), st.text()))
def test_a_text_without_braces_stays(text: str, texts: dict[str, str]) -> None:
    text = text.replace("{", "").replace("}", "")
    assert placeholders(text) == []
    assert fill(text, texts) == text


@given(TEXT, st.dictionaries(st.text("ab_", min_size=1), TEXT))
def test_what_is_escaped_is_literal(text: str, texts: dict[str, str]) -> None:
    escaped = NAME.sub(r"{{\1}}", text)
    assert placeholders(escaped) == []
    assert fill(escaped, texts) == text


@given(TEXT, st.dictionaries(st.text("ab_", min_size=1), TEXT))
def test_what_has_no_text_stays_and_what_is_put_in_is_not_looked_through(text: str, texts: dict[str, str]) -> None:
    filled = fill(text, texts)  # never a KeyError
    if not any(name in texts for name in placeholders(text)):
        assert filled == fill(text, {})
    marks = {name: f"<{i}>" for i, name in enumerate(texts)}  # marks hold no braces: put in, then replaced by the texts
    marked = fill(text, marks)
    assert filled == re.sub("<([0-9]+)>", lambda found: list(texts.values())[int(found[1])], marked)


def test_placeholders_have_to_be_dependencies(tmp_path: Path) -> None:
    head = MINIMAL + '[agents.fixes]\ndepends_on = ["audit"]\n'
    assert read(tmp_path, head + "prompt = 'Of {audit}, {{nobody}}, {\"json\": {}}'\n").agents[1].prompt
    for name, message in (
        ("audits", "{audits} is not in depends_on (did you mean audit?); for the braces themselves write {{audits}}"),
        ("fixes", "{fixes} is not in depends_on; for the braces themselves write {{fixes}}"),
        (
            "contract",
            "{contract} is a document: only agents' answers are put into prompts, a document is read by being first "
            "in depends_on; for the braces themselves write {{contract}}",
        ),
    ):
        toml = head + f'prompt = """\nOf {{audit}},\n{{{name}}} and {{{name}}}"""\n'
        assert one(tmp_path, toml) == (9, "agents.fixes.prompt", message)
    (tmp_path / "p.txt").write_text("Of {x}", encoding="utf-8")
    found = one(tmp_path, head + 'prompt_file = "p.txt"\n')
    assert found == (
        9,
        "agents.fixes.prompt_file",
        "{x} is not in depends_on; for the braces themselves write {{x}}",
    )


def test_a_document_is_no_placeholder_even_where_it_is_a_dependency(tmp_path: Path) -> None:
    line, key, message = one(tmp_path, MINIMAL.replace("List", "{contract}"))
    assert (line, key) == (6, "agents.audit.prompt")
    assert message.startswith("{contract} is a document")


# ── lines ────────────────────────────────────────────────────────────────────────────────────────────

TRICKY = '''\
# [agents.audit]   prompt = "in a comment"
max_tokens = 3 # seed = 4
documents.one.text = """
[agents.audit]
depends_on = "in a string"
an escaped \\""" and two quotes ""
text = \'\'\'"""""
"documents"."tw\\u006f" = { "text" = "a } , seed = 1", }
[ agents . "audit" ]
  prompt = \'\'\'
[agents.fixes]
depends_on = """ \'\' \\\'\'\'\'
depends_on = [ # prompt = "x"
  "one", # ]
  """
  seed = 5
  """, [{ prompt = "seed" }],
]
"top_p" = 0.5
'seed' = 1
[agents.fixes.deep.er]
x = [[1, 2], ["]"]]
y = 1979-05-27 07:32:00.5
[agents.fixes]
prompt = ""
  depends_on= "one"#
[[agents.list]]
seed = 1
[[agents.list]]
seed = 2
'''


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_where_keys_stand(newline: str) -> None:
    toml = TRICKY.replace(", }\n", " }\n")  # a comma there is for TOML 1.1
    values = pipeline_file._parse(toml.replace("\n", newline))
    assert values["documents"]["two"] == {"text": "a } , seed = 1"}
    assert set(values["agents"]["audit"]) == {"prompt", "depends_on", "top_p", "seed"}
    lines = pipeline_file._key_lines(toml.replace("\n", newline))
    assert lines == pipeline_file._key_lines(TRICKY)
    assert lines == {
        ("max_tokens",): 2,
        ("documents",): 3,
        ("documents", "one"): 3,
        ("documents", "one", "text"): 3,
        ("documents", "two"): 8,
        ("documents", "two", "text"): 8,
        ("agents",): 9,
        ("agents", "audit"): 9,
        ("agents", "audit", "prompt"): 10,
        ("agents", "audit", "depends_on"): 13,
        ("agents", "audit", "top_p"): 19,
        ("agents", "audit", "seed"): 20,
        ("agents", "fixes", "deep"): 21,
        ("agents", "fixes", "deep", "er"): 21,
        ("agents", "fixes", "deep", "er", "x"): 22,
        ("agents", "fixes", "deep", "er", "y"): 23,
        ("agents", "fixes"): 24,
        ("agents", "fixes", "prompt"): 25,
        ("agents", "fixes", "depends_on"): 26,
        ("agents", "list"): 27,
        ("agents", "list", "seed"): 28,
        ("agents", "audit", "depends_on", "prompt"): 17,
    }


def test_line_of_falls_back_to_what_is_around(tmp_path: Path) -> None:
    spec = read(tmp_path, MINIMAL)
    assert spec.line_of("agents", "audit", "depends_on") == 5
    assert spec.line_of("agents", "audit", "priority") == 4
    assert spec.line_of("agents", "nobody", "priority") == 4  # as [agents.audit] begins agents
    assert spec.line_of("documents") == 1
    assert spec.line_of("model") is None
    assert spec.line_of() is None


def test_windows_line_ends(tmp_path: Path) -> None:
    toml = MINIMAL.replace("List the risks.", "List {x}.").replace('"One', '"""One\n\n').replace('r."', 'r."""')
    assert one(tmp_path, toml)[0] == 8
    assert one(tmp_path, toml.replace("\n", "\r\n"))[0] == 8


SCALAR = st.sampled_from(
    ["1", "-2.5e3", "true", "1979-05-27", '""', "''", '"a # = ] }"', "'a\\'", '"\\""', "{}", "[]", "[1, [2], {}]"]
)
LONG = st.sampled_from(
    ['"""\na = 1\n[b]\n"""', '"""""a"""""', "'''\n'' x = \"\"\"\n'''", '[\n  1, # ]\n  "]",\n]', '"""\\\n  \\""" """']
)


@given(st.data())
def test_lines_of_any_file(data: st.DataObject) -> None:
    """Files made line by line, each key of its own name, so that what is expected is known while they are made."""
    count = iter(range(10_000))
    written: list[str] = []
    expected: dict[tuple[str, ...], int] = {}

    def name() -> tuple[str, str]:
        plain = f"k{next(count)}"
        kind = data.draw(st.sampled_from(["{}", '"{}"', "'{}'", '"{} ="', "'{}.\"'"]))
        return kind.format(plain), kind.format(plain).strip("\"'" if kind[0] != "'" else "'")

    def at() -> int:
        return "".join(written).count("\n") + 1

    table: tuple[str, ...] = ()
    for _ in range(data.draw(st.integers(0, 8))):
        what = data.draw(st.sampled_from(["header", "pair", "dotted", "inline", "blank"]))
        first, second = name(), name()
        if what == "header":
            table = (first[1], second[1])
            expected |= {table[:1]: at(), table: at()}
            written.append(f" [ {first[0]} .{second[0]}] # [x]\n")
        elif what == "pair":
            expected[(*table, first[1])] = at()
            written.append(f"{first[0]} = {data.draw(SCALAR | LONG)}\n")
        elif what == "dotted":
            expected |= {(*table, first[1]): at(), (*table, first[1], second[1]): at()}
            written.append(f"\t{first[0]} . {second[0]}={data.draw(SCALAR | LONG)} # y = 1\n")
        elif what == "inline":
            expected |= {(*table, first[1]): at(), (*table, first[1], second[1]): at()}
            written.append(f"{first[0]} = {{ {second[0]} = {data.draw(SCALAR | LONG)}, ")
            third = name()
            expected[(*table, first[1], third[1])] = at()
            written.append(f"{third[0]} = {data.draw(SCALAR)} }}\n")
        else:
            written.append(data.draw(st.sampled_from(["\n", "  # z = '''\n", "\t\n"])))
    toml = "".join(written)
    pipeline_file._parse(toml)  # it is TOML
    assert pipeline_file._key_lines(toml) == expected


def test_a_long_document_in_the_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def loads(toml: str) -> Any:
        sizes.append(len(toml))
        return parse(toml)

    parse = pipeline_file.tomllib.loads
    monkeypatch.setattr(pipeline_file.tomllib, "loads", loads)
    document = "".join(f'depends_on = ["{i}"]\nprompt = "{{x}}" "quoted"\n' for i in range(5000))
    agent = '[agents."audit"]\n"depends_on" = "contract"\nprompt = "{x} {y} {z}"\nmax_tokens = 0\n'
    toml = f"[documents.contract]\ntext = '''\n{document}'''\n{agent}"
    found = problems(tmp_path, toml)
    assert [(line, key) for line, key, _ in found] == [
        *[(10_006, "agents.audit.prompt")] * 3,
        (10_007, "agents.audit.max_tokens"),
    ]
    assert sizes == [len(toml), len('"audit" = 0'), len('"depends_on" = 0')]


def test_the_schema_is_told_in_the_docs(tmp_path: Path) -> None:
    docs = (Path(__file__).parents[1] / "docs" / "pipeline-file.md").read_text(encoding="utf-8")
    (tmp_path / "contract.md").write_text("One party, and another.", encoding="utf-8")
    spec = read(tmp_path, docs.split("```toml\n")[1].split("```")[0])
    assert [agent.depends_on for agent in spec.agents] == [("contract",), ("contract", "auditor")]
    tables = "".join(line for line in docs.splitlines(keepends=True) if line.startswith("|"))
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|", tables, re.MULTILINE))
    for key, (_, wanted, _) in pipeline_file._RANGES.items():
        told = wanted.replace("a finite number", "").replace(" of seconds", "").strip(" ,")
        assert rows[key].replace(",", "") == told.replace(",", "")
    known = {*pipeline_file._FILE_KEYS, *pipeline_file._DOCUMENT_KEYS, *pipeline_file._AGENT_KEYS}
    assert known - {"documents", "agents"} <= set(re.findall("`([a-z_]+)`", tables))


# ── what is shipped ──────────────────────────────────────────────────────────────────────────────────

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["audit", "patent"])
def test_the_examples_are_right_and_fit(name: str) -> None:
    """By words: the default model has 1.34 and 1.41 tokens for each in these documents, and a context of 8,192."""
    from swarmkv_ll import dag

    spec = read_pipeline(EXAMPLES / name / "pipeline.toml")
    agents = {agent.name: agent for agent in spec.agents}
    words = {document.name: len(document.text.split()) for document in spec.documents}
    edges: dict[str, tuple[str, ...]] = dict.fromkeys(words, ())
    edges |= {agent.name: agent.depends_on for agent in spec.agents}
    n_tokens: dict[str, float] = {}
    for node in dag.order(edges):
        if node in words:
            n_tokens[node] = 1.6 * words[node]
            continue
        agent = agents[node]
        assert 40 <= agent.max_tokens <= 80
        texts = sum(agents[other].max_tokens for other in placeholders(agent.prompt))
        own = 1.6 * len(agent.prompt.split()) + texts + agent.max_tokens + 32  # and the chat template's turn
        n_tokens[node] = n_tokens[agent.depends_on[0]] + own
    assert max(n_tokens.values()) + 128 < 8192
    assert any(agent.depends_on[0] in agents for agent in spec.agents)  # one continues another's state
