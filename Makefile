# All commands of contributors and of CI. ARGS passes options to the program of a target: make test ARGS="-k expiry"

# PYTHON, in the environment or as an option of make, is the Python that makes this environment (scripts/venv.sh).
VENV    := .venv
VENV_PYTHON := $(VENV)/bin/python
READY   := $(VENV)/.ready
DEMO    := $(VENV)/.demo
NATIVE  := $(VENV)/.native
WRITER  := spark_hooks/real_time/sparkis-writer.jar
DOCS    := $(VENV)/docs
DEPLOY  := $(VENV)/deploy
RELEASE := $(VENV)/release
CLASSES := $(VENV)/spark.jsa
BYTECODE := $(VENV)/.bytecode
ARGS   ?=

# Its first argument is the Python that gets packages, and the others are those of `pip install`.
INSTALL := $(VENV_PYTHON) scripts/install.py

# What the compiled core and the JDK are added to: `make demo` needs no tools for contributors, but uses them if they are there.
BASE    := $(if $(and $(filter demo,$(MAKECMDGOALS)),$(if $(wildcard $(READY)),,none)),$(DEMO),$(READY))

# More rounds for the tests that kill processes (make test runs a few).
SPARKIS_KILL_ROUNDS ?= 200
# More random examples for the tests of properties (make test tries as many as each test says).
SPARKIS_EXAMPLES ?= 10

# The number of test files that run at a time. It is three times that of a small machine's processors, because most tests wait
# for other processes most of the time. Two of the files, at the end of the run more, start a Spark (1 GB each).
TEST_FILES ?= 6

# Versions of PySpark beside the locked one, each in an environment of its own (scripts/spark_venv.sh), and the newest Python.
SPARK_VERSIONS ?= 3.5.9 4.0.5 4.1.4 4.2.1 4.3.0-python3.13

# The environment of programs in this checkout: its own Python (also for Spark's workers), its own JDK, no look-up of this host's
# name, and no other Spark or source tree from the caller's environment. Python writes bytecode: the tests start a thousand
# processes, and each would otherwise compile all sources, which takes longer than importing them.
RUN := env -u SPARK_HOME -u PYTHONPATH -u PYTHONHOME -u PYTHONDONTWRITEBYTECODE \
       PATH="$(CURDIR)/$(VENV)/bin:$$PATH" JAVA_HOME="$(CURDIR)/$(VENV)/jdk" \
       PYSPARK_PYTHON="$(CURDIR)/$(VENV_PYTHON)" SPARK_LOCAL_IP="$${SPARK_LOCAL_IP:-127.0.0.1}"

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-programs setup-javascript jdk fmt check test test-pure test-versions test-slow test-large test-cluster test-kafka test-hadoop test-azure test-clients test-hosts test-systemd test-image test-kubernetes bench soak soak-real-time chaos conformance screenshots programs fuzz fuzz-native fuzz-paths mutation demo example commands errors metrics settings docs release lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) $(NATIVE) $(WRITER) jdk ## make .venv with all that Python and Spark need (other targets run this themselves)

# Most of these use one processor, or wait for the network.
setup-test: $(READY) ## setup, and redis-server, Chromium and the JavaScript clients for the tests
	@$(MAKE) --no-print-directory --jobs=4 jdk $(NATIVE) $(WRITER) $(CLASSES) $(BYTECODE) setup-programs setup-javascript

setup-programs:
	@sh scripts/program.sh redis-server redis
	@sh scripts/program.sh chromedriver chromedriver chromium-driver

setup-javascript: $(READY)
	@sh scripts/node.sh $(VENV)

fmt: $(READY) ## format the code, and fix what ruff can fix
	$(VENV_PYTHON) -m ruff format .
	$(VENV_PYTHON) -m ruff check --fix .

check: $(READY) $(DEPLOY)/.ready ## check format, lint, types, import rules, and what is in deploy/ and .github/
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) scripts/lint_imports.py
	$(VENV_PYTHON) scripts/lint_command_names.py
	$(VENV_PYTHON) scripts/lint_sizes.py
	$(VENV_PYTHON) scripts/lint_class_names.py
	$(DEPLOY)/bin/python scripts/lint_deploy.py

