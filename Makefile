# make install   a virtual environment in .venv with everything in it (again: nothing to do)
# make demo      trains a small model on two islands, data-parallel, and on one island alone; compares them
# make test      all tests
# make lint      style, format, types
# make bench     speed, as ratios
# make docs      the API pages, in build/docs
# make package   wheel and source distribution, in dist
# make oldest    the core tests with the oldest versions that pyproject.toml allows, in .venv-oldest
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint format bench docs package oldest clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "isles needs Python 3.10 or newer; set PYTHON=python3.x")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,gpu,hf,lightning,store,tensorboard]'
	touch $@

DEMO := --model micro --vocabulary 1024 --steps 1350 --batch-size 8 --sequence-length 128 --threads 1 \
	--eval-every 250 --checkpoint-every 500 --overwrite

demo: install
	$(BIN)/isles train --run runs/demo/isles --islands 2 --method gradual --sync-every 30 $(DEMO)
	$(BIN)/isles train --run runs/demo/data-parallel --islands 2 --method data-parallel $(DEMO)
	$(BIN)/isles train --run runs/demo/alone --islands 1 --method data-parallel $(DEMO)
	$(BIN)/isles report runs/demo/isles runs/demo/data-parallel runs/demo/alone --out runs/demo/report.html

test: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/isles bench

docs: install
	$(BIN)/python docs/api.py build/docs
	@echo 'written: build/docs/index.html'

package: install
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

OLDEST := .venv-oldest/bin/python
CORE := theorems golden engine schedule fragments codecs wire_fused worlds processes connect resume finish store_world \
	store_memory train_run train_text train_tokens train_export view_report view_tensorboard plan_command \
	transformers transformers_resume transformers_weights lightning accelerate

oldest:
	test -x $(OLDEST) || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) -m pip install --quiet --constraint constraints-oldest.txt torch
	$(OLDEST) -m pip install --quiet --constraint constraints-oldest.txt --editable '.[fast,hf,lightning,store,tensorboard]' \
		hypothesis 'moto[server]' packaging pytest pytest-timeout pytest-xdist trl
	$(OLDEST) -m pytest $(CORE:%=tests/test_%.py)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
