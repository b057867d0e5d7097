# flashrt_ros: `make` lists the targets. docs/packaging.md tells how the two doors work.
#
#   PYTHON=python3.12 make setup      another interpreter
#   PIP_ARGS='...' make setup         more arguments for pip, such as an index with CPU wheels
#   T='test/test_interfaces.py' make test    only some tests, in one process; any pytest arguments
#   ROS=jazzy make test               on the wheels of another distribution, in .venv-jazzy

SHELL := /bin/bash
.SHELLFLAGS := -e -u -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

PYTHON ?= python3
PIP_ARGS ?=
# Distribution of the wheels: kilted or jazzy. Each has its own .venv and its own build folder.
ROS ?= kilted
ifeq ($(filter $(ROS),kilted jazzy),)
$(error ROS must be kilted or jazzy, not $(ROS))
endif
VENV := .venv$(if $(filter jazzy,$(ROS)),-jazzy)
WHEELS := ros$(if $(filter jazzy,$(ROS)),-jazzy)
S := $(VENV)/.stamps
LOG := $(VENV)/.log
PY := $(VENV)/bin/python
# Versions that were tested together; for Jazzy its own ROS wheels, and all others of Kilted's list.
PINS := $(if $(filter jazzy,$(ROS)),$(S)/constraints.txt,requirements/constraints.txt)
STEP := $(PYTHON) scripts/step.py
PIP := $(abspath $(PY)) -m pip install --disable-pip-version-check -c $(PINS) $(PIP_ARGS)
ABS := $(abspath $(VENV))

