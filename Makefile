# make demo   the main job on this machine; a replica is killed on the way
# make test   everything, the real Kubernetes included where this machine can carry one
# make lint   style, types and layers
# make unit   tests/unit only
# make e2e    tests/cluster only
# make soak   the explorations of tests/simulation for an hour, or as long as told: SECONDS=600
# make bench  35 minutes of measurements; make bench-quick takes five to six minutes
# make bench-operator        25 minutes: the operator with 12,500 pods on nodes that do not exist
# make bench-operator-quick  three minutes: with a tenth of them
# make setup  .venv, which all of these make by themselves
# make generate  what is generated from the models: the CRD, docs/api.md
# make clean  removes .venv, runs and caches
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
CRD := crds/fthsdpjobs.yaml
DEMO := runs/demo

.PHONY: setup help demo test test-here test-cluster lint unit e2e soak soak-protocol soak-operator bench bench-quick bench-operator bench-operator-quick generate clean

setup: $(READY)

# uv keeps packages in the user's cache folder, so that the next clone installs in seconds.
$(READY): pyproject.toml
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check uv
	$(VENV)/bin/uv pip install --quiet --compile-bytecode --python $(PYTHON) --editable '.[operator,trainer,test]'
	touch $@

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

demo: setup
	$(VENV)/bin/fthsdp run examples/tiny-llama.yaml --out $(DEMO) --inject kill:replica=2@step=20

# Side by side: those on a cluster wait most of their time. A cluster that has to be built first is built meanwhile.
test: lint
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-here test-cluster

test-here: setup
	$(PYTHON) -m pytest tests/local
	$(PYTHON) -m pytest tests/unit tests/simulation

test-cluster: setup
	$(PYTHON) -m pytest tests/cluster

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

unit: setup
	$(PYTHON) -m pytest tests/unit

e2e: test-cluster

# The explorations of tests/simulation, side by side, for as long as told: make soak SECONDS=600
soak: setup
	$(MAKE) --no-print-directory --jobs 2 soak-protocol soak-operator

soak-protocol: setup
	$(PYTHON) -m tests.simulation.soak --seconds $(or $(SECONDS),3600)

soak-operator: setup
	$(PYTHON) -m tests.simulation.operator --seconds $(or $(SECONDS),3600)

# 35 minutes, on a machine that has nothing else to do. Quick: the same rows in five to six minutes.
bench: setup
	$(PYTHON) -m tests.bench

bench-quick: setup
	$(PYTHON) -m tests.bench --quick

# The real operator, API server, scheduler and etcd; FTHSDP_LWS_SOURCE names a checkout of the peer, if there is one.
bench-operator: setup
	$(PYTHON) -m tests.bench.operator

bench-operator-quick: setup
	$(PYTHON) -m tests.bench.operator --quick

generate: setup
	$(PYTHON) -m fthsdp_operator.crd --write $(CRD)
	cp $(CRD) charts/fthsdp-operator/files/
	$(PYTHON) -m fthsdp_operator.reference --write docs/api.md

clean:
	rm -rf $(VENV) runs dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find operator trainer_image tests -name __pycache__ -type d -prune -exec rm -rf {} +
