# The project's commands; `make` lists them. CI calls the same targets.
# Works with GNU make 3.81 (macOS) and later.

# Candidates: the first that runs and is 3.11 to 3.13 makes .venv. `make setup PYTHON=python3.13`
# tries that one only. Each is run, not just looked up: a pyenv shim is found on the PATH even when
# its version is not active.
PYTHON ?= python3.12 python3.11 python3.13 python3
ARGS ?=

RUN := .venv/bin/python
# Other words with = would be variables of make's own, and silently without effect.
SETTINGS := PYTHON ARGS RUN
# only: starter
SETTINGS += NAME DEST WITHOUT HOLDER PROJECT
# end only
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
STRAY := $(foreach name,$(filter-out $(SETTINGS),$(GIVEN)),$(name)=$(value $(name)))
ifneq ($(STRAY),)
  $(error make passes overrides on in ARGS only; got $(STRAY). \
    Use: make $(or $(MAKECMDGOALS),train) ARGS="$(strip $(ARGS) $(STRAY))")
endif

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
SITE := $(RUN) -m sphinx -W --keep-going -n -q -d build/doctrees docs build/docs
# Shell: $$found, the first of PYTHON that runs and is supported; an error where there is none.
FIND_PYTHON = \
	found=; \
	for candidate in $(PYTHON); do \
	  if "$$candidate" -c '$(SUPPORTED)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo 'Python 3.11 to 3.13 is needed; none of these runs and is one: $(PYTHON).' >&2; \
	  echo 'Add to the command: PYTHON=/path/to/python3.12' >&2; \
	  exit 1; \
	fi
# only: starter
# Needs no .venv.
NEW = @$(FIND_PYTHON); PYTHONPATH=src "$$found" -B -m lockstep.new
# end only
SIX_JOBS := trainer.strategy=dp,ddp,ddp_spawn trainer.devices=1,2

.PHONY: help setup train sweep test test-fast test-slow test-cluster check format bench docs clean distclean

help: ## List the targets (default)
	@echo 'Usage: make TARGET [ARGS="..."] [PYTHON=python3.x]'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' Makefile

setup: .venv/.installed ## Make .venv with the versions in constraints.txt (once)

train: setup ## Train and test one run: make train ARGS="trainer.strategy=ddp trainer.devices=2"
	$(RUN) train.py $(ARGS)

sweep: setup ## Run a sweep; without ARGS: dp, ddp and ddp_spawn, each on 1 and 2 devices
	$(RUN) train.py -m $(if $(ARGS),$(ARGS),$(SIX_JOBS))

test: setup ## Run all tests but the slow ones; ARGS go to pytest
	$(RUN) -m pytest -m "not slow and not cluster" $(ARGS)

test-fast: setup ## Run the tests that start no processes
	$(RUN) -m pytest -m "not slow and not processes and not cluster" $(ARGS)

test-slow: setup ## Run the slow tests, which are combinations of what make test covers
	$(RUN) -m pytest -m "slow and not cluster" $(ARGS)

test-cluster: setup ## Run the tests over hosts and under SLURM, made on this machine: needs root
	scripts/fetch-slurm.sh
	$(RUN) -m pytest -m cluster $(ARGS)

check: setup ## Check format, lint, types, YAML, workflows, spelling, links of docs/; changes nothing
	$(RUN) -m ruff format --check . || { echo "make format repairs it" >&2; exit 1; }
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	$(RUN) -m yamllint --strict .
	$(RUN) -m codespell_lib
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml
	$(SITE)

# only: starter
.PHONY: new update template
new: ## Make a project of your own: make new NAME=my_project DEST=../my-project [WITHOUT=text,recsys]
	$(NEW) "$(NAME)" $(if $(DEST),"$(DEST)",--here) \
	  $(if $(WITHOUT),--without "$(WITHOUT)") $(if $(HOLDER),--holder "$(HOLDER)")

update: ## Merge this version into a project made by make new: make update PROJECT=../my-project
	$(NEW) --update "$(PROJECT)"

template: ## Write the branch that copier reads, from the newest commit
	$(NEW) --template
# end only

format: setup ## Format the code and repair what ruff can
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

bench: setup ## Run the benchmarks; ARGS go to them
	$(RUN) -m benchmarks $(ARGS)

docs: setup ## Build the site into build/docs; open index.html there, no server needed
	$(SITE)
	@echo 'docs: open build/docs/index.html in a browser, no server needed'

clean: ## Remove caches and all runs: outputs/ and multirun/
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
	rm -rf .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.* build dist outputs multirun

distclean: clean ## Remove .venv too
	rm -rf .venv src/*.egg-info

# A .venv that does not run (an interrupted setup, a Python that is gone) is made anew; one that
# does is kept, so a changed constraints.txt costs only what changed.
.venv/.installed: pyproject.toml constraints.txt
	@if ! $(RUN) -c '$(SUPPORTED)' 2>/dev/null || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	  $(FIND_PYTHON); \
	  echo "setup: .venv with $$("$$found" --version), $$found"; \
	  "$$found" -m venv --clear .venv || exit 1; \
	fi
	@echo 'setup: torch and what it needs (7 GB) come first: a few minutes, most of it silent'
	$(RUN) -m pip install --quiet -e '.[dev]' -c constraints.txt
# only: recsys
	$(RUN) -m pip install --quiet --no-deps recbole -c constraints.txt # for its data: docs/workloads/recsys.md
# end only
	@touch $@
