# make chat                     set up, then chat with a model      make chat ARGS='qwen --temp 0'
# make test                     set up, then run the tests          make test ARGS='tests/engine -x'   JOBS=0: one process
# make test-all                 also run the slow tests             make lint / make format
# make test-aot                 compile kernels for every GPU       make test-aot TRITON=3.6   with that Triton
# make schemas                  regenerate localllm/schemas from the types in localllm/cli/documents
# make screenshots              redraw the pictures in docs/screens; check them by eye
# PYTHON=/path/to/python3.12    the Python to create .venv with (3.11 or newer)
SHELL := bash
# Tests wait a fifth of the time: with two CPUs, three jobs take 285 s where two take 305.
JOBS ?= $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) + 1 )); echo $$(( n < 8 ? n : 8 )))
export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # else every process compiles hundreds of modules again
.PHONY: chat test test-all test-aot lint format schemas screenshots models setup dev

chat: setup
	@exec .venv/bin/localllm chat $(ARGS)

test: models
	@exec .venv/bin/pytest -n $(JOBS) --dist worksteal --durations=15 $(ARGS)

test-all: models
	@exec .venv/bin/pytest -n $(JOBS) --dist worksteal --durations=25 -m '' -o faulthandler_timeout=3000 $(ARGS)

test-aot: dev
	@exec .ci/test-aot $(TRITON)

# mypy caches errors about missing modules even after they appear, so each set of files gets its own cache
lint: dev
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/vulture
	@.venv/bin/mypy --cache-dir .cache/mypy-$$(git ls-files '*.py' | sha256sum | cut -c1-12) --no-error-summary -p localllm

format: dev
	@.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

schemas: dev
	@.venv/bin/python -m localllm.cli.documents.schemas

screenshots: dev
	@UPDATE_SCREENS=1 .venv/bin/pytest -m '' tests/tui/test_screenshots.py

models: dev
	@.ci/setup models

setup:
	@.ci/setup

dev:
	@.ci/setup dev