test: setup-test ## run the tests; ARGS go to pytest
	@$(RUN) python -m pytest --processes $(TEST_FILES) $(ARGS)
	@echo "left out: make test-pure (without the compiled core), test-versions (older Spark), test-slow, test-large, test-cluster, test-kafka, test-hadoop, test-azure, test-hosts, test-systemd, test-image, test-kubernetes"

test-pure: setup-test ## run the tests without the compiled core; ARGS go to pytest
	@SPARKIS_PURE=1 $(RUN) python -m pytest --processes $(TEST_FILES) $(ARGS)

test-versions: setup-test ## run the tests marked versions with other versions of Spark and Python; SPARK_VERSIONS="3.5.9 4.0.5" chooses some
	@failed=; for version in $(SPARK_VERSIONS); do \
	    python=$(CURDIR)/$$(sh scripts/spark_venv.sh $(VENV) $$version) || { \
	        [ $$? = 3 ] && [ -z "$$CI" ] || exit 1; echo "spark $$version: skipped"; continue; }; \
	    echo "spark $$version with $$($$python --version)"; \
	    $(RUN) PATH="$$(dirname $$python):$$PATH" PYSPARK_PYTHON="$$python" $$python -m pytest -m versions $(ARGS) \
	        $$(grep -l 'mark\.versions' tests/spark/test_*.py) || failed="$$failed $$version"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

test-slow: setup-test ## run the slow tests, which make test leaves out, many rounds of the kill tests, many examples of the properties and of the comparisons with Redis
	@sh scripts/program.sh prometheus prometheus
	@$(RUN) SPARKIS_KILL_ROUNDS=$(SPARKIS_KILL_ROUNDS) python -m pytest -m "kill or slow" $(ARGS)
	@$(RUN) SPARKIS_EXAMPLES=$(SPARKIS_EXAMPLES) python -m pytest -o faulthandler_timeout=0 $(ARGS) tests/properties tests/differential

test-large: setup-test ## run the tests of real sizes, and print their measurements: minutes and gigabytes
	@$(RUN) python -m pytest -m large -s $(ARGS) tests/large

test-cluster: setup-test ## run the tests on a standalone cluster and on three executors: minutes; make test leaves them out
	@$(RUN) python -m pytest -m cluster $(ARGS) tests/spark

# Many kills take longer than a test may (`faulthandler_timeout`).
test-kafka: setup-test ## run the tests with a Kafka broker, which Maven fetches with Spark's connector; make test leaves them out
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" JAVA_HOME="$(CURDIR)/$(VENV)/jdk" sh scripts/kafka.sh $(VENV)
	@$(RUN) python -m pytest $(if $(filter file default,$(origin SPARKIS_KILL_ROUNDS)),,-o faulthandler_timeout=0) -m kafka $(ARGS) tests/kafka

test-hadoop: setup-test ## run the tests with Hadoop's YARN and HDFS, whose daemons Maven fetches; make test leaves them out
	@sh scripts/hadoop.sh $(VENV)
	@$(RUN) python -m pytest -m hadoop $(ARGS) tests/hadoop

test-azure: setup-test ## run the tests of logs in object stores with a server of Azure's blobs, which npm installs
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" sh scripts/azurite.sh
	@$(RUN) python -m pytest --store azure $(ARGS) tests/object_store

test-clients: setup-test ## run programs of Redis' clients in their languages at a redis-server and at sparkis; writes tables of docs/clients.md and docs/read-only.md
	@$(RUN) python -m compat.client_programs --page docs/clients.md --refusals docs/read-only.md $(ARGS)

test-hosts: setup-test ## run the tests on hosts of their own, whose network fails: root and Linux; ARGS=--whole for all faults
	@[ "$$(uname)" != Linux ] || [ "$$(id -u)" != 0 ] || sh scripts/program.sh ip iproute2 iproute2
	@$(RUN) python -m pytest -rs -m hosts $(ARGS) tests/hosts

