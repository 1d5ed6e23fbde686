PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
# Written last, so that an interrupted set-up starts again; holds the seconds that it took.
STAMP  := $(VENV)/setup-seconds
# Two processes share the tests by files, whose tests share what they train; in the usual order, since the
# files with few tests, which would come last, take longest.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup link demo vision-data vision test test-newest test-long lint docs screenshots report-picture format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: link $(STAMP) ## create .venv with everything that the other targets need

# Archives and some checkouts turn a symbolic link into a text file.
link:
	@test -d fairseq_tutel/kernels || ln -sfn ../kernels fairseq_tutel/kernels

# The order matters. fairseq asks for any torch, so the wanted one goes first; fairseq's extensions are
# then compiled against it, without the build isolation that would download a second torch. They are
# not what makes a run fast, so the compiler need not optimise them.
$(STAMP): setup.py pyproject.toml
	@echo "Setting up $(VENV): 2 to 6 minutes, in most of which fairseq compiles and says nothing."
	$(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/setup-started
	$(PIP) install torch==2.13.0
	$(PIP) install "setuptools>=77,<81" wheel cython ninja "numpy<2"
	CFLAGS="-O1 -g0" $(PIP) install --no-build-isolation fairseq-fixed
	$(PIP) install --no-build-isolation -e ".[fairseq,gpu,test,demo,dev]"
	@echo $$(($$(date +%s) - $$(cat $(VENV)/setup-started))) > $@

demo: setup ## train, evaluate and compare a dense and a MoE language model; writes demo/result.json
	$(BIN)/python examples/demo/run.py --setup-seconds $$(cat $(STAMP))

vision-data: setup ## write the digits of scikit-learn and 5,000 of MNIST to vision/, as .npz
	$(BIN)/python examples/demo/digits.py vision

vision: setup ## train and compare a dense and a MoE Swin V2 on 5,000 digits; writes vision/result.json
	$(BIN)/python examples/demo/vision.py

test: setup ## run the quick tests, and name the twenty slowest
	$(BIN)/python -m pytest $(SHARED) --durations=20

# A second environment with the newest Python that fairseq builds on, torch and numpy, set up in the same order.
NEWEST := .venv-newest
NEWEST_PYTHON ?= $(shell python3.13 -c "" 2>/dev/null && echo python3.13 || echo $(PYTHON))
NEWEST_PIP := $(NEWEST)/bin/python -m pip
$(NEWEST)/ready: setup.py pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST_PIP) install torch
	$(NEWEST_PIP) install "setuptools>=77,<81" wheel cython ninja numpy
	CFLAGS="-O1 -g0" $(NEWEST_PIP) install --no-build-isolation fairseq-fixed
	$(NEWEST_PIP) install --no-build-isolation -e ".[fairseq,gpu,test,dev]"
	@touch $@

test-newest: link $(NEWEST)/ready ## run the quick tests on Python 3.13 if it is there, and the newest torch and numpy
	$(NEWEST)/bin/python -m pytest $(SHARED)

test-long: setup ## run the tests that take minutes
	$(BIN)/python -m pytest -m long

lint: setup ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: setup ## build the site in build/site, with the Python API; fails on broken links
	$(PIP) install -q "sphinx>=8" myst-parser furo
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site . build/site

PAGES := build/pages
# A model of two minutes, for the page of its tokens; the script writes the report near its end.
$(PAGES)/model/report.html:
	$(BIN)/python examples/small_corpus.py $(PAGES)/corpus
	examples/quickstart.sh $(PAGES)/corpus/train.de $(PAGES)/corpus/train.en $(PAGES)/model --overwrite

screenshots: docs $(PAGES)/model/report.html ## take pictures of the site and of the tools' pages; needs Chromium
	$(BIN)/python -m fairseq_tutel tokens $(PAGES)/model/model $(PAGES)/model/data --output $(PAGES)/tokens.html \
		--overwrite
	$(BIN)/python -m fairseq_tutel report docs/report/dense.json docs/report/moe.json --output $(PAGES)/report.html \
		--overwrite
	$(BIN)/python docs/screenshots.py $(PAGES)/report.html $(PAGES)/tokens.html \
		build/site/docs/site/index.html build/site/docs/site/api.html

report-picture: setup ## draw docs/report.png from the logs in docs/report; needs Chromium
	$(BIN)/python docs/make_report_picture.py

format: setup ## apply the formatter and the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove what builds, checks and runs left behind, but not the environments
	rm -rf demo vision outputs checkpoints build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . \( -path ./$(VENV) -o -path ./$(NEWEST) \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
