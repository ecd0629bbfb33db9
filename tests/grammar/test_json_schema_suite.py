"""The JSON-Schema-Test-Suite through the grammar: what is enforced lets nothing wrong through.

The suite is fetched from the npm registry (json-schema-test-suite, the official tests of draft 4). Right instances may
be refused: their properties can stand in another order than the schema's, and objects are closed. Wrong ones never
pass, but for what llguidance's documentation names: keys that come twice, which no instance here has.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from typing import Any

import pytest
from grammar_walks import allowed, mask_of

from localllm.errors import ConstraintUnmet, InvalidConstraint
from localllm.grammar import Compiler

pytestmark = [pytest.mark.slow, pytest.mark.network]
PACKAGE = "json-schema-test-suite@0.0.10"
KNOWN_FALSE_POSITIVES: frozenset[tuple[str, str]] = frozenset()
"""(description of the schema, description of the test)"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, dict[str, Any]]]:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("suite")
    done = subprocess.run([npm, "pack", PACKAGE, "--silent"], cwd=folder, capture_output=True, text=True, timeout=120)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        pytest.skip(f"{PACKAGE} cannot be fetched: {done.stderr.strip()[:200]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    files = sorted((folder / "package/tests/draft4").rglob("*.json"))
    return [(file.stem, group) for file in files for group in json.loads(file.read_text())]


def accepts(compiler: Compiler, schema: Any, value: Any) -> bool:
    mask = mask_of(compiler, "json_schema", schema)
    try:
        for index in compiler.tokenizer.encode_inside(json.dumps(value, ensure_ascii=False)):
            if mask.is_done:
                return False
            mask.accept(index)
        return mask.is_done or bool(compiler.vocabulary.end_ids & set(allowed(compiler, mask)))
    except ConstraintUnmet:
        return False


def test_nothing_wrong_passes(suite: list[tuple[str, dict[str, Any]]], smollm2: Compiler) -> None:
    wrong, right, refused, enforced = set(), [0, 0], 0, 0
    for file, group in suite:
        try:
            mask_of(smollm2, "json_schema", group["schema"])
        except InvalidConstraint as error:
            assert error.message and error.status == 400
            refused += 1
            continue
        enforced += 1
        for test in group["tests"]:
            passed = accepts(smollm2, group["schema"], test["data"])
            if test["valid"]:
                right[passed] += 1
            elif passed:
                wrong.add((f"{file}: {group['description']}", test["description"]))
    print(f"{enforced} schemas enforced, {refused} refused; of {sum(right)} right instances {right[1]} pass")
    assert wrong == KNOWN_FALSE_POSITIVES
    assert len(suite) > 80 and enforced > 60 and right[1] > 90
