# make chat                     set up, then talk to a model        make chat ARGS='qwen --temp 0'
# make test                     set up, then the tests              make test ARGS='tests/engine -x'   JOBS=0: in one process
# make test-all                 the slow ones too                   make lint / make format
# make test-aot                 kernels compiled for every card     make test-aot TRITON=3.6   with that Triton
# make schemas                  write localllm/schemas anew from the types in localllm/cli/documents
# make screenshots              draw the pictures in docs/screens anew; look at them
# PYTHON=/path/to/python3.12    which Python .venv is made with (3.11 or newer)
SHELL := bash
# a fifth of the time tests wait: one more than CPUs takes 285 s instead of 305 on two
JOBS ?= $(shell n=$$(( $$(getconf _NPROCESSORS_ONLN) + 1 )); echo $$(( n < 8 ? n : 8 )))
export PYTHON
unexport PYTHONDONTWRITEBYTECODE  # every process would compile hundreds of modules again
.PHONY: chat test test-all test-aot lint format schemas screenshots models setup dev

chat: setup
	@exec .venv/bin/localllm chat $(ARGS)

test: models
	@exec .venv/bin/pytest -n $(JOBS) --dist worksteal --durations=15 $(ARGS)

test-all: models
	@exec .venv/bin/pytest -n $(JOBS) --dist worksteal --durations=25 -m '' -o faulthandler_timeout=3000 $(ARGS)

test-aot: dev
	@exec .ci/test-aot $(TRITON)

# mypy keeps errors about modules that have appeared since: another set of files gets another cache
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