test-systemd: setup-test ## boot a Debian with systemd (as root; debootstrap and systemd-nspawn), and run the units of deploy/ in it; make test leaves this out
	@sh scripts/systemd.sh
	@$(RUN) python -m pytest -rs -m systemd $(ARGS) tests/systemd

test-image: setup-test ## build the image of deploy/ (as root; podman, debootstrap), and run what is in it; make test leaves this out
	@sh scripts/image.sh
	@$(RUN) python -m pytest -rs -m image $(ARGS) tests/image

test-kubernetes: setup-test ## create the manifests of deploy/ at an API server of Kubernetes, which Go builds; make test leaves this out
	@sh scripts/kubernetes.sh
	@$(RUN) python -m pytest -rs -m kubernetes $(ARGS) tests/kubernetes

bench: setup-test ## run the benchmarks, about 25 minutes; ARGS="--help" lists the options
	@sh scripts/program.sh nutcracker twemproxy
	@$(RUN) python -m benchmarks $(ARGS)

soak: setup-test ## run random epochs, 10,000 clients and dying readers for an hour, and check all replies; ARGS="--minutes 5"
	@$(RUN) python -m benchmarks.soak $(ARGS)

soak-real-time: setup-test ## send 5,000 messages a second of Kafka through Real-Time Mode for an hour, and check that memory stays flat; ARGS="--minutes 10"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" JAVA_HOME="$(CURDIR)/$(VENV)/jdk" sh scripts/kafka.sh $(VENV)
	@$(RUN) python -m tests.kafka.soak $(ARGS)

chaos: setup-test ## kill, pause, move and disconnect processes of a cluster on Spark while readers check replies, about ten minutes
	@$(RUN) python -m benchmarks.chaos $(ARGS)

conformance: setup-test ## compare sparkis with a real redis-server, by real clients and random commands; writes the tables of docs/clients.md
	@$(RUN) python -m compat.conformance --page docs/clients.md $(ARGS)

screenshots: setup-test ## write the pictures of the page in docs/images: a minute and a half, and port 7379
	@$(RUN) python -m compat.page.screenshots

programs: setup-test ## run real programs at a redis-server and through a proxy with --upstream; writes the tables of docs/swap-programs.md
	@$(RUN) python -m compat.swap_programs --page docs/swap-programs.md $(ARGS)

fuzz: setup ## send random bytes in random chunks, guided by coverage; ARGS="--seconds 600"
	@$(RUN) python -m compat.fuzz $(ARGS)

fuzz-native: setup ## fuzz the compiled core under AddressSanitizer and UBSan (needs gcc); ARGS="--seconds 600"
	@$(RUN) python -m compat.fuzz.native $(ARGS)

fuzz-paths: setup ## send random requests to the compiled core and to the general path, and compare replies; ARGS="--requests 10000000 --seed 7"
	@$(RUN) python -m compat.fuzz.paths $(ARGS)

mutation: setup-test ## list changes of a folder's code that no unit test notices (FOLDER=state_backend/log); ARGS="--sample 200"
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --no-input mutmut==3.8.1
	@$(RUN) python scripts/mutation.py $(or $(FOLDER),state_backend/log) $(ARGS)

demo: $(BASE) $(NATIVE) $(WRITER) jdk ## replay flights and weather through Spark, and serve their state; ARGS go to sparkis demo
	@$(RUN) sparkis demo $(ARGS)

example: setup ## run an example of examples/README.md: make example NAME=word_count; ARGS go to it
	@$(RUN) python examples/$(or $(NAME),word_count).py $(ARGS)

commands: $(READY) ## write docs/commands.md from the command table
	$(VENV_PYTHON) -m compat.commands_page

errors: $(READY) ## write docs/errors.md from the errors in the sources
	$(VENV_PYTHON) scripts/errors_page.py

metrics: $(READY) ## write the tables of docs/metrics.md from the declarations
	$(VENV_PYTHON) scripts/metrics_page.py

