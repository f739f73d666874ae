# `make` lists the targets. VENV=DIR uses another environment than the one that setup.sh makes.
VENV ?= .venv
PY = $(VENV)/bin/python

.PHONY: help setup demo test slow lint versions docs images notebooks bench gpu

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):  ## /\1\t/p' Makefile

setup:  ## make .venv and check this machine
	./setup.sh

demo:  ## train, evaluate and export a small VAE into ./demo
	./setup.sh demo

test:  ## install the development tools and run the tests
	./setup.sh test

slow:  ## run the tests that take longer than a few seconds
	$(PY) -m pytest -m slow

lint:  ## ruff and mypy, as .ci/run does
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy --strict

versions:  ## try the lowest and the newest dependencies with every Python at hand; some minutes for each
	rm -rf dist
	$(PY) -m build --no-isolation
	$(PY) benchmarks/versions.py dist/*.whl

docs:  ## write the tables of options and keys from the code
	$(PY) -m tests.cli.options_page
	$(PY) -m tests.keys_page

images:  ## make the pictures of docs/images again; needs tmux and Chromium
	$(PY) -m docs.images.make

notebooks:  ## run the notebooks of examples again and keep their outputs; some minutes for each
	$(PY) examples/run_notebooks.py

bench:  ## compare with diffusers on this machine; results go to benchmarks/results
	$(PY) benchmarks/vae_vs_diffusers.py

gpu:  ## whether everything works on this machine's GPU, and its measurements, in nine minutes; results go to gpu_results
	PYTHON=$(PY) benchmarks/gpu.sh alive; alive=$$?; PYTHON=$(PY) benchmarks/gpu.sh measure && exit $$alive
