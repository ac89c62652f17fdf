# Every target runs inside `.venv`, which is built by the first one that needs it. Needs Python 3.11 or newer and make.
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := cli,plot,rich,recipes,test,bench,docs,lint
SPHINX := $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow lint docs bench clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "  make %-10s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## Create .venv with the package and pinned versions of all it needs

demo: $(INSTALLED) ## Train a digits classifier under (epsilon = 3, delta = 1e-5)
	$(BIN)/lightning-dp fit --config recipes/digits/mlp_eps3.yaml

test: $(INSTALLED) ## Run the tests, at most ten minutes on two cores
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-slow: $(INSTALLED) ## Run the tests that take longer
	$(BIN)/python -m pytest -m slow

lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(INSTALLED) ## Build docs/_build/html and run every example in the pages and docstrings
	$(SPHINX) -b html docs docs/_build/html
	$(SPHINX) -b doctest docs docs/_build/doctest
	$(BIN)/python -m pytest --doctest-modules lightning_dp

bench: $(INSTALLED) ## Run every script in benchmarks/
	@for script in benchmarks/*.py; do echo "== $$script"; PYTHONPATH=. $(BIN)/python $$script || exit 1; done

clean: ## Remove .venv and everything that was built
	rm -rf $(VENV) build dist *.egg-info docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@touch $@
