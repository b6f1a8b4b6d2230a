#!/bin/sh
# Makes .venv from the lock files: PYTHON=python3.12 scripts/setup.sh
#
# Installs exactly the packages of the lock files, build tools included, and checks the hashes.
# uv installs fast. The slower pip installs if its configuration names an index, or if uv fails.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fail() {
    echo "streamer: $*" >&2
    exit 1
}

is_usable() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

make_environment() {
    "$python" -m venv --clear .venv >/dev/null && return
    # Debian keeps venv in a separate package.
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    install="apt-get install -y python$version-venv"
    command -v apt-get >/dev/null || fail "$python -m venv does not work; install the missing package"
    [ "$(id -u)" = 0 ] || fail "$python cannot make virtual environments; run: sudo $install"
    echo "installing python$version-venv"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq && $install -qq; } >/dev/null || fail "this failed: $install"
    "$python" -m venv --clear .venv
}

if ! is_usable "$python"; then
    found=$("$python" -c 'import sys; print("is %d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        found="is not here"
    fail "needs Python 3.11 or newer, and $python $found; name one: make PYTHON=python3.12 …"
fi
if ! is_usable .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    echo "making .venv"
    make_environment
fi

pip() {
    .venv/bin/python -m pip "$@"
}

echo "installing the packages of requirements-dev.lock"
pip install --quiet --require-hashes --requirement requirements-build.lock
if pip config list | grep -qE 'index-url|no-index|proxy' ||
    ! .venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes \
        --no-build-isolation --requirement requirements-dev.lock; then
    echo "installing with pip, which takes a little longer"
    pip install --quiet --require-hashes --no-build-isolation --requirement requirements-dev.lock
fi
pip install --quiet --no-deps --no-build-isolation --editable .
.venv/bin/python -m scripts.install_postgres
.venv/bin/python -m scripts.install_validators
implementation=$(env -u STREAMER_IMPLEMENTATION .venv/bin/python -c \
    'from streamer.compiled import choice; print(choice.describe())')
[ "$implementation" = compiled ] || echo "streamer uses $implementation"
# Meanwhile pytest compiles the tests. Otherwise each process of `make test` would compile all.
.venv/bin/python -m pytest --collect-only -qq -p no:cacheprovider >/dev/null 2>&1 &
if command -v java >/dev/null || [ -n "${JAVA_HOME:-}" ]; then
    echo "making the class data archive of Spark's JVM"
    .venv/bin/python -m streamer.copy.spark.class_archive --installed >/dev/null
fi
wait # A test that cannot be imported fails in the run itself.
