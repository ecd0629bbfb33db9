"""`batch`: every request answered once, also after a stop; files that are none."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result


@pytest.fixture
def home(empty_home: Path, tiny_path: Path) -> Path:
    """A home with the tiny model in it."""
    folder = empty_home / "data/models/tiny"
    folder.mkdir(parents=True)
    (folder / "tiny.gguf").write_bytes(tiny_path.read_bytes())
    return empty_home


def batch(*words: str) -> Result:
    from localllm.cli.frame import logs
    from localllm.cli.frame.program import app

    try:
        return CliRunner().invoke(app, ["batch", *words])
    finally:
        logs.stop()


def request(name: str, **body: Any) -> dict[str, Any]:
    full = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "temperature": 0} | body
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": full}


def answered(name: str) -> dict[str, Any]:
    return {"id": "batch_req_0", "custom_id": name, "response": {"status_code": 200, "body": {}}, "error": None}


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("cut", [True, False])
def test_answers_resume_and_failures_are_asked_again(home: Path, cut: bool) -> None:
    source, output = home / "in.jsonl", home / "out.jsonl"
    text = {"url": "/v1/completions", "body": {"prompt": "one", "max_tokens": 2, "ignore_eos": True}}
    rows = [request("a"), request("bad", messages=[]), request("c") | text]

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        result = batch(str(source), "-o", str(output), "--ctx", "128", "--json", *words)
        counts = json.loads(result.stdout)
        schema = json.loads(resources.files("localllm.schemas").joinpath("batch-1.json").read_text())
        jsonschema.validate(counts, schema)
        return result.exit_code, counts

    def answers() -> dict[str, int]:
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert len({line["custom_id"] for line in lines}) == len(lines)
        return {line["custom_id"]: line["response"]["status_code"] for line in lines}

    written(source, rows[:2])
    code, counts = run()
    assert code == 1 and (counts["answered"], counts["failed"], counts["skipped"]) == (2, 1, 0)
    with output.open("a") as file:  # a stop in the middle of a line
        file.write('{"custom_id": "c", "resp' if cut else json.dumps(answered("c")))
    written(source, rows)
    code, counts = run()
    assert (counts["answered"], counts["skipped"], counts["completion_tokens"]) == (1, 2, 2)
    assert code == 1 and (counts["failed"], counts["failed_before"]) == (0, 1)
    assert answers() == {"a": 200, "bad": 400, "c": 200}
    rows[1] = request("bad")
    written(source, rows)
    code, counts = run("--retry-failed")
    assert code == 0 and (counts["answered"], counts["failed"], counts["failed_before"]) == (1, 0, 0)
    assert json.loads(output.read_text().splitlines()[-1])["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "contains no requests"),
        ("not json\n", "line 1: not JSON"),
        ("[1]\n", "line 1"),
        (json.dumps(request("a")) + "\n" + json.dumps(request("a")) + "\n", "line 2"),
        (json.dumps(request("a") | {"url": "/v1/files"}) + "\n", "line 1"),
        (json.dumps(request("a") | {"method": "GET"}) + "\n", "line 1"),
        (b"\xff\xfe\x00", "is not UTF-8"),
    ],
)
def test_files_that_are_none_are_refused_before_anything_runs(home: Path, text: str | bytes, said: str) -> None:
    source, output = home / "in.jsonl", home / "out.jsonl"
    source.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = batch(str(source), "-o", str(output))
    assert result.exit_code == 2 and said in result.stderr and not output.exists()


def test_an_output_that_holds_something_else_is_not_written_over(home: Path) -> None:
    source = written(home / "in.jsonl", [request("a")])
    before = source.read_bytes()
    same = batch(str(source), "-o", str(source))
    assert same.exit_code == 2 and "something other than answers" in same.stderr and source.read_bytes() == before
    for missing in ("missing.jsonl", str(home)):
        result = batch(missing, "-o", str(home / "o"))
        assert result.exit_code == 2 and "cannot be read" in result.stderr
    result = batch(str(source), "-o", "/nonexistent/x")
    assert result.exit_code == 2 and "cannot be written" in result.stderr


def test_only_regular_files_and_stdout_take_answers(home: Path) -> None:
    source = written(home / "in.jsonl", [request("a")])
    for device in ("/dev/null", str(home)):  # from /dev/full one reads zeros without end
        result = batch(str(source), "-o", device)
        assert result.exit_code == 2 and f"{device} is not a regular file" in result.stderr
    result = batch(str(source), "-o", "-", "--ctx", "128")
    assert result.exit_code == 0 and json.loads(result.stdout)["custom_id"] == "a" and not Path("-").exists()
    assert batch(str(source), "-o", "-", "--json").exit_code == 2


def test_one_batch_writes_to_a_file(home: Path) -> None:
    from localllm.errors import ConfigError
    from localllm.server.openai.batch import Output

    path = home / "out.jsonl"
    first = Output(path, again=False)
    first.write(answered("a"))
    with pytest.raises(ConfigError, match="another batch is writing"):
        Output(path, again=False)
    first.close()
    path.write_text(path.read_text() + '{"cut')
    second = Output(path, again=False)  # the file was replaced, the lock goes with it
    with pytest.raises(ConfigError, match="another batch is writing"):
        Output(path, again=False)
    second.write(answered("b"))
    second.close()
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b"]
    assert not path.with_name("out.jsonl.partial").exists()
    for other in ("[]\n", '{"custom_id": [1], "response": {"status_code": 200}}\n', "[" * 100_000 + "\n"):
        path.write_text(other)
        with pytest.raises(ConfigError, match="something other than answers"):
            Output(path, again=False)
        assert path.read_text() == other
