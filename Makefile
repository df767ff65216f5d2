# make demo: see it work.  make test: the whole suite.  make test-frameworks, lint, bench, check-install: CONTRIBUTING.md.
# TORCH chooses another torch, VENV another environment, PYTHON the interpreter that makes it.
PYTHON ?= python3
DEFAULT_TORCH = torch==2.13.0
TORCH ?= $(DEFAULT_TORCH)
VENV ?= .venv
TRAINERS_VENV ?= .venv-frameworks
BIN = $(VENV)/bin
SOURCES = $(wildcard csrc/*) CMakeLists.txt setup.py pyproject.toml
STAMP = $(VENV)/.installed

.PHONY: demo test sweep test-frameworks lint format bench pictures check-install clean

demo: $(STAMP)
	$(BIN)/python -m torch_shardinit verify

test: $(STAMP) $(VENV)/.recsys $(VENV)/.sweep
	SHARDINIT_REQUIRE_FRAMEWORKS=$$(cat $(VENV)/.recsys) SHARDINIT_SWEEP_PACKAGES=$$(cat $(VENV)/.sweep) \
		$(BIN)/python -m pytest -q $(PYTEST)

# Hundreds of models of real packages, a table of them. SWEEP="--package timm --models vit" chooses.
sweep: $(STAMP) $(VENV)/.sweep
	PYTHONPATH=$$(cat $(VENV)/.sweep):tests $(BIN)/python -m sweep $(SWEEP)

# DeepSpeed, Megatron-core, transformers, Fabric, ...: the real packages, in an environment of their own. DeepSpeed compiles
# one thing at its first start, and would wait for ever for a lock that a killed run left.
test-frameworks:
	$(MAKE) VENV=$(TRAINERS_VENV) $(TRAINERS_VENV)/.trainers
	rm -f $(TRAINERS_VENV)/extensions/*/lock
	DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 TORCH_EXTENSIONS_DIR=$(abspath $(TRAINERS_VENV))/extensions \
		PATH="$(abspath $(TRAINERS_VENV))/bin:$$PATH" timeout 900 $(TRAINERS_VENV)/bin/python -m pytest -q tests/trainers $(PYTEST)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cpp csrc/*.cu csrc/*.cuh bench/*.cu tests/ptx/*.h
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i csrc/*.h csrc/*.cpp csrc/*.cu csrc/*.cuh bench/*.cu tests/ptx/*.h

# All tables, JSON and pictures under docs/measurements; BENCH passes options on: make bench BENCH="--only fill,small".
bench: $(VENV)/.bench
	$(BIN)/python bench/all.py $(BENCH)

# Those of the documentation.
pictures: $(STAMP)
	$(BIN)/python -m torch_shardinit explain --panels 5 --plot docs/pictures/explain.png

# What a user does, where there is no torch: build in isolation, import, and be told what is missing. The minute is for the
# CPU kernels; `make test` builds those of CUDA too.
check-install:
	rm -rf build/check && $(PYTHON) -m venv build/check
	SHARDINIT_CUDA=0 timeout 60 build/check/bin/pip install -q .
	cd build/check && if ./bin/python -c "import torch_shardinit" 2> import.log; then echo "import without torch must fail"; exit 1; fi
	grep -q "torch_shardinit needs torch" build/check/import.log
	cd build/check && ./bin/python -c "from importlib.metadata import version as v; print('installed', v('torch_shardinit'))"

# torch comes first and by itself: a range that another package asks for would bring a CUDA build of several GB.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q "$(TORCH)"
	touch $@

# TorchRec and FairScale, for their tests. TorchRec's kernels load with the default torch only, and the versions named are
# there for Python 3.11 to 3.14: elsewhere nothing is installed and the tests are skipped. The stamp says whether they must
# run.
IS_DEFAULT = [ "$(TORCH)" = "$(DEFAULT_TORCH)" ] && \
	$(BIN)/python -c "import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))"
$(VENV)/.recsys: tests/frameworks.txt | $(VENV)/.torch $(STAMP)
	if $(IS_DEFAULT); then $(BIN)/pip install -q --no-deps -r tests/frameworks.txt && echo 1 > $@; else echo 0 > $@; fi

# The packages of `make sweep`, in a folder of their own, since other packages behave otherwise where they can import these.
# The stamp names the folder; it is empty where the packages are not for this torch, and the tests are then skipped.
$(VENV)/.sweep: tests/sweep/requirements.txt | $(VENV)/.torch $(STAMP)
	rm -rf $(VENV)/sweep
	if $(IS_DEFAULT); then $(BIN)/pip install -q --no-deps --no-compile --target $(VENV)/sweep -r tests/sweep/requirements.txt && \
		echo "$(abspath $(VENV)/sweep)" > $@; else touch $@; fi

# DeepSpeed comes as source and looks at the torch that is there; without its own kernels it takes seconds.
$(VENV)/.trainers: tests/trainers/requirements.txt $(STAMP) | $(VENV)/.torch
	DS_BUILD_OPS=0 $(BIN)/pip install -q --no-deps --no-build-isolation -r tests/trainers/requirements.txt
	touch $@

# Editable, so that tests run on these files; the extension is built again when a source of it changes.
$(STAMP): $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install -q -e ".[test]"
	touch $@

# For `make bench`: pictures, progress, and JAX as a peer, where there is one for this Python.
$(VENV)/.bench: $(STAMP)
	$(BIN)/pip install -q matplotlib tqdm
	$(BIN)/pip install -q jax || echo "JAX cannot be installed here: its column will say so"
	touch $@

$(VENV)/.lint: $(STAMP)
	$(BIN)/pip install -q "ruff==0.17.6" "clang-format==23.1.5" "mypy==2.4.1"
	touch $@

clean:
	rm -rf build $(VENV) $(TRAINERS_VENV) torch_shardinit/_native*.so *.egg-info
