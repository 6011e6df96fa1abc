"""Every documented way to get a grid wrong: refused, at its line and column, with what is right."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from grid_cases import HEAD

from orchestrator.cli.main import main
from orchestrator.core.errors import GridError
from orchestrator.driver.plan import planned_nodes
from orchestrator.grid.diagnostics import MEANT
from orchestrator.grid.parser import load_grid, parse_grid
from orchestrator.grid.vocabulary import FIELD_NAMES, Vocabulary

ONE = HEAD + "  - name: e\n"  # line 4; what follows is line 5
NO_WORKLOAD = "name: g\nexperiments:\n  - {name: e, model: tiny-chatglm3}\n"
BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 10)}]\n"
    for before, name in zip("abcde", "bcdef", strict=True)
)

#: (what it is, the file, line, column, part of the message, part of the hint)
BAD: list[tuple[str, str | bytes, int | None, int | None, str, str]] = [
    ("empty file", b"", 1, 1, "the file is empty", "name: my-grid"),
    ("only a comment", b"# later\n", 1, 1, "the file is empty", "experiments:"),
    ("UTF-16", "name: g".encode("utf-16"), 1, 1, "UTF-16", "save the file as UTF-8"),
    ("Latin-1", "name: é".encode("latin-1"), 1, 7, "byte 0xe9 is not UTF-8", "save the file as"),
    ("byte order mark", b"\xef\xbb\xbf" + ONE.encode(), 1, 1, "byte order mark", "without BOM"),
    ("tab indentation", HEAD + "\t- name: e\n", 4, 1, "a tab in the indentation", "with spaces"),
    ("control character", b"name: g\x07\n", 1, 8, "control character U+0007", "remove it"),
    ("a list at the top", "- name: g\n", 1, 1, "a grid is a mapping", "name: my-grid"),
    ("unclosed bracket", ONE + "    axes: {cards: [1, 2\n", 6, 1, "not valid YAML", "brackets"),
    ("bad indentation", HEAD + "  - name: e\n   cards: 1\n", 5, 4, "not valid YAML", "indentation"),
    ("colon in a value", "name: a: b\n", 1, 8, "mapping values are not allowed", "quote a value"),
    ("duplicate key", ONE + "    cards: 1\n    cards: 2\n", 6, 5, "twice", "keep one"),
    ("two documents", ONE + "---\nname: h\n", 5, 1, "second document", "under `experiments:`"),
    ("tag", "name: !!python/name:os.system g\n", 1, 7, "the tag !!python", "remove it"),
    ("recursive alias", "name: g\nx: &a [*a]\n", 2, 8, "contains itself", "write the value out"),
    ("YAML bomb", BOMB, 5, 8, "aliases expand to more than 20000", "write the values out"),
    ("deep nesting", "name: " + "[" * 1000, 1, 30, "nested more than 24 deep", "six"),
    ("no name", HEAD.removeprefix("name: g\n") + "  - name: e\n", 1, 1, "no `name:`", "a name"),
    ("a bad name", ONE.replace("name: g", "name: ../g"), 1, 7, '"../g" is not a name', "letters"),
    ("no experiments", "name: g\n", 1, 1, "no `experiments:`", "a list of experiments"),
    ("no experiment", "name: g\nexperiments: []\n", 2, 14, "is empty", "at least one"),
    ("a mapping", "name: g\nexperiments:\n  e: {cards: 1}\n", 3, 3, "not a list", "`- name: e`"),
    ("an experiment that is none", HEAD + "  - 5\n", 4, 5, "5 is not a mapping", ""),
    ("unnamed experiment", HEAD + "  - cards: 1\n", 4, 5, "no `name:` here", "a name"),
    ("duplicate names", ONE + "  - name: e\n", 5, 11, 'a second experiment named "e"', "line 4"),
    ("unknown key at the top", "nmae: x\n" + ONE, 1, 1, 'unknown key "nmae"', "mean name?"),
    ("no such task", ONE.replace("text-gen", "gen"), 2, 22, "is no workload", "text-generation"),
    ("no weights", ONE.replace("tiny-chatglm3", "chatglm3-6b"), 2, 46, "its shape without its", ""),
    ("unknown default", ONE.replace("{", "{modle: m, "), 2, 12, '"modle"', "model?"),
    ("no workload", NO_WORKLOAD, 3, 5, "no `workload:`", "workload: text-generation"),
    ("no model", ONE.replace(", model: tiny-chatglm3", ""), 4, 5, "no `model:`", ""),
    ("a setting at the top", "model: m\n" + ONE, 1, 1, '"model"', "`model:` under `defaults:`"),
    ("an option", "deadline: 08:00\n" + ONE, 1, 1, '"deadline"', "run GRID --deadline 08:00"),
    ("misplaced block", ONE.replace("glm3}", "glm3, measure: {}}"), 2, 61, "stands at the top", ""),
    ("nothing left", ONE + "    exclude: [{cards: 1}]\n", 4, 5, "without jobs", "loosen"),
    ("unknown measure key", ONE + "measure: {warm_up: 1}\n", 5, 11, '"warm_up"', "mean warmup?"),
    ("measure too large", ONE + "measure: {confidence: 95}\n", 5, 23, "95: less than 1 is", ""),
    ("a negative price", ONE + "prices: {kwh: -1}\n", 5, 15, "at least 0 is wanted", ""),
    ("no price", ONE + "prices: {card_hour: dear}\n", 5, 21, "not a number or a mapping", ""),
    ("not every price", ONE + "prices: {card_hour: {a: dear}}\n", 5, 25, '"dear" is not', ""),
    ("unknown price", ONE + "prices: {card_hours: 2}\n", 5, 10, '"card_hours"', "mean card_hour?"),
]
ZIP = "zip: {cards: [1, 2], prompts: [1, 2]}"
HUB = "https://huggingface.co/THUDM/chatglm3-6b"
#: The same of an experiment from the file's fifth line on, of which the last is wrong: (what it is,
#: the lines, the column in the file, part of the message, part of the hint)
IN_EXPERIMENT: list[tuple[str, str, int, str, str]] = [
    ("merge key", "<<: {cards: 1}", 5, "merge keys", "under `defaults:`"),
    ("undefined alias", "cards: *c", 12, "*c refers to nothing", "&c before"),
    ("not a number", "measure: {time_limit_s: .nan}", 29, "not a finite", "quote"),
    ("unknown key", "batchsize: 1", 5, 'key "batchsize"', "mean batch_size?"),
    ("a habit", "matrix: {}", 5, 'unknown key "matrix"', "under `axes:`"),
    ("another's key", "max_new_tokens: 1", 5, "unknown key", "`output_tokens:`"),
    ("another lr", "lr: 1", 5, 'unknown key "lr"', "`learning_rate:` is a setting of `workload"),
    ("no epochs", "epochs: 3", 5, 'key "epochs"', "a job trains for `steps:`"),
    ("a list as text", "precision: 'fp32, bf16'", 16, "is no", "[fp32, bf16]"),
    ("nested parameters", "parameters: {}", 5, '"parameters"', "beside `name:`"),
    ("axes as a list", "axes: [1]", 11, "a list is not a mapping", ""),
    ("exclude as a mapping", "exclude: {cards: 1}", 14, "is not a list", ""),
    ("zip as text", "zip: model", 10, "not a group of linked axes", "a group is"),
    ("unknown workload", "workload: txt-generation", 15, "no workload", "did you"),
    ("a purpose", "workload: inference", 15, "no workload", "mean text-generation?"),
    ("a library", "engine: hf", 13, '"hf" is no engine', "mean transformers?"),
    ("an address", f"model: {HUB}/tree/main", 12, "of the hub is written THUDM/chatglm3-6b", ""),
    ("a dataset's", f"dataset: {HUB}", 14, "a dataset of the hub is written THUDM/chatglm3-6b", ""),
    ("hf://", "dataset: hf://datasets/a/b/c.json", 14, "dataset of the hub is written a/b", ""),
    ("hf.co", "model: hf.co/a/b-GGUF:Q4", 12, "model of the hub is written a/b-GGUF", ""),
    ("a bucket", "model: s3://b/x", 12, "s3://b/x is an address; copy it to a directory", ""),
    ("a file's address", "dataset: file:///d/x", 14, "write the path /d/x", ""),
    ("a tag", "model: qwen2.5:7b", 12, "a tag, as Ollama has them; write org/name of the hub", ""),
    ("a tag of data", "dataset: a/b:c", 14, "`revision:` beside it", ""),
    (
        "a variable",
        "model: ${MODEL}",
        12,
        '"${MODEL}" has ${MODEL}; a grid has no variables',
        "",
    ),
    ("one for a number", "batch_size: ${BATCH}", 17, "not a whole", "a grid has no variables"),
    ("an unknown home", "model: ~nosuch/x", 12, "machine has no home directory ~nosuch", ""),
    ("missing data", "dataset: ./a/b", 14, "there is no file or directory ./a/b in", ""),
    ("not of the hub", "model: ./a/b", 12, "there is no directory ./a/b in", ""),
    ("an adapter's address", "adapter: hf://a/b", 14, "hf://a/b is an address; copy it to a", ""),
    ("JSON's emoji", 'model: "\\ud83d\\ude00"', 15, "not valid YAML", "the character itself"),
    ("unknown model", "model: tiny-chatglm", 12, "did you mean tiny-chatglm3", ""),
    ("missing directory", "model: ./nowhere", 12, "no directory ./nowhere", ""),
    ("unknown dataset", "dataset: english", 14, "no dataset 'english'", ""),
    ("unknown precision", "precision: bf61", 16, '"bf61" is no prec', "mean bf16?"),
    ("unknown accelerator", "accelerator: hpu", 18, '"hpu"', "mean HPU?"),
    ("another's name", "precision: nf4", 16, '"nf4" is no prec', "mean int4?"),
    ("software for a card", "accelerator: cuda", 18, '"cuda"', "mean GPU?"),
    ("a card's name", "accelerator: gaudi2", 18, '"gaudi2"', "mean HPU?"),
    ("a card's model", "accelerator: H100", 18, '"H100"', "mean GPU?"),
    ("another workload's", "rank: 8", 5, 'key "rank"', "`workload: finetuning`"),
    ("unknown engine", "engine: vlm", 13, '"vlm" is no engine', "transformers"),
    ("unknown attention", "attention: spda", 16, '"spda"', "mean sdpa?"),
    ("text for a number", "batch_size: big", 17, '"big" is not a whole', "or max"),
    ("no limit", "batch_size: {max: {caps: 4}}", 17, "max has no caps", "cap and tolerance"),
    ("no search", "axes: {batch_size: [{most: 4}]}", 25, "one key", "write max"),
    ("a leading zero", "output_tokens: 010", 20, '"010" is not a whole', "write 10"),
    ("a fraction", "batch_size: 1.5", 17, "1.5 is not a whole number", "or max"),
    ("true for a number", "cards: true", 12, "true is not a whole number", ""),
    ("yes for true", "ignore_eos: yes", 17, '"yes" is not true or false', ""),
    ("zero cards", "cards: 0", 12, "0: at least 1 is wanted", ""),
    ("a list as setting", "cards: [1]", 12, "a list where one value", "`axes:`"),
    ("a range as setting", "cards: 1..8", 12, "a range where one", "`axes:`"),
    ("empty axis", "axes: {cards: []}", 19, "has no values", "at least one value"),
    ("unknown axis", "axes: {precisions: [x]}", 12, "unknown key", "precision?"),
    ("value twice", "axes: {cards: [1, 2, 1]}", 26, "listed twice", "each value"),
    ("backward range", "axes: {cards: 8..1}", 19, "ends before", "write 1..8"),
    ("endless range", "axes: {cards: 0..8 *2}", 19, "never reaches", "begin at 1"),
    ("odd range", "axes: {cards: 1..8 x2}", 19, "is not a range", "1..64 *2"),
    ("long range", "axes: {cards: 1..99999}", 19, "has 99,999 values", "10,000"),
    ("range past a limit", "axes: {batch_size: 0..2}", 24, "0: at least 1", "from 1"),
    ("workload as axis", "axes: {workload: [a]}", 12, "cannot vary", "another"),
    ("unequal zip", "zip: {cards: [1, 2], prompts: [1]}", 10, "cards has 2", "equal"),
    ("empty zip", "zip: [{}]", 11, "a group without axes", "name the linked"),
    ("empty exclude", "exclude: [{}]", 15, "exclude everything", "name what"),
    ("absurd", "axes: {batch_size: 1..9999, prompts: 1..9999}", 11, "99,980,001 jobs", "1,000,000"),
    ("too few", "measure: {max_repeats: 2}", 28, "(3) is more than max_repeats (2)", "set min_"),
    ("contradiction", "measure: {min_repeats: 50}", 28, "(50) is more than", "20"),
    ("illegal card count", "cards: 3", 12, "no job can have 3 HPU", "1, 2, 4, 8"),
    ("more cards than a node has", "cards: 16", 12, "16 HPU", "have 1, 2, 4, 8"),
    ("library's", "workload: finetuning\nstrategy: DeepSpeed", 15, '"DeepSpeed"', "mean zero2?"),
    ("open axis", "axes: {cards: [1]}\ninclude: [{prompts: 1}]", 15, "no cards in", "every axis"),
    ("mapping", "axes: {cards: [1]}\ninclude: {cards: 2}", 14, "list", "with a dash: `- cards: …`"),
    ("idle", "axes: {cards: [1, 2]}\nexclude: [{cards: 4}]", 15, "matches no job", "it is 1, 2"),
    ("apart", f"{ZIP}\nexclude: [{{cards: 1, prompts: 2}}]", 15, "matches no job", "never meet"),
    ("axis without value", "axes:\n  cards:", 13, "has no values", "at least"),
    ("set and varied", "cards: 1\naxes: {cards: [2]}", 12, "twice", "line 5"),
    ("axis and zip", "axes: {cards: [1]}\nzip: {cards: [2]}", 11, "twice", "5"),
]
for what, lines, *rest in IN_EXPERIMENT:
    text = ONE + "".join(f"    {line}\n" for line in lines.splitlines())
    BAD.append((what, text, 4 + len(lines.splitlines()), *rest))  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for a model must not depend on the network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize(
    ("content", "line", "column", "message", "hint"),
    [case[1:] for case in BAD],
    ids=[case[0] for case in BAD],
)
def test_bad_input_is_refused_where_it_stands(
    tmp_path: Path,
    content: str | bytes,
    line: int | None,
    column: int | None,
    message: str,
    hint: str,
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(GridError) as caught:
        load_grid(path, nodes_for=partial(planned_nodes, emulate=None))
    problem = caught.value.problems[0]
    assert (problem.line, problem.column) == (line, column)
    assert problem.file == str(path)
    assert message in problem.message
    assert hint in problem.hint
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("defaults", "blocks", "unknown"),
    [
        ("workload: text-generation, output_tokens: 5", ["{name: e}"], []),
        ("workload: text-generation, rank: 5", ["{name: e}"], ["rank"]),
        (
            "workload: text-generation, rank: 5, output_tokens: 1",
            ["{name: e}", "{name: f, workload: finetuning}"],
            [],
        ),
        ("output_tokens: 5, rank: 5, precison: bf16", ["{name: e}"], ["precison"]),
        ("workload: 1, rank: 5, precision: bf16", ["{name: e}"], []),
    ],
)
def test_defaults_may_name_a_setting_of_any_workload_of_the_file(
    defaults: str, blocks: list[str], unknown: list[str]
) -> None:
    text = f"name: g\ndefaults: {{model: tiny-chatglm3, {defaults}}}\nexperiments:\n"
    try:
        parse_grid((text + "".join(f"  - {each}\n" for each in blocks)).encode(), "g")
        problems = ()
    except GridError as error:
        problems = error.problems
    found = [p.path for p in problems if p.path.startswith("defaults.") and "unknown" in p.message]
    assert found == [f"defaults.{name}" for name in unknown], problems


def test_words_of_other_programs_mean_settings_that_there_are() -> None:
    words = [word for each in MEANT.values() for word in each]
    assert len(words) == len(set(words))
    known = {*FIELD_NAMES, *Vocabulary.installed(check_data=False).parameter_names()}
    assert MEANT.keys() <= known and not known & set(words)


def test_all_problems_come_at_once_in_the_order_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "name: my grid\n"
        "defaults: {workload: text-generation, model: tiny-chatglm3, precison: bf16}\n"
        "measure: {warmup: -1}\n"
        "experiments:\n"
        "  - {name: a, axes: {precision: [fp23], batch_size: []}}\n"
        "  - {name: b, axes: {cards: [1, 3]}, exclude: [{cards: 5}]}\n"
        "  - {name: a, dataset: nowhere}\n"
    )
    assert main(["plan", str(path)]) == 2
    error = capsys.readouterr().err
    places = [part.split(": ")[0] for part in error.split(f"{path}:")[1:]]
    assert places == ["1:7", "2:61", "3:19", "5:34", "5:53", "6:33", "6:48", "7:12", "7:24"]
    assert error.rstrip().endswith("9 problems; nothing was started.")


@pytest.mark.parametrize("name", ["files/m", "./files/m", "files"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_path_beside_the_grid_file_is_named(tmp_path, monkeypatch, capsys, kind, name) -> None:
    """Paths are relative to the working directory, as in every shell command."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # files/m may be a repository of the hub
    (tmp_path / "grids" / "files" / "m").mkdir(parents=True)
    (tmp_path / "grids" / "g.yaml").write_text(f"{HEAD}  - {{name: e, {kind}: {name}}}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "grids/g.yaml"]) == 2
    error = capsys.readouterr().err
    grids = tmp_path / "grids"
    assert f"beside the grid file; write {grids / name}, or start in {grids}\n" in error


@pytest.mark.parametrize("variable", ["$SCRATCH", "${SCRATCH}"])
def test_results_with_a_variable_are_refused(tmp_path, monkeypatch, capsys, variable) -> None:
    """They went into a directory of that name, beside those that were meant."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCRATCH", "/scratch")
    (tmp_path / "g.yaml").write_text(f"results: {variable}/rows\n{ONE}")
    assert main(["plan", "g.yaml"]) == 2
    assert f"g.yaml:1:10: results: {variable}/rows: {variable} is not" in capsys.readouterr().err
    assert main(["run", "g.yaml", "--results", f"{variable}/rows"]) == 2
    assert f"--results {variable}/rows: {variable} is not replaced" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["g.yaml"]


# ---------------------------------------------------------------- data


GRID = """\
name: g
experiments:
  - name: e
    workload: finetuning
    model: tiny-chatglm3
    accelerator: CPU
    dataset: {name}
    {more}
"""
PAIR = b'{"prompt": "a", "completion": "b"}\n'
#: The file, its content, a further line of the grid, and words of the message.
BAD_DATA: list[tuple[str, bytes | None, str, tuple[str, ...]]] = [
    (
        "missing.jsonl",
        None,
        "",
        ("7:14", "no dataset 'missing.jsonl'", ".ndjson, .parquet, .arrow, .csv"),
    ),
    ("empty.csv", b"prompt,completion\n", "", ("holds no examples", "a table with a line of")),
    ("a.jsonl", PAIR + b"hello\n", "", ("a.jsonl:2", "not JSON", "column 1", "one JSON object")),
    ("a.jsonl", b'{"text": "a"', "", ("a.jsonl:1: not JSON", 'such as {"content"')),
    ("a.jsonl", b'\xff\xfe{"text"', "", ("a.jsonl:1: not UTF-16",)),
    ("a.json", b"[1, 2]", "", ("a.json:1: example 1: a number", "expected the columns of one")),
    ("a.jsonl", b'{"data": []}', "", ("a.jsonl:1: has data", "expected the columns of one")),
    (
        "a.jsonl",
        b'{"id": 1, "input": "a", "output": "b"}',
        "",
        ("has id, input, output", "instruction, output, input", "prompt=input, completion=output"),
    ),
    ("a.jsonl", b'{"prompt": true}', "", ('"prompt" is true or false', 'expected {"prompt": "…"')),
    ("a.csv", b'prompt,completion\n"a,b\n', "", ('a field that begins with " ends with one',)),
    ("a.csv", b"prompt;completion\na;b\n", "", ("a.csv:1", "divided by ';'; .csv wants ','")),
    ("a.jsonl", PAIR, "columns: prompt", ("8:14", "'prompt' is no pair", "prompt=question, comp")),
    ("a.jsonl", PAIR, "columns: promt=a", ("8:14", "there is no 'promt'", "did you mean prompt?")),
    ("a.jsonl", PAIR, "split: test", ("8:12", "no dataset of the hub", "leave it out")),
]


@pytest.mark.parametrize(
    ("name", "content", "more", "words"),
    BAD_DATA,
    ids=[f"{number}-{case[0]}" for number, case in enumerate(BAD_DATA)],
)
def test_data_that_cannot_be_read_is_refused_in_the_plan(
    tmp_path: Path,
    name: str,
    content: bytes | None,
    more: str,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    Path("g.yaml").write_text(GRID.format(name=name, more=more))
    assert main(["plan", "g.yaml"]) == 2
    said = capsys.readouterr().err
    assert not [word for word in words if word not in said], said
    assert said.startswith("nightgrid plan: g.yaml:") and "1 problem; nothing was" in said