INTERFACES := $(sort $(wildcard msg/*.msg srv/*.srv action/*.action cmake/*.cmake)) \
              CMakeLists.txt package.xml setup.py pyproject.toml scripts/capsule_node scripts/flashrt-ros

# Where the interpreter that was chosen already imports rclpy, a ROS 2 is installed and sourced:
# build on it, by the door that colcon uses. Everything in the environment below lives in .venv.
SYSTEM_ROS := $(shell [ -f $(S)/door ] && cat $(S)/door || \
  { $(PYTHON) -c 'import rclpy' >/dev/null 2>&1 && echo system || echo wheels; })

# A domain of its own for each run, and nothing that leaves this machine.
export ROS_AUTOMATIC_DISCOVERY_RANGE := LOCALHOST
DOMAIN = ROS_DOMAIN_ID=$${ROS_DOMAIN_ID:-$$(( $$$$ % 100 + 1 ))}

ifeq ($(SYSTEM_ROS),system)
ENTER := set +u; . $(ABS)/share/flashrt_ros/local_setup.bash; set -u;
SITE := --system-site-packages
# A torch that fits the board stays: a Jetson brings its own.
TORCH := $(shell $(PYTHON) -c 'import torch' >/dev/null 2>&1 || echo -r requirements/torch.txt)
else
ENTER := export AMENT_PREFIX_PATH=$(ABS);
SITE :=
TORCH := -r requirements/torch.txt
endif

.PHONY: help setup build sync demo test verify bench lint lock wheel clean distclean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## */:/' | awk -F: '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(S)/tools  ## make .venv, build the interfaces, install everything
	@$(MAKE) --no-print-directory -j2 $(S)/libraries $(S)/interfaces
	@$(MAKE) --no-print-directory sync

build: setup  ## build and install; only what changed

sync:  ## copy changed Python files into .venv (seconds; interfaces stay)
	@$(PY) scripts/sync.py $(VENV)

demo: setup  ## set up, then start the node and drive it over DDS
	@$(ENTER) $(DOMAIN) $(VENV)/bin/flashrt-ros demo $(ARGS)

test: setup  ## set up, then run the tests
	@$(ENTER) $(DOMAIN) ROS_PYTHON_CHECK_FIELDS=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 \
	  PYTHONSAFEPATH=1 OMP_WAIT_POLICY=PASSIVE \
	  $(PY) -P -m pytest --import-mode=importlib \
	  -p pytest_timeout -p _hypothesis_pytestplugin -p xdist.plugin \
	  $(if $(T),$(T),-n 2 --max-worker-restart 0 test)

verify: setup  ## prove the capsule contract on the embedded model and on random:tiny
	@$(ENTER) $(VENV)/bin/flashrt-ros verify $(ARGS)
	@$(ENTER) $(VENV)/bin/flashrt-ros verify --model random:tiny $(ARGS)

bench: setup  ## measure time to first token and capsule copies
	@$(ENTER) $(VENV)/bin/flashrt-ros bench ttft $(ARGS)
	@$(ENTER) $(VENV)/bin/flashrt-ros bench capsule $(ARGS)

lint: setup  ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

lock: setup  ## write the versions of .venv to requirements/constraints.txt
	@$(PY) scripts/lock.py > $(VENV)/constraints.txt && mv $(VENV)/constraints.txt requirements/

wheel: $(S)/tools  ## build the wheel into dist/
	@$(STEP) $(LOG)/wheel.log 'building the wheel' \
	  $(ABS)/bin/python -m pip wheel --no-build-isolation --no-deps -w dist .
	@ls -l dist/*.whl

clean:  ## remove what was built
	rm -rf build dist *.egg-info $(S)/interfaces
	find flashrt_ros test -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv too
	rm -rf $(VENV)

# ---- steps; a stamp is as new as the last time the step succeeded -------------------------------

$(S)/venv:
	@echo "[1/5] virtual environment in $(VENV), ROS 2 from $(SYSTEM_ROS)"
	@for tool in cmake cc c++; do command -v $$tool >/dev/null || \
	  { echo "$$tool is missing: install gcc, g++, CMake and make first"; exit 1; }; done
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit( \
	  None if "$(SYSTEM_ROS)" == "system" or (3, 11) <= v < (3, 14) else \
	  "The ROS 2 wheels need Python 3.11 to 3.13; name one: PYTHON=python3.11 make")'
	@$(PYTHON) -m venv $(SITE) $(VENV)
	@mkdir -p $(S) && echo $(SYSTEM_ROS) > $(S)/door && touch $@

$(S)/constraints.txt: requirements/constraints.txt requirements/ros-jazzy-constraints.txt $(S)/venv
	@{ grep -v '^ros-' requirements/constraints.txt; \
	  cat requirements/ros-jazzy-constraints.txt; } > $@

ifeq ($(SYSTEM_ROS),system)
$(S)/tools: $(S)/venv $(PINS)
	@$(STEP) $(LOG)/tools.log '[2/5] build tools' $(PIP) 'setuptools>=77' wheel
	@touch $@

$(S)/interfaces: $(S)/tools $(INTERFACES)
	@$(STEP) $(LOG)/configure.log '[4/5] configuring the interfaces' \
	  cmake -S . -B build/system -DCMAKE_INSTALL_PREFIX=$(ABS) -DBUILD_TESTING=OFF \
	  -DPython3_EXECUTABLE=$(ABS)/bin/python
	@$(STEP) $(LOG)/interfaces.log '[4/5] building the interfaces' cmake --build build/system --parallel 2
	@$(STEP) $(LOG)/install.log '[5/5] installing flashrt_ros into $(VENV)' cmake --install build/system
	@touch $@
else
$(S)/tools: $(S)/venv $(PINS) requirements/$(WHEELS).txt requirements/$(WHEELS)-build.txt
	@$(STEP) $(LOG)/ros.log '[2/5] installing the ROS 2 wheels' \
	  $(PIP) -r requirements/$(WHEELS).txt -r requirements/$(WHEELS)-build.txt
	@touch $@

$(S)/interfaces: $(S)/tools $(INTERFACES)
	@rm -rf $(VENV)/.wheel
	@$(STEP) $(LOG)/interfaces.log '[4/5] building the interfaces and the wheel' \
	  $(ABS)/bin/python -m pip wheel -v --disable-pip-version-check --no-build-isolation --no-deps \
	  -w $(VENV)/.wheel .
	@$(STEP) $(LOG)/install.log '[5/5] installing flashrt_ros into $(VENV)' \
	  $(ABS)/bin/python -m pip install --disable-pip-version-check --no-deps --no-index \
	  --force-reinstall $(VENV)/.wheel/flashrt_ros-*.whl
	@touch $@
endif

$(S)/libraries: $(S)/tools $(PINS) requirements/runtime.txt \
                requirements/torch.txt requirements/behaviours.txt requirements/dev.txt
	@$(STEP) $(LOG)/libraries.log '[3/5] installing torch, tokenizers and the test tools' \
	  $(PIP) $(TORCH) -r requirements/runtime.txt -r requirements/behaviours.txt \
	  -r requirements/dev.txt
	@touch $@