settings: $(READY) ## write the tables of options in docs/ from the table of settings
	$(VENV_PYTHON) scripts/settings_page.py

docs: $(DOCS)/.ready ## build the site of the docs and the API in build/site; a broken link is an error
	@$(DOCS)/bin/python scripts/pages.py build/pages
	@$(DOCS)/bin/zensical build --clean --strict
	@$(DOCS)/bin/python scripts/site_links.py build/site

release: $(RELEASE)/.ready $(WRITER) ## build sdist and wheel into dist/, check them, and install the wheel with and without each extra; ARGS="--help"
	@$(RELEASE)/bin/python scripts/release.py $(ARGS)

lock: $(VENV_PYTHON) ## write new versions into requirements.lock and requirements-*.lock, from pyproject.toml
	$(VENV_PYTHON) scripts/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock
	for group in docs deploy release; do \
	    $(VENV_PYTHON) scripts/lock.py $$group > requirements-$$group.lock.new || exit 1; \
	    mv requirements-$$group.lock.new requirements-$$group.lock; \
	done

clean: ## remove all files that the other targets made
	rm -rf $(VENV) $(WRITER) .clients tests/clients/node_modules build dist */*/*.so */*/*/*.so *.egg-info mutants .mypy_cache .ruff_cache .pytest_cache \
	       benchmarks/clients/rust/Cargo.lock compat/client_programs/rust/Cargo.lock .hypothesis .import_linter_cache requirements*.lock.new
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

jdk: $(BASE)
	@sh scripts/jdk.sh $(VENV)

$(VENV_PYTHON):
	@sh scripts/venv.sh $(VENV)

$(READY): pyproject.toml requirements.lock | $(VENV_PYTHON)
	@echo "installing the locked requirements into $(VENV) (the first time some minutes; Spark alone is 450 MB)"
	@$(INSTALL) $(VENV_PYTHON) -r requirements.lock
	@SPARKIS_PURE=1 $(INSTALL) $(VENV_PYTHON) --no-deps --no-build-isolation -e .
	@touch $@

$(DEMO): pyproject.toml requirements.lock | $(VENV_PYTHON)
	@echo "installing what the demo needs into $(VENV) (the first time some minutes; Spark alone is 450 MB)"
	@$(INSTALL) $(VENV_PYTHON) -c requirements.lock setuptools cython
	@SPARKIS_PURE=1 $(INSTALL) $(VENV_PYTHON) --no-build-isolation -c requirements.lock -e '.[demo]'
	@touch $@

# The environments of dependency groups: their packages are not those of the project.
$(DOCS)/.ready $(DEPLOY)/.ready $(RELEASE)/.ready: $(VENV)/%/.ready: requirements-%.lock | $(VENV_PYTHON)
	@$(VENV_PYTHON) -m venv --without-pip $(VENV)/$*
	@$(INSTALL) $(VENV)/$*/bin/python -r $<
	@touch $@

$(CLASSES): $(READY) scripts/spark_archive.py | jdk
	@echo "setup: archiving Spark's classes for the tests"
	@mkdir -p build
	@$(RUN) python scripts/spark_archive.py $@ 2>build/spark-archive.log

# What a failure leaves out is said once; the next make tries again.
$(WRITER): $(wildcard spark_hooks/real_time/*.java) | $(BASE) jdk
	@echo "setup: compiling the writer of Real-Time Mode"
	@$(RUN) python scripts/writer_jar.py || true

# pytest compiles all modules in a new checkout, for half a minute, before it runs the first test: better beside the rest.
$(BYTECODE): $(READY)
	@mkdir -p build
	@SPARKIS_PURE=1 $(RUN) python -m pytest --collect-only >build/collected.log 2>&1 || true
	@touch $@

# A core that could not be compiled is tried again by the next make: the machine may have a compiler then.
$(NATIVE): setup.py $(wildcard */*/*.pyx */*/*.pxd */*/*/*/*.pyx */*/*/*/*.pxd) | $(BASE)
	@sh scripts/native.sh $(VENV)
