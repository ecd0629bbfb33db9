"""`python -m localllm.cli.documents.schemas` writes the JSON schema of every document to localllm/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from localllm.bench.results import BenchResult

from . import machine, models, talk

# name in `localllm.NAME/1` -> type; an `events` line is one of several types
DOCUMENTS: dict[str, Any] = {
    "batch": talk.Batch,
    "bench": BenchResult,
    "catalog": models.Catalog,
    "checks": machine.Checks,
    "config": machine.Config,
    "connect": talk.Connect,
    "diagnosis": machine.Diagnosis,
    "doctor": machine.Doctor,
    "error": machine.Error,
    "eval": models.Eval,
    "events": talk.EventLine,
    "kernels": machine.Kernels,
    "launch": machine.Launch,
    "logs": talk.Logs,
    "ls": models.Ls,
    "plan": models.Plan,
    "ps": talk.Ps,
    "pull": models.Pull,
    "quantize": models.Quantize,
    "repair": machine.Repair,
    "rm": models.Rm,
    "run": talk.Run,
    "serve": talk.Serve,
    "service": talk.Service,
    "show": models.Show,
    "stop": talk.Stop,
    "template": models.Template,
    "tune": machine.Tune,
}
TITLES = {
    "bench": "Output of `localllm bench --json`",
    "events": "One line of `run --json --stream` (stdout) or `--progress json` (stderr)",
}


def schema_text(name: str) -> str:
    """The schema of a document, as stored in its file."""
    made = TypeAdapter(DOCUMENTS[name]).json_schema(mode="serialization")
    _drop_titles(made)
    said = made.pop("description", "").splitlines()
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"localllm.{name}/1",
        "title": TITLES.get(name) or said[0].rstrip("."),
    }
    if "properties" in made:  # `Console.emit` adds these two
        first = {"schema": {"const": head["$id"]}, "version": {"type": "string"}}
        made["properties"] = first | made["properties"]
        made["required"] = [*first, *made.get("required", [])]
    return json.dumps(head | made, indent=2, ensure_ascii=False) + "\n"


def _drop_titles(node: Any) -> None:
    """Remove the titles that pydantic derives from names."""
    if isinstance(node, dict):
        if isinstance(node.get("title"), str):
            del node["title"]
        node = list(node.values())
    for one in node if isinstance(node, list) else ():
        _drop_titles(one)


if __name__ == "__main__":
    folder = Path(__file__).parents[2] / "schemas"
    for name in DOCUMENTS:
        (folder / f"{name}-1.json").write_text(schema_text(name))
